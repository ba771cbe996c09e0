"""A training of a shipped spec that is killed: its states are journalled version by version."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from pipedist.journal.history import History
from pipedist.journal.log_format import read_log
from pipedist.protocol.codec import decode
from tests.journal.killing import Job
from tests.preloaded import ROOT

EPOCHS = 2
STEPS = 23
"""An epoch's: 1,434 images in batches of 64."""


def digits(folder: Path) -> Job:
    text = (ROOT / "specs" / "digits.yaml").read_text()
    return Job(
        folder, f"{text}\nname: digits\ncode: {ROOT / 'specs'}\n".replace("epochs: 20", f"epochs: {EPOCHS}")
    )


def weights(job: Job, history: History) -> tuple[Any, int]:
    """Return the durable value of the state, and its version: how many updates are in it."""
    part = history.passes["0/train"].parts["state.0.weights"]
    assert part.end is not None
    ((_, frames),) = read_log(job.journal / part.file, part.end)
    value, version = decode(frames)
    return value, version


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = digits(tmp_path_factory.mktemp("undisturbed"))
    assert job.run() == 0, job.stderr
    return job


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_training_that_is_killed_applies_no_update_twice(undisturbed: Job, tmp_path: Path) -> None:
    job = digits(tmp_path)
    killed: list[int] = []
    for flags, kill_at in (((), 9), (("--resume",), STEPS)):
        assert job.run(*flags, kill_at=kill_at) == -signal.SIGKILL, job.stderr
        history = job.history()
        value, version = weights(job, history)
        steps = history.passes["0/train"].steps
        assert version == steps  # one update a step: none is missing, none is in it twice
        assert {*value} == {"w1", "b1", "w2", "b2"}
        killed.append(steps)
    assert 0 < killed[0] < killed[1] < EPOCHS * STEPS
    assert job.run("--resume", workers=1) == 0, job.stderr
    assert weights(job, job.history())[1] == EPOCHS * STEPS
    assert job.outcome() == undisturbed.outcome()
