"""The worker's driver: executes the commands of the state machine, and runs user code in between.

The main thread reads messages, executes a slice of calls, sends their results, and checks for messages again.
ZeroMQ's own thread receives the next messages meanwhile. One more thread, the REPORTER, sends the results of
finished calls while the main thread is in a long one: it checks every `flush_s` while there is work, and sleeps
otherwise.

Machine and socket belong to the thread that holds `_lock`; the main thread releases it exactly while it executes
user code. In a gang whose parts go through the driver process, a replica that waits for another member holds the
lock, and handles messages (`contribute`, `listen`).

A gang's lease that comes while there is nothing else is executed before the machine sees it, and is one event for the
machine when it is over (`_execute_step`). If anything else comes, such as a failure or a collective through the driver
process, the machine sees its `AssignGang` first (`_hand_over`).

`ResultReporter` reports finished calls, `LogForwarder` sends printed lines.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, assert_never

from pipedist.errors import PipedistError
from pipedist.protocol import messages as msg
from pipedist.protocol.code_archive import CodeStore
from pipedist.protocol.codec import Frame
from pipedist.transport.dealer import ConnectionLost
from pipedist.worker import commands
from pipedist.worker import events as ev
from pipedist.worker.commands import Ending, Execute
from pipedist.worker.devices import DevicesUnseen
from pipedist.worker.identity import JoinReporter
from pipedist.worker.lease_queue import WorkerLimits
from pipedist.worker.lease_run import LeaseRun, RejectedLeaseRun
from pipedist.worker.leases import Leases
from pipedist.worker.log_forwarding import LogForwarder, OutputCapture, Socket
from pipedist.worker.machine import WorkerMachine
from pipedist.worker.progress import CallProgress
from pipedist.worker.result_cache import ResultCache, ResultReporter

if TYPE_CHECKING:
    from pipedist.worker.failures import CallFailure
    from pipedist.worker.leases import Run

IDLE_POLL_S = 1.0  # how long an idle worker waits for a message before it checks its deadlines
OVERLAP_S = 0.05  # how long calls that wait go on before messages are checked, at most
LISTEN_S = 0.1  # how long a replica waits for another member before printed lines are sent


class _Interrupted(Exception):
    """Ends the wait for a message (`Driver.leave`)."""


class Driver:
    """Executes the machine's commands over a socket."""

    def __init__(
        self,
        socket: Socket,
        machine: WorkerMachine,
        *,
        threads: int,
        join_s: float,  # maximum time until the connection is made, seconds
        progress: CallProgress,
        die: Callable[[str], None],  # ends the process; called with a text when the reporter thread fails
        report: Callable[[str], None] = lambda _text: None,  # prints that the worker has joined, or waits
        diagnose: Callable[[], str] = str,  # a problem of the scheduler's endpoint, as for `JoinReporter`
        cache: ResultCache | None = None,
        code: CodeStore | None = None,
    ) -> None:
        self._socket = socket
        self._machine = machine
        self._join_s = join_s
        self._progress = progress
        self._die = die
        self._join_reporter = JoinReporter(report, threads=threads, join_s=join_s, diagnose=diagnose)
        self._lock = threading.Lock()  # held by the thread that uses `_machine` or `_socket`
        self._log_forwarder = LogForwarder(socket, self._lock)
        self._code = CodeStore("", "") if code is None else code
        self._leases = Leases(self, threads, progress.clock, self._code, self._log_forwarder.put)
        self._reports = ResultReporter(self._handle, ResultCache() if cache is None else cache)
        self._leave_reason = ""  # reason to leave as soon as possible; "": none
        self._interruptible = False  # whether the main thread only waits for a message
        self._frames: list[memoryview] = []  # payload of the message being handled
        self._contribution: Sequence[Frame] = ()  # the replicas' part of a collective that is being sent
        self._slice: Execute | None = None  # the slice that executes, or is next
        self._step: tuple[msg.AssignGang, list[memoryview]] | None = None
        """A lease that the machine has not seen, and its payload."""
        self._run: Run | None = None  # the run of the executing lease
        self._beginning: deque[commands.Begin] = deque()  # leases that overlap, and have not begun
        self._left: tuple[Ending, str] | None = None
        self._working = threading.Event()  # set while there is work; the reporter waits for it
        self._is_working = False  # in the main thread: whether it set `_working` for a slice
        self._over = threading.Event()
        self.output = OutputCapture(self._log_forwarder.put)

    def run(self) -> tuple[Ending, str]:
        """Work until the machine commands to leave; return the reason.

        An exception with which user code ends the process passes through.
        """
        threading.Thread(target=self._report_regularly, name="pipedist-reporter", daemon=True).start()
        try:
            self._join_reporter.begin()
            with self._lock:
                self._handle(ev.Started())
            while self._left is None:
                try:
                    if self._leave_reason:
                        with self._lock:
                            self._handle(ev.LeaveRequested(self._leave_reason))
                    elif self._step is not None:
                        self._execute_step(*self._step)
                    elif self._leases.overlapping.runs or self._beginning:
                        self._overlap()
                        if self._slice is not None and self._left is None:
                            self._execute_next(self._slice)
                    elif self._slice is None:
                        self._wait()
                    else:
                        self._execute_next(self._slice)
                except _Interrupted:
                    continue
                except DevicesUnseen as error:
                    with self._lock:
                        self._handle(ev.RestartNeeded(str(error)))
        finally:
            with self._lock:
                # If the connection failed, its error is raised already; a lost line is less important.
                with contextlib.suppress(PipedistError):
                    self._log_forwarder.send_lines()
                self._log_forwarder.close()
                self._run = None
                self._over.set()
            self._working.set()
            self._leases.close()
        return self._left

    def leave(self, reason: str) -> None:
        """Leave as soon as the running calls are over; for a signal handler, in the main thread."""
        self._leave_reason = reason
        if self._interruptible:
            raise _Interrupted

    # -- the machine -------------------------------------------------------------------

    def _handle(self, event: ev.Event) -> None:
        for command in self._machine.handle(event, time.monotonic()):
            self._do(command)

    def _wait(self) -> None:
        with self._lock:
            due = self._machine.due
            left = IDLE_POLL_S if due is None else min(IDLE_POLL_S, max(0.0, due - time.monotonic()))
            if self._poll(left):
                self._receive(is_readable=True)
            else:
                self._is_working = False
                self._working.clear()
                self._handle(ev.TimePassed())
                self._join_reporter.check()
            if self._log_forwarder.lines:
                self._log_forwarder.send_lines()

    def _poll(self, timeout_s: float) -> bool:
        """Wait for a message; a request to leave ends the wait."""
        try:
            self._interruptible = True
            return not self._leave_reason and self._socket.poll(timeout_s)
        finally:
            self._interruptible = False

    def _receive(self, *, is_readable: bool = False) -> None:
        """Handle all messages that have arrived; `is_readable`: there is one."""
        while self._left is None and (is_readable or self._socket.poll(0)):
            is_readable = False
            message, self._frames = self._socket.recv()
            self._hand_over()  # one that came just before
            try:
                if type(message) is msg.AssignGang and self._machine.executes_at_once(message):
                    self._step = message, self._frames
                    continue
                if isinstance(message, msg.Cancel) and message.lease in self._leases.overlapping.runs:
                    self._report_overlapping()
                    self._leases.overlapping.runs[message.lease].abandon()
                    self._report_overlapping()  # elements that were over before their call was
                self._handle(message)
            finally:
                self._frames = []

    def _execute_next(self, slice_: Execute) -> None:
        if slice_.lease not in self._reports.recalls:
            self._execute(slice_)
            return
        with self._lock:
            self._reports.recalled(slice_)
            self._handle(ev.SliceEnded(slice_.lease))
            self._receive()

    def _overlap(self) -> None:
        """Let the calls of overlapping leases go on until one is over or a message arrives, and report them."""
        overlapping = self._leases.overlapping
        self._working.set()
        while self._beginning:
            begin = self._beginning.popleft()
            run = self._leases.begin(begin, self._progress.of_lease(begin.lease))
            assert isinstance(run, LeaseRun | RejectedLeaseRun)
            overlapping.runs[begin.lease] = run
        try:
            overlapping.advance(0.0 if self._slice is not None else OVERLAP_S, self._socket.fileno())
        except BaseException:  # as in `_execute`
            with self._lock:
                self._report_overlapping()
            raise
        self._progress.idle()
        self.output.finish()
        with self._lock:
            if (fault := self._log_forwarder.fault) is not None:
                raise fault
            self._report_overlapping()
            self._log_forwarder.send_lines()
            self._receive()

    def _report_overlapping(self) -> None:
        """Report finished calls and elements of overlapping leases; the caller holds the lock."""
        for lease, run in list(self._leases.overlapping.runs.items()):
            self._reports.elements(lease, run)
            while run.has_done and not run.is_over:
                failure = run.collect()
                self._reports.finished(lease, run)
                if failure is not None:
                    run.skip()
                    self._reports.failed(lease, failure)

        self._report_quotas()

    def _report_quotas(self) -> None:
        """Confirm lower quotas that are met; the caller holds the lock."""
        for pass_id, calls in self._leases.quotas_met():
            self._handle(ev.QuotaReached(pass_id, calls))

    def _execute(self, slice_: Execute) -> None:
        if self._run is None:
            self._run = self._leases.begin(slice_, self._progress.of_lease(slice_.lease))
        run = self._run
        try:
            failure = self._advance(run, slice_.slice_s, slice_.slice_bytes)
        except DevicesUnseen:
            raise
        except BaseException:
            # User code ends the process. Reporting the finished calls lets the scheduler identify the running one.
            with self._lock:
                self._reports.finished(slice_.lease, run)
            raise
        self._progress.idle()
        self.output.finish()
        with self._lock:
            self._report(slice_.lease, run, failure)

    def _advance(self, run: Run, slice_s: float, slice_bytes: int) -> CallFailure | None:
        if not self._is_working:  # as `_working`, which is set in Python
            self._is_working = True
            self._working.set()
        return run.advance(slice_s, slice_bytes)

    def _report(self, lease: int, run: Run, failure: CallFailure | None) -> None:
        """Report what a slice has executed; the caller holds the lock."""
        if (fault := self._log_forwarder.fault) is not None:
            if isinstance(fault, ConnectionLost) and self._run is run:
                with contextlib.suppress(ConnectionLost):  # the next incarnation offers the finished calls
                    self._reports.finished(lease, run)
            raise fault
        if self._run is not run or self._left is not None:
            return  # the lease of a gang was dropped while its replicas handled messages
        self._reports.finished(lease, run)
        if self._log_forwarder.lines:
            self._log_forwarder.send_lines()
        if failure is not None:
            run.skip()
            self._reports.failed(lease, failure)
        self._handle(ev.SliceEnded(lease))
        if self._slice is not None:  # else `run` waits for messages next
            self._receive()

    # -- steps -----------------------------------------------------------------------------

    def _execute_step(self, assigned: msg.AssignGang, frames: list[memoryview]) -> None:
        """Execute a gang's lease that the machine has not seen, and report it as one event."""
        lease = assigned.lease
        try:
            run = self._run = self._leases.begin_step(assigned, frames, self._progress.of_lease(lease))
            if run is not None:
                failure = self._advance(run, 0.0, 0)
        except BaseException:
            with self._lock:
                self._hand_over()
            raise
        if run is None:
            with self._lock:
                self._hand_over()
            return
        self._progress.idle()
        self.output.finish()
        with self._lock:
            is_unseen = self._step is not None and failure is None and self._log_forwarder.fault is None
            if is_unseen and not isinstance(run, RejectedLeaseRun) and self._reports.step(assigned, run):
                self._step = self._run = None
                return
            self._hand_over()
            self._report(lease, run, failure)

    def _hand_over(self) -> None:
        """Have the machine see a lease that it has not seen before another event; the caller holds the lock."""
        if self._step is None:
            return
        (assigned, frames), self._step = self._step, None
        before, self._frames = self._frames, frames
        self._handle(assigned)
        self._frames = before
        if self._run is not None:
            self._leases.has_begun(assigned.lease)

    # -- gangs: called by replicas, in their threads ----------------------------------------

    def contribute(self, lease: int, number: int, payload: Sequence[Frame]) -> None:
        with self._listening(lease):
            self._contribution = payload
            self._handle(ev.CollectiveReached(lease, number))
            self._contribution = ()

    def listen(self, lease: int, timeout_s: float) -> None:
        with self._listening(lease):
            if self._socket.poll(min(timeout_s, LISTEN_S)):
                self._receive(is_readable=True)
            self._log_forwarder.send_lines()

    def report_stalled(self, lease: int, members: tuple[int, ...], text: str) -> None:
        with self._listening(lease):
            self._handle(ev.CollectiveOverdue(lease, tuple(map(str, members)), text))

    @contextlib.contextmanager
    def _listening(self, lease: int) -> Iterator[None]:
        """Use machine and socket in a replica's thread while its lease exists."""
        from pipedist.collectives.channel import GangAborted  # loaded already

        with self._lock:
            self._hand_over()
            if self._log_forwarder.fault is None and self._left is None and self._leases.is_gang_lease(lease):
                try:
                    yield
                except BaseException as error:  # the main thread raises it after the user code
                    self._log_forwarder.fault = error
                if self._log_forwarder.fault is None:
                    return
            raise GangAborted("the scheduler has cancelled the step")

    # -- reporting -----------------------------------------------------------------------

    def _report_regularly(self) -> None:
        """Send finished calls while the main thread is in a long one (reporter thread)."""
        try:
            pause_s = WorkerLimits().flush_s
            while not self._over.is_set():
                self._working.wait()
                if self._over.wait(pause_s):
                    return
                # Looks before it takes the lock, for which the main thread would have to wait between two steps.
                due = self._machine.due
                if (due is None or time.monotonic() < due) and not self._log_forwarder.lines:
                    continue
                with self._lock:
                    if self._log_forwarder.fault is not None:
                        return  # the connection is lost; the main thread raises the error
                    due = self._machine.due
                    run, slice_ = self._run, self._slice
                    try:
                        if run is not None and slice_ is not None and due and time.monotonic() >= due:
                            self._reports.finished(slice_.lease, run)
                        if due and time.monotonic() >= due:
                            self._report_overlapping()
                        self._log_forwarder.send_lines()
                    except ConnectionLost as error:  # the running calls continue, and are cached
                        self._log_forwarder.fault = error
        except BaseException:  # the end of a thread alone would go unnoticed
            self._die(traceback.format_exc())

    # -- commands ------------------------------------------------------------------------

    def _do(self, command: commands.Command) -> None:
        match command:
            case commands.Send(message):
                joining = self._machine.state is ev.ProtocolState.JOINING
                self._socket.send(message, timeout_s=self._join_s if joining else math.inf)
            case commands.SendResults(message, cache_pass):
                if cache_pass and isinstance(message, msg.Results):
                    self._reports.store(cache_pass, message)
                if isinstance(message, msg.Results):
                    message = self._reports.measured(message)
                if (
                    self._log_forwarder.lines
                ):  # first: these results may end the run, and with it all listeners
                    self._log_forwarder.send_lines()
                # No timeout: a slow reader is back-pressure. No copy: `take_ownership` has made the payload exclusive.
                self._socket.send(message, self._reports.payload, copy=False, timeout_s=math.inf)
            case Execute():
                self._slice = command
            case commands.Begin():
                self._beginning.append(command)
            case commands.Apply(message):
                self._apply(message)
            case commands.DropLease(lease):
                self._drop_lease(lease)
            case commands.SendExchange(message):
                # Copied: the replicas own the memory, and continue when the other parts have arrived.
                self._socket.send(message, self._contribution, timeout_s=math.inf)
            case commands.Leave(ending, reason):
                self._left = (ending, reason)
            case _:
                assert_never(command)

    def _apply(self, message: commands.Applied) -> None:
        match message:
            case msg.Assign(lease):
                self._leases.store(lease, self._frames, None)
            case msg.AssignGang(lease):
                self._leases.store(lease, self._frames, message)
            case msg.Recall(lease):
                self._reports.recalls.add(lease)
            case msg.Relay():
                self._leases.store_relay(message, self._frames)
            case msg.StateVersion(space, version):
                self._leases.states.receive(space, version, self._frames)
            case msg.DropState(space):
                self._leases.states.drop(space)
            case msg.Committed(pass_id, before):
                self._reports.release(pass_id, before)
            case msg.Quota():
                self._leases.use_quota(message)
                self._report_quotas()
            case msg.Bind(pass_id, key, elsewhere):
                self._reports.open_pass(pass_id, key)
                self._leases.open_pass(pass_id, self._frames, elsewhere=elsewhere)
                if elsewhere and self._leases.sees_data(pass_id):
                    self._handle(ev.DataFound(pass_id))
            case msg.Unbind(pass_id):
                self._reports.drop_pass(pass_id)
                self._leases.drop_pass(pass_id)
            case msg.Code():
                self._code.add(message, self._frames)
            case msg.Welcome():
                self._join_reporter.joined(message)
            case _:
                assert_never(message)

    def _drop_lease(self, lease: int) -> None:
        if self._leases.overlapping.runs and self._leases.overlapping.drop(lease):
            return
        if self._beginning:
            self._beginning = deque(begin for begin in self._beginning if begin.lease != lease)
        if self._slice is not None and self._slice.lease == lease:
            self._slice = None
        if lease in self._reports.recalls:
            self._reports.recalls.discard(lease)
        elif not self._leases.drop(lease) and self._run is not None:
            run, self._run = self._run, None
            run.abandon()
