"""A function is pickled again only where it may have become another one."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipedist.core import functions as travelling
from pipedist.strategy.function_references import FunctionReferences
from pipedist.strategy.variables import CapturedVariables
from tests.strategy import functions


@pytest.fixture
def pickled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the functions that are pickled."""
    labels: list[str] = []
    pickle = travelling._pickled

    def noting(fn: Any, label: str) -> bytes:
        labels.append(label)
        return pickle(fn, label)

    monkeypatch.setattr(travelling, "_pickled", noting)
    return labels


def noted() -> CapturedVariables:
    return CapturedVariables(None, None)  # type: ignore[arg-type]


def capturing(value: Any) -> Callable[[], Any]:
    return lambda: value


def recursive() -> Callable[[int], int]:
    def count(n: int) -> int:
        return count(n - 1) if n else 0

    return count


class Unclear:
    """Nothing is known of its objects."""


@pytest.mark.parametrize(
    "value",
    [
        None,
        1.5,
        "text",
        (1, ("a", b"c")),
        np.float32(2),
        np.arange(4),
        [1, [2]],
        {"a": 1, 2: "b"},
        np,
        Unclear,
        functions.double,
        capturing(3),
        len,
    ],
)
def test_an_unchanged_capture_is_pickled_once(value: Any, pickled: list[str]) -> None:
    references, fn = FunctionReferences(), capturing(value)
    first = references.of(fn, noted())
    assert references.of(fn, noted()) is first
    assert len(pickled) == 1
    assert travelling.load(first, ())() is not None or value is None


@pytest.mark.parametrize(
    "value",
    [
        Unclear(),
        np.zeros(10_000),
        range(3),
        {1, 2},
        [object] * 1000,
        {"a": 1}.get,
        np.zeros(1, [("a", int)])[0],
    ],
)
def test_a_capture_that_may_have_changed_is_pickled_again(value: Any, pickled: list[str]) -> None:
    references, fn = FunctionReferences(), capturing(value)
    for _ in range(2):
        references.of(fn, noted())
    assert len(pickled) == 2


def test_a_changed_capture_is_seen(pickled: list[str]) -> None:
    references = FunctionReferences()
    number, array, nested, table = 1, np.zeros(3), [1, {"a": [2]}], {"x": 1}

    def inner() -> Any:
        return table

    def fn(default: Any = nested) -> Any:
        return number, array.tolist(), default, inner()

    def now() -> Any:
        return travelling.load(references.of(fn, noted()), ())()

    def check(count: int) -> None:
        assert now() == now() == fn()
        assert len(pickled) == count

    check(1)
    number = 2
    check(2)
    array[1] = 5
    check(3)
    nested[1]["a"].append(3)  # type: ignore[index]
    check(4)
    table["y"] = 2
    check(5)
    fn.__defaults__ = ("other",)
    check(6)
    fn.__code__ = fn.__code__.replace(co_firstlineno=7)
    check(7)


def test_a_changed_global_is_seen(pickled: list[str]) -> None:
    module = types.ModuleType("__main__")
    exec(
        "factor = 2\ndef helper(x):\n    return factor * x\ndef fn(x):\n    return helper(x)", module.__dict__
    )
    references = FunctionReferences()
    assert travelling.load(references.of(module.fn, noted()), ())(3) == 6
    references.of(module.fn, noted())
    assert len(pickled) == 1
    module.factor = 3  # type: ignore[attr-defined]
    assert travelling.load(references.of(module.fn, noted()), ())(3) == 9
    assert len(pickled) == 2


def test_a_function_with_a_name_is_never_pickled(pickled: list[str]) -> None:
    references = FunctionReferences()
    for _ in range(2):
        assert references.of(functions.double, noted()).name == "tests.strategy.functions:double"
    assert references.of(max, noted()).name == "builtins:max"
    assert pickled == []
    assert "tests.strategy.functions" in sys.modules


def test_references_of_collected_functions_are_dropped() -> None:
    references = FunctionReferences()
    references.of(capturing(1), noted())
    references.of(recursive(), noted())
    gc.collect()
    assert len(references._cached) == 0


def test_what_can_not_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="can't be called"):
        FunctionReferences().of(3, noted())  # type: ignore[arg-type]
