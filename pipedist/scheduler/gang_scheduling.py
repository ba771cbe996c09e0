"""Gang scheduling: all calls of one step are executed together or not at all.

A gang is one attempt of one step. Its calls are spread over a group of workers, as contiguous chunks; each
member has one lease. Serials grow, and all members get their lease of a gang before any lease of a later
one: workers execute gangs in the same order, so that two gangs never wait for each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from pipedist.protocol.messages import spans
from pipedist.scheduler.commands import GangAssignment
from pipedist.scheduler.leases import GangAttempt, GangGroup, Worker
from pipedist.scheduler.membership import Membership
from pipedist.scheduler.queues import Todo
from pipedist.scheduler.settings import PassSettings


class GangGroups:
    __slots__ = ("_busy", "_last")

    def __init__(self) -> None:
        self._last: GangGroup | None = None  # the latest: it holds the pass's state, and shared memory
        self._busy: OrderedDict[int, GangGroup] = OrderedDict()  # by `id`; the least recently used first

    def __iter__(self) -> Iterator[GangGroup]:
        return iter(self._busy.values())

    def idle(self, members: Membership, replicas: int, gpus: float = 0.0, count: int = 0) -> GangGroup | None:
        """Return a group of idle workers with at least `gpus` GPUs each, or None if too few are idle.

        The workers of the latest group are preferred, then the longest idle ones.
        """
        size = gang_size(members, replicas, gpus, count)
        idle: Mapping[str, Worker] = members.idle
        if gpus:
            idle = {name: worker for name, worker in idle.items() if worker.gpus >= gpus}
        if len(idle) < size:
            return None
        last = self._last
        if last is not None and len(last.workers) == size:
            for worker in last.workers:
                if idle.get(worker.name) is not worker:
                    break
            else:
                return last
        chosen = {w.name: w for w in last.workers if idle.get(w.name) is w} if last is not None else {}
        for name, worker in idle.items():
            if len(chosen) >= size:
                break
            chosen[name] = worker
        # by length first, so that w2 comes before w10
        workers = sorted(list(chosen.values())[:size], key=lambda w: (len(w.name), w.name))
        return GangGroup(tuple(workers))

    def latest_if_idle(self, members: Membership, pass_id: int, settings: PassSettings) -> GangGroup | None:
        """Return the latest group if `idle` would return it, and its workers have the program of the pass."""
        group = self.idle(members, settings.replicas, settings.gpus, settings.members)
        if group is None or group is not self._last:
            return None
        return group if all(pass_id in worker.bound for worker in group.workers) else None

    def in_advance(
        self, members: Membership, replicas: int, gpus: float, depth_max: int, count: int = 0
    ) -> GangGroup | None:
        """Return a busy group at which one more gang may wait, or None."""
        for group in self._busy.values():
            if group.gangs >= depth_max or len(group.workers) != gang_size(members, replicas, gpus, count):
                return None
            return group if all(_works_for(w, group, members) for w in group.workers) else None
        return None

    def begin(self, group: GangGroup) -> None:
        group.gangs += 1
        self._last = group
        self._busy[id(group)] = group
        self._busy.move_to_end(id(group))

    def end(self, group: GangGroup) -> None:
        group.gangs -= 1
        if group.gangs == 0:
            del self._busy[id(group)]


def gang_size(members: Membership, replicas: int, gpus: float, count: int = 0) -> int:
    """Return the number of workers for `replicas` replicas: `count`, if that is set; one each with GPUs."""
    if count:
        return count
    return replicas if gpus else min(replicas, members.ready)


def _works_for(worker: Worker, group: GangGroup, members: Membership) -> bool:
    if not worker.leases:
        return worker.name in members.idle
    gang = members.leases[worker.leases[-1]].gang
    return gang is not None and gang.group is group


def form(members: Membership, serial: int, pass_id: int, todo: Todo, group: GangGroup) -> GangAttempt:
    """Create a gang for the calls of one step, and grant each member its lease."""
    lo, hi, attempt = todo
    gang = GangAttempt(serial, pass_id, lo, hi, attempt, group, due=hi - lo)
    for worker, (a, b) in zip(group.workers, spans(hi - lo, len(group.workers)), strict=True):
        gang.leases.append(members.grant(worker, pass_id, lo + a, lo + b, attempt, 0.0, gang))
    return gang


def parts(gang: GangAttempt) -> tuple[GangAssignment, ...]:
    return tuple([GangAssignment(x.worker, x.id, x.lo, x.hi) for x in gang.leases])
