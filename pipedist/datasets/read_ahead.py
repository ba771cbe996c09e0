"""Reading a bounded number of elements ahead, in a thread.

Rules. The thread starts with the first demand, holds at most `buffer` elements that nobody has
taken, and hands them over in order, each exactly once; then the source's end or its error. It ends
when the source does, when the reader is closed, and when nobody holds the reader any more: it knows
only the shared state, never the reader, so that a consumer who walks away leaves no thread behind.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_JOIN_S: Final = 5.0
"""How long `close` waits for a source that is in the middle of an element."""


class _Shared(Generic[T]):
    """What reader and thread share; guarded by `changed`."""

    __slots__ = ("changed", "closed", "error", "items", "over", "told")

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.items: deque[T] = deque()
        self.over = False  # the thread will put nothing more
        self.error: BaseException | None = None  # what the source raised; implies over
        self.closed = False  # the reader wants nothing more
        self.told: list[Callable[[], None]] = []  # called once the reader is ready

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.items.clear()
            self.tell()

    def tell(self) -> None:
        """Wake whoever waits; with `changed` held."""
        self.changed.notify_all()
        told, self.told = self.told, []
        for tell in told:
            tell()


class ReadAhead(Iterator[T]):
    """An iterator over `source` that reads up to `buffer` elements ahead.

    Args:
        source: iterated once, in a thread of its own.
        buffer: how many elements may wait, at least 1.
    """

    def __init__(self, source: Iterable[T], buffer: int) -> None:
        self._source: Iterable[T] | None = source
        self._buffer = buffer
        self._shared: _Shared[T] = _Shared()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._shared.close).atexit = False

    def start(self) -> None:
        """Begin reading, if that has not begun."""
        if self._thread is not None or self._source is None or self._shared.closed:
            return
        source, self._source = self._source, None
        self._thread = threading.Thread(
            target=_read, args=(source, self._buffer, self._shared), name="pipedist-read-ahead", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Block until `ready`; takes nothing, so that giving up the wait loses nothing."""
        self.start()
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self.ready)

    def when_ready(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Have a function called once, as soon as `ready`, in whatever thread makes it so.

        Returns:
            What gives that up; harmless afterwards.
        """
        self.start()
        shared = self._shared
        with shared.changed:
            if self.ready:
                tell()
            else:
                shared.told.append(tell)

        def give_up() -> None:
            with shared.changed:
                if tell in shared.told:
                    shared.told.remove(tell)

        return give_up

    @property
    def ready(self) -> bool:
        """Whether `__next__` would return or raise at once."""
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
        """Stop reading and wait for the thread; elements not yet taken are dropped."""
        self._source = None
        self._shared.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_END: Final = object()


def _has_room(buffer: int, shared: _Shared[T]) -> bool:
    """Wait until one more element may be read; False: the reader was closed."""
    with shared.changed:
        shared.changed.wait_for(lambda: shared.closed or len(shared.items) < buffer)
        return not shared.closed


def _read(source: Iterable[T], buffer: int, shared: _Shared[T]) -> None:
    error: BaseException | None = None
    try:
        iterator = iter(source)
        while _has_room(buffer, shared):
            item = next(iterator, _END)
            if item is _END:
                break
            with shared.changed:
                if not shared.closed:
                    shared.items.append(item)  # type: ignore[arg-type]  # it is not _END
                    shared.tell()
    except BaseException as raised:  # the consumer's thread raises it again, in its place
        error = raised
    with shared.changed:
        shared.error = error
        shared.over = True
        shared.tell()
