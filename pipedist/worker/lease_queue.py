"""The leases that a worker was assigned: the one that executes, those that wait, what of each is reported.

Part of the worker's machine, and as free of I/O. The machine decides what the worker does; here stands in
which order, and what may be said of a lease at all: by the scheduler (RemoteProtocolError), or by the
driver (LocalProtocolError).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from pipedist.errors import LocalProtocolError, RemoteProtocolError
from pipedist.worker.limits import Limits


@dataclass(slots=True)
class Lease:
    """An assigned range.

    Args:
        next: its first call that is not reported.
        members: of its gang; 0 where it is of none.
        collectives: those that it has brought its part to.
        recalled: its results were kept, and are reported without executing anything.
        kept: what it reports is kept until it is durable.
    """

    id: int
    pass_id: int
    next: int
    hi: int
    members: int = 0
    collectives: int = 0
    recalled: bool = False
    kept: bool = False


class Agenda:
    """Which lease executes, and which wait, in order of arrival.

    Args:
        limits: how many may wait.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.active: Lease | None = None
        """The lease that executes; where it is None, none waits either."""
        self._waiting: OrderedDict[int, Lease] = OrderedDict()

    # -- what the scheduler says -----------------------------------------------------

    def take(self, lease: Lease) -> bool:
        """Take in a lease; return whether it is the one that executes.

        Raises:
            RemoteProtocolError: it has no calls, was assigned before, or too many wait.
        """
        if not 0 <= lease.next < lease.hi:
            raise RemoteProtocolError(f"lease {lease.id} has the calls [{lease.next}, {lease.hi})")
        if self.active is None:
            self.active = lease
            return True
        if lease.id in self._waiting or lease.id == self.active.id:
            raise RemoteProtocolError(f"lease {lease.id} was assigned twice")
        most = self._limits.recalls_queued_max if lease.recalled else self._limits.leases_queued_max
        if sum(1 for x in self._waiting.values() if x.recalled == lease.recalled) >= most:
            raise RemoteProtocolError(f"more than {most} leases wait")
        self._waiting[lease.id] = lease
        return False

    def find(self, lease_id: int) -> Lease | None:
        """Return a lease that executes or waits; None: it is over."""
        if self.active is not None and self.active.id == lease_id:
            return self.active
        return self._waiting.get(lease_id)

    def withdraw(self, lease_id: int) -> bool:
        """Drop a lease that waits; return whether there is one."""
        return self._waiting.pop(lease_id, None) is not None

    def withdraw_pass(self, pass_id: int) -> list[int]:
        """Drop the leases of a pass that wait; return which."""
        gone = [lease.id for lease in self._waiting.values() if lease.pass_id == pass_id]
        for lease_id in gone:
            del self._waiting[lease_id]
        return gone

    def clear(self) -> None:
        """Drop everything."""
        self.active = None
        self._waiting.clear()

    # -- what the driver says --------------------------------------------------------

    def next(self) -> Lease | None:
        """Go on to the lease that waits longest, and return it; the active one is over."""
        self.active = self._waiting.popitem(last=False)[1] if self._waiting else None
        return self.active

    def report(self, lease_id: int, lo: int, hi: int) -> Lease:
        """Take note that calls [lo, hi) of the lease that executes are over, and return it.

        Raises:
            LocalProtocolError: they are not the next ones of it.
        """
        lease = self.active
        if lease is None or lease.id != lease_id:
            raise LocalProtocolError(f"calls of lease {lease_id} were reported, but {lease} executes")
        if not lease.next == lo < hi <= lease.hi:
            raise LocalProtocolError(f"calls [{lo}, {hi}) were reported of {lease}")
        lease.next = hi
        return lease

    def gang(self, lease_id: int) -> Lease:
        """Return the lease that executes, of which something was said that only a gang's can do.

        Raises:
            LocalProtocolError: it is not that one, or of no gang.
        """
        lease = self.active
        if lease is None or lease.id != lease_id or not lease.members:
            raise LocalProtocolError(f"collectives of lease {lease_id} were reported, but {lease} executes")
        return lease

    # -- checks ----------------------------------------------------------------------

    def broken_invariant(self, passes: Collection[int]) -> str:
        """Return an invariant that does not hold, "" if all do; put into words only then.

        Args:
            passes: those that are bound.
        """
        active = self.active
        if self._waiting and active is None:
            return "leases wait only while one executes"
        if len(self._waiting) > self._limits.leases_queued_max + self._limits.recalls_queued_max:
            return "too many leases wait"
        if active is not None:
            if active.next > active.hi:
                return f"{active} is beyond its end"
            if active.id in self._waiting:
                return f"{active} waits and executes"
            if active.collectives and not active.members:
                return f"{active} is of no gang, but has collectives"
            if active.pass_id not in passes:
                return f"{active} is of no bound pass"
        for lease in self._waiting.values():
            if lease.pass_id not in passes:
                return f"{lease} waits, but its pass is not bound"
            if lease.collectives:
                return f"{lease} waits, but has collectives"
        return ""
