"""Calls of functions that wait for the outside world: elements, retries, rates and limits of single calls.

A function gets a whole value, or with `per: element` one element of it after another. Each call of it has its own
time limit, after which it is cancelled, and its own further attempts. The waits between attempts depend on the
spec's seed and the place of the call only. Limits over all workers are divided among those that have calls
(`pipedist.scheduler.quotas`): each worker has at most its share of the calls at the same time, and starts calls at even
intervals. When the run is stopped, what waits for an attempt, the rate or a place ends at once, as not begun.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipedist.core import ragged, trees
from pipedist.core.remote_errors import class_names, exception_text
from pipedist.core.types import Tree
from pipedist.errors import RemoteError, RetryAfter
from pipedist.protocol.messages import CULPRITS_MAX
from pipedist.protocol.program import StageProgram
from pipedist.worker import process_setup, ragged_results
from pipedist.worker.array_isolation import as_readonly, take_ownership
from pipedist.worker.context import ReplicaContext, current
from pipedist.worker.failures import CULPRIT_CHARS_MAX, culprit_text, note_element
from pipedist.worker.progress import StageClock, Stepped
from pipedist.worker.stages import Call, CallHeld, Stage

OnRetry = Callable[[str, int, int, bool, str], None]
"""Called before a further attempt, with stage, call, its number, whether the last one timed out, and its exception."""


Elements = range | NDArray[np.int64] | None  # ids in the dataset

CANCEL_NS = 10**9
"""Time that a function which waits has to end, after it was cancelled for its time limit; then its worker is killed."""

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


def _too_long(error: RetryAfter) -> ValueError:
    return ValueError(
        f"RetryAfter({error.seconds:g}): a call waits for its next attempt for at most {RETRY_AFTER_S_MAX:g} s; raise "
        f"RetryAfter(min(seconds, {RETRY_AFTER_S_MAX:g})), or continue the run after that time"
    )


class WorkerShare:
    """This worker's share of the limits of a stage: all of them until `use`."""

    def __init__(self, stage: StageProgram) -> None:
        self.stage = stage
        self.calls_max = stage.concurrency  # calls at the same time, if the stage limits them
        self.running = 0
        self._sharing = 1  # number of workers among which the rate is divided; 0: nothing begins any more
        self._queue: deque[asyncio.Future[None]] = deque()
        self._turns = asyncio.Lock()
        self._last_s = -math.inf  # when the rate allowed a call
        self._news = asyncio.Event()  # set when the share changes

    def use(self, calls_max: int, sharing: int) -> None:
        self.calls_max, self._sharing = calls_max, sharing
        self._news.set()
        self._news = asyncio.Event()
        for _ in range(len(self._queue) if self.is_held else calls_max - self.running):
            self._wake()

    @property
    def is_held(self) -> bool:
        """Whether no further attempt or element begins."""
        return not self._sharing

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait until a call may run, in the order of arrival; if held, it must not begin."""
        while self.stage.concurrency and self.running >= self.calls_max and not self.is_held:
            turn = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # its turn is that of the next one
                    self._wake()
                raise
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._wake()

    def _wake(self) -> None:
        while self._queue:
            if not (turn := self._queue.popleft()).done():
                turn.set_result(None)
                return

    async def turn(self) -> None:
        """Wait until the rate allows another call, or raise CallHeld; calls are not saved up."""
        rate = self.stage.calls_per_s
        if not rate:
            await self._until(lambda: 0.0)
            return
        arrived_s = asyncio.get_running_loop().time()
        async with self._turns:
            await self._until(lambda: self._last_s + self._sharing / rate)
            self._last_s = max(arrived_s, self._last_s + self._sharing / rate)

    async def pause(self, seconds: float) -> None:
        """Wait, or raise CallHeld."""
        until = asyncio.get_running_loop().time() + seconds
        await self._until(lambda: until)

    async def _until(self, due: Callable[[], float]) -> None:
        """Wait until the time `due`, which another share may change."""
        loop = asyncio.get_running_loop()
        while not self.is_held:
            if (rest_s := due() - loop.time()) <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._news.wait()
        raise CallHeld


# -- calls of a stage ---------------------------------------------------------------------

_keys = count(1 << 62)  # of functions with a time limit: a worker's clock is common to its passes


class WaitingStage:
    """Calls the function of a stage for calls that are tasks of an event loop."""

    def __init__(self, stage: Stage, seed: int, clock: StageClock, on_retry: OnRetry) -> None:
        self.share = WorkerShare(stage.program)
        self._stage = stage
        self._seed = seed
        self._clock = clock
        self._on_retry = on_retry

    async def elements(
        self,
        call: Call,
        elements: Elements,
        value: Tree,
        done: Mapping[int, tuple[Tree, str]],
        context: Callable[[Elements, int], ReplicaContext],
    ) -> Tree:
        """Call the function with each element that is not done, and return all results as a batch.

        `done` has results and failures by element.
        """
        size = count_elements(value)
        is_named = elements is not None and len(elements) == size
        ids = [int(each) for each in elements] if is_named and elements is not None else range(size)
        over = {at: done[element] for at, element in enumerate(ids) if is_named and element in done}
        results = {at: result for at, (result, why) in over.items() if not why}
        culprits = {at: why for at, (_, why) in over.items() if why}
        sets_aside = self._stage.program.quarantine

        async def execute(at: int) -> None:
            id_ = ids[at]
            own = np.array([id_]) if is_named else None
            result = await self.attempts(call, element_at(value, at), partial(context, own, id_), (id_,))
            if isinstance(result, Iterator | AsyncIterator):
                kind = type(result).__name__.replace("_", " ")
                raise TypeError(
                    f"{self._stage.program.function.label} returned an object of type {kind} for element {id_}, "
                    "and its values can't be sent: return a list or an array of them"
                )
            box = [result]
            del result
            results[at] = take_ownership(box)[0]
            if is_named:
                call.fresh.append([call.place - 1, ids[at], results[at], ""])

        def on_failure(at: int, error: BaseException) -> None:
            culprits[at] = culprit_text(error)
            if is_named and sets_aside:
                call.fresh.append([call.place - 1, ids[at], None, culprits[at]])

        rest = [at for at in range(size) if at not in over]
        failed = await each_element(rest, self.share, execute, on_failure, all_of_them=sets_aside)
        made = [] if culprits else [results[at] for at in range(size)]
        form = self._stage.program.ragged
        if form:
            made = [ragged_results.as_arrays(result) for result in made]
        if not culprits:
            failed = unlike(made, ids, is_ragged=bool(form))
            culprits.update((at, culprit_text(error)) for at, error in failed)
        if culprits:
            if is_named and len(culprits) <= CULPRITS_MAX:
                call.culprits = tuple(sorted(culprits.items()))
            if not failed:
                raise RemoteError(culprits[min(culprits)])
            at, error = failed[0]
            if is_named:
                note_element(error, ids[at], element_at(value, at))
            raise error
        if not made or not form:
            return batched(made)
        if form == "lists":
            return ragged_results.lists_of(made)
        if not is_named:
            raise ValueError("`ragged: rows` needs an input whose elements have numbers")
        return ragged_results.rows_of(made, ids)

    async def attempts(
        self, call: Call, value: Tree, context: Callable[[], ReplicaContext], element: tuple[int, ...] = ()
    ) -> Tree:
        """Call the function until it returns, at most as often as its `retry` allows.

        Each attempt gets the same value and random numbers.
        """
        stage = self._stage
        if not stage.waits:
            return await self._attempt(call, value, context())
        place: tuple[int | str, ...] = (self._seed, stage.name, call.step, call.replica, *element)
        attempt = 1
        while True:
            await self.share.turn()
            try:
                return await self._attempt(call, as_readonly(value), context())
            except Exception as error:
                rest_s = pause_s(stage.program, error, attempt, place)
                if rest_s is None:
                    if isinstance(error, RetryAfter) and error.seconds > RETRY_AFTER_S_MAX:
                        raise _too_long(error).with_traceback(error.__traceback__) from None
                    raise
                text = "".join(f"element {number}: " for number in element)
                text += f"{class_names(error)[1]}: {exception_text(error)}"[:CULPRIT_CHARS_MAX]
                timed_out = isinstance(error, TimeoutError)
                self._on_retry(stage.name, call.number, attempt + 1, timed_out, text)
            await self.share.pause(rest_s)
            attempt += 1

    async def _attempt(self, call: Call, value: Tree, ctx: ReplicaContext) -> Tree:
        """Call the function once; cancel it after its time limit."""
        stage = self._stage
        key, limit_s, limit = next(_keys), stage.limit_ns / 1e9, None
        token = current.set(ctx)
        call.in_user_code = True
        if stage.is_class:
            stage.make_instance(0)
        if stage.limit_ns:
            hung_ns = stage.limit_ns + (CANCEL_NS if call.lease and stage.is_async else 0)
            self._clock.start(call.number, call.place, hung_ns, lease=call.lease, key=key)
        try:
            result = stage.call(value, ctx, 0)
            if hasattr(type(result), "__await__"):
                begin = call.begin_step if call.lease else None
                result = Stepped(result, self._clock, key, begin) if stage.limit_ns or begin else result
                async with asyncio.timeout(limit_s or None) as limit:
                    result = await result
            return result
        except TimeoutError as error:
            if limit is not None and limit.expired():
                raise TimeoutError(f"timed out after {limit_s:g} s") from error
            raise
        finally:
            if process_setup.is_copy:
                process_setup.end_copy(stage.name)
            self._clock.stop(key)
            current.reset(token)


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


def unlike(
    results: Sequence[Tree], ids: Sequence[int], *, is_ragged: bool = False
) -> list[tuple[int, BaseException]]:
    """Return the positions of the results that can't be in one batch with most others, and the errors."""
    kinds = [ragged_results.kind_of(result) if is_ragged else _kind(result) for result in results]
    found: list[tuple[int, BaseException]] = []
    for usual, _ in Counter(kinds).most_common(1):
        for at, kind in enumerate(kinds):
            if kind != usual and not (is_ragged and ragged_results.fit(kind, usual)):
                other = kinds.index(usual)
                what, this, that = _contrast(results[at], results[other], is_ragged=is_ragged)
                text = (
                    f"results of elements can't be batched: {what} is {this} in that of element {ids[at]}, and {that} "
                    f"in that of element {ids[other]}; return the same keys, shapes and dtypes for each element, as "
                    "with float(x), and NaN or an empty text instead of None"
                )
                if not is_ragged and kind[1] != usual[1] and _fit_as_rows(results[at], results[other]):
                    text += ". In a spec, `ragged: lists` or `rows` on the stage keeps different lengths"
                found.append((at, ValueError(text)))
    return found


