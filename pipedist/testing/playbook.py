"""A playbook: events for the scheduler, one after the other, and the commands that each must cause.

After mitmproxy's `test/mitmproxy/proxy/tutils.py`, but played line by line, so that the line of
the test that fails is the line of the story that goes wrong:

    play = Playbook()
    play(ev.WorkerExpected("w0"), cmd.StartWorker("w0", 0))
    play(ev.WorkerJoined("w0", 0))                              # causes nothing

After each event every invariant of the scheduler is checked, and that its deadline lies ahead.
"""

from __future__ import annotations

import difflib

from pipedist.scheduler import Command, Event, PassSettings, Scheduler, SchedulerLimits
from pipedist.scheduler import events as ev

_STORY_LINES_MAX = 60


class PlaybookError(AssertionError):
    """The scheduler did not do what the playbook says; the text shows the story and the difference."""


class Playbook:
    """Plays events to one scheduler and compares what it wants done with what it should.

    Args:
        limits: the scheduler's; its defaults if None.
        scheduler: one that has lived already, instead of a fresh one.
    """

    def __init__(self, limits: SchedulerLimits | None = None, scheduler: Scheduler | None = None) -> None:
        self.scheduler = scheduler or Scheduler(limits)
        self.now = 0.0
        """The virtual time at which the next event happens, seconds."""
        self._story: list[str] = []

    def __call__(self, event: Event, *expected: Command) -> list[Command]:
        """Play one event, and expect exactly these commands, in this order.

        Raises:
            PlaybookError: if others came, or an invariant does not hold afterwards.
        """
        __tracebackhide__ = True  # of a test that fails, what the test says is of interest
        came = self._play(event)
        if came != list(expected):
            wanted, got = [repr(c) for c in expected], [repr(c) for c in came]
            diff = difflib.unified_diff(wanted, got, "expected", "came", lineterm="", n=100)
            raise self._error("\n".join(diff))
        return came

    def setup(self, *events: Event) -> list[Command]:
        """Play events whose commands are not this test's matter, and return what came."""
        return [command for event in events for command in self._play(event)]

    def at(self, now: float) -> Playbook:
        """Let time pass: the next event happens at `now`."""
        self.now = now
        return self

    # -- a few scenes that most stories begin with -----------------------------------------

    def with_workers(self, *names: str) -> Playbook:
        """Let workers of the launcher join, incarnation 0."""
        for name in names:
            self.setup(ev.WorkerExpected(name), ev.WorkerJoined(name, 0))
        return self

    def with_pass(self, settings: PassSettings, pass_id: int = 1) -> Playbook:
        """Open a pass."""
        self.setup(ev.PassOpened(pass_id, settings))
        return self

    def _play(self, event: Event) -> list[Command]:
        self._story.append(f"{self.now:8.3f}  >> {event!r}")
        try:
            came = self.scheduler.handle(event, self.now)
            self._story.extend(f"{'':10}<< {command!r}" for command in came)
            self.scheduler.validate()
        except Exception as error:
            error.add_note(self._told())
            raise
        deadline = self.scheduler.deadline()
        if isinstance(event, ev.Tick) and deadline is not None and deadline <= self.now:
            raise self._error(
                f"a Tick at {self.now} leaves the deadline at {deadline}: it would ring for ever"
            )
        return came

    def _told(self) -> str:
        skipped = len(self._story) - _STORY_LINES_MAX
        head = [f"... {skipped} lines ..."] if skipped > 0 else []
        return "\n".join(["the story so far:", *head, *self._story[-_STORY_LINES_MAX:]])

    def _error(self, what: str) -> PlaybookError:
        return PlaybookError(f"{self._told()}\n\n{what}")
