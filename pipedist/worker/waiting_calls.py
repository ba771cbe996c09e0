"""Calls of functions that wait for the outside world: elements, retries, rates and limits of single calls.

A function gets a whole value, or with `per: element` one element of it after another. Each call of it has its own
time limit, after which it is cancelled, and its own further attempts. The waits between attempts depend on the
spec's seed and the place of the call only. Limits over all workers are divided among them: each worker has at most
its share of the calls at the same time, and starts calls at even intervals.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from pipedist.core import ragged, trees
from pipedist.core.types import Tree
from pipedist.errors import RetryAfter
from pipedist.protocol.program import StageProgram

BACKOFF_S_MAX = 60.0
RETRY_AFTER_S_MAX = 3600.0  # a longer request of a function is a failure


def pause_s(
    stage: StageProgram, error: BaseException, attempt: int, place: Sequence[int | str]
) -> float | None:
    """Return the wait before the next attempt, after `attempt` of them; None if there is none.

    `place` names the call: the same one always waits equally long, and different ones do not wait equally long.
    """
    if attempt >= stage.attempts or not isinstance(error, Exception):
        return None
    if isinstance(error, RetryAfter):
        return error.seconds if error.seconds <= RETRY_AFTER_S_MAX else None
    names = {
        name for cls in type(error).__mro__ for name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    }
    if stage.retry_on and names.isdisjoint(stage.retry_on):
        return None
    digest = hashlib.sha256(repr((*place, attempt)).encode()).digest()
    jitter = 0.5 + int.from_bytes(digest[:8], "big") / 2**64
    return min(BACKOFF_S_MAX, stage.backoff_s * 2.0 ** min(attempt - 1, 60)) * jitter


class WorkerShare:
    """This worker's share of the limits of a stage."""

    def __init__(self, stage: StageProgram) -> None:
        self._stage = stage
        self.sharing = 1  # number of workers among which the limits are divided
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._next_s = 0.0

    @property
    def calls_max(self) -> int:
        """How many calls run at the same time; 0: no limit."""
        limit = self._stage.concurrency
        return max(1, limit // self.sharing) if limit else 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait until a call may run, in the order of arrival."""
        while self.calls_max and self._running >= self.calls_max:
            turn = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # its turn is that of the next one
                    self._wake()
                raise
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._wake()

    def _wake(self) -> None:
        while self._queue:
            if not (turn := self._queue.popleft()).done():
                turn.set_result(None)
                return

    async def turn(self) -> None:
        """Wait until the rate allows another call; calls are not saved up."""
        if self._stage.calls_per_s:
            now = asyncio.get_running_loop().time()
            begin, self._next_s = (
                self._next_s,
                max(now, self._next_s) + self.sharing / self._stage.calls_per_s,
            )
            await asyncio.sleep(max(0.0, begin - now))


# -- elements ----------------------------------------------------------------------------


def count_elements(value: Tree) -> int:
    """Return the number of elements of a batch: arrays and lists of one length; raise ValueError otherwise."""
    lengths = {len(leaf) for leaf in _columns(value)}
    if len(lengths) != 1:
        found = "of different lengths" if lengths else "without arrays or lists"
        raise ValueError(f"`per: element` needs a batch of elements, but its input is a value {found}")
    return lengths.pop()


def _columns(value: Tree) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _columns(each)]
    if isinstance(value, tuple):
        return [leaf for each in value for leaf in _columns(each)]
    if is_dataclass(value):
        return [leaf for each in fields(value) for leaf in _columns(getattr(value, each.name))]
    return [value] if isinstance(value, list) or np.ndim(value) else []


def element_at(value: Tree, index: int) -> Tree:
    if isinstance(value, dict):
        return {name: element_at(each, index) for name, each in value.items()}
    if isinstance(value, tuple):
        items = [element_at(each, index) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: element_at(getattr(value, each.name), index) for each in fields(value)}
        )
    return value[index] if isinstance(value, list) or np.ndim(value) else value


def unlike(results: Sequence[Tree], ids: Sequence[int]) -> list[tuple[int, BaseException]]:
    """Return the positions of the results that can't be in one batch with most others, and the errors."""
    kinds = [_kind(result) for result in results]
    found: list[tuple[int, BaseException]] = []
    for usual, _ in Counter(kinds).most_common(1):
        for at, kind in enumerate(kinds):
            if kind != usual:
                what = "dtype" if kind[:2] == usual[:2] else "structure or shape"
                text = (
                    f"results of elements can't be batched: that of element {ids[at]} has another {what} than that "
                    f"of element {ids[kinds.index(usual)]}; return the same keys, shapes and dtypes for each "
                    "element, as with float(x), and NaN or an empty text instead of None"
                )
                found.append((at, ValueError(text)))
    return found


def _kind(result: Tree) -> tuple[Any, ...]:
    leaves, structure = trees.flatten(result)
    arrays = [np.asarray(leaf) for leaf in leaves]
    dtypes = tuple(
        "O" if x.dtype.kind in "UOT" else x.dtype.str.partition("S")[1] or x.dtype.str for x in arrays
    )
    return structure, tuple(x.shape for x in arrays), dtypes


def batched(results: Sequence[Tree]) -> Tree:
    """Return results that are alike as a batch: each leaf is an array whose first axis is the elements."""
    if not results:
        return np.array([])  # fits all results; see `values.is_blank`
    flat = [trees.flatten(result) for result in results]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return trees.unflatten(flat[0][1], [ragged.stack(column) for column in columns])


async def each_element(
    indices: Sequence[int],
    share: WorkerShare,
    execute: Callable[[int], Awaitable[None]],
    on_failure: Callable[[int, BaseException], None],
    *,
    all_of_them: bool,
) -> list[tuple[int, BaseException]]:
    """Execute a function for each index, as many at the same time as the share allows.

    Call `on_failure` with each exception, and return them by index. If not `all_of_them`, no call begins after one
    that raised; those before it are over, so the first exception does not depend on timing.
    """
    failures: list[tuple[int, BaseException]] = []
    rest = iter(indices)

    def failed(index: int, error: BaseException) -> None:
        failures.append((index, error))
        on_failure(index, error)

    async def work() -> None:
        while all_of_them or not failures:
            async with share.place():
                if (index := next(rest, None)) is None or (failures and not all_of_them):
                    return
                try:
                    await execute(index)
                except asyncio.CancelledError as error:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    failed(index, error)
                except BaseException as error:  # any exception of user code is a failure of its element
                    failed(index, error)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(share.calls_max or len(indices), len(indices))):
            tasks.create_task(work())
    return sorted(failures, key=lambda each: each[0])