def _fit_as_rows(result: Tree, usual: Tree) -> bool:
    return ragged_results.fit(*(ragged_results.kind_of(x) for x in (result, usual)))


def _contrast(result: Tree, usual: Tree, *, is_ragged: bool) -> tuple[str, str, str]:
    """Return the name of the first leaf that two results do not have alike, and what it is in each."""
    trees_ = [ragged_results.with_cells(each) if is_ragged else each for each in (result, usual)]
    leaves, others = (dict(zip(trees.paths(each), trees.flatten(each)[0], strict=True)) for each in trees_)
    for path in {**others, **leaves}:
        found, expected = (
            _kind_text(each[path]) if path in each else "missing or None" for each in (leaves, others)
        )
        if found != expected and not (
            is_ragged and path in leaves and path in others and _fit_as_rows(leaves[path], others[path])
        ):
            return f"`{path}`" if path else "the value", found, expected
    found, expected = (trees.excerpt(trees.structure(each)) for each in trees_)
    return "the structure", found, expected


def _kind_text(leaf: object) -> str:
    if ragged_results.is_cell(leaf):
        return "a list of records"
    array = np.asarray(leaf)
    kind = {"U": "text", "O": "text", "T": "text", "S": "bytes"}.get(array.dtype.kind, str(array.dtype))
    return f"{kind}{list(array.shape)}" if array.ndim else kind


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
    that raised; those before it are over, so the first exception does not depend on timing. Raise CallHeld if some
    calls do not begin for it.
    """
    failures: list[tuple[int, BaseException]] = []
    rest, returned = iter(indices), 0

    def failed(index: int, error: BaseException) -> None:
        failures.append((index, error))
        on_failure(index, error)

    async def work() -> None:
        nonlocal returned
        while all_of_them or not failures:
            async with share.place():
                if share.is_held or (failures and not all_of_them) or (index := next(rest, None)) is None:
                    return
                try:
                    await execute(index)
                    returned += 1
                except CallHeld:
                    return
                except asyncio.CancelledError as error:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    failed(index, error)
                except BaseException as error:  # any exception of user code is a failure of its element
                    failed(index, error)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(share.stage.concurrency or len(indices), len(indices))):
            tasks.create_task(work())
    if share.is_held and returned + len(failures) < len(indices):
        raise CallHeld
    return sorted(failures, key=lambda each: each[0])
