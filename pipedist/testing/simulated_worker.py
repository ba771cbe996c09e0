"""A worker process of a simulated cluster: the real driver, machine and execution, in virtual time.

Its socket is a simulated connection. Before a call runs, virtual time passes, as long as the call
takes; then the user's function is really executed, at once. It can be killed or stopped whenever it
waits: between calls, before one, or in a collective.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from pipedist.core.gpus import GPUS_MAX
from pipedist.protocol.codec import Frame
from pipedist.protocol.messages import Message
from pipedist.protocol.wire import pack, unpack
from pipedist.testing.fibers import Fiber, Killed
from pipedist.testing.network import Connection
from pipedist.testing.simulated_process import PAUSE_S
from pipedist.worker.commands import Ending
from pipedist.worker.driver import Driver
from pipedist.worker.lease_queue import WorkerLimits
from pipedist.worker.machine import WorkerMachine
from pipedist.worker.process_setup import make_hello
from pipedist.worker.progress import CallProgress, Running

if TYPE_CHECKING:
    from pipedist.testing.simulated_cluster import SimulatedWorkers

_TURNS_MAX = 10
"""Of an event loop, in which tasks of a process that is gone may still come to their end."""

Received = tuple[Message, list[memoryview]]

_EXIT_CODES = {Ending.STOPPED: 0, Ending.REFUSED: 77, Ending.FENCED: 75, Ending.UNANSWERED: 69}


class SimulatedWorker:
    """One incarnation of a worker.

    Args:
        cluster: that it belongs to.
        worker, incarnation: who it is.
    """

    def __init__(self, cluster: SimulatedWorkers, worker: str, incarnation: int) -> None:
        self._cluster = cluster
        self._loop = cluster.loop
        self._random: Random = cluster.random
        self.worker = worker
        self.incarnation = incarnation
        self.identity = f"{worker}.{incarnation}".encode()
        self.machine = WorkerMachine(make_hello(worker, incarnation, gpus=GPUS_MAX), WorkerLimits())
        self.running: Running | None = None
        """What it executes."""
        self.alive = True
        self.asleep = False
        """It is stopped."""
        self._inbox: deque[Received] = deque()
        self._fiber = Fiber(self._work, self._sleep, lambda: self._loop.is_interrupted)
        self._waits = 0
        """Counts its waits, so that a timer of an earlier one changes nothing."""
        self._listens = False
        """It waits for a message, and not only for time to pass."""
        self._overdue = False
        self._driver: SimulatedDriver | None = None
        self._ending = (Ending.STOPPED, "")
        self.connection: Connection = cluster.network.connect(
            up=lambda item: cluster.arrived(self, item), down=self._receive, on_cut=self._on_cut
        )

    def begin(self) -> None:
        """Let the process come up."""
        if self.alive:
            self._fiber.start()
            self._look_at_the_end()

    def _work(self) -> None:
        self._driver = SimulatedDriver(
            self,
            self.machine,
            threads=self._cluster.threads,
            join_s=WorkerLimits().join_s,
            progress=SimulatedProgress(self),
            die=_die,
        )
        try:
            self._ending = self._driver.run()
        finally:
            _let_go_of_loop()

    # -- the simulation's side -----------------------------------------------------------------------

    def _receive(self, item: Received) -> None:
        """A message has arrived."""
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
        if self._cluster.disturbs():
            self._disturb()
            if not self._can_go_on():
                self._overdue = True
                return
        self._waits += 1
        self._listens = False
        self._fiber.resume()
        self._look_at_the_end()

    def _can_go_on(self) -> bool:
        return self.alive and not self.asleep

    def _look_at_the_end(self) -> None:
        self._cluster.left_at = self._fiber.left_at or self._cluster.left_at
        if not self._fiber.is_over or not self.alive:
            return
        error = self._fiber.error
        if error is None:
            ending, reason = self._ending
            self._exit(_EXIT_CODES[ending], None, f"exit code {_EXIT_CODES[ending]}: {reason}")
        else:
            self._cluster.note_error(self, error)
            self._exit(70, None, f"exit code 70: {type(error).__name__}: {error}")

    def _disturb(self) -> None:
        if self._cluster.draws_crash():
            self.kill()
        else:
            self.asleep = True
            self._loop.at(self._loop.now + PAUSE_S * self._random.random() ** 2, self._resume)
            self._loop.at(self._loop.now + self._cluster.stopped_s_max, self._kill_stopped, self._waits)

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
        """End it with SIGKILL; nothing happens to one that is gone."""
        if self.alive:
            self._exit(None, 9, "signal 9 (SIGKILL)")

    def _exit(self, code: int | None, signal: int | None, text: str) -> None:
        self.alive = False
        running, self.running = self.running, None
        self.connection.close()
        self._fiber.kill()
        self._cluster.exited(self, code, signal, text, running)

    # -- its own threads' side: what the driver needs of a socket ----------------------------------------

    def send(
        self, message: Message, payload: Sequence[Frame] = (), *, copy: bool = True, timeout_s: float = 60.0
    ) -> None:
        """Send a message to the scheduler; nothing leaves a process that is gone, or was left behind."""
        if self.alive and not self._fiber.is_killed:
            self.connection.send_up((unpack(pack(message)), frozen(payload)))

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message; return whether there is one.

        Raises:
            Killed: the process is gone.
        """
        if self._inbox or timeout_s <= 0:
            if not self.alive:
                raise Killed
            return bool(self._inbox)
        self._listens = True
        # Looking around every second is no use in virtual time, unless something is due.
        self._wait(timeout_s if self.machine.deadline() is not None else None)
        return bool(self._inbox)

    def recv(self) -> Received:
        """Return the next message and its payload."""
        return self._inbox.popleft()

    def _sleep(self, for_s: float) -> None:
        self._listens = False
        self._wait(for_s)

    def _wait(self, for_s: float | None) -> None:
        if for_s is not None:
            self._loop.at(self._loop.now + for_s, self._wake, self._waits)
        self._fiber.park()

    def spend(self, lease: int, call: int) -> None:
        """Let the time of a call pass; what is finished before it is reported meanwhile, if that is due."""
        self.running = Running(lease, call, 1)
        cost = self._cluster.cost_s(self._driver.pass_of_slice() if self._driver is not None else 0)
        driver, due = self._driver, self.machine.deadline()
        if driver is not None and due is not None and due < self._loop.now + cost:
            left_s = max(0.0, due - self._loop.now)
            self._sleep(left_s)
            driver.report_finished()
            cost -= left_s
        self._sleep(cost)


