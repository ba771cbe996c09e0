"""Scenarios of cached results, recalls, and requests to leave."""

from __future__ import annotations

import pytest

from pipedist.errors import LocalProtocolError, RemoteProtocolError
from pipedist.protocol.messages import (
    Assign,
    Bind,
    Cancel,
    Cancelled,
    Committed,
    Goodbye,
    Recall,
    Results,
    Unbind,
)
from pipedist.worker import commands, events
from tests.worker.test_machine import WELCOME, Scenario, execute, raised

KEY = "0" * 32


def keeping() -> Scenario:
    return Scenario(events.Started(), WELCOME, Bind(1, KEY), Bind(2))


def test_results_of_a_pass_with_a_key_are_cached_before_they_are_sent() -> None:
    scenario = Scenario(events.Started(), WELCOME)
    assert scenario.handle(Bind(1, KEY)) == [commands.Apply(Bind(1, KEY))]
    scenario.handle(Bind(2))
    scenario.handle(Assign(7, 1, 0, 3, 0))
    scenario.handle(Assign(8, 2, 0, 1, 0))
    assert scenario.handle(events.CallsFinished(7, 0, 2, 9)) == [
        commands.SendResults(Results(7, 0, 2, 9), cache_pass=1)
    ]
    scenario.handle(raised(7, 2))
    scenario.handle(events.SliceEnded(7))
    assert scenario.handle(events.CallsFinished(8, 0, 1, 9)) == [commands.SendResults(Results(8, 0, 1, 9))]


def test_results_of_partial_calls_are_never_cached() -> None:
    scenario = keeping()
    scenario.handle(Assign(7, 1, 3, 4, 0, 2))
    assert scenario.handle(events.CallsFinished(7, 3, 4, 9)) == [commands.SendResults(Results(7, 3, 4, 9))]


def test_a_recall_is_reported_in_its_turn_and_not_cached_twice() -> None:
    scenario = keeping()
    scenario.handle(Assign(7, 1, 0, 1, 0))
    assert scenario.handle(Recall(8, 1, 4, 9)) == [commands.Apply(Recall(8, 1, 4, 9))]
    scenario.handle(events.CallsFinished(7, 0, 1, 9))
    assert scenario.handle(events.SliceEnded(7)) == [commands.DropLease(7), execute(8, 4, 9)]
    assert scenario.handle(events.CallsFinished(8, 4, 9, 9)) == [commands.SendResults(Results(8, 4, 9, 9))]
    assert scenario.handle(events.SliceEnded(8)) == [commands.DropLease(8)]


def test_recalls_do_not_count_as_leases_that_wait_and_are_cancelled_like_them() -> None:
    scenario = keeping()
    scenario.handle(Recall(7, 1, 0, 1))
    for lease in range(8, 20):
        scenario.handle(Recall(lease, 1, lease, lease + 1))
    for lease in (30, 31):
        scenario.handle(Assign(lease, 2, lease, lease + 1, 0))
    with pytest.raises(RemoteProtocolError, match="more than 2 leases wait"):
        scenario.handle(Assign(32, 2, 32, 33, 0))
    assert scenario.handle(Cancel(9)) == [commands.DropLease(9), commands.Send(Cancelled(9))]
    dropped = scenario.handle(Unbind(1))
    assert dropped[-1] == commands.Execute(30, 2, 30, 31, 0.5, 100)


def test_durable_results_are_released() -> None:
    scenario = keeping()
    assert scenario.handle(Committed(1, 12)) == [commands.Apply(Committed(1, 12))]
    for wrong in (Committed(2, 1), Committed(5, 1), Recall(9, 2, 0, 1), Recall(9, 5, 0, 1)):
        with pytest.raises(RemoteProtocolError, match="but none are cached"):
            keeping().handle(wrong)


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_that_is_asked_to_leave_sends_goodbye(busy: bool) -> None:
    scenario = keeping()
    if busy:
        scenario.handle(Assign(7, 1, 0, 3, 0))
        scenario.handle(Assign(8, 1, 3, 4, 0))
        scenario.handle(events.CallsFinished(7, 0, 1, 9))
    assert scenario.handle(events.LeaveRequested("asked to")) == [
        commands.Send(Goodbye("w0", 2, "asked to")),
        commands.Leave(commands.Ending.STOPPED, "asked to"),
    ]
    with pytest.raises(LocalProtocolError, match="does not expect"):
        scenario.handle(events.LeaveRequested("again"))


def test_a_worker_may_be_asked_to_leave_while_it_joins() -> None:
    """The Welcome may be on its way: the scheduler must hear that it goes."""
    scenario = Scenario(events.Started())
    assert commands.Send(Goodbye("w0", 2, "asked to")) in scenario.handle(events.LeaveRequested("asked to"))
