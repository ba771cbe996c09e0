"""Workers, their incarnations, and the leases that they hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

from msgspec import Struct, field

from pipedist.scheduler.leases import GangAttempt, Lease, Worker
from pipedist.scheduler.stragglers import Stragglers
from pipedist.scheduler.transitions import WorkerState

GONE_WORKERS_KEPT: Final = 1024  # workers that are GONE, and whose last incarnation is remembered


class CapacityClass(Struct, eq=False):
    """The READY workers that own the same number of GPUs."""

    ready: int = 0
    # OrderedDict: finding the first entry of a plain dict skips over all deleted ones.
    idle: OrderedDict[str, Worker] = field(default_factory=OrderedDict)  # without a lease, longest idle first
    under_prefetched: OrderedDict[str, Worker] = field(default_factory=OrderedDict)  # needs a second lease
    waiting: OrderedDict[str, Worker] = field(default_factory=OrderedDict)  # all of its leases overlap


class Membership:
    """All workers and leases, indexed so that an assignment costs the same with any number of workers."""

    def __init__(self, prefetch_below_s: float, start_s: float) -> None:
        self.workers: dict[str, Worker] = {}
        self.gone: OrderedDict[str, None] = OrderedDict()  # GONE workers, the longest gone first
        # The time of the start, of workers that may join soon
        self._starting: OrderedDict[str, float] = OrderedDict()
        self.leases: dict[int, Lease] = {}
        self.cancelled: dict[int, Lease] = {}
        """Overlapping leases whose cancellation is not confirmed: their workers may still report results."""
        self.now = 0.0  # of the event that is being handled
        self.ready = 0  # number of READY workers that are not suspended
        self.watched: dict[int, Stragglers] = {}  # leases that may get a second attempt, by pass
        self.idle: OrderedDict[str, Worker] = OrderedDict()  # READY, not suspended; longest idle first
        self.roomy: set[str] = set()  # those in any mapping of a `CapacityClass`
        self.capacity_classes: dict[float, CapacityClass] = {}  # READY by GPUs, fewest first; not empty
        self.supervised: OrderedDict[str, Worker] = OrderedDict()  # READY; longest silent first
        # Unreported calls of each worker with overlapping leases of a pass. A worker moves to the end when it reports
        # calls, and to the front when it gets some: so each worker gets calls in turn, without a search
        self.slots: dict[int, OrderedDict[str, int]] = {}
        self.slots_used: Counter[int] = Counter()  # sum of these calls, by pass
        self.moved: set[int] = set()  # passes of which other workers have overlapping calls than before
        self._prefetch_below_s = prefetch_below_s
        self._start_s = start_s
        self.last_lease = 0

    def current(self, worker: str, incarnation: int) -> Worker | None:
        found = self.workers.get(worker)
        if found is None or found.state is not WorkerState.READY or found.incarnation != incarnation:
            return None
        return found

    def ready_for(self, gpus: float) -> int:
        if not gpus:
            return self.ready
        return sum(room.ready for owned, room in self.capacity_classes.items() if owned >= gpus)

    def expected_for(self, gpus: float) -> int:
        """Return the number of workers that are READY or may join soon, at least 1; with GPUs, of those READY."""
        starting = self._starting
        while starting and next(iter(starting.values())) + self._start_s <= self.now:
            starting.popitem(last=False)
        return max(1, self.ready_for(gpus) if gpus else self.ready + len(starting))

    def starts(self, worker: Worker) -> None:
        """Record that a process of the worker starts now."""
        self._starting[worker.name] = self.now
        self._starting.move_to_end(worker.name)

    def idle_for(self, gpus: float) -> Worker | None:
        """Return an idle worker with at least `gpus` GPUs: the fewest sufficient, then the longest idle."""
        for owned, room in self.capacity_classes.items():
            if room.idle and owned >= gpus:
                return next(iter(room.idle.values()))
        return None

    def with_slot(self, pass_id: int, calls_max: int) -> Worker | None:
        """Return a worker that executes overlapping calls of a pass, fewer than `calls_max`."""
        slots = self.slots.get(pass_id)
        if not slots or self.slots_used[pass_id] >= calls_max * len(slots):
            return None
        while slots[last := next(reversed(slots))] >= calls_max:
            slots.move_to_end(last, last=False)
        return self.workers[last]

    def busy_for(self, gpus: float, *, in_advance: bool, below: float | None = None) -> Worker | None:
        """Return a worker with at least `gpus` GPUs that has a lease, and can get another one, or None.

        All of its leases overlap; otherwise it gets one `in_advance`, and has less than `below` GPUs.
        """
        later: Worker | None = None
        for owned, room in self.capacity_classes.items():
            if owned < gpus:
                continue
            if room.waiting:
                return next(iter(room.waiting.values()))
            if in_advance and later is None and room.under_prefetched and (below is None or owned < below):
                later = next(iter(room.under_prefetched.values()))
        return later

    def admit(self, worker: Worker, incarnation: int, *, supervised: bool, gpus: float) -> None:
        worker.become("joined")
        self._starting.pop(worker.name, None)
        self.gone.pop(worker.name, None)
        worker.incarnation = incarnation
        worker.supervised = supervised
        worker.gpus = gpus
        self._count(worker, 1)
        self._sort(worker)
        self.record_heartbeat(worker)

    def record_heartbeat(self, worker: Worker) -> None:
        worker.heard_at = self.now
        if worker.supervised:
            self.supervised[worker.name] = worker
            self.supervised.move_to_end(worker.name)

    def dismiss(self, worker: Worker) -> list[Lease]:
        """Mark a READY or STARTING worker as lost; return its leases, the running one first."""
        held = [self.leases.pop(i) for i in worker.leases]
        for lease in [x for x in self.cancelled.values() if x.worker == worker.name]:
            del self.cancelled[lease.id]
        for lease in held:
            self._over(lease)
        if worker.state is WorkerState.READY and not worker.suspended:
            self._count(worker, -1)
        worker.become("lost" if worker.managed else "lost unmanaged")
        worker.leases.clear()
        worker.overlapping = 0
        for pass_id, slots in self.slots.items():
            self.slots_used[pass_id] -= slots.pop(worker.name, 0)
        self.moved |= worker.bound
        worker.bound.clear()
        worker.unsure = False
        worker.suspended = 0
        self.supervised.pop(worker.name, None)
        self._sort(worker)
        if worker.state is WorkerState.GONE:
            self.gone[worker.name] = None
            if len(self.gone) > GONE_WORKERS_KEPT:
                del self.workers[self.gone.popitem(last=False)[0]]
        return held

    def grant(
        self,
        worker: Worker,
        pass_id: int,
        lo: int,
        hi: int,
        attempt: int,
        expected_s: float,
        gang: GangAttempt | None = None,
        overlaps: bool = False,
    ) -> Lease:
        self.last_lease += 1
        lease = Lease(self.last_lease, worker.name, pass_id, lo, hi, attempt, lo, expected_s, gang, overlaps)
        self.leases[lease.id] = lease
        if overlaps:
            worker.leases.append(lease.id)
            worker.overlapping += 1
            self._occupy(lease, hi - lo)
            self._begun(lease)
        else:
            place = len(worker.leases) - worker.overlapping
            worker.leases.insert(place, lease.id)
            if place == 0:
                lease.since = self.now
                if self.watched:
                    self._begun(lease)
        self._sort(worker)
        return lease

    def _occupy(self, lease: Lease, calls: int) -> None:
        """Count unreported calls of an overlapping lease."""
        slots = self.slots.setdefault(lease.pass_id, OrderedDict())
        if lease.worker not in slots:
            self.moved.add(lease.pass_id)
        slots[lease.worker] = slots.get(lease.worker, 0) + calls
        self.slots_used[lease.pass_id] += calls
        slots.move_to_end(lease.worker, last=calls < 0)
        if not slots[lease.worker]:
            del slots[lease.worker]
            self.moved.add(lease.pass_id)

    def advance(self, lease: Lease, to: int) -> None:
        """Record that a lease's calls before `to` were reported; with the last one it ends."""
        if lease.overlaps:
            self._occupy(lease, lease.next - to)
        lease.next = to
        if to >= lease.hi:
            self.revoke(lease)
        else:
            lease.second_attempts = 0
            self._begun(lease)

    def used(self, reports: Sequence[tuple[str, int, int]]) -> None:
        """Record that idle workers have executed a lease each, of one gang, and reported it in this order."""
        self.last_lease += len(reports)
        for name, _, _ in reports:
            worker = self.idle[name]
            worker.unsure = False
            self.idle.move_to_end(name)
            self.capacity_classes[worker.gpus].idle.move_to_end(name)

    def revoke(self, lease: Lease) -> None:
        del self.leases[lease.id]
        if self.watched or lease.twin is not None:
            self._over(lease)
        worker = self.workers[lease.worker]
        was_first = worker.leases[0] == lease.id and not lease.overlaps
        worker.leases.remove(lease.id)
        if lease.overlaps:
            worker.overlapping -= 1
            if lease.next < lease.hi:
                self._occupy(lease, lease.next - lease.hi)
        if was_first and len(worker.leases) > worker.overlapping:
            self._begun(self.leases[worker.leases[0]])
        self._sort(worker)

    def cancel(self, lease: Lease) -> None:
        worker = self.workers[lease.worker]
        worker.unsure = worker.unsure or (worker.leases[0] == lease.id and not lease.overlaps)
        self.revoke(lease)
        if lease.overlaps and lease.probe is None:
            self.cancelled[lease.id] = lease

    def confirm(self, worker: Worker, lease: int) -> None:
        """Record that a worker reports nothing more of a cancelled lease."""
        if lease in self.cancelled and self.cancelled[lease].worker == worker.name:
            del self.cancelled[lease]
        if worker.suspended == lease:
            self.resume(worker)

    def send_nothing_behind(self, lease: Lease) -> None:
        lease.expected_s = 0.0
        self._sort(self.workers[lease.worker])

    def suspend(self, worker: Worker, lease: int) -> None:
        """Stop assigning calls to a worker without leases, until it confirms the cancellation of `lease`."""
        worker.suspended = lease
        self._count(worker, -1)
        self._sort(worker)

    def resume(self, worker: Worker) -> None:
        worker.suspended = 0
        worker.unsure = False
        self._count(worker, 1)
        self._sort(worker)

    def _count(self, worker: Worker, change: int) -> None:
        self.ready += change
        room = self.capacity_classes.get(worker.gpus)
        if room is None:
            room = self.capacity_classes[worker.gpus] = CapacityClass()
            self.capacity_classes = dict(sorted(self.capacity_classes.items()))
        room.ready += change
        if not room.ready:
            del self.capacity_classes[worker.gpus]

    def _begun(self, lease: Lease) -> None:
        lease.since = self.now
        running = self.watched.get(lease.pass_id)
        if running is not None:
            running.begun(lease)

    def _over(self, lease: Lease) -> None:
        """End a lease; its twin, if any, continues alone."""
        running = self.watched.get(lease.pass_id)
        if running is not None:
            running.over(lease)
        if lease.twin is not None:
            lease.twin.twin = None

    def _sort(self, worker: Worker) -> None:
        self.idle.pop(worker.name, None)
        self.roomy.discard(worker.name)
        room = self.capacity_classes.get(worker.gpus)
        if room is None:
            return  # it is not READY, or suspended
        room.idle.pop(worker.name, None)
        room.under_prefetched.pop(worker.name, None)
        room.waiting.pop(worker.name, None)
        if worker.state is not WorkerState.READY or worker.suspended:
            return
        if not worker.leases:
            self.idle[worker.name] = room.idle[worker.name] = worker
        elif not (ordered := len(worker.leases) - worker.overlapping):
            room.waiting[worker.name] = worker
        elif ordered == 1 and 0 < self.leases[worker.leases[0]].expected_s < self._prefetch_below_s:
            room.under_prefetched[worker.name] = worker
        else:
            return
        self.roomy.add(worker.name)
