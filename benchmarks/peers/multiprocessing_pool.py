"""multiprocessing.Pool, fork start (the default on Linux)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from benchmarks.adapter import WORKERS, Function, Peer


class Indexed:
    """A function that keeps the index beside the value."""

    def __init__(self, fn: Function) -> None:
        self.fn = fn

    def __call__(self, item: tuple[int, Any]) -> tuple[int, Any]:
        return item[0], self.fn(item[1])


class Pool(Peer):
    """multiprocessing.Pool(2)."""

    settings: ClassVar[Mapping[str, str]] = {
        "start": "fork",
        "W1": "apply_async, one a task",
        "W1b": "map, default chunk size",
        "W2": "imap and imap_unordered, chunk size 1; no bound on what is in flight",
    }
    cold = """\
import multiprocessing
def f(x): return x * x
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        print(sum(pool.map(f, range(100))))
        pool.close(); pool.join()
"""

    def start(self) -> None:
        self._pool = multiprocessing.get_context("fork").Pool(WORKERS)
        self._pool.map(abs, range(100))

    def stop(self) -> None:
        self._pool.terminate()
        self._pool.join()

    def each(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        return [task.get() for task in [self._pool.apply_async(fn, (x,)) for x in args]]

    def bundled(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        return self._pool.map(fn, args)

    def windowed(
        self, fn: Function, batches: Iterable[np.ndarray], ordered: bool
    ) -> Iterator[tuple[int, Any]]:
        imap = self._pool.imap if ordered else self._pool.imap_unordered
        yield from imap(Indexed(fn), enumerate(batches))

    def step(self, fn: Function, parts: Sequence[np.ndarray]) -> list[Any]:
        return self._pool.map(fn, parts, chunksize=1)
