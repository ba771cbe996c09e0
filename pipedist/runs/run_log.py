"""The log of a run: `.pipedist/run.log` in its output folder.

It has every line and `logging` record of replica functions, and the events of the engine, in the form

    TIME LEVEL LOGGER STAGE/STEP/REPLICA WORKER: TEXT

which is repeated for each line of the text. TIME is when the line arrived. The level of a printed line is `-`, and
its logger `stdout` or `stderr`. The call of an event is `-`, and its worker `driver`. A resumed run appends. A thread
writes the file, a line at a time, so a kill of the process loses at most the last lines. An error of the file system
ends only the log.

Limits: the file has at most half of RUN_LOG_BYTES_MAX; then it replaces `run.log.1`, and a new one begins. If more
than RECORDS_WAITING_MAX records wait for the file, the next ones are dropped, and a line reports their number.
"""

from __future__ import annotations

import contextlib
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from pipedist.coordinator.notices import LOGGER as CLUSTER_LOGGER
from pipedist.coordinator.notices import as_line
from pipedist.protocol.messages import LogLine

if TYPE_CHECKING:
    from logging.handlers import QueueListener

FILE = "run.log"
LOGGER = "pipedist.run"  # gets the events of a run, at level INFO
RUN_LOG_BYTES_MAX = 64 * 1024 * 1024  # of the two files together
RECORDS_WAITING_MAX = 10_000
RECORD_LINES_MAX = 1_000  # the other lines of a record are dropped
CLOSE_S_MAX = 5.0  # longest time, in seconds, that the waiting records get at the end


class RunLog:
    """The log of a run.

    Args:
        path: the file; None: the run has no folder, and its events go to `logging` only.
        appends: False: the files of an earlier run are deleted.
    """

    def __init__(self, path: Path | None, *, appends: bool = False) -> None:
        self._listener: QueueListener | None = None
        self._dropped = 0
        if path is not None:
            if not appends:
                for old in (path, path.with_name(f"{path.name}.1")):
                    with contextlib.suppress(OSError):  # writing reports it
                        old.unlink()
            self._listener = _listener(path)
            self._listener.start()

    def event(self, text: str, level: int = logging.INFO) -> None:
        """Log an event of the run.

        `level` is that of the file. The logger gets it as information, because the caller of the run gets its errors.
        """
        logging.getLogger(LOGGER).info("pipedist: %s", as_line(text))
        self.write(level, text)

    def write(self, level: int, text: str) -> None:
        """Write an event that the user has got in another way."""
        self._put(level, LOGGER, "-", "driver", text)

    def notice(self, level: int, text: str) -> None:
        """Write a line about a worker or a retry, which was logged already."""
        self._put(level, CLUSTER_LOGGER, "-", "driver", as_line(text))

    def line(self, worker: str, line: LogLine) -> None:
        """Write the output of a replica function."""
        call = f"{line.stage}/{line.step}/{line.replica}" if line.stage else "-"
        self._put(line.level, line.logger, call, worker, line.text)

    def _put(self, level: int, logger: str, call: str, worker: str, text: str) -> None:
        from queue import Full

        if self._listener is None:
            return
        try:
            if self._dropped:
                self._listener.queue.put_nowait(_missing(self._dropped))
                self._dropped = 0
            self._listener.queue.put_nowait(_record(level, logger, call, worker, text))
        except Full:
            self._dropped += 1

    async def aclose(self) -> None:
        """Write the waiting records, and close the file."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            with anyio.move_on_after(CLOSE_S_MAX, shield=True):
                await anyio.to_thread.run_sync(_stop, listener, self._dropped, abandon_on_cancel=True)


def _record(level: int, logger: str, call: str, worker: str, text: str) -> logging.LogRecord:
    record = logging.LogRecord(logger, level, "", 0, text, None, None)
    record.call, record.worker = call, worker
    return record


def _missing(count: int) -> logging.LogRecord:
    text = f"{count:,} records are missing here: they came faster than they can be written"
    return _record(logging.WARNING, LOGGER, "-", "driver", text)


def _listener(path: Path) -> QueueListener:
    from logging.handlers import QueueListener, RotatingFileHandler  # only runs with a folder need it
    from queue import Queue

    class File(RotatingFileHandler):
        has_failed = False

        def emit(self, record: logging.LogRecord) -> None:
            if not self.has_failed:
                super().emit(record)

        def handleError(self, record: logging.LogRecord) -> None:
            import sys

            self.has_failed = True
            cause = sys.exc_info()[1]
            logging.getLogger(LOGGER).warning(
                "pipedist: %s can't be written: %s. The run goes on without it", path, cause
            )

    class Listener(QueueListener):
        def enqueue_sentinel(self) -> None:
            queue.put(None)  # waits if the queue is full

    queue: Queue[logging.LogRecord | None] = Queue(RECORDS_WAITING_MAX)
    file = File(
        path,
        maxBytes=RUN_LOG_BYTES_MAX // 2,
        backupCount=1,
        encoding="utf-8",
        errors="backslashreplace",
        delay=True,
    )
    file.setFormatter(_Formatter())
    return Listener(queue, file)


def _stop(listener: QueueListener, dropped: int) -> None:
    listener.stop()
    if dropped:
        listener.handle(_missing(dropped))
    for file in listener.handlers:
        with contextlib.suppress(OSError):  # it was reported
            file.close()


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        level = logging.getLevelName(record.levelno).removeprefix("Level ") if record.levelno else "-"
        columns = (level, record.name, getattr(record, "call", "-"), getattr(record, "worker", "driver"))
        words = ["".join("_" if c.isspace() else c for c in column) or "-" for column in columns]
        head = f"{at}Z {' '.join(words)}: "
        lines = str(record.msg).splitlines() or [""]
        kept = lines[:RECORD_LINES_MAX]
        if len(kept) < len(lines):
            kept.append(f"[{len(lines) - len(kept):,} more lines]")
        return "\n".join(head + line for line in kept)
