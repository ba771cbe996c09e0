"""The clock of a simulation's threads: `time.monotonic`, `time.perf_counter`, `time.sleep`, asyncio's timers.

They follow the simulation's loop in its own thread and in those of simulated workers. What asyncio or anyio
would run in a thread runs in place: what happens, and in which order, depends on nothing but the program.
`time.time` is left alone. Threads that functions start, and processes that they fork, have the real clock:
nobody would let them go on in virtual time.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import anyio.to_thread

from pipedist.errors import UsageError
from pipedist.testing import fibers
from pipedist.testing.virtual_loop import VirtualLoop

GLANCES_MAX = 10_000
"""How often a function may look at the clock at one and the same time; then it is one that waits so."""

GLANCE_S = 1e-5
"""How long each look takes from then on."""


class FiberSelector(selectors.DefaultSelector):
    """Of the event loops in simulated workers: waits in virtual time.

    Stands in for the selector of `pipedist.worker.lease_run`, and for asyncio's own.
    """

    outside: Callable[[], Any] = staticmethod(nullcontext)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for a descriptor, or for as long as the loop's next timer wants."""
        ready = super().select(0)
        fiber = fibers.current_fiber()
        if ready or timeout == 0:
            return ready
        in_real_time = timeout is None or fiber is None  # a thread of this worker will wake it
        if in_real_time or len(self.get_map()) > 1:  # beside the loop's own pipe: others send in real time
            with self.outside():
                ready = super().select(timeout)
        if not ready and fiber is not None and timeout is not None:
            fiber.sleep(timeout)  # not `outside`: only one of a worker's replicas can wait at a time
        return ready


class _Clock:
    """What the time is in each thread."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._glances = 0
        self._seen = -1.0

    def now(self) -> float | None:
        """Return the virtual time; None in a thread that does not live in it."""
        if fibers.current_fiber() is not None:
            self._glance()
        elif threading.get_ident() != self._thread:
            return None
        return self._loop.now

    def _glance(self) -> None:
        if self._loop.now != self._seen:
            self._seen = self._loop.now
            self._glances = 0
        self._glances += 1
        if self._glances > GLANCES_MAX:
            self._loop.now += GLANCE_S
            self._seen = self._loop.now


_clock: _Clock | None = None
_really_monotonic, _really_monotonic_ns = time.monotonic, time.monotonic_ns
_really_perf_counter, _really_perf_counter_ns = time.perf_counter, time.perf_counter_ns
_really_sleep = time.sleep


def _now() -> float | None:
    return None if _clock is None else _clock.now()


# What is imported while the clock is virtual may keep one of these for good: `from time import monotonic`.


def _monotonic() -> float:
    now = _now()
    return _really_monotonic() if now is None else now


def _perf_counter() -> float:
    now = _now()
    return _really_perf_counter() if now is None else now


def _monotonic_ns() -> int:
    now = _now()
    return _really_monotonic_ns() if now is None else int(now * 1e9)


def _perf_counter_ns() -> int:
    now = _now()
    return _really_perf_counter_ns() if now is None else int(now * 1e9)


def _sleep(seconds: float) -> None:
    fiber = None if _clock is None else fibers.current_fiber()
    if fiber is None:
        _really_sleep(seconds)
    else:
        fiber.sleep(max(0.0, seconds))


@contextmanager
def virtual_clock(loop: VirtualLoop) -> Iterator[None]:
    """Let the calling thread, and the simulated workers, live in the loop's time, as long as it lasts."""
    global _clock
    really_fork, really_exit = os.fork, os._exit
    begin, run_elsewhere = asyncio.SelectorEventLoop.__init__, asyncio.SelectorEventLoop.run_in_executor

    async def in_place(function: Callable[..., Any], *args: object, **_: object) -> Any:
        await asyncio.sleep(0)
        return function(*args)

    def begin_loop(self: Any, selector: selectors.BaseSelector | None = None) -> None:
        if selector is None and fibers.current_fiber() is not None:
            selector = FiberSelector()
        begin(self, selector)

    def run_in_executor(self: Any, executor: Any, function: Callable[..., Any], *args: Any) -> Any:
        if fibers.current_fiber() is None:
            return run_elsewhere(self, executor, function, *args)
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
        copy = really_fork()
        if not copy:
            leave()
            fibers.leave_in_copy()
        return copy

    def end_process(code: int) -> None:
        if fibers.current_fiber() is None:
            really_exit(code)
        raise UsageError(
            f"the function called os._exit({code}), which would end its worker: simulated workers share one "
            "process; `pipedist run` shows what comes of it"
        )

    def leave() -> None:
        global _clock
        _clock = None
        stack.close()

    from pipedist.worker import lease_run

    _clock = _Clock(loop)
    stack = ExitStack()
    for place, name, stand_in in (
        (time, "monotonic", _monotonic),
        (time, "perf_counter", _perf_counter),
        (time, "monotonic_ns", _monotonic_ns),
        (time, "perf_counter_ns", _perf_counter_ns),
        (time, "sleep", _sleep),
        (os, "fork", fork),
        (os, "_exit", end_process),
        (asyncio.SelectorEventLoop, "__init__", begin_loop),
        (asyncio.SelectorEventLoop, "run_in_executor", run_in_executor),
        (anyio.to_thread, "run_sync", in_place),
        (lease_run, "_Selector", FiberSelector),
    ):
        stack.enter_context(mock.patch.object(place, name, stand_in))
    try:
        yield
    finally:
        leave()
