"""The worker process: carries out what its machine decides, and runs user code in between.

The main thread is all there is while nothing takes long: it reads messages, executes a slice of
calls, sends what came of them, and looks for messages again. zmq's own thread fetches the next
messages meanwhile. One helper thread, the REPORTER, sends the results of finished calls when the
main thread is stuck in a long one; it looks every `flush_s` while there is work, and is asleep
when there is none. Machine and socket belong to whoever holds `_core`; the main thread lets go
of it exactly while it executes user code.

A process ends in one of these ways, and its exit code says which: see `ExitCode`. Whatever user
code does to end it (`sys.exit`, `os._exit`, a crash) ends it with that code or signal.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipedist.errors import PipedistError, ProtocolError, UsageError
from pipedist.messages import Log, Message
from pipedist.program import Shards, from_tree
from pipedist.transport.codec import Frame, UnsendableError, decode, encode
from pipedist.transport.dealer import ConnectionLost, Dealer
from pipedist.transport.keys import read_key_file
from pipedist.worker import commands, failures
from pipedist.worker.commands import Ending, Execute
from pipedist.worker.events import Event, Finished, Raised, SliceEnded, Started, Tick
from pipedist.worker.execution import Outcome, PassExecutor, PersistentLoop, RangeRun
from pipedist.worker.failures import CallFailure
from pipedist.worker.hello import make_hello
from pipedist.worker.kernel import WORKER_NAME, set_process_name
from pipedist.worker.machine import Limits, State, WorkerMachine
from pipedist.worker.output import OutputCapture
from pipedist.worker.progress import Progress

IDLE_POLL_S = 1.0
"""How long an idle worker waits for a message before it looks around."""

LOG_LINES_WAITING_MAX = 1000
"""Lines printed by threads while the socket was busy; older ones are lost first."""

LINGER_S = 2.0
"""How long the last messages may take to leave."""


class ExitCode(enum.IntEnum):
    """How a worker process ended, where user code did not end it."""

    STOPPED = 0
    CONNECTION_LOST = 68
    """The scheduler is gone, or lets this connection down; the next incarnation may join (EX_NOHOST)."""
    USAGE = 64
    """The endpoint or the key file can't be used (EX_USAGE)."""
    UNANSWERED = 69
    """No scheduler answered (sysexits: EX_UNAVAILABLE)."""
    DEFECT = 70
    """An error in pipedist; its traceback is on stderr (EX_SOFTWARE)."""
    FENCED = 75
    """Put out by the scheduler; the next incarnation may join (EX_TEMPFAIL)."""
    PROTOCOL = 76
    """The scheduler broke the protocol, or refused the handshake (EX_PROTOCOL)."""
    REFUSED = 77
    """Not let in (EX_NOPERM)."""


