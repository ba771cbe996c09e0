"""The driver's process in a simulation: the real scheduler, and a simple driver around it.

It executes the scheduler's commands as the coordinator does, and checks each of them with the reference model.
The network, the workers and the readers of the passes are outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from pipedist.coordinator.gang_relay import GangRelay
from pipedist.coordinator.results import Chunk
from pipedist.errors import RemoteProtocolError
from pipedist.protocol import messages as msg
from pipedist.scheduler import Command, Event, Scheduler, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.simulation.reference_model import ReferenceModel, Violation
from tests.simulation.worker_process import End, Item, WorkerProcess
from tests.simulation.workloads import STAGES, Fate, Workload

if TYPE_CHECKING:
    from tests.simulation.launcher import Supervisor
    from tests.simulation.simulation import Simulation


LATE_S_MAX = 0.3
"""How late a Hello of an earlier incarnation arrives, and how long after a cancellation a worker is killed."""

LATE_HELLOS = 0.05
"""Share of the workers for which a Hello of their earlier incarnation arrives late."""


def _foreseen(scheduler: Scheduler, event: Event) -> cmd.SendGang | None:
    """Return the only command that an event must cause, if the scheduler foresees it."""
    if not isinstance(event, ev.StepsAvailable) or event.last != event.first + 1:
        return None
    return scheduler.foresee(event.pass_id)


class _NoSegments:
    """No shared memory: all exchanges of gangs go through the driver."""

    def begin(self, *_: object) -> None:
        return None

    def close_unused(self) -> None:
        return


class SimulatedSchedulerProcess:
    """Drives one scheduler.

    Args:
        simulation: the simulation.
        scheduler: the scheduler.
        limits: its limits.
        managed: names of the workers that the launcher starts.
    """

    def __init__(
        self, simulation: Simulation, scheduler: Scheduler, limits: SchedulerLimits, managed: Sequence[str]
    ) -> None:
        self.scheduler = scheduler
        self.model = ReferenceModel(simulation.works.values(), limits)
        self._simulation = simulation
        self._managed = frozenset(managed)
        self._peers: dict[str, WorkerProcess] = {}
        """The process that is connected for each worker."""
        self._evicted: dict[str, int] = {}
        """The last evicted incarnation of each worker that connected by itself."""
        self._tick_at = math.inf
        self._gangs = GangRelay(cast(Any, self), cast(Any, _NoSegments()), self._is_held)

    def _is_held(self, worker: str, lease: int) -> bool:
        return self.scheduler.pass_of(worker, lease) is not None

    # -- the scheduler ---------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Pass an event to the scheduler, and check and execute its commands.

        Raises:
            Violation: a command or the state is wrong.
            LocalProtocolError: an invariant does not hold.
        """
        simulation, scheduler, model = self._simulation, self.scheduler, self.model
        now = simulation.time.now
        predicted = model.handle(event, now)
        foreseen = _foreseen(scheduler, event)
        commands = scheduler.handle(event, now)
        if foreseen is not None and commands != [foreseen]:
            raise Violation(f"{event!r} has caused {commands}, but {foreseen} was foreseen")
        simulation.story.append((now, event, commands))
        simulation.events += 1
        checks = simulation.events % simulation.check_every == 0
        if checks:
            scheduler.validate()
        model.observe(scheduler)
        model.compare_predicted(commands, predicted)
        for command in commands:
            execute = _EXECUTE.get(type(command))
            if execute is None:
                raise Violation(f"unknown command {command!r}")
            model.check(command)
            execute(self, command)
        model.finish_event()
        if checks:
            model.compare(scheduler)
        deadline = scheduler.deadline()
        if deadline is not None and deadline < self._tick_at:
            if deadline <= now and isinstance(event, ev.Tick):
                raise Violation(f"a Tick leaves the deadline at {deadline}, so Ticks would repeat forever")
            self._tick_at = deadline
            simulation.time.at(max(deadline, now), self._tick, deadline)

    def _tick(self, at: float) -> None:
        if at != self._tick_at:
            return
        self._tick_at = math.inf
        deadline = self.scheduler.deadline()
        if deadline is not None and deadline <= self._simulation.time.now:
            self.handle(ev.Tick())
        elif deadline is not None:
            self._tick_at = deadline
            self._simulation.time.at(deadline, self._tick, deadline)

    # -- messages -----------------------------------------------------------------------------

    def receive(self, process: WorkerProcess, item: Item) -> None:
        """Handle a message of a worker."""
        message, payload = item
        if isinstance(message, msg.Hello):
            self._greet(process)
            return
        if self._peers.get(process.worker) is not process:
            # The real coordinator drops the message. Here it is passed on, to test the scheduler's own checks.
            process.connection.send_down((msg.Refuse("this incarnation is not a member"), None))
        self._handle_message(process, message, payload)

    def _handle_message(self, process: WorkerProcess, message: msg.Message, payload: object) -> None:
        worker, incarnation = process.worker, process.incarnation
        match message:
            case msg.Results(lease, lo, hi, busy_ns):
                work = self._work_of(lease)
                size = (hi - lo) * work.call_bytes if work is not None else 0
                self.handle(ev.CallsDone(worker, incarnation, lease, lo, hi, busy_ns, size))
            case msg.Failed(lease=lease, call=call, stage=stage, text=text, aborted=aborted):
                fate = self._fate_of(lease, call)
                self._gangs.failed(message)
                retries = fate.retries if fate is not None else self._simulation.random.choice((0, 5))
                quarantine = fate is not None and fate.quarantine
                self.handle(
                    ev.CallFailed(worker, incarnation, lease, call, retries, aborted, quarantine, stage, text)
                )
                self._gangs.reported(lease)
            case msg.Exchange():
                try:
                    self._gangs.exchange(cast(Any, process), message, cast(Any, payload))
                except RemoteProtocolError as error:
                    process.connection.cut()
                    self._lost(ev.WorkerLost(worker, incarnation, f"protocol error: {error}"))
            case msg.Stalled(lease, members, text):
                missing, draw = tuple(map(int, members)), self._simulation.random.random
                if draw() < 0.5:  # the lease of another member, or none
                    other = lease + (1 if draw() < 0.5 else -1)
                    self.handle(ev.GangStalled(worker, incarnation, other, missing, text))
                self.handle(ev.GangStalled(worker, incarnation, lease, missing, text))
            case msg.QuotaMet(pass_id, calls):
                self.handle(ev.QuotaConfirmed(worker, incarnation, pass_id, calls))
            case msg.Cancelled(lease):
                self.handle(ev.CancelConfirmed(worker, incarnation, lease))
            case msg.Goodbye(reason=reason):
                self._lost(ev.WorkerLost(worker, incarnation, reason, graceful=True))

    def _work_of(self, lease: int) -> Workload | None:
        record = self.model.leases.get(lease)
        return self._simulation.works[record.pass_id] if record is not None else None

    def _fate_of(self, lease: int, call: int) -> Fate | None:
        work = self._work_of(lease)
        return work.fates.get(call) if work is not None else None

    def _greet(self, process: WorkerProcess) -> None:
        worker, incarnation = process.worker, process.incarnation
        peer = self._peers.get(worker)
        if peer is process:
            process.connection.cut()
            self._lost(ev.WorkerLost(worker, incarnation, "it sent Hello twice"))
            return
        stale = peer is not None and peer.incarnation > incarnation
        if stale or (not process.alive and process.worker in self._managed):
            process.connection.send_down((msg.Refuse("a later incarnation has joined"), None))
        else:
            self._peers[worker] = process
            process.connection.send_down((msg.Welcome("simulated", 1.0, ()), None))
        if stale or self._peers.get(worker) is process:
            # devices are not simulated: each process has as many as any call needs
            joined = ev.WorkerJoined(worker, incarnation, supervised=process.supervised, gpus=math.inf)
            self.handle(joined)
            if incarnation and self._simulation.random.random() < LATE_HELLOS:
                time = self._simulation.time
                late = ev.WorkerJoined(worker, incarnation - 1)
                time.at(time.now + LATE_S_MAX * self._simulation.random.random(), self.handle, late)

    def receive_from_supervisor(self, supervisor: Supervisor, message: msg.Message) -> None:
        """Handle a message of a supervisor."""
        match message:
            case msg.Heartbeat(worker, incarnation):
                if incarnation <= self._evicted.get(worker, -1):
                    supervisor.refuse(before=incarnation + 1)
                self.handle(ev.HeartbeatReceived(worker, incarnation))
            case msg.Goodbye(worker, incarnation, reason, crashed, lease, call, timed_out=timed_out):
                running = (lease, call) if lease else None
                fate = self._fate_of(lease, call) if timed_out else None
                self._died(worker, incarnation, End(reason, running, fate, not crashed))

    def lost(self, process: WorkerProcess, end: End) -> None:
        """Report that a process of the launcher has ended."""
        self._died(process.worker, process.incarnation, end._replace(left=False))

    def _died(self, worker: str, incarnation: int, end: End) -> None:
        lost = ev.WorkerLost(worker, incarnation, end.text, end.left, end.running)
        fate = end.timed_out
        if fate is not None:
            stage = self._simulation.stages.choice(STAGES)
            lost = replace(
                lost, stage=stage, timed_out=True, retries=fate.retries, quarantine=fate.quarantine
            )
        self._lost(lost)

    def _lost(self, lost: ev.WorkerLost) -> None:
        """Report that a worker has ended, or must be treated so."""
        peer = self._peers.get(lost.worker)
        if peer is not None and peer.incarnation == lost.incarnation:
            del self._peers[lost.worker]
        self.handle(lost)

    @property
    def peers(self) -> Collection[WorkerProcess]:
        """The connected processes."""
        return self._peers.values()

    # -- what the relay of gangs needs -------------------------------------------------

    def of(self, worker: str) -> WorkerProcess | None:
        """Return the process that is connected for a worker."""
        return self._peers.get(worker)

    def send(self, worker: str, message: msg.Message, payload: object = None) -> None:
        """Send a message to a worker."""
        peer = self._peers.get(worker)
        if peer is not None:
            peer.connection.send_down((message, payload))

    # -- commands -----------------------------------------------------------------------------------

    def _do_start(self, command: cmd.StartWorker) -> None:
        self._simulation.launcher.start(command.worker, command.incarnation)

    def _do_evict(self, command: cmd.EvictWorker) -> None:
        worker, incarnation = command.worker, command.incarnation
        peer = self._peers.get(worker)
        if peer is not None and peer.incarnation == incarnation:
            del self._peers[worker]
            peer.connection.send_down((msg.Refuse(command.reason), None))
        if worker not in self._managed:
            self._evicted[worker] = max(incarnation, self._evicted.get(worker, -1))
            return
        process = self._simulation.launcher.alive.get(worker)
        if process is not None and process.incarnation == incarnation:
            self._simulation.launcher.kill(process)

    def _do_bind(self, command: cmd.SendBind) -> None:
        self.send(command.worker, msg.Bind(command.pass_id))

    def _do_unbind(self, command: cmd.SendUnbind) -> None:
        self.send(command.worker, msg.Unbind(command.pass_id))

    def _do_assign(self, c: cmd.SendAssign) -> None:
        elements = sum(hi - lo for lo, hi in c.elements)
        head = msg.Assign(c.lease, c.pass_id, c.lo, c.hi, c.attempt, elements, c.overlaps)
        self.send(c.worker, head, c.elements)

    def _do_quota(self, c: cmd.SendQuota) -> None:
        self.send(c.worker, msg.Quota(c.pass_id, c.number, c.calls, c.sharing))

    def _do_gang(self, c: cmd.SendGang) -> None:
        self._gangs.begin(c)
        for member, (worker, lease, lo, hi) in enumerate(c.parts):
            head = msg.AssignGang(lease, c.pass_id, lo, hi, c.attempt, c.serial, member, len(c.parts), "")
            self.send(worker, head)

    def _do_cancel(self, command: cmd.SendCancel) -> None:
        self.send(command.worker, msg.Cancel(command.lease))
        peer = self._peers.get(command.worker)
        if peer is not None:
            self._simulation.kill_soon(peer, LATE_S_MAX)

    def _do_size_call(self, command: cmd.SizeCall) -> None:
        """Report the number of elements, after the events that are due now."""
        poison = self._simulation.works[command.pass_id].poison(command.call)
        elements = poison.elements if poison is not None else 4
        sized = ev.CallSized(command.pass_id, command.call, elements)
        self._simulation.time.at(self._simulation.time.now, self._report_size, sized)

    def _report_size(self, sized: ev.CallSized) -> None:
        if not self.model.passes[sized.pass_id].is_closed:
            self.handle(sized)

    def _do_stash(self, command: cmd.StashResults) -> None:
        self._gangs.stash(command.serial, Chunk(command.lo, command.hi, [], 0))

    def _do_gang_ended(self, command: cmd.GangEnded) -> None:
        self._gangs.end(command)

    def _do_nothing(self, command: Command) -> None:
        """The model has recorded it."""

    def _do_cluster_failed(self, command: cmd.ClusterFailed) -> None:
        raise Violation(f"the cluster failed: {command.reason}")

    def _do_reader(self, command: Command) -> None:
        self._simulation.readers.handle(command)


