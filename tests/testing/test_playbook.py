"""The playbook: what it says when the scheduler does something else."""

from __future__ import annotations

import pytest

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import PassSettings, Scheduler
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.testing import Playbook, PlaybookError


def test_a_story() -> None:
    play = Playbook().with_workers("w0").with_pass(PassSettings(1, pulled=False))
    play(
        ev.StepsAvailable(1, 0, 1, 1),
        cmd.SendBind("w0", 1),
        cmd.SendAssign("w0", 1, 1, 0, 1, 0),
    )


def test_a_difference_is_shown_with_the_story() -> None:
    play = Playbook()
    play.setup(ev.WorkerExpected("w0"))
    with pytest.raises(PlaybookError) as caught:
        play(ev.WorkerExpected("w1"), cmd.StartWorker("w1", 7))
    told = str(caught.value)
    assert ">> WorkerExpected(worker='w0')" in told
    assert "-StartWorker(worker='w1', incarnation=7)" in told
    assert "+StartWorker(worker='w1', incarnation=0)" in told


def test_a_tick_that_would_ring_for_ever() -> None:
    class Rings(Scheduler):
        def deadline(self) -> float | None:
            return 0.0

    with pytest.raises(PlaybookError, match="ring for ever"):
        Playbook(scheduler=Rings())(ev.Tick())


def test_an_invariant_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Scheduler) -> None:
        raise LocalProtocolError("broken")

    monkeypatch.setattr(Scheduler, "validate", broken)
    with pytest.raises(LocalProtocolError) as caught:
        Playbook().setup(ev.WorkerExpected("w0"))
    assert "the story so far" in caught.value.__notes__[0]
