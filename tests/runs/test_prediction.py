"""Predicted times: the arithmetic, exactly, from made-up measurements; and one real sample."""

from __future__ import annotations

import json
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import pipedist
from pipedist.cli.app import app
from pipedist.coordinator.spans import SPAN
from pipedist.plan import Plan, compile_plan
from pipedist.runs.prediction import (
    Costs,
    PassCost,
    as_rows,
    as_text,
    costs_of,
    costs_of_run,
    forecast,
    scheduled,
)
from pipedist.runs.timings import FORMAT, Measured, StageTimings, WorkerTimings
from pipedist.spec import load


def same(x: np.ndarray) -> np.ndarray:
    return x


def other(x: np.ndarray) -> np.ndarray:
    return x


async def waits(x: np.ndarray) -> np.ndarray:
    return x


def costs(*passes: PassCost, fixed_s: float = 1.0, warm_s: float = 0.0) -> Costs:
    return Costs(passes, fixed_s, warm_s, 64 * 2**20, 20, "the sample")


# -- arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durations", "calls", "places", "barriers", "seconds"),
    [
        ((1.0,), 10, 1, 1, 10),
        ((1.0,), 10, 2, 1, 5),
        ((1.0,), 10, 4, 1, 3),  # whole calls
        ((1.0,), 10, 64, 1, 1),
        ((1.0, 5.0), 4, 2, 1, 7),  # in order: 1 and 5, then 1 and 5 after the first one
        ((1.0,), 8, 2, 4, 4),  # four steps of two calls
        ((1.0,), 8, 8, 4, 4),  # more workers do not help
        ((), 8, 1, 1, 0),
        ((1.0,), 0, 1, 1, 0),
    ],
)
def test_calls_in_order(
    durations: tuple[float, ...], calls: int, places: int, barriers: int, seconds: float
) -> None:
    assert scheduled(durations, calls, places, barriers) == seconds


def test_many_calls_are_counted() -> None:
    assert scheduled((0.001,), 1_000_000, 4) == pytest.approx(250)
    assert scheduled((0.5,), 100_000, 2, 50_000) == 25_000


def test_phases_add_up_and_passes_of_one_overlap() -> None:
    first, second = PassCost("a", 0, 8, (1.0,)), PassCost("b", 1, 4, (1.0,))
    assert forecast(costs(first, second), 2).seconds == 1 + 4 + 2
    assert forecast(costs(first, replace(second, phase=0)), 2).seconds == 1 + 6, "they share the workers"
    assert forecast(costs(first, replace(second, phase=0)), 64).seconds == 1 + 1


@pytest.mark.parametrize(
    ("cost", "workers", "seconds", "limit"),
    [
        (PassCost("a", 0, 100, (1.0,)), 4, 25, "workers"),
        (PassCost("a", 0, 100, (1.0,), driver_s=0.5), 4, 50, "driver"),
        (PassCost("a", 0, 100, (1.0,), calls_per_s=2), 4, 50, "rate"),
        (PassCost("a", 0, 100, (1.0,), reading=0.8), 4, 25, "reading"),
        (PassCost("a", 0, 100, (1.0,), slots={4: 50}), 4, 2, "calls at the same time"),
        (PassCost("a", 0, 100, (1.0,), workers_max=2), 4, 50, "GPUs"),
        (PassCost("a", 0, 100, (1.0,), barriers=50, gap_s=0.5), 4, 75, "steps of 2 calls"),
        (PassCost("a", 0, 4, (1.0, 1.0, 1.0, 9.0)), 4, 9, "one slow call"),
        (PassCost("a", 0, 100, (1.0,), driver_s=0.1, cpu_s=0.8), 8, 30, "cores"),
        (PassCost("a", 0, 100, (1.0,), driver_s=0.1, cpu_s=0.1), 4, 25, "workers"),
        (PassCost("a", 0, 1, (0.5,)), 1, 0.5, "starting and writing results"),
    ],
)
def test_bottlenecks(cost: PassCost, workers: int, seconds: float, limit: str) -> None:
    found = forecast(replace(costs(cost), cores=3), workers)
    assert (found.seconds, found.bottleneck) == (pytest.approx(1 + seconds), limit)


def test_the_spread_of_a_sample_is_a_range() -> None:
    even = forecast(costs(PassCost("a", 0, 100, (1.0,) * 20), fixed_s=0), 1)
    assert (even.low_s, even.high_s) == pytest.approx((90, 110))
    spread = PassCost("a", 0, 1000, (1.0, 3.0) * 5)
    found = forecast(costs(spread, fixed_s=0), 1)
    error = 1.96 * 0.5 * (1 / 10 - 1 / 1000) ** 0.5
    assert (found.low_s, found.high_s) == pytest.approx((2000 * (1 - error), 2000 * (1 + error)))
    known = forecast(costs(replace(spread, calls=10), fixed_s=0), 1)
    assert (known.low_s, known.high_s) == pytest.approx((18, 22)), "all calls were measured"


