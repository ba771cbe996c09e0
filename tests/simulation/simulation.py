"""A simulation of the machines alone: the real scheduler, real worker machines, and no data.

Everything follows from one seed: the passes and the fates of their calls, the limits, the faults and their times.
In the first phase faults happen. The reference model checks each command: every result counts exactly once, none of
a superseded attempt, steps are visible in order, gangs count at once or not at all, calls are retried as
configured. In the second phase no new faults happen, and all passes must end within a bounded time. After each
event the invariants of the machine that handled it are checked.

Half of the small seeds have few faults that end a process. In these, a call fails after too many deaths, so the
outcome of a call that kills each worker is known: it fails, or its elements are bisected and quarantined. In the
other seeds any number of faults happens, and no call fails because of deaths. In both, calls raise, kill, hang,
take too long, or have elements that cannot be processed.

    Simulation(7).run()
    Simulation(7, workers=20, calls=200, faults=Faults(crash=0.05)).run()
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from pipedist.scheduler import Scheduler, SchedulerLimits
from pipedist.scheduler import events as ev
from pipedist.testing import Faults, FaultyNetwork, SimulationFailure, VirtualTime
from pipedist.testing.faults import PAUSE_S_MAX
from tests.simulation.gang_member import HANG_S
from tests.simulation.launcher import SimulatedLauncher
from tests.simulation.readers import Readers
from tests.simulation.reference_model import Violation
from tests.simulation.scheduler_process import SimulatedSchedulerProcess
from tests.simulation.worker_process import WorkerProcess
from tests.simulation.workloads import SMALL_CALLS, draw_workloads

RECOVERY_S = 300.0
"""How long the passes may take after the faults stop, in addition to the time of all calls and readers."""

STORY_EVENTS_MAX = 40

ANY_NUMBER = 1_000_000

LEAVE_RATES = (0.0, 0.0, 0.01)
"""The probability, for each message, that a worker leaves."""

REJOIN_RATES = (0.0, 0.02)
"""The probability, for each message, that the next incarnation of a supervised worker joins beside it."""

KILL_RATES = (0.1, 0.01)
"""Share of the processes that are killed while they execute a probe, or soon after a cancellation: in small
simulations, and in larger ones."""

FEW_FAULTS = 2
"""With one death of a call's own, and one of a call that ran after it in a lease, below `deaths_max`."""

FEW_FAILED_STARTS = 2
"""With `FEW_FAULTS`, below `failed_starts_max`."""


class _Network(FaultyNetwork):
    """A network that injects at most `left` faults."""

    left = math.inf

    def draw_kind(self) -> str:
        self.left -= 1
        if self.left <= 0:
            self.stop_faults()
        return super().draw_kind()


