"""A worker process of a simulated cluster: the real driver, machine and execution, in virtual time.

Its socket is a simulated connection. Before a call runs, the virtual time of that call passes; then the
user's function is executed, at one instant of virtual time. The process can be killed or stopped whenever it
waits: between calls, before a call, or in a collective.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from pipedist.core.gpus import GPUS_MAX
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.codec import Frame
from pipedist.protocol.messages import Message
from pipedist.protocol.wire import pack, unpack
from pipedist.testing.cooperative_threads import CooperativeThreads, Killed
from pipedist.testing.faults import PAUSE_S_MAX, SLOW_TIMES, STOPPED_S_MAX, Faults
from pipedist.testing.network import FaultyNetwork
from pipedist.testing.virtual_clock import VirtualLoop
from pipedist.worker.commands import Ending
from pipedist.worker.driver import Driver
from pipedist.worker.lease_queue import WorkerLimits
from pipedist.worker.machine import WorkerMachine
from pipedist.worker.process_setup import make_hello
from pipedist.worker.progress import CallProgress, Running

CALL_S_MAX = 0.02  # the longest call without a declared cost; durations are mixed
_LOOP_TURNS_MAX = 10  # turns of an event loop in which the tasks of an ended process may finish

Received = tuple[Message, list[memoryview]]
OnExit = Callable[["SimulatedProcess", int | None, int | None, str, Running | None], None]

_EXIT_CODES = {Ending.STOPPED: 0, Ending.REFUSED: 77, Ending.FENCED: 75, Ending.UNANSWERED: 69}


class SimulatedHost:
    """The environment of simulated processes: loop, network, faults and costs of calls.

    `threads` is the number of BLAS and OpenMP threads that workers report.
    """

    def __init__(self, loop: VirtualLoop, random: Random, faults: Faults, threads: int) -> None:
        self.loop = loop
        self.random = random
        self.threads = threads
        self.network = FaultyNetwork(loop, random, faults, faithful=True)
        self.costs: dict[int, float] = {}  # declared seconds of a call, by pass
        # Called with each message that arrives at the coordinator.
        self.on_arrival: Callable[[SimulatedProcess, Received], None] | None = None
        # Called when the exit of a process is reported to the coordinator.
        self.on_exit_reported: Callable[[SimulatedProcess], None] | None = None
        # Called with each process that ended: its exit code, signal, a description, and its call.
        self.on_exit: OnExit | None = None
        self.poisoned = 0  # number of messages of superseded attempts, whose results were replaced
        self.defects: list[BaseException] = []  # exceptions that ended workers; messages did not cause them
        self.on_defect: Callable[[], object] = lambda: None
        self.blocked_at = ""  # place of a function when the simulation was interrupted, as in a traceback
        self._faults = faults
        self._turn_rate = faults.crash + faults.pause
        self._slow_rate = faults.slow

    def stop_faults(self) -> None:
        self.network.stop_faults()
        self._turn_rate = self._slow_rate = 0.0

    def soon(self, within_s: float, action: Callable[..., object], *args: object) -> None:
        """Call an action at a random time within a limit."""
        self.loop.at(self.loop.now + within_s * self.random.random(), action, *args)

    def draws_fault(self) -> bool:
        """Draw whether a fault affects a worker in its turn."""
        return self._turn_rate > 0 and self.random.random() < self._turn_rate

    def draws_crash(self) -> bool:
        """Draw whether that fault is a crash or a pause, and count it."""
        crash = self.random.random() * (self._faults.crash + self._faults.pause) < self._faults.crash
        self.network.counts["crash" if crash else "pause"] += 1
        return crash

    def cost_s(self, pass_id: int) -> float:
        """Draw the duration of a call of a pass."""
        cost = self.costs.get(pass_id)
        if cost is None:
            cost = CALL_S_MAX * self.random.random() ** 3
        if self._slow_rate and self.random.random() < self._slow_rate:
            self.network.counts["slow"] += 1
            cost *= SLOW_TIMES
        return cost


class SimulatedProcess:
    """The process of one incarnation of a worker."""

    def __init__(self, host: SimulatedHost, worker: str, incarnation: int) -> None:
        self._host = host
        self._loop = host.loop
        self.worker = worker
        self.incarnation = incarnation
        self.identity = f"{worker}.{incarnation}".encode()
        self.machine = WorkerMachine(make_hello(worker, incarnation, gpus=GPUS_MAX), WorkerLimits())
        self.running: Running | None = None  # the call that it executes
        self.alive = True
        self.asleep = False  # it is stopped (SIGSTOP)
        self._inbox: deque[Received] = deque()
        self._threads = CooperativeThreads(self._work, self._sleep, lambda: self._loop.is_interrupted)
        self._waits = 0  # number of waits so far; a timer of an earlier wait has no effect
        self._listens = False  # it waits for a message or a timeout, not only for time to pass
        self._overdue = False
        self._driver: SimulatedDriver | None = None
        self._ending = (Ending.STOPPED, "")
        self.connection = host.network.connect(up=self._arrived, down=self._receive, on_cut=self._on_cut)

    def begin(self) -> None:
        if self.alive:
            self._threads.start()
            self._check_exit()

    def _work(self) -> None:
        self._driver = SimulatedDriver(
            self,
            self.machine,
            threads=self._host.threads,
            join_s=WorkerLimits().join_s,
            progress=SimulatedProgress(self),
            die=_die,
        )
        try:
            self._ending = self._driver.run()
        finally:
            _close_loop()

    # -- the simulation's side -----------------------------------------------------------------------

    def _arrived(self, item: Received) -> None:
        if self._host.on_arrival is not None:
            self._host.on_arrival(self, item)

    def _receive(self, item: Received) -> None:
        if self.alive:
            self._inbox.append(item)
            if self._listens:
                self._wake(self._waits)

    def _wake(self, wait: int) -> None:
        if not self.alive or wait != self._waits:
            return
        if self.asleep:
            self._overdue = True
            return
        if self._host.draws_fault():
            self._inject_fault()
            if not self._can_go_on():
                self._overdue = True
                return
        self._waits += 1
        self._listens = False
        self._threads.resume()
        self._check_exit()

    def _can_go_on(self) -> bool:
        return self.alive and not self.asleep

    def _check_exit(self) -> None:
        self._host.blocked_at = self._threads.blocked_at or self._host.blocked_at
        if not self._threads.is_over or not self.alive:
            return
        error = self._threads.error
        if error is None:
            ending, reason = self._ending
            self._exit(_EXIT_CODES[ending], None, f"exit code {_EXIT_CODES[ending]}: {reason}")
        else:
            if not isinstance(error, RemoteProtocolError):  # faults of messages lead to those
                self._host.defects.append(error)
                self._host.on_defect()
            self._exit(70, None, f"exit code 70: {type(error).__name__}: {error}")

    def _inject_fault(self) -> None:
        if self._host.draws_crash():
            self.kill()
        else:
            self.asleep = True
            self._loop.at(self._loop.now + PAUSE_S_MAX * self._host.random.random() ** 2, self._resume)
            self._loop.at(self._loop.now + STOPPED_S_MAX, self._kill_stopped, self._waits)

    def _kill_stopped(self, wait: int) -> None:
        if self.asleep and wait == self._waits:
            self.kill()

    def _resume(self) -> None:
        if self.alive and self.asleep:
            self.asleep = False
            if self._overdue or (self._listens and self._inbox):
                self._overdue = False
                self._wake(self._waits)

    def _on_cut(self) -> None:
        if self.alive:
            self._exit(68, None, "exit code 68")

    def kill(self) -> None:
        """End the process with SIGKILL; does nothing if it has ended."""
        if self.alive:
            self._exit(None, 9, "signal 9 (SIGKILL)")

    def _exit(self, code: int | None, signal: int | None, text: str) -> None:
        self.alive = False
        running, self.running = self.running, None
        self.connection.close()
        self._threads.kill()
        if self._host.on_exit is not None:
            self._host.on_exit(self, code, signal, text, running)

    # -- in its own threads: the socket of its driver ----------------------------------------------------

    def send(
        self, message: Message, payload: Sequence[Frame] = (), *, copy: bool = True, timeout_s: float = 60.0
    ) -> None:
        """Send a message to the driver, unless this process has ended."""
        if self.alive and not self._threads.is_killed:
            self.connection.send_up((unpack(pack(message)), frozen(payload)))

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message; return whether there is one. Raise Killed if the process was killed."""
        if self._inbox or timeout_s <= 0:
            if not self.alive:
                raise Killed
            return bool(self._inbox)
        self._listens = True
        # The driver polls every second; in virtual time that is only useful before a deadline.
        self._wait(timeout_s if self.machine.due is not None else None)
        return bool(self._inbox)

    def recv(self) -> Received:
        return self._inbox.popleft()

    def fileno(self) -> int:
        return -1

    def _sleep(self, for_s: float) -> None:
        self._listens = False
        self._wait(for_s)

    def _wait(self, for_s: float | None) -> None:
        if for_s is not None:
            self._loop.at(self._loop.now + for_s, self._wake, self._waits)
        self._threads.park()

    def spend(self, lease: int, call: int) -> None:
        """Wait for the duration of a call; report the finished calls when that is due."""
        self.running = Running(lease, call, 1)
        driver, due = self._driver, self.machine.due
        assert driver is not None
        cost = self._host.cost_s(driver.pass_of_slice())
        if due is not None and due < self._loop.now + cost:
            left_s = max(0.0, due - self._loop.now)
            self._sleep(left_s)
            driver.report_finished()
            cost -= left_s
        self._sleep(cost)


