"""A small world around the real scheduler: workers which raise, die, stall and stammer, and an oracle.

Everything follows from one seed. The world plays the driver (it carries out commands) and the
workers (processes that execute leases in order, and report with delays); time is virtual. The
oracle keeps its own books of leases, attempts and visible steps, and compares after each event.
A call's fate is part of the world (raises k times, always raises, kills k workers, kills all),
so what must come out is known, whatever happens on the way.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from pipedist.scheduler import Command, Event, Limits, PassSettings, Scheduler
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev

ALWAYS = 1_000_000
EVENTS_MAX = 20_000
TIME_MAX_S = 2_000.0
STORY_LINES = 40


class Violation(AssertionError):
    """The scheduler did something that it must not, or did not do what it must."""


@dataclass(slots=True)
class Fate:
    """What happens when a call is executed."""

    raises: int = 0
    kills: int = 0
    retryable: bool = True

    @property
    def hopeless(self) -> bool:
        return self.raises >= ALWAYS or self.kills >= ALWAYS


@dataclass(slots=True)
class Held:
    """The oracle's own entry of a lease."""

    id: int
    pass_id: int
    next: int
    hi: int


@dataclass(slots=True)
class Seat:
    """What the oracle knows of a worker's name."""

    managed: bool
    incarnation: int = 0
    ready: bool = False
    leases: list[Held] = field(default_factory=list)
    bound: set[int] = field(default_factory=set)
    unsure: bool = False


@dataclass(slots=True)
class Process:
    """One incarnation of a worker, executing leases in order."""

    name: str
    incarnation: int
    supervised: bool
    alive: bool = True
    joined: bool = False
    busy: bool = False
    stalled_until: float = 0.0
    queue: list[cmd.SendAssign] = field(default_factory=list)
    lease: int = 0
    next_call: int = 0
    finished_lo: int = 0
    """Calls [finished_lo, next_call) of `lease`, the first one, are executed and not reported."""
    busy_ns: int = 0
    last_arrival: float = 0.0
    heard_at: float = 0.0


