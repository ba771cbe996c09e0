"""pipedist under measurement: its public API and its command line, nothing else."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import pipedist
from benchmarks import functions
from benchmarks.adapter import WORKERS, Adapter, Function, Take
from benchmarks.sizes import FILE_BLOCK_ROWS, FILE_COLUMNS
from benchmarks.systems import HOME

_OF_A_SHARD: Mapping[Function, Function] = {
    functions.burn: functions.burn_shard,
    functions.nap: functions.nap_shard,
}
"""Functions that take one number, as functions of a shard."""

_COLD = """\
import pipedist

def square(x):
    return x * x

spec = {
    "pipedist": 1,
    "dataset": {"range": 100, "batch": 25},
    "stages": {"y": {"run": square}, "total": {"reduce": "sum", "of": "y", "axis": 0}},
}
print(pipedist.run(spec, workers=2)["total"])
"""

_COLD_SPEC = """\
pipedist: 1
name: cold
dataset: {range: 100, batch: 25}
stages:
  y: {run: "squares:square"}
  total: {reduce: sum, of: y, axis: 0}
"""


class Pipedist(Adapter):
    """A LocalCluster that stays open; each measurement is one run, or one strategy, on it."""

    settings: ClassVar[Mapping[str, str]] = {
        "cluster": "LocalCluster(workers=2)",
        "W1": "range source, batch 1, run and gather, results()",
        "W1j": "as W1, with the gather as an output: results.npy, written to the disk of the checkout",
        "W1s": "the same, `steps` of the run stage",
        "W2": "arrays source of float32[256 Mi], batch 1 Mi; W2 and W3c `as_completed`, W3 `steps`",
        "W6": "as W1s, results summed and dropped",
        "W8": "Strategy.run with a PerReplica of both halves, then Strategy.reduce('mean')",
        "W9": "run and gather; os.kill of a process in `LocalCluster.pids`",
        "FN": "reduce sum of the dataset itself, batch 65,536 rows",
    }

    def __init__(self) -> None:
        self._home: asyncio.Task[None] | None = None
        self._cluster: pipedist.LocalCluster | None = None

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._loop.run_until_complete(self._begin())

    def stop(self) -> None:
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _begin(self) -> None:
        opened = asyncio.Event()

        async def live() -> None:
            # A cluster is entered and left in one task; the measurements are tasks beside it.
            async with pipedist.LocalCluster(workers=WORKERS) as cluster:
                await cluster.ready()
                self._cluster = cluster
                opened.set()
                await self._ending.wait()

        self._home = asyncio.create_task(live())
        waiting = asyncio.create_task(opened.wait())
        await asyncio.wait({self._home, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not opened.is_set():
            waiting.cancel()
            await self._home

    async def _end(self) -> None:
        self._ending.set()
        if self._home is not None:
            await self._home

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    # -- runs ------------------------------------------------------------------------------

    def calls(self, fn: Function, count: int) -> Sequence[Any]:
        spec = _spec({"range": count, "batch": 1}, fn, {"results": {"gather": 0, "of": "y"}})
        return self._await(self._results(spec))["results"]

    def journalled_calls(self, fn: Function, count: int) -> Sequence[Any]:
        spec = _spec({"range": count, "batch": 1}, fn, {"results": {"gather": 0, "of": "y"}})
        spec = {**spec, "outputs": {"results": "results.npy"}}
        with tempfile.TemporaryDirectory(dir=HOME) as folder:
            written = self._await(self._results(spec, output=Path(folder) / "out"))["results"]
            return np.load(written)

    def streamed_calls(self, fn: Function, count: int) -> Sequence[Any]:
        spec = _spec({"range": count, "batch": 1}, fn)
        values: list[Any] = []
        self._await(self._steps(spec, lambda _, value: values.append(value)))
        return values

    def summed_calls(self, fn: Function, count: int) -> int:
        spec = _spec({"range": count, "batch": 1}, fn)
        total = 0

        def take(_index: int, value: np.ndarray) -> None:
            nonlocal total
            total += int(value[0])

        self._await(self._steps(spec, take))
        return total

    def stream(self, fn: Function, batches: np.ndarray, *, ordered: bool, take: Take) -> None:
        spec = _spec({"arrays": batches.reshape(-1), "batch": batches.shape[1]}, fn)
        self._await(self._steps(spec, take) if ordered else self._parts(spec, take))

    def streamed_total(self, count: int, elements: int) -> float:
        source = {"call": functions.batches, "with": {"count": count, "elements": elements}}
        reduced = {"sum": {"reduce": "sum", "of": "y", "axis": None}}
        spec = _spec({"function": source, "batch": 1}, functions.total, reduced)
        return float(self._await(self._results(spec))["sum"])

    def column_sums(self, form: str, folder: Path, fn: Function | None = None) -> np.ndarray:
        config: dict[str, Any] = {"path": str(folder / f"*.{form}")}
        if form == "parquet":
            config["columns"] = {f"c{k}": "float64" for k in range(FILE_COLUMNS)}
        dataset = {form: config, "batch": FILE_BLOCK_ROWS}
        sums_stage = {"reduce": "sum", "of": "dataset" if fn is None else "y", "axis": 0}
        stages = {"sums": sums_stage}
        spec = {"pipedist": 1, "dataset": dataset, "stages": stages}
        if fn is not None:
            spec = _spec(dataset, fn, stages)
        sums = self._await(self._results(spec))["sums"]
        return np.asarray([sums[f"c{k}"] for k in range(FILE_COLUMNS)] if form == "parquet" else sums)

    def run_spec(self, spec: Mapping[str, Any]) -> pipedist.Result:
        """Run a spec on the open cluster."""
        result: pipedist.Result = self._await(self._results(spec))
        return result

    async def _results(self, spec: Mapping[str, Any], output: Path | None = None) -> pipedist.Result:
        async with pipedist.open(spec, cluster=self._cluster, output=output) as run:
            return await run.results()

    async def _steps(self, spec: Mapping[str, Any], take: Take) -> None:
        async with pipedist.open(spec, cluster=self._cluster) as run:
            async for step in run.steps("y"):
                take(step.index, step["y"][0])

    async def _parts(self, spec: Mapping[str, Any], take: Take) -> None:
        async with pipedist.open(spec, cluster=self._cluster) as run:
            async for part in run.as_completed("y"):
                take(part.step, part.value)

    # -- strategies, processes -----------------------------------------------------------------

    def steps(
        self, count: int, make: Callable[[int], np.ndarray], fn: Function = functions.mean
    ) -> list[float]:
        async def loop() -> list[float]:
            if self._cluster is None:
                raise RuntimeError("not started")
            means = []
            async with pipedist.Strategy(self._cluster, replicas=WORKERS) as strategy:
                for step in range(count):
                    halves = pipedist.PerReplica(np.split(make(step), WORKERS))
                    part_means = await strategy.run(fn, args=(halves,))
                    means.append(float(await strategy.reduce("mean", part_means, axis=None)))
            return means

        result: list[float] = self._await(loop())
        return result

    def worker_pids(self) -> list[int]:
        if self._cluster is None:
            raise RuntimeError("not started")
        return list(self._cluster.pids.values())

    def cold_command(self, folder: Path) -> list[str]:
        (folder / "cold.py").write_text(_COLD)
        return [sys.executable, str(folder / "cold.py")]

    def cold_cli_command(self, folder: Path) -> list[str]:
        (folder / "squares.py").write_text("def square(x):\n    return x * x\n")
        (folder / "cold.yaml").write_text(_COLD_SPEC)
        program = Path(sysconfig.get_path("scripts")) / "pipedist"
        return [str(program), "run", str(folder / "cold.yaml"), "--workers", str(WORKERS), "--json"]


def _spec(
    dataset: Mapping[str, Any], fn: Function, stages: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    run = {"y": {"run": _OF_A_SHARD.get(fn, fn)}}
    return {"pipedist": 1, "dataset": dict(dataset), "stages": {**run, **(stages or {})}}
