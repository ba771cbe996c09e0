"""Workers, their incarnations, and the leases that they hold."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipedist.scheduler.states import WorkerState, next_worker_state

if TYPE_CHECKING:
    from pipedist.scheduler.gangs import Gang
    from pipedist.scheduler.stragglers import Stragglers
    from pipedist.scheduler.suspects import Probe


@dataclass(slots=True, eq=False)
class Lease:
    """One assignment of calls [lo, hi) to one incarnation of one worker."""

    id: int
    worker: str
    pass_id: int
    lo: int
    hi: int
    attempt: int
    next: int
    """The lowest call that has not come back; the worker works in order, so it runs this one."""
    expected_s: float
    """How long the whole lease should take; 0.0 where nothing is known."""
    gang: Gang | None = None
    """The gang whose calls these are."""
    probe: Probe | None = None
    """What is tried: its result does not count."""
    since: float = 0.0
    """When it became the first one of its worker, or was heard of last."""
    twin: Lease | None = None
    """The other lease of the same calls, where they are executed twice: whichever reports first counts."""
    second_attempts: int = 0
    """How many second attempts the call that it runs has had, in this attempt; the same of twins."""


@dataclass(slots=True, eq=False)
class Worker:
    """One worker slot."""

    name: str
    managed: bool
    """The launcher's: replaced when it dies. Otherwise it dialled in."""
    incarnation: int = 0
    """The life that counts; everything from a lower one is stale."""
    state: WorkerState = WorkerState.STARTING
    leases: list[int] = field(default_factory=list)
    """Ids of held leases in the order of assignment: the first one is running. READY only."""
    bound: set[int] = field(default_factory=set)
    """Passes that this incarnation was told of. READY only."""
    heard_at: float = 0.0
    """When it joined or its supervisor was heard last. Supervised only."""
    supervised: bool = False
    """It is lost when it is not heard."""
    gpus: float = 0.0
    """How many it owns; a fraction where it shares one."""
    unsure: bool = False
    """The lease that it ran was cancelled, and it has reported nothing since: it may run that one's
    call still, so its death is no fault of the lease that is first now. READY only."""
    laid_off: int = 0
    """The lease of a call that it may run still, though another worker has done it, or its pass is over:
    it is given nothing until it has heard of that. It holds no lease then. 0: it is not. READY only."""

    def become(self, what: str) -> None:
        """Take the transition `what`."""
        self.state = next_worker_state(self.name, self.state, what)


@dataclass(slots=True, eq=False)
class Room:
    """The READY workers that own equally many GPUs."""

    ready: int = 0
    # Ordered dicts: the first entry of a plain dict is found by passing over all deleted ones.
    idle: OrderedDict[str, Worker] = field(default_factory=OrderedDict)
    """Those without a lease, the longest idle first."""
    thirsty: OrderedDict[str, Worker] = field(default_factory=OrderedDict)
    """Those whose only lease is short: a second one should wait there."""