class SimulatedDriver(Driver):
    """The real driver; but a thread which looks at a real clock is nothing for virtual time."""

    def _report_regularly(self) -> None:
        """Nothing: `SimulatedWorker.spend` does it."""

    def report_finished(self) -> None:
        """Report what is finished, while a call takes long."""
        with self._lock:
            if self._run is not None and self._slice is not None:
                self._reports.finished(self._slice.lease, self._run)

    def pass_of_slice(self) -> int:
        """Return the pass whose calls are executed."""
        return self._slice.pass_id if self._slice is not None else 0


class SimulatedProgress(CallProgress):
    """Where the driver notes down that a call begins: then its time passes."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker

    def idle(self) -> None:
        """Note that nothing is being executed."""
        self._worker.running = None

    def of_lease(self, lease: int) -> Callable[[int], None]:
        """Return what notes down that a call of this lease runs now; it may be told several times."""
        begun = -1

        def begin(call: int) -> None:
            nonlocal begun
            if call > begun:
                begun = call
                self._worker.spend(lease, call)

        return begin


def _let_go_of_loop() -> None:
    """Close this thread's loop of async functions; a process that was killed leaves tasks in the middle."""
    try:
        loop = asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:  # it had none
        return
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    for _ in range(_TURNS_MAX):  # a process that is gone waits for nobody
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
    """Return frames as another process receives them: copies, read-only."""
    return [memoryview(bytes(frame)) for frame in payload]


def _die(text: str) -> None:
    raise RuntimeError(text)
