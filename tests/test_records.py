"""A record is what dataclass(frozen=True, slots=True) would have made of the class."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.records import record


@record
class Mark:
    """A record."""

    step: int
    name: str = "none"
    tags: tuple[int, ...] = ()

    @property
    def next(self) -> int:
        return self.step + 1


@dataclass(frozen=True, slots=True)
class Model:
    """The same as a dataclass."""

    step: int
    name: str = "none"
    tags: tuple[int, ...] = ()


@record
class Nothing:
    """Without fields."""


@record
class One:
    """With one."""

    value: object


@record
class Positive:
    """Which looks at its values."""

    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise ValueError("negative")


Values = st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.tuples(st.integers(0, 1)))


@given(Values, Values)
def test_it_compares_hashes_and_prints_as_a_dataclass(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    assert (Mark(*a) == Mark(*b)) == (Model(*a) == Model(*b))
    assert (hash(Mark(*a)) == hash(Mark(*b))) == (a == b)
    assert repr(Mark(*a)) == repr(Model(*a)).replace("Model", "Mark")
    assert dataclasses.asdict(Mark(*a)) == dataclasses.asdict(Model(*a))


def test_defaults_and_keywords() -> None:
    assert Mark(1) == Mark(step=1, name="none", tags=())
    assert Mark(1, tags=(2,)).tags == (2,)
    assert Mark(1).next == 2
    for wrong in ((), (1, 2, 3, 4)):
        with pytest.raises(TypeError, match=r"Mark.__init__\(\)"):
            Mark(*wrong)
    with pytest.raises(TypeError, match="unexpected keyword"):
        Mark(1, nam="x")  # type: ignore[call-arg]


def test_other_classes_are_never_equal() -> None:
    assert Nothing() == Nothing()
    assert hash(Nothing()) == hash(Nothing())
    assert Mark(1) != Model(1)
    assert One(1) != 1
    nan = float("nan")
    assert One(nan) == One(nan), "as tuples compare"


def test_it_is_frozen() -> None:
    made = Mark(1)
    for change in (lambda: setattr(made, "step", 2), lambda: setattr(made, "other", 2)):
        with pytest.raises(dataclasses.FrozenInstanceError, match="a Mark is frozen"):
            change()
    with pytest.raises(dataclasses.FrozenInstanceError):
        del made.step  # type: ignore[misc]
    assert not hasattr(made, "__dict__")


def test_it_is_taken_for_a_dataclass() -> None:
    assert [f.name for f in dataclasses.fields(Mark)] == ["step", "name", "tags"]
    assert dataclasses.replace(Mark(1), name="x") == Mark(1, "x")  # type: ignore[type-var]
    match Mark(1, "x"):
        case Mark(step, name):
            assert (step, name) == (1, "x")


@pytest.mark.parametrize("made", [Mark(1, "x"), One([1]), Nothing(), Positive(1)])
def test_it_is_copied_and_pickled(made: object) -> None:
    assert copy.copy(made) == made
    assert copy.deepcopy(made) == made
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_record_looks_at_its_values() -> None:
    with pytest.raises(ValueError, match="negative"):
        Positive(-1)


def test_what_it_can_not_be_is_said() -> None:
    class Base:
        a: int

    class Listed:
        a: list[int] = field(default_factory=list)

    class Hidden:
        a: int = field(repr=False)

    class Named:
        a: int = field(kw_only=True)

    for cls in (Listed, Hidden, Named, type("Derived", (record(Base),), {"__annotations__": {"b": "int"}})):
        with pytest.raises(TypeError, match="is no record: make it a dataclass"):
            record(cls)


def test_its_signature_is_shown_before_there_is_an_object() -> None:
    @record
    class Fresh:
        step: int
        name: str = "none"

    assert str(inspect.signature(Fresh)) == str(inspect.signature(Model)).replace(
        ", tags: 'tuple[int, ...]' = ()) -> None", ")"
    )
