"""Measures the parts of a worker process. Importing this module, in a worker, begins it.

The replica functions of a profiled run are those of this module: so it is imported by every
worker, and by no worker of any other run. What was measured is written when the worker leaves.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import functions
from benchmarks.spans import Spans

FOLDER = "PIPEDIST_BENCHMARK_PROFILE"
"""Environment variable: the folder that workers write to."""

WORKER_NAME = "pipedist-worker"

WAITING = "wait for messages"

PARTS = {
    "pipedist.worker.driver:Driver._wait": WAITING,
    "pipedist.transport.dealer:Dealer.recv": "dealer: receive",
    "pipedist.transport.dealer:Dealer.send": "dealer: send",
    "pipedist.transport.dealer:Dealer.poll": "dealer: poll",
    "pipedist.worker.machine:WorkerMachine.handle": "machine",
    "pipedist.protocol.program:decode": "codec: decode",
    "pipedist.worker.result_cache:encode": "codec: encode",
    "pipedist.transport.dealer:unpack": "codec: message heads",
    "pipedist.transport.dealer:pack": "codec: message heads",
    "pipedist.worker.inputs:LeaseShards.find": "find shard",
    "pipedist.worker.outcomes:take_ownership": "make results own",
    "pipedist.worker.execution:as_readonly": "make results own",
    "pipedist.reduction.tree:Reduction.partial": "partial of a reduction",
    "pipedist.worker.stages:Stage.call": "function",
    "pipedist.worker.lease_run:LeaseRun.advance": "execution, the rest",
    "pipedist.worker.driver:Driver._execute": "driver, the rest",
}


def inc(x: np.ndarray) -> np.ndarray:
    """W1."""
    return functions.inc(x)


def total(x: np.ndarray) -> float:
    """W2."""
    return functions.total(x)


def double(x: np.ndarray) -> np.ndarray:
    """W3."""
    return functions.double(x)


def mean(x: np.ndarray) -> float:
    """W8."""
    return functions.mean(x)


def same(rows: Any) -> Any:
    """FN, FP: nothing; there only to be imported."""
    return rows


def _begin() -> None:
    folder = os.environ[FOLDER]
    from pipedist.worker.leases import Leases

    spans = Spans()
    spans.install(PARTS)
    spans.reset()
    began, cpu = time.perf_counter(), time.process_time()
    close = Leases.close

    def close_and_record(leases: Leases) -> None:
        record = {
            "parts": {name: [part.calls, part.ns / 1e9] for name, part in spans.parts.items()},
            "wall_s": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu,
        }
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(record))
        close(leases)

    Leases.close = close_and_record  # type: ignore[method-assign]  # `Driver.run` calls it at its end


if os.environ.get(FOLDER) and Path("/proc/self/comm").read_text().startswith(WORKER_NAME):
    _begin()
