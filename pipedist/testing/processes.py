"""Run a function in several processes, and return the outcome of each.

Each process is a fresh interpreter in its own session, so a function that kills, exits or hangs affects only its
own process. The function is sent by name if it can be imported, otherwise by value
(cloudpickle). Its return value is sent like the results of replica functions, never as a pickle.
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

TEXT_CHARS_MAX = 2000  # limit of a process's output in an error


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """The outcome of one process.

    Args:
        worker: number of the process, from 0.
        value: the function's return value; None if it did not return.
        stdout, stderr: all output of the process, including that of native code.
        exception: "ValueError: text"; "" if the function did not raise.
        traceback: the exception's formatted traceback.
        exit_code: exit code of the process; None if a signal ended it.
        signal: number of the signal that ended it; None if it exited.
        timed_out: the process was killed because it took longer than the timeout.
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
        """Whether the function returned, and the process exited with code 0."""
        return not self.exception and self.exit_code == 0 and not self.timed_out

    @property
    def ending(self) -> str:
        """A description of how the process ended."""
        if self.timed_out:
            return "killed: it took longer than the timeout"
        if self.exception:
            return self.exception
        if self.signal is not None:
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        return "returned" if self.exit_code == 0 else f"exit code {self.exit_code}"


class ProcessesFailed(PipedistError):
    """At least one process failed.

    Args:
        outcomes: outcomes of all processes, successful ones included.
    """

    def __init__(self, outcomes: Sequence[ProcessOutcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = [x for x in self.outcomes if not x.ok]
        lines = [f"{len(failed)} of {len(self.outcomes)} processes failed"]
        for outcome in failed:
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
    """Run a function once in each of several concurrent processes.

    Args:
        fn: a function, or "module:name". If it has a parameter called `worker`, that is the number of the
            process, from 0.
        workers: number of processes, 1 to 256.
        args, kwargs: arguments of every call.
        environment: variables that are added to this process's environment.
        timeout_s: processes that take longer than this many seconds are killed.
        check: raise if a process fails.

    Returns:
        The outcome of each process, by number.

    Raises:
        UsageError: `workers` or `timeout_s` is out of range.
        UnsendableError: an argument cannot be sent.
        ProcessesFailed: a process raised, exited, was ended by a signal or timed out; the error
            contains the outcomes of all.

    Example:
        >>> [outcome.value for outcome in run_in_processes(lambda worker: worker + 1, workers=2)]
        [1, 2]
    """
    __tracebackhide__ = True  # a failure shows the line of the test
    from pipedist.core import functions
    from pipedist.protocol.codec import encode

    if isinstance(workers, bool) or not 1 <= workers <= PROCESSES_MAX:
        raise UsageError(f"workers must be an integer from 1 to {PROCESSES_MAX}, got {workers!r}")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s must be a positive number of seconds, got {timeout_s!r}")
    reference = functions.reference(fn)
    function = [reference.label, reference.name, reference.pickled]
    paths = [entry for entry in sys.path if entry]
    frames = encode([function, list(args), dict(kwargs or {}), paths])
    with tempfile.TemporaryDirectory(prefix="pipedist-processes-") as folder:
        Path(folder, "call").write_bytes(b"".join(pack(frames)))
        running = [_Process(Path(folder), number, environment or {}) for number in range(workers)]
        until = time.monotonic() + timeout_s
        try:
            outcomes = [process.outcome(until) for process in running]
        finally:
            for process in running:
                process.kill()
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
            env = {**os.environ, "PYTHONPATH": paths, **environment}
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
            )

    def outcome(self, until: float) -> ProcessOutcome:
        timed_out = False
        try:
            self._popen.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
            self.kill()
        code = self._popen.returncode
        value, exception, traceback = None, "", ""
        if self._result.exists():  # else the process ended before it stored one
            from pipedist.protocol.codec import decode

            value, exception, traceback = decode(frames_in(self._result.read_bytes()))
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

    def kill(self) -> None:
        """Kill the process and its children; does nothing if they have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="backslashreplace")


def frames_in(data: bytes) -> list[memoryview]:
    """Return the frames of the only record in a file; raise ValueError if it is damaged."""
    view = memoryview(data)
    head = record_at(view, 0)
    if isinstance(head, str):
        raise ValueError(f"damaged record: {head}")
    return frames_of(view, head)
