"""What replica functions print or log, as messages that name the call.

In a worker, `sys.stdout` and `sys.stderr` are streams of this module (so `print`, `logging`'s
default handler and `warnings` all end here). A line belongs to the call whose code wrote it, also
where async calls overlap. What is written below Python, to the descriptors, goes to the driver's
stderr as it is; so do lines of a copy of the worker (`os.fork`, `multiprocessing`): the connection is not
its own.

Limits: a line is cut at `line_chars_max`; beyond `lines_per_s_max` (after a burst of as many)
lines are dropped, and counted in a line of their own.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TextIO

from msgspec import Struct

from pipedist.protocol.messages import LogLine
from pipedist.worker.context import current

_Origin = tuple[str, int, int]
_NOWHERE: _Origin = ("", 0, 0)
"""Of lines that no call wrote: in a thread of the user's."""

importer: ContextVar[_Origin] = ContextVar("pipedist_importer", default=_NOWHERE)
"""The call for whose sake a stage's module is being imported: the lines that the module prints are its."""


class OutputLimits(Struct, frozen=True):
    """How much a worker may print.

    Args:
        line_chars_max: characters of a line; the rest of it is left out.
        lines_per_s_max: lines a second; a burst may have as many at once.
        origins_max: calls with an unfinished line at one time.
    """

    line_chars_max: int = 4096
    lines_per_s_max: int = 500
    origins_max: int = 256


class OutputCapture:
    """Turns text into lines, and lines into LogLine messages.

    Args:
        send: takes each message, from whichever thread wrote the line.
        limits: how much.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        send: Callable[[LogLine], None],
        limits: OutputLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._limits = limits or OutputLimits()
        self._clock = clock
        self._lock = threading.RLock()  # a destructor may print in the middle of a print
        self._partial: dict[_Origin, str] = {}
        self._allowance = float(self._limits.lines_per_s_max)
        self._refilled_at = clock()
        self._dropped = 0
        self._dropped_of: _Origin = _NOWHERE
        self._is_copy = False

    def install(self) -> None:
        """Replace sys.stdout and sys.stderr of this process, and of its copies."""
        sys.stdout = CapturedStream(self, sys.__stderr__)
        sys.stderr = CapturedStream(self, sys.__stderr__)
        os.register_at_fork(after_in_child=self._serve_copy)

    def _serve_copy(self) -> None:
        # The lock may be held by a thread that is not here, an unfinished line is the worker's to finish.
        self._lock = threading.RLock()
        self._partial = {}
        self._send = _write_down
        self._limits = OutputLimits(lines_per_s_max=sys.maxsize)  # nothing travels
        self._is_copy = True

    def write(self, text: str) -> None:
        """Take in text that the running call has written."""
        context = current.get()
        origin = importer.get()
        if context is not None:
            origin = (context.stage, context.step, context.replica_id_in_sync_group)
        with self._lock:
            text = self._partial.pop(origin, "") + text
            *lines, rest = text.split("\n")
            for line in lines:
                self._line(origin, line)
            if rest:
                self._keep(origin, rest)

    def flush(self) -> None:
        """Write the unfinished lines of a copy: nobody tells it when the call that wrote them is over."""
        if self._is_copy:
            self.finish()

    def finish(self) -> None:
        """Send unfinished lines, and how many were dropped: the calls that wrote them are over."""
        if not self._partial and not self._dropped:
            return
        with self._lock:
            partial, self._partial = self._partial, {}
            for origin, text in partial.items():
                self._line(origin, text)
            self._tell_dropped(self._dropped_of)

    def _keep(self, origin: _Origin, rest: str) -> None:
        if len(self._partial) >= self._limits.origins_max:
            oldest = next(iter(self._partial))
            self._line(oldest, self._partial.pop(oldest))
        # What is beyond the limit will be left out anyway; its length is not worth the memory.
        self._partial[origin] = rest[: self._limits.line_chars_max + 1]

    def _line(self, origin: _Origin, line: str) -> None:
        now = self._clock()
        most = self._limits.lines_per_s_max
        self._allowance = min(most, self._allowance + (now - self._refilled_at) * most)
        self._refilled_at = now
        if self._allowance < 1:
            self._dropped += 1
            self._dropped_of = origin
            return
        self._allowance -= 1
        self._tell_dropped(origin)
        if len(line) > self._limits.line_chars_max:
            line = line[: self._limits.line_chars_max] + " [the rest of the line is left out]"
        # A lone surrogate has no UTF-8 form, and a print must not fail for that.
        line = line.encode("utf-8", "backslashreplace").decode("utf-8")
        self._send(LogLine(*origin, line))

    def _tell_dropped(self, origin: _Origin) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            most = self._limits.lines_per_s_max
            self._send(LogLine(*origin, f"[{dropped} lines dropped: more than {most} lines a second]"))


def _write_down(line: LogLine) -> None:
    """Write a line to the process's stderr, in one piece: several copies may do so at once."""
    call = f"[{line.stage} {line.step} {line.replica}] " if line.stage else ""
    os.write(2, f"{call}{line.text}\n".encode())


class CapturedStream(io.TextIOBase):
    """A text stream that feeds an OutputCapture.

    Args:
        capture: where text goes.
        beneath: the stream whose descriptor child processes get.
    """

    def __init__(self, capture: OutputCapture, beneath: TextIO | None) -> None:
        super().__init__()
        self._capture = capture
        self._beneath = beneath

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the base class has a plain attribute
        """The encoding that the text would have."""
        return "utf-8"

    def writable(self) -> bool:
        """Whether it can be written: always."""
        return True

    def write(self, text: str) -> int:
        """Take in text; return its length."""
        self._capture.write(text)
        return len(text)

    def flush(self) -> None:
        """See `OutputCapture.flush`; what a worker writes goes as it comes."""
        self._capture.flush()

    def fileno(self) -> int:
        """Return the descriptor of the driver's stderr.

        Raises:
            io.UnsupportedOperation: if the process has none.
        """
        if self._beneath is None:
            raise io.UnsupportedOperation("fileno")
        return self._beneath.fileno()
