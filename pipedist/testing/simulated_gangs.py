"""One member's part of a gang in a simulation: its replicas, and the collectives that they call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipedist.collectives.channel import RETURNED
from pipedist.protocol.messages import AssignGang, Relay
from pipedist.testing.books import Violation
from pipedist.worker.events import CallRaised, CallsFinished, CollectiveOverdue, CollectiveReached

if TYPE_CHECKING:
    from pipedist.testing.simulated_process import SimulatedProcess
    from pipedist.testing.simulation import Simulation

PATIENCE_S = 3.0
"""How long a collective waits before it tells who has not come."""

HANG_S = 60.0
"""How long a replica hangs, if nobody ends its process before: without `timeout_s` nobody else would."""


class GangAssignment:
    """Executes the calls of one member, all at once.

    Args:
        world: that it lives in.
        process: the member's.
        assigned: its part.
    """

    __slots__ = ("_assigned", "_busy_ns", "_ended", "_number", "_parts", "_process", "_world")

    def __init__(self, world: Simulation, process: SimulatedProcess, assigned: AssignGang) -> None:
        self._world = world
        self._process = process
        self._assigned = assigned
        self._number = 0
        """The collective that it waits in; 0 before it has come to one."""
        self._parts: dict[int, set[int]] = {}
        """By number of a collective, which other members have brought their part."""
        self._ended: dict[int, str] = {}
        """Members that bring nothing more, and how they ended."""
        self._busy_ns = 0

    @property
    def part(self) -> tuple[int, int]:
        """What it brings to a collective: the gang's serial, and the collective's number."""
        return self._assigned.serial, self._number

    def run(self, took_s: float) -> None:
        """Let the replicas come to their first collective, or to their end."""
        assigned, process = self._assigned, self._process
        fates = self._world.works[assigned.pass_id].fates
        raisers = set()
        self._busy_ns = int(took_s * 1e9)
        for call in range(assigned.lo, assigned.hi):
            fate = fates.get(call)
            if fate is None:
                continue
            if fate.kills > 0:
                fate.kills -= 1
                process.exit("signal 11 (SIGSEGV)", running=(assigned.lease, call))
                return
            if fate.hangs > 0:
                fate.hangs -= 1
                process.later(HANG_S, self.run, took_s)
                return
            if fate.raises > 0:
                fate.raises -= 1
                raisers.add(call)
        if raisers:
            self._report(raisers, aborted=self._collectives > 0)
        else:
            self._go_on()

    @property
    def _collectives(self) -> int:
        return self._world.works[self._assigned.pass_id].collectives

    def _go_on(self) -> None:
        """Come to the next collective, or to the end."""
        process, assigned = self._process, self._assigned
        if assigned.members == 1 or self._number == self._collectives:
            self._report(set(), aborted=False)
            return
        self._number += 1
        process.listening = True
        process.handle(CollectiveReached(assigned.lease, self._number))
        self._wait()
        process.listen()
        if self._is_waiting:
            self._look()

    def take(self, relay: Relay, part: object) -> None:
        """Take in what another member brought, or that it has ended."""
        if relay.number:
            if part != (self._assigned.serial, relay.number):
                raise Violation(f"{relay!r} brings {part} to gang {self._assigned.serial}")
            self._parts.setdefault(relay.number, set()).add(relay.member)
        else:
            self._ended[relay.member] = relay.text
        if self._is_waiting:
            self._look()

    @property
    def _is_waiting(self) -> bool:
        process = self._process
        if not process.listening or process.executing is None:
            return False
        return process.executing[0] == self._assigned.lease and process.alive

    def _missing(self) -> list[int]:
        came = self._parts.get(self._number, set())
        return [
            m
            for m in range(self._assigned.members)
            if m != self._assigned.member and m not in came and self._ended.get(m) != RETURNED
        ]

    def _look(self) -> None:
        """Go on if all have come; end if somebody never will."""
        missing = self._missing()
        if any(m in self._ended for m in missing):
            self._report(set(), aborted=True)
        elif not missing:
            self._go_on()

    def _wait(self) -> None:
        self._process.later(PATIENCE_S, self._stall, self._number)

    def _stall(self, number: int) -> None:
        missing = self._missing()
        if self._is_waiting and number == self._number and missing:
            text = f"collective {number} of gang {self._assigned.serial}"
            self._process.handle(CollectiveOverdue(self._assigned.lease, tuple(map(str, missing)), text))
            self._wait()

    def _report(self, raisers: set[int], *, aborted: bool) -> None:
        """Report all calls in order: raised, aborted, or done."""
        assigned, process = self._assigned, self._process
        process.listening = False
        if not raisers and not aborted:
            process.handle(CallsFinished(assigned.lease, assigned.lo, assigned.hi, self._busy_ns))
        else:
            for call in range(assigned.lo, assigned.hi):
                if call in raisers or aborted:
                    process.handle(raised(assigned.lease, call, aborted=call not in raisers))
                else:
                    process.handle(CallsFinished(assigned.lease, call, call + 1, self._busy_ns))
        process.slice_over(assigned.lease)


def raised(lease: int, call: int, *, aborted: bool = False) -> CallRaised:
    """Return that a call raised."""
    return CallRaised(lease, call, "simulated", "builtins", "ValueError", "fate", "", True, aborted)
