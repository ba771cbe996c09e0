"""Reads a bounded number of elements ahead, in a thread.

- The thread starts at the first demand, and buffers at most `buffer` elements.
- Elements are delivered in order, each exactly once; then the source's end or its error.
- The thread ends with the source, when the reader is closed, and when the reader is collected: it
  references only the shared state, so an abandoned reader leaves no thread.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_JOIN_S: Final = 5.0  # time that `close` waits for a source that is reading an element


class _Shared(Generic[T]):
    """The state shared by reader and thread, guarded by `changed`."""

    __slots__ = ("callbacks", "changed", "closed", "error", "items", "over")

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.items: deque[T] = deque()
        self.over = False  # the thread adds no more items
        self.error: BaseException | None = None  # raised by the source; implies over
        self.closed = False  # the reader takes no more items
        self.callbacks: list[Callable[[], None]] = []  # called once when the reader is ready

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.items.clear()
            self.notify()

    def notify(self) -> None:
        """Wake all waiting threads and call the callbacks; with `changed` held."""
        self.changed.notify_all()
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class ReadAhead(Iterator[T], AbstractContextManager["ReadAhead[T]"]):
    """An iterator that reads up to `buffer` (>= 1) elements of `source` ahead, in a thread of its own."""

    def __init__(self, source: Iterable[T], buffer: int) -> None:
        self._source: Iterable[T] | None = source
        self._buffer = buffer
        self._shared: _Shared[T] = _Shared()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._shared.close).atexit = False

    def start(self) -> None:
        if self._thread is not None or self._source is None or self._shared.closed:
            return
        source, self._source = self._source, None
        self._thread = threading.Thread(
            target=_read, args=(source, self._buffer, self._shared), name="pipedist-read-ahead", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Block until `ready`; takes no element, so an abandoned wait loses none."""
        self.start()
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self.ready)

    def when_ready(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call a function once, as soon as `ready`, in the thread that makes it so; return its cancellation."""
        self.start()
        shared = self._shared
        with shared.changed:
            if self.ready:
                callback()
            else:
                shared.callbacks.append(callback)

        def cancel() -> None:
            with shared.changed:
                if callback in shared.callbacks:
                    shared.callbacks.remove(callback)

        return cancel

    @property
    def ready(self) -> bool:
        """Whether `__next__` returns or raises without waiting."""
        shared = self._shared
        return bool(shared.items) or shared.over or shared.closed

    def __next__(self) -> T:
        self.wait()
        shared = self._shared
        with shared.changed:
            if shared.items:
                item = shared.items.popleft()
                shared.changed.notify_all()
                return item
            error, shared.error = shared.error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Stop reading and wait for the thread; buffered elements are dropped."""
        self._source = None
        self._shared.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def __exit__(self, *raised: object) -> None:
        self.close()


_END: Final = object()


def _read(source: Iterable[T], buffer: int, shared: _Shared[T]) -> None:
    error: BaseException | None = None
    try:
        iterator = iter(source)
        while True:
            with shared.changed:
                shared.changed.wait_for(lambda: shared.closed or len(shared.items) < buffer)
                if shared.closed:
                    break
            item = next(iterator, _END)
            if item is _END:
                break
            with shared.changed:
                if not shared.closed:
                    shared.items.append(item)  # type: ignore[arg-type]  # it is not _END
                    shared.notify()
    except BaseException as raised:  # raised again in the consumer's thread
        error = raised
    with shared.changed:
        shared.error = error
        shared.over = True
        shared.notify()
