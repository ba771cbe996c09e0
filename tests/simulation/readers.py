"""The readers of a simulation's passes: they open the passes, offer their steps, and consume them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipedist.scheduler import Command
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.reference_model import PassRecord
from tests.simulation.workloads import Workload

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

READER_S_MAX = (0.05, 0.05, 1.0)
"""Longest times until requested steps are offered, and until visible steps are consumed; one is drawn."""


class Readers:
    """Offers steps when they are requested, and consumes the visible ones.

    Args:
        simulation: the simulation.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.within_s = simulation.random.choice(READER_S_MAX)
        """The longest time until steps are offered or consumed."""
        self.open = 0
        """Number of passes that are not closed."""
        self._offering: set[int] = set()
        """Passes whose steps are about to be offered."""
        self._visible_steps: dict[int, list[tuple[int, int]]] = {}
        """Ranges of visible steps that are about to be consumed, by pass."""

    def begin(self, work: Workload) -> None:
        """Open a pass."""
        self.open += 1
        self._simulation.driver.handle(ev.PassOpened(work.id, work.settings))
        if not work.settings.pulled:
            self._record(work.id).requested = 1 if self._is_loop(work) else work.steps
            self._offer_soon(work.id)

    def drain(self, work: Workload) -> None:
        """Drain a pass."""
        record = self._record(work.id)
        if not record.is_closed and not record.end:
            self._simulation.driver.handle(ev.PassDraining(work.id))

    def leave(self, work: Workload) -> None:
        """Close a pass before its end."""
        self._close(work.id)

    def handle(self, command: Command) -> None:
        """Execute a command for the reader of a pass."""
        match command:
            case cmd.RequestSteps(pass_id):
                self._offer_soon(pass_id)
            case cmd.StepsReady(pass_id, first, last):
                self._visible(pass_id, first, last)
            case cmd.StepFailed(pass_id, step):
                if self._record(pass_id).work.settings.ordered:
                    self._soon(self._close, pass_id)
                else:
                    self._visible(pass_id, step, step + 1)
            case cmd.PassComplete(pass_id) | cmd.PassDrained(pass_id):
                self._soon(self._close, pass_id)

    @staticmethod
    def _is_loop(work: Workload) -> bool:
        """Whether each step is offered when the one before it is over, as in a training loop."""
        return work.settings.gang and not work.settings.ordered

    def _record(self, pass_id: int) -> PassRecord:
        return self._simulation.driver.model.passes[pass_id]

    def _soon(self, action: Callable[..., None], *args: object) -> None:
        time = self._simulation.time
        time.at(time.now + self.within_s * self._simulation.random.random(), action, *args)

    def _offer_soon(self, pass_id: int) -> None:
        if pass_id not in self._offering:
            self._offering.add(pass_id)
            self._soon(self._offer, pass_id)

    def _offer(self, pass_id: int) -> None:
        self._offering.discard(pass_id)
        record = self._record(pass_id)
        work, parts = record.work, record.work.parts
        first, last = record.offered, min(record.requested, work.steps)
        if record.is_closed or record.is_ended:
            return
        while first < last:
            end = first + 1
            while end < last and parts[end] == parts[first]:
                end += 1
            size = (end - first) * work.step_bytes
            self._simulation.driver.handle(ev.StepsAvailable(pass_id, first, end, parts[first], size))
            first = end
        if record.offered == work.steps:
            self._soon(self._end, pass_id)

    def _end(self, pass_id: int) -> None:
        record = self._record(pass_id)
        if not record.is_closed and not record.is_ended:
            self._simulation.driver.handle(ev.StepsEnded(pass_id))
            self._close_if_over(record)

    def _close_if_over(self, record: PassRecord) -> None:
        """Close an unordered pass when all its steps were reported."""
        if not record.work.settings.ordered and record.is_ended and record.is_all_reported:
            record.end = record.end or "complete"
            self._soon(self._close, record.work.id)

    def _visible(self, pass_id: int, first: int, last: int) -> None:
        waiting = self._visible_steps.setdefault(pass_id, [])
        if not waiting:
            self._soon(self._consume, pass_id)
        waiting.append((first, last))
        record = self._record(pass_id)
        if self._is_loop(record.work) and last < record.work.steps:
            record.requested = last + 1
            self._offer_soon(pass_id)

    def _consume(self, pass_id: int) -> None:
        """Consume all visible steps."""
        record, model = self._record(pass_id), self._simulation.driver.model
        if record.is_closed:
            return
        steps = self._visible_steps.pop(pass_id)
        size = sum([model.result_bytes(pass_id, first, last) for first, last in steps])
        consumed = max(record.consumed, *[last for _, last in steps])
        self._simulation.driver.handle(ev.StepsConsumed(pass_id, consumed, size))
        self._close_if_over(record)

    def _close(self, pass_id: int) -> None:
        if not self._record(pass_id).is_closed:
            self.open -= 1
            self._simulation.driver.handle(ev.PassClosed(pass_id))
