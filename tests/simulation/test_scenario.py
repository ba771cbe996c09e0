"""Scenarios: the error when the scheduler does something else."""

from __future__ import annotations

import pytest

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import PassSettings, Scheduler
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.scenario import Scenario, ScenarioError


def test_a_scenario() -> None:
    play = Scenario().with_workers("w0").with_pass(PassSettings(1, pulled=False))
    play(
        ev.StepsAvailable(1, 0, 1, 1),
        cmd.SendBind("w0", 1),
        cmd.SendAssign("w0", 1, 1, 0, 1, 0),
    )


def test_a_difference_is_shown_with_the_events() -> None:
    play = Scenario()
    play.setup(ev.WorkerExpected("w0"))
    with pytest.raises(ScenarioError) as caught:
        play(ev.WorkerExpected("w1"), cmd.StartWorker("w1", 7))
    text = str(caught.value)
    assert ">> WorkerExpected(worker='w0')" in text
    assert "-StartWorker(worker='w1', incarnation=7)" in text
    assert "+StartWorker(worker='w1', incarnation=0)" in text


def test_a_tick_that_repeats_forever() -> None:
    class AlwaysDue(Scheduler):
        def deadline(self) -> float | None:
            return 0.0

    with pytest.raises(ScenarioError, match="repeat forever"):
        Scenario(scheduler=AlwaysDue())(ev.Tick())


def test_an_invariant_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Scheduler) -> None:
        raise LocalProtocolError("broken")

    monkeypatch.setattr(Scheduler, "validate", broken)
    with pytest.raises(LocalProtocolError) as caught:
        Scenario().setup(ev.WorkerExpected("w0"))
    assert "the events so far" in caught.value.__notes__[0]
