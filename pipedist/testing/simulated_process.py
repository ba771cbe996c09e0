"""A worker process of a simulation: the real machine, driven in virtual time, executing fates.

It does what `pipedist.worker.driver` does: carries out commands in order, executes a slice at a time,
and handles messages in between, or while a gang's replicas wait for other members. It can be killed
at any time, and stopped: then what arrives waits until it is awake again, if it ever is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.messages import Hello, Message
from pipedist.testing.simulated_gangs import GangAssignment, raised
from pipedist.worker import commands as wcmd
from pipedist.worker.events import CallsFinished, Event, ProtocolState, SliceEnded, Started, TimePassed
from pipedist.worker.machine import WorkerMachine

if TYPE_CHECKING:
    from pipedist.testing.simulation import Simulation

SLOW_TIMES = 20
"""How many times as long a slow call takes."""

PAUSE_S = 12.0
"""How long a process is stopped at most."""

Item = tuple[Message, object]
"""A message, and what travels beside it."""


class SimulatedProcess:
    """One incarnation of a worker.

    Args:
        world: that it lives in.
        worker, incarnation: who it is.
        supervised: it dialled in.
    """

    __slots__ = (
        "_checks", "_inbox", "_overdue", "_payload", "_slice", "_token", "_world", "alive", "asleep", "busy",
        "connection", "executing", "gangs", "incarnation", "listening", "machine", "supervised", "worker",
    )  # fmt: skip

    def __init__(self, world: Simulation, worker: str, incarnation: int, *, supervised: bool) -> None:
        self._world = world
        self._checks = world.check_every == 1
        self.worker = worker
        self.incarnation = incarnation
        self.supervised = supervised
        self.alive = True
        self.asleep = False
        """It is stopped."""
        self.busy = False
        """A slice is being executed."""
        self.listening = False
        """A gang's replicas wait for other members; messages are handled meanwhile."""
        self.executing: tuple[int, int, float, float] | None = None
        """(lease, first call of the slice, when it began, seconds a call)."""
        self.gangs: dict[int, GangAssignment] = {}
        """By lease, those that run or wait."""
        self.machine = WorkerMachine(Hello(worker, incarnation, 0, "", "", 1, "", "", "", ""))
        self._slice: wcmd.Execute | None = None
        self._inbox: deque[Item] = deque()
        self._overdue: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        """What was to happen while it was stopped."""
        self._token = 0
        self._payload: object = None
        self.connection = world.network.connect(
            up=lambda item: world.hub.receive(self, item), down=self.receive, on_cut=self._on_cut
        )

    def begin(self) -> None:
        """Be there, and say Hello."""
        if not self.alive:
            return
        self.handle(Started())
        deadline = self.machine.deadline()
        if deadline is not None:
            self._world.time.at(deadline, self._tick)

    def _tick(self) -> None:
        if self.alive and self.machine.state is ProtocolState.JOINING:
            self.handle(TimePassed())

    # -- the machine ---------------------------------------------------------------------------

    def handle(self, event: Event, payload: object = None) -> None:
        """Let the machine handle an event, check it, and carry out what it wants.

        Raises:
            LocalProtocolError: an invariant does not hold, or the driver did what it may not.
        """
        world = self._world
        try:
            commands = self.machine.handle(event, world.time.now)
        except RemoteProtocolError as error:
            world.note(self, f"{event!r}: {error}")
            self.exit("exit code 76")
            return
        if self._checks:
            self.machine.validate()
        self._payload = payload
        for command in commands:
            carry_out = _CARRY_OUT.get(type(command))
            if carry_out is not None:
                carry_out(self, command)

    def receive(self, item: Item) -> None:
        """Take in a message from the hub; now, or when there is time for it."""
        if not self.alive:
            return
        if self.asleep or (self.busy and not self.listening):
            self._inbox.append(item)
            return
        world = self._world
        if world.turn_rate > 0.0 and world.random.random() < world.turn_rate:
            world.disturb(self)
            if not self._can_go_on():
                self._inbox.append(item)  # lost, if it was killed
                return
        self.handle(*item)
        self._go_on()

    def _can_go_on(self) -> bool:
        return self.alive and not self.asleep

    def listen(self) -> None:
        """Handle what has arrived, as far as there is time for it."""
        while self._inbox and self.alive and not self.asleep and (not self.busy or self.listening):
            self.handle(*self._inbox.popleft())

    def _go_on(self) -> None:
        """Handle what has arrived, then go on."""
        self.listen()
        if self._slice is not None and not self.busy and self.alive and not self.asleep:
            self._execute(self._slice)

    def send(self, message: Message, payload: object = None) -> None:
        """Send something to the hub."""
        self.connection.send_up((message, payload))

    # -- executing -----------------------------------------------------------------------------

    def later(self, after_s: float, action: Callable[..., None], *args: object) -> None:
        """Let something happen to what is executed, unless it is over by then."""
        self._token += 1
        self._world.time.at(self._world.time.now + after_s, self._due, self._token, action, args)

    def _due(self, token: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or token != self._token:
            return
        if self.asleep:
            self._overdue = (action, args)
            return
        action(*args)
        self._go_on()

    def _execute(self, slice_: wcmd.Execute) -> None:
        world = self._world
        draw = world.network.draw
        self.busy = True
        work = world.works[slice_.pass_id]
        cost = work.call_s * (0.5 + draw())
        self.executing = (slice_.lease, slice_.lo, world.time.now, cost)
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
                if fate is not None and (fate.kills > 0 or fate.raises > 0):
                    count = call + 1 - slice_.lo
                    break
        to = slice_.lo + count
        if world.slow_rate and draw() < world.slow_rate:
            world.network.counts["slow"] += 1
            self.later(cost * (count - 1), self._executed_but_last, slice_, to, cost)
        else:
            self.later(cost * count, self._executed, slice_, to, cost)

    def _executed_but_last(self, slice_: wcmd.Execute, to: int, cost: float) -> None:
        """The last call of a slice takes long: those before it are reported meanwhile."""
        lo = slice_.lo
        if to - 1 > lo:
            self.handle(CallsFinished(slice_.lease, lo, to - 1, int(cost * (to - 1 - lo) * 1e9)))
        rest = wcmd.Execute(slice_.lease, slice_.pass_id, to - 1, slice_.hi, 0.0, 0)
        cost *= SLOW_TIMES
        self.executing = (slice_.lease, to - 1, self._world.time.now, cost)
        self.later(cost, self._executed, rest, to, cost)

    def _executed(self, slice_: wcmd.Execute, to: int, cost: float) -> None:
        """The calls of a slice, before `to`, are over."""
        world, lease = self._world, slice_.lease
        fate = world.works[slice_.pass_id].fates.get(to - 1)
        if fate is not None and fate.kills > 0:
            fate.kills -= 1
            self.exit("signal 11 (SIGSEGV)", running=(lease, to - 1))
            return
        raises = fate is not None and fate.raises > 0
        done = to - raises
        busy_ns = int(cost * (to - slice_.lo) * 1e9)
        self.busy = False
        self.executing = None
        if world.turn_rate > 0.0 and world.random.random() < world.turn_rate:
            world.disturb(self)  # before it has reported; if only stopped, it reports what may be stale
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
            self._world.works[slice_.pass_id].fates[done].raises -= 1
            self.handle(raised(slice_.lease, done))
        self.slice_over(slice_.lease)

    def slice_over(self, lease: int) -> None:
        """A slice was reported: go on."""
        self.busy = self.listening = False
        self.executing = None
        self.handle(SliceEnded(lease))

    @property
    def keeps(self) -> frozenset[int]:
        """The passes that it knows; none where something may still tell it that they are over."""
        return frozenset(self.machine._passes) if self.is_at_rest else frozenset()

    @property
    def is_at_rest(self) -> bool:
        """Whether it does nothing, and nothing is on its way to it."""
        return self.alive and not self.asleep and not self.busy and self.connection.is_silent

    def let_go(self) -> None:
        """Come apart."""
        self.connection.let_go()
        self.gangs.clear()
        self._overdue = None

    # -- the end, and interruptions --------------------------------------------------------------

    @property
    def running(self) -> tuple[int, int] | None:
        """(lease, call) that it executes, as its parent sees it."""
        if self.executing is None:
            return None
        lease, lo, began, cost = self.executing
        gone = int((self._world.time.now - began) / cost) if cost > 0 else 0
        slice_ = self._slice
        return lease, min(lo + gone, slice_.hi - 1) if slice_ is not None else lo

    def kill(self) -> None:
        """End it with SIGKILL; nothing happens to one that is gone."""
        if self.alive:
            self.exit("signal 9 (SIGKILL)", running=self.running)

    def exit(self, text: str, running: tuple[int, int] | None = None) -> None:
        """Be gone."""
        if not self.alive:
            return
        self.alive = False
        self.connection.close()
        self._world.fleet.exited(self, text, running)

    def _on_cut(self) -> None:
        if self.alive:
            self.exit("exit code 68")

    def pause(self, for_s: float) -> None:
        """Stop it for a while."""
        if self.alive and not self.asleep:
            self.asleep = True
            self._world.time.at(self._world.time.now + for_s, self.resume)
            self._world.fleet.stopped(self, for_s)

    def resume(self) -> None:
        """Let it go on: with what was due, then with what has arrived."""
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

    def _do_keep_lease(self, command: wcmd.StoreLease) -> None:
        if command.gang is not None:
            self.gangs[command.lease] = GangAssignment(self._world, self, command.gang)

    def _do_keep_relay(self, command: wcmd.StoreRelay) -> None:
        self.gangs[command.relay.lease].take(command.relay, self._payload)

    def _do_drop_lease(self, command: wcmd.DropLease) -> None:
        self.gangs.pop(command.lease, None)
        if self._slice is not None and self._slice.lease == command.lease:
            self._slice = None
            if self.listening:  # its replicas are told, and end
                self.listening = self.busy = False
                self.executing = None
                self._token += 1

    def _do_execute(self, command: wcmd.Execute) -> None:
        self._slice = command

    def _do_leave(self, command: wcmd.Leave) -> None:
        self.exit(f"it left: {command.reason}")


_CARRY_OUT: dict[type, Callable[[SimulatedProcess, Any], None]] = {
    wcmd.Send: SimulatedProcess._do_send,
    wcmd.SendResults: SimulatedProcess._do_send_results,
    wcmd.SendExchange: SimulatedProcess._do_send_exchange,
    wcmd.StoreLease: SimulatedProcess._do_keep_lease,
    wcmd.StoreRelay: SimulatedProcess._do_keep_relay,
    wcmd.DropLease: SimulatedProcess._do_drop_lease,
    wcmd.Execute: SimulatedProcess._do_execute,
    wcmd.Leave: SimulatedProcess._do_leave,
}
