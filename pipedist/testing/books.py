"""What must hold of everything that the scheduler wants done, whatever the faults.

The books know nothing of the scheduler's state: only what it was told, and what it wanted. A
result has a value there: the call's own, or POISON where the attempt that made it was superseded
before it came in. No poison may ever count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipedist.scheduler import SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.testing.workloads import Work


class Violation(AssertionError):
    """Something happened that must not happen, whatever the faults."""


@dataclass(slots=True)
class LeaseBook:
    """What is known of a lease.

    Args:
        next: its first call that was not reported.
        serial: of its gang; 0 where it is of none.
        is_void: what comes from it does not count any more.
        twin: the other lease of the same calls, while neither of them has reported anything.
        second_attempts: how many the call that it runs has had, while this lease or its twin ran it.
    """

    id: int
    worker: str
    incarnation: int
    pass_id: int
    next: int
    hi: int
    serial: int = 0
    is_void: bool = False
    twin: LeaseBook | None = None
    second_attempts: int = 0


@dataclass(slots=True)
class _GangBook:
    pass_id: int
    lo: int
    hi: int
    leases: list[LeaseBook]
    stashed: set[int] = field(default_factory=set)
    is_poisoned: bool = False


@dataclass(slots=True)
class _PassBook:
    work: Work
    committed: bytearray
    """1 for each call whose result counts."""
    visible: int = 0
    """Of an ordered pass: steps before this one were told."""
    told: set[int] = field(default_factory=set)
    """Steps that were told."""
    raised: dict[int, int] = field(default_factory=dict)
    """How often calls have raised, as far as it was reported under a lease that stood."""
    held_bytes: int = 0
    """Of inputs of steps that are not visible, and of results that are not consumed."""


class Books:
    """The books of one simulation.

    Args:
        works: its passes.
        limits: the scheduler's.
    """

    def __init__(self, works: Iterable[Work], limits: SchedulerLimits) -> None:
        self.leases: dict[int, LeaseBook] = {}
        self.incarnations: dict[str, int] = {}
        """Of each worker that has joined and was not lost."""
        self._limits = limits
        self._of_worker: dict[str, list[LeaseBook]] = {}
        self._passes = {w.id: _PassBook(w, bytearray(w.steps * w.settings.replicas)) for w in works}
        self._gangs: dict[int, _GangBook] = {}
        self._reporting: ev.CallsDone | None = None
        self._useless: LeaseBook | None = None
        """One of twins, which must be cancelled with the event that is being handled."""
        self._suspended: dict[str, int] = {}
        """By worker that may be stuck in a call that was executed elsewhere, the lease."""
        self.second_attempts = 0
        """How many calls were executed a second time while the first attempt ran."""
        self.third_attempts = 0
        """How many of them followed one of the same call that came to nothing."""
        self.second_won = 0
        """How many of these second attempts came back first."""

    # -- what the scheduler is told ----------------------------------------------------------

    def joined(self, worker: str, incarnation: int) -> None:
        """A worker has joined; an earlier life of it is over."""
        if worker in self.incarnations:
            self.lost(worker, self.incarnations[worker])
        self.incarnations[worker] = incarnation

    def lost(self, worker: str, incarnation: int) -> None:
        """An incarnation of a worker is gone: none of its leases stands."""
        if self.incarnations.get(worker) != incarnation:
            return
        del self.incarnations[worker]
        self._suspended.pop(worker, None)
        for lease in self._of_worker.pop(worker, ()):
            lease.is_void = True
            self._part(lease)

    def heard(self, worker: str, incarnation: int, lease: int) -> None:
        """A worker has heard that a lease was cancelled."""
        if self.incarnations.get(worker) == incarnation and self._suspended.get(worker) == lease:
            del self._suspended[worker]

    def _part(self, lease: LeaseBook) -> LeaseBook | None:
        """A lease is a twin no more, if it was; return the other one."""
        twin, lease.twin = lease.twin, None
        if twin is not None:
            twin.twin = None
        return twin

    def reported(self, event: ev.CallsDone | ev.CallFailed) -> None:
        """Calls of a lease were reported."""
        lease = self.leases.get(event.lease)
        if isinstance(event, ev.CallsDone):
            self._reporting = event
            lo, hi = event.lo, event.hi
        else:
            lo, hi = event.call, event.call + 1
        if lease is None or lease.is_void or lease.incarnation != event.incarnation:
            return
        held = self._of_worker.get(lease.worker, [])
        if lease not in held[:1] or lo != lease.next or hi > lease.hi:
            return  # something was lost: the worker must go
        lease.next = hi
        twin = self._part(lease)
        if twin is not None and isinstance(event, ev.CallFailed):
            self._useless = lease  # the other attempt decides: this one is not charged
            return
        self._useless = twin
        lease.second_attempts = 0
        if twin is not None:
            self.second_won += twin.id < lease.id
        if isinstance(event, ev.CallFailed):
            raised = self._passes[lease.pass_id].raised
            raised[lo] = raised.get(lo, 0) + 1
        if hi == lease.hi:
            self._of_worker[lease.worker].remove(lease)

    # -- what it wants done -----------------------------------------------------------------

    def settle(self) -> None:
        """Look at what must have been done with the event that was handled.

        Raises:
            Violation: it was not.
        """
        useless, self._useless = self._useless, None
        if useless is not None and not useless.is_void:
            raise Violation(f"lease {useless.id} is of no use any more, and goes on")

    def _on_assign(self, command: cmd.SendAssign) -> None:
        if command.twin:
            self._second_attempt(command)
        lease = self._issue(command.worker, command.lease, command.pass_id, command.lo, command.hi)
        if command.twin:
            lease.twin = self.leases[command.twin]
            lease.twin.twin = lease
            lease.second_attempts = lease.twin.second_attempts
        depth = len(self._of_worker[command.worker])
        if depth > 2:
            raise Violation(f"{command.worker} holds {depth} leases")

    def _second_attempt(self, command: cmd.SendAssign) -> None:
        first = self.leases[command.twin]
        self.second_attempts += 1
        first.second_attempts += 1
        self.third_attempts += first.second_attempts > 1
        if first.second_attempts > self._limits.speculation_attempts_max:
            raise Violation(f"a call of {first} is executed again and again, and nothing is counted")
        if first.is_void or first.twin is not None or first.serial or first.worker == command.worker:
            raise Violation(f"lease {command.lease} is a second attempt of {first}")
        if (first.pass_id, first.next, first.hi) != (command.pass_id, command.lo, command.hi):
            raise Violation(f"lease {command.lease} is a second attempt of other calls than {first}")
        if not self._passes[first.pass_id].work.settings.speculation:
            raise Violation(f"lease {command.lease} is a second attempt in a pass that has none")

    def _on_gang(self, command: cmd.SendGang) -> None:
        work = self._passes[command.pass_id].work
        lo, hi, replicas = command.parts[0].lo, command.parts[-1].hi, work.settings.replicas
        if lo % replicas or hi - lo != replicas:
            raise Violation(f"a gang of the calls [{lo}, {hi}), which are no step of {replicas}")
        at = lo
        gang = self._gangs[command.serial] = _GangBook(command.pass_id, lo, hi, [])
        for part in command.parts:
            if part.lo != at or part.hi <= at:
                raise Violation(f"a gang in the parts {command.parts}")
            at = part.hi
            gang.leases.append(
                self._issue(part.worker, part.lease, command.pass_id, part.lo, part.hi, command.serial)
            )
            depth = len(self._of_worker[part.worker])
            if depth > self._limits.gangs_queued_max:
                raise Violation(f"{depth} gangs wait at {part.worker}")

    def _issue(self, worker: str, id_: int, pass_id: int, lo: int, hi: int, serial: int = 0) -> LeaseBook:
        book = self._passes[pass_id]
        if worker in self._suspended:
            raise Violation(f"lease {id_} is given to {worker}, which may be stuck in a call")
        if worker not in self.incarnations:
            raise Violation(f"lease {id_} is given to {worker}, which is not there")
        if id_ in self.leases:
            raise Violation(f"lease {id_} is given twice")
        if book.work.is_closed or book.work.is_held or book.work.end:
            raise Violation(f"lease {id_} is of pass {pass_id}, which is over")
        if 1 in book.committed[lo:hi]:
            raise Violation(f"calls [{lo}, {hi}) are executed once more, but results of theirs count already")
        if book.work.is_ragged:
            replicas = book.work.settings.replicas
            none = [c for c in range(lo, hi) if c % replicas >= book.work.parts[c // replicas]]
            if none:
                raise Violation(f"lease {id_} has the calls {none}, which nobody has offered")
        lease = LeaseBook(id_, worker, self.incarnations[worker], pass_id, lo, hi, serial)
        self.leases[id_] = lease
        held = self._of_worker.setdefault(worker, [])
        if any((x.serial > 0) != (serial > 0) for x in held):
            raise Violation(f"lease {id_} waits at {worker}: gangs and others behind each other")
        held.append(lease)
        return lease

    def _on_expel(self, command: cmd.EvictWorker) -> None:
        self.lost(command.worker, command.incarnation)

    def _on_cancel(self, command: cmd.SendCancel) -> None:
        lease = self.leases[command.lease]
        lease.is_void = True
        self._part(lease)
        if lease is self._useless:
            self._suspended[command.worker] = lease.id
        held = self._of_worker.get(lease.worker, [])
        if lease in held:
            held.remove(lease)

    def _reported_calls(self, lo: int, hi: int) -> bool:
        """Return whether the report that is being handled is sound, for a command about [lo, hi)."""
        event = self._reporting
        if event is None or not event.lo <= lo < hi <= event.hi:
            raise Violation(f"results of calls [{lo}, {hi}) count, but no such report came")
        lease = self.leases[event.lease]
        return not lease.is_void and lease.incarnation == event.incarnation and lease.next >= hi

    def _on_accept(self, command: cmd.AcceptResults) -> None:
        lo, hi = command.lo, command.hi
        if not self._reported_calls(lo, hi):
            raise Violation(f"POISON counts: calls [{lo}, {hi}) of a lease that does not stand any more")
        self._commit(command.pass_id, lo, hi)
        if self._reporting is not None:
            self._passes[command.pass_id].held_bytes += self._reporting.bytes

    def _on_stash(self, command: cmd.StashResults) -> None:
        gang = self._gangs[command.serial]
        if not self._reported_calls(command.lo, command.hi):
            gang.is_poisoned = True
        gang.stashed |= set(range(command.lo, command.hi))

    def _on_gang_ended(self, command: cmd.GangEnded) -> None:
        gang = self._gangs.pop(command.serial)
        if command.counts:
            if gang.is_poisoned or any(lease.is_void for lease in gang.leases):
                raise Violation(f"POISON counts: gang {command.serial} has results that do not")
            if gang.stashed != set(range(gang.lo, gang.hi)):
                raise Violation(f"gang {command.serial} counts, but not all of it came back")
            self._commit(gang.pass_id, gang.lo, gang.hi)
            book = self._passes[gang.pass_id]
            book.held_bytes += (gang.hi - gang.lo) * book.work.call_bytes

    def _commit(self, pass_id: int, lo: int, hi: int) -> None:
        committed = self._passes[pass_id].committed
        if 1 in committed[lo:hi]:
            raise Violation(f"calls [{lo}, {hi}) of pass {pass_id} count twice")
        committed[lo:hi] = b"\1" * (hi - lo)

    # -- what is visible ----------------------------------------------------------------------

    def _on_ready(self, command: cmd.StepsReady) -> None:
        book = self._passes[command.pass_id]
        replicas, parts = book.work.settings.replicas, book.work.parts
        for step in range(command.first, command.last):
            self._tell(book, step)
            lo = step * replicas
            if 0 in book.committed[lo : lo + parts[step]]:
                raise Violation(f"step {step} of pass {command.pass_id} is visible, but not all of it counts")

    def _on_failed(self, command: cmd.StepFailed) -> None:
        book = self._passes[command.pass_id]
        self._tell(book, command.step)
        if command.step not in book.work.hopeless:
            raise Violation(f"step {command.step} of pass {command.pass_id} failed, but nothing in it must")
        for failure in command.failures:
            fate = book.work.fates.get(failure.call)
            if fate is None or not fate.is_hopeless:
                raise Violation(f"{failure} is told, but that call must not fail")
            raised = book.raised.get(failure.call, 0)  # of gangs also those whose gang was lost then
            if raised < fate.retries + 1 or (raised > fate.retries + 1 and not book.work.settings.gang):
                raise Violation(f"{failure}: it raised {raised} times before")

    def _tell(self, book: _PassBook, step: int) -> None:
        work = book.work
        if work.end in ("complete", "failed") or work.is_closed:
            raise Violation(f"step {step} of pass {work.id} is told after the pass's end")
        if work.settings.ordered:
            if step != book.visible:
                raise Violation(f"step {step} of pass {work.id} is told, {book.visible} was to come")
            book.visible += 1
        if step in book.told or step >= work.offered:
            raise Violation(f"step {step} of pass {work.id} is told twice, or was never offered")
        book.told.add(step)
        book.held_bytes -= work.step_bytes

    def take(self, pass_id: int, first: int, last: int) -> int:
        """The reader of a pass is done with steps [first, last); return the bytes of their results."""
        book = self._passes[pass_id]
        replicas = book.work.settings.replicas
        size = book.committed.count(1, first * replicas, last * replicas) * book.work.call_bytes
        book.held_bytes -= size
        return size

    def offered(self, pass_id: int, steps: int) -> None:
        """Steps of a pass were offered."""
        book = self._passes[pass_id]
        book.held_bytes += steps * book.work.step_bytes

    def _on_request(self, command: cmd.RequestSteps) -> None:
        book = self._passes[command.pass_id]
        in_flight = book.work.requested + command.count - book.work.consumed
        if in_flight <= 1:
            return  # one step always fits
        if in_flight > self._limits.steps_in_flight_max:
            raise Violation(f"{in_flight} steps of pass {command.pass_id} are in flight")
        if book.held_bytes > self._limits.bytes_in_flight_max:
            raise Violation(
                f"{command.count} steps of pass {command.pass_id} are asked for, {book.held_bytes} bytes "
                "are in flight already"
            )

    def _on_complete(self, command: cmd.PassComplete) -> None:
        book = self._passes[command.pass_id]
        if len(book.told) != book.work.steps:
            raise Violation(f"pass {command.pass_id} is complete after {len(book.told)} steps")

    def _on_quiet(self, command: cmd.PassDrained) -> None:
        runs = [x.id for held in self._of_worker.values() for x in held if x.pass_id == command.pass_id]
        if not self._passes[command.pass_id].work.is_held or runs:
            raise Violation(f"pass {command.pass_id} is quiet, but its leases {runs} run")

    # -- the end --------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Check what came of every pass.

        Raises:
            Violation: it is not what had to come.
        """
        for book in self._passes.values():
            work = book.work
            if work.end in ("closed", "quiet"):
                continue
            wanted = range(work.needed)
            if book.told != set(wanted):
                raise Violation(f"pass {work.id} has told {len(book.told)} steps, expected {len(wanted)}")
            end = "failed" if work.hopeless and work.settings.fail_fast else "complete"
            if work.settings.ordered and work.end != end:
                raise Violation(f"pass {work.id} is {work.end or 'open'}, expected {end}")

    def all_told(self, work: Work) -> bool:
        """Return whether every step of a pass that can be told was told."""
        return len(self._passes[work.id].told) >= work.needed

    def gang_of(self, serial: int) -> Mapping[int, str]:
        """Return the workers of a gang by lease."""
        return {lease.id: lease.worker for lease in self._gangs[serial].leases}


CHECKS: Mapping[type, Callable[[Books, Any], None]] = {
    cmd.SendAssign: Books._on_assign,
    cmd.SendGang: Books._on_gang,
    cmd.EvictWorker: Books._on_expel,
    cmd.SendCancel: Books._on_cancel,
    cmd.AcceptResults: Books._on_accept,
    cmd.StashResults: Books._on_stash,
    cmd.GangEnded: Books._on_gang_ended,
    cmd.StepsReady: Books._on_ready,
    cmd.StepFailed: Books._on_failed,
    cmd.RequestSteps: Books._on_request,
    cmd.PassComplete: Books._on_complete,
    cmd.PassDrained: Books._on_quiet,
}
"""What to check of a command before it is carried out; each raises Violation."""
