"""Second attempts of calls that take far longer than others: on an idle worker, while nothing else waits.

    lease runs, silent for too long --second attempt--> two leases of the same calls, TWINS
        one of them reports a result   --> it goes on alone; the other is cancelled, and nothing of it counts
        one of them raises, or is lost --> the other goes on alone; nobody is charged
        ... and takes long all the same --> it gets another second attempt, `speculation_attempts_max` in all
        ... and that one fails too     --> this attempt of the call has failed, once

Twins cover exactly the same calls at all times: the first report of either ends the pair. Who is
cancelled so may be stuck in its call for ever, through no fault of its own: its worker is LAID OFF. It is
given nothing, and not counted on, until it says that it has heard of the cancellation (`CancelConfirmed`).

A running call has one second attempt at a time, and a gang's none: its members wait for each other, so
all of them would have to be executed twice. How many it has one after the other is bounded, because nobody
is charged with what becomes of them: a call that kills its workers is to end.
"""

from __future__ import annotations

from collections.abc import Callable

from pipedist.scheduler import commands as cmd
from pipedist.scheduler.dealing import Dealing
from pipedist.scheduler.membership import Lease, Membership, Worker
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.settings import Limits
from pipedist.scheduler.stragglers import Stragglers


class Speculation:
    """Begins second attempts, and ends the one that is of no use any more.

    Args:
        limits, members, passes: the scheduler's.
        dealing: gives calls to workers.
        out: where commands are added.
        cancel: takes a lease away.
        take_back: takes a lease away that only waits at its worker, and lets its calls wait for another.
    """

    def __init__(
        self,
        limits: Limits,
        members: Membership,
        passes: dict[int, Pass],
        dealing: Dealing,
        out: list[cmd.Command],
        cancel: Callable[[Pass, Lease], None],
        take_back: Callable[[Pass, Lease], None],
    ) -> None:
        self._limits = limits
        self._members = members
        self._passes = passes
        self._dealing = dealing
        self._out = out
        self._cancel = cancel
        self._take_back = take_back

    # -- beginning ---------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Let idle workers that nothing else waits for execute what takes too long elsewhere."""
        while self._members.idle and self._dealing.is_dealt and self._begin_one(now):
            self._dealing.deal()

    def _begin_one(self, now: float) -> bool:
        """Let something go on elsewhere; return False where nothing takes too long."""
        for pass_, running, idle in self._watched():
            limit_s = self._limit_s(running)
            while limit_s is not None and (lease := running.first) is not None:
                if lease.since + limit_s > now:
                    break
                if self._take_back_behind(lease):
                    return True
                running.over(lease)
                if lease.probe is None and lease.twin is None and pass_.needs(lease.next):
                    running.over(self._dealing.issue_again(pass_, lease, idle))
                    return True
        return False

    def _take_back_behind(self, lease: Lease) -> bool:
        """Take what waits behind a lease away from its worker; return whether there was something."""
        members = self._members
        worker = members.workers[lease.worker]
        behind = [members.leases[i] for i in worker.leases[1:]]
        members.send_nothing_behind(lease)
        for other in behind:
            self._take_back(self._passes[other.pass_id], other)
        return bool(behind)

    @property
    def due(self) -> float | None:
        """When the next call has taken too long, if an idle worker waits for that."""
        if not self._members.idle or not self._dealing.is_dealt:
            return None
        due = []
        for _, running, _ in self._watched():
            limit_s, first = self._limit_s(running), running.first
            if limit_s is not None and first is not None:
                due.append(first.since + limit_s)
        return min(due, default=None)

    def _watched(self) -> list[tuple[Pass, Stragglers, Worker]]:
        """Return the passes whose calls may get a second attempt now, each with a worker for it."""
        found = []
        for id_, running in self._members.watched.items():
            pass_ = self._passes[id_]
            idle = None if pass_.held else self._members.idle_for(pass_.settings.gpus)
            if idle is not None:
                found.append((pass_, running, idle))
        return found

    def _limit_s(self, running: Stragglers) -> float | None:
        return running.limit_s(self._limits.speculation_reports_min, self._limits.speculation_s_min)

    # -- ending ------------------------------------------------------------------------------

    def reported(self, pass_: Pass, lease: Lease, now: float) -> None:
        """Calls of a lease came back: the other attempt of them is of no use any more."""
        running = self._members.watched.get(pass_.id)
        if running is not None:
            running.durations.add(now - lease.since)
        if lease.twin is not None:
            self.withdraw(pass_, lease.twin)

    def failed(self, pass_: Pass, lease: Lease) -> None:
        """One of two attempts raised, or could not be sent: the other goes on alone."""
        twin = lease.twin
        self.withdraw(pass_, lease)
        if twin is not None:
            self.goes_on(twin)

    def goes_on(self, lease: Lease) -> None:
        """The other attempt came to nothing: this one may get another, but not for ever."""
        running = self._members.watched.get(lease.pass_id)
        if running is not None and lease.second_attempts < self._limits.speculation_attempts_max:
            running.again(lease)

    def withdraw(self, pass_: Pass, lease: Lease) -> None:
        """End one of two attempts: nothing of it counts, and its worker is laid off until it has heard."""
        worker = self._members.workers[lease.worker]
        self._cancel(pass_, lease)
        self._members.lay_off(worker, lease.id)
