"""Second attempts of calls that take far longer than others, on idle workers, while no other call waits.

    lease runs, silent for too long --second attempt--> two leases of the same calls, TWINS
        one of them reports a result   --> it continues alone; the other is cancelled and does not count
        one of them raises, or is lost --> the other continues alone; the call is not charged
        ... and takes long all the same --> it gets another second attempt, `speculation_attempts_max` in all
        ... and that one fails too     --> this attempt of the call has failed, once

Twins cover exactly the same calls at all times: the first report of either ends the pair. The worker of the
cancelled lease may be stuck in its call, so it is suspended: it gets no calls until it confirms the
cancellation (`CancelConfirmed`).

A running call has one second attempt at a time, and a gang's call none: its members wait for each other, so
all of them would have to be executed twice. The number of second attempts is bounded, because their failures are
not charged: a call that kills its workers must end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipedist.scheduler.assignment import Assigner
from pipedist.scheduler.leases import Lease, Worker
from pipedist.scheduler.membership import Membership
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.settings import SchedulerLimits
from pipedist.scheduler.stragglers import Stragglers


@dataclass(eq=False)
class Speculation:
    _limits: SchedulerLimits
    _members: Membership
    _passes: dict[int, Pass]
    _assigner: Assigner
    _cancel: Callable[[Pass, Lease], None]
    _take_back: Callable[[Pass, Lease], None]  # cancels a lease that only waits at its worker

    def begin(self, now: float) -> None:
        while self._members.idle and self._assigner.nothing_waits and self._begin_one(now):
            self._assigner.assign()

    def _begin_one(self, now: float) -> bool:
        """Start one second attempt; return False if no call takes too long."""
        for pass_, running, idle in self._watched():
            limit_s = self._limit_s(running)
            if limit_s is None:
                blocking = self._blocking(running)
                if blocking is not None and self._blocks_until(blocking) <= now:
                    return self._take_back_behind(blocking)
                continue
            while (lease := running.first) is not None:
                if lease.since + limit_s > now:
                    break
                if self._take_back_behind(lease):
                    return True
                running.over(lease)
                if self._ends_soon(pass_, lease, now):
                    continue
                if lease.probe is None and lease.twin is None and pass_.needs(lease.next):
                    running.over(self._assigner.assign_second_attempt(pass_, lease, idle))
                    return True
        return False

    def _ends_soon(self, pass_: Pass, lease: Lease, now: float) -> bool:
        """Return whether a call ends by a timeout before a second attempt of usual duration would."""
        most = pass_.settings.call_s_max
        return most > 0.0 and lease.since + most - now < (pass_.call_s or 0.0)

    def _blocking(self, running: Stragglers) -> Lease | None:
        """Return the longest silent lease of a pass behind which others wait."""
        workers = self._members.workers
        return next((x for x in running.leases if not x.overlaps and workers[x.worker].ordered > 1), None)

    def _blocks_until(self, lease: Lease) -> float:
        """Return when others stop waiting behind a lease of a pass with too few reports: it may hang."""
        return lease.since + self._limits.speculation_s_min

    def _take_back_behind(self, lease: Lease) -> bool:
        """Requeue the leases that wait behind a lease; return whether there were any."""
        members = self._members
        worker = members.workers[lease.worker]
        behind = [] if lease.overlaps else [members.leases[i] for i in worker.leases[1 : worker.ordered]]
        members.send_nothing_behind(lease)
        for other in behind:
            self._take_back(self._passes[other.pass_id], other)
        return bool(behind)

    @property
    def due(self) -> float | None:
        """The time at which the next call takes too long, if a worker is idle."""
        if not self._members.idle or not self._assigner.nothing_waits:
            return None
        due = []
        for _, running, _ in self._watched():
            limit_s, first = self._limit_s(running), running.first
            if limit_s is None:
                if (blocking := self._blocking(running)) is not None:
                    due.append(self._blocks_until(blocking))
            elif first is not None:
                due.append(first.since + limit_s)
        return min(due, default=None)

    def _watched(self) -> list[tuple[Pass, Stragglers, Worker]]:
        """Return the passes whose calls may get a second attempt now, each with an idle worker."""
        found = []
        for id_, running in self._members.watched.items():
            pass_ = self._passes[id_]
            idle = None if pass_.draining else self._members.idle_for(pass_.settings.gpus)
            if idle is not None:
                found.append((pass_, running, idle))
        return found

    def _limit_s(self, running: Stragglers) -> float | None:
        return running.limit_s(self._limits.speculation_reports_min, self._limits.speculation_s_min)

    def reported(self, pass_: Pass, lease: Lease, now: float) -> None:
        """Record the duration of a report, and end the lease's twin, which is obsolete."""
        running = self._members.watched.get(pass_.id)
        if running is not None:
            running.durations.add(now - lease.since)
        if lease.twin is not None:
            self.withdraw(pass_, lease.twin)

    def failed(self, pass_: Pass, lease: Lease) -> None:
        """Record that one of two attempts raised or could not be sent: the other continues alone."""
        twin = lease.twin
        self.withdraw(pass_, lease)
        if twin is not None:
            self.goes_on(twin)

    def goes_on(self, lease: Lease) -> None:
        """Allow another second attempt for a lease whose twin failed, up to the limit."""
        running = self._members.watched.get(lease.pass_id)
        if running is not None and lease.second_attempts < self._limits.speculation_attempts_max:
            running.again(lease)

    def withdraw(self, pass_: Pass, lease: Lease) -> None:
        """End one of two attempts, and suspend its worker until it confirms."""
        worker = self._members.workers[lease.worker]
        self._cancel(pass_, lease)
        if not worker.leases:
            self._members.suspend(worker, lease.id)
