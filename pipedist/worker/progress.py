"""The running call of a worker, in memory that its parent process reads: after a crash, and while it runs.

A segmentation fault, `os._exit` or SIGKILL leaves a process no time to report. So the number of the running call is
recorded in memory that is shared with the parent process, which reads it when the worker has ended: the crash is
then attributed to the right call, even if finished calls before it were not reported. The memory also records
whether a worker ended by itself: its exit code does not show that, because user code may use the same one.

The start and the time limit of the running stage's function are recorded as well. An interpreter that hangs cannot
check them: its parent does, and kills it (`Overdue`). Time in which the parent itself was stopped does not count: all
processes of a host are stopped together by a container that is paused, or a batch job that is suspended.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct

from pipedist.core.memory_order import fence_unless_tso

_IDLE = -1
_LEASE, _CALL, _STAGE, _LIMIT, _BEGAN, _TIMED_CALL, _TIMED_STAGE, _OVER, _CELLS = range(9)
_BYTES = 8 * _CELLS


class Running(NamedTuple):
    """The running call of a worker; `stage` counts in the pass's program from 1, 0: unknown."""

    lease: int
    call: int
    stage: int = 0


_RUNNING = struct.Struct("3q")

STOPPED_NS_MIN = 1_000_000_000  # a parent process that has not looked for this long was stopped
_STOPS_MAX = 100  # the latest stops that are remembered


def unpack_running(data: bytes) -> Running | None:
    """Return the running call from a copy of a worker's memory, or None.

    The copy is not atomic: compare the lease before using the result.
    """
    if len(data) < _RUNNING.size:
        return None
    running = Running(*_RUNNING.unpack_from(data))
    return None if _IDLE in running[:2] else running


NO_CALL = Running(0, 0, 0)  # reported if no call caused the end of a worker; no lease has the number 0


class Overdue(NamedTuple):
    """A stage's function that has exceeded its time limit; it began at `began_ns` (monotonic clock)."""

    running: Running
    began_ns: int


class Stops:
    """The times in which the parent process was stopped: those in which it did not look after its workers."""

    def __init__(self) -> None:
        self._looked_ns = 0  # 0: never
        self._stops: deque[tuple[int, int]] = deque(maxlen=_STOPS_MAX)  # begin and end of each

    def look(self, now_ns: int) -> None:
        """Note that the process runs; call it several times a second."""
        looked_ns, self._looked_ns = self._looked_ns, now_ns
        if looked_ns and now_ns - looked_ns >= STOPPED_NS_MIN:
            self._stops.append((looked_ns, now_ns))

    def since(self, began_ns: int) -> int:
        """Return for how long the process was stopped since a time, nanoseconds."""
        return sum(end - max(begin, began_ns) for begin, end in self._stops if end > began_ns)


class _Timed(Struct):
    call: int
    stage: int
    began_ns: int
    limit_ns: int
    lease: int = 0  # 0: that of the running call
    paused_ns: int = 0


class StageClock:
    """Records the running stage's function and its time limit.

    Of several functions, the running one, else the first that is due. Without `cells` of a `CallProgress`, no other
    process sees the record.
    """

    def __init__(self, cells: memoryview | None = None) -> None:
        self._cells = memoryview(bytearray(_BYTES)).cast("q") if cells is None else cells
        self.timed: dict[int, _Timed] = {}  # the functions with a time limit that run
        self._lock = threading.Lock()  # needed in gangs, whose replicas are threads

    def enter(self, stage: int) -> None:
        """Record the stage of the running call; 0: unknown."""
        self._cells[_STAGE] = stage

    def start(self, call: int, stage: int, limit_ns: int, *, lease: int = 0, key: int | None = None) -> None:
        """Record the start of a function; `key` names it if a call has several at the same time."""
        with self._lock:
            timed = _Timed(call, stage, time.monotonic_ns(), limit_ns, lease)
            self.timed[call if key is None else key] = timed
            self._write(timed)

    def stop(self, key: int) -> None:
        """Record the end of the function, if a start was recorded."""
        with self._lock:
            if self.timed.pop(key, None) is not None:
                self._write_first()

    def pause(self, key: int) -> None:
        """Stop the time of the function while it waits for other replicas."""
        with self._lock:
            timed = self.timed.get(key)
            if timed is not None:
                timed.paused_ns = time.monotonic_ns()
                self._write_first()

    def resume(self, key: int) -> None:
        with self._lock:
            timed = self.timed.get(key)
            if timed is not None:
                timed.began_ns += time.monotonic_ns() - timed.paused_ns
                timed.paused_ns = 0
                self._write_first()

    def step(self, key: int) -> None:
        """Record which one of several overlapping calls has the thread."""
        with self._lock:
            timed = self.timed.get(key)
            if timed is not None:
                self._write(timed)

    def unstep(self) -> None:
        """Record that the call has yielded the thread."""
        with self._lock:
            self._write_first()

    def _write_first(self) -> None:
        running = [(x.began_ns + x.limit_ns, key, x) for key, x in self.timed.items() if not x.paused_ns]
        if running:
            self._write(min(running, key=lambda x: x[:2])[2])
        else:
            self._cells[_LIMIT] = 0

    def _write(self, timed: _Timed) -> None:
        cells = self._cells
        cells[_LIMIT] = 0
        fence_unless_tso()  # else a reader could see the last limit with the next start
        cells[_TIMED_STAGE] = timed.stage
        cells[_TIMED_CALL] = timed.call
        if timed.lease:
            cells[_LEASE] = timed.lease
        cells[_BEGAN] = timed.began_ns
        fence_unless_tso()
        cells[_LIMIT] = timed.limit_ns


