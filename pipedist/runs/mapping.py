"""`map`, `imap` and `amap`: a function over data in one line, as a run of a spec with one stage.

| data | a batch is | an element is | the results are |
|---|---|---|---|
| array, dict of arrays | such arrays, shorter | a row of each | concatenated: an array, or a tree of arrays |
| DataFrame (pandas, Polars, Arrow) | a frame of the same library | a dict of the row's cells | a frame, or an array |
| list, other iterables | a list | the object | a list |
| path or glob | what the source of its ending reads | a row of it | as for arrays |

The batch size depends on the data alone, so the number of workers changes no result.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, Unpack, overload

from pipedist.core.import_guard import reject_during_import, without_collections
from pipedist.core.names import few
from pipedist.runs import api
from pipedist.runs.sync_stream import Outcome, RunReader, SyncStream

if TYPE_CHECKING:
    from pipedist.cluster.base import Cluster
    from pipedist.coordinator import LogSink
    from pipedist.core.types import Tree
    from pipedist.runs.result import Result
    from pipedist.runs.run import Run
    from pipedist.runs.run_files import Resume

T = TypeVar("T")
R = TypeVar("R")

STAGE: Final = "map"
RESULTS: Final = "results"
FILE: Final = "results.npz"
IDS_SHOWN: Final = 10  # quarantined elements that a warning names


class MapOptions(TypedDict, total=False):
    """The options of `map`, `imap` and `amap`; names and meanings are those of a `run` stage and of `open`."""

    batch: int | None
    with_: Mapping[str, Any]
    columns: Mapping[str, str] | str
    seed: int
    timeout_s: float | None
    retries: int
    retry: Mapping[str, Any] | None
    on_error: Literal["fail", "quarantine"]
    concurrency: int | None
    rate: Mapping[str, Any] | None
    resources: Mapping[str, Any] | None
    inputs: str | Sequence[str]
    workers: int | None
    cluster: Cluster | str | None
    output: str | os.PathLike[str] | None
    resume: Resume
    restart: bool
    on_log: LogSink | None
    progress: bool | None


_OF_STAGE = ("timeout_s", "retries", "retry", "on_error", "concurrency", "rate", "resources", "inputs")
_OF_ELEMENT = ("timeout_s", "retries", "retry", "on_error", "concurrency", "rate")  # options for each element
_OF_RUN = ("workers", "cluster", "output", "resume", "restart", "on_log", "progress")


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The place of an element that was quarantined, among the results of `map` over a list.

    Args:
        element: its index.
        cause: the exception, as `ClassName: text`.

    Example:
        answers = pipedist.map(ask, prompts, per_element=True, on_error="quarantine")
        failed = [answer.element for answer in answers if isinstance(answer, pipedist.Quarantined)]
    """

    element: int
    cause: str


@overload
def map(
    fn: Callable[[T], R], data: Sequence[T], *, per_element: Literal[True], **options: Unpack[MapOptions]
) -> list[R]: ...


@overload
def map(
    fn: Callable[..., Any] | str, data: Any, *, per_element: bool = False, **options: Unpack[MapOptions]
) -> Any: ...


