"""Where a call's time goes, in the driver and in the workers: `python -m benchmarks.call_profile`.

Each workload is run once with the parts of pipedist wrapped (see `benchmarks.spans`), and once
as it is, so that the table also says what measuring costs. With `--functions N`, also the N most
expensive functions of the driver, from cProfile.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report, worker_profile
from benchmarks.data import make_data
from benchmarks.pipedist_adapter import Pipedist
from benchmarks.sizes import FULL, SMOKE, Sizes
from benchmarks.spans import Spans
from benchmarks.systems import HOME
from benchmarks.workloads import make_batches

WAITING = "wait for events"

PARTS = {
    "selectors:EpollSelector.select": WAITING,
    "asyncio.events:Handle._run": "event loop and tasks, the rest",
    "pipedist.transport.zeromq.pump:Pump._run": "zmq: receive",
    "pipedist.transport.router:Router._hear": "router: frames to messages",
    "pipedist.transport.router:unpack": "codec: message heads",
    "pipedist.transport.router:pack": "codec: message heads",
    "pipedist.transport.router:Router.send": "router: send",
    "pipedist.coordinator.coordinator:Coordinator._on_message": "coordinator",
    "pipedist.coordinator.coordinator:Coordinator.post": "coordinator",
    "pipedist.scheduler.machine:Scheduler.handle": "scheduler",
    "pipedist.coordinator.outbound:encode": "codec: encode",
    "pipedist.coordinator.outbound:encode_arguments": "codec: encode",
    "pipedist.coordinator.results:decode": "codec: decode",
    "pipedist.coordinator.pass_handle:PassHandle.request": "feed: shards",
    "pipedist.coordinator.pass_handle:PassHandle.arrived": "results: keep",
    "pipedist.coordinator.results:ResultStore.take": "results: take",
    "async pipedist.datasets.feeds:IndexedFeed.pull": "feed: steps",
    "async pipedist.runs.pass_execution:PassExecution._take": "pipeline: a step",
    "async pipedist.runs.folds:Fold.add": "folds",
    "async pipedist.runs.folds:Fold.finish": "folds",
    "pipedist.runs.subscription:Subscription.put": "stream to the user",
    "async pipedist.runs.subscription:Subscription.take": "stream to the user",
    "async pipedist.strategy.strategies:Strategy.run": "strategy",
    "async pipedist.strategy.base:BaseStrategy.reduce": "strategy",
    "pipedist.values:reduce": "folds",
    "async pipedist.coordinator.pass_handle:PassHandle.call_step": "strategy: call_step",
}

Run = Callable[[Pipedist], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A workload under the profile: what runs, and how many calls that makes."""

    run: Run
    calls: int