TABLE = """\
workers  expected time              speed-up  memory per worker  limited by
1        41.0 s (36.9 s to 45.1 s)  1.0       64 MiB             workers
2        21.0 s (18.9 s to 23.1 s)  2.0       64 MiB             workers
4        11.0 s (9.9 s to 12.1 s)   3.7       64 MiB             workers
8        9.0 s (8.1 s to 9.9 s)     4.6       64 MiB             driver
16       9.0 s (8.1 s to 9.9 s)     4.6       64 MiB             driver

From 20 calls of the sample; starting and writing results takes 1.0 s of each time.
Assumed: a core for each worker and the driver, workers on one host, no failures, and `until` never true.\
"""


def test_the_table() -> None:
    found = costs(PassCost("a", 0, 40, (1.0,), driver_s=0.2))
    assert as_text(found, as_rows(found)) == TABLE
    assert as_text(replace(found, cores=64), []).endswith(
        "Assumed: the 64 cores of this machine for the workers and the driver, no failures, and `until` never true."
    )


# -- measurements -------------------------------------------------------------------------------------


def plan_of(function: str = "same", **more: Any) -> Plan:
    run = {"run": f"{__name__}:{function}", **more}
    document = {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 80, "batch": 4, "epochs": 2},
        "stages": {"y": run, "s": {"reduce": "sum", "of": "y", "axis": 0}},
    }
    return compile_plan(load(document), workers=1)


