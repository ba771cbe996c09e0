"""Streams of a run without `async`: `for step in pipedist.stream(spec, "stage")`.

The run executes in the event loop of a thread, or of an open cluster, and makes one item for each that is asked for.
It ends with the stream: after the last item, with `close`, with a `with` block, or when the stream is dropped. A loop
drops its stream when it is left, also by an exception or Ctrl-C; so does the end of the process.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack, overload

from pipedist.core.import_guard import caller_is_waiting, reject_during_import, without_collections
from pipedist.core.misuse_hints import running_loop
from pipedist.runs import api

if TYPE_CHECKING:
    import anyio

    from pipedist.runs.api import OpenOptions
    from pipedist.runs.result import Result
    from pipedist.runs.run import Run, SpecLike
    from pipedist.runs.subscription import Part, Step

T = TypeVar("T")

Outcome = tuple[Literal["item", "end", "error"], Any]


class RunReader(Generic[T]):
    """Reads the stream of a run on demand, in one task of an event loop.

    Args:
        opened: opens the run.
        stream_of: returns its stream; it begins the run.
        deliver: called on the event loop with each outcome; the last one is "end" or "error".
    """

    def __init__(
        self,
        opened: Callable[[], Run],
        stream_of: Callable[[Run], AsyncIterator[T]],
        deliver: Callable[[Outcome], object],
    ) -> None:
        self._opened = opened
        self._stream_of = stream_of
        self._deliver = deliver
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scope: anyio.CancelScope | None = None
        self._wanted: asyncio.Semaphore | None = None
        self._is_cancelled = False
        self.result: Result | None = None

    async def main(self) -> None:
        """Read the stream to its end; one item is wanted at the beginning, and one more with each `request`."""
        import anyio

        with anyio.CancelScope() as scope:
            self._loop, self._wanted, self._scope = asyncio.get_running_loop(), asyncio.Semaphore(1), scope
            if self._is_cancelled:
                scope.cancel()
            try:
                async with self._opened() as run:
                    await self._read(run, self._wanted)
            except Exception as error:
                self._deliver(("error", error))
                return
        self._deliver(("end", None))

    async def _read(self, run: Run, wanted: asyncio.Semaphore) -> None:
        stream = self._stream_of(run)
        while True:
            await wanted.acquire()
            try:
                item = await anext(stream)
            except StopAsyncIteration:
                self.result = await run.results()
                return
            self._deliver(("item", item))

    def request(self) -> None:
        """Ask for another item; from any thread."""
        if self._loop is not None and self._wanted is not None:
            with suppress(RuntimeError):  # if the loop is closed, the waiting caller finds out
                self._loop.call_soon_threadsafe(self._wanted.release)

    def cancel(self) -> None:
        """End the run, from any thread."""
        self._is_cancelled = True
        if self._loop is not None and self._scope is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._scope.cancel)

    @property
    def is_lost(self) -> bool:
        """Whether its event loop is closed, so that there is no further outcome."""
        return self._loop is not None and self._loop.is_closed()


class SyncStream(Generic[T]):
    """An iterator over the items of a run, as `pipedist.stream` and `pipedist.imap` return it.

    Args:
        opened: opens the run, in the event loop in which it executes.
        stream_of: returns the stream of the run.
        loop: the event loop of an open cluster; None: one in a thread of the stream.

    Example:
        >>> with pipedist.stream("spec.yaml", "loss") as steps:
        ...     for step in steps:
        ...         if step["loss"] < 0.1:
        ...             break
    """

    def __init__(
        self,
        opened: Callable[[], Run],
        stream_of: Callable[[Run], AsyncIterator[T]],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._reader = RunReader(opened, stream_of, self._outcomes.put)
        self._is_over = False
        self._has_begun = False
        self._body = _Body(self._reader, loop)
        # The body does not know the stream, so it outlives a stream that is dropped, and is closed by that.
        self._closing = weakref.finalize(self, self._body.close)

    def __iter__(self) -> SyncStream[T]:
        return self

    def __next__(self) -> T:
        """Return the next item.

        Raises:
            StopIteration: there is none.
            Exception: the error of the run, as `Run.results` raises it.
        """
        if self._is_over:
            raise StopIteration
        try:
            if self._has_begun:
                self._reader.request()
            else:
                self._has_begun = True
                self._body.start()
            kind, value = self._outcome()
        except BaseException:  # Ctrl-C: the run must not outlive its caller
            self.close()
            raise
        if kind == "item":
            item: T = value
            return item
        self.close()
        if kind == "error":
            raise api.without_frames(value)
        raise StopIteration

    def _outcome(self) -> Outcome:
        while True:
            api.take_cancellation()
            # In intervals: a signal that arrives in another thread does not interrupt the wait.
            with suppress(queue.Empty):
                return self._outcomes.get(timeout=api.TURN_S)
            if self._reader.is_lost:
                from pipedist.errors import RunCancelled

                raise RunCancelled("the event loop of the cluster ended during the run")

    def close(self) -> None:
        """End the run, and wait until its workers have ended; harmless twice."""
        self._is_over = True
        self._closing()

    @property
    def result(self) -> Result:
        """The results of the run, after the last item.

        Raises:
            UsageError: the stream has not been read to its end.
        """
        if self._reader.result is None:
            from pipedist.errors import UsageError

            raise UsageError(
                "the results of a run are there after the last item of its stream: read all of them"
            )
        return self._reader.result

    def __enter__(self) -> SyncStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Body:
    """The thread, or the task of an open cluster's loop, in which a stream's run executes."""

    def __init__(self, reader: RunReader[Any], loop: asyncio.AbstractEventLoop | None) -> None:
        self._reader = reader
        self._loop = loop
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._loop is not None:
            future = asyncio.run_coroutine_threadsafe(self._reader.main(), self._loop)
            future.add_done_callback(lambda _: self._ended.set())
            return
        # A daemon: at the end of the process the stream is closed, which ends the thread.
        self._thread = threading.Thread(target=self._run, name="pipedist-stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        import anyio

        caller_is_waiting.set(True)
        anyio.run(self._reader.main)

    def close(self) -> None:
        self._reader.cancel()
        # In intervals, for a signal. The last reference may have been dropped by the run's own thread, which can't
        # wait for itself.
        if self._loop is not None:
            while running_loop() is not self._loop and not self._reader.is_lost:
                if self._ended.wait(api.TURN_S):
                    return
        elif self._thread is not None and self._thread.ident is not None:
            while self._thread is not threading.current_thread() and self._thread.is_alive():
                self._thread.join(api.TURN_S)


@overload
def stream(
    spec: SpecLike, *stages: str, ordered: Literal[True] = True, **options: Unpack[OpenOptions]
) -> SyncStream[Step]: ...


@overload
def stream(
    spec: SpecLike, *stages: str, ordered: Literal[False], **options: Unpack[OpenOptions]
) -> SyncStream[Part]: ...


def stream(
    spec: SpecLike, *stages: str, ordered: bool = True, **options: Unpack[OpenOptions]
) -> SyncStream[Any]:
    """Run a spec, and iterate over its steps in a plain `for` loop.

    The run begins with the first item, and ends with the loop, also if that is left early. A slow loop makes the run
    wait. It can also be called inside a running event loop, which it blocks for each item.

    Args:
        stages: run, reduce or gather stages of one pass, as for `Run.steps`.
        ordered: yield a `Step` for each step, in order. False: a `Part` for each replica and step, as they arrive, of
            run stages, as `Run.as_completed` does.
        spec, options: as for `open`.

    Returns:
        An iterator, which is a context manager too. After the last item, its `result` has the results of the run.

    Raises:
        SpecError, PlanError, UsageError, CallError, FoldError, OutputError, WorkersLost: with the next item, as `open`,
            `Run.steps` and `Run.results` raise them.

    Example:
        >>> for step in pipedist.stream("spec.yaml", "loss"):
        ...     print(step.index, step["loss"])
    """
    reject_during_import("pipedist.stream")
    loop = api.loop_of(options.get("cluster"), "pipedist.stream")
    with without_collections():
        return SyncStream(
            lambda: api.open(spec, **options),
            lambda run: run.steps(*stages) if ordered else run.as_completed(*stages),
            loop,
        )
