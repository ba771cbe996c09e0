"""One member of a gang in a simulation: its replicas, and the collectives that they call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipedist.collectives.channel import RETURNED
from pipedist.protocol.messages import AssignGang, Failed, Relay
from pipedist.worker.events import CallRaised, CallsFinished, CollectiveOverdue, CollectiveReached
from tests.simulation.reference_model import Violation
from tests.simulation.workloads import STAGES

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.worker_process import WorkerProcess

OVERDUE_S = 3.0
"""How long a collective waits before it reports the missing members."""

HANG_S = 60.0
"""How long a replica hangs, unless its process is ended before (it has no `timeout_s`)."""


class GangMember:
    """Executes the calls of one member, all at once.

    Args:
        simulation: the simulation.
        process: the member's process.
        assigned: its calls.
    """

    __slots__ = ("_assigned", "_busy_ns", "_ended", "_number", "_parts", "_process", "_simulation")

    def __init__(self, simulation: Simulation, process: WorkerProcess, assigned: AssignGang) -> None:
        self._simulation = simulation
        self._process = process
        self._assigned = assigned
        self._number = 0
        """The number of the current collective; 0 before the first one."""
        self._parts: dict[int, set[int]] = {}
        """By number of a collective, the other members whose parts have arrived."""
        self._ended: dict[int, str] = {}
        """The members that have ended, and how."""
        self._busy_ns = 0

    @property
    def part(self) -> tuple[int, int]:
        """Its part of a collective: the gang's serial, and the collective's number."""
        return self._assigned.serial, self._number

    def run(self, took_s: float) -> None:
        """Execute the replicas up to their first collective, or to their end."""
        assigned, process = self._assigned, self._process
        fates = self._simulation.works[assigned.pass_id].fates
        raisers = set()
        self._busy_ns = int(took_s * 1e9)
        for call in range(assigned.lo, assigned.hi):
            fate = fates.get(call)
            if fate is None:
                continue
            if fate.kills > 0:
                fate.kill_once()
                process.exit("signal 11 (SIGSEGV)", (assigned.lease, call))
                return
            if fate.hangs > 0:
                fate.hangs -= 1
                process.later(HANG_S, self.run, took_s)
                return
            if fate.raises > 0:
                fate.raise_once()
                raisers.add(call)
        if raisers:
            self._report(raisers, aborted=self._collectives > 0)
        else:
            self._go_on()

    @property
    def _collectives(self) -> int:
        return self._simulation.works[self._assigned.pass_id].collectives

    def _go_on(self) -> None:
        """Continue to the next collective, or to the end."""
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
            self._continue_if_complete()

    def take(self, relay: Relay, part: object) -> None:
        """Receive the part of another member, or the fact that it has ended."""
        if relay.number:
            if part != (self._assigned.serial, relay.number):
                raise Violation(f"{relay!r} brings {part} to gang {self._assigned.serial}")
            self._parts.setdefault(relay.number, set()).add(relay.member)
        else:
            self._ended[relay.member] = relay.text
        if self._is_waiting:
            self._continue_if_complete()

    @property
    def _is_waiting(self) -> bool:
        process = self._process
        if not process.listening or process.executing is None:
            return False
        return process.executing[0] == self._assigned.lease and process.alive

    def _missing(self) -> list[int]:
        arrived = self._parts.get(self._number, set())
        return [
            m
            for m in range(self._assigned.members)
            if m != self._assigned.member and m not in arrived and self._ended.get(m) != RETURNED
        ]

    def _continue_if_complete(self) -> None:
        """Continue if all parts have arrived; end if a missing member has ended."""
        missing = self._missing()
        if any(m in self._ended for m in missing):
            self._report(set(), aborted=True)
        elif not missing:
            self._go_on()

    def _wait(self) -> None:
        self._process.later(OVERDUE_S, self._stall, self._number)

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
            between = self._simulation.random.randint(assigned.lo, assigned.hi)
            for lo, hi in (assigned.lo, between), (between, assigned.hi):
                if lo < hi:
                    process.handle(CallsFinished(assigned.lease, lo, hi, self._busy_ns))
        else:
            for call in range(assigned.lo, assigned.hi):
                if call in raisers or aborted:
                    process.handle(
                        raised(self._simulation, assigned.lease, call, aborted=call not in raisers)
                    )
                else:
                    process.handle(CallsFinished(assigned.lease, call, call + 1, self._busy_ns))
        process.slice_over(assigned.lease)


def raised(simulation: Simulation, lease: int, call: int, *, aborted: bool = False) -> CallRaised:
    """Return the event that a call raised in a random stage."""
    stage = simulation.stages.choice(STAGES)
    return CallRaised(Failed(lease, call, stage, "builtins", "ValueError", "fate", "", True, aborted))
