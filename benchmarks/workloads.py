"""The workloads: what is asked, what must come out, and what is between the two looks at the clock.

Every measurement happens in a process of its own, after a short warm-up, and gives ONE number;
`benchmarks.run` repeats it round by round. A wrong result is an error, never a number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import functions
from benchmarks.adapter import Adapter
from benchmarks.apps.jobs import APPS
from benchmarks.sizes import Sizes
from benchmarks.workload import Measured, Workload, WrongResult, check, timed

GIB = 2.0**30
COLD_SUM = 328_350
"""The sum of the squares of range(100)."""


def peak_rss_mib() -> float:
    """Return the most memory that this process ever had, MiB.

    Not `ru_maxrss`: a process that was started by another one begins with what that one had.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


# -- W1: dispatch --------------------------------------------------------------------------------


def _dispatch(kind: str) -> Callable[[Adapter, Sizes, Path], Measured]:
    def measure(system: Adapter, sizes: Sizes, _data: Path) -> Measured:
        run = getattr(system, kind)
        count = getattr(system, "calls_max", sizes.calls)
        count = min(count, sizes.calls)
        run(functions.inc, max(count // 20, 10))
        seconds, results = timed(lambda: run(functions.inc, count))
        flat = np.asarray(results).reshape(-1)
        check(np.array_equal(flat, np.arange(1, count + 1)), "results are wrong or out of order")
        return Measured(count / seconds, {"calls": count, "seconds": seconds})

    return measure


# -- W2, W3: streams -----------------------------------------------------------------------------


def make_batches(sizes: Sizes) -> np.ndarray:
    """Return float32[batches, elements] of integers whose sums and doubles are exact."""
    shape = (sizes.batches, sizes.batch_elements)
    return np.random.default_rng(0).integers(0, 16, shape, dtype=np.uint8).astype(np.float32)


def _stream_in(system: Adapter, sizes: Sizes, _data: Path) -> Measured:
    batches = make_batches(sizes)
    want = [float(batch.sum()) for batch in batches]
    system.stream(functions.total, batches[:8], ordered=True, take=lambda i, v: None)
    got: dict[int, float] = {}
    seconds, _ = timed(lambda: system.stream(functions.total, batches, ordered=False, take=got.__setitem__))
    check([got.get(i) for i in range(len(want))] == want, "a batch's sum is wrong")
    return Measured(batches.nbytes / GIB / seconds, {"bytes": batches.nbytes, "seconds": seconds})


def _stream_through(ordered: bool) -> Callable[[Adapter, Sizes, Path], Measured]:
    def measure(system: Adapter, sizes: Sizes, _data: Path) -> Measured:
        batches = make_batches(sizes)
        seen: list[int] = []
        ends = {0, len(batches) - 1}

        def take(index: int, value: np.ndarray) -> None:
            seen.append(index)
            check(value[0] == 2 * batches[index][0] and value[-1] == 2 * batches[index][-1], "a wrong value")
            if index in ends:
                check(np.array_equal(value, batches[index] * 2), f"batch {index} is wrong")

        system.stream(functions.double, batches[:8], ordered=ordered, take=lambda i, v: None)
        seconds, _ = timed(lambda: system.stream(functions.double, batches, ordered=ordered, take=take))
        check((seen if ordered else sorted(seen)) == list(range(len(batches))), "a batch is missing")
        return Measured(batches.nbytes / GIB / seconds, {"bytes": batches.nbytes, "seconds": seconds})

    return measure


# -- W5: cold start ------------------------------------------------------------------------------


def _cold(kind: str) -> Callable[[Adapter, Sizes, Path], Measured]:
    def measure(system: Adapter, _sizes: Sizes, _data: Path) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            command = getattr(system, kind)(Path(folder))
            first, _ = timed(lambda: _cold_run(command, folder))  # writes the bytecode, warms the disk
            seconds, _ = timed(lambda: _cold_run(command, folder))
        return Measured(seconds, {"first_s": first})

    return measure


def _cold_run(command: Sequence[str], folder: str) -> None:
    # What is installed has its bytecode beside it; a checkout gets it with the first run, unless told not to.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode or str(COLD_SUM) not in done.stdout:
        raise WrongResult(f"exit code {done.returncode}: {done.stdout[-200:]} {done.stderr[-600:]}")


# -- W6: growth ----------------------------------------------------------------------------------


def _growth(system: Adapter, sizes: Sizes, _data: Path) -> Measured:
    system.summed_calls(functions.inc, sizes.growth[0])
    start_mib = peak_rss_mib()
    us: dict[int, float] = {}
    rss: dict[int, float] = {}
    for count in sizes.growth:
        if us and us[max(us)] * count / 1e6 > sizes.growth_budget_s:
            break
        # Short runs are repeated: a fixed cost at the start must not pass for the cost of a call.
        times = []
        for _ in range(3 if count <= 20_000 else 1):
            seconds, result = timed(lambda count=count: system.summed_calls(functions.inc, count))
            check(result == count * (count + 1) // 2, f"the sum of {count} calls is wrong")
            times.append(seconds)
        us[count] = sorted(times)[len(times) // 2] / count * 1e6
        rss[count] = peak_rss_mib()
    top = max(us)
    detail = {
        "us_per_call": {str(count): round(value, 3) for count, value in us.items()},
        "rss_mib": {str(count): round(value) for count, value in rss.items()},
        "rss_start_mib": round(start_mib),
        "rss_growth_mib": round(rss[top] - rss[min(20_000, top)]),
        "calls_max": top,
    }
    return Measured(us[top] / us[sizes.growth[0]], detail)


# -- W7: CPU-bound -------------------------------------------------------------------------------


def _cpu_bound(system: Adapter, sizes: Sizes, _data: Path) -> Measured:
    system.calls(functions.burn, 4)
    serial, want = timed(lambda: [functions.burn(seed) for seed in range(sizes.burns)])
    parallel, got = timed(lambda: system.calls(functions.burn, sizes.burns))
    check(np.array_equal(np.asarray(got).reshape(-1), want), "a result is wrong")
    return Measured(serial / parallel, {"serial_s": serial, "parallel_s": parallel})


# -- W8: synchronous steps -----------------------------------------------------------------------


def _synchronous(system: Adapter, sizes: Sizes, _data: Path) -> Measured:
    def make(step: int) -> np.ndarray:
        return np.full(sizes.step_elements, step, np.float32)

    system.steps(max(sizes.steps // 10, 2), make)
    seconds, means = timed(lambda: system.steps(sizes.steps, make))
    check(means == list(range(sizes.steps)), "a step's mean is wrong")
    return Measured(sizes.steps / seconds, {"steps": sizes.steps, "seconds": seconds})


# -- W9: recovery --------------------------------------------------------------------------------


def _recovery(system: Adapter, sizes: Sizes, _data: Path) -> Measured:
    def run() -> list[int]:
        return [int(value) for value, _ in _pairs(system.calls(functions.nap, sizes.naps))]

    want = [i * i for i in range(sizes.naps)]
    victim = system.worker_pids()[0]
    run()
    undisturbed = min(timed(run)[0] for _ in range(2))
    killer = threading.Timer(undisturbed / 2, _kill, (victim,))
    killer.daemon = True
    killer.start()
    seconds, got = timed(run)
    killer.join()
    check(got == want, "results are wrong after a worker was killed")
    return Measured(seconds / undisturbed, {"undisturbed_s": undisturbed, "disturbed_s": seconds})


def _pairs(results: Sequence[Any]) -> np.ndarray:
    return np.asarray(results).reshape(-1, 2)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# -- FN, FP: file sources ------------------------------------------------------------------------


def _files(form: str) -> Callable[[Adapter, Sizes, Path], Measured]:
    def measure(system: Adapter, _sizes: Sizes, data: Path) -> Measured:
        folder = data / form
        want = np.load(data / "column_sums.npy")
        size = sum(path.stat().st_size for path in folder.iterdir())
        seconds = 0.0
        for _ in range(2):  # the first time brings the files into the page cache
            seconds, got = timed(lambda: system.column_sums(form, folder))
            check(np.array_equal(np.asarray(got, np.float64), want), "the column sums are wrong")
        return Measured(size / GIB / seconds, {"bytes": size, "seconds": seconds})

    return measure


# -- MEM: the driver's memory --------------------------------------------------------------------


def _memory(system: Adapter, sizes: Sizes, _data: Path) -> Measured:
    count, elements = sizes.streamed_batches, sizes.batch_elements
    want = float(sum(k % functions.BATCH_POOL for k in range(count))) * elements
    pool_mib = functions.BATCH_POOL * elements * 4 / 2**20
    before_mib = peak_rss_mib()
    seconds, got = timed(lambda: system.streamed_total(count, elements))
    check(got == want, "the total is wrong")
    detail = {"gib": count * elements * 4 / GIB, "seconds": seconds, "before_mib": round(before_mib)}
    return Measured(peak_rss_mib() - pool_mib, detail)


WORKLOADS: dict[str, Workload] = {
    "W1": Workload("20,000 calls, one element each, results in order", "calls/s", True, _dispatch("calls")),
    "W1s": Workload("W1, each result by itself", "calls/s", True, _dispatch("streamed_calls")),
    "W1j": Workload("W1, with a journal on disk", "calls/s", True, _dispatch("journalled_calls")),
    "W1b": Workload("W1, bundled as the system offers", "calls/s", True, _dispatch("bundled_calls")),
    "W2": Workload("256 x 4 MiB in, scalar back", "GiB/s", True, _stream_in),
    "W3": Workload("256 x 4 MiB in, 4 MiB back, in order", "GiB/s", True, _stream_through(True)),
    "W3c": Workload("W3, as completed", "GiB/s", True, _stream_through(False)),
    "W5": Workload("cold start: a whole process", "s", False, _cold("cold_command"), starts=False),
    "W5c": Workload("cold start: command line", "s", False, _cold("cold_cli_command"), starts=False),
    "W6": Workload(
        "time per call, most calls / 2,000 calls", "x", False, _growth, once=True, timeout_s=600.0
    ),
    "W7": Workload("64 calls of 50 ms, speed-up over one process", "x", True, _cpu_bound),
    "W8": Workload("synchronous steps of 64 KiB", "steps/s", True, _synchronous),
    "W9": Workload("kill -9 of one worker, over the undisturbed time", "x", False, _recovery, timeout_s=40.0),
    "FN": Workload("2 GiB of npy, column sums", "GiB/s", True, _files("npy")),
    "FP": Workload("2 GiB of parquet, column sums", "GiB/s", True, _files("parquet")),
    "MEM": Workload("driver's peak memory, 10 GiB streamed", "MiB", False, _memory),
    **APPS,
}