_EXIT_CODES = {
    Ending.STOPPED: ExitCode.STOPPED,
    Ending.REFUSED: ExitCode.REFUSED,
    Ending.FENCED: ExitCode.FENCED,
    Ending.UNANSWERED: ExitCode.UNANSWERED,
}


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker process is started with.

    Args:
        endpoint: the scheduler's.
        worker: the worker's name in the cluster.
        incarnation: counts its lives.
        key_file: path of the CURVE keys, "" where the endpoint needs none.
        threads: BLAS and OpenMP threads that the environment was set to.
        join_s: how long the scheduler may take to answer, seconds.
    """

    endpoint: str
    worker: str
    incarnation: int
    key_file: str = ""
    threads: int = 1
    join_s: float = 30.0


class Socket(Protocol):
    """What the driver needs of `pipedist.transport.zeromq.Dealer`."""

    def send(
        self,
        message: Message,
        payload: Sequence[Frame] = (),
        *,
        copy: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        """Send a message; `copy` False: the payload's memory does not change any more."""

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message; return whether there is one."""

    def recv(self) -> tuple[Message, list[memoryview]]:
        """Return the next message and its payload."""


class Driver:
    """Carries out the machine's commands over a socket.

    Args:
        socket: to the scheduler.
        machine_: the protocol.
        threads: BLAS and OpenMP threads of this process.
        join_s: how long the connection may take, seconds.
        progress: where the call that runs is noted down.
        fail: ends the process when the reporter thread fails, given the exit code.
    """

    def __init__(
        self,
        socket: Socket,
        machine_: WorkerMachine,
        *,
        threads: int,
        join_s: float,
        progress: Progress,
        fail: Callable[[int], None] = os._exit,
    ) -> None:
        self._socket = socket
        self._machine = machine_
        self._threads = threads
        self._join_s = join_s
        self._progress = progress
        self._fail = fail
        self._core = threading.Lock()
        """Held by whoever uses `_machine` or `_socket`."""
        self._loop = PersistentLoop()
        self._passes: dict[int, PassExecutor] = {}
        self._payloads: dict[int, list[memoryview]] = {}
        """Shards of leases that have not begun."""
        self._frames: list[memoryview] = []
        """Payload of the message that is being handled."""
        self._encoded: Sequence[Frame] = ()
        """Results that are being reported."""
        self._slice: Execute | None = None
        """What to execute next."""
        self._run: RangeRun | None = None
        """The lease that executes."""
        self._left: tuple[Ending, str] | None = None
        self._lines: deque[Log] = deque(maxlen=LOG_LINES_WAITING_MAX)
        self._working = threading.Event()
        """Set while there is work, so that the reporter looks."""
        self._over = threading.Event()
        self.output = OutputCapture(self._log)

    def run(self) -> tuple[Ending, str]:
        """Work until the machine says leave; return why.

        Raises:
            ProtocolError: if the scheduler breaks the protocol.
            BaseException: what user code raised to end the process.
        """
        threading.Thread(target=self._report_regularly, name="pipedist-reporter", daemon=True).start()
        try:
            with self._core:
                self._handle(Started())
            while self._left is None:
                if self._slice is None:
                    self._wait()
                else:
                    self._execute(self._slice)
        finally:
            with self._core:
                # If the connection is what failed, that is the error to tell, not that a line got lost.
                with contextlib.suppress(PipedistError):
                    self._send_lines()
                self._run = None
                self._over.set()
            self._working.set()
        return self._left

    # -- the machine -------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for command in self._machine.handle(event, time.monotonic()):
            _CARRY_OUT[type(command)](self, command)

    def _wait(self) -> None:
        """Wait for messages while there is nothing to execute."""
        with self._core:
            due = self._machine.deadline()
            left = IDLE_POLL_S if due is None else min(IDLE_POLL_S, max(0.0, due - time.monotonic()))
            if self._socket.poll(left):
                self._receive()
            else:
                self._working.clear()
                self._handle(Tick())
            self._send_lines()

    def _receive(self) -> None:
        """Handle every message that is there."""
        while self._left is None and self._socket.poll(0):
            message, self._frames = self._socket.recv()
            try:
                self._handle(message)
            finally:
                self._frames = []

    def _execute(self, slice_: Execute) -> None:
        run = self._begin(slice_)
        if not self._working.is_set():
            self._working.set()
        try:
            failure = run.advance(slice_.slice_s, slice_.slice_bytes)
        except BaseException:
            # User code ends the process. What was finished before it counts, and says who did it.
            with self._core:
                self._report(slice_.lease, run)
            raise
        self._progress.idle()
        self.output.finish()
        with self._core:
            self._slice = None
            self._report(slice_.lease, run)
            if failure is not None:
                run.skip()
                self._report_failure(slice_.lease, failure)
            self._send_lines()
            self._receive()
            if self._left is None:
                self._handle(SliceEnded(slice_.lease))

    def _begin(self, slice_: Execute) -> RangeRun:
        if self._run is None:
            shards = Shards(*decode(self._payloads.pop(slice_.lease), may_import=True))
            executor = self._passes[slice_.pass_id]
            self._run = RangeRun(
                executor, shards, slice_.lo, slice_.hi, self._progress.of_lease(slice_.lease)
            )
        return self._run

    # -- reporting -----------------------------------------------------------------------

    def _report(self, lease: int, run: RangeRun) -> None:
        """Report the calls that have finished; whoever calls holds `_core`."""
        lo, outcomes, busy_ns = run.take()
        if not outcomes:
            return
        hi = lo + len(outcomes)
        try:
            self._encoded = encode(outcomes)
        except UnsendableError:
            for call, outcome in enumerate(outcomes, lo):
                self._report_one(lease, run.executor, call, outcome, busy_ns if call == lo else 0)
        else:
            self._handle(Finished(lease, lo, hi, busy_ns))
        self._encoded = ()

    def _report_one(
        self, lease: int, executor: PassExecutor, call: int, outcome: Outcome, busy_ns: int
    ) -> None:
        for slot, value in outcome.items():
            try:
                encode(value)
            except UnsendableError as error:
                stage = executor.stage_of(slot)
                told = UnsendableError(f"the result of stage {stage!r} can't be sent: {error}")
                self._report_failure(lease, failures.describe(told, call=call, stage=stage, retryable=False))
                return
        self._encoded = encode([outcome])
        self._handle(Finished(lease, call, call + 1, busy_ns))

    def _report_failure(self, lease: int, failure: CallFailure) -> None:
        self._handle(
            Raised(
                lease,
                failure.call,
                failure.stage,
                failure.module,
                failure.name,
                failure.text,
                failure.traceback,
                failure.retryable,
            )
        )

    def _report_regularly(self) -> None:
        """The reporter thread: sends what is finished while the main thread is in a long call."""
        try:
            pause_s = Limits().flush_s
            while not self._over.is_set():
                self._working.wait()
                if self._over.wait(pause_s):
                    return
                with self._core:
                    due = self._machine.deadline()
                    run, slice_ = self._run, self._slice
                    if run is not None and slice_ is not None and due and time.monotonic() >= due:
                        self._report(slice_.lease, run)
                    self._send_lines()
        except BaseException:  # nobody would see a thread die
            _print_to_stderr(traceback.format_exc())
            self._fail(ExitCode.DEFECT)

    def _log(self, line: Log) -> None:
        """Send a line at once if the socket is free, else leave it to whoever uses it."""
        self._lines.append(line)
        if self._core.acquire(blocking=False):
            try:
                self._send_lines()
            finally:
                self._core.release()

    def _send_lines(self) -> None:
        while self._lines and not self._over.is_set():
            self._socket.send(self._lines.popleft(), timeout_s=math.inf)

    # -- commands ------------------------------------------------------------------------

    def _do_send(self, command: commands.Send) -> None:
        joining = self._machine.state is State.JOINING
        self._socket.send(command.message, timeout_s=self._join_s if joining else math.inf)

    def _do_send_results(self, command: commands.SendResults) -> None:
        # A slow reader is back-pressure, not a fault; what is sent was made ours by `boundary.own`.
        self._socket.send(command.message, self._encoded, copy=False, timeout_s=math.inf)

    def _do_join(self, command: commands.Join) -> None:
        """Resolve modules as the scheduler's process on this host does."""
        theirs = [entry for entry in command.welcome.sys_path if os.path.isabs(entry)]
        if theirs:
            sys.path[:] = theirs + [entry for entry in sys.path if entry not in theirs]

    def _do_open_pass(self, command: commands.OpenPass) -> None:
        program = from_tree(decode(self._frames, may_import=True))
        self._passes[command.pass_id] = PassExecutor(program, self._loop, self._threads)

    def _do_drop_pass(self, command: commands.DropPass) -> None:
        self._passes.pop(command.pass_id).close()

    def _do_keep_lease(self, command: commands.KeepLease) -> None:
        self._payloads[command.lease] = self._frames

    def _do_drop_lease(self, command: commands.DropLease) -> None:
        if self._payloads.pop(command.lease, None) is None and self._run is not None:
            run, self._run = self._run, None
            run.abandon()

    def _do_execute(self, command: Execute) -> None:
        self._slice = command

    def _do_leave(self, command: commands.Leave) -> None:
        self._left = (command.ending, command.reason)