def measured(durations: list[float], *, at_once: int = 1, latency_s: float = 0.0, **more: Any) -> Measured:
    """Return the measurements of calls on one worker, one after the other or so many at a time."""
    spans = np.zeros(len(durations), SPAN)
    spans["lo"], spans["calls"] = np.arange(len(durations)), 1
    spans["started"] = [round(place // at_once * latency_s * 1e9) for place in range(len(durations))]
    spans["finished"] = spans["started"] + round(latency_s * 1e9)
    spans["busy"] = [round(each * 1e9) for each in durations]
    count, seconds = len(durations), sum(durations)
    stage = StageTimings(
        "y", 0, count, 0, 0, 0, False, 2 * count, seconds, seconds, 0.0, 0.0, 0.0, 0.0, durations[0], durations[0],
        max(durations), "", "w0", 0, 0, {},
    )  # fmt: skip
    worker = WorkerTimings("w0", count, seconds, 0.0, 0.0, 0.0, 0.0, 0, 0, 2**20)
    found = Measured(
        FORMAT, "run", "name", 0.0, seconds, True, 0.1, 0, 2, [("y", ("y",), 0)], ["w0"], [stage], [worker], "",
        [], [], zlib.compress(spans.tobytes()),
    )  # fmt: skip
    return replace(found, **more)


def test_a_sample_stands_for_all_calls() -> None:
    found = costs_of(plan_of(), measured([5.0, 1.0, 2.0, 1.0]), 10.0, "the sample", 0.25)
    (cost,) = found.passes
    assert (cost.calls, cost.durations, cost.driver_s) == (80, (1.0, 2.0, 1.0), 0.25), (
        "two epochs of 20 steps"
    )
    assert (found.fixed_s, found.warm_s, found.memory_bytes, found.sampled) == (1.0, 4.0, 2**20, 4)


def test_the_driver_of_a_run() -> None:
    found = costs_of(plan_of(), measured([1.0] * 80, driver_busy_s=8.1), 81.0, "the run")
    assert found.passes[0].driver_s == pytest.approx(0.1)


def test_calls_that_wait_at_the_same_time() -> None:
    plan, times = plan_of("waits", concurrency=10), measured([0.1] * 80, at_once=10, latency_s=0.9)
    (cost,) = costs_of(plan, times, 9.0, "the run").passes
    assert cost.durations == (0.9,) * 70, "of the calls after the first ten"
    cost = replace(cost, durations=(1.0,))
    assert cost.slots[1] == cost.slots[64] == 10
    assert forecast(costs(cost), 8).seconds == pytest.approx(1 + 8)
    (cost,) = costs_of(plan_of("waits"), measured([0.1] * 40), 9.0, "the run").passes
    assert cost.durations == pytest.approx((2.0,)), "40 calls in two rounds took 4 s"
    assert (cost.slots[1], cost.slots[2]) == (32, 64)


def test_a_rate_is_not_latency() -> None:
    plan = plan_of("waits", rate={"calls": 10})
    (cost,) = costs_of(plan, measured([0.1] * 80, latency_s=0.1), 9.0, "the run").passes
    assert (cost.calls_per_s, {*cost.durations}) == (10, {0.1})
    assert forecast(costs(cost), 1).bottleneck == "rate"


def test_measurements_of_another_spec_are_refused() -> None:
    with pytest.raises(pipedist.UsageError, match=r"the run has no measurements of y\. Use --sample N"):
        costs_of(plan_of(), measured([1.0], stages=[]), 1.0, "the run")


# -- a real sample ------------------------------------------------------------------------------------


def test_a_sample_is_executed_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipedist.runs.prediction.SAMPLED_S", 0.0)
    (tmp_path / "naps.py").write_text(
        "import time, pathlib\n"
        "def nap(x):\n"
        "    with open('seen', 'a') as file: file.write(f'{x[0]}\\n')\n"
        "    time.sleep(0.02)\n"
        "    return x\n"
    )
    (tmp_path / "naps.yaml").write_text(
        "{pipedist: 1, replicas: 2, dataset: {range: 4000, batch: 8, shuffle: true}, stages: {y: {run: 'naps:nap'}, "
        "rows: {gather: 0, of: y}}, outputs: {rows: rows.npy}}"
    )
    outcome = CliRunner().invoke(app, ["plan", "naps.yaml", "--predict", "--sample", "6", "--format", "json"])
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(outcome.stdout)
    assert document["sampled"] == 6
    seen = [int(line) for line in (tmp_path / "seen").read_text().split()]
    assert len(seen) == 2 + 6, "a step before it, and three steps"
    assert max(seen) > 3000, "spread over the dataset"
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"naps.py", "naps.yaml", "seen"}
    one, two = document["workers"][:2]
    assert one["seconds"] > 1000 * 0.02, "1,000 calls"
    assert two["seconds"] < one["seconds"]


def test_a_large_sample_is_the_beginning_of_the_dataset_in_the_order_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipedist.runs.prediction.SAMPLED_S", 0.0)
    monkeypatch.setattr("pipedist.runs.prediction.SPREAD_MAX", 8)
    (tmp_path / "notes.py").write_text(
        "def note(x):\n    with open('seen', 'a') as file: file.write(f'{x[0]}\\n')\n    return x\n"
    )
    (tmp_path / "notes.yaml").write_text(
        "{pipedist: 1, replicas: 2, dataset: {range: 4000, batch: 8}, stages: {y: {run: 'notes:note'}, "
        "rows: {gather: 0, of: y}}}"
    )
    outcome = CliRunner().invoke(app, ["plan", "notes.yaml", "--predict", "--sample", "18"])
    assert outcome.exit_code == 0, outcome.output
    seen = [int(line) for line in (tmp_path / "seen").read_text().split()]
    assert seen == [0, 4, *range(0, 72, 4)], "a step before it, and nine steps"


def test_a_run_is_a_source_of_measurements(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 80, "batch": 4},
        "stages": {"y": {"run": f"{__name__}:same"}, "s": {"reduce": "sum", "of": "y", "axis": 0}},
        "outputs": {"s": "s.json"},
    }
    began = time.monotonic()
    pipedist.run(document, workers=1, output=tmp_path / "out")
    took_s = time.monotonic() - began
    plan = compile_plan(load(document), workers=1)
    found = costs_of_run(plan, tmp_path / "out")
    assert (found.sampled, found.passes[0].calls) == (40, 40)
    assert 0 < found.fixed_s < took_s, "its measurements end after the time that its result tells"
    with pytest.raises(pipedist.UsageError, match="there is no run in"):
        costs_of_run(plan, tmp_path)
    document["stages"]["y"]["run"] = f"{__name__}:other"
    with pytest.raises(pipedist.UsageError, match=r"called .*:same in stage y, and this spec calls .*:other"):
        costs_of_run(compile_plan(load(document), workers=1), tmp_path / "out")


def test_a_dataset_of_unknown_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.yaml"
    (tmp_path / "stream.py").write_text("def numbers():\n    yield from range(8)\ndef same(x): return x\n")
    path.write_text(
        "{pipedist: 1, dataset: {function: {call: 'stream:numbers'}, batch: 2}, stages: {y: {run: 'stream:same'}, "
        "s: {reduce: sum, of: y, axis: 0}}}"
    )
    outcome = CliRunner().invoke(app, ["plan", str(path), "--predict"])
    assert outcome.exit_code == 2
    assert "Use --from RUN" in outcome.stderr
