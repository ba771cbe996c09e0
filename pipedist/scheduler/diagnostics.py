"""Explain what each call waits for, from the scheduler's state alone.

Every unfinished call is in exactly one place (see `passes`), and each place has its reason. Steps that were not
requested have one too: the reader, the data, or an earlier step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from pipedist.scheduler.bisection import Probe
from pipedist.scheduler.gang_scheduling import gang_size
from pipedist.scheduler.leases import Lease
from pipedist.scheduler.membership import Membership
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.settings import SchedulerLimits
from pipedist.scheduler.transitions import PassState, WorkerState

WAITS_MAX = 20  # waits listed per pass and reason; the longest, or the lowest calls, first


class Reason(enum.StrEnum):
    RUNNING = "running"
    QUEUED = "queued"  # they wait behind other calls at their worker
    FREE_WORKER = "free-worker"  # all suitable workers are busy, or suspended
    STARTING_WORKER = "starting-worker"  # there is no suitable worker, but some are starting
    JOINING_WORKER = "joining-worker"  # there is no suitable worker, and none is started by the launcher
    TURN = "turn"  # another pass goes first, and waits for workers
    BACKOFF = "back-off"  # they raised, and back off before their retry
    SEARCH = "search"  # they failed, and their culprits are searched
    GANG = "gang"  # the replicas of a step start together: too few workers are idle
    HELD = "held"  # their pass is draining: they do not start
    EARLIER_STEP = "earlier-step"  # too many earlier steps are incomplete
    READER = "reader"  # too many complete steps were not consumed
    DATA = "data"  # requested steps are not available yet


class Wait(Struct, frozen=True):
    pass_id: int
    reason: Reason
    lo: int
    hi: int
    attempt: int = 0  # number of earlier attempts
    worker: str = ""  # the worker that has them, or ""
    for_s: float | None = None  # seconds that they have waited, if known
    text: str = ""  # the reason, for people
    lease: int = 0  # the worker's first lease, if it contains them; else 0


class Explanation(Struct, frozen=True):
    silent_s: float  # seconds since the last progress
    waits: tuple[Wait, ...]  # waits by pass, those of the best priority first
    # ready, busy: number of workers that may get calls, and of those that have some
    ready: int
    busy: int
    suspended: tuple[str, ...]  # workers that may be stuck in a cancelled call
    starting: tuple[str, ...]  # workers that have not joined


def explain(
    passes: Mapping[int, Pass], members: Membership, limits: SchedulerLimits, moved_at: float, now: float
) -> Explanation:
    held: dict[int, list[Lease]] = {id_: [] for id_ in passes}
    for lease in members.leases.values():
        held[lease.pass_id].append(lease)
    waits: list[Wait] = []
    for pass_ in sorted(passes.values(), key=lambda p: (p.settings.priority, p.id)):
        waits += _of_leases(pass_, held[pass_.id], members, now)
        waits += _of_waiting(pass_, passes, members)
        waits += _of_troubled(pass_, now)
        waits += _of_valve(pass_, limits, max(1, members.ready_for(pass_.settings.gpus)))
    workers = members.workers.values()
    return Explanation(
        max(0.0, now - moved_at),
        tuple(waits),
        members.ready,
        members.ready - len(members.idle),
        tuple(w.name for w in workers if w.suspended),
        tuple(w.name for w in workers if w.state is WorkerState.STARTING),
    )


def _few(waits: Iterable[Wait]) -> Iterator[Wait]:
    every = list(waits)
    yield from every[:WAITS_MAX]
    if rest := every[WAITS_MAX:]:
        lo, hi = min(x.lo for x in rest), max(x.hi for x in rest)
        yield Wait(rest[0].pass_id, rest[0].reason, lo, hi, text=f"{len(rest)} more of this kind")


def _of_leases(pass_: Pass, held: Sequence[Lease], members: Membership, now: float) -> Iterator[Wait]:
    running, queued = [], []
    for lease in sorted(held, key=lambda x: x.since):
        is_first = lease.overlaps or members.workers[lease.worker].leases[0] == lease.id
        at = (lease.attempt, lease.worker)
        if is_first:
            about = "its elements are executed separately" if lease.probe is not None else ""
            if lease.twin is not None:
                about = f"it is executed on {lease.twin.worker} too, because it takes long"
            if lease.gang is not None:
                due = sum(x.next < x.hi for x in lease.gang.leases)
                about = f"in a gang of {len(lease.gang.leases)} workers, {due} of them not done"
            lo, for_s = lease.next, now - lease.since
            running.append(Wait(pass_.id, Reason.RUNNING, lo, lo + 1, *at, for_s, about, lease.id))
        behind = lease.next + is_first
        if behind < lease.hi:
            queued.append(Wait(pass_.id, Reason.QUEUED, behind, lease.hi, *at, text="behind another call"))
    yield from _few(running)
    yield from _few(queued)


def _of_waiting(pass_: Pass, passes: Mapping[int, Pass], members: Membership) -> Iterator[Wait]:
    if not pass_.todo.calls and not pass_.searches.waiting:
        return
    reason, text = _lacking(pass_, passes, members)
    todo = [Wait(pass_.id, reason, lo, hi, attempt, text=text) for lo, hi, attempt in pass_.todo]
    probes = [
        Wait(pass_.id, reason, x.call, x.call + 1, x.tried, text=f"some of its elements; {text}")
        for x in pass_.searches.waiting
    ]
    yield from _few(probes)
    yield from _few(todo)


def _lacking(pass_: Pass, passes: Mapping[int, Pass], members: Membership) -> tuple[Reason, str]:
    if pass_.draining:
        return Reason.HELD, "the run is stopping: no new calls start"
    gpus = pass_.settings.gpus
    idle = sum(1 for worker in members.idle.values() if worker.gpus >= gpus)
    ready = members.ready_for(gpus)
    out = sum(1 for w in members.workers.values() if w.suspended and w.gpus >= gpus)
    stuck = f"; {out} more may be stuck in cancelled calls" if out else ""
    needs = f" {gpus:g} GPU{'' if gpus == 1 else 's'}"
    owns, own = (f" that owns{needs}", f" that own{needs}") if gpus else ("", "")
    if not ready:
        starting = sum(w.state is WorkerState.STARTING for w in members.workers.values())
        if starting:
            return Reason.STARTING_WORKER, f"none{owns} has joined, {starting} to be started{stuck}"
        if out:
            many = f"all {out} workers{own} are in cancelled calls"
            busy = f"the only worker{owns} is in a cancelled call" if out == 1 else many
            return Reason.FREE_WORKER, f"{busy}, until these return"
        return Reason.JOINING_WORKER, f"no worker{owns} has joined"
    if pass_.settings.gang:
        size = gang_size(members, pass_.settings.replicas, gpus, pass_.settings.members)
        if idle < size:
            needed = f"it needs {size} idle workers{own} at once"
            return Reason.GANG, f"{needed}; {idle} of {ready} are idle{stuck}"
    if idle:
        gangs = [p for p in passes.values() if p is not pass_ and p.settings.gang]
        others = [p.id for p in gangs if p.has_assignable_calls]
        return Reason.TURN, f"pass {others[0]} goes first" if others else "it is the next to go"
    busy = f"the only worker{owns} is busy" if ready == 1 else f"all {ready} workers{own} are busy"
    return Reason.FREE_WORKER, busy + stuck


def _of_troubled(pass_: Pass, now: float) -> Iterator[Wait]:
    backing_off = []
    for due, item in sorted(pass_.backing_off.schedule, key=lambda x: x[0]):
        lo, hi = (item.call, item.call + 1) if isinstance(item, Probe) else item[:2]
        attempt = item.tried if isinstance(item, Probe) else item.attempt
        text = f"it raised; its retry is in {max(0.0, due - now):.1f} s"
        backing_off.append(Wait(pass_.id, Reason.BACKOFF, lo, hi, attempt, text=text))
    yield from _few(backing_off)
    searches = []
    for call, search in sorted(pass_.searches.calls.items()):
        trying = len(search.bisection.trying) if search.bisection is not None else 0
        text = f"it failed; the search for its culprits has {trying} pending subsets"
        searches.append(Wait(pass_.id, Reason.SEARCH, call, call + 1, text=text))
    yield from _few(searches)


def _of_valve(pass_: Pass, limits: SchedulerLimits, workers: int) -> Iterator[Wait]:
    """Explain why a pass whose steps have not ended has no more of them."""
    if not pass_.settings.ordered:
        return
    replicas = pass_.settings.replicas
    shown = pass_.visible - pass_.consumed
    if shown > 0:
        text = f"{shown} complete steps were not consumed"
        calls = (pass_.consumed * replicas, pass_.visible * replicas)
        yield Wait(pass_.id, Reason.READER, *calls, text=text)
    if pass_.state is not PassState.OPEN or pass_.draining:
        return
    end = pass_.offered * replicas
    if pass_.requested > pass_.offered or not pass_.settings.pulled:
        text = f"step {pass_.offered} is not available"
        yield Wait(pass_.id, Reason.DATA, end, max(pass_.requested, pass_.offered + 1) * replicas, text=text)
    elif pass_.offered > pass_.visible and pass_.steps_wanted(limits, workers) == 0:
        flow = f"{pass_.offered - pass_.visible} steps are in flight and {shown} not consumed"
        text = f"{flow}: no more are requested before step {pass_.visible} is complete"
        yield Wait(pass_.id, Reason.EARLIER_STEP, end, end, text=text)