def cases(sizes: Sizes, data: Path) -> dict[str, Callable[[], Case]]:
    """Return what can be profiled."""
    w = worker_profile

    def stream(fn: Callable[..., Any], ordered: bool) -> Case:
        batches = make_batches(sizes)
        return Case(lambda p: p.stream(fn, batches, ordered=ordered, take=lambda i, v: None), sizes.batches)

    def files(form: str) -> Case:
        folder = make_data(data, sizes) / form
        rows = sizes.file_bytes // (8 * 16)
        return Case(lambda p: p.column_sums(form, folder, fn=w.same), -(-rows // 65_536))

    steps = sizes.steps
    return {
        "W1": lambda: Case(lambda p: p.calls(w.inc, sizes.calls), sizes.calls),
        "W1s": lambda: Case(lambda p: p.streamed_calls(w.inc, sizes.calls), sizes.calls),
        "W2": lambda: stream(w.total, False),
        "W3": lambda: stream(w.double, True),
        "W6": lambda: Case(lambda p: p.summed_calls(w.inc, sizes.growth[-2]), sizes.growth[-2]),
        "W8": lambda: Case(
            lambda p: p.steps(steps, lambda s: np.full(sizes.step_elements, s, np.float32), fn=w.mean), steps
        ),
        "FN": lambda: files("npy"),
        "FP": lambda: files("parquet"),
    }


@dataclass(frozen=True, slots=True)
class Profiled:
    """What came out: seconds a part, in the driver, and in all workers together."""

    wall_s: float
    plain_s: float
    cpu_s: float
    driver: Mapping[str, Sequence[float]]
    workers: Mapping[str, Sequence[float]]
    workers_wall_s: float


def profile(case: Case) -> Profiled:
    """Run a case plainly, then with its parts measured."""
    plain_s = _timed(case)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[worker_profile.FOLDER] = folder
        spans = Spans()
        spans.install(PARTS)
        system = Pipedist()
        system.start()
        try:
            case.run(system)  # functions are loaded, connections warm
            spans.reset()
            began, cpu = time.perf_counter(), time.process_time()
            case.run(system)
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            driver = {name: (part.calls, part.ns / 1e9) for name, part in spans.parts.items()}
        finally:
            system.stop()
            del os.environ[worker_profile.FOLDER]
        workers: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        workers_wall_s = 0.0
        for path in Path(folder).iterdir():
            record = json.loads(path.read_text())
            workers_wall_s += record["wall_s"]
            for name, (calls, seconds) in record["parts"].items():
                workers[name][0] += calls
                workers[name][1] += seconds
    return Profiled(wall_s, plain_s, cpu_s, driver, workers, workers_wall_s)


def _timed(case: Case) -> float:
    system = Pipedist()
    system.start()
    try:
        case.run(system)
        began = time.perf_counter()
        case.run(system)
        return time.perf_counter() - began
    finally:
        system.stop()


def functions_of(case: Case, count: int) -> None:
    """Print the driver's most expensive functions."""
    system = Pipedist()
    system.start()
    try:
        case.run(system)
        profiler = cProfile.Profile()
        profiler.enable()
        case.run(system)
        profiler.disable()
    finally:
        system.stop()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(count)


def table(profiled: Profiled, calls: int) -> str:
    """Return a Markdown table, microseconds a call."""
    rows = [("where", "part", "times a call", "us a call", "share")]
    sums = (
        ("driver", profiled.driver, profiled.wall_s, calls),
        # A case runs twice in a worker, and its clock runs until it leaves.
        ("worker", profiled.workers, sum(s for _, s in profiled.workers.values()), 2 * calls),
    )
    for where, parts, whole_s, per in sums:
        for name, (times, seconds) in sorted(parts.items(), key=lambda item: -item[1][1]):
            if times:
                rows.append(
                    (
                        where,
                        name,
                        f"{times / per:.3g}",
                        f"{seconds / per * 1e6:.2f}",
                        f"{seconds / whole_s:.0%}" if whole_s else "",
                    )
                )
    return report.table(rows)


def main() -> None:
    """Profile, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="W1,W1s,W2,W3,W6,W8,FN,FP")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--functions", type=int, default=0, metavar="N")
    parser.add_argument("--data", type=Path, default=HOME / "data")
    options = parser.parse_args()
    known = cases(SMOKE if options.smoke else FULL, options.data)
    for name in options.only.split(","):
        if name not in known:
            parser.error(f"no profile of {name!r}; there are: {', '.join(known)}")
        # A process of its own for each: wrapping is for good.
        pid = os.fork()
        if pid == 0:
            case = known[name]()
            result = profile(case)
            print(
                f"### {name}: {case.calls:,} calls, {result.plain_s / case.calls * 1e6:,.1f} us a call "
                f"({result.wall_s / case.calls * 1e6:,.1f} with the profile; driver's CPU, all threads: "
                f"{result.cpu_s / case.calls * 1e6:,.1f})\n\n{table(result, case.calls)}\n",
                flush=True,
            )
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            raise SystemExit(f"the profile of {name} failed")
        if options.functions:
            functions_of(known[name](), options.functions)


if __name__ == "__main__":
    main()
