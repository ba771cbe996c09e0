"""The effect of second attempts: calls that are twenty times slower do not delay the end of a pass."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import pytest

from pipedist.scheduler import PassSettings, Scheduler, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev

CALLS = 100


class IdealWorkers:
    """Workers without faults, in virtual time; counts the executed calls.

    Args:
        took_s: how long the n-th execution of a call takes.
    """

    def __init__(self, workers: int, speculation: float, took_s: Callable[[int, int], float]) -> None:
        self.scheduler = Scheduler(SchedulerLimits(bundle_s=0.001, prefetch_below_s=0.0))
        self.now = 0.0
        self.executed = dict.fromkeys(range(CALLS), 0)
        self.over_at = 0.0
        self._took_s = took_s
        self._order = 0
        self._due: list[tuple[float, int, ev.Event]] = []
        for i in range(workers):
            self._handle(ev.WorkerExpected(f"w{i}"))
            self._handle(ev.WorkerJoined(f"w{i}", 0))
        self._handle(ev.PassOpened(1, PassSettings(1, pulled=False, speculation=speculation)))
        self._handle(ev.StepsAvailable(1, 0, CALLS, 1))
        self._handle(ev.StepsEnded(1))

    def run(self) -> float:
        """Return when the pass is complete, seconds."""
        while not self.over_at:
            deadline = self.scheduler.deadline()
            if deadline is not None and (not self._due or deadline < self._due[0][0]):
                self.now = deadline
                self._handle(ev.Tick())
                continue
            self.now, _, event = heapq.heappop(self._due)
            self._handle(event)
            if isinstance(event, ev.CallsDone):  # like a worker, which reads messages after a report
                self._handle(ev.CancelConfirmed(event.worker, 0, event.lease))
        return self.over_at

    def _handle(self, event: ev.Event) -> None:
        commands = self.scheduler.handle(event, self.now)
        self.scheduler.validate()
        for command in commands:
            match command:
                case cmd.SendAssign(worker=worker, lease=lease, lo=call):
                    took_s = self._took_s(call, self.executed[call])
                    self.executed[call] += 1
                    self._order += 1
                    done = ev.CallsDone(worker, 0, lease, call, call + 1, int(took_s * 1e9))
                    heapq.heappush(self._due, (self.now + took_s, self._order, done))
                case cmd.PassComplete():
                    self.over_at = self.now


def slow_at(*calls: int, always: bool = False) -> Callable[[int, int], float]:
    return lambda call, before: 20.0 if call in calls and (always or not before) else 1.0


@pytest.mark.parametrize("slow", [(97,), (3,), (95, 96, 97)])
def test_a_call_that_is_slow_once_does_not_delay_the_pass(slow: tuple[int, ...]) -> None:
    off, on = IdealWorkers(5, 0.0, slow_at(*slow)), IdealWorkers(5, 2.0, slow_at(*slow))
    on.run()
    off.run()
    assert sum(off.executed.values()) == CALLS
    if max(slow) > 50:  # at the end, no other calls remain
        assert on.over_at < 0.7 * off.over_at
        assert CALLS < sum(on.executed.values()) <= CALLS + len(slow)
    else:  # in the middle, other calls fill the time
        assert on.over_at <= off.over_at


def test_a_call_that_is_always_slow_costs_one_more_execution_but_no_time() -> None:
    off, on = IdealWorkers(5, 0.0, slow_at(97, always=True)), IdealWorkers(5, 2.0, slow_at(97, always=True))
    assert on.run() == off.run()
    assert sum(on.executed.values()) == CALLS + 1


def test_calls_of_similar_duration_are_not_executed_twice() -> None:
    shop = IdealWorkers(7, 1.5, lambda call, before: 1.0 + 0.3 * (call % 5) / 5)
    shop.run()
    assert set(shop.executed.values()) == {1}
