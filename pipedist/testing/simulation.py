"""A simulation of the machines alone: the real scheduler, real worker machines, and no data.

Everything follows from one seed: the passes and the fates of their calls, the limits, which faults
there are, and when they strike. First, while the STORM lasts, faults happen, and nothing unsafe may
come of them: every result counts exactly once, none of a superseded attempt, steps are visible in
order, gangs count at once or not at all. Then, in the CALM, no new faults happen, and everything must
complete within a bounded time: nothing waits for ever. After each event the invariants of the machine
that handled it are checked.

    Simulation(7).run()
    Simulation(7, workers=20, calls=200, faults=Faults(crash=0.05)).run()
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import Scheduler, SchedulerLimits
from pipedist.scheduler import events as ev
from pipedist.testing.books import Violation
from pipedist.testing.faults import Faults
from pipedist.testing.network import FaultyNetwork
from pipedist.testing.simulated_fleet import SimulatedFleet
from pipedist.testing.simulated_hub import SimulatedHub
from pipedist.testing.simulated_process import PAUSE_S, SimulatedProcess
from pipedist.testing.simulated_readers import SimulatedReaders
from pipedist.testing.virtual_time import VirtualTime
from pipedist.testing.workloads import draw_works

CALM_S = 300.0
"""How long everything may take to complete in the calm, beside the time of all calls."""

STORY_EVENTS_MAX = 40


class SimulationFailure(AssertionError):
    """A simulation found something wrong; the text has the story, and how to play it again."""


class Simulation:
    """One seeded story; played by `run`.

    Args:
        seed: decides everything.
        workers: how many there are.
        calls: how many calls there are, about.
        faults: how often each kind happens in the storm; None: drawn.
        scheduler: makes the scheduler.
        check_every: check the scheduler's invariants after every so many of its events, and those of
            the workers' machines if it is 1; None: 1 for every tenth seed of a small simulation, else
            more. The books are kept after each event all the same; and a seed that fails is played
            again with 1, so that what is told is the first thing that was wrong.
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
        self.faults = Faults.draw(random) if faults is None else faults
        self.limits = _draw_limits(random)
        self.time = VirtualTime()
        self.network = FaultyNetwork(self.time, random, self.faults)
        works = draw_works(random, calls, self.faults)
        self.works = {work.id: work for work in works}
        self.turn_rate = self.faults.crash + self.faults.pause
        self.slow_rate = self.faults.slow
        self.fleet = SimulatedFleet(self)
        far = random.randrange(workers) if random.random() < 0.25 else 0
        self._managed = [f"w{i}" for i in range(workers - far)]
        self._dialled = [f"far{i}" for i in range(far)]
        self.hub = SimulatedHub(self, scheduler(self.limits), self.limits, self._managed)
        self.readers = SimulatedReaders(self)
        self.events = 0
        """How many events the scheduler has handled."""
        self.check_every = check_every or (1 if seed % 10 == 0 and workers < 10 else max(16, workers))
        self.story: deque[tuple[float, object, Sequence[object]]] = deque(maxlen=STORY_EVENTS_MAX)
        """What has happened last, and what the scheduler wanted then."""
        work_s = sum(w.call_s * w.steps * w.settings.replicas for w in works)
        self._storm_s = random.choice((0.0, 0.3, 1.0)) * (1.0 + 2 * work_s / workers)
        self._calm_s = CALM_S + 40 * work_s

    @property
    def counts(self) -> Counter[str]:
        """Faults that have happened, by kind."""
        return self.network.counts

    @property
    def replay(self) -> str:
        """The command that plays this simulation again."""
        workers, calls = self._size
        faults = f" --faults {self._given}" if self._given is not None else ""
        return f"python -m pipedist.testing --workers {workers} --calls {calls}{faults} --seed {self.seed}"

    def run(self) -> None:
        """Play the story to its end.

        Raises:
            SimulationFailure: something is wrong; the first thing that is.
        """
        try:
            self._begin()
            self._play()
        except Exception as error:
            if self.check_every > 1:
                self._again().run()  # raises where the first thing was wrong, which may be before this
            what = f"seed {self.seed}: {type(error).__name__}: {error}"
            raise SimulationFailure(f"{what}\n{self._told()}\nplay it again: {self.replay}") from error

    def let_go(self) -> None:
        """Come apart: nobody looks at it any more, and thousands of others follow."""
        self.time.clear()
        self.fleet.let_go()
        for part in (self.hub, self.fleet, self.readers, self):
            vars(part).clear()

    def _again(self) -> Simulation:
        """Return the same story, to be looked at after every event."""
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
            self.hub.handle(ev.WorkerExpected(name))
        for name in self._dialled:
            self.time.at(self._storm_s * self.random.random(), self.fleet.dial_in, name)
        for work in self.works.values():
            self.readers.begin(work)
        self.time.at(self._storm_s, self._calm)
        if self.random.random() < 0.1:
            work = self.random.choice(list(self.works.values()))
            end = self.readers.hold if self.random.random() < 0.7 else self.readers.leave
            self.time.at(self._storm_s * self.random.random(), end, work)

    def _play(self) -> None:
        readers = self.readers
        self.time.run(lambda: readers.open > 0, self._storm_s + self._calm_s)
        if readers.open:
            raise Violation(f"{readers.open} passes wait for ever: nothing ends them in the calm")
        self.hub.books.check_end()
        self.time.run(lambda: True, self.time.now + 3 * self.network.latency_s)  # the last words arrive
        may_be_lost = self.faults.drop or self.faults.reorder
        for process in self.hub.peers:
            if process.keeps and not may_be_lost:
                raise Violation(f"{process.worker} keeps passes that are over: {process.keeps}")
            suspended = self.hub.scheduler._members.workers[process.worker].suspended
            heard = process.is_at_rest and process.connection.has_delivered
            if suspended and heard and not may_be_lost:
                raise Violation(f"{process.worker} is at rest, and laid off for lease {suspended} still")

    def _calm(self) -> None:
        self.network.calm()
        self.turn_rate = self.slow_rate = 0.0

    # -- for the simulated parts ----------------------------------------------------------------

    def note(self, process: SimulatedProcess, text: str) -> None:
        """Enter what became of a process into the story."""
        self.story.append((self.time.now, f"{process.worker}.{process.incarnation}: {text}", ()))

    def _told(self) -> str:
        lines = []
        for now, what, commands in self.story:
            lines.append(f"{now:10.4f} >> {what!r}")
            lines += [f"{'':10} << {command!r}" for command in commands]
        return "\n".join(lines)

    def disturb(self, process: SimulatedProcess) -> None:
        """Let a process be killed, or stopped."""
        kinds = ("crash", "pause")
        (kind,) = self.random.choices(kinds, (self.faults.crash, self.faults.pause))
        self.counts[kind] += 1
        if kind == "crash":
            process.kill()
        else:
            process.pause(PAUSE_S * self.random.random() ** 2)


def _draw_limits(random: Random) -> SchedulerLimits:
    """Return limits; no call fails because of deaths, of which the faults cause any number."""
    return SchedulerLimits(
        bundle_s=random.choice((0.01, 0.5, 2.0)),
        bundle_growth=random.choice((2, 8, 8)),
        steps_in_flight_max=random.choice((1, 4, 1000, 1000)),
        gangs_queued_max=random.choice((1, 3, 16)),
        bytes_in_flight_max=random.choice((500, 100_000)),
        deaths_max=1_000_000,
        failed_starts_max=1_000_000,
        heartbeat_timeout_s=2.0,
        speculation_s_min=0.1,
        speculation_attempts_max=random.choice((1, 3)),
    )


def is_violation(error: BaseException) -> bool:
    """Whether an error is what a simulation looks for, and no defect of its own."""
    return isinstance(error, Violation | LocalProtocolError)