_EXECUTE: dict[type, Callable[[SimulatedSchedulerProcess, Any], None]] = {
    cmd.StartWorker: SimulatedSchedulerProcess._do_start,
    cmd.EvictWorker: SimulatedSchedulerProcess._do_evict,
    cmd.SendBind: SimulatedSchedulerProcess._do_bind,
    cmd.SendUnbind: SimulatedSchedulerProcess._do_unbind,
    cmd.SendAssign: SimulatedSchedulerProcess._do_assign,
    cmd.SendGang: SimulatedSchedulerProcess._do_gang,
    cmd.SendCancel: SimulatedSchedulerProcess._do_cancel,
    cmd.SendQuota: SimulatedSchedulerProcess._do_quota,
    cmd.StashResults: SimulatedSchedulerProcess._do_stash,
    cmd.GangEnded: SimulatedSchedulerProcess._do_gang_ended,
    cmd.AcceptResults: SimulatedSchedulerProcess._do_nothing,
    cmd.DropResults: SimulatedSchedulerProcess._do_nothing,
    cmd.CallsQuarantined: SimulatedSchedulerProcess._do_nothing,
    cmd.SizeCall: SimulatedSchedulerProcess._do_size_call,
    cmd.ClusterFailed: SimulatedSchedulerProcess._do_cluster_failed,
    cmd.RequestSteps: SimulatedSchedulerProcess._do_reader,
    cmd.StepsReady: SimulatedSchedulerProcess._do_reader,
    cmd.StepFailed: SimulatedSchedulerProcess._do_reader,
    cmd.PassComplete: SimulatedSchedulerProcess._do_reader,
    cmd.PassDrained: SimulatedSchedulerProcess._do_reader,
}
