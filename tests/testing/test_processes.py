from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipedist.errors import UsageError
from pipedist.testing import ProcessesFailed, run_in_processes


def doubled(x: int, worker: int) -> dict[str, object]:
    print("out", worker)
    print("err", worker, file=sys.stderr)
    return {"pid": os.getpid(), "rows": np.arange(worker) * x}


def misbehaves(worker: int) -> int:
    print("worker", worker, flush=True)
    if worker == 1:
        raise ValueError("one is bad")
    if worker == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if worker == 3:
        os._exit(7)
    return worker


def hangs(worker: int, begun: str) -> int:
    if worker == 0:
        return 10
    print("hanging", flush=True)
    Path(begun).touch()
    time.sleep(600)
    return 11


def test_values_and_output_of_each() -> None:
    outcomes = run_in_processes(doubled, workers=3, args=[2])
    assert [x.worker for x in outcomes] == [0, 1, 2]
    assert len({x.value["pid"] for x in outcomes} - {os.getpid()}) == 3
    assert np.array_equal(outcomes[2].value["rows"], [0, 2])
    assert (outcomes[1].stdout, outcomes[1].stderr) == ("out 1\n", "err 1\n")
    assert all(x.ok for x in outcomes)


def test_a_function_without_a_name() -> None:
    assert [x.value for x in run_in_processes(lambda worker: worker + 1, workers=2)] == [1, 2]


def test_a_built_in_function_without_a_signature() -> None:
    assert [x.value for x in run_in_processes(max, workers=2, args=[1, 2])] == [2, 2]


def test_a_failure_contains_all_outcomes() -> None:
    with pytest.raises(ProcessesFailed) as caught:
        run_in_processes(misbehaves, workers=4)
    good, raised, killed, left = caught.value.outcomes
    assert (good.value, good.ok) == (0, True)
    assert raised.exception == "ValueError: one is bad"
    assert "in misbehaves" in raised.traceback
    assert (killed.signal, killed.exit_code, killed.stdout) == (signal.SIGKILL, None, "worker 2\n")
    assert (left.exit_code, left.signal) == (7, None)
    text_of_error = str(caught.value)
    for text in ("3 of 4 processes failed", "one is bad", "signal 9 (SIGKILL)", "exit code 7"):
        assert text in text_of_error


def test_a_process_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"
    looks = itertools.count()

    def monotonic() -> float:
        """The time passes when the first process has ended, and the second one hangs."""
        if next(looks) < 2:
            return 0.0
        while not begun.exists():
            time.sleep(0.01)
        return 60.0

    monkeypatch.setattr("pipedist.testing.processes.time", SimpleNamespace(monotonic=monotonic))
    outcomes = run_in_processes(hangs, workers=2, kwargs={"begun": str(begun)}, check=False)
    assert (outcomes[0].value, outcomes[0].ok) == (10, True)
    assert outcomes[1].timed_out
    assert not outcomes[1].ok
    assert outcomes[1].stdout == "hanging\n"


def test_the_timeout_applies_to_all_processes() -> None:
    outcomes = run_in_processes(time.sleep, workers=2, args=[600], timeout_s=0.1, check=False)
    assert [x.timed_out for x in outcomes] == [True, True]


def test_a_result_that_cannot_be_sent() -> None:
    (outcome,) = run_in_processes(lambda: {1, 2}, workers=1, check=False)
    assert "UnsendableError" in outcome.exception


@pytest.mark.parametrize("workers", [0, True, 1000])
def test_the_number_of_processes_is_checked(workers: int) -> None:
    with pytest.raises(UsageError, match="must be an integer from 1 to 256"):
        run_in_processes(doubled, workers=workers)
