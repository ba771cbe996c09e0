"""The worker's driver: carries out what its machine decides, and runs user code in between.

The main thread is all there is while nothing takes long: it reads messages, executes a slice of
calls, sends what came of them, and looks for messages again. zmq's own thread fetches the next
messages meanwhile. One helper thread, the REPORTER, sends the results of finished calls when the
main thread is stuck in a long one; it looks every `flush_s` while there is work, and is asleep
when there is none. Machine and socket belong to whoever holds `_core`; the main thread lets go
of it exactly while it executes user code. In a gang whose members meet through the scheduler, a
replica that waits for another member holds it, and handles messages (`bring`, `listen`). What is told of
calls that are over is the business of `Reports`; printed lines find their way by `Uplink`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipedist.errors import PipedistError
from pipedist.protocol.codec import Frame
from pipedist.transport.zeromq.client_socket import ConnectionLost
from pipedist.worker import commands
from pipedist.worker.code_store import CodeStore
from pipedist.worker.commands import Ending, Execute
from pipedist.worker.devices import DevicesUnseen
from pipedist.worker.events import (
    CollectiveOverdue,
    CollectiveReached,
    DataFound,
    Event,
    LeaveRequested,
    RestartNeeded,
    SliceEnded,
    Started,
    TimePassed,
)
from pipedist.worker.joining import Joining
from pipedist.worker.leases import Leases
from pipedist.worker.limits import Limits
from pipedist.worker.log_forwarder import Socket, Uplink
from pipedist.worker.machine import WorkerMachine
from pipedist.worker.output import OutputCapture
from pipedist.worker.progress import Progress
from pipedist.worker.reports import Reports
from pipedist.worker.result_cache import KeptResults
from pipedist.worker.states import State

if TYPE_CHECKING:
    from pipedist.worker.leases import Run

IDLE_POLL_S = 1.0
"""How long an idle worker waits for a message before it looks around."""

LISTEN_S = 0.1
"""How long a replica waits for another member before lines that were printed meanwhile are sent."""


class _Interrupted(Exception):
    """Ends the wait for a message."""


def _tell_nobody(_text: str) -> None:
    return


class Driver:
    """Carries out the machine's commands over a socket.

    Args:
        socket: to the scheduler.
        machine: the protocol.
        threads: BLAS and OpenMP threads of this process.
        join_s: how long the connection may take, seconds.
        progress: where the call that runs is noted down.
        die: ends the process; called with a text when the reporter thread fails.
        tell: told, for people, that the worker has joined, or waits for a scheduler.
        doubt: returns what is wrong with the scheduler's endpoint, as for `Joining`.
        kept: where results are kept until they are durable.
        code: keeps copies of the scheduler's code folders.
    """

    def __init__(
        self,
        socket: Socket,
        machine: WorkerMachine,
        *,
        threads: int,
        join_s: float,
        progress: Progress,
        die: Callable[[str], None],
        tell: Callable[[str], None] = _tell_nobody,
        doubt: Callable[[], str] = str,
        kept: KeptResults | None = None,
        code: CodeStore | None = None,
    ) -> None:
        self._socket = socket
        self._machine = machine
        self._join_s = join_s
        self._progress = progress
        self._die = die
        self._joining = Joining(tell, threads=threads, join_s=join_s, doubt=doubt)
        self._core = threading.Lock()
        """Held by whoever uses `_machine` or `_socket`."""
        self._uplink = Uplink(socket, self._core)
        self._code = CodeStore("", "") if code is None else code
        self._leases = Leases(self, threads, progress.clock, self._code)
        self._reports = Reports(self._handle, KeptResults() if kept is None else kept)
        self._asked_to_leave = ""
        """Why the worker is to leave as soon as it can; "": it is not."""
        self._interruptible = False
        """The main thread waits for a message, and nothing else."""
        self._frames: list[memoryview] = []
        """Payload of the message that is being handled."""
        self._brought: Sequence[Frame] = ()
        """What a gang's replicas bring to a collective."""
        self._slice: Execute | None = None
        """What executes, or is executed next."""
        self._run: Run | None = None
        """The lease that executes."""
        self._left: tuple[Ending, str] | None = None
        self._working = threading.Event()
        """Set while there is work, so that the reporter looks."""
        self._over = threading.Event()
        self.output = OutputCapture(self._uplink.put)

    def run(self) -> tuple[Ending, str]:
        """Work until the machine says leave; return why.

        Raises:
            ProtocolError: if the scheduler breaks the protocol.
            BaseException: what user code raised to end the process.
        """
        threading.Thread(target=self._report_regularly, name="pipedist-reporter", daemon=True).start()
        try:
            self._joining.begin()
            with self._core:
                self._handle(Started())
            while self._left is None:
                if self._asked_to_leave:
                    with self._core:
                        self._handle(LeaveRequested(self._asked_to_leave))
                elif self._slice is None:
                    with contextlib.suppress(_Interrupted):
                        self._wait()
                elif self._slice.lease in self._reports.recalls:
                    self._report_kept(self._slice)
                else:
                    self._execute(self._slice)
        finally:
            with self._core:
                # If the connection is what failed, that is the error to tell, not that a line got lost.
                with contextlib.suppress(PipedistError):
                    self._uplink.send_lines()
                self._uplink.close()
                self._run = None
                self._over.set()
            self._working.set()
            self._leases.close()
        return self._left

    def leave(self, reason: str) -> None:
        """Leave as soon as the calls that run are over; for a signal's handler, in the main thread.

        What is finished is reported, what was not begun goes back to the scheduler.
        """
        self._asked_to_leave = reason
        if self._interruptible:
            raise _Interrupted

    # -- the machine -------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for command in self._machine.handle(event, time.monotonic()):
            _CARRY_OUT[type(command)](self, command)

    def _wait(self) -> None:
        """Wait for messages while there is nothing to execute."""
        with self._core:
            due = self._machine.deadline()
            left = IDLE_POLL_S if due is None else min(IDLE_POLL_S, max(0.0, due - time.monotonic()))
            if self._poll(left):
                self._receive()
            else:
                self._working.clear()
                self._handle(TimePassed())
                self._joining.look()
            self._uplink.send_lines()

    def _poll(self, timeout_s: float) -> bool:
        """Wait for a message; what asks the worker to leave ends the wait."""
        try:
            self._interruptible = True
            return not self._asked_to_leave and self._socket.poll(timeout_s)
        finally:
            self._interruptible = False

    def _receive(self) -> None:
        """Handle every message that is there."""
        while self._left is None and self._socket.poll(0):
            message, self._frames = self._socket.recv()
            try:
                self._handle(message)
            finally:
                self._frames = []

    def _execute(self, slice_: Execute) -> None:
        try:
            run = self._begin(slice_)
        except DevicesUnseen as error:
            with self._core:
                self._handle(RestartNeeded(str(error)))
            return
        if not self._working.is_set():
            self._working.set()
        try:
            failure = run.advance(slice_.slice_s, slice_.slice_bytes)
        except BaseException:
            # User code ends the process. What was finished before it counts, and says who did it.
            with self._core:
                self._reports.finished(slice_.lease, run)
            raise
        self._progress.idle()
        self.output.finish()
        with self._core:
            if self._uplink.fault is not None:
                self._keep_rest(slice_.lease, run)
                raise self._uplink.fault
            if self._run is not run or self._left is not None:
                return  # a gang, whose lease was dropped while its replicas listened
            self._reports.finished(slice_.lease, run)
            self._uplink.send_lines()
            if failure is not None:
                run.skip()
                self._reports.failed(slice_.lease, failure)
            self._handle(SliceEnded(slice_.lease))
            if self._slice is not None:  # otherwise it is waited for a message anyway
                self._receive()

    def _keep_rest(self, lease: int, run: Run) -> None:
        """Keep what was finished while the connection was lost: the next incarnation may offer it."""
        if isinstance(self._uplink.fault, ConnectionLost) and self._run is run:
            with contextlib.suppress(ConnectionLost):
                self._reports.finished(lease, run)

    def _report_kept(self, slice_: Execute) -> None:
        """Report calls that were finished for a scheduler that is gone."""
        with self._core:
            self._reports.recalled(slice_)
            self._handle(SliceEnded(slice_.lease))
            self._receive()

    def _begin(self, slice_: Execute) -> Run:
        if self._run is None:
            self._run = self._leases.begin(slice_, self._progress.of_lease(slice_.lease))
        return self._run

    # -- gangs: called by replicas, in their threads ----------------------------------------

    def bring(self, lease: int, number: int, payload: Sequence[Frame]) -> None:
        """Send a gang's part of an exchange; see `pipedist.worker.relay_channel.Hub`."""
        with self._listening(lease):
            self._brought = payload
            self._handle(CollectiveReached(lease, number))
            self._brought = ()

    def listen(self, lease: int, timeout_s: float) -> None:
        """Handle what the scheduler says meanwhile; see `pipedist.worker.relay_channel.Hub`."""
        with self._listening(lease):
            if self._socket.poll(min(timeout_s, LISTEN_S)):
                self._receive()
            self._uplink.send_lines()

    def miss(self, lease: int, members: tuple[int, ...], text: str) -> None:
        """Tell that a collective has waited too long; see `pipedist.worker.gang_setup.Scheduler`."""
        with self._listening(lease):
            self._handle(CollectiveOverdue(lease, tuple(map(str, members)), text))

    @contextlib.contextmanager
    def _listening(self, lease: int) -> Iterator[None]:
        """Use machine and socket in a replica's thread, as long as its lease stands."""
        from pipedist.collectives.channel import GangAborted  # loaded already

        with self._core:
            if self._uplink.fault is None and self._holds(lease):
                try:
                    yield
                except BaseException as error:  # it ends the process, but not in the middle of user code
                    self._uplink.fault = error
                if self._uplink.fault is None:
                    return
            raise GangAborted("the scheduler has cancelled the step")

    def _holds(self, lease: int) -> bool:
        return self._left is None and self._leases.is_gangs(lease)

    # -- reporting -----------------------------------------------------------------------

    def _report_regularly(self) -> None:
        """The reporter thread: sends what is finished while the main thread is in a long call."""
        try:
            pause_s = Limits().flush_s
            while not self._over.is_set():
                self._working.wait()
                if self._over.wait(pause_s):
                    return
                with self._core:
                    if self._uplink.fault is not None:
                        return  # there is nobody to report to; the main thread tells it
                    due = self._machine.deadline()
                    run, slice_ = self._run, self._slice
                    try:
                        if run is not None and slice_ is not None and due and time.monotonic() >= due:
                            self._reports.finished(slice_.lease, run)
                        self._uplink.send_lines()
                    except ConnectionLost as error:  # what runs may go on, and is kept
                        self._uplink.fault = error
        except BaseException:  # nobody would see a thread die
            self._die(traceback.format_exc())

    # -- commands ------------------------------------------------------------------------

    def _do_send(self, command: commands.Send) -> None:
        joining = self._machine.state is State.JOINING
        self._socket.send(command.message, timeout_s=self._join_s if joining else math.inf)

    def _do_send_results(self, command: commands.SendResults) -> None:
        if command.cache_pass:
            self._reports.keep(command.cache_pass, command.message)
        self._uplink.send_lines()  # first: the run may be over with these results, and nobody listens then
        # A slow reader is back-pressure, not a fault; what is sent was made ours by `boundary.own`.
        self._socket.send(command.message, self._reports.payload, copy=False, timeout_s=math.inf)

    def _do_send_exchange(self, command: commands.SendExchange) -> None:
        # A copy: its memory is the replicas', who go on when the others have answered.
        self._socket.send(command.message, self._brought, timeout_s=math.inf)

    def _do_join(self, command: commands.Join) -> None:
        self._joining.joined(command.welcome)

    def _do_open_pass(self, command: commands.OpenPass) -> None:
        self._reports.open_pass(command.pass_id, command.key)
        self._leases.open_pass(command.pass_id, self._frames, elsewhere=command.elsewhere)
        if command.elsewhere and self._leases.sees_data(command.pass_id):
            self._handle(DataFound(command.pass_id))

    def _do_keep_code(self, command: commands.StoreCode) -> None:
        self._code.keep(command.code, self._frames)

    def _do_drop_pass(self, command: commands.DropPass) -> None:
        self._reports.drop_pass(command.pass_id)
        self._leases.drop_pass(command.pass_id)

    def _do_keep_lease(self, command: commands.StoreLease) -> None:
        self._leases.keep(command.lease, self._frames, command.gang)

    def _do_recall_lease(self, command: commands.RecallLease) -> None:
        self._reports.recalls.add(command.lease)

    def _do_let_go(self, command: commands.ReleaseResults) -> None:
        self._reports.settle(command.pass_id, command.before)

    def _do_keep_relay(self, command: commands.StoreRelay) -> None:
        self._leases.keep_relay(command.relay, self._frames)

    def _do_keep_state(self, command: commands.StoreState) -> None:
        self._leases.states.receive(command.space, command.version, self._frames)

    def _do_forget_state(self, command: commands.ReleaseState) -> None:
        self._leases.states.forget(command.space)

    def _do_drop_lease(self, command: commands.DropLease) -> None:
        if self._slice is not None and self._slice.lease == command.lease:
            self._slice = None
        if command.lease in self._reports.recalls:
            self._reports.recalls.discard(command.lease)
            return
        if not self._leases.drop(command.lease) and self._run is not None:
            run, self._run = self._run, None
            run.abandon()

    def _do_execute(self, command: Execute) -> None:
        self._slice = command

    def _do_leave(self, command: commands.Leave) -> None:
        self._left = (command.ending, command.reason)


_CARRY_OUT: dict[type, Callable[[Driver, Any], None]] = {
    commands.Send: Driver._do_send,
    commands.SendResults: Driver._do_send_results,
    commands.SendExchange: Driver._do_send_exchange,
    commands.Join: Driver._do_join,
    commands.StoreCode: Driver._do_keep_code,
    commands.OpenPass: Driver._do_open_pass,
    commands.DropPass: Driver._do_drop_pass,
    commands.StoreLease: Driver._do_keep_lease,
    commands.RecallLease: Driver._do_recall_lease,
    commands.ReleaseResults: Driver._do_let_go,
    commands.StoreRelay: Driver._do_keep_relay,
    commands.StoreState: Driver._do_keep_state,
    commands.ReleaseState: Driver._do_forget_state,
    commands.DropLease: Driver._do_drop_lease,
    Execute: Driver._do_execute,
    commands.Leave: Driver._do_leave,
}
