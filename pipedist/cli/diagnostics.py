"""Explain what a run waits for: `pipedist why`, SIGUSR1, and by itself after a long standstill.

The signal's handler is a plain one, as in `interruption`. The explanation is made in the event loop: the
scheduler's state is consistent only between two events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from pipedist.cli import exits
from pipedist.cli.streams import write_out
from pipedist.errors import UsageError

SIGNAL = signal.SIGUSR1
REPLY_S = 10.0
"""Time for a run to reply to `pipedist why`."""


class Explainable(Protocol):
    """A run that can explain what it waits for."""

    @property
    def silent_s(self) -> float:
        """Seconds since the run last made progress."""

    def why(self) -> Mapping[str, Any]:
        """Return what the run waits for."""


class StallTimer:
    """Decides when a standstill is reported: after a time, then each time it has doubled.

    Args:
        first_s: seconds without progress until the first report.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._next_s = first_s

    def is_due(self, silent_s: float) -> bool:
        """Return whether to report now; True once per threshold."""
        if silent_s < self._first_s:
            self._next_s = self._first_s  # the run has made progress
            return False
        if silent_s < self._next_s:
            return False
        while self._next_s <= silent_s:
            self._next_s *= 2
        return True


class StallReporter:
    """Reports what a run waits for; its context handles SIGUSR1, in the main thread only.

    Args:
        show: prints lines for the user.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self._run: Explainable | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer = StallTimer(1.0)
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(SIGNAL, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(SIGNAL, self._before)

    @contextlib.contextmanager
    def watching(self, run: Explainable, stall_s: float) -> Iterator[None]:
        """Report on this run while the context is open, inside its event loop."""
        self._loop = asyncio.get_running_loop()
        self._run = run
        self._timer = StallTimer(stall_s)
        try:
            yield
        finally:
            self._run = None

    def check(self) -> None:
        """Report if the run has made no progress for long; called periodically."""
        if self._run is not None and self._timer.is_due(self._run.silent_s):
            self.explain()

    def explain(self) -> None:
        """Print what the run waits for."""
        from pipedist.runs.diagnostics import lines

        if self._run is None:
            self.show("pipedist: the run has not started")
        else:
            self.show("\n".join(["pipedist: this run waits for:", *lines(dict(self._run.why()))]))

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._run is None or self._loop is None or self._loop.is_closed():
            self.show("pipedist: the run has not started, or is over")
        else:
            self._loop.call_soon_threadsafe(self.explain)


def explain_run(run: str, *, as_json: bool) -> int:
    """Print what the run in an output folder waits for.

    Args:
        run: the output folder.
        as_json: print one JSON document instead of lines.

    Returns:
        0; 1 if the run is not executing, and a summary of its journal was printed.

    Raises:
        UsageError: there is no run in the folder, or it does not reply.
    """
    from pipedist.outputs.run_record import LIVE, PRIVATE, read_record
    from pipedist.runs.diagnostics import VERSION, lines, query_status

    path = Path(run)
    record = read_record(path, path)
    if record is None:
        raise UsageError(
            f"there is no run in {path}. RUN is the output folder of a run, such as out/NAME. A run without "
            "outputs has none: use kill -USR1 PID, and read its standard error"
        )
    reply = query_status(path / PRIVATE / LIVE, REPLY_S)
    if reply is not None:
        try:
            status: dict[str, Any] = json.loads(reply)
        except ValueError:
            raise UsageError(f"the run in {path} ended while it replied. Try again") from None
        if status.get("pipedist_why") != VERSION:
            raise UsageError(
                f"the run in {path} uses another version of pipedist. Use that version's `pipedist why`"
            )
        write_out((reply.decode() if as_json else "\n".join(lines(status))) + "\n")
        return exits.OK
    state = record.state if record.state in ("finished", "failed") else "unfinished"
    journal = _journal(path / PRIVATE / "journal", finished=state == "finished")
    status = {"pipedist_why": VERSION, "run": record.run, "state": state, "journal": journal}
    write_out((json.dumps(status) if as_json else "\n".join([_ended(status, path), *journal])) + "\n")
    return exits.FAILED


def _ended(status: dict[str, Any], path: Path) -> str:
    reason = {
        "finished": "has finished: it waits for nothing",
        "failed": "has failed. Fix the problem, then rerun with --resume",
        "unfinished": "is not executing: no process on this host replies (it was interrupted or killed, or it "
        "runs on another host). Continue it with --resume",
    }
    return f"run {status['run']} in {path} {reason[status['state']]}"


def _journal(folder: Path, *, finished: bool) -> list[str]:
    from pipedist.journal.audit import audit
    from pipedist.outputs.run_record import is_there

    if not is_there(folder / "journal", folder.parent.parent):
        return ["it has no journal"]
    return audit(folder, finished=finished).lines()
