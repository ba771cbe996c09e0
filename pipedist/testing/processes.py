"""Runs a function in several processes, and says what came of each one.

Each process is a fresh interpreter, started by exec, in a session of its own: so a function that kills,
exits or hangs hurts nobody else. The function travels by name where it can be imported, else by value
(cloudpickle); what it returns travels as results of replica functions do, never as a pickle.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipedist.core.record_format import frames_of, pack, record_at
from pipedist.core.types import Tree
from pipedist.errors import PipedistError, UsageError

PROCESSES_MAX = 256

TEXT_CHARS_MAX = 2000
"""Of a process's output, as it is shown in an error."""


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """What came of one process.

    Args:
        worker: its number.
        value: what the function returned; None where it did not.
        stdout, stderr: everything that was written there, by Python or below it.
        exception: "ValueError: text", "" where the function raised nothing.
        traceback: of the exception.
        exit_code: of the process; None where a signal ended it.
        signal: that ended it; None where it exited.
        timed_out: it was killed because it took too long.
    """

    worker: int
    value: Tree
    stdout: str
    stderr: str
    exception: str = ""
    traceback: str = ""
    exit_code: int | None = 0
    signal: int | None = None
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Whether the function returned, and the process ended well."""
        return not self.exception and self.exit_code == 0 and not self.timed_out

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        if self.timed_out:
            return "it took too long, and was killed"
        if self.exception:
            return self.exception
        if self.signal is not None:
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        return "returned" if self.exit_code == 0 else f"exit code {self.exit_code}"


class ProcessesFailed(PipedistError):
    """At least one process did not end well.

    Args:
        outcomes: of all processes, those that did included.
    """

    def __init__(self, outcomes: Sequence[ProcessOutcome]) -> None:
        self.outcomes = tuple(outcomes)
        bad = [x for x in self.outcomes if not x.ok]
        lines = [f"{len(bad)} of {len(self.outcomes)} processes failed"]
        for outcome in bad:
            lines.append(f"process {outcome.worker}: {outcome.ending}")
            for text in (outcome.traceback, outcome.stderr):
                if text.strip():
                    lines.append("  " + text.strip()[-TEXT_CHARS_MAX:].replace("\n", "\n  "))
        super().__init__("\n".join(lines))


def run_in_processes(
    fn: Callable[..., Tree] | str,
    *,
    workers: int,
    args: Sequence[Tree] = (),
    kwargs: Mapping[str, Tree] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    check: bool = True,
) -> list[ProcessOutcome]:
    """Run a function once in each of several processes, side by side.

    Args:
        fn: a function, or "module:name". One with a parameter called `worker` gets its process's
            number, from 0, by keyword.
        workers: how many processes.
        args, kwargs: for every call.
        environment: variables that the processes have beside ours.
        timeout_s: processes that have not ended after so many seconds are killed.
        check: raise if one of them does not end well.

    Returns:
        What came of each process, by number.

    Raises:
        UsageError: a number makes no sense.
        UnsendableError: an argument can't be sent.
        ProcessesFailed: a process raised, exited, was ended by a signal or took too long; the error
            has the outcomes of all.
    """
    __tracebackhide__ = True  # of a test that fails, what the test says is of interest
    from pipedist.core import functions
    from pipedist.protocol.codec import encode

    if isinstance(workers, bool) or not 1 <= workers <= PROCESSES_MAX:
        raise UsageError(f"{workers!r} processes: expected an integer from 1 to {PROCESSES_MAX}")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s is {timeout_s!r}, expected a positive number of seconds")
    reference = functions.reference(fn)
    frames = encode(
        [
            [reference.label, reference.name, reference.pickled],
            list(args),
            dict(kwargs or {}),
            [entry for entry in sys.path if entry],
        ]
    )
    with tempfile.TemporaryDirectory(prefix="pipedist-processes-") as folder:
        call = Path(folder, "call")
        call.write_bytes(b"".join(pack(frames)))
        running = [_Process(Path(folder), number, environment or {}) for number in range(workers)]
        until = time.monotonic() + timeout_s
        try:
            outcomes = [process.outcome(until) for process in running]
        finally:
            for process in running:
                process.end()
    if check and not all(outcome.ok for outcome in outcomes):
        raise ProcessesFailed(outcomes)
    return outcomes


class _Process:
    def __init__(self, folder: Path, number: int, environment: Mapping[str, str]) -> None:
        self._number = number
        self._result = folder / f"result-{number}"
        self._out, self._err = folder / f"out-{number}", folder / f"err-{number}"
        command = [sys.executable, "-m", "pipedist.testing.process_child", str(folder), str(number)]
        paths = os.pathsep.join(entry for entry in sys.path if entry)
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": paths, **environment},
                start_new_session=True,
            )

    def outcome(self, until: float) -> ProcessOutcome:
        timed_out = False
        try:
            self._popen.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
            self.end()
        code = self._popen.returncode
        value, exception, traceback = self._answer()
        return ProcessOutcome(
            self._number,
            value,
            _text(self._out),
            _text(self._err),
            exception,
            traceback,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            timed_out=timed_out,
        )

    def _answer(self) -> tuple[Tree, str, str]:
        from pipedist.protocol.codec import decode

        if not self._result.exists():  # the process ended before it could say anything
            return None, "", ""
        value, exception, traceback = decode(frames_in(self._result.read_bytes()))
        return value, exception, traceback

    def end(self) -> None:
        """Kill it with all that it has started, if it is there still."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="backslashreplace")


def frames_in(data: bytes) -> list[memoryview]:
    """Return the frames of the one record in a file.

    Raises:
        ValueError: the record is damaged.
    """
    view = memoryview(data)
    head = record_at(view, 0)
    if isinstance(head, str):
        raise ValueError(f"damaged record: {head}")
    return frames_of(view, head)
