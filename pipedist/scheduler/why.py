"""Why a run does not go on: what each call waits for, from the scheduler's state alone.

Every call that is not over is in exactly one place (see `passes`), and each place has its reason. What
nobody has begun because the valve is closed has one too: the reader, the data, or an earlier step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from pipedist.scheduler.gangs import gang_size
from pipedist.scheduler.membership import Lease, Membership
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.settings import Limits
from pipedist.scheduler.states import PassState, WorkerState
from pipedist.scheduler.suspects import Probe

WAITS_MAX = 20
"""Of one pass and one kind, that are told one by one; those that wait for longest, or the lowest, first."""


class Reason(enum.StrEnum):
    """What calls wait for."""

    RUNNING = "running"
    """They are executed: for their own end."""
    QUEUED = "queued"
    """For the calls before them at their worker."""
    FREE_WORKER = "free-worker"
    """All workers that may execute them are busy."""
    STARTING_WORKER = "starting-worker"
    """There is no worker that may execute them, but some are being started."""
    JOINING_WORKER = "joining-worker"
    """There is no worker that may execute them, and all dial in."""
    TURN = "turn"
    """Another pass goes first, and waits for workers itself."""
    BACKOFF = "back-off"
    """They raised, and rest before they are tried again."""
    SEARCH = "search"
    """They failed, and their guilty elements are looked for."""
    GANG = "gang"
    """All replicas of a step begin at once: for so many idle workers."""
    HELD = "held"
    """Their pass is drained: they are not begun any more."""
    EARLIER_STEP = "earlier-step"
    """The valve is closed by steps that are not complete."""
    READER = "reader"
    """The valve is closed by steps that are complete, and that nobody has taken."""
    DATA = "data"
    """Steps were asked for, and were not offered yet."""


class Wait(Struct, frozen=True):
    """Calls [lo, hi) of a pass wait.

    Args:
        attempt: how often they were tried before.
        worker: that has them; "" where none has.
        for_s: for how long, as far as that is known, seconds.
        text: for what, for people.
        lease: that the worker has them under; 0: they are under none, or not its first.
    """

    pass_id: int
    reason: Reason
    lo: int
    hi: int
    attempt: int = 0
    worker: str = ""
    for_s: float | None = None
    text: str = ""
    lease: int = 0


class Explanation(Struct, frozen=True):
    """What everything waits for.

    Args:
        silent_s: how long nothing has come back, been offered or been taken.
        waits: pass by pass, those of the best priority first.
        ready, busy: workers that may be given calls, and those of them that have some.
        laid_off: workers that may be stuck in a call that nobody waits for any more.
        starting: workers that have not joined.
    """

    silent_s: float
    waits: tuple[Wait, ...]
    ready: int
    busy: int
    laid_off: tuple[str, ...]
    starting: tuple[str, ...]


def explain(
    passes: Mapping[int, Pass], members: Membership, limits: Limits, moved_at: float, now: float
) -> Explanation:
    """Say what everything waits for.

    Args:
        moved_at: when something came back, was offered or was taken last.
    """
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
        tuple(w.name for w in workers if w.laid_off),
        tuple(w.name for w in workers if w.state is WorkerState.STARTING),
    )


def _few(waits: Iterable[Wait]) -> Iterator[Wait]:
    """Yield the first waits, and one for all others."""
    every = list(waits)
    yield from every[:WAITS_MAX]
    if rest := every[WAITS_MAX:]:
        lo, hi = min(x.lo for x in rest), max(x.hi for x in rest)
        yield Wait(rest[0].pass_id, rest[0].reason, lo, hi, text=f"{len(rest)} more like these")


def _of_leases(pass_: Pass, held: Sequence[Lease], members: Membership, now: float) -> Iterator[Wait]:
    running, queued = [], []
    for lease in sorted(held, key=lambda x: x.since):
        is_first = members.workers[lease.worker].leases[0] == lease.id
        at = (lease.attempt, lease.worker)
        if is_first:
            about = "its elements are tried apart" if lease.probe is not None else ""
            if lease.twin is not None:
                about = f"it is executed on {lease.twin.worker} too, because it takes long"
            if lease.gang is not None:
                about = f"in a gang of {len(lease.gang.leases)} workers, of which {_due(lease)} are not done"
            lo = lease.next
            for_s = now - lease.since
            running.append(Wait(pass_.id, Reason.RUNNING, lo, lo + 1, *at, for_s, about, lease.id))
        behind = lease.next + is_first
        if behind < lease.hi:
            queued.append(Wait(pass_.id, Reason.QUEUED, behind, lease.hi, *at, text="behind another call"))
    yield from _few(running)
    yield from _few(queued)


def _due(lease: Lease) -> int:
    return sum(x.next < x.hi for x in lease.gang.leases) if lease.gang is not None else 0


def _of_waiting(pass_: Pass, passes: Mapping[int, Pass], members: Membership) -> Iterator[Wait]:
    if not pass_.todo.calls and not pass_.suspects.waiting:
        return
    reason, text = _lacking(pass_, passes, members)
    todo = [Wait(pass_.id, reason, lo, hi, attempt, text=text) for lo, hi, attempt in pass_.todo]
    probes = [
        Wait(pass_.id, reason, x.call, x.call + 1, x.tried, text=f"some of its elements; {text}")
        for x in pass_.suspects.waiting
    ]
    yield from _few(probes)
    yield from _few(todo)


def _lacking(pass_: Pass, passes: Mapping[int, Pass], members: Membership) -> tuple[Reason, str]:
    """Return what calls lack that could be begun, but for that."""
    if pass_.held:
        return Reason.HELD, "the run is stopping: nothing new is begun"
    gpus = pass_.settings.gpus
    idle = sum(1 for worker in members.idle.values() if worker.gpus >= gpus)
    ready = members.ready_for(gpus)
    out = sum(1 for w in members.workers.values() if w.laid_off and w.gpus >= gpus)
    stuck = f"; {out} more may be stuck in calls that nobody waits for" if out else ""
    needs = f" {gpus:g} GPU{'' if gpus == 1 else 's'}"
    owns, own = (f" that owns{needs}", f" that own{needs}") if gpus else ("", "")
    if not ready:
        starting = sum(w.state is WorkerState.STARTING for w in members.workers.values())
        if starting:
            return Reason.STARTING_WORKER, f"none{owns} has joined, {starting} to be started{stuck}"
        return Reason.JOINING_WORKER, f"no worker{owns} is there{stuck}"
    if pass_.settings.gang:
        size = gang_size(members, pass_.settings.replicas, gpus)
        if idle < size:
            needed = f"it needs {size} idle workers{own} at once"
            return Reason.GANG, f"{needed}; {idle} of {ready} are idle{stuck}"
    if idle:
        others = [p.id for p in passes.values() if p is not pass_ and p.deals and p.settings.gang]
        return Reason.TURN, f"pass {others[0]} goes first" if others else "it is the next to go"
    busy = f"the only worker{owns} is busy" if ready == 1 else f"all {ready} workers{own} are busy"
    return Reason.FREE_WORKER, busy + stuck


def _of_troubled(pass_: Pass, now: float) -> Iterator[Wait]:
    resting = []
    for due, item in sorted(pass_.resting.schedule, key=lambda x: x[0]):
        lo, hi = (item.call, item.call + 1) if isinstance(item, Probe) else item[:2]
        attempt = item.tried if isinstance(item, Probe) else item.attempt
        text = f"it raised, and is tried again in {max(0.0, due - now):.1f} s"
        resting.append(Wait(pass_.id, Reason.BACKOFF, lo, hi, attempt, text=text))
    yield from _few(resting)
    suspects = []
    for call, suspect in sorted(pass_.suspects.calls.items()):
        trying = len(suspect.bisection.trying) if suspect.bisection is not None else 0
        text = f"it failed, and its guilty elements are looked for: {trying} subsets are to be tried"
        suspects.append(Wait(pass_.id, Reason.SEARCH, call, call + 1, text=text))
    yield from _few(suspects)


def _of_valve(pass_: Pass, limits: Limits, workers: int) -> Iterator[Wait]:
    """Say why nothing more is offered of a pass whose steps have not ended."""
    if not pass_.settings.ordered:
        return
    replicas = pass_.settings.replicas
    shown = pass_.visible - pass_.consumed
    if shown > 0:
        text = f"{shown} complete steps have not been taken"
        calls = (pass_.consumed * replicas, pass_.visible * replicas)
        yield Wait(pass_.id, Reason.READER, *calls, text=text)
    if pass_.state is not PassState.OPEN or pass_.held:
        return
    end = pass_.offered * replicas
    if pass_.requested > pass_.offered or not pass_.settings.pulled:
        text = f"step {pass_.offered} has not been offered"
        yield Wait(pass_.id, Reason.DATA, end, max(pass_.requested, pass_.offered + 1) * replicas, text=text)
    elif pass_.offered > pass_.visible and pass_.steps_wanted(limits, workers) == 0:
        text = (
            f"{pass_.offered - pass_.visible} steps are under way and {shown} not taken: no more are asked "
            f"for before step {pass_.visible} is complete"
        )
        yield Wait(pass_.id, Reason.EARLIER_STEP, end, end, text=text)
