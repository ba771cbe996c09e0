"""Hostile functions: exceptions whose methods raise or never return, and calls that replace their process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import pipedist
from pipedist.core.remote_errors import METHODS_S_MAX, rebuild_exception
from pipedist.errors import CallError, RemoteError
from tests.runs import hostile_functions


def spec_of(kind: str) -> dict[str, object]:
    return {
        "pipedist": 1,
        "dataset": {"range": 40, "batch": 4},
        "stages": {
            "y": {"run": "tests.runs.hostile_functions:raises", "with": {"kind": kind}},
            "t": {"reduce": "sum", "of": "y", "axis": 0},
        },
    }


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("StrRaises", "<StrRaises whose str() failed: RuntimeError>"),
        ("StrReturnsNumber", "<StrReturnsNumber whose str() failed: TypeError>"),
        ("StrInterrupts", "<StrInterrupts whose str() failed: KeyboardInterrupt>"),
        ("StrExits", "<StrExits whose str() failed: SystemExit>"),
        ("StrHangs", "<StrHangs whose str() takes more than 2 s>"),
        ("ModuleIsNumber", "some text"),
        ("InitHangs", "some text"),
        ("CauseHangs", "some text"),
    ],
)
def test_the_call_fails_with_a_text(kind: str, text: str) -> None:
    with pytest.raises(CallError) as caught:
        pipedist.run(spec_of(kind), workers=1)
    assert f"{kind}: {text} (tried once)" in str(caught.value)
    assert caught.value.step == 2
    str(caught.value.__cause__)


def test_an_exception_that_hangs_in_the_driver_is_replaced() -> None:
    began = time.monotonic()
    error = rebuild_exception(hostile_functions.__name__, "InitHangs", "some text")
    assert isinstance(error, RemoteError)
    assert str(error) == "InitHangs: some text"
    assert time.monotonic() - began < 20 * METHODS_S_MAX


def test_an_exception_of_the_user_is_rebuilt_with_its_class() -> None:
    class Mine(ValueError):
        def __init__(self, text: str) -> None:
            super().__init__(text)

    hostile_functions.Mine = Mine  # type: ignore[attr-defined]
    error = rebuild_exception(hostile_functions.__name__, "Mine", "some text")
    assert type(error) is Mine
    assert str(error) == "some text"


def test_a_function_that_replaces_its_process_loses_its_worker_and_nothing_else(tmp_path: Path) -> None:
    spec = spec_of("StrRaises")
    spec["stages"]["y"] = {  # type: ignore[index]
        "run": "tests.runs.hostile_functions:replaces_its_process_once",
        "with": {"marker": str(tmp_path / "marker")},
    }
    result = pipedist.run(spec, workers=1)
    assert result["t"] == sum(range(40))
    assert result.ledger.lost == 0
