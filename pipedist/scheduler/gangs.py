"""Gangs: all calls of one step, executed at once or not at all.

A gang is one attempt of one step. Its calls are spread over a GROUP of workers, as contiguous
chunks; each member has one lease. Serials grow, and all members get their lease of a gang before
any lease of a later one: workers execute gangs in one and the same order, so that two of them
never wait for each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from pipedist.messages import spans
from pipedist.scheduler.commands import UNKNOWN, Cause, GangAssignment
from pipedist.scheduler.membership import Lease, Membership, Worker
from pipedist.scheduler.ranges import Todo
from pipedist.scheduler.states import GangState, next_gang_state


@dataclass(slots=True, eq=False)
class Group:
    """Workers that execute gangs of one pass together, in order of member."""

    workers: tuple[Worker, ...]
    gangs: int = 0
    """How many gangs it has been given that are not over."""


class Raised(Struct, frozen=True):
    """What a call of a gang raised."""

    call: int
    worker: str
    retries: int = 0
    aborted: bool = False
    """It did nothing wrong: it waited for a replica that had ended."""
    quarantine: bool = False
    """After the last retry elements are set aside; otherwise the call fails."""
    cause: Cause = UNKNOWN


@dataclass(slots=True, eq=False)
class Gang:
    """One attempt of the calls [lo, hi) of one step."""

    serial: int
    pass_id: int
    lo: int
    hi: int
    attempt: int
    group: Group
    due: int
    """Calls that have not been reported."""
    leases: list[Lease] = field(default_factory=list)
    """Of every member, in order; also those that are over."""
    state: GangState = GangState.RUNNING
    raised: list[Raised] = field(default_factory=list)
    busy_ns: dict[int, int] = field(default_factory=dict)
    """By lease, how long its calls took, nanoseconds."""
    bytes: int = 0
    """Of the results that are stashed."""

    def become(self, what: str) -> None:
        """Take the transition `what`."""
        self.state = next_gang_state(self.serial, self.state, what)

    def came_back(self, lease: int, busy_ns: int, size: int) -> None:
        """Note that calls of a lease are done: how long they took, and the bytes of their results."""
        self.busy_ns[lease] = self.busy_ns.get(lease, 0) + busy_ns
        self.bytes += size

    @property
    def took_s(self) -> float:
        """How long it took: the time of its slowest member."""
        return max(0, max(self.busy_ns.values(), default=0)) / 1e9

    @property
    def at_fault(self) -> list[Raised]:
        """What calls raised by themselves, the lowest call first."""
        return sorted((x for x in self.raised if not x.aborted), key=lambda x: x.call)


class Groups:
    """The groups that the gangs of one pass were given to."""

    __slots__ = ("_busy", "_last")

    def __init__(self) -> None:
        self._last: Group | None = None
        """The latest one: it holds the pass's state, and memory that its workers share."""
        self._busy: OrderedDict[int, Group] = OrderedDict()
        """Those that have gangs, by `id`; the one that was given a gang longest ago is first."""

    def __iter__(self) -> Iterator[Group]:
        return iter(self._busy.values())

    def idle(self, members: Membership, replicas: int, gpus: float = 0.0) -> Group | None:
        """Return a group of idle workers for R replicas, None if too few are idle.

        The workers of the latest group are preferred, then those that are idle for longest.

        Args:
            gpus: how many each of them must own.
        """
        size = gang_size(members, replicas, gpus)
        idle: Mapping[str, Worker] = members.idle
        if gpus:
            idle = {name: worker for name, worker in idle.items() if worker.gpus >= gpus}
        if len(idle) < size:
            return None
        last = self._last
        if last is not None and len(last.workers) == size and all(w.name in idle for w in last.workers):
            return last
        chosen = {w.name: w for w in last.workers if w.name in idle} if last is not None else {}
        for name, worker in idle.items():
            if len(chosen) >= size:
                break
            chosen[name] = worker
        # By length first: w2 comes before w10.
        workers = sorted(list(chosen.values())[:size], key=lambda w: (len(w.name), w.name))
        return Group(tuple(workers))

    def in_advance(self, members: Membership, replicas: int, gpus: float, depth_max: int) -> Group | None:
        """Return a busy group at which one more gang may wait, None if there is none."""
        for group in self._busy.values():
            if group.gangs >= depth_max or len(group.workers) != gang_size(members, replicas, gpus):
                return None
            return group if all(_works_for(w, group, members) for w in group.workers) else None
        return None

    def begin(self, group: Group) -> None:
        """Take note that a group is given a gang."""
        group.gangs += 1
        self._last = group
        self._busy[id(group)] = group
        self._busy.move_to_end(id(group))

    def end(self, group: Group) -> None:
        """Take note that a gang of a group is over."""
        group.gangs -= 1
        if group.gangs == 0:
            del self._busy[id(group)]


def gang_size(members: Membership, replicas: int, gpus: float) -> int:
    """Return over how many workers R replicas are spread; on one that owns GPUs there is one alone."""
    return replicas if gpus else min(replicas, members.ready)


def _works_for(worker: Worker, group: Group, members: Membership) -> bool:
    """Return whether nothing but gangs of this group waits at a worker."""
    if not worker.leases:
        return worker.name in members.idle
    gang = members.leases[worker.leases[-1]].gang
    return gang is not None and gang.group is group


def form(members: Membership, serial: int, pass_id: int, todo: Todo, group: Group) -> Gang:
    """Make a gang of the calls of one step, and grant each member its lease."""
    lo, hi, attempt = todo
    gang = Gang(serial, pass_id, lo, hi, attempt, group, due=hi - lo)
    for worker, (a, b) in zip(group.workers, spans(hi - lo, len(group.workers)), strict=True):
        gang.leases.append(members.grant(worker, pass_id, lo + a, lo + b, attempt, 0.0, gang))
    return gang


def parts(gang: Gang) -> tuple[GangAssignment, ...]:
    """Return what each member is to be sent."""
    return tuple([GangAssignment(x.worker, x.id, x.lo, x.hi) for x in gang.leases])
