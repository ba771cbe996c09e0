"""Which call a worker is executing, where its parent can read it: after a crash, and while it runs.

A segmentation fault, `os._exit` or SIGKILL leaves a process no time to say what it was doing. So the
number of the running call stands in memory that is shared with the process that started the worker,
which reads it when the worker is gone: the death is then charged to the right call, also where
finished calls before it had not been reported. So does whether a worker ended by itself: its exit code
alone can't tell that, as user code may end it with the same one.

There, too, stands how long the stage's function that runs may take, and since when it does. An
interpreter that hangs can't be trusted to notice: its parent looks, and ends it (`Overdue`).
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

_IDLE = -1
_LEASE, _CALL, _STAGE, _LIMIT, _BEGAN, _TIMED_CALL, _TIMED_STAGE, _OVER, _CELLS = range(9)
_BYTES = 8 * _CELLS


class Running(NamedTuple):
    """What a worker executes.

    Args:
        stage: its number in the pass's program, from 1; 0: nobody knows.
    """

    lease: int
    call: int
    stage: int = 0


_RUNNING = struct.Struct("3q")


def unpack_running(data: bytes) -> Running | None:
    """Return what a worker executed when somebody else read its memory; None: nothing, or nobody can say.

    It may have gone on between two numbers, so whoever needs it compares the lease with what he knows.
    """
    if len(data) < _RUNNING.size:
        return None
    running = Running(*_RUNNING.unpack_from(data))
    return None if _IDLE in running[:2] else running


NO_CALL = Running(0, 0, 0)
"""Says that a worker's end is no call's fault; no lease has the number 0."""


class Overdue(NamedTuple):
    """A stage's function that takes longer than it may.

    Args:
        running: in which call.
        began_ns: since when, on the system's monotonic clock.
    """

    running: Running
    began_ns: int


class StageClock:
    """Notes down which stage's function runs, for how long at most. This one does not: nobody looks."""

    @property
    def is_timing(self) -> bool:
        """Whether a function is under way that may take so long only."""
        return False

    def enter(self, stage: int) -> None:
        """Note that a stage of the running call is under way; 0: any."""

    def start(self, call: int, stage: int, limit_ns: int) -> None:
        """Note that the function of a call's stage begins, and how long it may take."""

    def stop(self, call: int) -> None:
        """Note that it is over. Harmless where none was noted."""

    def pause(self, call: int) -> None:
        """Note that it waits for other replicas: that is not its own time."""

    def resume(self, call: int) -> None:
        """Note that it goes on."""

    def step(self, call: int) -> None:
        """Note that, of several calls under way, this one runs now."""

    def unstep(self) -> None:
        """Note that it has let go of the thread."""


class CallProgress:
    """Some int64 in shared memory.

    Made before the fork, it is shared by parent and child; made of a file, by all who have it open.
    There is one process that writes.

    Args:
        file: descriptor of a file of `BYTES`; None: memory that children inherit.
    """

    BYTES = _BYTES

    clock: StageClock = StageClock()
    """Where stages are noted."""

    def __init__(self, file: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if file is None else file, _BYTES)
        self._cells = memoryview(self._memory).cast("q")
        if file is None:
            self.idle()
        self.clock = _SharedClock(self._cells)

    def idle(self) -> None:
        """Note that nothing is being executed, unless calls are under way that wait for something."""
        if self.clock.is_timing:
            return
        self._cells[_LIMIT] = 0
        self._cells[_LEASE] = self._cells[_CALL] = _IDLE

    def of_lease(self, lease: int) -> Callable[[int], None]:
        """Return what notes down that a call of this lease runs now."""
        cells = self._cells

        def begin(call: int) -> None:
            cells[_STAGE] = 1
            cells[_CALL] = call
            cells[_LEASE] = lease

        return begin

    def read(self) -> Running | None:
        """Return what is being executed, or None."""
        cells = self._cells
        running = Running(cells[_LEASE], cells[_CALL], cells[_STAGE])
        return None if _IDLE in running[:2] else running

    def overdue(self, now_ns: int) -> Overdue | None:
        """Return the stage's function that takes too long, None if there is none.

        Args:
            now_ns: of `time.monotonic_ns`, which is the same clock in all processes of a host.
        """
        cells = self._cells
        limit = cells[_LIMIT]  # first: it is written last, so the time that is read is not older
        began = cells[_BEGAN]
        if not limit or now_ns - began <= limit:
            return None
        return Overdue(Running(cells[_LEASE], cells[_TIMED_CALL], cells[_TIMED_STAGE]), began)

    def is_still(self, overdue: Overdue) -> bool:
        """Return whether this function still runs: asked when the process is gone."""
        cells = self._cells
        running = Running(cells[_LEASE], cells[_TIMED_CALL], cells[_TIMED_STAGE])
        return bool(cells[_LIMIT]) and cells[_BEGAN] == overdue.began_ns and running == overdue.running

    def end(self) -> None:
        """Note that the process ends by itself: its exit code is no user code's."""
        self._cells[_OVER] = 1

    @property
    def is_over(self) -> bool:
        """Whether the process has ended by itself."""
        return bool(self._cells[_OVER])

    def begin(self) -> None:
        """Note that a process begins, which has noted nothing."""
        self._cells[_OVER] = 0
        self.idle()

    def close(self) -> None:
        """Let go of the memory."""
        self.clock = StageClock()
        self._cells.release()
        self._memory.close()