class RunningCall:
    """Records the running call of a lease: as a function of its number.

    `next` records another call of the lease while it runs, and costs no Python call.
    """

    __slots__ = ("_cells", "_lease", "next")

    def __init__(self, cells: memoryview, lease: int, next_: Callable[[int], None]) -> None:
        self._cells = cells
        self._lease = lease
        self.next = next_

    def __call__(self, call: int) -> None:
        cells = self._cells
        cells[_STAGE] = 1
        cells[_CALL] = call
        cells[_LEASE] = self._lease


class CallProgress:
    """The running call of a worker, as int64 numbers in shared memory that only the worker writes.

    `file` is the descriptor of a file of `BYTES`; None: memory that is shared with processes that are forked later.
    """

    BYTES = _BYTES

    clock: StageClock = StageClock()  # records the running stage

    def __init__(self, file: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if file is None else file, _BYTES)
        self._cells = memoryview(self._memory).cast("q")
        if file is None:
            self.idle()
        self.clock = StageClock(self._cells)
        self._next: Callable[[int], None] = partial(self._cells.__setitem__, _CALL)

    def idle(self) -> None:
        """Record that no call runs, unless calls with a time limit wait."""
        if self.clock.timed:
            return
        cells = self._cells
        cells[_LIMIT] = 0
        cells[_LEASE] = cells[_CALL] = _IDLE

    def of_lease(self, lease: int) -> Callable[[int], None]:
        """Return a function that records the running call of a lease."""
        return RunningCall(self._cells, lease, self._next)

    def read(self) -> Running | None:
        cells = self._cells
        running = Running(cells[_LEASE], cells[_CALL], cells[_STAGE])
        return None if _IDLE in running[:2] else running

    def overdue(self, now_ns: int, stops: Stops | None = None) -> Overdue | None:
        """Return the stage's function that has exceeded its limit at `time.monotonic_ns()`, or None."""
        cells = self._cells
        limit = cells[_LIMIT]  # read first, as it is written last: so the start time cannot be older
        fence_unless_tso()
        began = cells[_BEGAN]
        if not limit or now_ns - began <= limit:
            return None
        if stops is not None and now_ns - began - stops.since(began) <= limit:
            return None
        return Overdue(Running(cells[_LEASE], cells[_TIMED_CALL], cells[_TIMED_STAGE]), began)

    def is_still(self, overdue: Overdue) -> bool:
        """Return whether this function was still running when the process ended."""
        cells = self._cells
        running = Running(cells[_LEASE], cells[_TIMED_CALL], cells[_TIMED_STAGE])
        return bool(cells[_LIMIT]) and cells[_BEGAN] == overdue.began_ns and running == overdue.running

    def end(self) -> None:
        """Record that the process ends by itself, not through user code."""
        self._cells[_OVER] = 1

    @property
    def is_over(self) -> bool:
        return bool(self._cells[_OVER])

    def begin(self) -> None:
        self._cells[_OVER] = 0
        self.idle()

    def close(self) -> None:
        self.clock = StageClock()
        self._cells.release()
        self._memory.close()


def end_of(progress: CallProgress, overdue: Overdue | None) -> tuple[Running | None, bool]:
    """Return the last call of a process, and whether the parent killed it as `overdue`."""
    if overdue is None:
        return progress.read(), False
    if progress.is_still(overdue):
        return overdue.running, True
    return NO_CALL, False  # the function had just returned


class Stepped(Struct):
    """Awaits the result of a call, and records when the call has the thread."""

    awaitable: Any
    clock: StageClock
    key: int
    begin: Callable[[], None] | None = None  # called when the call gets the thread

    async def run(self) -> Any:
        return await self

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.awaitable.__await__()
        send = getattr(steps, "send", None) or (lambda _nothing: next(steps))
        value: Any = None
        error: BaseException | None = None
        while True:
            if self.begin is not None:
                self.begin()
            self.clock.step(self.key)
            try:
                waits_for = send(value) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
            finally:
                self.clock.unstep()
            value = error = None
            try:
                value = yield waits_for
            except BaseException as thrown:
                error = thrown.with_traceback(None)  # otherwise it would end with this frame, not the user's
