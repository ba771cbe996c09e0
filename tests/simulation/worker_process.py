"""A worker process of a simulation: the real machine, driven in virtual time, executing fates.

It does what `pipedist.worker.driver` does: it executes commands in order, runs one slice of calls at a time,
and handles messages in between, or while a gang's replicas wait for other members. It can be killed at any
time, and stopped: then messages are queued until it continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import gt
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.messages import Assign, AssignGang, Hello, Message, Quota, Relay, Unbind
from pipedist.testing.faults import SLOW_TIMES
from pipedist.worker import commands as wcmd
from pipedist.worker.events import (
    CallsFinished,
    Event,
    LeaveRequested,
    ProtocolState,
    QuotaReached,
    SliceEnded,
    Started,
    TimePassed,
)
from pipedist.worker.machine import WorkerMachine
from tests.simulation.gang_member import GangMember, raised
from tests.simulation.reference_model import Violation
from tests.simulation.workloads import NO_FATE, Fate

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

Item = tuple[Event, object]
"""A message and its payload; or another event of this process, and None."""

Spans = tuple[tuple[int, int], ...]
"""Elements of a call."""


class End(NamedTuple):
    """How a process ended; see `WorkerProcess.exit`."""

    text: str
    running: tuple[int, int] | None
    timed_out: Fate | None
    left: bool


class WorkerProcess:
    """One incarnation of a worker.

    Args:
        simulation: the simulation.
        worker, incarnation: its name and incarnation.
        supervised: it has a supervisor, on another host.
    """

    __slots__ = (
        "_checks",
        "_inbox",
        "_overdue",
        "_payload",
        "_simulation",
        "_slice",
        "_token",
        "alive",
        "asleep",
        "busy",
        "connection",
        "elements",
        "executing",
        "gangs",
        "incarnation",
        "listening",
        "machine",
        "overlapping",
        "quotas",
        "supervised",
        "worker",
    )  # fmt: skip

    def __init__(self, simulation: Simulation, worker: str, incarnation: int, *, supervised: bool) -> None:
        self._simulation = simulation
        self._checks = simulation.check_every == 1
        self.worker = worker
        self.incarnation = incarnation
        self.supervised = supervised
        self.alive = True
        self.asleep = False
        """It is stopped (SIGSTOP)."""
        self.busy = False
        """It executes a slice."""
        self.listening = False
        """A gang's replicas wait for other members, and messages are handled meanwhile."""
        self.executing: tuple[int, int, float, float] | None = None
        """(lease, first call of the slice, start time, seconds of a call)."""
        self.gangs: dict[int, GangMember] = {}
        """The gangs that run or wait, by lease."""
        self.elements: dict[int, Spans] = {}
        """By lease of one call, the elements to execute, unless all."""
        self.overlapping: dict[int, int] = {}
        """The running call of each lease that overlaps."""
        self.quotas: dict[int, tuple[int, ...]] = {}
        """How many calls may run at the same time, for each limit of a pass."""
        self.machine = WorkerMachine(Hello(worker, incarnation, 0, "", "", 1, "", "", "", ""))
        self._slice: wcmd.Execute | None = None
        self._inbox: deque[Item] = deque()
        self._overdue: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        """An action that was due while it was stopped."""
        self._token = 0
        self._payload: object = None
        self.connection = simulation.network.connect(
            up=lambda item: simulation.driver.receive(self, item), down=self.receive, on_cut=self._on_cut
        )

    def begin(self) -> None:
        """Start the process, and send Hello."""
        if not self.alive:
            return
        self.handle(Started())
        deadline = self.machine.due
        if deadline is not None:
            self._simulation.time.at(deadline, self._tick)

    def _tick(self) -> None:
        if self.alive and self.machine.state is ProtocolState.JOINING:
            self.handle(TimePassed())

    # -- the machine ---------------------------------------------------------------------------

    def handle(self, event: Event, payload: object = None) -> None:
        """Pass an event to the machine, check it, and execute its commands.

        Raises:
            LocalProtocolError: an invariant does not hold, or this driver broke a rule.
        """
        simulation = self._simulation
        try:
            commands = self.machine.handle(event, simulation.time.now)
        except RemoteProtocolError as error:
            simulation.note(self, f"{event!r}: {error}")
            self.exit("exit code 76")
            return
        if self._checks:
            self.machine.validate()
        self._payload = payload
        for command in commands:
            execute = _EXECUTE.get(type(command))
            if execute is not None:
                execute(self, command)

    def receive(self, item: Item) -> None:
        """Handle a message of the driver, now or when the machine is ready for it."""
        if not self.alive:
            return
        if self.asleep or (self.busy and not self.listening):
            self._inbox.append(item)
            return
        simulation = self._simulation
        if simulation.turn_rate > 0.0 and simulation.random.random() < simulation.turn_rate:
            simulation.disturb(self)
            if not self._can_go_on():
                self._inbox.append(item)  # lost if it was killed
                return
        self.handle(*item)
        self._go_on()

    def _can_go_on(self) -> bool:
        return self.alive and not self.asleep

    def listen(self) -> None:
        """Handle the queued messages, as far as the machine is ready for them."""
        while self._inbox and self.alive and not self.asleep and (not self.busy or self.listening):
            self.handle(*self._inbox.popleft())

    def _go_on(self) -> None:
        """Handle the queued messages, then continue."""
        self.listen()
        if self._slice is not None and not self.busy and self.alive and not self.asleep:
            self._execute(self._slice)

    def send(self, message: Message, payload: object = None) -> None:
        """Send a message to the driver."""
        self.connection.send_up((message, payload))

    # -- executing -----------------------------------------------------------------------------

    def later(self, after_s: float, action: Callable[..., None], *args: object) -> None:
        """Call an action of the current execution later, unless that has ended."""
        self._token += 1
        self._simulation.time.at(self._simulation.time.now + after_s, self._due, self._token, action, args)

    def _due(self, token: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or token != self._token:
            return
        if self.asleep:
            self._overdue = (action, args)
            return
        action(*args)
        self._go_on()

    def _execute(self, slice_: wcmd.Execute) -> None:
        simulation = self._simulation
        draw = simulation.network.draw
        self.busy = True
        work = simulation.works[slice_.pass_id]
        cost = work.call_s * (0.5 + draw())
        self.executing = (slice_.lease, slice_.lo, simulation.time.now, cost)
        gang = self.gangs.get(slice_.lease)
        if gang is not None:
            self.later(cost, gang.run, cost)
            return
        count = slice_.hi - slice_.lo
        if cost * count > slice_.slice_s:
            count = min(count, 1 + int(slice_.slice_s / cost))
        if work.fates:
            for call in range(slice_.lo, slice_.lo + count):
                fate = work.fates.get(call)
                if fate is not None and not fate.is_over:
                    count = call + 1 - slice_.lo
                    break
        to = slice_.lo + count
        if slice_.lease in self.elements:
            simulation.kill_soon(self, cost)
        if simulation.slow_rate and draw() < simulation.slow_rate:
            simulation.network.counts["slow"] += 1
            self.later(cost * (count - 1), self._executed_but_last, slice_, to, cost)
        else:
            self.later(cost * count, self._executed, slice_, to, cost)

    def _executed_but_last(self, slice_: wcmd.Execute, to: int, cost: float) -> None:
        """Report the calls of a slice before the last one, which takes long."""
        lo = slice_.lo
        if to - 1 > lo:
            self.handle(CallsFinished(slice_.lease, lo, to - 1, int(cost * (to - 1 - lo) * 1e9)))
        rest = wcmd.Execute(slice_.lease, slice_.pass_id, to - 1, slice_.hi, 0.0, 0)
        cost *= SLOW_TIMES
        self.executing = (slice_.lease, to - 1, self._simulation.time.now, cost)
        self.later(cost, self._executed, rest, to, cost)

    def _executed(self, slice_: wcmd.Execute, to: int, cost: float) -> None:
        """End the calls of a slice before `to`."""
        simulation, running = self._simulation, (slice_.lease, to - 1)
        fate = simulation.works[slice_.pass_id].fates.get(to - 1, NO_FATE)
        poison, how = fate.poison, ""
        if poison is not None and poison.fails(self.elements.get(slice_.lease, ())):
            how = poison.how
        if how == "takes too long":
            self.exit("signal 9 (SIGKILL)", running, timed_out=fate)
            return
        if how == "kills" or fate.kills > 0:
            fate.kill_once()
            self.exit("signal 11 (SIGSEGV)", running)
            return
        raises = how == "raises" or fate.raises > 0
        done = to - raises
        busy_ns = int(cost * (to - slice_.lo) * 1e9)
        self.busy = False
        self.executing = None
        if simulation.turn_rate > 0.0 and simulation.random.random() < simulation.turn_rate:
            simulation.disturb(self)  # before its report, which may be stale if it is only stopped
            if not self.alive:
                return
            if self.asleep:
                self.busy = True
                self._overdue = (self._report, (slice_, done, busy_ns, raises))
                return
        self._report(slice_, done, busy_ns, raises)

    def _report(self, slice_: wcmd.Execute, done: int, busy_ns: int, raises: bool) -> None:
        self.busy = False
        if done > slice_.lo:
            self.handle(CallsFinished(slice_.lease, slice_.lo, done, busy_ns))
        if raises:
            self._simulation.works[slice_.pass_id].fates[done].raise_once()
            self.handle(raised(self._simulation, slice_.lease, done))
        self.slice_over(slice_.lease)

    def slice_over(self, lease: int) -> None:
        """Continue after the report of a slice."""
        self.busy = self.listening = False
        self.executing = None
        self.handle(SliceEnded(lease))

    def _call_later(self, begin: wcmd.Begin, call: int) -> None:
        """Let a call of a lease that overlaps wait for its time."""
        simulation = self._simulation
        cost = simulation.works[begin.pass_id].call_s * (0.5 + simulation.network.draw())
        simulation.time.at(simulation.time.now + cost, self._called, begin, call, cost)

    def _called(self, begin: wcmd.Begin, call: int, cost: float) -> None:
        """End a call of a lease that overlaps."""
        lease, simulation = begin.lease, self._simulation
        if not self.alive or self.overlapping.get(lease) != call:
            return
        if self.asleep or self.busy:  # the thread is not free
            simulation.time.at(simulation.time.now + 0.05, self._called, begin, call, cost)
            return
        fate = simulation.works[begin.pass_id].fates.get(call, NO_FATE)
        poisoned = fate.poison is not None and fate.poison.fails(self.elements.get(lease, ()))
        how = fate.poison.how if poisoned and fate.poison is not None else ""
        if how == "takes too long":
            self.exit("signal 9 (SIGKILL)", (lease, call), timed_out=fate)
        elif how == "kills" or fate.kills > 0:
            fate.kill_once()
            self.exit("signal 11 (SIGSEGV)", (lease, call))
        else:
            self.overlapping[lease] = call + 1
            if how == "raises" or fate.raises > 0:
                fate.raise_once()
                self.handle(raised(simulation, lease, call))
            else:
                self.handle(CallsFinished(lease, call, call + 1, int(cost * 1e9)))
            if self.alive and lease in self.overlapping:
                self._call_later(begin, call + 1)
            self._go_on()

    @property
    def keeps(self) -> frozenset[int]:
        """The passes that it keeps; none if a message in flight may still end them."""
        return frozenset(self.machine._passes) if self.is_at_rest else frozenset()

    @property
    def is_at_rest(self) -> bool:
        """Whether it is idle, and no message is in flight to it."""
        works = self.busy or bool(self.overlapping)
        return self.alive and not self.asleep and not works and self.connection.is_silent

    def clear(self) -> None:
        """Break reference cycles."""
        self.connection.clear()
        self.gangs.clear()
        self._overdue = None

    # -- exits and stops --------------------------------------------------------------

    @property
    def running(self) -> tuple[int, int] | None:
        """(lease, call) that it executes, as its parent process reads it."""
        if self.executing is None:
            return None
        lease, lo, began, cost = self.executing
        gone = int((self._simulation.time.now - began) / cost) if cost > 0 else 0
        slice_ = self._slice
        return lease, min(lo + gone, slice_.hi - 1) if slice_ is not None else lo

    def kill(self) -> None:
        """End it with SIGKILL; does nothing if it has ended."""
        if self.alive:
            self.exit("signal 9 (SIGKILL)", self.running)

    def leave(self) -> None:
        """Leave between two slices, or while a gang's replicas wait."""
        self._inbox.append((LeaveRequested("it was requested"), None))

    def exit(
        self,
        text: str,
        running: tuple[int, int] | None = None,
        *,
        timed_out: Fate | None = None,
        left: bool = False,
    ) -> None:
        """End the process.

        Args:
            text: how it ended.
            running: (lease, call) that it executed.
            timed_out: the fate of that call, if the process was ended because it takes too long.
            left: it sent Goodbye, as its last message, and waited until that was sent.
        """
        if not self.alive:
            return
        self.alive = False
        if not left:
            self.connection.close()
        self._simulation.launcher.exited(self, End(text, running, timed_out, left))

    def _on_cut(self) -> None:
        if self.alive:
            self.exit("exit code 68")

    def pause(self, for_s: float) -> None:
        """Stop it (SIGSTOP) for a time."""
        if self.alive and not self.asleep:
            self.asleep = True
            self._simulation.time.at(self._simulation.time.now + for_s, self.resume)
            self._simulation.launcher.stopped(self, for_s)

    def resume(self) -> None:
        """Continue: with the overdue action, then with the queued messages."""
        if not self.alive or not self.asleep:
            return
        self.asleep = False
        overdue, self._overdue = self._overdue, None
        if overdue is not None:
            action, args = overdue
            action(*args)
        self._go_on()

    # -- commands ----------------------------------------------------------------------------------

    def _do_send(self, command: wcmd.Send) -> None:
        self.send(command.message)

    def _do_send_results(self, command: wcmd.SendResults) -> None:
        self.send(command.message)

    def _do_send_exchange(self, command: wcmd.SendExchange) -> None:
        self.send(command.message, self.gangs[command.message.lease].part)

    def _do_apply(self, command: wcmd.Apply) -> None:
        match command.message:
            case AssignGang(lease) as assigned:
                self.gangs[lease] = GangMember(self._simulation, self, assigned)
            case Assign(lease) if self._payload:
                self.elements[lease] = cast(Spans, self._payload)
            case Relay(lease) as relay:
                self.gangs[lease].take(relay, self._payload)
            case Quota(pass_id, _, calls, sharing) if sharing:
                self._use_quota(pass_id, calls)
            case Unbind(pass_id):
                self.quotas.pop(pass_id, None)

    def _use_quota(self, pass_id: int, calls: tuple[int, ...]) -> None:
        """Use a quota, a lower one after a while: calls that run end first."""
        simulation = self._simulation
        before = self.quotas.get(pass_id, (0,) * len(calls))
        self.quotas[pass_id] = tuple(map(max, before, calls))
        peers = [peer for peer in simulation.driver.peers if pass_id in peer.quotas]
        limits = simulation.works[pass_id].settings.limits
        sums = [sum(column) for column in zip(*(peer.quotas[pass_id] for peer in peers), strict=True)]
        if any(map(gt, sums, limits)):
            raise Violation(f"workers may run {sums} calls of pass {pass_id} at the same time, over {limits}")

        def confirm() -> None:
            if self.alive and not self.asleep and self.quotas.get(pass_id) is unmet:
                self.quotas[pass_id] = calls
                self.handle(QuotaReached(pass_id, calls))

        if self.quotas[pass_id] != calls:
            unmet = self.quotas[pass_id]
            simulation.time.at(simulation.time.now + simulation.network.draw(), confirm)

    def _do_begin(self, command: wcmd.Begin) -> None:
        self.overlapping[command.lease] = command.lo
        self._call_later(command, command.lo)

    def _do_drop_lease(self, command: wcmd.DropLease) -> None:
        self.overlapping.pop(command.lease, None)
        self.gangs.pop(command.lease, None)
        self.elements.pop(command.lease, None)
        if self._slice is not None and self._slice.lease == command.lease:
            self._slice = None
            if self.listening:  # its replicas are interrupted
                self.listening = self.busy = False
                self.executing = None
                self._token += 1

    def _do_execute(self, command: wcmd.Execute) -> None:
        self._slice = command

    def _do_leave(self, command: wcmd.Leave) -> None:
        self.exit(f"left: {command.reason}", left=command.ending is wcmd.Ending.STOPPED)


_EXECUTE: dict[type, Callable[[WorkerProcess, Any], None]] = {
    wcmd.Send: WorkerProcess._do_send,
    wcmd.SendResults: WorkerProcess._do_send_results,
    wcmd.SendExchange: WorkerProcess._do_send_exchange,
    wcmd.Apply: WorkerProcess._do_apply,
    wcmd.DropLease: WorkerProcess._do_drop_lease,
    wcmd.Begin: WorkerProcess._do_begin,
    wcmd.Execute: WorkerProcess._do_execute,
    wcmd.Leave: WorkerProcess._do_leave,
}
