"""Those who open the passes of a simulation, offer their steps, and read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipedist.scheduler import Command
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.testing.workloads import Work

if TYPE_CHECKING:
    from pipedist.testing.simulation import Simulation

FEED_S = 0.05
"""How long steps take to be offered, and to be read, at most."""


class SimulatedReaders:
    """Offers steps as they are wanted, and consumes what is visible.

    Args:
        world: that they live in.
    """

    def __init__(self, world: Simulation) -> None:
        self._world = world
        self.open = 0
        """Passes that are not closed."""
        self._offering: set[int] = set()
        """Passes of which steps are about to be offered."""
        self._visible_steps: dict[int, list[tuple[int, int]]] = {}
        """Ranges of steps that are visible, and about to be read, by pass."""

    def begin(self, work: Work) -> None:
        """Open a pass."""
        self.open += 1
        self._world.hub.handle(ev.PassOpened(work.id, work.settings))
        if not work.settings.pulled:
            work.requested = work.steps
            self._offer_soon(work)

    def hold(self, work: Work) -> None:
        """Let nothing more of a pass be issued."""
        if not work.is_closed and not work.end:
            work.is_held = True
            self._world.hub.handle(ev.PassDraining(work.id))

    def leave(self, work: Work) -> None:
        """Close a pass before its end."""
        if not work.is_closed:
            work.end = work.end or "closed"
            self._close(work)

    def _soon(self, action: object, *args: object) -> None:
        time = self._world.time
        time.at(time.now + FEED_S * self._world.random.random(), action, *args)  # type: ignore[arg-type]

    def tell(self, command: Command) -> None:
        """Take note of what a pass's reader is told."""
        match command:
            case cmd.RequestSteps(pass_id, count):
                work = self._world.works[pass_id]
                before, work.requested = work.requested, work.requested + count
                if work.offered <= before < work.steps:
                    self._offer_soon(work)
            case cmd.StepsReady(pass_id, first, last):
                self._visible(self._world.works[pass_id], first, last)
            case cmd.StepFailed(pass_id, step):
                work = self._world.works[pass_id]
                if work.settings.fail_fast:
                    work.end = "failed"
                    self._soon(self._close, work)
                else:
                    self._visible(work, step, step + 1)
            case cmd.PassComplete(pass_id):
                work = self._world.works[pass_id]
                work.end = work.end or "complete"
                self._soon(self._close, work)
            case cmd.PassDrained(pass_id):
                work = self._world.works[pass_id]
                work.end = work.end or "quiet"
                self._soon(self._close, work)

    def _offer_soon(self, work: Work) -> None:
        if work.id not in self._offering:
            self._offering.add(work.id)
            self._soon(self._offer, work)

    def _offer(self, work: Work) -> None:
        self._offering.discard(work.id)
        first, last = work.offered, min(work.requested, work.steps)
        if work.is_closed or last <= first:
            return
        hub, parts = self._world.hub, work.parts
        while first < last:
            end = first + 1
            while end < last and parts[end] == parts[first]:
                end += 1
            work.offered = end
            size = (end - first) * work.step_bytes
            hub.books.offered(work.id, end - first)
            hub.handle(ev.StepsAvailable(work.id, first, end, parts[first], size))
            first = end
        if work.offered == work.steps and work.settings.ordered:
            self._soon(self._end, work)

    def _end(self, work: Work) -> None:
        if not work.is_closed:
            self._world.hub.handle(ev.StepsEnded(work.id))

    def _visible(self, work: Work, first: int, last: int) -> None:
        waiting = self._visible_steps.setdefault(work.id, [])
        if not waiting:
            self._soon(self._consume, work)
        waiting.append((first, last))

    def _consume(self, work: Work) -> None:
        """Read all that is visible, at once."""
        if work.is_closed:
            return
        books, steps = self._world.hub.books, self._visible_steps.pop(work.id)
        size = sum([books.take(work.id, first, last) for first, last in steps])
        work.consumed = last = max(work.consumed, *[last for _, last in steps])
        self._world.hub.handle(ev.StepsConsumed(work.id, last, size))
        if not work.settings.ordered and books.all_told(work):
            work.end = work.end or "complete"
            self._soon(self._close, work)

    def _close(self, work: Work) -> None:
        if not work.is_closed:
            work.is_closed = True
            self.open -= 1
            self._world.hub.handle(ev.PassClosed(work.id))
