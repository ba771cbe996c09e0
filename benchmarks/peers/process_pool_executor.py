"""concurrent.futures.ProcessPoolExecutor, fork start (the default on Linux)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor as FuturesExecutor
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar

import numpy as np

from benchmarks.adapter import WORKERS, Function, Peer
from benchmarks.peers.futures_window import windowed

CHUNK = 1000


class Executor(Peer):
    """What all executors of `concurrent.futures` share; a subclass makes one."""

    settings: ClassVar[Mapping[str, str]] = {
        "W1": "submit, one a task",
        "W1b": "map, chunk size 1000",
        "W2": "8 submitted batches in flight",
    }
    _pool: FuturesExecutor

    def each(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        return [future.result() for future in [self._pool.submit(fn, x) for x in args]]

    def bundled(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        return list(self._pool.map(fn, args, chunksize=CHUNK))

    def windowed(
        self, fn: Function, batches: Iterable[np.ndarray], ordered: bool
    ) -> Iterator[tuple[int, Any]]:
        return windowed(lambda batch: self._pool.submit(fn, batch), batches, ordered)

    def step(self, fn: Function, parts: Sequence[np.ndarray]) -> list[Any]:
        return self.each(fn, parts)


class ProcessPool(Executor):
    """ProcessPoolExecutor(2)."""

    cold = """\
from concurrent.futures import ProcessPoolExecutor
def f(x): return x * x
if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        print(sum(pool.map(f, range(100), chunksize=25)))
"""

    def start(self) -> None:
        self._pool = ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("fork"))
        list(self._pool.map(abs, range(100)))

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)