def end_of(progress: CallProgress, overdue: Overdue | None) -> tuple[Running | None, bool]:
    """Return what a process that is gone was executing, and whether that is what it was ended for.

    Args:
        overdue: what its parent had ended it for; None: it had not.
    """
    if overdue is None:
        return progress.read(), False
    if progress.is_still(overdue):
        return overdue.running, True
    return NO_CALL, False  # it was over just then


class _Timed:
    """A function that runs: since when and for how long at most, and since when it waits for others."""

    __slots__ = ("began_ns", "limit_ns", "paused_ns", "stage")

    def __init__(self, stage: int, began_ns: int, limit_ns: int) -> None:
        self.stage = stage
        self.began_ns = began_ns
        self.limit_ns = limit_ns
        self.paused_ns = 0


class _SharedClock(StageClock):
    """Writes into the shared memory: of several functions, the one that runs, else the first that is due."""

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells
        self._timed: dict[int, _Timed] = {}
        self._lock = threading.Lock()
        """Replicas of a gang are threads."""

    @property
    def is_timing(self) -> bool:
        return bool(self._timed)

    def enter(self, stage: int) -> None:
        self._cells[_STAGE] = stage

    def start(self, call: int, stage: int, limit_ns: int) -> None:
        with self._lock:
            timed = self._timed[call] = _Timed(stage, time.monotonic_ns(), limit_ns)
            self._write(call, timed)

    def stop(self, call: int) -> None:
        with self._lock:
            if self._timed.pop(call, None) is not None:
                self._write_first()

    def pause(self, call: int) -> None:
        with self._lock:
            timed = self._timed.get(call)
            if timed is not None:
                timed.paused_ns = time.monotonic_ns()
                self._write_first()

    def resume(self, call: int) -> None:
        with self._lock:
            timed = self._timed.get(call)
            if timed is not None:
                timed.began_ns += time.monotonic_ns() - timed.paused_ns
                timed.paused_ns = 0
                self._write_first()

    def step(self, call: int) -> None:
        with self._lock:
            timed = self._timed.get(call)
            if timed is not None:
                self._write(call, timed)

    def unstep(self) -> None:
        with self._lock:
            self._write_first()

    def _write_first(self) -> None:
        running = [(x.began_ns + x.limit_ns, call, x) for call, x in self._timed.items() if not x.paused_ns]
        if running:
            _, call, timed = min(running, key=lambda x: x[:2])
            self._write(call, timed)
        else:
            self._cells[_LIMIT] = 0

    def _write(self, call: int, timed: _Timed) -> None:
        cells = self._cells
        cells[_LIMIT] = 0
        cells[_TIMED_STAGE] = timed.stage
        cells[_TIMED_CALL] = call
        cells[_BEGAN] = timed.began_ns
        cells[_LIMIT] = timed.limit_ns


class Stepped:
    """Awaits something for a call, and notes whenever the call has the thread: its loop has others too.

    Args:
        awaitable: what an async function returned.
        clock: where it is noted.
        call: the number of the call.
    """

    def __init__(self, awaitable: Any, clock: StageClock, call: int) -> None:
        self._awaitable = awaitable
        self._clock = clock
        self._call = call

    def __await__(self) -> Generator[Any, Any, Any]:
        """Go on with it, step by step."""
        steps = self._awaitable.__await__()
        send = getattr(steps, "send", None) or (lambda _nothing: next(steps))
        value: Any = None
        error: BaseException | None = None
        while True:
            self._clock.step(self._call)
            try:
                waits_for = send(value) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
            finally:
                self._clock.unstep()
            value = error = None
            try:
                value = yield waits_for
            except BaseException as thrown:
                error = thrown
