"""Traces of runs; `test_browser.py` opens one in Perfetto."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipedist.coordinator.measurements import DRIVER_SPANS_MAX, MARKS_MAX, SPANS_MAX
from pipedist.coordinator.spans import SPAN, DriverSpan, DriverWork, Mark
from pipedist.core.files import is_replaceable
from pipedist.errors import UsageError
from pipedist.report import trace_of
from pipedist.report.trace import in_order, lanes, trace
from pipedist.runs.timings import Measured
from tests.preloaded import Popen, run_module
from tests.report.jobs import finished, waiting

WAIT_S = 60


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "out"
    finished(path)
    return path


def events_of(text: bytes | str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


def tracks(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the slices and instants by the names of their process and track."""
    names = {(e["pid"], e.get("tid"), e["name"]): e["args"]["name"] for e in events if "_name" in e["name"]}
    found = defaultdict(list)
    for event in events:
        if event["ph"] in "Xi":
            process = names[event["pid"], None, "process_name"]
            found[f"{process}: {names[event['pid'], event['tid'], 'thread_name']}"].append(event)
    return found


def measured(spans: np.ndarray, **more: Any) -> Measured:
    names = [f"w{n}" for n in range(int(spans["worker"].max()) + 1)]
    passes = [("prepare -> features", ["prepare", "features"], 0)]
    fields = dict.fromkeys(("stages", "workers", "marks", "memory"), ()) | {"began_at": 0.0} | more
    return Measured(
        format=1, run="r", name="many", seconds=1000.0, is_over=True, driver_busy_s=1.0,
        driver_memory_bytes=1, replicas=1, passes=passes, worker_names=names, limit="", packed=spans.tobytes(),
        **fields,
    ).compressed()  # fmt: skip


def test_a_trace_has_the_work_of_the_driver_and_of_each_worker(job: Path) -> None:
    events = events_of(trace_of(job))
    found = tracks(events)
    assert {"driver: sends", "driver: folds", "driver: journal commits", "driver: events"} <= set(found)
    assert {name for name in found if name.startswith("worker")} == {"worker w0: calls", "worker w1: calls"}
    calls = [
        each for name in found for each in found[name] if name.startswith("worker") and each["ph"] == "X"
    ]
    assert {each["cat"] for each in calls} == {"call", "failed", "lost"}
    assert all(each["name"] == "parts -> losses" for each in calls)
    assert any(each["args"]["call"] == "parts/1/0" and each["args"].get("attempt") == 2 for each in calls)
    (death,) = found["driver: events"]
    assert "died: signal 9" in death["name"]
    worker = death["name"].split()[1]
    assert death["name"] in [each["name"] for each in found[f"worker {worker}: calls"]]
    assert {each["name"] for each in found["driver: folds"]} == {"table, curve"}
    counters = {(each["name"], *each["args"]) for each in events if each["ph"] == "C"}
    assert counters >= {("in flight", "calls"), ("memory", "MiB")}
    assert [each["args"]["calls"] for each in events if each["name"] == "in flight"][-1] == 0


def test_each_arrow_leads_from_a_send_to_its_calls(job: Path) -> None:
    events = events_of(trace_of(job))
    begins = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    calls = sum(1 for each in events if each["ph"] == "X" and each["pid"] > 1)
    assert begins.keys() == ends.keys()
    assert len(begins) == calls
    assert all(begins[flow]["ts"] <= ends[flow]["ts"] for flow in begins)
    places = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    assert all((e["pid"], e["tid"], e["ts"]) in places for e in [*begins.values(), *ends.values()])


def test_slices_of_a_track_do_not_overlap(job: Path) -> None:
    for name, slices in tracks(events_of(trace_of(job))).items():
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["ph"] == "X")
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(own)), name


def spans_of(*times: tuple[int, int, int]) -> np.ndarray:
    spans = np.zeros(len(times), SPAN)
    spans["sent"], spans["started"], spans["finished"] = np.array(times).T
    return spans


def test_results_that_arrive_together_are_drawn_one_after_the_other() -> None:
    """The driver was busy, and got the results of three calls of 100 ns at once."""
    spans = spans_of((0, 200, 300), (0, 201, 301), (0, 202, 302))
    assert in_order(spans) == [(2, 102), (102, 202), (202, 302)]
    assert [lane for _, _, lane in lanes(in_order(spans))] == [0, 0, 0]


def test_calls_that_wait_at_the_same_time_have_tracks_of_their_own() -> None:
    spans = spans_of((0, 0, 300), (10, 10, 100), (20, 20, 200), (150, 150, 400))
    assert in_order(spans) == [(0, 300), (10, 100), (20, 200), (150, 400)]
    assert [lane for _, _, lane in lanes(in_order(spans))] == [0, 1, 2, 1]


