"""What the scheduler knows of one pass: which calls wait, are done, failed, and what is visible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pipedist.errors import LocalProtocolError
from pipedist.scheduler.commands import Failure
from pipedist.scheduler.deaths import Death
from pipedist.scheduler.gangs import Gang, Groups
from pipedist.scheduler.ranges import RangeSet, Todo, TodoQueue
from pipedist.scheduler.resting import RestingCalls
from pipedist.scheduler.settings import Limits, PassSettings
from pipedist.scheduler.states import PassState, next_pass_state
from pipedist.scheduler.suspects import Probe, Suspects


@dataclass(slots=True)
class Trouble:
    """The history of a call that failed at least once; other calls have none."""

    raised: Counter[str] = field(default_factory=Counter)
    """How many attempts raised, by the stage that did."""
    deaths: int = 0
    """How many workers died while running it."""
    named: list[Death] = field(default_factory=list)
    """These deaths, as far as it is known in which stage they were."""
    before: int = 0
    """How many attempts it had with the elements that are left out since then."""

    @property
    def tried(self) -> int:
        """How many attempts are over."""
        return self.before + self.raised.total() + self.deaths


@dataclass(slots=True)
class Pass:
    """The state of one pass.

    A call is exactly one of: todo, resting, leased, suspect, done, beyond what is offered.
    """

    id: int
    settings: PassSettings
    dealing: dict[int, Pass] = field(repr=False)
    """Where it enters itself when it has calls waiting."""
    rousing: dict[int, Pass] = field(repr=False)
    """Where it enters itself when it has calls resting."""
    state: PassState = PassState.OPEN
    held: bool = False
    """Nothing of it is issued any more."""
    told_quiet: bool = False
    """PassDrained was said. Implies held."""
    offered: int = 0
    """Steps before this one were offered."""
    requested: int = 0
    """Steps before this one were requested. Pulled passes only."""
    visible: int = 0
    """Steps before this one were visible. Ordered passes only."""
    consumed: int = 0
    """Steps before this one were consumed."""
    todo: TodoQueue = field(default_factory=TodoQueue)
    """Calls that wait for a worker."""
    resting: RestingCalls = field(default_factory=RestingCalls)
    """Calls that raised, and are tried again later."""
    suspects: Suspects = field(default_factory=Suspects)
    """Calls whose guilty elements are looked for."""
    done: RangeSet = field(default_factory=RangeSet)
    """Calls that came back or failed for good, and empty shards; only of steps that are not visible."""
    kept: dict[tuple[str, int], RangeSet] = field(default_factory=dict)
    """Calls whose results a worker, in this incarnation, has from a scheduler that is gone; of those that
    wait, none of a worker that is READY. Never of a gang."""
    leased: int = 0
    """Calls under a lease that have not come back."""
    gangs: dict[int, Gang] = field(default_factory=dict)
    """Gangs that are not over, by serial."""
    groups: Groups = field(default_factory=Groups)
    """The workers that they were given to."""
    trouble: dict[int, Trouble] = field(default_factory=dict)
    """Calls that failed at least once and are not done; of a gang, its first call stands for it."""
    failures: dict[int, Failure] = field(default_factory=dict)
    """Calls that failed for good, of steps that are not visible."""
    last_step: int | None = None
    """FAILING: no step after this one is finished."""
    input_bytes: int = 0
    """Bytes of offered steps that are not visible."""
    step_bytes: float = 0.0
    """Input bytes of a step, of the latest offer."""
    result_bytes: int = 0
    """Bytes of results that are not consumed."""
    result_call_bytes: float = 0.0
    """Result bytes of a call, a moving mean."""
    call_s: float | None = None
    """How long a call, or a gang as a whole, takes, a moving mean; None before the first result."""
    bundle_max: int = 1
    """Calls in the next lease at most; grows with what came back."""

    def __post_init__(self) -> None:
        self.offered = self.requested = self.visible = self.consumed = self.settings.first_step

    def become(self, what: str) -> None:
        """Take the transition `what`."""
        self.state = next_pass_state(self.id, self.state, what)

    @property
    def deals(self) -> bool:
        """Whether its waiting calls may be issued."""
        return not self.held and (self.todo.calls > 0 or bool(self.suspects.waiting))

    def is_short(self, limits: Limits) -> bool:
        """Whether its calls are known to be short enough to wait at a worker in advance."""
        return self.call_s is not None and self.call_s < limits.prefetch_below_s

    def offer(self, first: int, last: int, parts: int, size: int, holes: Sequence[int] = ()) -> None:
        """Add steps [first, last) of `parts` calls each, but for those of the replicas in `holes`."""
        replicas = self.settings.replicas
        if self.state in (PassState.ENDED, PassState.COMPLETE):
            raise LocalProtocolError(f"pass {self.id}: steps were offered after its end")
        parts_min, least = (replicas, "") if self.settings.gang else (0, "at most ")
        if first != self.offered or last < first or not parts_min <= parts <= replicas:
            raise LocalProtocolError(
                f"pass {self.id}: steps [{first}, {last}) of {parts} calls were offered, "
                f"expected them to begin at {self.offered} with {least}{replicas} calls"
            )
        self.offered = last
        self.requested = max(self.requested, last)
        if last == first or not self.needs(first * replicas):
            return
        self.input_bytes += size
        self.step_bytes = size / (last - first)
        self.dealing[self.id] = self
        if parts == replicas and not holes:
            self.todo.put(first * replicas, last * replicas, 0)
            return
        for step in range(first, last):
            lo = step * replicas
            ends = [-1, *holes, parts]
            for hole, end in pairwise(ends):
                self.todo.put(lo + hole + 1, lo + end, 0)
            for hole in holes:
                self.done.add(lo + hole, lo + hole + 1)
            self.done.add(lo + parts, lo + replicas)

    def needs(self, call: int) -> bool:
        """Return whether a call is still of use: it is not beyond the step that fails the pass."""
        return self.last_step is None or call // self.settings.replicas <= self.last_step

    def wait(self, lo: int, hi: int, attempt: int) -> None:
        """Let calls [lo, hi) wait for a worker once more, as far as they are of use."""
        if self.last_step is not None:
            hi = min(hi, (self.last_step + 1) * self.settings.replicas)
        self.todo.put(lo, hi, attempt)
        self.dealing[self.id] = self

    def wait_probe(self, probe: Probe) -> None:
        """Let a probe wait for a worker, unless its call is of no use any more."""
        if probe.call in self.suspects.calls:
            self.suspects.wait(probe)
            self.dealing[self.id] = self

    def rest(self, due: float, item: Todo | Probe) -> None:
        """Let calls, or a probe, wait once more, but not before `due`."""
        self.resting.put(due, item)
        self.rousing[self.id] = self

    def rouse(self, now: float) -> None:
        """Let those wait for a worker that have rested."""
        for item in self.resting.take(now):
            if isinstance(item, Probe):
                self.wait_probe(item)
            else:
                self.wait(*item)
        if not self.resting:
            del self.rousing[self.id]

    def muster(self, gang: Gang) -> None:
        """Note that a gang was issued."""
        self.gangs[gang.serial] = gang
        self.groups.begin(gang.group)
        self.leased += gang.hi - gang.lo

    def dismiss(self, gang: Gang) -> None:
        """Note that a gang is over."""
        del self.gangs[gang.serial]
        self.groups.end(gang.group)

    def came_back(self, lo: int, hi: int, busy_s: float, size: int, limits: Limits) -> None:
        """Note that calls [lo, hi) are done, and learn from how long they took."""
        self.leased -= hi - lo
        self.bundle_max = min(limits.bundle_calls_max, max(self.bundle_max, (hi - lo) * limits.bundle_growth))
        self._done(lo, hi, max(0.0, busy_s) / (hi - lo), size)

    def gang_came_back(self, gang: Gang) -> None:
        """Note that all calls of a gang are done, and learn from how long they took."""
        self._done(gang.lo, gang.hi, gang.took_s, gang.bytes)

    def _done(self, lo: int, hi: int, took_s: float, size: int) -> None:
        self.done.add(lo, hi)
        self.result_bytes += size
        if self.trouble:
            few = range(lo, hi) if hi - lo < len(self.trouble) else list(self.trouble)
            for call in few:
                if lo <= call < hi:
                    self.trouble.pop(call, None)
        mean_bytes = size / (hi - lo)
        if self.call_s is None:
            self.call_s, self.result_call_bytes = took_s, mean_bytes
        else:
            self.call_s = 0.7 * self.call_s + 0.3 * took_s
            self.result_call_bytes = 0.7 * self.result_call_bytes + 0.3 * mean_bytes

    def fail(self, lo: int, hi: int, failures: Sequence[Failure]) -> None:
        """Note that calls [lo, hi) of one step are over, because some of them failed for good."""
        self.failures.update((failure.call, failure) for failure in failures)
        self.trouble.pop(lo, None)
        self.done.add(lo, hi)
        if not self.settings.fail_fast:
            return
        self.become("call failed")
        step = lo // self.settings.replicas
        self.last_step = step if self.last_step is None else min(step, self.last_step)
        end = (self.last_step + 1) * self.settings.replicas
        self.todo.drop_from(end)
        self.suspects.forget_from(end)
        if self.resting:
            self.resting.drop_from(end)

    def _bundle_by_time(self, limits: Limits) -> int:
        """Return how many calls take about `bundle_s`, at most `bundle_calls_max`."""
        if not self.call_s:
            return limits.bundle_calls_max
        return int(min(limits.bundle_calls_max, limits.bundle_s / self.call_s))

    def bundle_calls(self, limits: Limits, workers: int) -> int:
        """Return how many calls the next lease should have: about `bundle_s` of work, fairly shared."""
        if self.call_s is None or self.todo.first.attempt > 0:
            return 1  # what was tried before travels alone: the next death is charged to the right call
        fair = -(-self.todo.calls // (2 * workers))
        calls = min(self._bundle_by_time(limits), fair, self.bundle_max)
        if self.step_bytes > 0:
            calls = min(calls, int(limits.bundle_bytes_max * self.settings.replicas / self.step_bytes))
        return max(1, calls)

    def gangs_queued(self, limits: Limits) -> int:
        """Return how many gangs a group may have: as many in advance as take `prefetch_below_s`."""
        if not self.is_short(limits):
            return 1
        if not self.call_s:
            return limits.gangs_queued_max
        return int(min(limits.gangs_queued_max, 1 + limits.prefetch_below_s / self.call_s))

    def _calls_ahead(self, limits: Limits, workers: int) -> int:
        """Return how many calls should be known, so that no worker waits for the next step."""
        replicas = self.settings.replicas
        if self.settings.gang:
            return (workers // min(replicas, workers)) * (1 + self.gangs_queued(limits)) * replicas
        if self.call_s is None:
            return 4 * workers
        return 4 * workers * max(1, min(self._bundle_by_time(limits), self.bundle_max))

    def steps_wanted(self, limits: Limits, workers: int) -> int:
        """Return how many more steps the valve lets in now."""
        if not self.settings.pulled or self.state is not PassState.OPEN or self.held:
            return 0
        in_flight = self.requested - self.consumed
        least = 1 if in_flight == 0 else 0  # one step must always fit, or nothing would ever move
        if (
            self.offered == self.settings.first_step
        ):  # how large a step is, is known only once the first one is there
            return least
        replicas = self.settings.replicas
        calls = self._calls_ahead(limits, workers)
        room = min(-(-calls // replicas) + 1, limits.steps_in_flight_max) - in_flight
        promised = self.requested - self.offered
        to_come = self.todo.calls + self.leased + promised * replicas
        held = self.input_bytes + promised * self.step_bytes
        held += self.result_bytes + to_come * self.result_call_bytes
        spare = max(0.0, limits.bytes_in_flight_max - held)
        size = self.step_bytes + replicas * self.result_call_bytes
        if size > 0:
            room = int(min(room, spare // size))
        elif spare == 0:
            room = 0
        return max(least, room)

    def take_visible(self) -> int:
        """Advance over complete steps and return the step before which all are visible."""
        replicas = self.settings.replicas
        end = min(self.done.end_from(self.visible * replicas) // replicas, self.offered)
        if self.last_step is not None:
            end = min(end, self.last_step + 1)
        if end > self.visible:
            share = (end - self.visible) / (self.offered - self.visible)
            self.input_bytes -= round(self.input_bytes * share)
            self.done.discard(self.visible * replicas, end * replicas)
        return end
