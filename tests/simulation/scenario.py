"""A scenario: events for the scheduler, one after the other, and the commands that each must cause.

After mitmproxy's `test/mitmproxy/proxy/tutils.py`, but executed line by line, so that a failure shows the line of
the test whose event went wrong:

    scenario = Scenario()
    scenario(ev.WorkerExpected("w0"), cmd.StartWorker("w0", 0))
    scenario(ev.WorkerJoined("w0", 0))                              # causes no commands

After each event every invariant of the scheduler is checked, and that its deadline is in the future.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pipedist.scheduler import Command, Event, PassSettings, Scheduler, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev

_HISTORY_LINES_MAX = 60


class ScenarioError(AssertionError):
    """The scheduler did not do what the scenario expects; the text shows the events and the difference."""


class Scenario:
    """Sends events to one scheduler, and compares its commands with the expected ones.

    Args:
        limits: the scheduler's limits; None: the defaults.
        scheduler: an existing scheduler; None: a new one.
    """

    def __init__(self, limits: SchedulerLimits | None = None, scheduler: Scheduler | None = None) -> None:
        self.scheduler = scheduler or Scheduler(limits)
        self.now = 0.0
        """The virtual time of the next event, seconds."""
        self._history: list[str] = []

    def __call__(self, event: Event, *expected: Command) -> list[Command]:
        """Send one event, and expect exactly these commands, in this order.

        Raises:
            ScenarioError: the commands differ, or an invariant does not hold afterwards.
        """
        __tracebackhide__ = True  # a failure shows the line of the test
        actual = self._handle(event)
        if actual != list(expected):
            wanted, got = [repr(c) for c in expected], [repr(c) for c in actual]
            diff = difflib.unified_diff(wanted, got, "expected", "actual", lineterm="", n=100)
            raise self._error("\n".join(diff))
        return actual

    def setup(self, *events: Event) -> list[Command]:
        """Send events whose commands are not checked, and return the commands."""
        return [command for event in events for command in self._handle(event)]

    def at(self, now: float) -> Scenario:
        """Set the time of the next event."""
        self.now = now
        return self

    # -- common beginnings ------------------------------------------------------------------

    def with_workers(self, *names: str) -> Scenario:
        """Add managed workers, incarnation 0."""
        for name in names:
            self.setup(ev.WorkerExpected(name), ev.WorkerJoined(name, 0))
        return self

    def with_pass(self, settings: PassSettings, pass_id: int = 1) -> Scenario:
        """Open a pass."""
        self.setup(ev.PassOpened(pass_id, settings))
        return self

    def _handle(self, event: Event) -> list[Command]:
        self._history.append(f"{self.now:8.3f}  >> {event!r}")
        try:
            commands = self.scheduler.handle(event, self.now)
            self._history.extend(f"{'':10}<< {command!r}" for command in commands)
            self.scheduler.validate()
        except Exception as error:
            error.add_note(self._history_text())
            raise
        deadline = self.scheduler.deadline()
        if isinstance(event, ev.Tick) and deadline is not None and deadline <= self.now:
            raise self._error(
                f"a Tick at {self.now} leaves the deadline at {deadline}, so Ticks would repeat forever"
            )
        return commands

    def _history_text(self) -> str:
        skipped = len(self._history) - _HISTORY_LINES_MAX
        head = [f"... {skipped} lines ..."] if skipped > 0 else []
        return "\n".join(["the events so far:", *head, *self._history[-_HISTORY_LINES_MAX:]])

    def _error(self, what: str) -> ScenarioError:
        return ScenarioError(f"{self._history_text()}\n\n{what}")


def assigns(commands: Iterable[Command]) -> list[cmd.SendAssign]:
    """Return the leases among some commands."""
    return [c for c in commands if isinstance(c, cmd.SendAssign)]