_CARRY_OUT: dict[type, Callable[[Driver, Any], None]] = {
    commands.Send: Driver._do_send,
    commands.SendResults: Driver._do_send_results,
    commands.Join: Driver._do_join,
    commands.OpenPass: Driver._do_open_pass,
    commands.DropPass: Driver._do_drop_pass,
    commands.KeepLease: Driver._do_keep_lease,
    commands.DropLease: Driver._do_drop_lease,
    Execute: Driver._do_execute,
    commands.Leave: Driver._do_leave,
}


def run_process(settings: WorkerSettings, progress: Progress | None = None) -> int:
    """Be a worker until the scheduler says stop; return the process's exit code.

    Only for a process that does nothing else: signals, sys.stdout and sys.stderr become the
    worker's. Never raises; what goes wrong is printed to stderr.
    """
    set_process_name(WORKER_NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the scheduler's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    label = f"pipedist worker {settings.worker}"
    try:
        return _work(settings, progress or Progress(), label)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        _print_to_stderr(f"{label}: {error.code}\n")
        return 1
    except ConnectionLost as error:
        _print_to_stderr(f"{label}: {error}\n")
        return ExitCode.CONNECTION_LOST
    except (ProtocolError, UsageError) as error:
        _print_to_stderr(f"{label}: {error}\n")
        return ExitCode.PROTOCOL if isinstance(error, ProtocolError) else ExitCode.USAGE
    except KeyboardInterrupt:
        _print_to_stderr(f"{label} ends: user code raised\n{traceback.format_exc()}")
        return 128 + signal.SIGINT
    except Exception:
        _print_to_stderr(f"{label} ends because of a defect in pipedist\n{traceback.format_exc()}")
        return ExitCode.DEFECT
    except BaseException:
        _print_to_stderr(f"{label} ends: user code raised\n{traceback.format_exc()}")
        return 1


def _work(settings: WorkerSettings, progress: Progress, label: str) -> int:
    keys = read_key_file(settings.key_file).client if settings.key_file else None
    identity = f"{settings.worker}.{settings.incarnation}.{secrets.token_hex(8)}".encode()
    dealer = Dealer(settings.endpoint, identity=identity, keys=keys)
    try:
        protocol = WorkerMachine(
            make_hello(settings.worker, settings.incarnation), Limits(join_s=settings.join_s)
        )
        driver = Driver(dealer, protocol, threads=settings.threads, join_s=settings.join_s, progress=progress)
        driver.output.install()
        ending, reason = driver.run()
    finally:
        dealer.close(LINGER_S)
    if ending is not Ending.STOPPED:
        _print_to_stderr(f"{label}: {ending.value} ({settings.endpoint}): {reason}\n")
    return _EXIT_CODES[ending]


def _print_to_stderr(text: str) -> None:
    stream = sys.__stderr__
    if stream is None:
        return
    stream.write(text)
    stream.flush()
