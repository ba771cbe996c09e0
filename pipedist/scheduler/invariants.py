"""Invariants of the scheduler's whole state between two events; checked in tests, not in production.

Simulations check after every event, so messages are built only for violations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import gt

from pipedist.errors import LocalProtocolError
from pipedist.scheduler.bisection import Probe
from pipedist.scheduler.leases import GangGroup, Lease
from pipedist.scheduler.membership import Membership
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.queues import Todo
from pipedist.scheduler.transitions import GangState, PassState, WorkerState


def check(passes: Mapping[int, Pass], members: Membership, waiting: Mapping[int, Pass]) -> None:
    """Check every invariant; raise LocalProtocolError with the text of the first that does not hold."""
    for violation in _check_all(passes, members, waiting):
        raise LocalProtocolError(violation)


def _check_all(passes: Mapping[int, Pass], members: Membership, waiting: Mapping[int, Pass]) -> Iterator[str]:
    yield from _check_workers(members)
    yield from _check_watched(members)
    held: dict[int, list[Lease]] = {id_: [] for id_ in passes}
    for lease in members.leases.values():
        if not lease.lo <= lease.next < lease.hi:
            yield f"lease {lease.id} is over but still held"
        if lease.pass_id not in passes:
            yield f"lease {lease.id} is of a closed pass"
        if lease.twin is not None:
            yield from _check_twins(lease, lease.twin, members)
        if lease.id not in members.workers[lease.worker].leases:
            yield f"lease {lease.id} is not known to its worker {lease.worker}"
        if members.workers[lease.worker].gpus < passes[lease.pass_id].settings.gpus:
            yield f"lease {lease.id} needs GPUs, and worker {lease.worker} owns too few"
        held[lease.pass_id].append(lease)
    for id_, pass_ in passes.items():
        yield from _check_calls(pass_, held[id_])
        if pass_.settings.gang:
            yield from _check_gangs(pass_, held[id_])
        elif pass_.gangs or any(lease.gang is not None for lease in held[id_]):
            yield f"pass {id_} has gangs, but is no gang pass"
        yield from _check_counts(pass_)
        yield from _check_kept(pass_, members)
        slots: Counter[str] = Counter()
        for lease in held[id_]:
            slots[lease.worker] += (lease.hi - lease.next) * lease.overlaps
        if +slots != Counter(members.slots.get(id_, {})) or slots.total() != members.slots_used[id_]:
            yield f"pass {id_} has {+slots} overlapping calls, counted are {members.slots.get(id_)}"
        if 0 < pass_.settings.concurrency < pass_.leased:
            yield f"pass {id_} has {pass_.leased} calls at once, more than {pass_.settings.concurrency}"
        if pass_.quotas is not None:
            sums = [sum(column) for column in zip(*pass_.quotas.held.values(), strict=True)]
            if any(map(gt, sums, pass_.quotas.limits)):
                yield f"pass {id_} has quotas of {sums} in all, more than {pass_.quotas.limits}"
        if pass_.has_assignable_calls and waiting.get(id_) is not pass_:
            yield f"pass {id_} has waiting calls, but is not registered"


def _check_twins(lease: Lease, twin: Lease, members: Membership) -> Iterator[str]:
    if twin.twin is not lease or members.leases.get(twin.id) is not twin or twin.worker == lease.worker:
        yield f"lease {lease.id} has a twin, {twin.id}, that is none"
    calls = [(x.pass_id, x.next, x.hi, x.attempt) for x in (lease, twin)]
    if calls[0] != calls[1] or lease.gang is not None or lease.probe is not None:
        yield f"leases {lease.id} and {twin.id} are twins of different calls: {calls}"


def _check_watched(members: Membership) -> Iterator[str]:
    """Check that what may get a second attempt runs alone, and that the longest silent is the first."""
    for running in members.watched.values():
        since = -math.inf
        for lease in running.leases:
            if members.leases.get(lease.id) is not lease or lease.twin is not None:
                yield f"lease {lease.id} is watched, and is over or has a twin"
            if lease.since < since:
                yield f"lease {lease.id} is watched behind one that is not silent so long"
            since = lease.since


def _check_kept(pass_: Pass, members: Membership) -> Iterator[str]:
    if pass_.cached and pass_.settings.gang:
        yield f"pass {pass_.id} is of gangs, whose calls are never kept"
    for (name, incarnation), kept in pass_.cached.items():
        if not pass_.has_assignable_calls or members.current(name, incarnation) is None:
            continue
        for lo, hi in kept:
            if any(t.attempt == 0 and t.lo < hi and lo < t.hi for t in pass_.todo):
                yield f"calls [{lo}, {hi}) of pass {pass_.id} wait, but {name} has them"


def _check_workers(members: Membership) -> Iterator[str]:
    ready = 0
    if set(members.gone) != {name for name, w in members.workers.items() if w.state is WorkerState.GONE}:
        yield f"the workers {list(members.gone)} are listed as gone, but others are"
    leases, idle, supervised = members.leases, members.idle, members.supervised
    capacity_classes = members.capacity_classes
    for name, worker in members.workers.items():
        held = worker.leases
        is_ready = worker.state is WorkerState.READY
        ready += is_ready and not worker.suspended
        if worker.suspended and held:
            yield f"worker {name} is suspended, and holds leases"
        if not is_ready and (held or worker.bound or worker.unsure or worker.suspended):
            yield f"worker {name} holds leases or passes while {worker.state.value}"
        for place, lease_id in enumerate(held):
            lease = leases.get(lease_id)
            if lease is None:
                yield f"worker {name} holds unknown lease {lease_id}"
                return
            if lease.pass_id not in worker.bound:
                yield f"worker {name} lacks the program of lease {lease_id}"
            if lease.overlaps != (place >= worker.ordered):
                yield f"worker {name} has lease {lease_id} in the wrong place"
            if place and lease.next != lease.lo and not lease.overlaps:
                yield f"worker {name} reported calls of a lease that is not its first"
        if (name in idle) != (is_ready and not held and not worker.suspended):
            yield f"worker {name} has {len(held)} leases and is {worker.state.value}: idle or not?"
        room = capacity_classes.get(worker.gpus)
        if room is not None:
            if (name in idle) != (name in room.idle):
                yield f"worker {name} is indexed as idle in one place only"
            if (name in room.waiting) != (is_ready and bool(held) and not worker.ordered):
                yield f"worker {name} has {len(held)} leases: do all of them overlap or not?"
            if name in room.under_prefetched and worker.ordered != 1:
                yield f"worker {name} has {len(held)} leases and wants one in advance"
        rooms = () if room is None else (room.idle, room.waiting, room.under_prefetched)
        if (name in members.roomy) != any(name in each for each in rooms):
            yield f"worker {name} is indexed as one that can get a lease in one place only"
        if (name in supervised) != (is_ready and worker.supervised):
            yield f"worker {name} is {worker.state.value}: supervised or not?"
    if not all(room.ready for room in capacity_classes.values()):
        yield "a capacity class is empty"
    in_rooms = sum([room.ready for room in capacity_classes.values()])
    if in_rooms != ready or sum([len(room.idle) for room in capacity_classes.values()]) != len(idle):
        yield f"{ready} workers are ready and {len(idle)} idle, but not in their capacity classes"
    if ready != members.ready:
        yield f"{members.ready} workers are counted as ready, {ready} are"
    if supervised:
        heard = [w.heard_at for w in supervised.values()]
        if heard != sorted(heard):
            yield "the supervised worker silent longest is not the first"


def _check_calls(pass_: Pass, held: list[Lease]) -> Iterator[str]:
    """Check that every call is in exactly one place, and that attempts are counted right."""
    replicas = pass_.settings.replicas
    waiting = list(pass_.todo)
    if pass_.settings.gang:
        leased = [(gang.lo, gang.hi, gang.attempt) for gang in pass_.gangs.values()]
    else:
        firsts = [x for x in held if x.twin is None or x.id < x.twin.id]
        leased = [(x.next, x.hi, x.attempt) for x in firsts if x.probe is None]
    spans = [x[:2] for x in waiting]
    spans += [x[:2] for x in leased]
    spans += pass_.done
    if pass_.backing_off or pass_.searches.calls or pass_.searches.cleared:
        yield from _check_apart(pass_, held)
        spans += [x[:2] for x in pass_.backing_off if isinstance(x, Todo)]
        spans += [(call, call + 1) for call in pass_.searches.calls]
    spans.sort()
    if pass_.leased != sum([x.hi - x.next for x in held]):
        yield f"pass {pass_.id} counts {pass_.leased} leased calls"
    if pass_.todo.calls != sum([hi - lo for lo, hi, _ in waiting]):
        yield f"pass {pass_.id} counts {pass_.todo.calls} waiting calls"
    at = 0
    for lo, hi in spans:
        if lo < at:
            yield f"pass {pass_.id}: a call is in two places, or below 0: {spans}"
        at = hi
    if at > pass_.offered * replicas:
        yield f"pass {pass_.id}: a call that was not offered: {spans}"
    if pass_.settings.ordered and pass_.state is not PassState.FAILED:
        end = pass_.offered if pass_.last_step is None else pass_.last_step + 1
        first, last = pass_.visible * replicas, end * replicas
        total = sum([hi - lo for lo, hi in spans if first <= lo and hi <= last])
        total += sum([max(0, min(hi, last) - max(lo, first)) for lo, hi in spans if lo < first or hi > last])
        if total != last - first:
            yield f"pass {pass_.id}: {last - first} calls are open, {total} are accounted for"
    if pass_.last_step is not None:
        limit = (pass_.last_step + 1) * replicas
        if any(hi > limit for _, hi, _ in waiting):
            yield f"pass {pass_.id}: a call waits that is of no use"
    if pass_.state is PassState.FAILED and (waiting or leased):
        yield f"pass {pass_.id} has failed, but calls wait or run"
    if pass_.histories or any(x[2] for x in waiting) or any(x[2] for x in leased):
        yield from _check_attempts(pass_, [*waiting, *leased])


def _check_apart(pass_: Pass, held: list[Lease]) -> Iterator[str]:
    searches = pass_.searches
    backing_off = [x for x in pass_.backing_off if isinstance(x, Todo)]
    if pass_.histories or backing_off:
        yield from _check_attempts(pass_, backing_off)
    probes = [*searches.waiting, *(x for x in pass_.backing_off if isinstance(x, Probe))]
    probes += [x.probe for x in held if x.probe is not None]
    tried = sorted([(probe.call, probe.span) for probe in probes])
    due = [(c, s) for c, x in searches.calls.items() if x.bisection is not None for s in x.bisection.trying]
    if tried != sorted(due):
        yield f"pass {pass_.id}: probes {sorted(due)} are due, {tried} wait or run"
    if searches.calls.keys() & searches.cleared.keys():
        yield f"pass {pass_.id}: a call is searched and cleared"
    if any(x.bisection is None or not x.bisection.healthy for x in searches.cleared.values()):
        yield f"pass {pass_.id}: a call is cleared, but has no healthy elements"
    if pass_.last_step is not None:
        end = (pass_.last_step + 1) * pass_.settings.replicas
        kept = (*searches.calls, *searches.cleared, *(x.lo for x in backing_off))
        of_no_use = [call for call in kept if call >= end]
        if of_no_use:
            yield f"pass {pass_.id}: calls {of_no_use} are obsolete, but kept"


def _check_attempts(pass_: Pass, open_: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    """Check that calls that are not over, as (lo, hi, attempt), were tried as often as their history says."""
    tried = {call: t.tried for call, t in pass_.histories.items()}
    if tried and pass_.settings.gang:  # the first call of a step stands for all of it
        replicas = pass_.settings.replicas
        tried = {first + r: n for first, n in tried.items() for r in range(replicas)}
    for lo, hi, attempt in open_:
        calls = [c for c in tried if lo <= c < hi] if len(tried) < hi - lo else range(lo, hi)
        if any(tried.get(c, 0) != attempt for c in calls) or (attempt > 0 and len(calls) != hi - lo):
            yield f"pass {pass_.id}: calls [{lo}, {hi}) are at attempt {attempt}, tried {tried}"


def _check_gangs(pass_: Pass, held: list[Lease]) -> Iterator[str]:
    replicas = pass_.settings.replicas
    counted: Counter[GangGroup] = Counter()
    for serial, gang in pass_.gangs.items():
        counted[gang.group] += 1
        if gang.serial != serial or gang.state not in (GangState.RUNNING, GangState.ENDING):
            yield f"gang {serial} is {gang.state.value}, but not over"
        if gang.hi - gang.lo != replicas or gang.lo % replicas:
            yield f"gang {serial} has the calls [{gang.lo}, {gang.hi}), which are no step"
        if not 0 < gang.due == sum([x.hi - x.next for x in held if x.gang is gang]):
            yield f"gang {serial} waits for {gang.due} calls, but not all of them are under a lease"
        if (gang.state is GangState.ENDING) != bool(gang.raised):
            yield f"gang {serial} is {gang.state.value}, {len(gang.raised)} calls raised"
    for lease in held:
        if lease.gang is None:
            yield f"lease {lease.id} is of a gang pass, but of no gang"
        elif lease.gang.serial not in pass_.gangs:
            yield f"lease {lease.id} is of a gang that is over"
    if set(counted) != set(pass_.groups) or any(group.gangs != n for group, n in counted.items()):
        yield f"pass {pass_.id}: its groups count other gangs than there are"


def _check_counts(pass_: Pass) -> Iterator[str]:
    if pass_.settings.pulled and not pass_.visible <= pass_.offered <= pass_.requested:
        yield f"pass {pass_.id}: visible {pass_.visible}, offered {pass_.offered}, requested {pass_.requested}"
    if pass_.settings.ordered and pass_.consumed > pass_.visible:
        yield f"pass {pass_.id}: {pass_.consumed} steps are consumed, {pass_.visible} were visible"
    if pass_.input_bytes < 0 or pass_.result_bytes < 0:
        yield f"pass {pass_.id}: {pass_.input_bytes} input bytes, {pass_.result_bytes} result bytes"
    if (pass_.last_step is not None) != (pass_.state in (PassState.FAILING, PassState.FAILED)):
        yield f"pass {pass_.id} is {pass_.state.value}, its last step {pass_.last_step}"
    if pass_.draining and not pass_.leased and not pass_.drain_reported:
        yield f"pass {pass_.id} is draining and has no running calls, but that was not reported"
    if pass_.drain_reported and pass_.leased:
        yield f"pass {pass_.id} was reported as drained, but has running calls"