def map(
    fn: Callable[..., Any] | str, data: Any, *, per_element: bool = False, **options: Unpack[MapOptions]
) -> Any:
    """Call a function on data, batch by batch, on worker processes, and return the results in order.

    It can also be called in a notebook, or inside a running event loop, which it blocks.

    Args:
        fn: the function, sync or async, also a lambda; a class, whose instance each worker makes once; or
            "package.module:name". It gets a batch: arrays of an array, a frame of a frame, a list of a list, what the
            source reads of files. With a parameter `ctx` it gets the `ReplicaContext`.
        data: an array or a dict of arrays, divided along the first axis; a DataFrame; a list or another iterable; or a
            path or glob of .csv, .parquet, .arrow, .jsonl, .npy, .npz or text files.
        per_element: call the function with one element at a time: an item, a row of an array, the cells of a row as a
            dict.
        batch: elements of a call. Default: the data in 128 calls; 64 of an iterator; 1,024 of files.
        with_: keyword arguments of the function (of a class: of its constructor).
        columns: of files with columns: those to read, and their types, `{"x": "float32"}`. Default: all; types of .csv
            are inferred.
        seed: of `ctx.rng`. With `per_element`, each element has its own in a function with a parameter `ctx`; that of
            `get_replica_context()` may go on from one element of a call to the next.
        timeout_s, retries, retry, on_error, concurrency, rate, resources, inputs: as for a `run` stage in a spec.
        workers, cluster, on_log, progress: as for `open`.
        output: a folder that keeps the results. The same call again goes on with an interrupted run, or returns the
            results of a finished one. It needs data that can be read again.
        resume, restart: as for `open`; `resume` is the default if there is an `output`.

    Returns:
        A list of the results of the elements of a list or iterable; without `per_element`, the lists that the function
        returned, joined. With `per_element`, quarantined elements are `Quarantined` in their places. For other
        data, the results concatenated along the first axis, without quarantined elements; for a frame, as a
        frame of the same library if they are columns. None, or an empty list, if there are no elements.

    Raises:
        SpecError, PlanError, UsageError: the arguments are wrong, or something changed since the run in `output`.
        CallError: a call failed for good.
        FoldError: results do not fit together.
        KeyboardInterrupt: Ctrl-C; with an `output`, a note on it names the folder that keeps finished results.
        WorkersLost, RunCancelled, JournalError: as `Run.results`.

    Example:
        >>> pipedist.map(lambda x: x * 2, np.arange(4))
        array([0, 2, 4, 6])
        >>> pipedist.map(str.upper, ["a", "b"], per_element=True, workers=2)
        ['A', 'B']
        >>> pipedist.map(score, "data/*.parquet", on_error="quarantine", output="out/scores")
    """
    reject_during_import("pipedist.map")
    cluster = options.get("cluster")
    with api.head_start(cluster):
        with without_collections():
            job = _Job(fn, data, per_element, options)
        try:
            return api.blocking(job.results, cluster, "pipedist.map")
        except KeyboardInterrupt as interrupt:
            if job.is_continued:
                folder = os.fspath(options["output"] or "")
                interrupt.add_note(f"Finished results are kept in {folder}; the same call continues the run.")
            raise


def imap(
    fn: Callable[..., Any] | str,
    data: Any,
    *,
    per_element: bool = False,
    ordered: bool = True,
    **options: Unpack[MapOptions],
) -> SyncStream[Any]:
    """Call a function on data, on worker processes, and iterate over the results while they are made.

    Args:
        ordered: yield results in order; False: as they are ready.
        fn, data, per_element, options: as for `map`.

    Returns:
        An iterator over the results of elements, with `per_element` or of a list; else over those of batches. A slow
        loop makes the workers wait. Leaving the loop ends the run. Quarantined elements have no result.

    Raises:
        SpecError, UsageError, CallError: as `map`, with the next item.

    Example:
        >>> for score in pipedist.imap(predict, images, per_element=True, ordered=False):
        ...     print(score)
    """
    reject_during_import("pipedist.imap")
    loop = api.loop_of(options.get("cluster"), "pipedist.imap")
    with without_collections():
        job = _Job(fn, data, per_element, options)
        return SyncStream(job.open, lambda run: job.items(run, ordered=ordered), loop)


def amap(
    fn: Callable[..., Any] | str,
    data: Any,
    *,
    per_element: bool = False,
    ordered: bool = True,
    **options: Unpack[MapOptions],
) -> AsyncResults:
    """Call a function on data, on worker processes: `await` the results, or read them with `async for`.

    Args:
        ordered: iterate over results in order; False: as they are ready.
        fn, data, per_element, options: as for `map`.

    Returns:
        What `await` turns into the results of `map`, and `async for` into the items of `imap`.

    Raises:
        SpecError, UsageError, CallError: as `map`, when it is awaited or read.

    Example:
        >>> results = await pipedist.amap(fetch, urls, per_element=True, concurrency=100)
        >>> async for result in pipedist.amap(fetch, urls, per_element=True, ordered=False):
        ...     print(result)
    """
    reject_during_import("pipedist.amap")
    with without_collections():
        return AsyncResults(_Job(fn, data, per_element, options), ordered=ordered)