class SimulatedDriver(Driver):
    """The real driver, without its reporting thread, which would use the real clock."""

    def _report_regularly(self) -> None:
        """Do nothing: `SimulatedProcess.spend` reports."""

    def report_finished(self) -> None:
        """Report the finished calls while the next one runs."""
        with self._lock:
            if self._run is not None and self._slice is not None:
                self._reports.finished(self._slice.lease, self._run)
            self._report_overlapping()

    def pass_of_slice(self) -> int:
        return self._slice.pass_id if self._slice is not None else 0


class SimulatedProgress(CallProgress):
    """Waits for the duration of each call that the driver starts."""

    def __init__(self, worker: SimulatedProcess) -> None:
        self._worker = worker

    def idle(self) -> None:
        self._worker.running = None

    def of_lease(self, lease: int) -> Callable[[int], None]:
        """Return the function that records the start of a call; it may be called repeatedly."""
        begun = -1

        def begin(call: int) -> None:
            nonlocal begun
            if call > begun:
                begun = call
                self._worker.spend(lease, call)

        return begin


def _close_loop() -> None:
    """Close this thread's event loop; a killed process may have unfinished tasks."""
    try:
        loop = asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:  # there is none
        return
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    for _ in range(_LOOP_TURNS_MAX):
        if all(task.done() for task in tasks):
            break
        loop.call_soon(loop.stop)
        loop.run_forever()
    for task in tasks:
        if task.done():
            task.cancelled() or task.exception()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()


def frozen(payload: Sequence[Frame]) -> list[memoryview]:
    """Return read-only copies of frames, as another process receives them."""
    return [memoryview(bytes(frame)) for frame in payload]


def _die(text: str) -> None:
    raise RuntimeError(text)
