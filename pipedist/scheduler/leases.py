"""Workers, their leases, and gangs: the records that the scheduler keeps of assigned calls."""

from __future__ import annotations

from msgspec import Struct, field

from pipedist.scheduler.bisection import Probe
from pipedist.scheduler.commands import UNKNOWN, Cause
from pipedist.scheduler.transitions import (
    GANG_TRANSITIONS,
    WORKER_TRANSITIONS,
    GangEvent,
    GangState,
    WorkerEvent,
    WorkerState,
    next_state,
)


class Lease(Struct, eq=False):
    """One assignment of calls [lo, hi) to one incarnation of one worker."""

    id: int
    worker: str
    pass_id: int
    lo: int
    hi: int
    attempt: int
    next: int  # the lowest unreported call; the worker works in order, so it runs this one
    expected_s: float  # expected duration of the whole lease, in seconds; 0.0 if unknown
    gang: GangAttempt | None = None
    overlaps: bool = False  # its calls only wait: the worker executes it beside its other leases
    probe: Probe | None = None
    since: float = 0.0  # time at which it became the first lease of its worker, or last reported
    twin: Lease | None = None  # the other lease of the same calls, if executed twice: the first report counts
    second_attempts: int = 0  # in this attempt, of the running call; equal for twins


class Worker(Struct, eq=False):
    name: str
    managed: bool  # True if started by the launcher, and replaced when it dies; False if it dialled in
    incarnation: int = 0  # the current incarnation; messages from lower ones are stale
    state: WorkerState = WorkerState.STARTING
    # Ids by assignment: those executed in this order, of which the first runs; then those that overlap. READY only
    leases: list[int] = field(default_factory=list)
    overlapping: int = 0  # number of the leases that overlap
    bound: set[int] = field(default_factory=set)  # passes whose programs it has received. READY only
    heard_at: float = 0.0  # time of the join or the last heartbeat. Supervised only
    supervised: bool = False  # True if it is lost when its heartbeats end
    gpus: float = 0.0  # number of GPUs that it owns; a fraction if it shares one
    unsure: bool = False
    """True if its running lease was cancelled and it has not reported since: it may still run that call,
    so its death is not charged to its first lease. READY only."""
    suspended: int = 0
    """The cancelled lease that it may still run: it gets no calls until it confirms the cancellation. It holds
    no lease then. 0: not suspended. READY only."""

    @property
    def ordered(self) -> int:
        """The number of leases that do not overlap."""
        return len(self.leases) - self.overlapping

    def become(self, what: WorkerEvent) -> None:
        self.state = next_state(f"worker {self.name}", WORKER_TRANSITIONS, self.state, what)


class GangGroup(Struct, eq=False):
    """Workers that execute gangs of one pass together, in order of member."""

    workers: tuple[Worker, ...]
    gangs: int = 0  # unfinished


class RaisedCall(Struct, frozen=True):
    call: int
    worker: str
    retries: int = 0
    aborted: bool = False  # True if it only waited for a replica that had ended
    quarantine: bool = False  # after the last retry; otherwise the call fails
    cause: Cause = UNKNOWN
    culprits: tuple[tuple[int, str], ...] = ()  # as in `events.CallFailed`


class GangAttempt(Struct, eq=False):
    """One attempt of the calls [lo, hi) of one step."""

    serial: int
    pass_id: int
    lo: int
    hi: int
    attempt: int
    group: GangGroup
    due: int  # number of unreported calls
    leases: list[Lease] = field(default_factory=list)  # those of all members in order; also finished ones
    state: GangState = GangState.RUNNING
    raised: list[RaisedCall] = field(default_factory=list)
    busy_ns: dict[int, int] = field(default_factory=dict)
    """Execution time of the calls by lease, in nanoseconds."""
    bytes: int = 0  # of the stashed results

    def become(self, what: GangEvent) -> None:
        self.state = next_state(f"gang {self.serial}", GANG_TRANSITIONS, self.state, what)

    def came_back(self, lease: int, busy_ns: int, size: int) -> None:
        self.busy_ns[lease] = self.busy_ns.get(lease, 0) + busy_ns
        self.bytes += size

    @property
    def took_s(self) -> float:
        return max(0, max(self.busy_ns.values(), default=0)) / 1e9

    @property
    def at_fault(self) -> list[RaisedCall]:
        """Calls that raised on their own, the lowest first."""
        return sorted((x for x in self.raised if not x.aborted), key=lambda x: x.call)
