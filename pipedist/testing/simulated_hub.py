"""The scheduler's process in a simulation: the real scheduler, and what stands around it.

It carries out what the scheduler wants, as the coordinator does, and checks every command against its
books. Everything that would be lost if this process died is here, and nothing else is: the network, the
workers and the passes' readers live on without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

from pipedist.coordinator.gang_relay import GangRelay
from pipedist.coordinator.results import Chunk
from pipedist.errors import RemoteProtocolError
from pipedist.protocol import messages as msg
from pipedist.scheduler import Command, Event, Scheduler, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.testing.books import CHECKS, Books, Violation
from pipedist.testing.simulated_process import Item, SimulatedProcess

if TYPE_CHECKING:
    from pipedist.testing.simulated_fleet import _Supervisor
    from pipedist.testing.simulation import Simulation


class _NoSegments:
    """Nobody shares memory: all exchanges of gangs go through the hub."""

    def begin(self, *_: object) -> None:
        return None

    def close_unused(self) -> None:
        return


class SimulatedHub:
    """Drives one life of the scheduler.

    Args:
        world: that it lives in.
        scheduler: what it drives.
        limits: the scheduler's.
        managed: names of the workers that the launcher starts.
    """

    def __init__(
        self, world: Simulation, scheduler: Scheduler, limits: SchedulerLimits, managed: Sequence[str]
    ) -> None:
        self.scheduler = scheduler
        self.books = Books(world.works.values(), limits)
        self._world = world
        self._managed = frozenset(managed)
        self._peers: dict[str, SimulatedProcess] = {}
        """Who speaks for each worker."""
        self._put_out: dict[str, int] = {}
        """The last incarnation that was put out of each worker that dialled in."""
        self._tick_at = math.inf
        self._gangs = GangRelay(cast(Any, self), cast(Any, _NoSegments()), self._is_held)

    def _is_held(self, worker: str, lease: int) -> bool:
        return self.scheduler.pass_of(worker, lease) is not None

    # -- the scheduler ---------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Let the scheduler handle an event, check it, and carry out what it wants.

        Raises:
            Violation: it wants what it must not.
            LocalProtocolError: an invariant does not hold.
        """
        world = self._world
        now = world.time.now
        scheduler = self.scheduler
        commands = scheduler.handle(event, now)
        world.story.append((now, event, commands))
        world.events += 1
        if world.events % world.check_every == 0:
            scheduler.validate()
        for command in commands:
            kind = type(command)
            carry_out = _CARRY_OUT.get(kind)
            if carry_out is None:
                raise Violation(f"the simulation knows no command {command!r}")
            check = CHECKS.get(kind)
            if check is not None:
                check(self.books, command)
            carry_out(self, command)
        self.books.settle()
        deadline = scheduler.deadline()
        if deadline is not None and deadline < self._tick_at:
            if deadline <= now and isinstance(event, ev.Tick):
                raise Violation(f"a Tick leaves the deadline at {deadline}: it would ring for ever")
            self._tick_at = deadline
            world.time.at(max(deadline, now), self._tick, deadline)

    def _tick(self, at: float) -> None:
        if at != self._tick_at:
            return
        self._tick_at = math.inf
        deadline = self.scheduler.deadline()
        if deadline is not None and deadline <= self._world.time.now:
            self.handle(ev.Tick())
        elif deadline is not None:
            self._tick_at = deadline
            self._world.time.at(deadline, self._tick, deadline)

    # -- what arrives -----------------------------------------------------------------------------

    def receive(self, process: SimulatedProcess, item: Item) -> None:
        """Take in what a worker says."""
        message, payload = item
        if isinstance(message, msg.Hello):
            self._greet(process)
            return
        if self._peers.get(process.worker) is not process:
            # A real hub drops it. Here the scheduler is told all the same: it has fences of its own.
            process.connection.send_down((msg.Refuse("this incarnation is not a member"), None))
        self._hear(process, message, payload)

    def _hear(self, process: SimulatedProcess, message: msg.Message, payload: object) -> None:
        worker, incarnation = process.worker, process.incarnation
        match message:
            case msg.Results(lease, lo, hi, busy_ns):
                work = self._work_of(lease)
                size = (hi - lo) * work.call_bytes if work is not None else 0
                self._report(ev.CallsDone(worker, incarnation, lease, lo, hi, busy_ns, size))
            case msg.Failed(lease=lease, call=call, aborted=aborted):
                work = self._work_of(lease)
                fate = work.fates.get(call) if work is not None else None
                self._gangs.failed(message)
                retries = fate.retries if fate is not None else 0
                self._report(ev.CallFailed(worker, incarnation, lease, call, retries, aborted))
                self._gangs.reported(lease)
            case msg.Exchange():
                try:
                    self._gangs.exchange(cast(Any, process), message, cast(Any, payload))
                except RemoteProtocolError as error:
                    process.connection.cut()
                    self.lost(process, f"it broke the protocol: {error}")
            case msg.Stalled(lease, members, text):
                self.handle(ev.GangStalled(worker, incarnation, lease, tuple(map(int, members)), text))
            case msg.Cancelled(lease):
                self.books.heard(worker, incarnation, lease)
                self.handle(ev.CancelConfirmed(worker, incarnation, lease))
            case msg.Goodbye(reason=reason):
                self.lost(process, reason, graceful=True)

    def _work_of(self, lease: int) -> Any:
        book = self.books.leases.get(lease)
        return self._world.works[book.pass_id] if book is not None else None

    def _report(self, event: ev.CallsDone | ev.CallFailed) -> None:
        self.books.reported(event)
        self.handle(event)

    def _greet(self, process: SimulatedProcess) -> None:
        worker, incarnation = process.worker, process.incarnation
        peer = self._peers.get(worker)
        if peer is process:
            process.connection.cut()
            self.lost(process, "it said Hello twice")
            return
        stale = peer is not None and peer.incarnation > incarnation
        if stale or (not process.alive and process.worker in self._managed):
            process.connection.send_down((msg.Refuse("a later incarnation has joined"), None))
        else:
            self._peers[worker] = process
            process.connection.send_down((msg.Welcome("simulated", 1.0, ()), None))
            self.books.joined(worker, incarnation)
        if stale or self._peers.get(worker) is process:
            # what devices a process has is not simulated: whatever a call needs is there
            joined = ev.WorkerJoined(worker, incarnation, supervised=process.supervised, gpus=math.inf)
            self.handle(joined)

    def heard(self, supervisor: _Supervisor, message: msg.Message) -> None:
        """Take in what a supervisor says."""
        match message:
            case msg.Heartbeat(worker, incarnation):
                if incarnation <= self._put_out.get(worker, -1):
                    supervisor.refuse(before=incarnation + 1)
                self.handle(ev.HeartbeatReceived(worker, incarnation))
            case msg.Goodbye(worker, incarnation, reason, crashed):
                self._tell_lost(worker, incarnation, reason, graceful=not crashed)

    def lost(
        self,
        process: SimulatedProcess,
        cause: str,
        *,
        graceful: bool = False,
        running: tuple[int, int] | None = None,
    ) -> None:
        """A process is gone, or must be treated so."""
        self._tell_lost(process.worker, process.incarnation, cause, graceful=graceful, running=running)

    def _tell_lost(
        self,
        worker: str,
        incarnation: int,
        cause: str,
        *,
        graceful: bool,
        running: tuple[int, int] | None = None,
    ) -> None:
        peer = self._peers.get(worker)
        if peer is not None and peer.incarnation == incarnation:
            del self._peers[worker]
        self.books.lost(worker, incarnation)
        self.handle(ev.WorkerLost(worker, incarnation, cause, graceful, running))

    @property
    def peers(self) -> Collection[SimulatedProcess]:
        """Those who speak for workers."""
        return self._peers.values()

    # -- what the relay of gangs needs of a fleet -------------------------------------------------

    def of(self, worker: str) -> SimulatedProcess | None:
        """Return who speaks for a worker."""
        return self._peers.get(worker)

    def send(self, worker: str, message: msg.Message, payload: object = None) -> None:
        """Say something to a worker."""
        peer = self._peers.get(worker)
        if peer is not None:
            peer.connection.send_down((message, payload))

    # -- commands -----------------------------------------------------------------------------------

    def _do_start(self, command: cmd.StartWorker) -> None:
        self._world.fleet.start(command.worker, command.incarnation)

    def _do_expel(self, command: cmd.EvictWorker) -> None:
        worker, incarnation = command.worker, command.incarnation
        peer = self._peers.get(worker)
        if peer is not None and peer.incarnation == incarnation:
            del self._peers[worker]
            peer.connection.send_down((msg.Refuse(command.reason), None))
        if worker not in self._managed:
            self._put_out[worker] = max(incarnation, self._put_out.get(worker, -1))
            return
        process = self._world.fleet.alive.get(worker)
        if process is not None and process.incarnation == incarnation:
            self._world.fleet.kill(process)

    def _do_bind(self, command: cmd.SendBind) -> None:
        self.send(command.worker, msg.Bind(command.pass_id))

    def _do_unbind(self, command: cmd.SendUnbind) -> None:
        self.send(command.worker, msg.Unbind(command.pass_id))

    def _do_assign(self, c: cmd.SendAssign) -> None:
        self.send(c.worker, msg.Assign(c.lease, c.pass_id, c.lo, c.hi, c.attempt))

    def _do_gang(self, c: cmd.SendGang) -> None:
        self._gangs.begin(c)
        for member, (worker, lease, lo, hi) in enumerate(c.parts):
            head = msg.AssignGang(lease, c.pass_id, lo, hi, c.attempt, c.serial, member, len(c.parts), "")
            self.send(worker, head)

    def _do_cancel(self, command: cmd.SendCancel) -> None:
        self.send(command.worker, msg.Cancel(command.lease))

    def _do_stash(self, command: cmd.StashResults) -> None:
        self._gangs.stash(command.serial, Chunk(command.lo, command.hi, [], 0))

    def _do_gang_ended(self, command: cmd.GangEnded) -> None:
        self._gangs.end(command)

    def _do_nothing(self, command: Command) -> None:
        """The books have taken note."""

    def _do_cluster_failed(self, command: cmd.ClusterFailed) -> None:
        raise Violation(f"the cluster failed: {command.reason}")

    def _do_reader(self, command: Command) -> None:
        self._world.readers.tell(command)


_CARRY_OUT: dict[type, Callable[[SimulatedHub, Any], None]] = {
    cmd.StartWorker: SimulatedHub._do_start,
    cmd.EvictWorker: SimulatedHub._do_expel,
    cmd.SendBind: SimulatedHub._do_bind,
    cmd.SendUnbind: SimulatedHub._do_unbind,
    cmd.SendAssign: SimulatedHub._do_assign,
    cmd.SendGang: SimulatedHub._do_gang,
    cmd.SendCancel: SimulatedHub._do_cancel,
    cmd.StashResults: SimulatedHub._do_stash,
    cmd.GangEnded: SimulatedHub._do_gang_ended,
    cmd.AcceptResults: SimulatedHub._do_nothing,
    cmd.DropResults: SimulatedHub._do_nothing,
    cmd.ClusterFailed: SimulatedHub._do_cluster_failed,
    cmd.RequestSteps: SimulatedHub._do_reader,
    cmd.StepsReady: SimulatedHub._do_reader,
    cmd.StepFailed: SimulatedHub._do_reader,
    cmd.PassComplete: SimulatedHub._do_reader,
    cmd.PassDrained: SimulatedHub._do_reader,
}
