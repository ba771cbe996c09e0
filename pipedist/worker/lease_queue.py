"""The leases of a worker: the one that executes, those that wait, and the next unreported call of each.

Part of the worker's state machine, and sans-I/O like it. The machine decides the actions; the queue keeps the
order, and rejects statements about leases that are impossible, from the scheduler (RemoteProtocolError) or
from the driver (LocalProtocolError).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from msgspec import Struct

from pipedist.errors import LocalProtocolError, RemoteProtocolError
from pipedist.protocol.messages import CACHED_RANGES_MAX


class WorkerLimits(Struct, frozen=True):
    """The limits of a worker."""

    join_s: float = 30.0  # until the scheduler replies to Hello
    flush_s: float = 0.02  # until a finished call is reported
    flush_bytes: int = 4 * 2**20  # of results that wait to be reported
    leases_queued_max: int = 64  # behind the executing one
    leases_overlapping_max: int = 65_536
    recalls_queued_max: int = CACHED_RANGES_MAX  # besides the leases
    passes_max: int = 1024
    states_max: int = 4096


class AssignedLease(Struct):
    """An assigned range of calls."""

    id: int
    pass_id: int
    next: int  # the first call that is not reported
    hi: int
    members: int = 0  # size of its gang; 0: no gang
    collectives: int = 0  # the number of collectives that it has contributed to
    recalled: bool = False  # its results are in the cache, and are reported without executing anything
    cached: bool = False  # its results are cached until they are durable
    overlaps: bool = False  # it is executed beside other leases, see `messages.Assign`


class LeaseQueue:
    """The executing lease, and the waiting ones in order of arrival."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self.active: AssignedLease | None = None  # the executing lease; while it is None, no lease waits
        self.overlapping: dict[int, AssignedLease] = {}  # executing leases that overlap
        self._waiting: OrderedDict[int, AssignedLease] = OrderedDict()

    # -- events from the scheduler ---------------------------------------------------

    def add(self, lease: AssignedLease) -> bool:
        """Add a lease; return whether it executes at once."""
        if not 0 <= lease.next < lease.hi:
            raise RemoteProtocolError(f"lease {lease.id} has the calls [{lease.next}, {lease.hi})")
        active = self.active
        if (
            (active is not None and active.id == lease.id)
            or lease.id in self._waiting
            or lease.id in self.overlapping
        ):
            raise RemoteProtocolError(f"lease {lease.id} was assigned twice")
        if lease.overlaps:
            if len(self.overlapping) >= self._limits.leases_overlapping_max:
                raise RemoteProtocolError(f"more than {self._limits.leases_overlapping_max} leases overlap")
            self.overlapping[lease.id] = lease
            return False
        if self.active is None:
            self.active = lease
            return True
        most = self._limits.recalls_queued_max if lease.recalled else self._limits.leases_queued_max
        if sum(1 for x in self._waiting.values() if x.recalled == lease.recalled) >= most:
            raise RemoteProtocolError(f"more than {most} leases wait")
        self._waiting[lease.id] = lease
        return False

    def find(self, lease_id: int) -> AssignedLease | None:
        if self.active is not None and self.active.id == lease_id:
            return self.active
        return self._waiting.get(lease_id) or self.overlapping.get(lease_id)

    def withdraw(self, lease_id: int) -> bool:
        return (self._waiting.pop(lease_id, None) or self.overlapping.pop(lease_id, None)) is not None

    def withdraw_pass(self, pass_id: int) -> list[int]:
        leases = [*self._waiting.values(), *self.overlapping.values()]
        gone = [lease.id for lease in leases if lease.pass_id == pass_id]
        for lease_id in gone:
            self.withdraw(lease_id)
        return gone

    def clear(self) -> None:
        self.active = None
        self._waiting.clear()
        self.overlapping.clear()

    # -- events from the driver ------------------------------------------------------

    def next(self) -> AssignedLease | None:
        """End the active lease; activate the one that has waited longest."""
        self.active = self._waiting.popitem(last=False)[1] if self._waiting else None
        return self.active

    def report(self, lease_id: int, lo: int, hi: int) -> AssignedLease:
        """Record that calls [lo, hi) of an executing lease are over; return it."""
        lease = self.overlapping.get(lease_id, self.active)
        if lease is None or lease.id != lease_id:
            raise LocalProtocolError(f"calls of lease {lease_id} were reported, but {lease} executes")
        if not lease.next == lo < hi <= lease.hi:
            raise LocalProtocolError(f"calls [{lo}, {hi}) of {lease} were reported")
        lease.next = hi
        if lease.overlaps and hi == lease.hi:
            del self.overlapping[lease_id]
        return lease

    def gang_lease(self, lease_id: int) -> AssignedLease:
        """Return the executing lease, which must belong to a gang."""
        lease = self.active
        if lease is None or lease.id != lease_id or not lease.members:
            raise LocalProtocolError(f"collectives of lease {lease_id} were reported, but {lease} executes")
        return lease

    # -- checks ----------------------------------------------------------------------

    def broken_invariant(self, passes: Collection[int]) -> str:
        """Return the first invariant that does not hold; "" if all hold."""
        active = self.active
        if self._waiting and active is None:
            return "leases wait, but none executes"
        if len(self._waiting) > self._limits.leases_queued_max + self._limits.recalls_queued_max:
            return "too many leases wait"
        if active is not None:
            if active.next > active.hi:
                return f"{active} is beyond its end"
            if active.id in self._waiting:
                return f"{active} waits and executes"
            if active.collectives and not active.members:
                return f"{active} belongs to no gang, but has collectives"
            if active.pass_id not in passes:
                return f"{active} belongs to no bound pass"
        for lease in self.overlapping.values():
            if lease.pass_id not in passes or lease.next >= lease.hi or lease.id in self._waiting:
                return f"{lease} overlaps, and is over, waits, or its pass is not bound"
        for lease in self._waiting.values():
            if lease.pass_id not in passes:
                return f"{lease} waits, but its pass is not bound"
            if lease.collectives:
                return f"{lease} waits, but has collectives"
        return ""
