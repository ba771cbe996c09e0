"""The clock of a simulation: an event loop in virtual time, and the time functions of its threads.

`VirtualLoop` jumps to its next timer when it has nothing else to do. While `virtual_clock` is active,
`time.monotonic`, `time.perf_counter`, `time.sleep` and asyncio's timers follow that loop, in its own thread and in
those of simulated workers. Functions that asyncio or anyio would run in a thread run in place, so that their order
depends only on the program. `time.time` is unchanged. Threads that functions start, and processes that they fork,
use the real clock, because the simulation cannot resume them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from heapq import heappop, heappush
from typing import Any, Final, TypeVar
from unittest import mock

import anyio.to_thread

from pipedist.errors import UsageError
from pipedist.testing import cooperative_threads
from pipedist.worker import lease_run

T = TypeVar("T")

READS_MAX = 10_000  # after as many reads of the clock virtual time advances: a function may wait in a loop
READ_S = 1e-5  # virtual time that each further read takes


class SimulationStalled(RuntimeError):
    """All processes wait, and no timer is set: without virtual time they would wait forever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with its own clock, which starts at 0."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the beginning
        self.errors: list[BaseException] = []  # raised in callbacks, and in tasks that are not awaited
        self.is_interrupted = False  # the simulation is about to end
        self.on_interrupt: Callable[[], object] = lambda: None  # called in the loop's thread
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0
        super().__init__(_JumpingSelector(self))
        self.set_debug(False)  # debug mode rejects calls from the threads of simulated workers
        self.set_exception_handler(self._keep_error)

    def time(self) -> float:
        return self.now

    def at(self, when: float, action: Callable[..., object], *args: object) -> None:
        """Call an action at a time, after all actions scheduled earlier for that time."""
        self._order += 1  # asyncio does not define the order of two timers of the same time
        heappush(self._due, (when, self._order, action, args))
        self.call_at(when, self._next)

    def interrupt(self) -> None:
        """End the simulation soon; may be called from any thread."""
        self.is_interrupted = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.call_soon_threadsafe(self.on_interrupt)

    def _next(self) -> None:
        when, _, action, args = heappop(self._due)
        self.now = max(self.now, when)
        action(*args)

    def _keep_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or RuntimeError(context["message"]))


class _JumpingSelector(selectors.DefaultSelector):
    """Advances the virtual time instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._virtual_loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise SimulationStalled("all processes wait, and no timer is set")
        self._virtual_loop.now += max(timeout, 0.0)
        return []


class VirtualTimeSelector(selectors.DefaultSelector):
    """Selector of the event loops in simulated workers: waits in virtual time.

    Replaces the selector of `pipedist.worker.lease_run`, and asyncio's own.
    """

    outside: Callable[[], Any] = staticmethod(nullcontext)
    stopped_s = 0.0  # see `lease_run`

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        threads = cooperative_threads.current_threads()
        if ready or timeout == 0:
            return ready
        in_real_time = timeout is None or threads is None  # another thread of this worker will wake it
        if in_real_time or len(self.get_map()) > 1:  # besides the loop's own pipe: peers send in real time
            with self.outside():
                ready = super().select(timeout)
        if not ready and threads is not None and timeout is not None:
            threads.sleep(timeout)  # not `outside`: only one of a worker's replicas can wait at a time
        return ready


class _Clock:
    """The time in each thread."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._reads = 0
        self._last_read = -1.0

    def now(self) -> float | None:
        """Return the virtual time, or None in a thread with the real clock."""
        if cooperative_threads.current_threads() is not None:
            self._count_read()
        elif threading.get_ident() != self._thread:
            return None
        return self._loop.now

    def _count_read(self) -> None:
        if self._loop.now != self._last_read:
            self._last_read = self._loop.now
            self._reads = 0
        self._reads += 1
        if self._reads > READS_MAX:
            self._loop.now += READ_S
            self._last_read = self._loop.now


_clock: _Clock | None = None
_real_sleep = time.sleep


def _follow(real: Callable[[], T], of: Callable[[float], T]) -> Callable[[], T]:
    """Return a clock that falls back to the real one.

    A module that is imported during a simulation may keep it (`from time import monotonic`).
    """

    def read() -> T:
        now = None if _clock is None else _clock.now()
        return real() if now is None else of(now)

    return read


_CLOCKS: Final = {
    "monotonic": _follow(time.monotonic, float),
    "perf_counter": _follow(time.perf_counter, float),
    "monotonic_ns": _follow(time.monotonic_ns, lambda now: int(now * 1e9)),
    "perf_counter_ns": _follow(time.perf_counter_ns, lambda now: int(now * 1e9)),
}


def _sleep(seconds: float) -> None:
    threads = None if _clock is None else cooperative_threads.current_threads()
    if threads is None:
        _real_sleep(seconds)
    else:
        threads.sleep(max(0.0, seconds))


@contextmanager
def virtual_clock(loop: VirtualLoop) -> Iterator[None]:
    """Make the calling thread and the simulated workers follow the loop's time."""
    global _clock
    real_fork, real_exit = os.fork, os._exit
    real_init = asyncio.SelectorEventLoop.__init__
    real_run_in_executor = asyncio.SelectorEventLoop.run_in_executor

    async def in_place(function: Callable[..., Any], *args: object, **_: object) -> Any:
        await asyncio.sleep(0)
        return function(*args)

    def init_loop(self: Any, selector: selectors.BaseSelector | None = None) -> None:
        if selector is None and cooperative_threads.current_threads() is not None:
            selector = VirtualTimeSelector()
        real_init(self, selector)

    def run_in_executor(self: Any, executor: Any, function: Callable[..., Any], *args: Any) -> Any:
        if cooperative_threads.current_threads() is None:
            return real_run_in_executor(self, executor, function, *args)
        future, running = self.create_future(), asyncio._get_running_loop()
        asyncio._set_running_loop(None)  # as in another thread
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        finally:
            asyncio._set_running_loop(running)
            asyncio.set_event_loop(self)
        return future

    def fork() -> int:
        copy = real_fork()
        if not copy:
            leave()
            cooperative_threads.leave_after_fork()
        return copy

    def exit_process(code: int) -> None:
        if cooperative_threads.current_threads() is None:
            real_exit(code)
        raise UsageError(
            f"the function called os._exit({code}), which would end its worker: simulated workers share one "
            "process. Test it with `pipedist run`"
        )

    def leave() -> None:
        global _clock
        _clock = None
        stack.close()

    _clock = _Clock(loop)
    stack = ExitStack()
    for owner, name, replacement in (
        *((time, name, clock) for name, clock in _CLOCKS.items()),
        (time, "sleep", _sleep),
        (os, "fork", fork),
        (os, "_exit", exit_process),
        (asyncio.SelectorEventLoop, "__init__", init_loop),
        (asyncio.SelectorEventLoop, "run_in_executor", run_in_executor),
        (anyio.to_thread, "run_sync", in_place),
        (lease_run, "_Selector", VirtualTimeSelector),
    ):
        stack.enter_context(mock.patch.object(owner, name, replacement))
    try:
        yield
    finally:
        leave()
