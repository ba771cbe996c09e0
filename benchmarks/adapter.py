"""What a workload asks of the system that it measures, and how one call at a time answers it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks import functions

WORKERS = 2
"""Worker processes of every system."""

WINDOW = 8
"""Batches that a system without back-pressure of its own has in flight: 4 a worker."""

Function = Callable[[Any], Any]
Take = Callable[[int, Any], None]


class Unsupported(Exception):
    """The system has nothing that answers this workload."""


class Adapter:
    """A system under measurement; a workload it has no answer to raises Unsupported.

    `start` and `stop` are not part of any clock. What is measured is one call of another method.
    """

    settings: ClassVar[Mapping[str, str]] = {}
    """How the system is used, for the report."""

    def start(self) -> None:
        """Bring up WORKERS warmed worker processes."""

    def stop(self) -> None:
        """End them."""

    def calls(self, fn: Function, count: int) -> Sequence[Any]:
        """W1, W7, W9: call `fn` on each of range(count), one call an element; results in order."""
        raise Unsupported

    def streamed_calls(self, fn: Function, count: int) -> Sequence[Any]:
        """W1s: the same, each result handed over by itself."""
        raise Unsupported

    def journalled_calls(self, fn: Function, count: int) -> Sequence[Any]:
        """W1j: as `calls`, with a journal on disk, so that the run could go on after a `kill -9`."""
        raise Unsupported

    def bundled_calls(self, fn: Function, count: int) -> Sequence[Any]:
        """W1b: the same, with the system's own way of bundling."""
        raise Unsupported

    def summed_calls(self, fn: Function, count: int) -> int:
        """W6: the same, of which only the sum of the results is wanted."""
        return sum(self.calls(fn, count))

    def stream(self, fn: Function, batches: np.ndarray, *, ordered: bool, take: Take) -> None:
        """W2, W3: send each batch from here, and hand every result to `take(index, result)`.

        Args:
            batches: float32[count, elements].
            ordered: results in the order of the batches, otherwise as they arrive.
        """
        raise Unsupported

    def steps(self, count: int, make: Callable[[int], np.ndarray]) -> list[float]:
        """W8: for each step, the mean of `make(step)`, computed in WORKERS parts; a barrier a step."""
        raise Unsupported

    def worker_pids(self) -> list[int]:
        """W9: process ids of the workers."""
        raise Unsupported

    def column_sums(self, form: str, folder: Path) -> np.ndarray:
        """FN, FP: the column sums of the data set in `folder`: float64[FILE_COLUMNS].

        Args:
            form: "npy" (float64[rows, FILE_COLUMNS] a file) or "parquet" (columns c0, c1, ...).
        """
        raise Unsupported

    def streamed_total(self, count: int, elements: int) -> float:
        """MEM: the sum of all that `functions.batches(count, elements)` yields here."""
        raise Unsupported

    def cold_command(self, folder: Path) -> list[str]:
        """W5: the command of a fresh process which prints the sum of the squares of range(100)."""
        raise Unsupported

    def cold_cli_command(self, folder: Path) -> list[str]:
        """W5c: the same through the system's command line."""
        raise Unsupported


class Peer(Adapter):
    """A system that is used by submitting tasks: a subclass says how it submits."""

    cold: str = ""
    """Source of the whole W5 program."""

    cold_prefix: tuple[str, ...] = (sys.executable,)
    """What W5's program is started with."""

    def each(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        """Return fn(x) for each x, submitted one by one."""
        raise Unsupported

    def bundled(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        """Return the same, with the system's own bundling."""
        raise Unsupported

    def windowed(
        self, fn: Function, batches: Iterable[np.ndarray], ordered: bool
    ) -> Iterator[tuple[int, Any]]:
        """Yield (index, fn(batch)), with a bounded number of batches in flight."""
        raise Unsupported

    def step(self, fn: Function, parts: Sequence[np.ndarray]) -> list[Any]:
        """Return fn(part) for each part, each on another worker."""
        raise Unsupported

    def calls(self, fn: Function, count: int) -> Sequence[Any]:
        return self.each(fn, range(count))

    def bundled_calls(self, fn: Function, count: int) -> Sequence[Any]:
        return self.bundled(fn, range(count))

    def stream(self, fn: Function, batches: np.ndarray, *, ordered: bool, take: Take) -> None:
        for index, value in self.windowed(fn, batches, ordered):
            take(index, value)

    def steps(self, count: int, make: Callable[[int], np.ndarray]) -> list[float]:
        return [
            sum(self.step(functions.mean, np.split(make(step), WORKERS))) / WORKERS for step in range(count)
        ]

    def worker_pids(self) -> list[int]:
        return sorted({pid for _, pid in self.each(functions.nap, range(40))})

    def cold_command(self, folder: Path) -> list[str]:
        if not self.cold:
            raise Unsupported
        path = folder / "cold.py"
        path.write_text(self.cold)
        return [*self.cold_prefix, str(path)]
