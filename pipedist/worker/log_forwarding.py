"""Forwarding of printed and logged lines to the scheduler, as messages that name the call.

In a worker, `sys.stdout` and `sys.stderr` are streams of this module, so `print`, the handlers of `logging` and
`warnings` all end here. A line belongs to the call whose code wrote it, also if async calls overlap. Output
below Python, to the descriptors, goes to the driver's stderr unchanged; so do the lines of a copy of the worker
(`os.fork`, `multiprocessing`), which has no connection of its own.

A `logging` record is one message, which keeps its level and the name of its logger. User code configures `logging`
as in any process: the worker has no handler on any logger, and replaces only `logging.lastResort`, which gets the
records of loggers without handlers. Text that a `logging.StreamHandler` of the user writes to `sys.stdout` or
`sys.stderr` is recognized as a record, in the handler's format.

Only one thread at a time uses the socket: the one that holds the driver's lock. A thread that prints does not
wait for the lock: the line is sent at once if the socket is free, else by the thread that uses it.

As in a terminal, a carriage return overwrites the line before it: a progress bar is one line, its last state.

Limits: a line is cut at `line_chars_max`; above `lines_per_s_max` (after a burst of the same size) lines are
dropped, and a line of its own reports their number. A record is cut at `record_chars_max`, and counts as one
line. At most LOG_LINES_WAITING_MAX lines wait for the socket.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Protocol, TextIO

from msgspec import Struct

from pipedist.core.token_bucket import TokenBucket
from pipedist.protocol.codec import Frame
from pipedist.protocol.messages import LogLine, Message, Retried
from pipedist.transport.dealer import ConnectionLost
from pipedist.worker.context import get_replica_context

_Origin = tuple[str, int, int]
_STDOUT = "stdout"
_LEVEL_MAX = 1_000_000  # a higher level of a record is sent as this one
_NO_CALL: _Origin = ("", 0, 0)  # origin of lines that no call wrote: lines of a thread that user code started

importer: ContextVar[_Origin] = ContextVar("pipedist_importer", default=_NO_CALL)  # whose module is imported


class OutputLimits(Struct, frozen=True):
    """Limits of a worker's output."""

    line_chars_max: int = 4096  # the rest of a line is cut
    record_chars_max: int = 16 * 1024  # the rest of a `logging` record is cut
    lines_per_s_max: int = 500  # a burst may have the same number at once
    origins_max: int = 256  # calls with an unfinished line at one time


def _visible(line: str) -> str:
    """Return what a terminal shows of a line: the text after its last carriage return, unless that ends it."""
    return line[line.rstrip("\r").rfind("\r") + 1 :]