class Simulation:
    """One simulation of a seed; `run` executes it.

    Args:
        seed: determines everything.
        workers: number of workers; with few faults, the largest number.
        calls: approximate number of calls.
        faults: rates of the faults in the first phase; None: drawn.
        scheduler: creates the scheduler.
        check_every: check the invariants of the scheduler, and compare it with the model, after each this many
            events; 1 also checks the workers' machines. None: 1 for every tenth seed of a small simulation,
            otherwise more. Commands are checked after each event in any case. A seed that fails is run again
            with 1, to report the first violation.
    """

    def __init__(
        self,
        seed: int,
        *,
        workers: int = 5,
        calls: int = 40,
        faults: Faults | None = None,
        scheduler: Callable[[SchedulerLimits], Scheduler] = Scheduler,
        check_every: int | None = None,
    ) -> None:
        self.seed = seed
        self._size = (workers, calls)
        self._given = faults
        self._make_scheduler = scheduler
        self.random = random = Random(seed)
        self.stages = Random(5000 + seed)
        """Draws the stages in which calls raise."""
        few = faults is None and calls <= SMALL_CALLS and random.random() < 0.5
        self.faults = Faults.draw(random) if faults is None else faults
        if few:
            self.faults = replace(self.faults, partition=0.0)  # one may end several processes
        self.limits = _draw_limits(random, few_faults=few)
        self.time = VirtualTime()
        self.network = _Network(self.time, random, self.faults)
        if few:
            self.network.left = FEW_FAULTS
        works = draw_workloads(random, calls, self.faults, few_faults=few)
        self.works = {work.id: work for work in works}
        self._rates = {"crash": self.faults.crash, "pause": self.faults.pause}
        self._kill_rate = 0.0
        self._failed_starts = 0
        if faults is None:
            self._rates |= {"leave": random.choice(LEAVE_RATES), "rejoin": random.choice(REJOIN_RATES)}
            self._kill_rate = KILL_RATES[calls > SMALL_CALLS]
            self._failed_starts = FEW_FAILED_STARTS
        self.turn_rate = sum(self._rates.values())
        self.slow_rate = self.faults.slow
        self.launcher = SimulatedLauncher(self)
        workers = random.randint(1, workers) if few else workers
        remote = random.randrange(workers) if random.random() < 0.4 else 0
        self._managed = [f"w{i}" for i in range(workers - remote)]
        self._remote = [f"far{i}" for i in range(remote)]
        self.driver = SimulatedSchedulerProcess(self, scheduler(self.limits), self.limits, self._managed)
        self.readers = Readers(self)
        self.events = 0
        """Number of events that the scheduler has handled."""
        self.check_every = check_every or (1 if seed % 10 == 0 and workers < 10 else max(16, workers))
        self.story: deque[tuple[float, object, Sequence[object]]] = deque(maxlen=STORY_EVENTS_MAX)
        """The last events, and the commands that they caused."""
        work_s = sum(w.call_s * w.steps * w.settings.replicas for w in works)
        self._faults_s = random.choice((3.0, 10.0) if few else (0.0, 0.3, 1.0)) * (1.0 + 2 * work_s / workers)
        hangs = sum(fate.hangs for w in works for fate in w.fates.values())
        reading_s = sum(2 * self.readers.within_s * w.steps for w in works)
        self._recovery_s = RECOVERY_S + 40 * work_s + HANG_S * hangs + reading_s

    @property
    def counts(self) -> Counter[str]:
        """Number of faults so far, by kind."""
        return self.network.counts

    @property
    def replay(self) -> str:
        """The command that reproduces this simulation."""
        workers, calls = self._size
        faults = f" --faults {self._given}" if self._given is not None else ""
        return f"python -m tests.simulation --workers {workers} --calls {calls}{faults} --seed {self.seed}"

    def run(self) -> None:
        """Run the simulation to its end.

        Raises:
            SimulationFailure: the first violation.
        """
        try:
            self._begin()
            self._run_phases()
        except Exception as error:
            if self.check_every > 1:
                self._with_all_checks().run()  # raises at the first violation, which may be earlier
            what = f"seed {self.seed}: {type(error).__name__}: {error}"
            raise SimulationFailure(f"{what}\n{self._story_text()}\nreproduce: {self.replay}") from error

    def clear(self) -> None:
        """Break reference cycles, so that memory is freed between seeds."""
        self.time.clear()
        self.launcher.clear()
        for part in (self.driver, self.launcher, self.readers, self):
            vars(part).clear()

    def _with_all_checks(self) -> Simulation:
        """Return the same simulation with checks after every event."""
        workers, calls = self._size
        return Simulation(
            self.seed,
            workers=workers,
            calls=calls,
            faults=self._given,
            scheduler=self._make_scheduler,
            check_every=1,
        )

    def _begin(self) -> None:
        for name in self._managed:
            self.driver.handle(ev.WorkerExpected(name))
        for name in self._remote:
            self.time.at(self._faults_s * self.random.random(), self.launcher.connect, name)
        for work in self.works.values():
            self.readers.begin(work)
        self.time.at(self._faults_s, self._stop_faults)
        if self.random.random() < 0.2:
            work = self.random.choice(list(self.works.values()))
            end = self.readers.drain if self.random.random() < 0.7 else self.readers.leave
            self.time.at(self._faults_s * self.random.random(), end, work)

    def _run_phases(self) -> None:
        readers, driver = self.readers, self.driver
        self.time.run(lambda: readers.open > 0, self._faults_s + self._recovery_s)
        if readers.open:
            raise Violation(f"{readers.open} passes did not end after the faults stopped")
        driver.model.check_end(driver.scheduler)
        self.time.run(lambda: True, self.time.now + 3 * self.network.latency_s)  # the last messages arrive
        may_be_lost = self.faults.drop or self.faults.reorder
        for process in driver.peers:
            if process.keeps and not may_be_lost:
                raise Violation(f"{process.worker} keeps passes that have ended: {process.keeps}")
            suspended = driver.scheduler._members.workers[process.worker].suspended
            is_confirmed = process.is_at_rest and process.connection.has_delivered
            if suspended and is_confirmed and not may_be_lost:
                raise Violation(f"{process.worker} is idle, but still suspended for lease {suspended}")

    def _stop_faults(self) -> None:
        self.network.stop_faults()
        self.turn_rate = self.slow_rate = self._kill_rate = 0.0
        self._failed_starts = 0

    # -- for the simulated parts ----------------------------------------------------------------

    def note(self, process: WorkerProcess, text: str) -> None:
        """Record an event of a process in the story."""
        self.story.append((self.time.now, f"{process.worker}.{process.incarnation}: {text}", ()))

    def _story_text(self) -> str:
        lines = []
        for now, what, commands in self.story:
            lines.append(f"{now:10.4f} >> {what!r}")
            lines += [f"{'':10} << {command!r}" for command in commands]
        return "\n".join(lines)

    def disturb(self, process: WorkerProcess) -> None:
        """Kill or stop a process."""
        (kind,) = self.random.choices(tuple(self._rates), tuple(self._rates.values()))
        if kind == "rejoin" and not process.supervised:
            return
        if kind != "leave" and not self._may_end(process):
            return
        if kind == "leave":
            process.leave()
        elif kind == "crash":
            process.kill()
        elif kind == "pause":
            process.pause(PAUSE_S_MAX * self.random.random() ** 2)
        else:
            self.launcher.rejoin(process)
        self.counts[kind] += 1

    def kill_soon(self, process: WorkerProcess, within_s: float) -> None:
        """Kill some of the processes for which this is called."""
        if self._kill_rate and self.random.random() < self._kill_rate and self._may_end(process):
            self.counts["crash"] += 1
            self.time.at(self.time.now + within_s * self.random.random(), process.kill)

    def fails_to_start(self) -> bool:
        """Return whether a process that is started ends at once."""
        fails = self._failed_starts > 0 and self.random.random() < 0.1
        self._failed_starts -= fails
        if fails:
            self.counts["failed start"] += 1
        return fails

    def _may_end(self, process: WorkerProcess) -> bool:
        """Count a fault that ends a process; return whether it may happen."""
        if not process.alive or self.network.left <= 0:
            return False
        self.network.left -= 1
        if self.network.left <= 0:
            self.network.stop_faults()
        return True


def _draw_limits(random: Random, *, few_faults: bool) -> SchedulerLimits:
    """Draw limits; with few faults calls fail because of deaths, and too many failed starts end the cluster."""
    return SchedulerLimits(
        bundle_s=random.choice((0.01, 0.5, 2.0)),
        bundle_growth=random.choice((2, 8, 8)),
        steps_in_flight_max=random.choice((1, 4, 1000, 1000)),
        gangs_queued_max=random.choice((1, 3, 16)),
        bytes_in_flight_max=random.choice((500, 100_000)),
        deaths_max=5 if few_faults else ANY_NUMBER,
        failed_starts_max=5 if few_faults else ANY_NUMBER,
        probes_max=random.choice((6, 6, 4096)),
        heartbeat_timeout_s=5.0 if few_faults else 2.0,
        backoff_s=random.choice((0.1, 1.0)),
        speculation_s_min=0.1,
        speculation_attempts_max=random.choice((1, 3)),
    )
