"""Timings of runs in real processes: what they count, and which sentence they lead to. No test compares durations."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

import pipedist
from pipedist.coordinator.spans import SPAN, DriverWork, SpanEnd
from pipedist.errors import CallError, UsageError
from pipedist.report import collect
from pipedist.runs.timings import (
    FILES_MAX,
    Measurements,
    StageTimings,
    Timings,
    WorkerTimings,
    limit_of,
    next_number,
    pause_after,
    read_timings,
    write_timings,
)
from tests.runs.test_feeds import until

F = "tests.runs.functions"


def document(
    run: str, *, n: int = 40, name: str = "timed", outputs: bool = True, **with_: Any
) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "pipedist": 1,
        "name": name,
        "dataset": {"range": n, "batch": 4},
        "replicas": 2,
        "stages": {"y": {"run": f"{F}:{run}", "with": with_, "retries": 1}, "out": {"gather": 0, "of": "y"}},
    }
    return spec | ({"outputs": {"out": "out.npy"}} if outputs else {})


def test_a_result_has_the_timings_of_stages_and_workers(tmp_path: Path) -> None:
    result = pipedist.run(document("double"), workers=2, output=tmp_path)
    (stage,) = result.timings.stages
    assert (stage.name, stage.calls, stage.elements, stage.failed, stage.retries) == ("y", 20, 40, 0, 0)
    assert 0 < stage.p50_s <= stage.p95_s <= stage.max_s <= stage.seconds
    assert stage.slowest.startswith("y/")
    assert stage.elements_per_s == pytest.approx(40 / stage.seconds)
    assert sum(worker.calls for worker in result.timings.workers) == 20
    assert stage.busy_s == pytest.approx(sum(worker.busy_s for worker in result.timings.workers))
    assert set(result.timings) == {"phase 1", "total"}
    assert result.document["measurements"]["stages"][0]["calls"] == 20
    again = pipedist.run(document("double"), workers=2, output=tmp_path, resume=True)
    assert again.timings.stages == result.timings.stages, "the finished run has kept them"
    (measured,) = read_timings(tmp_path / ".pipedist/timings")
    assert measured.is_over
    assert measured.spans["calls"].sum() == 20
    assert measured.stages == list(result.timings.stages)
    assert {each.work for each in measured.driver} == {DriverWork.FOLD, DriverWork.COMMIT}
    assert {each.text for each in measured.driver if each.work == DriverWork.FOLD} == {"out"}


def test_the_processor_time_of_calls_does_not_include_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text(
        "import time\nend = time.process_time() + 2\nwhile time.process_time() < end: pass\ndef same(x): return x\n"
    )
    spec = document("same") | {
        "stages": {"y": {"run": "slow_to_import:same"}, "out": {"gather": 0, "of": "y"}}
    }
    (stage,) = pipedist.run(spec, workers=1, output=tmp_path / "out").timings.stages
    assert stage.cpu_s < 2


def test_the_workers_measure_stages_reading_and_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40.0))
    spec = document("double") | {"dataset": {"npy": {"path": str(tmp_path / "x.npy")}, "batch": 4}}
    spec["stages"]["z"] = {"run": f"{F}:double", "of": "y"}
    spec["stages"]["out"]["of"] = "z"
    result = pipedist.run(spec, workers=2, output=tmp_path / "out")
    (stage,) = result.timings.stages
    assert set(stage.stages_s) == {"y", "z"}
    assert all(seconds > 0 for seconds in stage.stages_s.values())
    assert sum(stage.stages_s.values()) + stage.reading_s <= stage.busy_s
    assert stage.reading_s > 0
    assert all(worker.memory_bytes > 2**23 for worker in result.timings.workers)


def test_trials_of_a_search_are_counted_apart() -> None:
    spec = document("fails_on_13", outputs=False)
    spec["stages"]["y"] = {"run": f"{F}:fails_on_13", "on_error": "quarantine"}
    result = pipedist.run(spec, workers=2)
    (stage,) = result.timings.stages
    assert result.ledger.quarantined == 1
    assert (stage.calls, stage.failed, stage.retries) == (20, 1, 0), "as many calls as the dataset has"
    assert stage.trials > 0


def test_a_training_waits_for_its_updates() -> None:
    """Which part of the idle time that is, `tests/coordinator/test_measurements.py` shows without a clock."""
    spec = document("double", outputs=False)
    spec["stages"] = {
        "y": {"run": f"{F}:plus", "with": {"amount": "${state.w}"}},
        "sums": {"reduce": "sum", "of": "y", "axis": None, "per": "step"},
        "w": {"update": f"{F}:slow_sum", "of": "sums", "init": 0.0},
    }
    result = pipedist.run(spec, workers=2)
    stage, update = result.timings.stages
    assert (stage.name, stage.calls, stage.elements) == ("y", 20, 40)
    assert (update.name, update.calls, update.elements, update.slowest) == ("w", 10, 0, "")
    assert update.busy_s >= 10 * 0.05, "each sleeps for that time"
    assert stage.stage_wait_s > 0


def test_failed_attempts_and_deaths_are_measured(tmp_path: Path) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    result = pipedist.run(
        document("fails_on_eleven_once", folder=str(folder)), workers=2, output=tmp_path / "out"
    )
    (stage,) = result.timings.stages
    assert (stage.calls, stage.failed, stage.retries) == (20, 1, 1)
    folder = tmp_path / "deaths"
    folder.mkdir()
    pipedist.run(document("dies_once", folder=str(folder)), workers=2, output=tmp_path / "dead")
    (measured,) = read_timings(tmp_path / "dead/.pipedist/timings")
    spans = measured.spans
    assert spans["calls"][spans["outcome"] == SpanEnd.DONE].sum() == 20
    assert (spans["outcome"] == SpanEnd.LOST).any()
    assert any("died: signal 9" in mark.text for mark in measured.marks)


@pytest.mark.asyncio
async def test_the_measurements_of_a_running_run_are_on_disk(tmp_path: Path) -> None:
    """They are there before the run ends, as after a kill."""
    folder = tmp_path / "marks"
    folder.mkdir()
    spec = document("waits_in_step", folder=str(folder), step=2)
    path = tmp_path / "out/.pipedist/timings"
    async with (
        pipedist.open(spec, workers=2, output=tmp_path / "out") as run,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(run.results)
        await until(lambda: path.exists() and any(each.stages for each in read_timings(path)))
        assert not read_timings(path)[0].is_over
        tasks.cancel_scope.cancel()


def test_a_run_that_begins_again_has_no_measurements_of_the_one_before(tmp_path: Path) -> None:
    for _ in range(2):
        pipedist.run(document("double"), workers=1, output=tmp_path, restart=True)
    assert len(read_timings(tmp_path / ".pipedist/timings")) == 1


def test_a_resumed_run_adds_a_file_and_old_ones_go(tmp_path: Path) -> None:
    for number in range(1, 20):
        (tmp_path / f"{number}.msgpack").touch()
    (tmp_path / ".19.msgpack.0a1b2c3d.partial").touch()  # a process was killed while it wrote
    assert next_number(tmp_path) == 20
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{n}.msgpack" for n in range(20 - FILES_MAX + 1, 20)
    }


def test_the_report_of_a_resumed_run_has_both_processes(tmp_path: Path) -> None:
    spec = document("fails_on_eleven_once", folder=str(tmp_path))
    spec["stages"]["y"]["retries"] = 0
    with pytest.raises(CallError):
        pipedist.run(spec, workers=1, output=tmp_path / "out")
    pipedist.run(spec, workers=1, output=tmp_path / "out", resume=True)
    first, second = collect(tmp_path / "out")["processes"]
    assert first["is_over"]
    assert second["is_over"]
    assert first["stages"][0]["failed"] > 0
    assert second["stages"][0]["calls"] > 0


def test_writing_takes_at_most_one_percent_of_the_time(tmp_path: Path) -> None:
    now = writing = 0.0
    for takes in (0.001, 0.01, 0.5, 3.0, 0.2):  # a slow disk
        writing += takes
        now += takes + pause_after(takes)
        assert writing <= 0.011 * now


@pytest.mark.parametrize("many", [1, 2**17])
def test_the_file_is_small_and_replaced_as_a_whole(many: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    found = np.zeros(many, SPAN)
    for name in SPAN.names or ():
        found[name] = rng.integers(0, 2 ** min(40, 8 * SPAN[name].itemsize - 1), many)
    measurements = Measurements()
    measured = msgspec.structs.replace(
        measurements.measured("id", "n", is_over=False), packed=found.tobytes()
    )
    write_timings(tmp_path, 1, measured)
    assert FILES_MAX * (tmp_path / "1.msgpack").stat().st_size < 64 * 2**20
    assert (read_timings(tmp_path)[0].spans == found).all()


def test_a_full_disk_ends_only_the_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def full(_folder: Path, number: int, _measured: Any) -> None:
        written.append(number)
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("pipedist.runs.observers.write_timings", full)
    result = pipedist.run(document("double"), workers=1, output=tmp_path)
    assert written[-1] == 1
    assert result.timings.stages[0].calls == 20
    assert not read_timings(tmp_path / ".pipedist/timings")


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "1.msgpack").write_bytes(b"\x00nothing")
    with pytest.raises(UsageError, match=r"1\.msgpack can't be read: .* The run's results are not affected"):
        read_timings(tmp_path)


def stage(**fields: Any) -> StageTimings:
    zeros = dict.fromkeys(StageTimings.__struct_fields__, 0)
    texts = {"name": "y", "slowest": "y/3/1", "slowest_worker": "w1", "stages_s": {}, "waits": False}
    return StageTimings(**(zeros | texts | fields))


def worker(name: str, **fields: Any) -> WorkerTimings:
    return WorkerTimings(**(dict.fromkeys(WorkerTimings.__struct_fields__, 0) | {"name": name} | fields))


def spans(*ends: tuple[int, float, float]) -> Any:
    """Return spans of (worker, started, finished) in seconds."""
    found = np.zeros(len(ends), SPAN)
    for span, (number, started, finished) in zip(found, ends, strict=True):
        span["worker"], span["started"], span["finished"] = number, started * 1e9, finished * 1e9
    return found


@pytest.mark.parametrize(
    ("ends", "busy", "more", "driver_s", "seconds", "text"),
    [
        ([(0, 0, 9), (1, 0, 10)], (9, 9), {}, 1, 10, "Workers were busy 90% of the time: more workers"),
        (
            [(0, 0, 9), (1, 0, 10)],
            (9, 9),
            {"reading_s": 8},
            1,
            10,
            "90% of the time, 89% of that with reading",
        ),
        (
            [(0, 0, 2), (1, 0, 10)],
            (2, 9),
            {},
            1,
            10,
            "For the last 8.0 s only w1 was busy; the longest call was y/3/1 (8.0 s, the median 0 ms)",
        ),
        (
            [(0, 0, 9), (1, 0, 10)],
            (2, 2),
            {},
            9,
            10,
            "The driver was busy 90% of the time, workers 20%: larger batches",
        ),
        (
            [(0, 0, 9), (1, 0, 10)],
            (2, 2),
            {"input_wait_s": 5},
            1,
            10,
            "Workers waited 50% of the time for input that the driver read",
        ),
        (
            [(0, 0, 9), (1, 0, 10)],
            (5, 5),
            {},
            1,
            10,
            "Workers were busy 50% of the time, and the driver 10% of it.",
        ),
        ([(0, 0, 1), (1, 0, 1)], (1, 1), {}, 1, 10, "Calls ran for 1.0 s of 10.0 s: 0 ms passed before"),
        (
            [(0, 0, 9), (1, 0, 10)],
            (1, 2),
            {"stage_wait_s": 7},
            1,
            10,
            "70% of the time until calls of y had an update",
        ),
        (
            [(0, 0, 9), (1, 0, 10)],
            (9, 2),
            {},
            1,
            10,
            "Only w0 of 2 workers had calls for more than 75% of the time",
        ),
        ([], (1, 1), {}, 1, 10, ""),
    ],
)
def test_the_limit_is_named(
    ends: list[tuple[int, float, float]],
    busy: tuple[float, float],
    more: dict[str, float],
    driver_s: float,
    seconds: float,
    text: str,
) -> None:
    workers = [worker(f"w{n}", busy_s=each, **more) for n, each in enumerate(busy)]
    found = limit_of(spans(*ends), [stage(max_s=8.0)], workers, driver_s, seconds)
    assert text in found if text else not found


def test_calls_that_wait_are_limited_by_what_they_wait_for() -> None:
    found = limit_of(
        spans((0, 0, 10), (1, 0, 10)),
        [stage(waits=True)],
        [worker("w0", busy_s=10), worker("w1", busy_s=10)],
        1,
        10,
    )
    assert "calls of y that waited 100% of the time: a higher `concurrency`" in found


async def sleeps(x: int) -> int:
    return x


@pytest.mark.parametrize(("function", "waits"), [(sleeps, True), (abs, False)])
def test_only_async_functions_wait_also_for_single_elements(function: Any, waits: bool) -> None:
    stages = {"y": {"run": function, "per": "element"}, "out": {"gather": 0, "of": "y"}}
    spec = {"pipedist": 1, "dataset": {"range": 4, "batch": 2}, "stages": stages}
    assert [stage.waits for stage in pipedist.run(spec, workers=1).timings.stages] == [waits]


def test_timings_survive_their_plain_form() -> None:
    timings = Timings({"total": 1.0}, [stage(calls=3)], [worker("w0")], "A sentence.")
    assert Timings.of(timings.parts, timings.details()) == timings
    assert dict(timings) == {"total": 1.0}
