"""A bounded number of `concurrent.futures` in flight, as several peers are used for streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from benchmarks.adapter import WINDOW


def windowed(
    submit: Callable[[np.ndarray], Future[Any]], batches: Iterable[np.ndarray], ordered: bool
) -> Iterator[tuple[int, Any]]:
    """Yield (index, result), in order or as completed."""
    return _in_order(submit, batches) if ordered else _as_completed(submit, batches)


def _in_order(
    submit: Callable[[np.ndarray], Future[Any]], batches: Iterable[np.ndarray]
) -> Iterator[tuple[int, Any]]:
    queue: deque[tuple[int, Future[Any]]] = deque()
    for index, batch in enumerate(batches):
        queue.append((index, submit(batch)))
        if len(queue) >= WINDOW:
            first, future = queue.popleft()
            yield first, future.result()
            del future  # it holds its result
    while queue:
        first, future = queue.popleft()
        yield first, future.result()


def _as_completed(
    submit: Callable[[np.ndarray], Future[Any]], batches: Iterable[np.ndarray]
) -> Iterator[tuple[int, Any]]:
    running: dict[Future[Any], int] = {}
    for index, batch in enumerate(batches):
        running[submit(batch)] = index
        if len(running) >= WINDOW:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
                del future
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future.result()
            del future