class Membership:
    """All workers and all leases.

    Workers with room are kept apart, so that dealing costs the same with ten workers or ten
    thousand.
    """

    def __init__(self, prefetch_below_s: float) -> None:
        self.workers: dict[str, Worker] = {}
        self.leases: dict[int, Lease] = {}
        self.now = 0.0
        """The time of the event that is being handled."""
        self.ready = 0
        """How many workers are READY and not laid off."""
        self.watched: dict[int, Stragglers] = {}
        """By pass, what runs of it and may get a second attempt."""
        # Ordered dicts: the first entry of a plain dict is found by passing over all deleted ones.
        self.idle: OrderedDict[str, Worker] = OrderedDict()
        """READY workers without a lease that are not laid off, the longest idle first."""
        self.rooms: dict[float, Room] = {}
        """READY workers that are not laid off by the GPUs that they own; the fewest first."""
        self.supervised: OrderedDict[str, Worker] = OrderedDict()
        """READY supervised workers, the longest unheard first."""
        self._prefetch_below_s = prefetch_below_s
        self._last_lease = 0

    def current(self, worker: str, incarnation: int) -> Worker | None:
        """Return the worker if it is READY in this very incarnation."""
        found = self.workers.get(worker)
        if found is None or found.state is not WorkerState.READY or found.incarnation != incarnation:
            return None
        return found

    def is_over(self, worker: str, incarnation: int) -> bool:
        """Return whether this life of a worker has been, and is lost."""
        found = self.workers.get(worker)
        if found is None or found.incarnation < incarnation:
            return False
        return found.incarnation > incarnation or found.state is WorkerState.GONE

    def ready_for(self, gpus: float) -> int:
        """Return how many workers are READY that own so many GPUs."""
        return sum(room.ready for owned, room in self.rooms.items() if owned >= gpus) if gpus else self.ready

    def idle_for(self, gpus: float) -> Worker | None:
        """Return an idle worker that owns so many GPUs: the fewest that will do, then the longest idle."""
        for owned, room in self.rooms.items():
            if room.idle and owned >= gpus:
                return next(iter(room.idle.values()))
        return None

    def thirsty_for(self, gpus: float) -> Worker | None:
        """Return a worker whose only lease is short, and that owns so many GPUs."""
        for owned, room in self.rooms.items():
            if room.thirsty and owned >= gpus:
                return next(iter(room.thirsty.values()))
        return None

    def admit(
        self, worker: Worker, incarnation: int, *, supervised: bool, now: float, gpus: float = 0.0
    ) -> None:
        """Make a worker READY in this incarnation."""
        worker.become("joined")
        worker.incarnation = incarnation
        worker.supervised = supervised
        worker.gpus = gpus
        if gpus not in self.rooms:
            self.rooms = dict(sorted([*self.rooms.items(), (gpus, Room())], key=lambda item: item[0]))
        self.rooms[gpus].ready += 1
        self.ready += 1
        self._sort(worker)
        self.hear(worker, now)

    def hear(self, worker: Worker, now: float) -> None:
        """Note a sign of life."""
        worker.heard_at = now
        if worker.supervised:
            self.supervised[worker.name] = worker
            self.supervised.move_to_end(worker.name)

    def dismiss(self, worker: Worker) -> list[Lease]:
        """Make a READY or STARTING worker lost, and return the leases that it held, running one first."""
        held = [self.leases.pop(i) for i in worker.leases]
        for lease in held:
            self._over(lease)
        if worker.state is WorkerState.READY and not worker.laid_off:
            self.ready -= 1
            self.rooms[worker.gpus].ready -= 1
        worker.become("lost" if worker.managed else "lost unmanaged")
        worker.leases.clear()
        worker.bound.clear()
        worker.unsure = False
        worker.laid_off = 0
        self.supervised.pop(worker.name, None)
        self._sort(worker)
        return held

    def grant(
        self,
        worker: Worker,
        pass_id: int,
        lo: int,
        hi: int,
        attempt: int,
        expected_s: float,
        gang: Gang | None = None,
    ) -> Lease:
        """Make a lease and note it with its worker."""
        self._last_lease += 1
        lease = Lease(self._last_lease, worker.name, pass_id, lo, hi, attempt, lo, expected_s, gang)
        self.leases[lease.id] = lease
        worker.leases.append(lease.id)
        if len(worker.leases) == 1:
            self._begun(lease)
        self._sort(worker)
        return lease

    def advance(self, lease: Lease, to: int) -> None:
        """Take note that a lease's calls before `to` were reported; with the last one it ends."""
        lease.next = to
        if to >= lease.hi:
            self.revoke(lease)
        else:
            lease.second_attempts = 0
            self._begun(lease)

    def revoke(self, lease: Lease) -> None:
        """Take a lease away; results for it do not count any more."""
        del self.leases[lease.id]
        self._over(lease)
        worker = self.workers[lease.worker]
        was_first = worker.leases[0] == lease.id
        worker.leases.remove(lease.id)
        if was_first and worker.leases:
            self._begun(self.leases[worker.leases[0]])
        self._sort(worker)

    def cancel(self, lease: Lease) -> None:
        """Take a lease away that its worker may be running."""
        worker = self.workers[lease.worker]
        worker.unsure = worker.unsure or worker.leases[0] == lease.id
        self.revoke(lease)

    def send_nothing_behind(self, lease: Lease) -> None:
        """Let no lease wait at a worker behind this one."""
        lease.expected_s = 0.0
        self._sort(self.workers[lease.worker])

    def lay_off(self, worker: Worker, lease: int) -> None:
        """Give a worker without leases nothing more until it has heard that this lease was cancelled."""
        worker.laid_off = lease
        self.ready -= 1
        self.rooms[worker.gpus].ready -= 1
        self._sort(worker)

    def take_on(self, worker: Worker) -> None:
        """Give work again to a worker that was laid off: it runs nothing."""
        worker.laid_off = 0
        worker.unsure = False
        self.ready += 1
        self.rooms[worker.gpus].ready += 1
        self._sort(worker)

    def _begun(self, lease: Lease) -> None:
        """Note that a lease runs from now on, or was heard of."""
        lease.since = self.now
        running = self.watched.get(lease.pass_id)
        if running is not None:
            running.begun(lease)

    def _over(self, lease: Lease) -> None:
        """Note that a lease does not run any more; its twin, if it has one, goes on alone."""
        running = self.watched.get(lease.pass_id)
        if running is not None:
            running.over(lease)
        if lease.twin is not None:
            lease.twin.twin = None

    def _sort(self, worker: Worker) -> None:
        """Put a worker where its number of leases says it belongs."""
        self.idle.pop(worker.name, None)
        room = self.rooms.get(worker.gpus)
        if room is None:
            return  # it has never joined
        room.idle.pop(worker.name, None)
        room.thirsty.pop(worker.name, None)
        if worker.state is not WorkerState.READY or worker.laid_off:
            return
        if not worker.leases:
            self.idle[worker.name] = room.idle[worker.name] = worker
        elif len(worker.leases) == 1 and (
            0 < self.leases[worker.leases[0]].expected_s < self._prefetch_below_s
        ):
            room.thirsty[worker.name] = worker