class AsyncResults:
    """The results of `amap`: awaitable, and an async iterator.

    A loop that is left early ends the run, in its own task; with `async with`, also before the block is left.

    Args:
        job: the function and its data.
        ordered: whether results are iterated over in order.

    Example:
        async for batch in pipedist.amap(fn, data):
            print(batch)
    """

    def __init__(self, job: _Job, *, ordered: bool) -> None:
        self._job = job
        self._ordered = ordered
        self._reader: RunReader[Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._is_over = False

    def __await__(self) -> Generator[Any, None, Any]:
        return self._job.results().__await__()

    def __aiter__(self) -> AsyncResults:
        return self

    async def __anext__(self) -> Any:
        """Return the next result.

        Raises:
            StopAsyncIteration: there is none.
            Exception: the error of the run, as `Run.results` raises it.
        """
        if self._is_over:
            raise StopAsyncIteration
        if self._reader is None:
            job, ordered = self._job, self._ordered
            self._reader = RunReader(
                job.open, lambda run: job.items(run, ordered=ordered), self._outcomes.put_nowait
            )
            self._task = asyncio.create_task(self._reader.main(), name="pipedist.amap")
        else:
            self._reader.request()
        kind, value = await self._outcomes.get()
        if kind == "item":
            return value
        await self.aclose()
        if kind == "error":
            raise value
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the run; harmless twice."""
        self._is_over = True
        if self._reader is not None and self._task is not None:
            self._reader.cancel()
            await asyncio.wait([self._task])

    async def __aenter__(self) -> AsyncResults:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._reader is not None:
            self._reader.cancel()


class _Job:
    """One `map`: its data as a dataset, its function as a stage, and its results."""

    def __init__(
        self, fn: Callable[..., Any] | str, data: Any, per_element: bool, options: MapOptions
    ) -> None:
        known = MapOptions.__annotations__
        if unknown := [name for name in options if name not in known]:
            raise TypeError(
                f"map() got an unexpected keyword argument {unknown[0]!r}; it has {', '.join(known)}"
            )
        if not isinstance(options.get("with_", {}), Mapping):
            raise TypeError(f"map() needs `with_` as a dict of keyword arguments, got {options['with_']!r}")
        self._fn = fn
        self._per_element = per_element
        self._options = options
        from pipedist.runs.mapped_data import data_of  # after the fork server has started

        self._data = data_of(data, options.get("columns"))
        self._is_kept = options.get("output") is not None
        self._was_opened = False  # the run was, and its output folder has its journal
        if self._is_kept and self._data.is_iterator:
            from pipedist.errors import UsageError

            raise UsageError(
                "an iterator can't be read again by a resume: with `output`, pass a list of its elements"
            )

    @property
    def is_continued(self) -> bool:
        """Whether the same call, after this one was interrupted, continues its run."""
        return self._was_opened and self._options.get("resume", True) and not self._options.get("restart")

    def open(self) -> Run:
        chosen: Any = {name: self._options[name] for name in _OF_RUN if name in self._options}  # type: ignore[literal-required]
        if self._is_kept and not chosen.get("restart"):
            chosen.setdefault("resume", True)
        return api.open(self._spec(), **chosen)

    def _spec(self) -> dict[str, Any]:
        options, data = self._options, self._data
        fn, batch = self._function(), options.get("batch")
        stage: dict[str, Any] = {"run": fn, "with": dict(options.get("with_", {}))}
        stage |= {name: options[name] for name in _OF_STAGE if options.get(name) is not None}  # type: ignore[literal-required]
        if self._per_element and not self._loops:
            stage["per"] = "element"
        elif data.form and not self._per_element:
            stage["as"] = data.form
        stages: dict[str, Any] = {STAGE: stage}
        spec: dict[str, Any] = {
            "pipedist": 1,
            "name": _name(fn),
            "seed": options.get("seed", 0),
            "dataset": {**data.source, "batch": data.batch if batch is None else batch},
            "stages": stages,
        }
        if data.is_list and self._per_element:  # all may fail: the results tell which did
            from pipedist.spec.model import QUARANTINE_DEFAULT

            elements = len(data.source.get("arrays", ()))
            spec["quarantine_max"] = max(QUARANTINE_DEFAULT, elements // 100)
        if self._is_kept:
            from pipedist.worker.mapped import joined

            stages["joined"] = {"run": joined, "of": STAGE}
            stages[RESULTS] = {"gather": 0, "of": "joined"}
            spec["outputs"] = {RESULTS: FILE}
        return spec

    def _function(self) -> Callable[..., Any] | str:
        from pipedist.worker.mapped import mapped

        data = self._data
        if not (data.is_list or self._loops):
            return self._fn
        form: Literal["tree", "plain", "pickled"] = "tree"
        if data.is_list:
            form = "pickled" if data.is_pickled else "plain"
        return mapped(self._loaded, form, per_element=self._per_element, loops=self._loops)

    @cached_property
    def _loaded(self) -> Callable[..., Any]:
        from pipedist.core.functions import load, reference

        fn = load(reference(self._fn), [os.getcwd()]) if isinstance(self._fn, str) else self._fn
        if not callable(fn):
            raise TypeError(f"map() needs a function, got {fn!r}")
        return fn

    @cached_property
    def _loops(self) -> bool:
        """Whether a call executes its elements in a plain loop, because nothing else is done for each of them."""
        if not self._per_element or self._is_kept or any(self._options.get(name) for name in _OF_ELEMENT):
            return False
        from pipedist.core.functions import call_of, wants_ctx
        from pipedist.worker.mapped import is_async_map

        fn = self._loaded
        called = call_of(fn) if isinstance(fn, type) else fn
        return not (is_async_map(fn) or wants_ctx(called))

    async def results(self) -> Any:
        """Run to the end, and return the results of `map`."""
        parts: list[Tree] = []
        async with self.open() as run:
            if self._is_kept:
                self._was_opened = True
                result = await run.results()
                parts = _stored(result[RESULTS])
            else:
                async for step in run.steps(STAGE):
                    parts += [part for part in step[STAGE] if part is not None]
                result = await run.results()
        return self._together(parts, result)

    async def items(self, run: Run, *, ordered: bool) -> AsyncIterator[Any]:
        """Yield the results of elements, or those of batches."""
        if ordered:
            async for step in run.steps(STAGE):
                for part in step[STAGE]:
                    for item in self._split(part):
                        yield item
        else:
            async for each in run.as_completed(STAGE):
                for item in self._split(each.value):
                    yield item

    def _split(self, part: Tree) -> Iterable[Any]:
        from pipedist.core import trees
        from pipedist.worker.mapped import unpacked

        if part is None:
            return ()
        if self._data.is_list:
            found = (unpacked(each) for each in part)
            return found if self._per_element and not self._loops else chain.from_iterable(found)
        if not self._per_element:
            return (self._framed(part),)
        leaves, structure = trees.flatten(part)
        return (trees.unflatten(structure, row) for row in zip(*leaves, strict=True))

    def _framed(self, value: Tree) -> Any:
        """Return columns as a frame of the library of the data."""
        if not self._data.form or not isinstance(value, dict):
            return value
        from pipedist.datasets.frames import form_of

        return form_of(value, self._data.form)

    def _together(self, parts: Sequence[Tree], result: Result) -> Any:
        from pipedist.errors import FoldError
        from pipedist.values import PerReplica, gather

        if self._data.is_list and self._per_element:
            return _with_places([item for part in parts for item in self._split(part)], result)
        if result.quarantined:
            ids = few([entry["element"] for entry in result.quarantined], IDS_SHOWN)
            warnings.warn(f"quarantined elements have no result: {ids}", stacklevel=2)
        if self._data.is_list:
            return [item for part in parts for item in self._split(part)]
        if not parts:
            return None
        try:
            return self._framed(gather(PerReplica(parts), 0, len(parts)))
        except (TypeError, ValueError) as error:
            raise FoldError(
                STAGE,
                f"the results can't be concatenated: {error}. Return an array with a row for each element, or pass "
                "per_element=True, or use pipedist.imap",
            ) from error


def _with_places(items: list[Any], result: Result) -> list[Any]:
    """Return the results of elements with those that were quarantined in their places."""
    causes = {entry["element"]: entry["cause"] for entry in result.quarantined}
    rest = iter(items)
    count = len(items) + len(causes)
    return [Quarantined(at, causes[at]) if at in causes else next(rest) for at in range(count)]


def _stored(path: Any) -> list[Tree]:
    """Return the values of the calls of a run, in order, from its file."""
    import numpy as np

    from pipedist.worker.mapped import unpacked

    if path is None:
        return []
    with np.load(path, allow_pickle=False) as file:
        if "sizes" not in file:
            return []
        data, ends = file["data"].tobytes(), np.cumsum(file["sizes"]).tolist()
    return [unpacked(data[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def _name(fn: Callable[..., Any] | str) -> str:
    text = fn.partition(":")[2] if isinstance(fn, str) else str(getattr(fn, "__name__", STAGE))
    text = text.rpartition(".")[2]
    return text[:100] if text.isidentifier() else STAGE
