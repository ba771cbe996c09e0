"""A small world around the real scheduler: workers which raise, die, stall and stammer, and an oracle.

Everything follows from one seed. The world plays the driver (it carries out commands) and the
workers (processes that execute leases in order, and report with delays); time is virtual. The
oracle keeps its own books of leases, attempts and visible steps, and compares after each event.
A call's fate is part of the world (raises k times, always raises, kills k workers, kills all),
so what must come out is known, whatever happens on the way.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random

from pipedist.scheduler import Command, Event, Scheduler, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.scheduler.books import (
    ALWAYS,
    STAGES,
    Errand,
    Fate,
    GangBook,
    Held,
    Process,
    Reading,
    Seat,
    Violation,
    draw_reading,
)
from tests.scheduler.inquests import assign_probe, look_for_cleared, set_aside, size, time_out
from tests.scheduler.meetings import Meeting, begin_part
from tests.scheduler.oracle import Oracle, foreseeable

EVENTS_MAX = 20_000
TIME_MAX_S = 2_000.0
STORY_LINES = 40


class World(Oracle):
    """One seeded story.

    Args:
        seed: decides everything.
        scheduler: makes the scheduler, which may have a planted bug.
    """

    def __init__(self, seed: int, scheduler: Callable[[SchedulerLimits], Scheduler] = Scheduler) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self.stages = Random(5000 + seed)  # its own: which stage raises changes nothing else in a world
        limits = SchedulerLimits(
            bundle_s=random.choice([0.01, 0.5]),
            bundle_growth=random.choice([2, 8]),
            steps_in_flight_max=random.choice([1, 3, 1000]),
            gangs_queued_max=random.choice([1, 3, 16]),
            bytes_in_flight_max=random.choice([500, 100_000]),
            deaths_max=5,
            backoff_s=random.choice([0.1, 1.0]),
            probes_max=random.choice([6, 6, 4096]),
            failed_starts_max=5,
            heartbeat_timeout_s=5.0,
        )
        self.scheduler = scheduler(limits)
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._story: list[tuple[float, str, object]] = []
        self._upsets = 2
        """Deaths that no call causes. With one of a call's own, and one of a call that was executed
        behind it in a lease, they stay below deaths_max."""
        self._stillborn = 2
        self.processes: dict[tuple[str, int], Process] = {}
        self.meetings: dict[int, Meeting] = {}
        self.last_gang = 0
        passes = range(1, random.choice([1, 2]) + 1)
        super().__init__(limits, {i: draw_reading(i, random) for i in passes})

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
        at = self._heap[0][0] if self._heap else math.inf
        if (deadline is None and not self._heap) or self.events > EVENTS_MAX or self.now > TIME_MAX_S:
            raise Violation("nothing moves any more")
        if deadline is not None and deadline <= at:
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
        expected = self.foresee(event)
        commands = self.scheduler.handle(event, self.now)
        self._story.extend((self.now, "<<", c) for c in commands)
        self.scheduler.validate()
        look_for_cleared(self)
        came, expected = foreseeable(commands), foreseeable(expected)
        self.must(came == expected, f"{came} came, {expected} was foreseen")
        self._useless: dict[str, int] = {}
        for command in commands:
            self._carry_out(command)
        heard = [p.heard_at for p in self.peers.values() if p.supervised and self.seats[p.name].ready]
        due = [at + self.limits.heartbeat_timeout_s for at in heard]
        for reading in self.readings.values():
            if not reading.closed and reading.over != "failed":
                reading.rouse(self.now)
                due += [*(at for at, _ in reading.resting), *reading.probes_resting.values()]
        deadline = min(due, default=None)
        self.must(self.scheduler.deadline() == deadline, f"the deadline is not {deadline}")
        self._check_gangs()
        for reading in self.readings.values():
            if not reading.deals:
                reading.passed_over = 0
            if reading.held and not reading.closed:
                runs = any(x.pass_id == reading.id for s in self.seats.values() for x in s.leases)
                self.must(
                    reading.quiet != runs, f"pass {reading.id} is held: runs {runs}, quiet {reading.quiet}"
                )

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
            case cmd.EvictWorker(name, incarnation):
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
            case cmd.SendGang():
                self._assign_gang(command)
            case cmd.GangEnded(serial, _, aborted):
                if aborted:
                    self._break_up(serial)
            case cmd.SendCancel(name, lease):
                self._cancel(name, lease)
            case cmd.RequestSteps(pass_id, count):
                self._request(self.readings[pass_id], count)
            case cmd.SizeCall(pass_id, call):
                size(self, self.readings[pass_id], call)
            case cmd.CallsQuarantined(pass_id):
                set_aside(self, self.readings[pass_id], command)
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
            case cmd.PassDrained(pass_id):
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
        self.must(not seat.suspended, f"a lease for a worker that may hang in lease {seat.suspended}")
        self.must(not reading.held, "a held pass is dealt")
        if command.lo in reading.suspects:
            assign_probe(self, command, seat, reading)
            return
        self.must(bool(calls) and calls <= reading.waiting, f"calls {calls - reading.waiting} do not wait")
        cleared = reading.cleared.get(command.lo, ())
        self.must(command.elements == cleared, f"elements {command.elements} are sent, not {cleared}")
        self.must(command.hi - 1 <= reading.last_call, f"calls beyond {reading.last_call} are of no use")
        self.must(command.lo == min(reading.waiting), f"call {min(reading.waiting)} waits longer")
        self.must(
            all(reading.tried(c) == command.attempt for c in calls),
            f"attempt {command.attempt} of calls that were tried {[reading.tried(c) for c in calls]} times",
        )
        self.must(len(seat.leases) < 2, "a third lease for one worker")
        self.must(not any(x.serial for x in seat.leases), "a call waits behind a gang")
        self._dealt(reading)
        self.must(not seat.leases or reading.call_s < self.limits.prefetch_below_s, "a long call in advance")
        reading.waiting -= calls
        seat.leases.append(Held(command.lease, command.pass_id, command.lo, command.hi))
        errand = Errand(command.lease, command.pass_id, command.lo, command.hi, elements=command.elements)
        self._send(command.worker, errand)

    def _unless_closed(self, reading: Reading, event: Event) -> None:
        if not reading.closed:
            self.handle(event)

    def _assign_gang(self, command: cmd.SendGang) -> None:
        reading = self.readings[command.pass_id]
        gang = GangBook(command.pass_id, command.parts[0].lo, command.parts[-1].hi, command.parts)
        ready = sum(seat.ready and not seat.suspended for seat in self.seats.values())
        sizes = [part.hi - part.lo for part in gang.parts]
        replicas = reading.settings.replicas
        self.must(command.serial > max(self.gangs, default=self.last_gang), "serials do not grow")
        self.last_gang = command.serial
        self.must(gang.lo % replicas == 0 and sum(sizes) == replicas, f"{gang.parts} are not one step")
        self.must(all(a.hi == b.lo for a, b in pairwise(gang.parts)), f"{gang.parts} have gaps")
        self.must(max(sizes) - min(sizes) < 2, f"replicas are spread unevenly: {sizes}")
        self.must(len(sizes) == min(replicas, ready), f"{len(sizes)} members of {ready} workers")
        self.must(len(set(gang.workers)) == len(sizes), f"a worker is two members of {gang.parts}")
        self.must(not reading.held, "a held pass is dealt")
        self.must(gang.calls <= reading.waiting, f"calls {gang.calls - reading.waiting} do not wait")
        self.must(gang.hi - 1 <= reading.last_call, f"calls beyond {reading.last_call} are of no use")
        self.must(gang.lo == min(reading.waiting), f"call {min(reading.waiting)} waits longer")
        self.must(
            command.attempt == reading.tried(gang.lo),
            f"attempt {command.attempt} of a gang that was tried {reading.tried(gang.lo)} times",
        )
        self._dealt(reading)
        seats = [self.seats[name] for name in gang.workers]
        if any(seat.leases for seat in seats):
            ahead = [
                x for x in self.gangs.values() if x.pass_id == gang.pass_id and x.workers == gang.workers
            ]
            self.must(len(ahead) < self.limits.gangs_queued_max, f"{len(ahead)} gangs wait already")
            self.must(reading.call_s < self.limits.prefetch_below_s, "a long gang in advance")
            known = {part.lease for x in ahead for part in x.parts}
            self.must(
                all(x.id in known for seat in seats for x in seat.leases),
                "others wait where a gang is queued",
            )
        reading.waiting -= gang.calls
        self.gangs[command.serial] = gang
        for (_, lease, lo, hi), seat in zip(command.parts, seats, strict=True):
            self.must(
                seat.ready and command.pass_id in seat.bound, "a gang for a worker that is not ready for it"
            )
            seat.leases.append(Held(lease, command.pass_id, lo, hi, command.serial))
        for name, lease, lo, hi in command.parts:
            self._send(name, Errand(lease, command.pass_id, lo, hi, command.serial, len(sizes)))

    def _send(self, name: str, errand: Errand) -> None:
        process = self.peers[name]
        if process.alive and process.incarnation == self.seats[name].incarnation:
            process.queue.append(errand)
            if not process.busy:
                self._next_call(process)

    def _dealt(self, reading: Reading) -> None:
        """Passes of the best priority take turns: nobody is dealt twice while another one waits."""
        for other in self.readings.values():
            if other is reading or not other.deals:
                continue
            self.must(
                reading.settings.priority <= other.settings.priority, f"pass {other.id} should go first"
            )
            if reading.settings.priority == other.settings.priority:
                other.passed_over += 1
                self.must(other.passed_over < len(self.readings), f"pass {other.id} has no turn")
        reading.passed_over = 0

    def _break_up(self, serial: int) -> None:
        gang = self.gangs.pop(serial)
        reading = self.readings[gang.pass_id]
        if not gang.doomed and not reading.closed:
            reading.waiting |= gang.calls

    def _check_gangs(self) -> None:
        """Every call of a gang was reported or is held, and nothing is held of a gang that is over."""
        held: dict[int, set[int]] = {serial: set() for serial in self.gangs}
        for seat in self.seats.values():
            for lease in seat.leases:
                if lease.serial:
                    self.must(lease.serial in held, f"lease {lease.id} of gang {lease.serial}, which is over")
                    held[lease.serial] |= set(range(lease.next, lease.hi))
        for serial, gang in self.gangs.items():
            self.must(held[serial] == gang.calls - gang.reported, f"gang {serial} is not whole")

    def _cancel(self, name: str, lease: int) -> None:
        seat = self.seats[name]
        held = next(x for x in seat.leases if x.id == lease)
        seat.unsure = seat.unsure or held is seat.leases[0]
        reading = self.readings[held.pass_id]
        if held is seat.leases[0] and (reading.closed or held.next > reading.last_call):
            self._useless.setdefault(name, lease)
        seat.leases.remove(held)
        if not seat.leases:
            seat.suspended = self._useless.get(name, 0)
        process = self.peers[name]
        process.cancels.append(lease)
        if not process.busy and not process.waits and not process.hung:
            self.soon(lambda: self._hear(process))
        if process.hung or (process.waits and process.lease == lease):
            self._interrupt(process)
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
            self.handle(
                ev.StepsAvailable(reading.id, step, step + 1, reading.parts[step], reading.step_bytes)
            )
        if reading.offered == reading.steps and not reading.ended and not reading.closed:
            reading.ended = True
            self.handle(ev.StepsEnded(reading.id))
            if not reading.settings.ordered and reading.all_shown:
                self._close(reading)

    def _show(self, reading: Reading, step: int, failures: tuple[cmd.Failure, ...]) -> None:
        first = step * reading.settings.replicas
        calls = set(range(first, first + reading.parts[step]))
        hopeless = reading.hopeless(step)
        causes = [f.call for f in failures]
        if reading.settings.gang and hopeless and reading.fates[hopeless[0]].kills:
            causes = hopeless[: len([c for c in causes if c // reading.settings.replicas == step])]
        self.must(step not in reading.shown | reading.failed, f"step {step} is shown twice")
        self.must(causes == hopeless, f"{failures} failed, should be {hopeless}")
        came = set() if failures and reading.settings.gang else calls - set(hopeless)
        aside = {call for call in came if call in reading.aside}
        foretold = {call for call in came if any(reading.foretold(call))}
        if reading.settings.gang and foretold:
            foretold = came
        self.must(aside == foretold, f"elements of calls {aside} are set aside, should be of {foretold}")
        came -= {call for call in aside if not reading.aside[call].remains}
        self.must(came <= reading.accepted, f"step {step} is shown before it is whole")
        self.must(not (calls - came) & reading.accepted or bool(failures), "a result counts that must not")
        self.must(not reading.over, f"step {step} is shown after the end")
        for failure in failures:
            self.must(failure.attempts == reading.tried(failure.call), f"{failure}: attempts counted wrong")
            died = reading.fates[hopeless[0] if reading.settings.gang else failure.call].kills > 0
            self.must((failure.cause is not None) == died, f"{failure}: how did it fail?")
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
        size = len(came) * reading.call_bytes
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
        self.handle(ev.PassDraining(reading.id))

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
            self.handle(ev.HeartbeatReceived(process.name, process.incarnation))
        self.at(self.now + self.limits.heartbeat_timeout_s / 4, lambda: self._beat(process))

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
            late = ev.HeartbeatReceived(process.name, process.incarnation)
            self.soon(lambda: self._unless_alive(process, late), 20.0)

    def _unless_alive(self, process: Process, late: Event) -> None:
        seat = self.seats[process.name]
        if not seat.ready or seat.incarnation != process.incarnation:
            self.handle(late)

    def _respawn(self, process: Process) -> None:
        if process.supervised:
            life = process.incarnation + 1
            self.at(self.now + 8.0, lambda: self._spawn(process.name, life, supervised=True))

    def _hear(self, process: Process) -> None:
        """Say which cancellations it has read, behind its reports."""
        if not process.alive:
            return
        process.last_arrival = max(process.last_arrival, self.now, process.stalled_until)
        for lease in process.cancels:
            heard = ev.CancelConfirmed(process.name, process.incarnation, lease)
            self.at(process.last_arrival, partial(self.handle, heard))
        process.cancels.clear()

    def _next_call(self, process: Process) -> None:
        self._hear(process)
        if not process.alive or not process.queue:
            return
        lease = process.queue[0]
        if lease.serial:
            begin_part(self, process, lease)
            return
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

    def _interrupt(self, process: Process) -> None:
        """A gang's lease is cancelled while its process waits for others, or hangs: that is noticed."""
        if process.hung:
            self.soon(lambda: self._kill(process), 5.0)
            return
        process.waits = process.busy = False
        process.queue.pop(0)
        self.soon(lambda: self._unless_busy(process))

    def _unless_busy(self, process: Process) -> None:
        if not process.busy:
            self._next_call(process)

    def _call_over(self, process: Process, lease: Errand, reading: Reading) -> None:
        process.busy = False
        if not process.alive:
            return
        if not any(x.id == lease.lease for x in self.seats[process.name].leases):
            process.queue.pop(0)  # cancelled meanwhile: what finishes of it is not reported
            self._next_call(process)
            return
        call = process.next_call
        fate = reading.fates.get(call, Fate())
        raises = fate.raises > 0
        if fate.poison is not None and fate.poison.fails(lease.elements):
            if fate.poison.how == "kills":
                self._die(process)
                return
            if fate.poison.how == "takes too long":
                time_out(self, process, lease, call, fate)
                return
            raises = True
        if fate.kills > 0:
            fate.kills -= fate.kills < ALWAYS
            self._die(process)
            return
        process.next_call = call + 1
        last = process.next_call == lease.hi
        if raises:
            fate.raises -= 0 < fate.raises < ALWAYS
            self._report(process, lease, process.finished_lo, call, reading)
            failed = ev.CallFailed(
                process.name,
                process.incarnation,
                lease.lease,
                call,
                fate.retries,
                quarantine=fate.quarantine,
                stage=self.stages.choice(STAGES),
                text="poison",
            )
            self._deliver(process, failed, last=last)
            process.finished_lo = call + 1
        elif last or self.random.random() < 0.3:
            self._report(process, lease, process.finished_lo, call + 1, reading)
            process.finished_lo = call + 1
        if last:
            process.queue.pop(0)
        self._next_call(process)

    def _report(self, process: Process, lease: Errand, lo: int, hi: int, reading: Reading) -> None:
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
