"""Who is told what replica functions print."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress

from pipedist.protocol import messages as msg

LogSink = Callable[[str, msg.LogLine], None]
"""Takes a line that a replica function printed: (worker, line)."""


class LogSinks:
    """Passes each line on to all sinks; to `sys.stderr` while there is none."""

    def __init__(self) -> None:
        self._sinks: dict[int, LogSink] = {}
        """By number: the same function may be there twice."""
        self._added = 0

    def __len__(self) -> int:
        return len(self._sinks)

    def add(self, sink: LogSink) -> Callable[[], None]:
        """Tell a sink every line from now on.

        Returns:
            What ends it; harmless twice.
        """
        self._added += 1
        number = self._added
        self._sinks[number] = sink

        def end() -> None:
            self._sinks.pop(number, None)

        return end

    def tell(self, worker: str, line: msg.LogLine) -> None:
        """Pass a line on; a sink that raises is told nothing more."""
        if not self._sinks:
            _print_line(worker, line)
        for number, sink in tuple(self._sinks.items()):
            try:
                sink(worker, line)
            except Exception as error:  # it must not cost the others their line, nor a run its results
                self._sinks.pop(number, None)  # it may have ended itself before
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"the log sink {sink!r} raised, and is told nothing more", "exception": error}
                )


def _print_line(worker: str, line: msg.LogLine) -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            sys.stderr.write(f"[{line.stage} {line.step} {line.replica} {worker}] {line.text}\n")