@dataclass(slots=True)
class Reading:
    """One pass as the world and the oracle see it."""

    id: int
    settings: PassSettings
    parts: list[int]
    fates: dict[int, Fate]
    call_s: float
    step_bytes: int
    call_bytes: int
    offered: int = 0
    requested: int = 0
    visible: int = 0
    consumed: int = 0
    result_bytes: int = 0
    waiting: set[int] = field(default_factory=set)
    """Offered calls that no worker has; those beyond a failed step may be forgotten."""
    accepted: set[int] = field(default_factory=set)
    shown: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    raised: Counter[int] = field(default_factory=Counter)
    deaths: Counter[int] = field(default_factory=Counter)
    last_call: int = ALWAYS
    """Calls beyond this one are of no use: one of its step failed for good."""
    ended: bool = False
    over: str = ""
    held: bool = False
    quiet: bool = False
    closed: bool = False

    def tried(self, call: int) -> int:
        return self.raised[call] + self.deaths[call]

    def give_up(self, call: int) -> None:
        if self.settings.fail_fast:
            replicas = self.settings.replicas
            self.last_call = min(self.last_call, (call // replicas + 1) * replicas - 1)

    @property
    def steps(self) -> int:
        return len(self.parts)

    def hopeless(self, step: int) -> list[int]:
        first = step * self.settings.replicas
        calls = range(first, first + self.parts[step])
        return [c for c in calls if c in self.fates and self.fates[c].hopeless]

    @property
    def limit(self) -> int:
        """Steps from this one on are of no use."""
        if not self.settings.fail_fast:
            return self.steps
        return next((s + 1 for s in range(self.steps) if self.hopeless(s)), self.steps)

    @property
    def all_shown(self) -> bool:
        return len(self.shown) + len(self.failed) >= self.limit


class World:
    """One seeded story.

    Args:
        seed: decides everything.
        scheduler: makes the scheduler, which may have a planted bug.
    """

    def __init__(self, seed: int, scheduler: Callable[[Limits], Scheduler] = Scheduler) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self.limits = Limits(
            bundle_s=random.choice([0.01, 0.5]),
            bundle_growth=random.choice([2, 8]),
            steps_in_flight_max=random.choice([1, 3, 1000]),
            bytes_in_flight_max=random.choice([500, 100_000]),
            deaths_max=5,
            starts_fruitless_max=5,
            heard_within_s=5.0,
        )
        self.scheduler = scheduler(self.limits)
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._story: list[tuple[float, str, object]] = []
        self._upsets = 2
        """Deaths that no call causes. With one of a call's own, and one of a call that was executed
        behind it in a lease, they stay below deaths_max."""
        self._stillborn = 2
        self.seats: dict[str, Seat] = {}
        self.processes: dict[tuple[str, int], Process] = {}
        self.peers: dict[str, Process] = {}
        """Who is behind a name: the process that joined last."""
        self.tokens: list[tuple[int, int]] = []
        self.readings = {i: self._reading(i) for i in range(1, random.choice([1, 2]) + 1)}

    # -- how a world is drawn --------------------------------------------------------------

    def _reading(self, pass_id: int) -> Reading:
        random = self.random
        replicas = random.randint(1, 4)
        ordered = random.random() < 0.8
        settings = PassSettings(
            replicas,
            retries=random.randint(0, 2),
            ordered=ordered,
            fail_fast=ordered and random.random() < 0.6,
            pulled=ordered and random.random() < 0.8,
            priority=random.choice([1, 1, 0]),
        )
        parts = [
            replicas if random.random() < 0.8 else random.randint(0, replicas)
            for _ in range(random.choice([0, 3, 8, 16]))
        ]
        calls = [step * replicas + r for step, n in enumerate(parts) for r in range(n)]
        fates = {}
        doomed = random.random() < 0.4
        kinds = ["raises", "kills", "both", *(["always", "never again"] if doomed else [])]
        for call in random.sample(calls, min(len(calls), random.choice([0, 2, 6]))):
            kind = random.choice(kinds)
            if kind == "raises":
                fates[call] = Fate(raises=random.randint(0, settings.retries))
            elif kind in ("kills", "both"):
                fates[call] = Fate(settings.retries if kind == "both" else 0, kills=1)
            else:
                fates[call] = Fate(raises=ALWAYS, retryable=kind == "always")
        if calls and pass_id == 1 and random.random() < 0.15:
            fates[random.choice(calls)] = Fate(kills=ALWAYS)
        return Reading(
            pass_id,
            settings,
            parts,
            fates,
            call_s=random.choice([0.0, 0.002, 0.02, 0.04, 1.0]),
            step_bytes=random.choice([0, 0, 60]),
            call_bytes=random.choice([0, 10, 200]),
        )

    # -- the loop --------------------------------------------------------------------------

    def run(self) -> None:
        """Play the story to its end.

        Raises:
            Violation: at the first thing that is wrong; also if the scheduler itself raises.
        """
        try:
            self._begin()
            while not all(r.closed for r in self.readings.values()):
                self._turn()
            self._check_end()
        except Exception as error:
            told = "\n".join(
                f"{now:9.4f} {arrow} {what!r}" for now, arrow, what in self._story[-STORY_LINES:]
            )
            raise Violation(f"seed {self.seed}: {type(error).__name__}: {error}\n{told}") from error

    def _begin(self) -> None:
        for i in range(self.random.randint(1, 3)):
            self.seats[f"w{i}"] = Seat(managed=True)
            self.handle(ev.WorkerExpected(f"w{i}"))
        for i in range(self.random.choice([0, 0, 1, 2])):
            self.seats[f"far{i}"] = Seat(managed=False)
            self._spawn(f"far{i}", 0, supervised=True)
        for reading in self.readings.values():
            self.handle(ev.PassOpened(reading.id, reading.settings))
            if not reading.settings.pulled:
                self.soon(partial(self._offer, reading, reading.steps))
        if self.random.random() < 0.3:
            reading = self.random.choice(list(self.readings.values()))
            self.soon(lambda: self._hold(reading), self.random.uniform(0, 2))

    def _turn(self) -> None:
        deadline = self.scheduler.deadline()
        if not self._heap or self.events > EVENTS_MAX or self.now > TIME_MAX_S:
            raise Violation("nothing moves any more")
        if deadline is not None and deadline <= self._heap[0][0]:
            self.now = max(self.now, deadline)
            self.handle(ev.Tick())
            return
        self.now, _, action = heapq.heappop(self._heap)
        action()

    def soon(self, action: Callable[[], None], within_s: float = 0.3) -> None:
        self.at(self.now + self.random.uniform(0, within_s), action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, action))

    def handle(self, event: Event) -> None:
        """Let oracle and scheduler handle an event, compare, and carry out the commands."""
        self.events += 1
        self._story.append((self.now, ">>", event))
        expected = self._foresee(event)
        commands = self.scheduler.handle(event, self.now)
        self._story.extend((self.now, "<<", c) for c in commands)
        self.scheduler.validate()
        came, expected = _foreseeable(commands), _foreseeable(expected)
        self.must(came == expected, f"{came} came, {expected} was foreseen")
        for command in commands:
            self._carry_out(command)
        heard = [p.heard_at for p in self.peers.values() if p.supervised and self.seats[p.name].ready]
        deadline = min(heard) + self.limits.heard_within_s if heard else None
        self.must(self.scheduler.deadline() == deadline, f"the deadline is not {deadline}")
        for reading in self.readings.values():
            if reading.held and not reading.closed:
                runs = any(x.pass_id == reading.id for s in self.seats.values() for x in s.leases)
                self.must(
                    reading.quiet != runs, f"pass {reading.id} is held: runs {runs}, quiet {reading.quiet}"
                )

    def must(self, holds: bool, story: str) -> None:
        if not holds:
            raise Violation(story)

    # -- the oracle ------------------------------------------------------------------------

    def _foresee(self, event: Event) -> list[Command]:
        """Enter an event in the oracle's books, and return the commands of `_FORESEEN` it must cause."""
        match event:
            case ev.WorkerExpected(name):
                return [cmd.StartWorker(name, 0)]
            case ev.WorkerJoined(name, incarnation):
                return self._foresee_join(name, incarnation)
            case ev.WorkerLost(name, incarnation, _, graceful):
                seat = self.seats[name]
                if seat.incarnation == incarnation and (seat.ready or seat.managed):
                    return self._lose(name, graceful=graceful)
            case ev.CallsDone(lo=lo, hi=hi):
                return self._foresee_report(event, lo, hi)
            case ev.CallFailed(call=call):
                return self._foresee_report(event, call, call + 1)
            case ev.StepsOffered(pass_id, first, last):
                reading = self.readings[pass_id]
                replicas = reading.settings.replicas
                for step in range(first, last):
                    reading.waiting |= set(range(step * replicas, step * replicas + event.parts))
            case ev.PassClosed(pass_id):
                self.readings[pass_id].closed = True
            case ev.Tick():
                return self._foresee_tick()
        return []

    def _foresee_join(self, name: str, incarnation: int) -> list[Command]:
        seat = self.seats[name]
        if incarnation < seat.incarnation or (seat.ready and incarnation == seat.incarnation):
            return [_expel(name, incarnation)]
        out: list[Command] = []
        if seat.ready:
            out = [_expel(name, seat.incarnation)]
            self._lose(name, graceful=False)
        seat.ready, seat.incarnation = True, incarnation
        return out

    def _foresee_tick(self) -> list[Command]:
        out: list[Command] = []
        for name, process in self.peers.items():
            seat = self.seats[name]
            late = process.heard_at + self.limits.heard_within_s <= self.now
            if process.supervised and seat.ready and late:
                out += [_expel(name, seat.incarnation), *self._lose(name, graceful=False)]
        self.must(len(out) > 0, "a Tick that was asked for, but changes nothing")
        return out

    def _foresee_report(self, event: ev.CallsDone | ev.CallFailed, lo: int, hi: int) -> list[Command]:
        name, incarnation, lease = event.worker, event.incarnation, event.lease
        seat = self.seats[name]
        held = next((x for x in seat.leases if x.id == lease), None)
        if held is None or incarnation != seat.incarnation or not seat.ready:
            return [cmd.DropResults(name, lease)]
        if held is not seat.leases[0] or lo != held.next or hi > held.hi:
            return [
                cmd.DropResults(name, lease),
                _expel(name, incarnation),
                *self._lose(name, graceful=False),
            ]
        seat.unsure = False
        held.next = hi
        if hi == held.hi:
            seat.leases.remove(held)
        reading = self.readings[held.pass_id]
        if isinstance(event, ev.CallsDone):
            reading.result_bytes += event.bytes
            fresh = set(range(lo, hi))
            self.must(not fresh & reading.accepted, f"calls {fresh & reading.accepted} are accepted twice")
            reading.accepted |= fresh
            return [cmd.AcceptResults(held.pass_id, lo, hi, name)]
        reading.raised[lo] += 1
        if event.retryable and reading.raised[lo] <= reading.settings.retries:
            reading.waiting.add(lo)
        else:
            reading.give_up(lo)
        return []

    def _lose(self, name: str, *, graceful: bool) -> list[Command]:
        """Give back what a worker had, charge whom it must be charged to, and replace it."""
        seat = self.seats[name]
        blamed = seat.leases[0] if seat.leases and not graceful and not seat.unsure else None
        for held in seat.leases:
            reading = self.readings[held.pass_id]
            reading.waiting |= set(range(held.next, held.hi))
            if held is blamed:
                reading.deaths[held.next] += 1
                if reading.deaths[held.next] >= self.limits.deaths_max:
                    reading.waiting.discard(held.next)
                    reading.give_up(held.next)
        seat.leases, seat.bound, seat.unsure, seat.ready = [], set(), False, False
        if not seat.managed:
            return []
        seat.incarnation += 1
        return [cmd.StartWorker(name, seat.incarnation)]

    def _check_end(self) -> None:
        for reading in self.readings.values():
            if reading.held or reading.over == "closed":
                continue
            if reading.settings.ordered:
                fails = reading.settings.fail_fast and any(map(reading.hopeless, range(reading.steps)))
                wanted = "failed" if fails else "complete"
                self.must(reading.over == wanted, f"pass {reading.id} is {reading.over}, should be {wanted}")
        members = self.scheduler._members
        self.must(not self.scheduler._passes and not members.leases, "something is left of closed passes")

    # -- carrying out commands -------------------------------------------------------------

    def _carry_out(self, command: Command) -> None:
        match command:
            case cmd.StartWorker(name, incarnation):
                self._spawn(name, incarnation, supervised=False)
            case cmd.ExpelWorker(name, incarnation):
                process = self.processes.get((name, incarnation))
                if process is not None and process.alive:
                    self._die(process)
            case cmd.SendBind(name, pass_id):
                self.must(pass_id not in self.seats[name].bound, f"{name} was told of pass {pass_id} twice")
                self.seats[name].bound.add(pass_id)
            case cmd.SendUnbind(name, pass_id):
                self.seats[name].bound.discard(pass_id)
            case cmd.SendAssign():
                self._assign(command)
            case cmd.SendCancel(name, lease):
                self._cancel(name, lease)
            case cmd.RequestSteps(pass_id, count):
                self._request(self.readings[pass_id], count)
            case cmd.StepsReady(pass_id, first, last):
                for step in range(first, last):
                    self._show(self.readings[pass_id], step, ())
            case cmd.StepFailed(pass_id, step, failures):
                self._show(self.readings[pass_id], step, failures)
            case cmd.PassComplete(pass_id):
                reading = self.readings[pass_id]
                self.must(reading.ended and reading.visible == reading.steps, "complete too early")
                self.must(not reading.over, "complete twice")
                reading.over = "complete"
                self.soon(lambda: self._close(reading), 1.0)
            case cmd.PassQuiet(pass_id):
                reading = self.readings[pass_id]
                self.must(reading.held and not reading.quiet, f"pass {pass_id} is quiet unasked or twice")
                reading.quiet = True
                self.soon(lambda: self._close(reading))
            case cmd.ClusterFailed(reason):
                raise Violation(reason)

    def _assign(self, command: cmd.SendAssign) -> None:
        seat, reading = self.seats[command.worker], self.readings[command.pass_id]
        calls = set(range(command.lo, command.hi))
        self.must(
            seat.ready and command.pass_id in seat.bound, "a lease for a worker that is not ready for it"
        )
        self.must(not reading.held, "a held pass is dealt")
        self.must(bool(calls) and calls <= reading.waiting, f"calls {calls - reading.waiting} do not wait")
        self.must(command.hi - 1 <= reading.last_call, f"calls beyond {reading.last_call} are of no use")
        self.must(command.lo == min(reading.waiting), f"call {min(reading.waiting)} waits longer")
        self.must(
            all(reading.tried(c) == command.attempt for c in calls),
            f"attempt {command.attempt} of calls that were tried {[reading.tried(c) for c in calls]} times",
        )
        self.must(len(seat.leases) < 2, "a third lease for one worker")
        self.must(not seat.leases or reading.call_s < self.limits.prefetch_below_s, "a long call in advance")
        reading.waiting -= calls
        seat.leases.append(Held(command.lease, command.pass_id, command.lo, command.hi))
        process = self.peers[command.worker]
        if process.alive and process.incarnation == seat.incarnation:
            process.queue.append(command)
            if not process.busy:
                self._next_call(process)

    def _cancel(self, name: str, lease: int) -> None:
        seat = self.seats[name]
        held = next(x for x in seat.leases if x.id == lease)
        seat.unsure = seat.unsure or held is seat.leases[0]
        seat.leases.remove(held)
        process = self.peers[name]
        if self._upsets > 0 and self.random.random() < 0.5:
            self._upsets -= 1
            self.soon(lambda: self._kill(process))
        process.queue[1:] = [x for x in process.queue[1:] if x.lease != lease]

    def _request(self, reading: Reading, count: int) -> None:
        reading.requested += count
        in_flight = reading.requested - reading.consumed
        self.must(in_flight <= max(1, self.limits.steps_in_flight_max), f"{in_flight} steps in flight")
        held = (reading.requested - reading.visible) * reading.step_bytes + reading.result_bytes
        self.must(
            in_flight == 1 or held <= self.limits.bytes_in_flight_max + reading.steps,
            f"{held} bytes are asked for or held",
        )
        self.soon(lambda: self._offer(reading, count))

    def _offer(self, reading: Reading, count: int) -> None:
        for _ in range(min(count, reading.steps - reading.offered)):
            if reading.closed:
                return
            step = reading.offered
            reading.offered += 1
            self.handle(ev.StepsOffered(reading.id, step, step + 1, reading.parts[step], reading.step_bytes))
        if reading.offered == reading.steps and not reading.ended and not reading.closed:
            reading.ended = True
            self.handle(ev.StepsEnded(reading.id))
            if not reading.settings.ordered and reading.all_shown:
                self._close(reading)

    def _show(self, reading: Reading, step: int, failures: tuple[cmd.Failure, ...]) -> None:
        first = step * reading.settings.replicas
        calls = set(range(first, first + reading.parts[step]))
        hopeless = reading.hopeless(step)
        self.must(step not in reading.shown | reading.failed, f"step {step} is shown twice")
        self.must([f.call for f in failures] == hopeless, f"{failures} failed, should be {hopeless}")
        self.must(calls - set(hopeless) <= reading.accepted, f"step {step} is shown before it is whole")
        self.must(not reading.over, f"step {step} is shown after the end")
        for failure in failures:
            self.must(failure.attempts == reading.tried(failure.call), f"{failure}: attempts counted wrong")
            raised = failure.token >= 0
            self.must(
                not raised or self.tokens[failure.token] == (reading.id, failure.call),
                f"{failure}: not its token",
            )
            self.must(raised or bool(failure.cause), f"{failure}: no cause")
        (reading.failed if failures else reading.shown).add(step)
        if not reading.settings.ordered:
            if reading.all_shown and reading.ended:
                self.soon(lambda: self._close(reading))
            return
        self.must(step == reading.visible, f"step {step} is shown, {reading.visible} was to come")
        reading.visible += 1
        if failures and reading.settings.fail_fast:
            reading.over = "failed"
            self.soon(lambda: self._close(reading), 1.0)
            return
        size = len(calls - set(hopeless)) * reading.call_bytes
        self.soon(lambda: self._consume(reading, step, size), 1.0)

    def _consume(self, reading: Reading, step: int, size: int) -> None:
        if reading.closed:
            return
        if step != reading.consumed:  # readers go in order
            self.soon(lambda: self._consume(reading, step, size))
            return
        reading.consumed = step + 1
        reading.result_bytes -= size
        self.handle(ev.StepsConsumed(reading.id, step + 1, size))
        if reading.consumed == reading.steps and not reading.held:
            kept = self.scheduler._passes[reading.id]
            self.must(
                kept.input_bytes
                == kept.result_bytes
                == kept.todo.calls
                == len(kept.done)
                == len(kept.trouble)
                == 0,
                f"consumed, but not forgotten: {kept}",
            )

    def _hold(self, reading: Reading) -> None:
        if reading.closed or reading.over:
            return
        if self.random.random() < 0.5:
            reading.over = "closed"
            self._close(reading)
            return
        reading.held = True
        self.handle(ev.PassHeld(reading.id))

    def _close(self, reading: Reading) -> None:
        if not reading.closed:
            self.handle(ev.PassClosed(reading.id))

    # -- workers ---------------------------------------------------------------------------

    def _spawn(self, name: str, incarnation: int, *, supervised: bool) -> None:
        if (name, incarnation) in self.processes:
            return
        process = Process(name, incarnation, supervised)
        self.processes[name, incarnation] = process
        if not supervised and self._stillborn and self.random.random() < 0.1:
            self._stillborn -= 1
            process.alive = False
            self.soon(lambda: self.handle(ev.WorkerLost(name, incarnation, "exit code 1")))
            return
        self.soon(lambda: self._join(process))

    def _join(self, process: Process) -> None:
        if not process.alive:
            return
        process.joined = True
        self.peers[process.name] = process
        process.heard_at = self.now
        self.handle(ev.WorkerJoined(process.name, process.incarnation, process.supervised))
        if process.supervised:
            self._beat(process)
        if self.random.random() < 0.4:
            self.soon(lambda: self._mishap(process), 3.0)
        if self.random.random() < 0.05:  # a ghost of an earlier life
            self.soon(lambda: self.handle(ev.WorkerJoined(process.name, process.incarnation - 1)))

    def _beat(self, process: Process) -> None:
        if not process.alive:
            return
        if process.stalled_until <= self.now:
            process.heard_at = self.now
            self.handle(ev.WorkerHeard(process.name, process.incarnation))
        self.at(self.now + self.limits.heard_within_s / 4, lambda: self._beat(process))

    def _mishap(self, process: Process) -> None:
        """Something that no call causes: a kill, a leave, a stall, a second life."""
        if not process.alive:
            return
        kind = self.random.choice(["kill", "leave", "stall", "rejoin"])
        if kind == "leave":
            process.alive = False
            self.handle(ev.WorkerLost(process.name, process.incarnation, "asked to leave", graceful=True))
            self._respawn(process)
        elif self._upsets > 0:
            self._upsets -= 1
            if kind == "stall" and process.supervised:
                process.stalled_until = self.now + self.random.choice([1.0, 20.0])
            elif kind == "rejoin" and process.supervised:
                self._spawn(process.name, process.incarnation + 1, supervised=True)
            else:
                self._die(process)

    def _kill(self, process: Process) -> None:
        if process.alive:
            self._die(process)

    def _die(self, process: Process) -> None:
        """Let a process die; its last messages and the news of its death may pass each other."""
        process.alive = False
        later = max(process.last_arrival, self.now)
        # News that come before the last results charge a call that was done: that is an upset too.
        if self._upsets > 0 and self.random.random() < 0.3 and later > self.now:
            self._upsets -= 1
            later = self.now
        silent = process.supervised and self.random.random() < 0.5
        if not silent:
            lost = ev.WorkerLost(process.name, process.incarnation, "signal 9")
            self.at(later + self.random.uniform(0, 0.2), lambda: self.handle(lost))
        self._last_beat(process)
        self._respawn(process)

    def _last_beat(self, process: Process) -> None:
        """A heartbeat that was on its way while its process was lost."""
        if process.supervised and self.random.random() < 0.5:
            late = ev.WorkerHeard(process.name, process.incarnation)
            self.soon(lambda: self._unless_alive(process, late), 20.0)

    def _unless_alive(self, process: Process, late: Event) -> None:
        seat = self.seats[process.name]
        if not seat.ready or seat.incarnation != process.incarnation:
            self.handle(late)

    def _respawn(self, process: Process) -> None:
        if process.supervised:
            life = process.incarnation + 1
            self.at(self.now + 8.0, lambda: self._spawn(process.name, life, supervised=True))

    def _next_call(self, process: Process) -> None:
        if not process.alive or not process.queue:
            return
        lease = process.queue[0]
        if lease.lease != process.lease:
            process.lease = lease.lease
            process.next_call = process.finished_lo = lease.lo
            process.busy_ns = 0
        process.busy = True
        reading = self.readings[lease.pass_id]
        took = reading.call_s * self.random.uniform(0.5, 1.5)
        start = max(self.now, process.stalled_until)
        process.busy_ns += int(took * 1e9)
        self.at(start + took, lambda: self._call_over(process, lease, reading))

    def _call_over(self, process: Process, lease: cmd.SendAssign, reading: Reading) -> None:
        process.busy = False
        if not process.alive:
            return
        if not any(x.id == lease.lease for x in self.seats[process.name].leases):
            process.queue.pop(0)  # cancelled meanwhile: what finishes of it is not reported
            self._next_call(process)
            return
        call = process.next_call
        fate = reading.fates.get(call, Fate())
        if fate.kills > 0:
            fate.kills -= fate.kills < ALWAYS
            self._die(process)
            return
        process.next_call = call + 1
        last = process.next_call == lease.hi
        if fate.raises > 0:
            fate.raises -= fate.raises < ALWAYS
            self._report(process, lease, process.finished_lo, call, reading)
            self.tokens.append((reading.id, call))
            self._deliver(
                process,
                ev.CallFailed(
                    process.name, process.incarnation, lease.lease, call, len(self.tokens) - 1, fate.retryable
                ),
                last=last,
            )
            process.finished_lo = call + 1
        elif last or self.random.random() < 0.3:
            self._report(process, lease, process.finished_lo, call + 1, reading)
            process.finished_lo = call + 1
        if last:
            process.queue.pop(0)
        self._next_call(process)

    def _report(self, process: Process, lease: cmd.SendAssign, lo: int, hi: int, reading: Reading) -> None:
        if lo >= hi:
            return
        busy_ns, process.busy_ns = process.busy_ns, 0
        size = (hi - lo) * reading.call_bytes
        event = ev.CallsDone(process.name, process.incarnation, lease.lease, lo, hi, busy_ns, size)
        self._deliver(process, event, last=hi == lease.hi)

    def _deliver(self, process: Process, event: ev.CallsDone | ev.CallFailed, *, last: bool) -> None:
        """Let a report arrive after those before it; now and then twice, or too late."""
        arrival = max(process.last_arrival, self.now + self.random.uniform(0, 0.05), process.stalled_until)
        process.last_arrival = arrival
        self.at(arrival, lambda: self._arrive(event))
        if self.random.random() < 0.05 and (last or self._upsets > 0):
            self._upsets -= not last
            self.at(arrival + self.random.choice([0.0, 0.5]), lambda: self._arrive(event))

    def _arrive(self, event: ev.CallsDone | ev.CallFailed) -> None:
        self.handle(event)


_FORESEEN = (cmd.StartWorker, cmd.ExpelWorker, cmd.AcceptResults, cmd.DropResults)


def _expel(name: str, incarnation: int) -> Command:
    return cmd.ExpelWorker(name, incarnation, "")


def _foreseeable(commands: list[Command]) -> list[Command]:
    """Return what the oracle foresees of some commands: without reasons, and in an order of its own."""
    told = [c for c in commands if isinstance(c, _FORESEEN)]
    plain = [_expel(c.worker, c.incarnation) if isinstance(c, cmd.ExpelWorker) else c for c in told]
    return sorted(plain, key=repr) if len(plain) > 1 else plain
