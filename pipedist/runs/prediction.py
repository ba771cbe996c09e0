"""Predicts how long a run takes on a number of workers, from measurements of its calls.

A pass is a list of calls that workers, or slots of calls that wait, take in order; the measured durations are
repeated. Between barriers (steps whose updates the next step reads, and steps of collectives) all calls end. Passes
of one phase share the workers; phases add up. The driver's time for each call, a rate, and for local workers the
processor time of calls on the cores of this machine, are lower limits. The time to start and to write results is that
of the measured run.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from pipedist.cluster.base import usable_cores
from pipedist.core.names import plural
from pipedist.core.types import Tree
from pipedist.datasets.sources import Source
from pipedist.datasets.sources.base import Ids
from pipedist.errors import PipedistError, UsageError
from pipedist.outputs.run_record import PRIVATE, existing_record, read_results
from pipedist.plan import PassPlan, Plan
from pipedist.runs.about import FILE as ABOUT
from pipedist.runs.run import Run
from pipedist.runs.timings import Measured, StageTimings, brief, read_timings
from pipedist.spec import RunSpec, Spec, with_cluster

WORKERS = (1, 2, 4, 8, 16, 32, 64)
SCHEDULED_MAX = 20_000  # calls that are scheduled one by one; more of them are counted
SAMPLED_S = 1.0  # short calls are sampled for this time
SAMPLED_MAX = 65_536  # calls of a sample, unless more are asked for
SPREAD_MAX = 4096  # steps of a sample that are spread over the dataset; more are its first ones
ERROR_MIN = 0.1  # of an expected time
STARTED_S = 0.1  # time of the driver to begin and end a run, which does not depend on its calls
_WARM = 3.0  # a first call that is this times longer than the median also imported modules


class PassCost(Struct, frozen=True):
    """The measured cost of one pass, and how many calls the run has.

    Args:
        calls: of the run; elements, if a stage is called for each element.
        durations: of calls, seconds, in order.
        driver_s: time of the driver for a call.
        cpu_s: processor time of the worker for a call.
        reading: the share of the durations for reading shards.
        barriers: how often all calls must have ended before the next one begins.
        gap_s: time between the calls of two barriers.
        slots: by number of workers, calls that wait at the same time; empty: workers execute one at a time.
        calls_per_s: limit of the rate; 0: none.
        workers_max: workers that can execute its calls; 0: all.
    """

    name: str
    phase: int
    calls: int
    durations: tuple[float, ...]
    driver_s: float = 0.0
    cpu_s: float = 0.0
    reading: float = 0.0
    barriers: int = 1
    gap_s: float = 0.0
    slots: Mapping[int, int] = {}
    calls_per_s: float = 0.0
    workers_max: int = 0


class Costs(Struct, frozen=True):
    """The measured costs of a run.

    Args:
        fixed_s: from the start of a run to its first call, and from the last one to its end.
        warm_s: how much longer the first call in a worker takes.
        memory_bytes: largest memory of a worker, 0 if unknown.
        sampled: the number of measured calls.
        note: where the measurements are from.
        cores: that the workers and the driver share; 0: one for each.
    """

    passes: tuple[PassCost, ...]
    fixed_s: float
    warm_s: float
    memory_bytes: int
    sampled: int
    note: str
    cores: int = 0


class Forecast(Struct, frozen=True):
    """The expected time of a run on a number of workers, in seconds, and what limits it."""

    workers: int
    seconds: float
    low_s: float
    high_s: float
    bottleneck: str


# -- arithmetic ---------------------------------------------------------------------------------------


def forecast(costs: Costs, workers: int) -> Forecast:
    """Return the expected time on a number of workers."""
    start_s = costs.fixed_s + costs.warm_s
    limits = {"starting and writing results": start_s}
    total, error = start_s, ERROR_MIN * start_s
    for phase in sorted({each.phase for each in costs.passes}):
        passes = [each for each in costs.passes if each.phase == phase]
        seconds, limit, relative = _phase(passes, workers, costs.cores)
        limits[limit] = limits.get(limit, 0.0) + seconds
        total += seconds
        error += seconds * relative
    bottleneck = max(limits, key=lambda name: limits[name])
    return Forecast(workers, total, max(0.0, total - error), total + error, bottleneck)


def _phase(passes: Sequence[PassCost], workers: int, cores: int) -> tuple[float, str, float]:
    """Return the time of a phase, what limits it, and the relative error."""
    found = [(sum(each.calls * each.driver_s for each in passes), "driver")]
    if cores:
        found.append((sum(each.calls * (each.driver_s + each.cpu_s) for each in passes) / cores, "cores"))
    executed = [each for each in passes if not each.slots]
    work = sum(each.calls * float(np.mean(each.durations)) for each in executed)
    if len(executed) > 1:
        found.append((work / workers, "workers"))
    for each in passes:
        places = each.slots.get(workers) or min(workers, each.workers_max or workers)
        seconds = scheduled(each.durations, each.calls, places, each.barriers) + each.gap_s * each.barriers
        found.append((seconds, _limit(each, places, seconds)))
        if each.calls_per_s:
            found.append((each.calls / each.calls_per_s, "rate"))
    error = max(ERROR_MIN, *(_error(each) for each in passes))
    seconds, limit = max(found)
    return seconds, limit, ERROR_MIN if limit == "rate" else error


def _error(cost: PassCost) -> float:
    """Return the relative error of the mean duration: about two standard errors, 0 if all calls were measured."""
    mean, deviation = float(np.mean(cost.durations)), float(np.std(cost.durations))
    rest = max(0.0, 1 / len(cost.durations) - 1 / max(1, cost.calls))
    return 1.96 * deviation / mean * math.sqrt(rest) if mean else 0.0


def _limit(cost: PassCost, places: int, seconds: float) -> str:
    if cost.slots:
        return "calls at the same time"
    per_barrier = -(-cost.calls // cost.barriers)
    if cost.barriers > 1 and places >= per_barrier:
        return f"steps of {plural(per_barrier, 'call')}"
    if cost.barriers == 1 and places > 1 and max(cost.durations) > 0.75 * seconds:
        return "one slow call"
    if cost.workers_max and places == cost.workers_max:
        return "GPUs"
    return "reading" if cost.reading > 0.5 else "workers"


def scheduled(durations: Sequence[float], calls: int, places: int, barriers: int = 1) -> float:
    """Return when the last of `calls` ends that `places` take in order; durations are repeated.

    All of them wait at each of the `barriers`, the end included.
    """
    if not calls or not durations:
        return 0.0
    mean, size = float(np.mean(durations)), -(-calls // barriers)
    if size > SCHEDULED_MAX:
        return max(barriers * (mean * size / places + (max(durations) - mean) / 2), calls * mean / places)
    rounds = max(1, min(barriers, SCHEDULED_MAX // size))
    repeated = cycle(durations)
    total = 0.0
    for _ in range(rounds):
        ends = [0.0] * min(places, size)
        for duration in islice(repeated, size):
            heapq.heapreplace(ends, ends[0] + duration)
        total += max(ends)
    return total * barriers / rounds


# -- costs from measurements --------------------------------------------------------------------------


def costs_of(
    plan: Plan, measured: Measured, total_s: float, note: str, driver_s: float | None = None
) -> Costs:
    """Return the costs of a plan's passes from the measurements of a run of it.

    Args:
        total_s: the time of the measured run.
        driver_s: the driver's time for a call; None: it follows from the measurements.
    """
    stages = {each.name: (number, each) for number, each in enumerate(measured.stages)}
    numbers = {name: number for number, (name, _, _) in enumerate(measured.passes)}
    missing = [each.name for each in plan.passes if each.name not in stages or not stages[each.name][1].calls]
    if missing:
        raise UsageError(
            f"{note} has no measurements of {missing[0]}. Use --sample N, or a run of this spec that finished"
        )
    spans, workers = measured.spans, len(measured.workers)
    count = sum(each.calls for each in measured.stages)
    if driver_s is None:
        driver_s = max(0.0, measured.driver_busy_s - STARTED_S) / count
    passes, warm_s = [], 0.0
    windows: dict[int, float] = {}
    for pass_ in plan.passes:
        stage = stages[pass_.name][1]
        windows[pass_.phase] = max(windows.get(pass_.phase, 0.0), stage.seconds)
        cost, extra_s = _cost(plan, pass_, stage, spans[spans["pass"] == numbers[pass_.name]], workers)
        passes.append(structs.replace(cost, driver_s=driver_s))
        warm_s += extra_s
    fixed_s = max(0.0, total_s - sum(windows.values()))
    memory = max((each.memory_bytes for each in measured.workers), default=0)
    cores = usable_cores() if plan.spec.cluster.launcher == "local" else 0
    return Costs(tuple(passes), fixed_s, warm_s, memory, count, note, cores)


def _cost(
    plan: Plan, pass_: PassPlan, stage: StageTimings, spans: NDArray[np.void], workers: int
) -> tuple[PassCost, float]:
    """Return the cost of a pass, and how much longer the first call in a worker takes."""
    division = plan.division_of(pass_)
    steps = plan.epochs(pass_) * division.steps_per_epoch if division is not None else 0
    calls = plan.calls(pass_, steps) or stage.calls
    kinds = {"step": steps, "epoch": plan.epochs(pass_), "run": 1}
    barriers = max(1, steps if pass_.gang else kinds[plan.granularity(pass_)])
    reading = stage.reading_s / stage.busy_s if stage.busy_s else 0.0
    runs = [each for name in pass_.runs if isinstance(each := plan.spec.stages[name], RunSpec)]
    rate = min((each.rate.calls / each.rate.per_s for each in runs if each.rate), default=0.0)
    owners = plan.gpu_owners(pass_) if pass_.gpus else 0
    cost = PassCost(
        pass_.name,
        pass_.phase,
        calls,
        (),
        reading=reading,
        barriers=barriers,
        calls_per_s=rate,
        workers_max=owners,
    )
    slots, is_by_element = _slots(plan, pass_)
    if slots:
        place = _slots(plan, pass_, (workers,))[0][workers]
        done, units = stage.calls, calls
        if is_by_element:
            done, units = stage.elements, plan.elements(pass_, steps) or stage.elements
        mean_s = stage.seconds * place / done if done >= 2 * place else stage.seconds / -(-done // place)
        if rate and done / max(1e-9, stage.seconds) > 0.8 * rate:  # the rate hides how long a call waits
            mean_s = stage.p50_s
        cost = structs.replace(
            cost, calls=units, durations=(mean_s,), slots=slots, cpu_s=stage.cpu_s / max(1, done)
        )
        return (cost, 0.0) if is_by_element else _with_latencies(cost, spans, place)
    durations, warm_s = _durations(spans)
    # most of the additional time of a first call is processor time too: it imports modules
    cpu_s = max(0.0, stage.cpu_s - warm_s) / max(1, stage.calls)
    cost = structs.replace(cost, durations=durations, cpu_s=cpu_s)
    if barriers == 1:
        return cost, warm_s
    measured_barriers = max(1, round(barriers * stage.calls / calls))
    spent_s = scheduled(durations, stage.calls, min(workers, owners or workers), measured_barriers)
    gap_s = max(0.0, stage.seconds - warm_s - spent_s) / measured_barriers
    return structs.replace(cost, gap_s=gap_s), warm_s


def _with_latencies(cost: PassCost, spans: NDArray[np.void], place: int) -> tuple[PassCost, float]:
    """Return a cost with the durations of calls that wait, without those that waited for each other.

    The first ones, as many as wait at the same time, also wait until the worker has loaded the function.
    """
    single = spans[(spans["outcome"] == 0) & (spans["calls"] == 1)]
    single = single[np.argsort(single["started"], kind="stable")]
    waited = (single["finished"] - single["started"]) * 1e-9
    if len(waited) < 2 * place:
        return cost, 0.0
    first, rest = waited[:place], waited[place:][:SCHEDULED_MAX]
    if float(np.mean(rest)) > cost.durations[0]:
        return cost, 0.0
    warm_s = max(0.0, float(np.median(first) - np.median(rest)))
    return structs.replace(cost, durations=tuple(rest.tolist())), warm_s


def _durations(spans: NDArray[np.void]) -> tuple[tuple[float, ...], float]:
    """Return the durations of calls in order, and how much longer the first one was."""
    done = spans[spans["outcome"] == 0]
    done = done[np.argsort(done["lo"], kind="stable")]
    each = done["busy"] * 1e-9 / done["calls"]
    repeats = np.maximum(1, done["calls"] // max(1, -(-int(done["calls"].sum()) // SCHEDULED_MAX)))
    found = np.repeat(each, repeats).tolist()
    if len(found) > 2 and found[0] > _WARM * (middle := float(np.median(found[1:]))):
        return tuple(found[1:]), found[0] - middle
    return tuple(found), 0.0


def _slots(plan: Plan, pass_: PassPlan, counts: Sequence[int] = WORKERS) -> tuple[dict[int, int], bool]:
    """Return how many calls wait at the same time, by number of workers, and whether these are elements."""
    found: dict[int, int] = {}
    elements = False
    for workers in counts:
        here = structs.replace(plan, workers=workers)
        by_element = [
            here.calls_at_once(name)
            for name in pass_.runs
            if isinstance(stage := plan.spec.stages[name], RunSpec) and stage.per
        ]
        per_worker, over_all = here.waiting(pass_)
        if any(by_element):
            elements = True
            found[workers] = min(filter(None, by_element))
        elif per_worker > 1 or over_all:
            found[workers] = min(per_worker * workers, over_all or per_worker * workers)
    return found, elements


def costs_of_run(plan: Plan, folder: Path) -> Costs:
    """Return the costs that were measured in the run in an output folder."""
    record = existing_record(folder)
    processes = [each for each in read_timings(folder / PRIVATE / "timings") if each.stages]
    if not processes:
        raise UsageError(f"the run in {folder} has no measurements. Use --sample N")
    _require_same_functions(plan, folder)
    measured = max(processes, key=lambda each: sum(stage.calls for stage in each.stages))
    total_s = measured.seconds
    if record.complete and len(processes) == 1:
        total_s = max(total_s, read_results(folder, folder).get("timings", {}).get("total", 0.0))
    return costs_of(plan, measured, total_s, f"the run in {folder}")


def _require_same_functions(plan: Plan, folder: Path) -> None:
    """Raise UsageError if a stage of the run called another function than that of the plan."""
    path = folder / PRIVATE / ABOUT
    nodes = json.loads(path.read_bytes())["graph"]["nodes"] if path.exists() else []
    called = {node["name"]: node["lines"][1] for node in nodes if node["kind"] == "run"}
    for stage, function in plan.functions.items():
        if called.get(stage, function.label) != function.label:
            raise UsageError(
                f"the run in {folder} called {called[stage]} in stage {stage}, and this spec calls {function.label}: "
                "its measurements do not apply. Use --sample N"
            )


# -- a sampled dry run --------------------------------------------------------------------------------


class _SampledSource(Source):
    """Some rows of a source, or its first ones, as a dataset of its own."""

    def __init__(self, source: Source, rows: NDArray[np.int64] | range) -> None:
        self._source, self._rows = source, rows
        self.length: int = len(rows)
        self.random_access = source.random_access
        self.portable, self.why_not_portable = source.portable, source.why_not_portable
        self.in_memory, self.config = source.in_memory, source.config
        self.by_id = source.by_id and isinstance(rows, range)

    def locate(self, ids: Ids) -> Tree:
        if isinstance(self._rows, range):
            return self._source.locate(ids)
        rows = self._rows[ids.start : ids.stop] if isinstance(ids, range) else self._rows[ids]
        if len(rows) and int(rows[-1]) - int(rows[0]) + 1 == len(rows) and (np.diff(rows) == 1).all():
            return self._source.locate(range(int(rows[0]), int(rows[-1]) + 1))
        return self._source.locate(rows)

    def read(self, location: Tree) -> Tree:
        return self._source.read(location)


class _SampledRun(Run):
    """A run of some steps of each dataset, on one worker, that writes nothing."""

    def __init__(self, spec: Spec, steps: int) -> None:
        self._steps = steps
        datasets = {name: each.model_copy(update={"epochs": 1}) for name, each in spec.datasets.items()}
        alone = structs.replace(with_cluster(spec, "local"), datasets=datasets, sinks={})
        super().__init__(alone, workers=1)

    def compile(self) -> None:
        if self._plan is None:
            super().compile()
            plan = self.plan
            sources = {name: self._sampled(plan, name) for name in plan.sources}
            self._plan = structs.replace(plan, sources=sources)

    def _sampled(self, plan: Plan, name: str) -> Source:
        division = plan.division(name)
        if division is None:
            raise UsageError(
                f"the number of elements of dataset {name} is unknown before it is read, so a sample does not show "
                "how long all of them take. Use --from RUN, with a run of this spec"
            )
        total = division.steps_per_epoch
        if self._steps > SPREAD_MAX:  # such short calls differ in little, and cost less in the order of a run
            return _SampledSource(
                plan.sources[name], range(min(self._steps * division.batch, division.length))
            )
        chosen = np.unique(np.linspace(0, total - 1, min(self._steps, total)).astype(np.int64))
        firsts = [(int(step) * division.batch, division.rows(int(step))) for step in chosen]
        rows = np.concatenate([np.arange(first, first + size) for first, size in firsts])
        return _SampledSource(plan.sources[name], rows)

    async def measure(self) -> tuple[Measured, float]:
        """Execute the sample, and return its measurements and its time."""
        async with self:
            result = await self.results()
            assert self._execution is not None  # it has run
            measurements = self._execution.measurements
            measured = measurements.measured(self.id, self.name, is_over=True)
            return measured.compressed(), result.timings["total"]


async def sampled_costs(plan: Plan, calls: int) -> Costs:
    """Return the costs of a plan from a sample of its calls, which are executed on one worker.

    Short calls are sampled for SAMPLED_S. A sample of one step before shows the cost that does not depend on calls.

    Args:
        calls: at least this number of calls of each pass that reads a dataset, spread over the dataset.
    """
    per_step = plan.spec.replicas
    slots = [found[1] for each in plan.passes if (found := _slots(plan, each)[0])]
    steps = -(-max(calls, 4 * max(slots, default=0)) // per_step)
    try:
        first, first_s = await _SampledRun(plan.spec, 1).measure()
        measured, total_s = await _SampledRun(plan.spec, steps).measure()
        # The first calls of a worker take longer than later ones: a small sample shows too much.
        while not slots:
            busy_s = sum(each.busy_s for each in measured.stages)
            most = max(1, SAMPLED_MAX // per_step)
            more = min(most, int(steps * SAMPLED_S / max(busy_s, 1e-6)))
            if more < 1.5 * steps or sum(stage.calls for stage in measured.stages) < steps * per_step:
                break  # long enough, or the whole dataset
            steps = more
            measured, total_s = await _SampledRun(plan.spec, steps).measure()
    except UsageError:
        raise
    except PipedistError as error:
        raise UsageError(f"the sample failed: {error}") from error
    counts = [sum(stage.calls for stage in each.stages) for each in (first, measured)]
    driver_s = 0.0
    if counts[1] > counts[0]:
        driver_s = max(0.0, measured.driver_busy_s - first.driver_busy_s) / (counts[1] - counts[0])
    costs = costs_of(plan, measured, total_s, "the sample", driver_s)
    start_s = costs_of(plan, first, first_s, "the sample", driver_s).fixed_s
    return structs.replace(costs, fixed_s=min(costs.fixed_s, start_s))


# -- text ---------------------------------------------------------------------------------------------


def as_rows(costs: Costs) -> list[Forecast]:
    """Return the expected times on 1, 2, 4, ... workers, as long as more of them help."""
    found: list[Forecast] = []
    for workers in WORKERS:
        found.append(forecast(costs, workers))
        if workers >= 8 and found[-1].seconds > 0.95 * found[-2].seconds:
            break
    return found


def as_text(costs: Costs, rows: Iterable[Forecast]) -> str:
    """Return the expected times as a table, with the assumptions below."""
    listed = list(rows)
    memory = f"{costs.memory_bytes / 2**20:,.0f} MiB" if costs.memory_bytes else "unknown"
    cells = [("workers", "expected time", "speed-up", "memory per worker", "limited by")]
    for each in listed:
        seconds = f"{brief(each.seconds)} ({brief(each.low_s)} to {brief(each.high_s)})"
        speed_up = f"{listed[0].seconds / each.seconds:.1f}" if each.seconds else ""
        cells.append((str(each.workers), seconds, speed_up, memory, each.bottleneck))
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    hardware = (
        f"the {plural(costs.cores, 'core')} of this machine for the workers and the driver"
        if costs.cores
        else "a core for each worker and the driver, workers on one host"
    )
    return "\n".join(
        [
            *lines,
            "",
            f"From {costs.sampled:,} calls of {costs.note}; starting and writing results takes "
            f"{brief(costs.fixed_s + costs.warm_s)} of each time.",
            f"Assumed: {hardware}, no failures, and `until` never true.",
        ]
    )
