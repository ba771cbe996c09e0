"""Gives waiting calls to workers that have room."""

from __future__ import annotations

from collections.abc import Collection

from pipedist.scheduler import commands as cmd
from pipedist.scheduler.gangs import form, parts
from pipedist.scheduler.membership import Lease, Membership, Worker
from pipedist.scheduler.passes import Pass
from pipedist.scheduler.ranges import RangeSet
from pipedist.scheduler.settings import Limits


class Dealing:
    """Decides whose calls go to which worker next.

    Passes of the best priority take turns. Only short calls are sent in advance, and a gang needs
    several idle workers: while the pass whose turn it is can't be dealt, no other one is, so that
    workers become idle for it. Looking is no turn, or another pass would have it every time.

    A call that needs GPUs is dealt to a worker that owns them, and to no other; while none of these has
    room, passes that others can serve are dealt. A worker executes one call at a time, so no two calls
    are on one GPU, unless workers share it.

    Args:
        limits, members: the scheduler's.
        waiting: the passes that have calls waiting, by id; others may be among them.
        out: where commands are added.
    """

    def __init__(
        self, limits: Limits, members: Membership, waiting: dict[int, Pass], out: list[cmd.Command]
    ) -> None:
        self._limits = limits
        self._members = members
        self._waiting = waiting
        self._out = out
        self._last_gang = 0
        self._turn = 0
        """The pass that was dealt last."""

    def deal(self) -> None:
        """Issue all that workers have room for: first to the idle, then in advance."""
        members = self._members
        self._recall_all()
        stuck: set[int] = set()
        while members.ready and (pass_ := self._whose_turn(stuck)) is not None:
            gpus = pass_.settings.gpus
            if pass_.settings.gang:
                if gpus and members.ready_for(gpus) < pass_.settings.replicas:
                    stuck.add(pass_.id)  # that others become idle would not help it
                    continue
                if not self._issue_gang(pass_):
                    return
            elif (worker := self._with_room(pass_)) is not None:
                self._issue(worker, pass_)
            elif gpus:
                stuck.add(pass_.id)
                continue
            else:
                return
            self._turn = pass_.id

    @property
    def is_dealt(self) -> bool:
        """Whether nothing waits for a worker."""
        return not any(pass_.deals for pass_ in self._waiting.values())

    def issue_again(self, pass_: Pass, lease: Lease, worker: Worker) -> Lease:
        """Issue what has not come back of a lease to an idle worker too, and return its twin."""
        lo, hi, attempt = lease.next, lease.hi, lease.attempt
        self._bind(worker, pass_)
        twin = self._members.grant(worker, pass_.id, lo, hi, attempt, 0.0)
        twin.twin, lease.twin = lease, twin
        twin.second_attempts = lease.second_attempts = lease.second_attempts + 1
        pass_.leased += hi - lo
        elements = pass_.suspects.elements_of(lo) if attempt else ()
        self._out.append(
            cmd.SendAssign(worker.name, twin.id, pass_.id, lo, hi, attempt, elements, twin=lease.id)
        )
        return twin

    def _recall_all(self) -> None:
        """Have what workers finished for a scheduler that is gone reported, before it is dealt."""
        for pass_ in self._waiting.values():
            if pass_.kept and pass_.deals:
                for (name, incarnation), kept in list(pass_.kept.items()):
                    if self._members.current(name, incarnation) is not None:
                        self._recall(self._members.workers[name], pass_, kept)
                    elif self._members.is_over(name, incarnation):
                        del pass_.kept[name, incarnation]

    def _recall(self, worker: Worker, pass_: Pass, kept: RangeSet) -> None:
        for lo, hi in [(t.lo, t.hi) for a, b in list(kept) for t in pass_.todo.take_untried(a, b)]:
            kept.discard(lo, hi)
            self._bind(worker, pass_)
            lease = self._members.grant(worker, pass_.id, lo, hi, 0, 0.0)
            pass_.leased += hi - lo
            self._out.append(cmd.SendRecall(worker.name, lease.id, pass_.id, lo, hi))

    def _with_room(self, pass_: Pass) -> Worker | None:
        """Return a worker that a call of a pass may be sent to now, None if there is none."""
        gpus = pass_.settings.gpus
        worker = self._members.idle_for(gpus) if self._members.idle else None
        if worker is None and pass_.is_short(self._limits) and not pass_.suspects.waiting:
            return self._members.thirsty_for(gpus)
        return worker

    def _whose_turn(self, stuck: Collection[int]) -> Pass | None:
        """Return the pass whose turn it is, None if nothing waits.

        Args:
            stuck: passes that no worker which is fit for them has room for.
        """
        waiting = self._waiting
        for idle in [p.id for p in waiting.values() if not p.deals]:
            del waiting[idle]
        if stuck:
            waiting = {id_: pass_ for id_, pass_ in waiting.items() if id_ not in stuck}
        if len(waiting) < 2:
            return next(iter(waiting.values()), None)
        best = min(p.settings.priority for p in waiting.values())
        ids = sorted(p.id for p in waiting.values() if p.settings.priority == best)
        return waiting[next((i for i in ids if i > self._turn), ids[0])]

    def _issue(self, worker: Worker, pass_: Pass) -> None:
        if pass_.suspects.waiting:
            self._issue_probe(worker, pass_)
            return
        todo = pass_.todo.take(pass_.bundle_calls(self._limits, self._members.ready_for(pass_.settings.gpus)))
        lo, hi, attempt = todo
        self._bind(worker, pass_)
        expected_s = (pass_.call_s or 0.0) * (hi - lo)
        lease = self._members.grant(worker, pass_.id, lo, hi, attempt, expected_s)
        pass_.leased += hi - lo
        elements = pass_.suspects.elements_of(lo) if attempt else ()
        self._out.append(cmd.SendAssign(worker.name, lease.id, pass_.id, lo, hi, attempt, elements))

    def _issue_probe(self, worker: Worker, pass_: Pass) -> None:
        probe = pass_.suspects.waiting.pop(0)
        lo, hi = probe.call, probe.call + 1
        self._bind(worker, pass_)
        lease = self._members.grant(worker, pass_.id, lo, hi, probe.tried, 0.0)
        lease.probe = probe
        pass_.leased += 1
        command = cmd.SendAssign(worker.name, lease.id, pass_.id, lo, hi, probe.tried, (probe.span,))
        self._out.append(command)

    def _issue_gang(self, pass_: Pass) -> bool:
        """Issue the next step of a gang pass; return False where too few workers have room."""
        members, replicas, gpus = self._members, pass_.settings.replicas, pass_.settings.gpus
        group = pass_.groups.idle(members, replicas, gpus)
        if group is None:
            group = pass_.groups.in_advance(members, replicas, gpus, pass_.gangs_queued(self._limits))
        if group is None:
            return False
        todo = pass_.todo.take(replicas)
        for worker in group.workers:
            self._bind(worker, pass_)
        self._last_gang += 1
        gang = form(members, self._last_gang, pass_.id, todo, group)
        pass_.muster(gang)
        self._out.append(cmd.SendGang(gang.serial, pass_.id, todo.attempt, parts(gang)))
        return True

    def _bind(self, worker: Worker, pass_: Pass) -> None:
        if pass_.id not in worker.bound:
            worker.bound.add(pass_.id)
            self._out.append(cmd.SendBind(worker.name, pass_.id))
