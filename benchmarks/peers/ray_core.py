"""Ray: tasks, actors, a compiled graph."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray

from benchmarks import functions
from benchmarks.adapter import WINDOW, WORKERS, Adapter, Function, Peer, Unsupported

_OBJECT_STORE_BYTES = 4 << 30


def _init() -> None:
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=_OBJECT_STORE_BYTES,
    )


@ray.remote(num_cpus=1)
class Caller:
    """Calls whatever function it is sent."""

    def call(self, fn: Function, x: Any) -> Any:
        return fn(x)


class RayTasks(Peer):
    """One Ray task a call."""

    settings: ClassVar[Mapping[str, str]] = {
        "init": "num_cpus=2, include_dashboard=False, object store of 4 GiB",
        "W1": "one f.remote(x) a task, one ray.get of all",
        "W1b": "ray.util.multiprocessing.Pool(2).map, default chunk size",
        "W2": "ray.put(batch) and f.remote(ref), 8 in flight",
        "W8": "two actors",
    }
    cold = """\
import os
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
@ray.remote
def f(x): return x * x
if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    print(sum(ray.get([f.remote(x) for x in range(100)])))
    ray.shutdown()
"""

    def __init__(self) -> None:
        self._remote: dict[Function, Any] = {}
        self._pool: Any = None
        self._actors: list[Any] = []

    def start(self) -> None:
        _init()
        ray.get([self._task(functions.inc).remote(i) for i in range(200)])

    def stop(self) -> None:
        ray.shutdown()

    def _task(self, fn: Function) -> Any:
        if fn not in self._remote:
            self._remote[fn] = ray.remote(num_cpus=1)(fn)
        return self._remote[fn]

    def each(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        task = self._task(fn)
        return list(ray.get([task.remote(x) for x in args]))

    def bundled(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        from ray.util.multiprocessing import Pool

        if self._pool is None:
            self._pool = Pool(WORKERS)
        return list(self._pool.map(fn, args))

    def _send(self, fn: Function, batch: np.ndarray) -> Any:
        return self._task(fn).remote(ray.put(batch))

    def windowed(
        self, fn: Function, batches: Iterable[np.ndarray], ordered: bool
    ) -> Iterator[tuple[int, Any]]:
        running: deque[tuple[int, Any]] = deque()
        for item in enumerate(batches):
            running.append((item[0], self._send(fn, item[1])))
            if len(running) >= WINDOW:
                yield self._one(running, ordered)
        while running:
            yield self._one(running, ordered)

    @staticmethod
    def _one(running: deque[tuple[int, Any]], ordered: bool) -> tuple[int, Any]:
        if not ordered:
            [done], _ = ray.wait([ref for _, ref in running], num_returns=1)
            place = next(k for k, (_, ref) in enumerate(running) if ref == done)
            running.rotate(-place)
        index, ref = running.popleft()
        return index, ray.get(ref)

    def step(self, fn: Function, parts: Sequence[np.ndarray]) -> list[Any]:
        if not self._actors:
            self._actors = [Caller.remote() for _ in range(WORKERS)]
        calls = [actor.call.remote(fn, part) for actor, part in zip(self._actors, parts, strict=True)]
        return list(ray.get(calls))


class RayActors(RayTasks):
    """Two long-lived actors, calls in turn."""

    settings: ClassVar[Mapping[str, str]] = {
        **RayTasks.settings,
        "W1": "two actors in turn, one ray.get of all",
        "W2": "actor.call.remote(fn, ray.put(batch)), 8 in flight",
    }
    cold = ""

    def start(self) -> None:
        _init()
        self._actors = [Caller.remote() for _ in range(WORKERS)]
        self._turn = 0
        ray.get([actor.call.remote(functions.inc, 1) for actor in self._actors])

    def _next_actor(self) -> Any:
        self._turn = (self._turn + 1) % WORKERS
        return self._actors[self._turn]

    def each(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        return list(ray.get([self._next_actor().call.remote(fn, x) for x in args]))

    def bundled(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        raise Unsupported

    def worker_pids(self) -> list[int]:
        raise Unsupported  # an actor that dies is gone; it is the tasks that are retried

    def _send(self, fn: Function, batch: np.ndarray) -> Any:
        return self._next_actor().call.remote(fn, ray.put(batch))


@ray.remote(num_cpus=1)
class Half:
    """An actor of the compiled graph: computes the mean of its part of a step."""

    def __init__(self, place: int) -> None:
        self._place = place

    def mean(self, parts: Sequence[np.ndarray]) -> float:
        return functions.mean(parts[self._place])


class RayCompiledGraph(Adapter):
    """Two actors under one InputNode and MultiOutputNode, compiled; it has an answer to W8 only."""

    settings: ClassVar[Mapping[str, str]] = {
        "W8": "experimental_compile of 2 actors under one InputNode and MultiOutputNode"
    }

    def start(self) -> None:
        from ray.dag import InputNode, MultiOutputNode

        _init()
        halves = [Half.remote(place) for place in range(WORKERS)]
        with InputNode() as parts:
            graph = MultiOutputNode([half.mean.bind(parts) for half in halves])
        self._graph = graph.experimental_compile()

    def stop(self) -> None:
        self._graph.teardown()
        ray.shutdown()

    def steps(self, count: int, make: Any) -> list[float]:
        means = []
        for step in range(count):
            parts = np.split(make(step), WORKERS)
            means.append(sum(ray.get(self._graph.execute(parts))) / WORKERS)
        return means