class OutputCapture:
    """Splits text into lines, and sends each as a LogLine, from any thread."""

    def __init__(
        self,
        send: Callable[[LogLine], None],
        limits: OutputLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._limits = limits or OutputLimits()
        self._lock = threading.RLock()  # reentrant: a destructor may print in the middle of a print
        self._partial: dict[tuple[_Origin, str], str] = {}  # by call and stream
        self._rate = TokenBucket(self._limits.lines_per_s_max, self._limits.lines_per_s_max, clock)
        self._dropped_of: _Origin = _NO_CALL
        self._is_copy = False

    def install(self) -> None:
        """Replace sys.stdout, sys.stderr and logging.lastResort of this process and of its copies."""
        sys.stdout = CapturedStream(self, sys.__stderr__)
        sys.stderr = CapturedStream(self, sys.__stderr__, "stderr")
        logging.lastResort = RecordHandler(self)
        os.register_at_fork(after_in_child=self._become_copy)

    def _become_copy(self) -> None:
        # The lock may belong to a thread that the copy does not have; the worker finishes its own lines.
        self._lock = threading.RLock()
        self._partial = {}
        self._send = _write_to_stderr
        self._limits = OutputLimits()
        self._rate = TokenBucket(sys.maxsize, sys.maxsize)  # nothing is sent
        self._is_copy = True

    def write(self, text: str, stream: str = _STDOUT) -> None:
        """Handle text that the running call has written."""
        place = (_origin(), stream)
        with self._lock:
            text = self._partial.pop(place, "") + text
            *lines, rest = text.split("\n")
            for line in lines:
                self._line(*place, line)
            if rest:
                if len(self._partial) >= self._limits.origins_max:
                    oldest = next(iter(self._partial))
                    self._line(*oldest, self._partial.pop(oldest))
                rest = _visible(rest)
                self._partial[place] = rest[: self._limits.line_chars_max + 1]  # the rest is cut anyway

    def write_record(self, record: logging.LogRecord, text: str) -> None:
        """Handle a `logging` record of the running call, formatted as `text`."""
        level = min(max(int(record.levelno), 1), _LEVEL_MAX)
        with self._lock:
            self._send_limited(_origin(), text, self._limits.record_chars_max, level, str(record.name)[:200])

    def flush(self) -> None:
        """Write the unfinished lines of a copy: `finish` is not called in a copy."""
        if self._is_copy:
            self.finish()

    def finish(self) -> None:
        """Send unfinished lines, and the number of dropped ones."""
        if not self._partial and not self._rate.denied:
            return
        with self._lock:
            partial, self._partial = self._partial, {}
            for place, text in partial.items():
                self._line(*place, text)
            self._report_dropped(self._dropped_of)

    def _line(self, origin: _Origin, stream: str, line: str) -> None:
        self._send_limited(origin, _visible(line).rstrip("\r"), self._limits.line_chars_max, 0, stream)

    def _send_limited(self, origin: _Origin, text: str, chars_max: int, level: int, logger: str) -> None:
        if not self._rate.allows():
            self._dropped_of = origin
            return
        self._report_dropped(origin)
        if len(text) > chars_max:
            text = text[:chars_max] + f" [{'record' if level else 'line'} cut]"
        # A lone surrogate has no UTF-8 form; a print must not fail for that.
        text, logger = (each.encode("utf-8", "backslashreplace").decode("utf-8") for each in (text, logger))
        self._send(LogLine(*origin, text, level, logger))

    def _report_dropped(self, origin: _Origin) -> None:
        if dropped := self._rate.take_denied():
            most = self._limits.lines_per_s_max
            text = f"[{dropped} lines dropped: more than {most} lines a second]"
            self._send(LogLine(*origin, text, logging.WARNING, "pipedist.worker"))


def _origin() -> _Origin:
    context = get_replica_context()
    if context is None:
        return importer.get()
    return (context.stage, context.step, context.replica_id_in_sync_group)


class RecordHandler(logging.Handler):
    """Forwards `logging` records."""

    def __init__(self, capture: OutputCapture) -> None:
        super().__init__()
        self._capture = capture

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._capture.write_record(record, self.format(record))
        except Exception:  # as any handler of `logging`: its arguments don't fit its text
            self.handleError(record)


def _write_to_stderr(line: LogLine) -> None:
    """Write a line to stderr in one system call, as copies may write at once."""
    call = f"[{line.stage} {line.step} {line.replica}] " if line.stage else ""
    os.write(2, f"{call}{line.text}\n".encode())


_STREAM_HANDLER = logging.StreamHandler.emit.__code__  # what writes a user's records to a stream


class CapturedStream(io.TextIOBase):
    """A text stream that feeds an OutputCapture.

    `beneath` is the stream whose descriptor child processes inherit.
    """

    encoding = "utf-8"

    def __init__(self, capture: OutputCapture, beneath: TextIO | None, name: str = _STDOUT) -> None:
        super().__init__()
        self._capture = capture
        self._name = name
        self._beneath = beneath

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        writer = sys._getframe(1)
        if writer.f_code is _STREAM_HANDLER:
            self._capture.write_record(writer.f_locals["record"], text.removesuffix("\n"))
        else:
            self._capture.write(text, self._name)
        return len(text)

    def flush(self) -> None:
        """Flush the lines of a copy; a worker's lines are sent at once."""
        self._capture.flush()

    def fileno(self) -> int:
        """Return the descriptor of the driver's stderr."""
        if self._beneath is None:
            raise io.UnsupportedOperation("fileno")
        return self._beneath.fileno()


# -- the connection ----------------------------------------------------------------------

LOG_LINES_WAITING_MAX = 1000  # maximum number of lines that wait for the socket; the oldest are dropped first


class Socket(Protocol):
    """The methods of `pipedist.transport.dealer.Dealer` that a worker uses."""

    def send(
        self, message: Message, payload: Sequence[Frame] = (), *, copy: bool = True, timeout_s: float = 60.0
    ) -> None:
        """Send a message; `copy` False: the payload's memory never changes again."""

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message; return False if none has arrived in time."""

    def recv(self) -> tuple[Message, list[memoryview]]: ...

    def fileno(self) -> int:
        """Return a file that becomes readable when a message arrives; -1: there is none."""


class LogForwarder:
    """Lines that wait for the socket, and the error that broke the connection.

    `lock` is held by the thread that uses the socket.
    """

    def __init__(self, socket: Socket, lock: threading.Lock) -> None:
        self._socket = socket
        self._lock = lock
        self.lines: deque[LogLine | Retried] = deque(maxlen=LOG_LINES_WAITING_MAX)
        self._closed = False
        self.fault: BaseException | None = None  # of the connection; the main thread raises it afterwards

    def put(self, line: LogLine | Retried) -> None:
        """Send a line at once if the socket is free, else queue it."""
        self.lines.append(line)
        if self.fault is None and self._lock.acquire(blocking=False):
            try:
                self.send_lines()
            except ConnectionLost as error:  # not an error of the code that prints
                self.fault = error
            finally:
                self._lock.release()

    def send_lines(self) -> None:
        """Send the waiting lines; the caller holds the lock."""
        while self.lines and not self._closed:
            self._socket.send(self.lines.popleft(), timeout_s=math.inf)

    def close(self) -> None:
        """Send no more lines; the caller holds the lock."""
        self._closed = True
