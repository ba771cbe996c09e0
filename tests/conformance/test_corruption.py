"""Rules replace a recorded result only if it is what they tell of TensorFlow; see also test_more_cases."""

from __future__ import annotations

import pytest

from tests.conformance.cases import Case, Deviation, Json, Outcome, Raised, Value, parse_case
from tests.conformance.corruption import Corruptions
from tests.conformance.deviations import REDUCE
from tests.conformance.families import Family
from tests.conformance.runner import Verdict, expectation
from tests.conformance.session import Session


async def unused(case: Case, session: Session) -> Outcome:
    raise AssertionError("the outcome is known")


def integers(expect: Json, data: list[int], dtype: str = "int32") -> Case:
    array = {"dtype": dtype, "shape": [len(data)], "data": data}
    value = {"per_replica": [array, array]}
    call = {"op": "reduce", "reduce_op": "SUM", "axis": None, "value": value}
    strategy = {"kind": "mirrored", "replicas": 2}
    entry = {"id": "x", "group": "g", "title": "t", "strategy": strategy, "call": call, "expect": expect}
    return parse_case("reduce", entry)


def test_a_rule_that_replaces_whatever_differs_lets_corruptions_pass() -> None:
    case = integers({"value": {"py": 3}}, [1])
    lenient = Deviation("lenient", 1, lambda case, recorded: {"value": {"py": 3}})
    family = Family("reduce", unused, (lenient,))
    corrupted = Corruptions()
    corrupted.add(Verdict(case, "passed", replayed=Outcome(Value(3))), family, seed=1)
    assert corrupted.unnoticed
    assert all("by lenient" in text for text in corrupted.unnoticed)


@pytest.mark.parametrize(
    ("told", "replaced"),
    [
        ([144, 2], True),  # 400 and 2 wrap to these in uint8
        ([145, 2], False),
        ([144, 3], False),
    ],
)
def test_an_overflow_is_explained_by_the_wrapped_sum_alone(told: list[int], replaced: bool) -> None:
    case = integers({"value": {"dtype": "uint8", "shape": [2], "data": told}}, [200, 1], "uint8")
    expected, _, names = expectation(case, REDUCE)
    assert (expected == {"error": "OverflowError"}) is replaced
    assert bool(names) is replaced


@pytest.mark.parametrize("error", ["ValueError", "BufferError"])
def test_a_recorded_error_that_tensorflow_does_not_raise_there_stays(error: str) -> None:
    recorded = {"error": error, "message": ""}
    assert expectation(integers(recorded, [1, 2]), REDUCE) == (recorded, None, ())


def test_failed_cases_are_not_corrupted() -> None:
    corrupted = Corruptions()
    failed = Verdict(integers({}, [1]), "failed", replayed=Outcome(Raised(ValueError())))
    corrupted.add(failed, Family("reduce", unused, ()), seed=1)
    assert corrupted == Corruptions()
