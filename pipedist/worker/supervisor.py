"""`pipedist worker`: a process that keeps one worker alive which dials in to a scheduler.

The supervisor executes no user code. It starts the executing process (exec'd: so it is safe at any
time, whatever threads this process has), and speaks for it over a connection of its own: a
heartbeat as long as the process is there, and a Goodbye when it is not. So a worker whose
interpreter is busy for minutes is alive, and one that crashed is known to be gone at once.

What the scheduler can tell the supervisor, over that connection:

| Refuse | kill the worker process; the next incarnation may join |
| Stop | kill it, and leave for good |

It ends when the worker process was told to stop or was refused, when no scheduler answers any
more, or when the process keeps dying before it has lived for `LIVED_S`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pipedist.errors import PipedistError, ProtocolError
from pipedist.messages import Goodbye, Heartbeat, Refuse, Stop, Welcome
from pipedist.transport.dealer import ConnectionLost, Dealer
from pipedist.transport.keys import ClientKeys, read_key_file
from pipedist.worker import boot
from pipedist.worker.kernel import die_with
from pipedist.worker.process import ExitCode, run_process
from pipedist.worker.progress import Overdue, Progress, end_of
from pipedist.worker.settings import WorkerSettings

HEARTBEAT_S = 1.0
"""How often the scheduler hears of the worker, until it asks for something else."""

LOOK_S = 0.05
"""How soon the end of the worker process is noticed."""

LIVED_S = 10.0
"""A worker process that ends sooner counts as a failed start."""

STARTS_FAILED_MAX = 5
"""Failed starts in a row before the supervisor gives up."""

_END_S = 2.0
"""How long the worker process may take to be gone after SIGKILL, or after it said Goodbye."""

_FINAL = {
    ExitCode.STOPPED: 0,
    ExitCode.REFUSED: 1,
    ExitCode.UNANSWERED: 1,
    ExitCode.PROTOCOL: 1,
    ExitCode.USAGE: 2,
}
"""Exit codes of the worker process that end the supervisor too, and its own exit code then."""


_ENDS = frozenset(ExitCode) - {ExitCode.DEFECT}
"""Exit codes with which a worker process ends by itself, and says why; others are a crash."""


def run_worker(
    endpoint: str, key_file: str | os.PathLike[str] | None, *, threads: int = 1, join_s: float = 30.0
) -> int:
    """Keep a worker alive until the scheduler stops it; return the exit code.

    Args:
        endpoint: the scheduler's.
        key_file: the cluster's keys; None for an ipc endpoint.
        threads: BLAS and OpenMP threads of the worker.
        join_s: how long the scheduler may take to answer, seconds.

    Call it in the main thread: it answers SIGTERM while it runs.

    Returns:
        0: it was told to stop; 1: it was refused, no scheduler answered, or it kept dying; 2: the
        endpoint or the key file can't be used.

    Raises:
        UsageError: if the key file can't be read, or the endpoint is none.
    """
    path = "" if key_file is None else os.path.abspath(os.fspath(key_file))
    keys = read_key_file(path).client if path else None
    before = signal.signal(signal.SIGTERM, _leave_on_sigterm)
    try:
        return Supervisor(endpoint, path, keys, threads=threads, join_s=join_s).run()
    finally:
        signal.signal(signal.SIGTERM, before)


class Supervisor:
    """Keeps one worker process alive.

    Args:
        endpoint: the scheduler's.
        key_file: path of the cluster's keys, "" for an ipc endpoint.
        keys: what is in it.
        threads: BLAS and OpenMP threads of the worker.
        join_s: how long the scheduler may take to answer, seconds.
        inherited: descriptors that the worker process gets too.
        code: folders that become the last entries of its `sys.path`.
    """

    def __init__(
        self,
        endpoint: str,
        key_file: str,
        keys: ClientKeys | None,
        *,
        threads: int,
        join_s: float,
        inherited: tuple[int, ...] = (),
        code: tuple[str, ...] = (),
    ) -> None:
        self._endpoint = endpoint
        self._key_file = key_file
        self._keys = keys
        self._threads = threads
        self._join_s = join_s
        self._inherited = inherited
        self._code = code
        # Unique among the workers of a host, also where a batch system starts many in one container.
        self.worker = f"{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(2)}"
        self._heartbeat_s = HEARTBEAT_S
        self._dealer: Dealer | None = None
        self._next_at = 0.0
        """When the next heartbeat is due."""
        self._progress_file = -1
        """Of the memory in which the worker process notes what it executes."""
        self._progress = Progress()
        self._overdue: Overdue | None = None
        """What the process was ended for, because it took too long."""

    def run(self) -> int:
        """Start the worker process again and again, until there is a reason not to."""
        failed = 0
        incarnation = 0
        try:
            self._progress_file = os.memfd_create("pipedist-progress")
            os.ftruncate(self._progress_file, Progress.BYTES)
            self._progress = Progress(self._progress_file)
            self._dealer = self._connect()  # an endpoint that can't be used is told before anything starts
            while True:
                began = time.monotonic()
                process = self._start(incarnation)
                code = self._watch(process, incarnation)
                if code in _FINAL:
                    return _FINAL[ExitCode(code)]
                failed = 0 if time.monotonic() - began >= LIVED_S else failed + 1
                if failed >= STARTS_FAILED_MAX:
                    self._say(f"{failed} worker processes in a row lived for less than {LIVED_S:g} s")
                    return 1
                incarnation += 1
        finally:
            self._disconnect()
            self._progress.close()
            if self._progress_file >= 0:
                os.close(self._progress_file)

    def _start(self, incarnation: int) -> subprocess.Popen[bytes]:
        settings = WorkerSettings(
            endpoint=self._endpoint,
            worker=self.worker,
            incarnation=incarnation,
            key_file=self._key_file,
            threads=self._threads,
            join_s=self._join_s,
            tells=True,
        )
        self._progress.idle()
        self._overdue = None
        arguments = {
            "parent": os.getpid(),
            "progress": self._progress_file,
            "code": self._code,
            "settings": asdict(settings),
        }
        return subprocess.Popen(
            boot.command("pipedist.worker.supervisor", arguments),
            env=boot.environment(self._threads),
            stdin=subprocess.DEVNULL,
            pass_fds=(self._progress_file, *self._inherited),
        )

    def _watch(self, process: subprocess.Popen[bytes], incarnation: int) -> int:
        """Speak for the worker process until it has ended; return its exit code."""
        refused = False
        try:
            while process.poll() is None:
                self._overdue = self._progress.overdue(time.monotonic_ns())
                if self._overdue is not None:
                    _end(process, grace_s=0.0)
                    break
                order = self._listen(process, incarnation)
                if isinstance(order, Stop):
                    self._say(f"told to stop: {order.reason}")
                    _end(process, grace_s=_END_S)
                    return ExitCode.STOPPED
                if isinstance(order, Refuse):
                    self._say(f"the scheduler gave the worker process up: {order.reason}")
                    refused = True
                    _end(process, grace_s=0.0)
        except BaseException:  # Ctrl-C, SIGTERM: leave at once, but say so
            _end(process, grace_s=0.0)
            self._tell_end(Goodbye(self.worker, incarnation, "its supervisor was told to leave"))
            raise
        code = process.returncode
        if code not in _ENDS:
            text = _describe(code)
            running, timed_out = end_of(self._progress, self._overdue)
            if timed_out:
                text = "its call took longer than its timeout_s"
            self._say(f"worker process ended: {text}")
            goodbye = Goodbye(self.worker, incarnation, text, crashed=not refused)
            if running is not None:
                lease, call, stage = running
                goodbye = replace(goodbye, lease=lease, call=call, stage=stage, timed_out=timed_out)
            self._tell_end(goodbye)
        elif code != ExitCode.STOPPED:  # it has said why
            self._tell_end(Goodbye(self.worker, incarnation, _describe(code)))
        return code

    def _listen(self, process: subprocess.Popen[bytes], incarnation: int) -> Stop | Refuse | None:
        """Send a heartbeat if one is due, and wait a moment for an order."""
        try:
            if self._dealer is None:
                self._dealer = self._connect()
            now = time.monotonic()
            if now >= self._next_at:
                self._next_at = now + self._heartbeat_s
                self._dealer.send(Heartbeat(self.worker, incarnation), timeout_s=self._heartbeat_s)
            if not self._dealer.poll(LOOK_S):
                return None
            message, _ = self._dealer.recv()
        except (ConnectionLost, ProtocolError):
            # The worker process notices too, and its exit code says whether to go on.
            self._disconnect(linger_s=0.0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)  # not to try again as fast as the machine can
            return None
        if isinstance(message, Welcome):
            self._heartbeat_s = message.heartbeat_s
        return message if isinstance(message, (Stop, Refuse)) else None

    def _tell_end(self, goodbye: Goodbye) -> None:
        if self._dealer is None:
            return
        try:
            self._dealer.send(goodbye, timeout_s=self._heartbeat_s)
        except PipedistError:
            self._disconnect(linger_s=0.0)  # the scheduler will miss the heartbeats

    def _connect(self) -> Dealer:
        identity = f"supervisor.{self.worker}.{secrets.token_hex(8)}".encode()[:255]
        return Dealer(self._endpoint, identity=identity, keys=self._keys)

    def _disconnect(self, linger_s: float = _END_S) -> None:
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            dealer.close(linger_s)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"pipedist worker {self.worker}: {text}\n")
        sys.stderr.flush()


def _leave_on_sigterm(signum: int, _frame: object) -> None:
    raise SystemExit(128 + signum)


def _end(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """See to it that the process is gone."""
    if process.poll() is None and grace_s:
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def main(arguments: Mapping[str, Any]) -> None:
    """Be the worker process of a supervisor.

    Args:
        arguments: `parent`, the supervisor's pid; `progress`, the descriptor of the memory in which is
            noted what is executed; `code`, folders for the end of `sys.path`; `settings`, the fields of
            WorkerSettings.
    """
    die_with(int(arguments["parent"]))
    sys.path.extend(arguments["code"])  # a copy of the spec's own modules: none of another spec's
    os.dup2(2, 1)  # what user code writes to descriptor 1 is no output of the supervisor's
    code = run_process(WorkerSettings(**arguments["settings"]), Progress(int(arguments["progress"])))
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(code)
