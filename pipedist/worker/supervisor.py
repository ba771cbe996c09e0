"""The supervisor: keeps one worker alive that dials in to a scheduler, and executes no user code.

`pipedist worker` runs one, and so do the processes that an engine starts (`main`) and, in threads, the
programs of a `TaskCluster`. A supervisor starts the worker process (exec'd, so that is safe at any time,
whatever threads this process has), and reports on it over a connection of its own: a heartbeat as long as
the process exists, a Goodbye when it does not. So a worker whose interpreter is busy for minutes counts as
alive, and a crash is known at once.

| message of the scheduler | effect |
|---|---|
| Welcome | sets the heartbeat interval, and how long to wait for another scheduler when this one is gone |
| Refuse | kills the worker process, if it is the one that is meant; the next incarnation may join |
| Stop | kills the worker process, and ends the supervisor |
| Share | is handed over to the program of a `TaskCluster` |

The worker process has a process group of its own, which is killed at its end, however it ends. A worker process
that has replaced its program (exec) is killed: a pipe ends then.

When the scheduler is gone, the worker process finishes its call, leaves its finished results in memory that
the supervisor holds, and ends. The next incarnation loads the code as it is then, takes the results over and
dials in again, for `Welcome.rejoin_s`: a run that is resumed listens at the same endpoint.

The supervisor ends when its worker process was stopped or refused, when no scheduler replies (any more), or
when the process keeps dying within `LIVED_S` and not in a call: deaths in a call are counted by the
scheduler, which may be looking for the elements that cause them. On SIGTERM and SIGHUP the worker process may
finish its call, for `leave_s`, and the exit code is 0; a second signal ends it at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import string
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipedist.core import gpus as accelerators
from pipedist.core.temp_dirs import ScratchFolder
from pipedist.errors import PipedistError, ProtocolError, UsageError
from pipedist.protocol.messages import Goodbye, Heartbeat, Refuse, Share, Stop, Welcome
from pipedist.transport.dealer import ConnectionLost, Dealer
from pipedist.transport.keys import ClientKeys, read_key_file
from pipedist.worker.boot import describe_exit
from pipedist.worker.identity import new_name
from pipedist.worker.process import ExitCode
from pipedist.worker.process_setup import WorkerSettings, handle_signals
from pipedist.worker.progress import CallProgress, Overdue, Stops, end_of
from pipedist.worker.supervised_process import END_S, WorkerProcess

HEARTBEAT_S = 1.0  # interval of heartbeats, until the scheduler sets another one
POLL_S = 0.05  # how soon the end of the worker process is noticed
LIVED_S = 10.0  # a worker process that ends sooner, and not in a call, counts as a failed start
STARTS_FAILED_MAX = 5  # failed starts in a row before the supervisor gives up
LEAVE_S = 10.0  # how long the worker process may take, after SIGTERM, to finish its call

_STOP_S = 0.5  # how long a Stop may take to arrive after the worker process has lost its connection
_PARENT_POLL_S = 0.5  # how soon the end of a parent process is noticed that has not closed standard input
_STANDARD_INPUT = 0

_FINAL = {  # exit codes that end the supervisor too, and its own exit code then
    ExitCode.STOPPED: 0,
    ExitCode.REFUSED: 1,
    ExitCode.UNANSWERED: 1,
    ExitCode.PROTOCOL: 1,
    ExitCode.USAGE: 2,
}

_ENDS = frozenset(ExitCode) - {ExitCode.DEFECT}  # a process with one of these has reported why it ends


def run_worker(
    endpoint: str,
    key_file: str | os.PathLike[str],
    *,
    threads: int = 1,
    join_s: float = 30.0,
    leave_s: float = LEAVE_S,
) -> int:
    """Keep a worker alive until the scheduler stops it; return the exit code.

    Call it in the main thread: it handles SIGTERM and, if that is not ignored, SIGHUP.

    Returns:
        0: the worker was stopped by the scheduler, or by a signal; 1: it was refused, no scheduler
        replied (any more), or it kept dying; 2: the endpoint or the key file can't be used.
    """
    gpus = len(accelerators.named())
    supervisor = Supervisor(
        endpoint,
        os.path.abspath(os.fspath(key_file)),
        threads=threads,
        join_s=join_s,
        leave_s=leave_s,
        gpus=gpus,
    )
    wanted = os.environ.get(accelerators.VISIBLE, "")
    if not gpus and wanted.startswith((*string.digits, "GPU-", "MIG-")):  # not "-1" or "NoDevFiles"
        print(f"pipedist worker owns no GPU: {accelerators.found().how}", file=sys.stderr)  # noqa: T201
    before = handle_signals(lambda _number, _frame: supervisor.leave())
    try:
        return supervisor.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Mapping[str, Any]) -> None:
    """Run the supervisor of a `launchers.SupervisorProcess`, then exit.

    `keys` is the descriptor of the memory with the text of the key file.
    """
    keys = int(arguments["keys"])
    try:
        supervisor = Supervisor(
            str(arguments["endpoint"]),
            f"/dev/fd/{keys}",
            threads=int(arguments["threads"]),
            join_s=float(arguments["join_s"]),
            gpus=len(accelerators.named()),
            inherited=(keys,),
            code=tuple(arguments["code"]),
        )
        handle_signals(lambda _number, _frame: supervisor.leave(at_once=True))
        threading.Thread(
            target=_leave_with_parent, args=(int(arguments["parent"]), supervisor), daemon=True
        ).start()
        code = supervisor.run()
        if supervisor.is_leaving():  # unlike a supervisor that its scheduler has stopped
            code = 128 + signal.SIGTERM
    except PipedistError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the parent process reads it
        code = error.exit_code
    raise SystemExit(code)


def _leave_with_parent(parent: int, supervisor: Supervisor) -> None:
    """Leave when the parent process has ended, or closed standard input."""
    while os.getppid() == parent:
        readable, _, _ = select.select([_STANDARD_INPUT], [], [], _PARENT_POLL_S)
        if readable:  # nothing is ever written into it: it has ended
            break
    supervisor.leave(at_once=True)


class Supervisor:
    """Keeps one worker process alive."""

    def __init__(
        self,
        endpoint: str,
        key_file: str,
        *,
        threads: int,
        join_s: float,  # how long the scheduler may take to reply, seconds
        leave_s: float = LEAVE_S,  # how long the worker may take to finish its call, seconds
        rejoin_s: float = 0.0,  # how long to wait for another scheduler when one is gone, seconds, at least
        gpus: int = 0,
        task: str = "",  # role and index of the program that it belongs to, "worker/1"; "": none
        on_share: Callable[[int, list[memoryview]], None] = lambda _number, _frames: None,  # number, frames
        inherited: tuple[int, ...] = (),  # descriptors that the worker process inherits
        code: tuple[str, ...] = (),  # folders that are appended to the worker's `sys.path`
    ) -> None:
        self._endpoint = endpoint
        self._key_file = key_file
        self._keys: ClientKeys | None = None  # as read for the latest connection
        self._threads = threads
        self._join_s = join_s
        self._leave_s = leave_s
        self._rejoin_s_min = rejoin_s
        self._gpus = gpus
        self._died_in_call = False  # the latest worker process has ended while it was executing a call
        self._inherited = inherited
        self._code = code
        # Unique among the workers of a host, also where a batch system starts many in one container.
        place = f"{os.uname().nodename}:{os.getpid()}"
        self.worker, self._proof = new_name(f"{task}:{place}" if task else place)
        self._task = task
        self._on_share = on_share
        self._heartbeat_s = HEARTBEAT_S
        self._dealer: Dealer | None = None
        self._next_at = 0.0  # when the next heartbeat is due
        self._progress_file = -1  # memory in which the worker process notes what it executes
        self._proof_file = -1  # memory with the proof of the name: command lines are visible to others
        self._cache_file = -1  # memory for finished results that the next worker process takes over
        self._rejoin_s: float | None = None  # how long to wait for another scheduler; None: there was none
        self._gone_since: float | None = None  # when the connection was lost; None while there is one
        self._cluster = ""  # id of the scheduler generation that sent the latest Welcome
        self._failed = 0  # worker processes in a row that ended soon
        self._leave_until: float | None = None  # when the worker process that is to leave is killed
        self._progress = CallProgress()
        self._stops = Stops()
        self._overdue: Overdue | None = None  # the function for which the worker process was killed
        self._code_root: ScratchFolder | None = None  # for copies of the scheduler's code

    def run(self) -> int:
        """Start the worker process repeatedly, until there is a reason to end; return the exit code.

        Raises:
            UsageError: the key file can't be read, or the endpoint is malformed.
            PipedistError: this host has no room for the worker process, or its files.
        """
        incarnation = 0
        try:
            self._code_root = ScratchFolder("code")
            self._progress_file = os.memfd_create("pipedist-progress")
            os.ftruncate(self._progress_file, CallProgress.BYTES)
            self._progress = CallProgress(self._progress_file)
            self._cache_file = os.memfd_create("pipedist-cache")
            self._proof_file = os.memfd_create("pipedist-proof")
            os.write(self._proof_file, self._proof.encode())
            self._dealer = self._connect()  # a bad endpoint is reported before anything starts
            while not self.is_leaving():
                began = time.monotonic()
                process = self._start(incarnation)
                ending = self._watch(process, incarnation)
                if self.is_leaving():
                    break
                if ending is ExitCode.CONNECTION_LOST:
                    self._lost()
                    self._disconnect()  # perhaps only the worker's is lost: a reply to a new one decides
                if ending is ExitCode.UNANSWERED or self._is_given_up():
                    if self._rejoin_s is not None:
                        self._log(
                            f"the driver at {self._endpoint} is gone, and none has come back "
                            f"within {self._rejoin_s:g} s"
                        )
                    return 1
                if ending in _FINAL:
                    if self._task and ending is ExitCode.STOPPED:
                        self._drain(END_S)
                    return _FINAL[ending]
                lived = time.monotonic() - began >= LIVED_S or self._died_in_call
                self._failed = 0 if lived else self._failed + 1
                if self._failed >= STARTS_FAILED_MAX:
                    self._log(
                        f"{self._failed} worker processes in a row ended within {LIVED_S:g} s, not in a call"
                    )
                    return 1
                incarnation += 1
            return 0
        except OSError as error:  # no space, descriptors, processes or memory
            raise PipedistError(f"worker {self.worker} can't be kept alive on this host: {error}") from error
        finally:
            self._disconnect()
            if self._code_root is not None:
                self._code_root.close()
            self._progress.close()
            for file in (self._progress_file, self._cache_file, self._proof_file):
                if file >= 0:
                    os.close(file)

    def leave(self, *, at_once: bool = False) -> None:
        """Leave as soon as the worker process has finished its call; thread-safe.

        With `at_once`, do not wait for the call; nor does the second `leave`.
        """
        at_once = at_once or self._leave_until is not None
        self._leave_until = time.monotonic() + (0.0 if at_once else self._leave_s)

    def is_leaving(self) -> bool:
        return self._leave_until is not None

    def _is_given_up(self, slack_s: float = 0.0) -> bool:
        if self._gone_since is None or self._rejoin_s is None:
            return False
        return time.monotonic() - self._gone_since >= self._rejoin_s + slack_s

    def _start(self, incarnation: int) -> WorkerProcess:
        settings = WorkerSettings(
            endpoint=self._endpoint,
            worker=self.worker,
            incarnation=incarnation,
            key_file=self._key_file,
            threads=self._threads,
            join_s=self._join_within_s(),
            verbose=True,
            gpus=float(self._gpus),
            code_root="" if self._code_root is None else self._code_root.path,
            task=self._task,
        )
        self._progress.begin()
        self._overdue = None
        return WorkerProcess(
            settings,
            progress=self._progress_file,
            cache=self._cache_file,
            proof=self._proof_file,
            code=self._code,
            inherited=self._inherited,
        )

    def _join_within_s(self) -> float:
        if self._rejoin_s is None:
            return self._join_s
        since = 0.0 if self._gone_since is None else time.monotonic() - self._gone_since
        return max(self._rejoin_s - since, END_S)

    def _watch(self, process: WorkerProcess, incarnation: int) -> ExitCode | None:
        """Report on a worker process until it ends; None: a crash or a kill."""
        evicted = is_leaving = False
        try:
            while process.code is None:
                if self._leave_until is not None:
                    if time.monotonic() >= self._leave_until:
                        self._log("leaving: its unfinished call will be reassigned")
                        process.end()
                        break
                    if not is_leaving:
                        is_leaving = True
                        self._log(f"leaving: its call may take {self._leave_s:g} s more")
                        process.terminate()
                if self._is_given_up(END_S):  # the worker process is in a call, or would have ended
                    process.end()
                    return ExitCode.UNANSWERED
                if process.is_stuck():
                    process.end()
                    break
                now_ns = time.monotonic_ns()
                self._stops.look(now_ns)
                self._overdue = self._progress.overdue(now_ns, self._stops)
                if self._overdue is not None:
                    process.end()
                    break
                order = self._exchange(process, incarnation)
                if isinstance(order, Stop):
                    self._log(f"stopped by the driver: {order.reason}")
                    process.end(grace_s=END_S)
                    return ExitCode.STOPPED
                if isinstance(order, Refuse):
                    self._log(f"evicted by the driver: {order.reason}")
                    evicted = True
                    process.end()
        except BaseException:  # Ctrl-C: leave at once, but report it
            process.end()
            self._log("interrupted: its calls will be reassigned")
            self._report_end(incarnation, "its supervisor is leaving")
            raise
        code = process.end()
        ending = ExitCode(code) if self._progress.is_over and code in _ENDS else None
        self._died_in_call = False
        if ending is ExitCode.CONNECTION_LOST and (order := self._drain(_STOP_S)) is not None:
            self._log(f"stopped by the driver: {order.reason}")
            return ExitCode.STOPPED
        if self.is_leaving() and ending is not ExitCode.STOPPED:
            self._report_end(incarnation, "its supervisor is leaving")
        elif ending is None:
            self._report_crash(process.describe(code), incarnation, crashed=not evicted)
        elif ending is not ExitCode.STOPPED:  # the worker process has printed the reason
            self._report_end(incarnation, describe_exit(code))
        return ending

    def _report_crash(self, text: str, incarnation: int, *, crashed: bool) -> None:
        running, timed_out = end_of(self._progress, self._overdue)
        self._died_in_call = running is not None
        if timed_out:
            text = "its call took longer than its timeout_s"
        self._log(f"worker process ended: {text}")
        ran = {} if running is None else {**running._asdict(), "timed_out": timed_out}
        self._report_end(incarnation, text, crashed=crashed, **ran)

    def _exchange(self, process: WorkerProcess, incarnation: int) -> Stop | Refuse | None:
        """Send a heartbeat if one is due, and wait up to POLL_S for an order."""
        try:
            if self._dealer is None:
                self._dealer = self._connect()
            now = time.monotonic()
            if now >= self._next_at:
                self._next_at = now + self._heartbeat_s
                self._send_heartbeat(self._dealer, Heartbeat(self.worker, incarnation, self._proof))
            if not self._dealer.poll(POLL_S):
                return None
            message, frames = self._dealer.recv()
        except (ConnectionLost, ProtocolError):
            # The worker process notices it too, and its exit code decides whether to go on.
            self._disconnect(linger_s=0.0)
            self._lost()
            process.wait(POLL_S)  # limits the rate of attempts
            return None
        if isinstance(message, Welcome):
            self._heartbeat_s = message.heartbeat_s
            self._rejoin_s = max(message.rejoin_s, self._rejoin_s_min)
            self._gone_since = None
            if message.cluster != self._cluster:
                self._cluster, self._failed = message.cluster, 0
        if isinstance(message, Share):
            self._on_share(message.number, frames)
        if isinstance(message, Refuse) and 0 < message.before <= incarnation:
            return None  # the reply to an old heartbeat: that process is gone
        return message if isinstance(message, (Stop, Refuse)) else None

    def _send_heartbeat(self, dealer: Dealer, heartbeat: Heartbeat) -> None:
        """Send a heartbeat; raise ConnectionLost only if no message is unread.

        A supervisor that was suspended while the run ended finds the lost connection and a Stop at once, and
        must not wait for another scheduler then.
        """
        try:
            dealer.send(heartbeat, timeout_s=self._heartbeat_s)
        except ConnectionLost:
            if not dealer.poll(0):
                raise

    def _lost(self) -> None:
        """Note that the scheduler is gone, until one replies."""
        if self._gone_since is None:
            self._gone_since = time.monotonic()
        self._next_at = 0.0

    def _drain(self, within_s: float) -> Stop | None:
        """Handle messages that were sent before the connection ended; return a Stop."""
        until = time.monotonic() + within_s
        with contextlib.suppress(ConnectionLost, ProtocolError):
            while self._dealer is not None and self._dealer.poll(max(0.0, until - time.monotonic())):
                message, frames = self._dealer.recv()
                if isinstance(message, Stop):
                    return message
                if isinstance(message, Share):
                    self._on_share(message.number, frames)
        return None

    def _report_end(self, incarnation: int, reason: str, **crash: Any) -> None:
        if self._dealer is None:
            return
        try:
            goodbye = Goodbye(self.worker, incarnation, reason, proof=self._proof, **crash)
            self._dealer.send(goodbye, timeout_s=self._heartbeat_s)
        except PipedistError:
            self._disconnect(linger_s=0.0)  # the scheduler will miss the heartbeats

    def _connect(self) -> Dealer:
        try:  # read each time, as each worker process does: both need the same keys
            self._keys = read_key_file(self._key_file).client
        except UsageError:
            if self._keys is None:
                raise
            # The file is gone, or being replaced: the next worker process reports that.
        identity = f"supervisor.{self.worker}.{secrets.token_hex(8)}".encode()[:255]
        return Dealer(self._endpoint, identity=identity, keys=self._keys)

    def _disconnect(self, linger_s: float = END_S) -> None:
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            dealer.close(linger_s)

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # standard error is closed: no reason to leave
            sys.stderr.write(f"pipedist worker {self.worker}: {text}\n")
            sys.stderr.flush()
