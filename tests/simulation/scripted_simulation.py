"""A simulation of the scheduler with scripted workers, which raise, die, hang and repeat messages.

Everything follows from one seed. The simulation is the driver (it executes commands) and the workers
(they execute leases in order, and report with delays), in virtual time. The reference model checks each command.

Here at most `UNCAUSED_DEATHS` workers die without a call that causes it. So calls may fail because of deaths, culprits
can be searched by killing workers, and the outcome of each call is still known. `Simulation` has real worker
machines and any number of faults, but no such calls.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from pipedist.scheduler import Command, Event, Scheduler, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.testing import SimulationFailure
from tests.simulation.reference_model import PassRecord, ReferenceModel, Violation, WorkerRecord
from tests.simulation.workloads import ALWAYS, STAGES, Fate, draw_scripted_workload

EVENTS_MAX = 20_000
TIME_MAX_S = 2_000.0
STORY_LINES = 40
OVERDUE_S = 3.0
UNCAUSED_DEATHS = 2
"""With one death of a call's own, and one of a call that ran after it in a lease, below `deaths_max`."""


@dataclass(slots=True)
class Job:
    """A lease in the queue of its worker."""

    lease: int
    pass_id: int
    lo: int
    hi: int
    serial: int = 0
    members: int = 0
    elements: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True, eq=False)
class ScriptedProcess:
    """One incarnation of a worker."""

    name: str
    incarnation: int
    supervised: bool
    alive: bool = True
    busy: bool = False
    stalled_until: float = 0.0
    hangs: bool = False
    waits: bool = False
    """In a gang, for other members."""
    queue: list[Job] = field(default_factory=list)
    lease: int = 0
    next_call: int = 0
    finished_lo: int = 0
    """Calls [finished_lo, next_call) of `lease` are executed, but not reported."""
    busy_ns: int = 0
    last_arrival: float = 0.0
    cancels: list[int] = field(default_factory=list)
    """Cancellations that it has not read; it reads between calls."""


@dataclass(slots=True)
class GangRun:
    """One gang: its members end when all have joined, or one has raised."""

    joined: dict[int, tuple[ScriptedProcess, Job, set[int]]] = field(default_factory=dict)
    """By lease: the waiting process, its calls, and those that raise."""
    raised: bool = False


