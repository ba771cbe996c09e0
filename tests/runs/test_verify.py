"""`pipedist run --verify`: every call is executed twice, and a function that gives two results is found."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.errors import CallError
from pipedist.worker.verification import Digests, digests_of
from tests.preloaded import run_module

ROOT = Path(__file__).parents[2]
F = "tests.runs.unsteady_functions"


def spec(run: str, replicas: int = 2, **keys: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "verified",
        "replicas": replicas,
        "dataset": {"range": 16, "batch": 8},
        "stages": {"y": {"run": f"{F}:{run}", **keys}, "rows": {"reduce": "sum", "of": "y", "axis": None}},
    }


@pytest.mark.parametrize(
    ("run", "place"),
    [
        ("clock", "at 'at/1' in its value"),
        ("draws", "in its value:"),
        ("counts", "in its value:"),
        ("Remembers", "in its value:"),
        ("shapes", r"\[\*\] and then \(\*,\)|\(\*,\) and then \[\*\]"),
        ("reuses", "in its value:"),
    ],
)
def test_a_function_that_is_not_deterministic_fails_the_run(run: str, place: str) -> None:
    with pytest.raises(CallError, match=place) as caught:
        pipedist.run(spec(run, retries=3, on_error="quarantine"), workers=2, verify=True)
    error = caught.value
    assert (error.stage, error.step, error.replica, error.attempts) == ("y", 0, 0, 1)
    assert error.cause.startswith("NonDeterministicError: two executions of this call gave different results")
    assert "not deterministic in (shard, with, ctx)" in str(error)
    assert "random numbers that do not come from ctx.rng" in str(error)


def test_without_verify_nothing_is_executed_twice() -> None:
    assert pipedist.run(spec("clock"), workers=1)["rows"] is not None


def test_the_stage_of_a_chain_that_differs_is_named() -> None:
    document = spec("hides")
    document["stages"] |= {
        "z": {"run": f"{F}:reveals", "of": "y"},
        "w": {"run": f"{F}:late", "of": "z"},
        "rows": {"gather": 0, "of": "z"},
        "times": {"reduce": "max", "of": "w", "axis": None},
    }
    with pytest.raises(CallError) as caught:
        pipedist.run(document, workers=1, verify=True)
    assert caught.value.stage == "w"


def test_a_deterministic_run_gives_what_it_gives_without(tmp_path: Path) -> None:
    once = pipedist.run(spec("steady"), workers=2)
    twice = pipedist.run(spec("steady"), workers=2, verify=True)
    assert once["rows"]["x"].tobytes() == twice["rows"]["x"].tobytes()
    assert once.ledger == twice.ledger


def test_gangs_are_verified_too() -> None:
    keys = {"replicas": 3, "collectives": True}
    assert pipedist.run(spec("together", **keys), workers=2, verify=True)["rows"] is not None
    with pytest.raises(CallError) as caught:
        pipedist.run(spec("together_not", **keys), workers=2, verify=True)
    assert (caught.value.step, caught.value.replica) == (1, 1)


def test_combine_functions_and_updates_are_verified_too() -> None:
    combined = spec("steady")
    combined["stages"] = {"n": {"reduce": f"{F}:merge", "of": "dataset"}}
    with pytest.raises(CallError, match="NonDeterministicError") as caught:
        pipedist.run(combined, workers=1, verify=True)
    assert caught.value.stage == "n"
    updated = spec("steady")
    updated["stages"] = {
        "t": {"reduce": "sum", "of": "dataset", "per": "step", "axis": 0},
        "s": {"update": f"{F}:moved", "of": "t", "init": 0.5},
    }
    with pytest.raises(CallError, match="NonDeterministicError") as caught:
        pipedist.run(updated, workers=1, verify=True)
    assert caught.value.stage == "s"


def test_the_command_reports_the_verification(tmp_path: Path) -> None:
    def run(document: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        (tmp_path / "spec.yaml").write_text(json.dumps({**document, "code": str(ROOT)}))
        return run_module("pipedist", "run", "spec.yaml", "--verify", "--workers", "2", cwd=tmp_path)

    done = run(spec("steady"))
    assert done.returncode == 0, done.stderr
    assert "pipedist: every call was executed twice in one process, with equal results. " in done.stderr
    assert "Run again with other --workers and another --output, and compare the files\n" in done.stderr
    done = run(spec("clock"))
    assert done.returncode == 1
    assert "stage y, step 0, replica 0, worker w" in done.stderr
    assert "at 'at/1' in its value" in done.stderr


def test_a_digest_is_of_the_value_as_it_is_now() -> None:
    x = np.arange(4)
    before = digests_of({"a": x, "b": [1, b"2", None]})
    assert digests_of({"a": np.arange(4), "b": [1, b"2", None]}) == before
    x[0] = 9
    now = digests_of({"a": x, "b": [1, b"2", None]})
    assert [path for path in now.leaves if now.leaves[path] != before.leaves[path]] == ["a"]
    assert digests_of(object()) == Digests({}, "*")
    assert digests_of(np.float32(1)) != digests_of(np.float64(1))
