"""The cost of an event: the same with 100 and with 1,000 workers."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from pipedist.scheduler import PassSettings, Scheduler
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev


def test_an_event_costs_the_same_with_a_thousand_workers() -> None:
    small, large = Crowd(100, 1_000), Crowd(1_000, 10_000)
    assert small.run() == 1_000
    assert large.run() == 10_000
    assert large.lines_per_event < 1.3 * small.lines_per_event
    assert large.commands_per_call < 4
    assert large.lines_max < 4 * small.lines_max


class Crowd:
    """Many workers, calls of a second each, no faults; counts lines of Python instead of time."""

    replicas = 10

    def __init__(self, workers: int, calls: int) -> None:
        self.scheduler = Scheduler()
        self.calls = calls
        self.workers = workers
        self.lines: list[int] = []
        self.commands = 0
        self._leases: list[cmd.SendAssign] = []

    def run(self) -> int:
        """Return the number of accepted calls."""
        settings = PassSettings(self.replicas)
        accepted = offered = 0
        todo: list[ev.Event] = [ev.PassOpened(1, settings)]
        for i in range(self.workers):
            todo += [ev.WorkerExpected(f"w{i}"), ev.WorkerJoined(f"w{i}", 0)]
        turn = 0
        while todo or self._leases:
            turn += 1
            for command in self._handle(todo.pop(0) if todo else self._report(turn), counted=turn % 20 == 0):
                match command:
                    case cmd.SendAssign():
                        self._leases.append(command)
                    case cmd.AcceptResults(_, lo, hi):
                        accepted += hi - lo
                    case cmd.StepsReady(_, _, last):
                        todo.append(ev.StepsConsumed(1, last))
                    case cmd.RequestSteps(_, count):
                        last = min(offered + count, self.calls // self.replicas)
                        if last > offered:
                            todo.append(ev.StepsAvailable(1, offered, last, self.replicas))
                        offered = last
        self.scheduler.validate()
        return accepted

    def _report(self, turn: int) -> ev.Event:
        """Report one of the running leases, in a scattered order; every tenth call raises once."""
        place = turn * 7919 % len(self._leases)
        self._leases[place], self._leases[-1] = self._leases[-1], self._leases[place]
        lease = self._leases.pop()
        if lease.attempt == 0 and lease.lo % 10 == 3:
            return ev.CallFailed(lease.worker, 0, lease.lease, lease.lo, retries=1)
        return ev.CallsDone(lease.worker, 0, lease.lease, lease.lo, lease.hi, 10**9)

    def _handle(self, event: ev.Event, *, counted: bool) -> list[cmd.Command]:
        lines = 0

        def trace(frame: FrameType, what: str, argument: object) -> Any:
            nonlocal lines
            lines += what == "line"
            return trace

        before = sys.gettrace()
        if counted:
            sys.settrace(trace)
        try:
            commands = self.scheduler.handle(event, 0.0)
        finally:
            sys.settrace(before)
        if counted and isinstance(event, ev.CallsDone | ev.CallFailed):
            self.lines.append(lines)
        self.commands += len(commands)
        return commands

    @property
    def lines_per_event(self) -> float:
        return sum(self.lines) / len(self.lines)

    @property
    def lines_max(self) -> int:
        return max(self.lines)

    @property
    def commands_per_call(self) -> float:
        return self.commands / self.calls