class ScriptedSimulation:
    """One simulation of a seed; `run` executes it.

    Args:
        seed: determines everything.
        scheduler: creates the scheduler.
    """

    def __init__(self, seed: int, scheduler: Callable[[SchedulerLimits], Scheduler] = Scheduler) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self.stages = Random(5000 + seed)
        self.limits = limits = SchedulerLimits(
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
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._story: list[tuple[float, str, object]] = []
        self._deaths_left = UNCAUSED_DEATHS
        self._failed_starts_left = 2
        self._processes: dict[tuple[str, int], ScriptedProcess] = {}
        self._peers: dict[str, ScriptedProcess] = {}
        """The process of each name that joined last."""
        self._gangs: dict[int, GangRun] = {}
        passes = range(1, random.choice([1, 2]) + 1)
        self.model = ReferenceModel([draw_scripted_workload(i, random) for i in passes], limits)

    # -- the loop --------------------------------------------------------------------------

    def run(self) -> None:
        """Run the simulation to its end.

        Raises:
            SimulationFailure: the first violation, or the scheduler raised.
        """
        try:
            self._begin()
            while not all(record.is_closed for record in self.model.passes.values()):
                self._turn()
            self.model.check_end(self.scheduler)
        except Exception as error:
            story = "\n".join(
                f"{now:9.4f} {arrow} {what!r}" for now, arrow, what in self._story[-STORY_LINES:]
            )
            raise SimulationFailure(
                f"seed {self.seed}: {type(error).__name__}: {error}\n{story}\n"
                f"reproduce: python -m tests.simulation --scripted --seed {self.seed}"
            ) from error

    def _begin(self) -> None:
        for i in range(self.random.randint(1, 3)):
            self.handle(ev.WorkerExpected(f"w{i}"))
        for i in range(self.random.choice([0, 0, 1, 2])):
            self._start(f"far{i}", 0, supervised=True)
        for record in self.model.passes.values():
            self.handle(ev.PassOpened(record.work.id, record.work.settings))
            if not record.work.settings.pulled:
                self._soon(partial(self._offer, record, record.work.steps))
        if self.random.random() < 0.3:
            record = self.random.choice(list(self.model.passes.values()))
            self._soon(lambda: self._drain_or_close(record), self.random.uniform(0, 2))

    def _turn(self) -> None:
        deadline = self.scheduler.deadline()
        at = self._heap[0][0] if self._heap else math.inf
        if (deadline is None and not self._heap) or self.events > EVENTS_MAX or self.now > TIME_MAX_S:
            raise Violation("the passes do not end")
        if deadline is not None and deadline <= at:
            self.now = max(self.now, deadline)
            self.handle(ev.Tick())
            return
        self.now, _, action = heapq.heappop(self._heap)
        action()

    def _soon(self, action: Callable[[], None], within_s: float = 0.3) -> None:
        self._at(self.now + self.random.uniform(0, within_s), action)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, action))

    def handle(self, event: Event) -> None:
        """Pass an event to the model and the scheduler, and check and execute the commands."""
        self.events += 1
        self._story.append((self.now, ">>", event))
        predicted = self.model.handle(event, self.now)
        commands = self.scheduler.handle(event, self.now)
        self._story.extend((self.now, "<<", c) for c in commands)
        self.scheduler.validate()
        self.model.observe(self.scheduler)
        self.model.compare_predicted(commands, predicted)
        for command in commands:
            self.model.check(command)
            self._execute(command)
        self.model.finish_event()
        self.model.compare(self.scheduler)

    # -- executing commands ----------------------------------------------------------------

    def _execute(self, command: Command) -> None:
        passes = self.model.passes
        match command:
            case cmd.StartWorker(name, incarnation):
                self._start(name, incarnation, supervised=False)
            case cmd.EvictWorker(name, incarnation):
                self._kill(self._processes.get((name, incarnation)))
            case cmd.SendAssign(name, lease, pass_id, lo, hi):
                if self.model.leases[lease].probe is not None and self._deaths_left:
                    self._may_die_during_probe(name, passes[pass_id])
                self._send(name, Job(lease, pass_id, lo, hi, elements=command.elements))
            case cmd.SendGang(serial, pass_id):
                for name, lease, lo, hi in command.parts:
                    self._send(name, Job(lease, pass_id, lo, hi, serial, len(command.parts)))
            case cmd.SendCancel(name, lease):
                self._cancel(name, lease)
            case cmd.RequestSteps(pass_id, count):
                self._soon(lambda: self._offer(passes[pass_id], count))
            case cmd.SizeCall(pass_id, call):
                self._size_call(passes[pass_id], call)
            case cmd.StepsReady(pass_id, first, last):
                for step in range(first, last):
                    self._on_visible(passes[pass_id], step)
            case cmd.StepFailed(pass_id, step):
                if passes[pass_id].end == "failed":
                    self._soon(lambda: self._close(passes[pass_id]), 1.0)
                else:
                    self._on_visible(passes[pass_id], step)
            case cmd.PassComplete(pass_id):
                self._soon(lambda: self._close(passes[pass_id]), 1.0)
            case cmd.PassDrained(pass_id):
                self._soon(lambda: self._close(passes[pass_id]))
            case cmd.ClusterFailed(reason):
                raise Violation(reason)

    def _may_die_during_probe(self, name: str, record: PassRecord) -> None:
        process = self._peers[name]
        if self.random.random() < 0.1:
            self._deaths_left -= 1
            self._at(self.now + record.work.call_s * self.random.random(), lambda: self._kill(process))

    def _send(self, name: str, job: Job) -> None:
        process = self._peers[name]
        if process.alive and process.incarnation == self._worker(process).incarnation:
            process.queue.append(job)
            if not process.busy:
                self._next_call(process)

    def _worker(self, process: ScriptedProcess) -> WorkerRecord:
        return self.model.workers[process.name]

    def _holds(self, process: ScriptedProcess, job: Job) -> bool:
        return any(lease.id == job.lease for lease in self._worker(process).leases)

    def _size_call(self, record: PassRecord, call: int) -> None:
        """Report the number of elements, after the events that are due now."""
        poison = record.work.fates[call].poison
        assert poison is not None
        sized = ev.CallSized(record.work.id, call, poison.elements)
        self._at(self.now, lambda: None if record.is_closed else self.handle(sized))

    def _cancel(self, name: str, lease: int) -> None:
        process = self._peers[name]
        process.cancels.append(lease)
        if not process.busy and not process.waits and not process.hangs:
            self._soon(lambda: self._confirm_cancels(process))
        if process.hangs:  # its supervisor will notice it
            self._soon(lambda: self._kill(process), 5.0)
        elif process.waits and process.lease == lease:
            process.waits = process.busy = False
            process.queue.pop(0)
            self._soon(lambda: None if process.busy else self._next_call(process))
        if self._deaths_left > 0 and self.random.random() < 0.5:
            self._deaths_left -= 1
            self._soon(lambda: self._kill(process))
        process.queue[1:] = [x for x in process.queue[1:] if x.lease != lease]

    # -- readers -----------------------------------------------------------------------------

    def _offer(self, record: PassRecord, count: int) -> None:
        work = record.work
        for _ in range(min(count, work.steps - record.offered)):
            if record.is_closed:
                return
            step = record.offered
            self.handle(ev.StepsAvailable(work.id, step, step + 1, work.parts[step], work.step_bytes))
        if record.offered == work.steps and not record.is_ended and not record.is_closed:
            self.handle(ev.StepsEnded(work.id))
            if not work.settings.ordered and record.is_all_reported:
                self._close(record)

    def _on_visible(self, record: PassRecord, step: int) -> None:
        if record.work.settings.ordered:
            self._soon(lambda: self._consume(record, step), 1.0)
        elif record.is_all_reported and record.is_ended:
            self._soon(lambda: self._close(record))

    def _consume(self, record: PassRecord, step: int) -> None:
        if record.is_closed:
            return
        if step != record.consumed:  # steps are consumed in order
            self._soon(lambda: self._consume(record, step))
            return
        size = self.model.result_bytes(record.work.id, step, step + 1)
        self.handle(ev.StepsConsumed(record.work.id, step + 1, size))

    def _drain_or_close(self, record: PassRecord) -> None:
        if record.is_closed or record.end:
            return
        if self.random.random() < 0.5:
            self._close(record)
        else:
            self.handle(ev.PassDraining(record.work.id))

    def _close(self, record: PassRecord) -> None:
        if not record.is_closed:
            self.handle(ev.PassClosed(record.work.id))

    # -- processes ---------------------------------------------------------------------------

    def _start(self, name: str, incarnation: int, *, supervised: bool) -> None:
        if (name, incarnation) in self._processes:
            return
        process = self._processes[name, incarnation] = ScriptedProcess(name, incarnation, supervised)
        if not supervised and self._failed_starts_left and self.random.random() < 0.1:
            self._failed_starts_left -= 1
            process.alive = False
            self._soon(lambda: self.handle(ev.WorkerLost(name, incarnation, "exit code 1")))
            return
        self._soon(lambda: self._join(process))

    def _join(self, process: ScriptedProcess) -> None:
        if not process.alive:
            return
        self._peers[process.name] = process
        self.handle(ev.WorkerJoined(process.name, process.incarnation, process.supervised))
        if process.supervised:
            self._send_heartbeats(process)
        if self.random.random() < 0.4:
            self._soon(lambda: self._disturb(process), 3.0)
        if self.random.random() < 0.05:  # a late message of an earlier incarnation
            self._soon(lambda: self.handle(ev.WorkerJoined(process.name, process.incarnation - 1)))

    def _send_heartbeats(self, process: ScriptedProcess) -> None:
        if not process.alive:
            return
        if process.stalled_until <= self.now:
            self.handle(ev.HeartbeatReceived(process.name, process.incarnation))
        self._at(self.now + self.limits.heartbeat_timeout_s / 4, lambda: self._send_heartbeats(process))

    def _disturb(self, process: ScriptedProcess) -> None:
        """Inject a fault that no call causes: a kill, a leave, a stall, a second incarnation."""
        if not process.alive:
            return
        kind = self.random.choice(["kill", "leave", "stall", "rejoin"])
        if kind == "leave":
            process.alive = False
            self.handle(ev.WorkerLost(process.name, process.incarnation, "asked to leave", graceful=True))
            self._restart(process)
        elif self._deaths_left > 0:
            self._deaths_left -= 1
            if kind == "stall" and process.supervised:
                process.stalled_until = self.now + self.random.choice([1.0, 20.0])
            elif kind == "rejoin" and process.supervised:
                self._start(process.name, process.incarnation + 1, supervised=True)
            else:
                self._kill(process)

    def _kill(self, process: ScriptedProcess | None) -> None:
        """End a process; its last messages and the report of its exit may overtake each other."""
        if process is None or not process.alive:
            return
        process.alive = False
        later = max(process.last_arrival, self.now)
        # An exit that is reported before the last results charges a finished call: an uncaused death too.
        if self._deaths_left > 0 and self.random.random() < 0.3 and later > self.now:
            self._deaths_left -= 1
            later = self.now
        silent = process.supervised and self.random.random() < 0.5
        if not silent:
            lost = ev.WorkerLost(process.name, process.incarnation, "signal 9")
            self._at(later + self.random.uniform(0, 0.2), lambda: self.handle(lost))
        if process.supervised and self.random.random() < 0.5:  # a heartbeat in flight
            late = ev.HeartbeatReceived(process.name, process.incarnation)
            self._soon(lambda: self._unless_ready(process, late), 20.0)
        self._restart(process)

    def _unless_ready(self, process: ScriptedProcess, late: Event) -> None:
        worker = self._worker(process)
        if not worker.ready or worker.incarnation != process.incarnation:
            self.handle(late)

    def _restart(self, process: ScriptedProcess) -> None:
        if process.supervised:
            incarnation = process.incarnation + 1
            self._at(self.now + 8.0, lambda: self._start(process.name, incarnation, supervised=True))

    def _time_out(self, process: ScriptedProcess, job: Job, call: int, fate: Fate) -> None:
        """End a process because its call takes too long; its finished calls are not reported."""
        process.alive = False
        lost = ev.WorkerLost(
            process.name,
            process.incarnation,
            "timed out",
            running=(job.lease, call),
            stage=self.stages.choice(STAGES),
            timed_out=True,
            retries=fate.retries,
            quarantine=fate.quarantine,
        )
        self._at(max(process.last_arrival, self.now), lambda: self.handle(lost))
        self._restart(process)

    # -- executing calls ---------------------------------------------------------------------

    def _confirm_cancels(self, process: ScriptedProcess) -> None:
        """Confirm the cancellations that were read, after the reports."""
        if not process.alive:
            return
        process.last_arrival = max(process.last_arrival, self.now, process.stalled_until)
        for lease in process.cancels:
            confirmed = ev.CancelConfirmed(process.name, process.incarnation, lease)
            self._at(process.last_arrival, partial(self.handle, confirmed))
        process.cancels.clear()

    def _next_call(self, process: ScriptedProcess) -> None:
        self._confirm_cancels(process)
        if not process.alive or not process.queue:
            return
        job = process.queue[0]
        took = self.model.passes[job.pass_id].work.call_s * self.random.uniform(0.5, 1.5)
        process.busy = True
        start = max(self.now, process.stalled_until)
        if job.serial:
            process.waits = False
            process.lease, process.busy_ns = job.lease, int(took * 1e9)
            self._at(start + took, lambda: self._end_member(process, job))
            return
        if job.lease != process.lease:
            process.lease = job.lease
            process.next_call = process.finished_lo = job.lo
            process.busy_ns = 0
        process.busy_ns += int(took * 1e9)
        self._at(start + took, lambda: self._end_call(process, job))

    def _end_call(self, process: ScriptedProcess, job: Job) -> None:
        process.busy = False
        if not process.alive:
            return
        if not self._holds(process, job):
            process.queue.pop(0)  # cancelled meanwhile: its results are not reported
            self._next_call(process)
            return
        call = process.next_call
        fate = self.model.passes[job.pass_id].work.fates.get(call, Fate())
        raises = fate.raises > 0
        if fate.poison is not None and fate.poison.fails(job.elements):
            if fate.poison.how == "kills":
                self._kill(process)
                return
            if fate.poison.how == "takes too long":
                self._time_out(process, job, call, fate)
                return
            raises = True
        if fate.kills > 0:
            fate.kills -= fate.kills < ALWAYS
            self._kill(process)
            return
        process.next_call = call + 1
        last = process.next_call == job.hi
        if raises:
            fate.raises -= 0 < fate.raises < ALWAYS
            self._report(process, job, process.finished_lo, call)
            self._report_failure(process, job, call, fate, aborted=False, text="poison")
            process.finished_lo = call + 1
        elif last or self.random.random() < 0.3:
            self._report(process, job, process.finished_lo, call + 1)
            process.finished_lo = call + 1
        if last:
            process.queue.pop(0)
        self._next_call(process)

    def _report(self, process: ScriptedProcess, job: Job, lo: int, hi: int) -> None:
        if lo >= hi:
            return
        busy_ns, process.busy_ns = process.busy_ns, 0
        size = (hi - lo) * self.model.passes[job.pass_id].work.call_bytes
        event = ev.CallsDone(process.name, process.incarnation, job.lease, lo, hi, busy_ns, size)
        self._deliver(process, event, last=hi == job.hi)

    def _report_failure(
        self, process: ScriptedProcess, job: Job, call: int, fate: Fate, *, aborted: bool, text: str
    ) -> None:
        event = ev.CallFailed(
            process.name,
            process.incarnation,
            job.lease,
            call,
            fate.retries,
            aborted=aborted,
            quarantine=fate.quarantine,
            stage=self.stages.choice(STAGES),
            text=text,
        )
        self._deliver(process, event, last=call + 1 == job.hi)

    def _deliver(self, process: ScriptedProcess, event: ev.CallsDone | ev.CallFailed, *, last: bool) -> None:
        """Deliver a report after those before it; sometimes twice, or too late."""
        arrival = max(process.last_arrival, self.now + self.random.uniform(0, 0.05), process.stalled_until)
        process.last_arrival = arrival
        self._at(arrival, lambda: self.handle(event))
        if self.random.random() < 0.05 and (last or self._deaths_left > 0):
            self._deaths_left -= not last
            self._at(arrival + self.random.choice([0.0, 0.5]), lambda: self.handle(event))

    # -- executing members of gangs ------------------------------------------------------------

    def _end_member(self, process: ScriptedProcess, job: Job) -> None:
        """End a member's calls, or let them wait for the other members."""
        if not process.alive:
            return
        if not self._holds(process, job):
            self._next_job(process)  # cancelled meanwhile: its results are not reported
            return
        work = self.model.passes[job.pass_id].work
        own = {call: work.fates[call] for call in range(job.lo, job.hi) if call in work.fates}
        for fate in own.values():
            if fate.kills > 0 or (fate.hangs > 0 and job.members == 1):
                fate.kills -= 0 < fate.kills < ALWAYS
                fate.hangs = 0
                self._kill(process)
                return
            if fate.hangs > 0:
                fate.hangs -= 1
                process.hangs = True
                return
        raising = {call for call, fate in own.items() if fate.raises > 0}
        for call in raising:
            own[call].raises -= own[call].raises < ALWAYS
        if not work.collectives:
            self._report_member(process, job, raising, aborted=False)
            return
        gang = self._gangs.setdefault(job.serial, GangRun())
        gang.joined[job.lease] = process, job, raising
        gang.raised = gang.raised or bool(raising)
        process.waits = True
        self._report_overdue(process, job)
        if gang.raised or len(gang.joined) == job.members:
            for member, its_job, its_raising in list(gang.joined.values()):
                if member.alive and member.waits and member.lease == its_job.lease:
                    member.waits = False
                    self._report_member(member, its_job, its_raising, aborted=gang.raised)

    def _report_overdue(self, process: ScriptedProcess, job: Job) -> None:
        """Report members that hang, repeatedly while they are missing."""

        def look() -> None:
            if not (process.alive and process.waits and process.lease == job.lease):
                return
            gang = self.model.gangs.get(job.serial)
            parts = gang.parts if gang is not None else ()
            missing = tuple(m for m, part in enumerate(parts) if self._peers[part.worker].hangs)
            if missing:
                lease = job.lease
                if self.random.random() < 0.5:
                    lease += self.random.choice([-1, 1])  # the lease of another member, or none
                members = missing if self.random.random() < 0.5 else missing[:1]
                self.handle(ev.GangStalled(process.name, process.incarnation, lease, members, "waits"))
            self._report_overdue(process, job)

        self._at(self.now + OVERDUE_S * self.random.uniform(0.5, 1.5), look)

    def _report_member(self, process: ScriptedProcess, job: Job, raising: set[int], *, aborted: bool) -> None:
        """Report all calls in order: those that raised, and the others as done or aborted."""
        lo = job.lo
        for call in range(job.lo, job.hi):
            last = call + 1 == job.hi
            if call in raising or aborted:
                self._report(process, job, lo, call)
                fates = self.model.passes[job.pass_id].work.fates
                fate = fates.get(call, Fate(retries=self.random.choice([0, 5])))
                self._report_failure(process, job, call, fate, aborted=call not in raising, text="")
                lo = call + 1
            elif last or self.random.random() < 0.3:
                self._report(process, job, lo, call + 1)
                lo = call + 1
        self._next_job(process)

    def _next_job(self, process: ScriptedProcess) -> None:
        process.busy = process.waits = False
        process.queue.pop(0)
        self._next_call(process)
