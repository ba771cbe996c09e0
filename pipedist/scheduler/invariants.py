"""What holds of the scheduler's whole state between two events; checked in tests, not in production."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from pipedist.errors import LocalProtocolError
from pipedist.scheduler.gangs import Group
from pipedist.scheduler.membership import Lease, Membership
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.states import GangState, PassState, WorkerState


def check(passes: Mapping[int, Pass], members: Membership, waiting: Mapping[int, Pass]) -> None:
    """Check every invariant.

    Raises:
        LocalProtocolError: naming the invariant that does not hold.
    """
    _check_workers(members)
    held: dict[int, list[Lease]] = {id_: [] for id_ in passes}
    for lease in members.leases.values():
        _hold(lease.lo <= lease.next < lease.hi, f"lease {lease.id} is over but still held")
        _hold(lease.pass_id in passes, f"lease {lease.id} is of a closed pass")
        _hold(
            lease.id in members.workers[lease.worker].leases,
            f"lease {lease.id} is not known to its worker {lease.worker}",
        )
        held[lease.pass_id].append(lease)
    for pass_ in passes.values():
        _check_calls(pass_, held[pass_.id])
        _check_gangs(pass_, held[pass_.id])
        _check_counts(pass_)
        _hold(not pass_.deals or waiting.get(pass_.id) is pass_, f"pass {pass_.id} waits, but is not dealt")


def _check_workers(members: Membership) -> None:
    ready = 0
    for name, worker in members.workers.items():
        ready += worker.state is WorkerState.READY
        _hold(
            worker.state is WorkerState.READY or not (worker.leases or worker.bound or worker.unsure),
            f"worker {name} holds leases or passes while {worker.state.value}",
        )
        for lease_id in worker.leases:
            _hold(lease_id in members.leases, f"worker {name} holds unknown lease {lease_id}")
            _hold(
                members.leases[lease_id].pass_id in worker.bound,
                f"lease {lease_id} is of a pass that worker {name} was not told of",
            )
        _hold(
            all(members.leases[i].next == members.leases[i].lo for i in worker.leases[1:]),
            f"worker {name} reported calls of a lease that is not its first",
        )
        _hold(
            (name in members.idle) == (worker.state is WorkerState.READY and not worker.leases),
            f"worker {name} has {len(worker.leases)} leases and is {worker.state.value}: idle or not?",
        )
        _hold(
            name not in members.thirsty or len(worker.leases) == 1,
            f"worker {name} has {len(worker.leases)} leases and wants one in advance",
        )
        _hold(
            (name in members.supervised) == (worker.state is WorkerState.READY and worker.supervised),
            f"worker {name} is {worker.state.value}: supervised or not?",
        )
    _hold(ready == members.ready, f"{members.ready} workers are counted as ready, {ready} are")
    heard = [w.heard_at for w in members.supervised.values()]
    _hold(heard == sorted(heard), "the supervised worker unheard longest is not the first")


def _check_calls(pass_: Pass, held: list[Lease]) -> None:
    """Check that every call is in exactly one place, and that attempts are counted right."""
    replicas = pass_.settings.replicas
    waiting = [(t.lo, t.hi, t.attempt) for t in pass_.todo]
    leased = [(x.next, x.hi, x.attempt) for x in held if x.gang is None]
    leased += [(gang.lo, gang.hi, gang.attempt) for gang in pass_.gangs.values()]
    spans = sorted([(lo, hi) for lo, hi, _ in waiting + leased] + list(pass_.done))
    _hold(
        pass_.leased == sum(x.hi - x.next for x in held),
        f"pass {pass_.id} counts {pass_.leased} leased calls",
    )
    _hold(
        pass_.todo.calls == sum(x[1] - x[0] for x in waiting),
        f"pass {pass_.id} counts {pass_.todo.calls} waiting calls",
    )
    _hold(
        all(a[1] <= b[0] for a, b in pairwise(spans)),
        f"pass {pass_.id}: a call is in two places: {spans}",
    )
    _hold(
        not spans or (spans[0][0] >= 0 and spans[-1][1] <= pass_.offered * replicas),
        f"pass {pass_.id}: a call that was not offered: {spans}",
    )
    if pass_.settings.ordered and pass_.state is not PassState.FAILED:
        end = pass_.offered if pass_.last_step is None else pass_.last_step + 1
        lo, hi = pass_.visible * replicas, end * replicas
        total = sum(max(0, min(b, hi) - max(a, lo)) for a, b in spans)
        _hold(total == hi - lo, f"pass {pass_.id}: {hi - lo} calls are open, {total} are accounted for")
    if pass_.last_step is not None:
        limit = (pass_.last_step + 1) * replicas
        _hold(all(hi <= limit for _, hi, _ in waiting), f"pass {pass_.id}: a call waits that is of no use")
    if pass_.state is PassState.FAILED:
        _hold(not (waiting or leased), f"pass {pass_.id} has failed, but calls wait or run")
    tried = {call: t.raised + t.deaths for call, t in pass_.trouble.items()}
    if pass_.settings.gang:  # the first call of a step stands for all of it
        tried = {first + r: n for first, n in tried.items() for r in range(replicas)}
    for lo, hi, attempt in waiting + leased:
        calls = [c for c in tried if lo <= c < hi] if len(tried) < hi - lo else range(lo, hi)
        _hold(
            all(tried.get(c, 0) == attempt for c in calls) and (attempt == 0 or len(calls) == hi - lo),
            f"pass {pass_.id}: calls [{lo}, {hi}) are at attempt {attempt}, tried {tried}",
        )


def _check_gangs(pass_: Pass, held: list[Lease]) -> None:
    """Check that gangs are whole: every call of theirs was reported, or is under a lease of theirs."""
    replicas = pass_.settings.replicas
    counted: Counter[Group] = Counter()
    for serial, gang in pass_.gangs.items():
        counted[gang.group] += 1
        own = [x for x in held if x.gang is gang]
        _hold(
            gang.serial == serial and gang.state in (GangState.RUNNING, GangState.ENDING),
            f"gang {serial} is {gang.state.value}, but not over",
        )
        _hold(
            gang.hi - gang.lo == replicas and gang.lo % replicas == 0,
            f"gang {serial} has the calls [{gang.lo}, {gang.hi}), which are no step",
        )
        _hold(
            0 < gang.due == sum(x.hi - x.next for x in own),
            f"gang {serial} waits for {gang.due} calls, but not all of them are under a lease",
        )
        _hold(
            (gang.state is GangState.ENDING) == bool(gang.raised),
            f"gang {serial} is {gang.state.value}, {len(gang.raised)} calls raised",
        )
    for lease in held:
        _hold(
            (lease.gang is not None) == pass_.settings.gang,
            f"lease {lease.id} is of a gang, or of a gang pass, but not of both",
        )
        _hold(
            lease.gang is None or lease.gang.serial in pass_.gangs,
            f"lease {lease.id} is of a gang that is over",
        )
    _hold(
        set(counted) == set(pass_.groups) and all(group.gangs == n for group, n in counted.items()),
        f"pass {pass_.id}: its groups count other gangs than there are",
    )


def _check_counts(pass_: Pass) -> None:
    _hold(
        pass_.visible <= pass_.offered <= pass_.requested or not pass_.settings.pulled,
        f"pass {pass_.id}: visible {pass_.visible}, offered {pass_.offered}, requested {pass_.requested}",
    )
    _hold(
        not pass_.settings.ordered or pass_.consumed <= pass_.visible,
        f"pass {pass_.id}: {pass_.consumed} steps are consumed, {pass_.visible} were visible",
    )
    _hold(
        pass_.input_bytes >= 0 and pass_.result_bytes >= 0,
        f"pass {pass_.id}: {pass_.input_bytes} input bytes, {pass_.result_bytes} result bytes",
    )
    _hold(
        (pass_.last_step is not None) == (pass_.state in (PassState.FAILING, PassState.FAILED)),
        f"pass {pass_.id} is {pass_.state.value}, its last step {pass_.last_step}",
    )
    _hold(
        not pass_.held or pass_.leased > 0 or pass_.told_quiet,
        f"pass {pass_.id} is held and nothing of it runs, but that was not told",
    )
    _hold(not pass_.told_quiet or pass_.leased == 0, f"pass {pass_.id} was told to be quiet, but runs")


def _hold(holds: bool, story: str) -> None:
    if not holds:
        raise LocalProtocolError(story)
