"""`pipedist worker`: a process that keeps one worker alive which dials in to a scheduler.

The supervisor executes no user code. It starts the executing process (exec'd: so it is safe at any
time, whatever threads this process has), and speaks for it over a connection of its own: a
heartbeat as long as the process is there, and a Goodbye when it is not. So a worker whose
interpreter is busy for minutes is alive, and one that crashed is known to be gone at once.

What the scheduler can tell the supervisor, over that connection:

| Welcome | how often it wants to be told, and how long to wait for another one when it is gone |
| Refuse | kill the worker process, if it is the one that is meant; the next incarnation may join |
| Stop | kill it, and leave for good |
| Share | hand over what the scheduling program gives to all programs of its cluster |

When the scheduler is gone, the worker process finishes what it runs, leaves its finished results in
memory that the supervisor holds, and ends. The next one, which has the code as it is then, takes them
over and dials in again, for `Welcome.rejoin_s`: a run that is resumed listens at the same endpoint.

It ends when the worker process was told to stop or was refused, when no scheduler answers any
more, or when the process keeps dying before it has lived for `LIVED_S`, and not in a call: those deaths are
the scheduler's to count, which may be looking for the elements that cause them. On SIGTERM, and on SIGHUP, it
lets the worker process finish what it runs, for `leave_s`, and ends with 0; on a second one it does not wait.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable

from msgspec.structs import replace

from pipedist import accelerators
from pipedist.errors import PipedistError, ProtocolError, UsageError
from pipedist.messages import Goodbye, Heartbeat, Refuse, Share, Stop, Welcome
from pipedist.scratch_folders import ScratchFolder
from pipedist.transport.dealer import ConnectionLost, Dealer
from pipedist.transport.keys import ClientKeys, read_key_file
from pipedist.worker.forks import answer
from pipedist.worker.names import new_name
from pipedist.worker.process import ExitCode
from pipedist.worker.progress import Overdue, Progress, end_of
from pipedist.worker.settings import WorkerSettings
from pipedist.worker.supervised import Supervised, describe

HEARTBEAT_S = 1.0
"""How often the scheduler hears of the worker, until it asks for something else."""

LOOK_S = 0.05
"""How soon the end of the worker process is noticed."""

LIVED_S = 10.0
"""A worker process that ends sooner, and not in a call, counts as a failed start."""

STARTS_FAILED_MAX = 5
"""Failed starts in a row before the supervisor gives up."""

LEAVE_S = 10.0
"""How long the worker process may take, after SIGTERM, to finish what it runs."""

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
"""Exit codes with which a worker process that ends by itself says why; all else is a crash."""


def run_worker(
    endpoint: str,
    key_file: str | os.PathLike[str] | None,
    *,
    threads: int = 1,
    join_s: float = 30.0,
    leave_s: float = LEAVE_S,
) -> int:
    """Keep a worker alive until the scheduler stops it; return the exit code.

    Args:
        endpoint: the scheduler's.
        key_file: the cluster's keys; None for an ipc endpoint.
        threads: BLAS and OpenMP threads of the worker.
        join_s: how long the scheduler may take to answer, seconds.
        leave_s: how long the worker may take, after SIGTERM, to finish what it runs, seconds.

    Call it in the main thread: it answers SIGTERM and, if that is not ignored, SIGHUP while it runs.

    Returns:
        0: it was told to stop, or to leave; 1: it was refused, no scheduler answered (any more), or it
        kept dying; 2: the endpoint or the key file can't be used.

    Raises:
        UsageError: if the key file can't be read, or the endpoint is none.
    """
    path = "" if key_file is None else os.path.abspath(os.fspath(key_file))
    gpus = len(accelerators.named())
    supervisor = Supervisor(endpoint, path, threads=threads, join_s=join_s, leave_s=leave_s, gpus=gpus)
    before = answer(lambda _number, _frame: supervisor.leave())
    try:
        return supervisor.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Supervisor:
    """Keeps one worker process alive.

    Args:
        endpoint: the scheduler's.
        key_file: path of the cluster's keys, "" for an ipc endpoint.
        threads: BLAS and OpenMP threads of the worker.
        join_s: how long the scheduler may take to answer, seconds.
        leave_s: how long the worker may take to finish what it runs, seconds.
        rejoin_s: how long to wait for a scheduler that is gone, seconds, if that did not ask for more.
        gpus: how many the worker owns; a fraction where it shares one.
        worker: how its name begins; "": with this host and process.
        tells: it says on stderr what becomes of it, and its process; otherwise only while it waits for
            another scheduler.
        folder: in which it keeps what the scheduler sends it to keep, None: the temporary one.
        task: role and index of the program that this belongs to, "worker/1"; "": of none.
        on_share: told the number and the frames of what is shared, in the thread of `run`.
        inherited: descriptors that the worker process gets too.
        code: folders that become the last entries of its `sys.path`.
    """

    def __init__(
        self,
        endpoint: str,
        key_file: str,
        *,
        threads: int,
        join_s: float,
        leave_s: float = LEAVE_S,
        rejoin_s: float = 0.0,
        gpus: float = 0,
        worker: str = "",
        tells: bool = True,
        folder: str | None = None,
        task: str = "",
        on_share: Callable[[int, list[memoryview]], None] = lambda _number, _frames: None,
        inherited: tuple[int, ...] = (),
        code: tuple[str, ...] = (),
    ) -> None:
        self._endpoint = endpoint
        self._key_file = key_file
        self._keys: ClientKeys | None = None
        """What was in the key file when a connection was made; None: before, and for an ipc endpoint."""
        self._threads = threads
        self._join_s = join_s
        self._leave_s = leave_s
        self._rejoin_s_min = rejoin_s
        self._gpus = gpus
        self._tells = tells
        self._folder = folder
        self._died_at_work = False
        """The worker process that ended last was executing a call."""
        self._inherited = inherited
        self._code = code
        # Unique among the workers of a host, also where a batch system starts many in one container.
        place = worker or f"{os.uname().nodename}:{os.getpid()}"
        self.worker, self._proof = new_name(f"{task}:{place}" if task else place)
        self._task = task
        self._on_share = on_share
        self._heartbeat_s = HEARTBEAT_S
        self._dealer: Dealer | None = None
        self._next_at = 0.0
        """When the next heartbeat is due."""
        self._progress_file = -1
        """Of the memory in which the worker process notes what it executes."""
        self._proof_file = -1
        """Of the memory from which the worker process has the proof of its name: others see command lines."""
        self._kept_file = -1
        """Of the memory through which a worker process hands finished results on to the next."""
        self._rejoin_s: float | None = None
        """How long to wait for a scheduler when the one that was there is gone; None: there was none."""
        self._gone_since: float | None = None
        """When the connection to the scheduler was lost; None while there is one."""
        self._cluster = ""
        """The scheduler's life that spoke last."""
        self._failed = 0
        """Worker processes in a row that did not live long."""
        self._leave_until: float | None = None
        """The worker process is to leave, and has time until then; None: it is not."""
        self._progress = Progress()
        self._overdue: Overdue | None = None
        """What the process was ended for, because it took too long."""
        self._code_root: ScratchFolder | None = None
        """Where copies of the scheduler's code are kept while this runs."""

    def run(self) -> int:
        """Start the worker process again and again, until there is a reason not to.

        Returns:
            The exit code, as for `run_worker`.

        Raises:
            UsageError: the key file can't be read, or nothing can be connected to.
            PipedistError: this host has no room for the worker process, or its files.
        """
        incarnation = 0
        try:
            self._code_root = ScratchFolder("code", self._folder)
            self._progress_file = os.memfd_create("pipedist-progress")
            os.ftruncate(self._progress_file, Progress.BYTES)
            self._progress = Progress(self._progress_file)
            self._kept_file = os.memfd_create("pipedist-kept")
            self._proof_file = os.memfd_create("pipedist-proof")
            os.write(self._proof_file, self._proof.encode())
            self._dealer = self._connect()  # an endpoint that can't be used is told before anything starts
            while not self._is_leaving():
                began = time.monotonic()
                process = self._start(incarnation)
                ending = self._watch(process, incarnation)
                if self._is_leaving():
                    break
                if ending is ExitCode.CONNECTION_LOST:
                    self._lost()
                    self._disconnect()  # it may be the worker's alone: only who answers anew is there
                if ending is ExitCode.UNANSWERED or self._is_given_up():
                    if self._rejoin_s is not None:
                        self._say(
                            f"its scheduler is gone, and none came back at {self._endpoint} "
                            f"within {self._rejoin_s:g} s"
                        )
                    return 1
                if ending in _FINAL:
                    if self._task and ending is ExitCode.STOPPED:
                        self._hear_out(_END_S)
                    return _FINAL[ending]
                lived = time.monotonic() - began >= LIVED_S or self._died_at_work
                self._failed = 0 if lived else self._failed + 1
                if self._failed >= STARTS_FAILED_MAX:
                    self._say(
                        f"{self._failed} worker processes in a row ended in {LIVED_S:g} s, and in no call"
                    )
                    return 1
                incarnation += 1
            return 0
        except OSError as error:  # no space, descriptors, processes or memory: who runs this host must know
            raise PipedistError(f"worker {self.worker} can't be kept alive on this host: {error}") from error
        finally:
            self._disconnect()
            if self._code_root is not None:
                self._code_root.close()
            self._progress.close()
            for file in (self._progress_file, self._kept_file, self._proof_file):
                if file >= 0:
                    os.close(file)

    def leave(self, *, at_once: bool = False) -> None:
        """Leave as soon as the worker process has finished what it runs; called again, at once.

        From any thread.
        """
        at_once = at_once or self._leave_until is not None
        self._leave_until = time.monotonic() + (0.0 if at_once else self._leave_s)

    def _is_leaving(self) -> bool:
        return self._leave_until is not None

    def _is_given_up(self, slack_s: float = 0.0) -> bool:
        """Whether the scheduler has been gone for as long as it is waited for."""
        if self._gone_since is None or self._rejoin_s is None:
            return False
        return time.monotonic() - self._gone_since >= self._rejoin_s + slack_s

    def _start(self, incarnation: int) -> Supervised:
        settings = WorkerSettings(
            endpoint=self._endpoint,
            worker=self.worker,
            incarnation=incarnation,
            key_file=self._key_file,
            threads=self._threads,
            join_s=self._patience_s(),
            tells=self._tells or self._gone_since is not None,
            gpus=float(self._gpus),
            code_root="" if self._code_root is None else self._code_root.path,
            task=self._task,
        )
        self._progress.begin()
        self._overdue = None
        return Supervised(
            settings,
            progress=self._progress_file,
            kept=self._kept_file,
            proof=self._proof_file,
            code=self._code,
            inherited=self._inherited,
        )

    def _patience_s(self) -> float:
        """Return how long the worker process may wait for a scheduler."""
        if self._rejoin_s is None:
            return self._join_s
        since = 0.0 if self._gone_since is None else time.monotonic() - self._gone_since
        return max(self._rejoin_s - since, _END_S)

    def _watch(self, process: Supervised, incarnation: int) -> ExitCode | None:
        """Speak for the worker process until it has ended; return how it did by itself, None: it crashed."""
        refused = asked = False
        try:
            while process.code is None:
                if self._leave_until is not None:
                    if time.monotonic() >= self._leave_until:
                        self._say("told to leave, but its call is not over: that goes back")
                        process.end()
                        break
                    if not asked:
                        asked = True
                        self._say(f"told to leave: the call that it runs may take {self._leave_s:g} s more")
                        process.terminate()
                if self._is_given_up(_END_S):  # it is in a call: it would have said so by itself
                    process.end()
                    return ExitCode.UNANSWERED
                if process.is_stopped():
                    process.end()
                    break
                self._overdue = self._progress.overdue(time.monotonic_ns())
                if self._overdue is not None:
                    process.end()
                    break
                order = self._listen(process, incarnation)
                if isinstance(order, Stop):
                    self._say(f"told to stop: {order.reason}")
                    process.end(grace_s=_END_S)
                    return ExitCode.STOPPED
                if isinstance(order, Refuse):
                    self._say(f"the scheduler gave the worker process up: {order.reason}")
                    refused = True
                    process.end()
        except BaseException:  # Ctrl-C, SIGTERM: leave at once, but say so
            process.end()
            self._say("interrupted: the run has its calls done elsewhere")
            self._tell_end(Goodbye(self.worker, incarnation, "its supervisor was told to leave"))
            raise
        code = process.end()
        ending = ExitCode(code) if self._progress.is_over and code in _ENDS else None
        self._died_at_work = False
        if ending is ExitCode.CONNECTION_LOST and (order := self._hear_out(LOOK_S)) is not None:
            self._say(f"told to stop: {order.reason}")
            return ExitCode.STOPPED
        if self._is_leaving() and ending is not ExitCode.STOPPED:
            self._tell_end(Goodbye(self.worker, incarnation, "its supervisor was told to leave"))
        elif ending is None:
            text = process.describe(code)
            running, timed_out = end_of(self._progress, self._overdue)
            self._died_at_work = running is not None
            if timed_out:
                text = "its call took longer than its timeout_s"
            self._say(f"worker process ended: {text}")
            goodbye = Goodbye(self.worker, incarnation, text, crashed=not refused)
            if running is not None:
                lease, call, stage = running
                goodbye = replace(goodbye, lease=lease, call=call, stage=stage, timed_out=timed_out)
            self._tell_end(goodbye)
        elif ending is not ExitCode.STOPPED:  # it has said why
            self._tell_end(Goodbye(self.worker, incarnation, describe(code)))
        return ending

    def _listen(self, process: Supervised, incarnation: int) -> Stop | Refuse | None:
        """Send a heartbeat if one is due, and wait a moment for an order."""
        try:
            if self._dealer is None:
                self._dealer = self._connect()
            now = time.monotonic()
            if now >= self._next_at:
                self._next_at = now + self._heartbeat_s
                self._beat(self._dealer, Heartbeat(self.worker, incarnation, self._proof))
            if not self._dealer.poll(LOOK_S):
                return None
            message, frames = self._dealer.recv()
        except (ConnectionLost, ProtocolError):
            # The worker process notices too, and its exit code says whether to go on.
            self._disconnect(linger_s=0.0)
            self._lost()
            process.wait(LOOK_S)  # not to try again as fast as the machine can
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
            return None  # the answer to an old heartbeat: that process is gone
        return message if isinstance(message, (Stop, Refuse)) else None

    def _beat(self, dealer: Dealer, beat: Heartbeat) -> None:
        """Send a heartbeat; a connection that is lost is told where nothing is left to read.

        Who was kept waiting while the run ended finds both at once, and is not to wait for that run again.
        """
        try:
            dealer.send(beat, timeout_s=self._heartbeat_s)
        except ConnectionLost:
            if not dealer.poll(0):
                raise

    def _lost(self) -> None:
        """Take note that the scheduler is gone, until one answers."""
        if self._gone_since is None:
            self._gone_since = time.monotonic()
            if not self._tells and self._rejoin_s:
                self._say(
                    "the process of its run is gone: what it has finished is kept for who resumes the run, "
                    f"for {self._rejoin_s:g} s"
                )
        self._next_at = 0.0  # whoever comes is asked at once

    def _hear_out(self, within_s: float) -> Stop | None:
        """Take in what was said before the worker process, on a connection of its own, ended.

        Returns:
            What told it to stop, None if nothing did.
        """
        until = time.monotonic() + within_s
        with contextlib.suppress(ConnectionLost, ProtocolError):
            while self._dealer is not None and self._dealer.poll(max(0.0, until - time.monotonic())):
                message, frames = self._dealer.recv()
                if isinstance(message, Stop):
                    return message
                if isinstance(message, Share):
                    self._on_share(message.number, frames)
        return None

    def _tell_end(self, goodbye: Goodbye) -> None:
        if self._dealer is None:
            return
        try:
            self._dealer.send(replace(goodbye, proof=self._proof), timeout_s=self._heartbeat_s)
        except PipedistError:
            self._disconnect(linger_s=0.0)  # the scheduler will miss the heartbeats

    def _connect(self) -> Dealer:
        if self._key_file:  # anew each time, as each worker process does: the keys of both are the same
            try:
                self._keys = read_key_file(self._key_file).client
            except UsageError:
                if self._keys is None:
                    raise
                # it is gone, or being replaced: the next worker process says so, and this one may go on
        identity = f"supervisor.{self.worker}.{secrets.token_hex(8)}".encode()[:255]
        return Dealer(self._endpoint, identity=identity, keys=self._keys)

    def _disconnect(self, linger_s: float = _END_S) -> None:
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            dealer.close(linger_s)

    def _say(self, text: str) -> None:
        if self._tells or self._gone_since is not None:
            with contextlib.suppress(OSError):  # nobody reads it any more: no reason to leave
                sys.stderr.write(f"pipedist worker {self.worker}: {text}\n")
                sys.stderr.flush()
