"""A simulation in which the scheduler dies and is resumed, and its workers survive: real machines, no time or data.

One seed decides each next event: a message arrives, a slice of calls is executed, a reader reads, the journal
commits, or a fault occurs: a worker is killed, disconnected, or evicted; or the scheduler is killed, and loses
everything that was not durable. Cached results come back under the same key, unless the code was changed: then
they are POISON, and so is every message to the dead scheduler. Poison must never count, durable calls must not be
executed again, and every run must end.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from random import Random

from pipedist.coordinator.results import CachedResultIndex, key_of
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import decode, encode
from pipedist.scheduler import PassSettings, Scheduler, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.worker import commands as wcmd
from pipedist.worker.events import CallsFinished, SliceEnded, Started
from pipedist.worker.machine import WorkerMachine
from pipedist.worker.result_cache import CachedCalls, ResultCache

TURNS_MAX = 20_000
"""Maximum turns without faults, after which nothing may be open."""


class Wrong(AssertionError):
    """Something happened that must not happen."""


@dataclass
class Process:
    """One incarnation of a dialled-in worker."""

    name: str
    incarnation: int
    kept: ResultCache
    machine: WorkerMachine
    down: deque[msg.Message] = field(default_factory=deque)
    up: deque[tuple[msg.Message, object]] = field(default_factory=deque)
    keys: dict[int, str] = field(default_factory=dict)
    recalls: set[int] = field(default_factory=set)
    slice: wcmd.Execute | None = None


@dataclass
class Reading:
    """An ordered pass, over all generations of the scheduler."""

    number: int
    steps: int
    replicas: int
    durable: int = 0
    """Steps that are completely in the journal."""
    offered: int = 0
    wanted: int = 0
    visible: int = 0
    consumed: int = 0
    ended: bool = False
    """StepsEnded was posted."""
    complete: bool = False
    accepted: set[int] = field(default_factory=set)
    """Accepted calls, in this generation of the scheduler."""


class World:
    """Everything.

    Args:
        seed: decides what happens.
        crashes: how many lives the scheduler may lose.
        scheduler: makes one.
    """

    def __init__(self, seed: int, *, crashes: int = 4, scheduler: type[Scheduler] = Scheduler) -> None:
        self.random = random = Random(seed)
        self._make = scheduler
        self._crashes = crashes
        self.taken = 0
        """Calls that were reported from a cache."""
        self.executed = 0
        self._code = 0
        """Changes with the code; earlier results are POISON then."""
        self._codes: dict[str, int] = {}
        """Of each key."""
        self.readings = [
            Reading(number, random.randint(1, 12), random.choice((1, 2, 3))) for number in (1, 2)
        ]
        self._processes: dict[str, Process] = {}
        self._calm = False
        self._begin_life()
        for name in ("a", "b", "c")[: random.randint(1, 3)]:
            self._spawn(name, 0, ResultCache())

    def run(self) -> None:
        """Play the storm, then the calm.

        Raises:
            Wrong, LocalProtocolError: it was not as it must be.
        """
        for _ in range(self.random.randint(50, 1500)):
            self._turn()
        self._calm = True
        for _ in range(TURNS_MAX):
            if all(reading.complete for reading in self.readings):
                return
            self._turn()
        raise Wrong("it does not come to its end")

    # -- lives of the scheduler -----------------------------------------------------------------------

    def _begin_life(self) -> None:
        self._scheduler = self._make(
            SchedulerLimits(bundle_s=self.random.choice((0.01, 2.0)), deaths_max=10**6)
        )
        self._cached = CachedResultIndex()
        self._passes: dict[str, int] = {}
        self._joined: dict[str, Process] = {}
        self._value: object = None
        self._late = [r for r in self.readings if not r.complete]
        """Passes that are not open yet."""

    def _crash(self) -> None:
        """Kill the scheduler; connected workers detect it."""
        if self.random.random() < 0.2:
            self._code += 1
        stale = [(p, item) for p in self._processes.values() for item in p.up]
        for reading in self.readings:
            reading.offered = reading.wanted = reading.visible = reading.consumed = reading.durable
            reading.accepted.clear()
            reading.ended = False
        self._begin_life()
        for process in list(self._processes.values()):
            self._lose_connection(process)
        for process, (message, _) in stale:
            if isinstance(message, msg.Results):  # fenced by its connection; here the scheduler has to do it
                self._value = None
                self._tell(
                    ev.CallsDone(
                        process.name,
                        process.incarnation,
                        message.lease,
                        message.lo,
                        message.hi,
                        message.busy_ns,
                    )
                )

    def _open(self, reading: Reading) -> None:
        key = key_of(f"run {self._code}", [str(reading.number).encode()])
        self._codes[key] = self._code
        self._passes[key] = reading.number
        settings = PassSettings(reading.replicas, first_step=reading.durable)
        self._tell(ev.PassOpened(reading.number, settings))
        for kept in self._cached.of_pass(key, reading.number):
            self._tell(kept)

    # -- what may happen next ---------------------------------------------------------------------------

    def _turn(self) -> None:
        random = self.random
        if not self._calm and random.random() < 0.03:
            self._fault()
            return
        acts = [
            *[(self._deliver_down, p) for p in self._processes.values() if p.down],
            *[(self._deliver_up, p) for p in self._processes.values() if p.up],
            *[(self._execute, p) for p in self._processes.values() if p.slice is not None and not p.down],
            *[(self._read, r) for r in self.readings if r not in self._late and not r.complete],
            *[(self._open_late, r) for r in self._late],
        ]
        if not acts:
            return
        act, what = random.choice(acts)
        act(what)  # type: ignore[arg-type]

    def _fault(self) -> None:
        process = self.random.choice(list(self._processes.values()))
        kind = self.random.choice(("kill", "cut", "refuse", "crash"))
        if kind == "crash" and self._crashes:
            self._crashes -= 1
            self._crash()
        elif kind == "kill":
            self._gone(process)
            self._spawn(process.name, process.incarnation + 1, ResultCache())
        elif kind == "cut":
            self._gone(process)
            self._lose_connection(process)
        elif kind == "refuse" and self._joined.get(process.name) is process:
            del self._joined[process.name]
            process.down.append(msg.Refuse("not heard"))
            self._tell(ev.WorkerLost(process.name, process.incarnation, "not heard"))

    def _gone(self, process: Process) -> None:
        """The scheduler learns that a process is gone; nothing of it arrives any more."""
        if self._joined.get(process.name) is process:
            del self._joined[process.name]
            self._tell(ev.WorkerLost(process.name, process.incarnation, "gone"))

    def _lose_connection(self, process: Process) -> None:
        """End a process, which hands its cached results to the next one."""
        file = os.memfd_create("kept")
        try:
            process.kept.save(file)
            kept = ResultCache()
            kept.load(file)
        finally:
            os.close(file)
        self._spawn(process.name, process.incarnation + 1, kept)

    def _open_late(self, reading: Reading) -> None:
        self._late.remove(reading)
        self._open(reading)

    def _read(self, reading: Reading) -> None:
        random = self.random
        first, last = reading.offered, min(reading.steps, reading.wanted)
        if first < last:
            reading.offered = random.randint(first + 1, last)
            self._tell(ev.StepsAvailable(reading.number, first, reading.offered, reading.replicas, 10))
        if reading.offered == reading.steps and not reading.ended:
            reading.ended = True
            self._tell(ev.StepsEnded(reading.number))
        if reading.consumed < reading.visible:
            reading.consumed = reading.visible
            self._tell(ev.StepsConsumed(reading.number, reading.consumed, 0))
        if random.random() < 0.2 and reading.durable < reading.consumed:
            reading.durable = random.randint(reading.durable + 1, reading.consumed)
            self._tell(ev.StepsCommitted(reading.number, reading.durable))

    # -- messages ------------------------------------------------------------------------------------------

    def _spawn(self, name: str, incarnation: int, kept: ResultCache) -> None:
        hello = msg.Hello(name, incarnation, 1, "", "", 1, "", "", "", "", kept.offers())
        process = self._processes[name] = Process(name, incarnation, kept, WorkerMachine(hello))
        self._do(process, process.machine.handle(Started(), 0.0))

    def _deliver_down(self, process: Process) -> None:
        self._do(process, process.machine.handle(process.down.popleft(), 0.0))

    def _deliver_up(self, process: Process) -> None:
        message, value = process.up.popleft()
        name, incarnation = process.name, process.incarnation
        if isinstance(message, msg.Hello):
            for kept in self._cached.add(message, self._passes):
                self._tell(kept)
            self._joined[name] = process
            process.down.append(msg.Welcome("c", 1.0, ()))
            self._tell(ev.WorkerJoined(name, incarnation, supervised=False))
        elif isinstance(message, msg.Results):
            stands = self._joined.get(name) is process
            self._value = value if stands else None
            self._tell(
                ev.CallsDone(name, incarnation, message.lease, message.lo, message.hi, message.busy_ns, 1)
            )

    def _execute(self, process: Process) -> None:
        at = process.slice
        assert at is not None
        if at.lease in process.recalls:
            lo = at.lo
            for part in process.kept.recalled(process.keys[at.pass_id], at.lo, at.hi):
                self.taken += part.hi - part.lo
                self._finish(process, at.lease, part)
                lo = part.hi
            assert lo == at.hi
        else:
            hi = self.random.randint(at.lo + 1, at.hi)
            self.executed += hi - at.lo
            value = [[self._codes[process.keys[at.pass_id]], call] for call in range(at.lo, hi)]
            self._finish(process, at.lease, CachedCalls(at.lo, hi, 10**7, encode(value)))
        if self._processes[process.name] is process:
            self._do(process, process.machine.handle(SliceEnded(at.lease), 0.0))

    def _finish(self, process: Process, lease: int, part: CachedCalls) -> None:
        for command in process.machine.handle(CallsFinished(lease, part.lo, part.hi, part.busy_ns), 0.0):
            assert isinstance(command, wcmd.SendResults)
            if command.cache_pass:
                process.kept.add(process.keys[command.cache_pass], part)
            process.up.append((command.message, decode(part.frames)))

    def _do(self, process: Process, commands: list[wcmd.Command]) -> None:
        process.machine.validate()
        for command in commands:
            match command:
                case wcmd.Send(message):
                    process.up.append((message, None))
                case wcmd.Apply(msg.Bind(pass_id, key)):
                    process.keys[pass_id] = key
                case wcmd.Apply(msg.Unbind(pass_id)):
                    process.kept.drop(process.keys.pop(pass_id))
                case wcmd.Apply(msg.Committed(pass_id, before)):
                    process.kept.release(process.keys[pass_id], before)
                case wcmd.Apply(msg.Recall(lease)):
                    process.recalls.add(lease)
                case wcmd.DropLease(lease):
                    process.recalls.discard(lease)
                    if process.slice is not None and process.slice.lease == lease:
                        process.slice = None
                case wcmd.Execute():
                    process.slice = command
                case wcmd.Leave():
                    self._gone(process)
                    self._lose_connection(process)

    # -- the scheduler ------------------------------------------------------------------------------------

    def _tell(self, event: ev.Event) -> None:
        for command in self._scheduler.handle(event, 0.0):
            self._carry_out(command)
        self._scheduler.validate()

    def _send(self, worker: str, message: msg.Message) -> None:
        if worker in self._joined:
            self._joined[worker].down.append(message)

    def _carry_out(self, command: cmd.Command) -> None:
        match command:
            case cmd.SendBind(worker, pass_id):
                key = next(k for k, number in self._passes.items() if number == pass_id)
                self._send(worker, msg.Bind(pass_id, key))
            case cmd.SendAssign(worker, lease, pass_id, lo, hi, attempt):
                self._check_issued(pass_id, lo, hi)
                self._send(worker, msg.Assign(lease, pass_id, lo, hi, attempt))
            case cmd.SendRecall(worker, lease, pass_id, lo, hi):
                self._check_issued(pass_id, lo, hi)
                self._send(worker, msg.Recall(lease, pass_id, lo, hi))
            case cmd.SendCommitted(worker, pass_id, before):
                self._send(worker, msg.Committed(pass_id, before))
            case cmd.SendUnbind(worker, pass_id):
                self._send(worker, msg.Unbind(pass_id))
            case cmd.SendCancel(worker, lease):
                self._send(worker, msg.Cancel(lease))
            case cmd.EvictWorker(worker, incarnation, reason):
                if worker in self._joined and self._joined[worker].incarnation == incarnation:
                    self._joined.pop(worker).down.append(msg.Refuse(reason))
            case cmd.AcceptResults(pass_id, lo, hi):
                self._accept(self.readings[pass_id - 1], lo, hi)
            case cmd.RequestSteps(pass_id, count):
                self.readings[pass_id - 1].wanted += count
            case cmd.StepsReady(pass_id, first, last):
                reading = self.readings[pass_id - 1]
                if first != reading.visible:
                    raise Wrong(f"step {first} is visible, {reading.visible} was to come")
                reading.visible = last
            case cmd.PassComplete(pass_id):
                self.readings[pass_id - 1].complete = True
                self.readings[pass_id - 1].durable = self.readings[pass_id - 1].steps

    def _check_issued(self, pass_id: int, lo: int, hi: int) -> None:
        reading = self.readings[pass_id - 1]
        if lo < reading.durable * reading.replicas or any(c in reading.accepted for c in range(lo, hi)):
            raise Wrong(f"calls [{lo}, {hi}) of pass {pass_id} are asked for, but are done")

    def _accept(self, reading: Reading, lo: int, hi: int) -> None:
        if self._value != [[self._code, call] for call in range(lo, hi)]:
            raise Wrong(f"POISON counts: calls [{lo}, {hi}) of pass {reading.number} are {self._value}")
        calls = set(range(lo, hi))
        if calls & reading.accepted:
            raise Wrong(f"calls [{lo}, {hi}) count twice")
        reading.accepted |= calls
