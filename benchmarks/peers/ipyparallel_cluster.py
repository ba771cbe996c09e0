"""ipyparallel with a cluster of 2 engines."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import ipyparallel
import numpy as np

from benchmarks.adapter import WINDOW, WORKERS, Function, Peer

_POLL_S = 0.002


class IPyParallel(Peer):
    """ipyparallel.Cluster(n=2), default engines and task scheduler."""

    settings: ClassVar[Mapping[str, str]] = {
        "W1": "LoadBalancedView.apply_async, one a task; 2,000 calls",
        "W1b": "LoadBalancedView.map, chunk size 1000",
        "W2": "LoadBalancedView.apply_async, 8 in flight; completed: `ready` is polled every 2 ms",
        "W8": "DirectView.apply_async, one part to each engine",
        "W9": "retries=3",
    }
    calls_max = 2_000
    cold = """\
import ipyparallel, logging
def f(x): return x * x
if __name__ == "__main__":
    with ipyparallel.Cluster(n=2, log_level=logging.ERROR) as client:
        print(sum(client.load_balanced_view().map_sync(f, range(100), chunksize=25)))
"""

    def start(self) -> None:
        self._cluster = ipyparallel.Cluster(n=WORKERS, log_level=logging.CRITICAL)
        self._client = self._cluster.start_and_connect_sync()
        self._balanced = self._client.load_balanced_view()
        self._balanced.retries = 3
        self._direct = [self._client[i] for i in self._client.ids]
        self._balanced.map_sync(abs, range(50))

    def stop(self) -> None:
        self._client.close()
        self._cluster.stop_cluster_sync()

    def each(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        return [task.get() for task in [self._balanced.apply_async(fn, x) for x in args]]

    def bundled(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        return list(self._balanced.map(fn, args, chunksize=1000, block=True))

    def windowed(
        self, fn: Function, batches: Iterable[np.ndarray], ordered: bool
    ) -> Iterator[tuple[int, Any]]:
        items = enumerate(batches)
        running: dict[int, Any] = {}

        def send_next() -> None:
            item = next(items, None)
            if item is not None:
                running[item[0]] = self._balanced.apply_async(fn, item[1])

        for _ in range(WINDOW):
            send_next()
        while running:
            done = next(iter(running)) if ordered else self._one_done(running)
            if done is None:
                next(iter(running.values())).wait(_POLL_S)
                continue
            yield done, running.pop(done).get()
            send_next()

    @staticmethod
    def _one_done(running: dict[int, Any]) -> int | None:
        return next((index for index, task in running.items() if task.ready()), None)

    def step(self, fn: Function, parts: Sequence[np.ndarray]) -> list[Any]:
        tasks = [view.apply_async(fn, part) for view, part in zip(self._direct, parts, strict=True)]
        return [task.get() for task in tasks]
