"""Assign waiting calls to workers that have capacity."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from pipedist.protocol.messages import spans
from pipedist.scheduler import commands as cmd
from pipedist.scheduler.bisection import Probe, Span
from pipedist.scheduler.gang_scheduling import form, parts
from pipedist.scheduler.leases import GangGroup, Lease, Worker
from pipedist.scheduler.membership import Membership
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.queues import RangeSet, Todo
from pipedist.scheduler.settings import SchedulerLimits


@dataclass(eq=False)
class Assigner:
    """Decides which calls go to which worker next.

    Passes of the best priority take turns. Only short calls are sent in advance, and a gang needs several
    idle workers: while the calls of the next pass can't be assigned, those of other passes wait too, so that
    workers become idle for it. A turn is used up only by an assignment.

    A call that needs GPUs is assigned only to a worker that owns them; while none of these has capacity,
    passes that other workers can serve go first, and these workers get no calls in advance. A worker executes
    one call at a time, so two calls never use one GPU, unless workers share it, or the calls overlap.

    Calls that only wait overlap (`PassSettings.at_once`): a worker gets them while it executes fewer than its share,
    each worker in turn. A worker that has no other calls gets leases of other passes too.
    """

    _limits: SchedulerLimits
    _members: Membership
    _waiting: dict[int, Pass]  # passes with waiting calls; may contain others
    _out: list[cmd.Command]
    _last_gang: int = 0
    _turn: int = 0  # the pass whose calls were assigned last

    def assign(self) -> None:
        """Assign all calls that workers have capacity for: first to idle workers, then in advance."""
        members = self._members
        self._recall_all()
        stuck: set[int] = set()
        wanted: float | None = None
        """Workers with this number of GPUs get no calls in advance: other calls wait for them."""
        while members.ready and (pass_ := self._next_pass(stuck)) is not None:
            gpus = pass_.settings.gpus
            if pass_.settings.gang:
                if gpus and members.ready_for(gpus) < pass_.settings.replicas:
                    stuck.add(pass_.id)  # more idle workers without GPUs would not help
                    continue
                if not self._issue_gang(pass_):
                    return
            elif (worker := self._with_room(pass_, wanted)) is not None:
                self._issue(worker, pass_)
            elif gpus or pass_.settings.at_once:
                stuck.add(pass_.id)
                if gpus:
                    wanted = gpus if wanted is None else min(wanted, gpus)
                continue
            else:
                return
            self._turn = pass_.id

    @property
    def nothing_waits(self) -> bool:
        return not any(pass_.has_assignable_calls for pass_ in self._waiting.values())

    def assign_second_attempt(self, pass_: Pass, lease: Lease, worker: Worker) -> Lease:
        twin = self._grant(worker, pass_, Todo(lease.next, lease.hi, lease.attempt), twin=lease.id)
        twin.twin, lease.twin = lease, twin
        twin.second_attempts = lease.second_attempts = lease.second_attempts + 1
        return twin

    def _recall_all(self) -> None:
        """Recall results that workers cached for the previous driver, before their calls are assigned."""
        for pass_ in self._waiting.values():
            if pass_.cached and pass_.has_assignable_calls:
                for (name, incarnation), kept in pass_.cached.items():
                    if self._members.current(name, incarnation) is not None:
                        self._recall(self._members.workers[name], pass_, kept)

    def _recall(self, worker: Worker, pass_: Pass, kept: RangeSet) -> None:
        for lo, hi in [(t.lo, t.hi) for a, b in list(kept) for t in pass_.todo.take_untried(a, b)]:
            kept.discard(lo, hi)
            self._bind(worker, pass_)
            lease = self._members.grant(worker, pass_.id, lo, hi, 0, 0.0)
            pass_.leased += hi - lo
            self._out.append(cmd.SendRecall(worker.name, lease.id, pass_.id, lo, hi))

    def _with_room(self, pass_: Pass, wanted: float | None) -> Worker | None:
        members, gpus = self._members, pass_.settings.gpus
        worker = members.idle_for(gpus) if members.idle else None
        if pass_.settings.at_once:
            if pass_.settings.concurrency and pass_.leased >= pass_.settings.concurrency:
                return None
            return worker or members.with_slot(pass_.id, self._calls_at_once(pass_))
        if worker is not None or not members.roomy:
            return worker
        in_advance = pass_.is_short(self._limits) and not pass_.searches.waiting
        return members.busy_for(gpus, in_advance=in_advance, below=wanted)

    def _calls_at_once(self, pass_: Pass) -> int:
        """Return the number of overlapping calls of a pass that one worker may have."""
        settings = pass_.settings
        calls = min(settings.concurrency or math.inf, pass_.leased + pass_.todo.calls)
        return min(settings.at_once, math.ceil(calls / self._members.expected_for(settings.gpus)))

    def _next_pass(self, stuck: Collection[int]) -> Pass | None:
        """Return the pass whose turn it is, or None; `stuck` ones have no suitable worker with capacity."""
        waiting = self._waiting
        if len(waiting) == 1:  # the common case, cheaper
            [pass_] = waiting.values()
            if not pass_.has_assignable_calls:
                waiting.clear()
                return None
            return None if pass_.id in stuck else pass_
        for idle in [p.id for p in waiting.values() if not p.has_assignable_calls]:
            del waiting[idle]
        if stuck:
            waiting = {id_: pass_ for id_, pass_ in waiting.items() if id_ not in stuck}
        if len(waiting) < 2:
            return next(iter(waiting.values()), None)
        best = min(p.settings.priority for p in waiting.values())
        ids = sorted(p.id for p in waiting.values() if p.settings.priority == best)
        return waiting[next((i for i in ids if i > self._turn), ids[0])]

    def _issue(self, worker: Worker, pass_: Pass) -> None:
        if pass_.searches.waiting:
            probe = pass_.searches.waiting.pop(0)
            self._grant(worker, pass_, Todo(probe.call, probe.call + 1, probe.tried), probe=probe)
            return
        workers = self._members.ready_for(pass_.settings.gpus)
        calls = pass_.bundle_calls(self._limits, workers)
        if pass_.settings.at_once:
            slots = self._members.slots.get(pass_.id)
            held = slots.get(worker.name, 0) if slots else 0
            calls = max(1, min(calls, self._calls_at_once(pass_) - held))
        todo = pass_.todo.take(calls)
        self._grant(worker, pass_, todo, expected_s=(pass_.call_s or 0.0) * (todo.hi - todo.lo))

    def _grant(
        self,
        worker: Worker,
        pass_: Pass,
        todo: Todo,
        *,
        expected_s: float = 0.0,
        probe: Probe | None = None,
        twin: int = 0,
    ) -> Lease:
        lo, hi, attempt = todo
        self._bind(worker, pass_)
        overlaps = pass_.settings.at_once > 0
        lease = self._members.grant(worker, pass_.id, lo, hi, attempt, expected_s, overlaps=overlaps)
        lease.probe = probe
        pass_.leased += hi - lo
        elements: tuple[Span, ...] = ()
        if probe is not None:
            elements = (probe.span,)
        elif attempt:
            elements = pass_.searches.elements_of(lo)
        self._out.append(
            cmd.SendAssign(worker.name, lease.id, pass_.id, lo, hi, attempt, elements, twin, overlaps)
        )
        return lease

    def _issue_gang(self, pass_: Pass) -> bool:
        """Assign the next step of a gang pass; return False if too few workers have capacity."""
        members, replicas, gpus = self._members, pass_.settings.replicas, pass_.settings.gpus
        count = pass_.settings.members
        group = pass_.groups.idle(members, replicas, gpus, count)
        if group is None:
            group = pass_.groups.in_advance(members, replicas, gpus, pass_.gangs_queued(self._limits), count)
        if group is None:
            return False
        todo = pass_.todo.take(replicas)
        for worker in group.workers:
            if pass_.id not in worker.bound:
                self._bind(worker, pass_)
        self._last_gang += 1
        gang = form(members, self._last_gang, pass_.id, todo, group)
        pass_.add_gang(gang)
        self._out.append(cmd.SendGang(gang.serial, pass_.id, todo.attempt, parts(gang)))
        return True

    def foreseeable_group(self, pass_: Pass) -> GangGroup | None:
        """Return the workers that would get the next step of a gang pass, if no other call waits; None: not known."""
        gpus = pass_.settings.gpus
        if not pass_.awaits_step or not self.nothing_waits:
            return None
        if gpus and self._members.ready_for(gpus) < pass_.settings.replicas:
            return None
        return pass_.groups.latest_if_idle(self._members, pass_.id, pass_.settings)

    def foresee(self, pass_: Pass, group: GangGroup) -> cmd.SendGang:
        """Return the command that assigns the next step of a pass to a group."""
        replicas, lease, gang = pass_.settings.replicas, self._members.last_lease, []
        lo, workers, new = pass_.offered * replicas, group.workers, tuple.__new__  # cheaper than the class
        for worker, (a, b) in zip(workers, spans(replicas, len(workers)), strict=True):
            lease += 1
            gang.append(new(cmd.GangAssignment, (worker.name, lease, lo + a, lo + b)))
        return cmd.SendGang(self._last_gang + 1, pass_.id, 0, tuple(gang))

    def executed(self, pass_: Pass, gang: cmd.SendGang) -> None:
        """Record that a step was assigned as foreseen."""
        self._last_gang = gang.serial
        self._turn = pass_.id

    def _bind(self, worker: Worker, pass_: Pass) -> None:
        if pass_.id not in worker.bound:
            worker.bound.add(pass_.id)
            self._out.append(cmd.SendBind(worker.name, pass_.id))