def test_the_trace_of_200_000_calls_is_below_64_mib() -> None:
    """Measured with a share of the largest number of spans, and everything else that is kept."""
    count = SPANS_MAX // 16
    rng = np.random.default_rng(0)
    spans = np.zeros(count, SPAN)
    spans["worker"] = rng.integers(0, 8, count)
    spans["finished"] = np.sort(rng.integers(10**11, 10**12, count))
    spans["started"] = spans["finished"] - rng.integers(10**5, 10**7, count)
    spans["sent"] = spans["started"] - 10**6
    spans["lo"] = np.arange(200_000 - count, 200_000)
    spans["hi"], spans["calls"], spans["merged"], spans["bytes_out"] = spans["lo"] + 2, 2, 2, 10**6
    grown = len(trace([measured(spans)])) - len(trace([measured(spans[: count // 2])]))
    marks = [Mark(10**12, "worker w1 died: signal 9 (SIGKILL); it executed stage parts, step 100, replica 0")]
    work = [
        DriverSpan(DriverWork.FOLD, 10**12 + n, 10**12 + n, "table, curve") for n in range(DRIVER_SPANS_MAX)
    ]
    others = trace([measured(spans[:1], marks=marks * MARKS_MAX, driver=work)])
    assert grown * 32 + len(others) < 64 * 2**20


def test_the_processes_of_a_resumed_run_are_in_one_trace() -> None:
    first = measured(spans_of((0, 1_000, 2_000)))
    later = msgspec.structs.replace(first, began_at=10.0)
    found = tracks(events_of(trace([first, later])))
    assert found["worker w0: calls"][0]["ts"] == 1.0
    assert found["worker w0 (process 2): calls"][0]["ts"] == 10_000_001.0
    found = tracks(events_of(trace([later, first])))
    assert found["worker w0 (process 2): calls"][0]["ts"] == 1.0, "though the clock was set back"


FAILING = {
    "pipedist": 1,
    "dataset": {"range": 40, "batch": 2},
    "stages": {"y": {"run": "tests.runs.functions:fails_on_13"}, "out": {"gather": 0, "of": "y"}},
}


def test_a_run_that_fails_has_a_trace(tmp_path: Path) -> None:
    (tmp_path / "fails.json").write_text(json.dumps(FAILING))
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = run_module(
        "pipedist", "run", "fails.json", "--workers", "1", "--trace", "t.json", cwd=tmp_path, env=root
    )
    assert done.returncode == 1
    calls = tracks(events_of((tmp_path / "t.json").read_bytes()))["worker w0: calls"]
    assert {each["cat"] for each in calls} >= {"call", "failed"}


def test_a_run_that_is_interrupted_has_a_trace(tmp_path: Path) -> None:
    spec = waiting(tmp_path) | {"cluster": {"grace_s": 0.0}}
    (tmp_path / "waiting.json").write_text(json.dumps(spec))
    process = Popen(
        [sys.executable, "-m", "pipedist", "run", "waiting.json", "--workers", "1", "--trace", "t.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + WAIT_S
    while not list(tmp_path.glob("out/waiting/.pipedist/about.json")):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, errors
    assert events_of((tmp_path / "t.json").read_bytes())


def test_a_finished_run_that_is_resumed_has_no_trace(tmp_path: Path) -> None:
    spec = {**FAILING, "name": "small", "dataset": {"range": 4, "batch": 2}, "outputs": {"out": "out.npy"}}
    (tmp_path / "small.json").write_text(json.dumps(spec))
    run = ("pipedist", "run", "small.json", "--workers", "1", "--trace")
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    assert run_module(*run, "t.json", cwd=tmp_path, env=env).returncode == 0
    assert events_of((tmp_path / "t.json").read_bytes())
    again = run_module(*run, "again.json", "--resume", cwd=tmp_path, env=env)
    assert again.returncode == 0
    assert "nothing was executed, so again.json was not written" in again.stderr


def test_a_trace_that_cannot_be_written_is_named_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "fails.json").write_text(json.dumps(FAILING))
    done = run_module("pipedist", "run", "fails.json", "--trace", "no/where.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "can't write --trace 'no/where.json'" in done.stderr


@pytest.mark.parametrize(
    ("path", "is_so"), [("/dev/null", False), ("/dev/stdout", False), ("new.json", True), ("link", True)]
)
def test_no_device_nor_link_of_the_system_is_replaced(tmp_path: Path, path: str, is_so: bool) -> None:
    (tmp_path / "there").touch()
    (tmp_path / "link").symlink_to("there")
    assert is_replaceable(tmp_path / path) is is_so


def test_neither_a_trace_nor_a_report_replaces_a_pipe_or_a_device(job: Path, tmp_path: Path) -> None:
    (tmp_path / "fails.json").write_text(json.dumps(FAILING))
    os.mkfifo(tmp_path / "pipe")
    for words in (("report", job), ("run", "fails.json")):
        done = run_module("pipedist", *words, "--trace", "pipe", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "can't write" in done.stderr
    assert (tmp_path / "pipe").is_fifo()


def test_the_command_report_writes_the_trace_of_a_folder(job: Path, tmp_path: Path) -> None:
    done = run_module("pipedist", "report", job, "--trace", "t.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "t.json\n"), done.stderr
    assert (tmp_path / "t.json").read_bytes() == trace_of(job)
    assert not (job / "report.html").exists()
    with pytest.raises(UsageError, match="there is no run in"):
        trace_of(tmp_path)
