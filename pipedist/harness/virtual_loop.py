"""An asyncio event loop whose clock jumps to its next timer when there is nothing else to do.

While `virtual_clock` lasts, `time.monotonic`, `time.perf_counter` and `time.sleep` of the whole process
follow that loop's clock, and what runs in anyio's threads runs in place: what happens, and in which
order, depends on nothing but the program. `time.time` is left alone.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from heapq import heappop, heappush
from typing import Any
from unittest import mock

import anyio.to_thread

from pipedist.harness.fibers import current_fiber


class NothingHappens(RuntimeError):
    """Everybody waits, and nothing is to happen any more: without virtual time, for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, which begins at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.errors: list[BaseException] = []
        """What was raised where nobody could catch it: in callbacks, and in tasks that nobody awaits."""
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0
        super().__init__(_Jumping(self))
        self.set_exception_handler(self._keep_error)

    def time(self) -> float:
        """Return the seconds since the beginning."""
        return self.now

    def at(self, when: float, action: Callable[..., object], *args: object) -> None:
        """Let something happen at a time, after everything that was to happen then before."""
        self._order += 1  # asyncio itself leaves open which of two timers of the same time comes first
        heappush(self._due, (when, self._order, action, args))
        self.call_at(when, self._next)

    def _next(self) -> None:
        when, _, action, args = heappop(self._due)
        self.now = max(self.now, when)
        action(*args)

    def _keep_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or RuntimeError(context["message"]))


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._virtual_loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise NothingHappens("everybody waits, and nothing is to happen any more")
        self._virtual_loop.now += max(timeout, 0.0)
        return []


class FiberSelector(selectors.DefaultSelector):
    """Of the event loops of simulated workers: waits in virtual time.

    Stands in for the selector of `pipedist.worker.loops`.
    """

    outside: Callable[[], Any] = staticmethod(nullcontext)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for a descriptor, or for as long as the loop's next timer wants."""
        ready = super().select(0)
        fiber = current_fiber()
        if ready or timeout == 0:
            return ready
        with self.outside():
            if timeout is None or fiber is None:  # a thread of this worker will wake it
                return super().select(timeout)
            fiber.sleep(timeout)
        return []


@contextmanager
def virtual_clock(loop: VirtualLoop) -> Iterator[None]:
    """Let this process live in the loop's time, as long as it lasts."""
    really_sleep = time.sleep

    def now() -> float:
        return loop.now

    def now_ns() -> int:
        return int(loop.now * 1e9)

    def sleep(seconds: float) -> None:
        fiber = current_fiber()
        if fiber is None:
            really_sleep(seconds)
        else:
            fiber.sleep(max(0.0, seconds))

    async def in_place(function: Callable[..., Any], *args: object, **_: object) -> Any:
        await asyncio.sleep(0)
        return function(*args)

    from pipedist.worker import loops

    with ExitStack() as stack:
        for name, stand_in in {
            "monotonic": now,
            "perf_counter": now,
            "monotonic_ns": now_ns,
            "perf_counter_ns": now_ns,
            "sleep": sleep,
        }.items():
            stack.enter_context(mock.patch.object(time, name, stand_in))
        stack.enter_context(mock.patch.object(anyio.to_thread, "run_sync", in_place))
        stack.enter_context(mock.patch.object(loops, "_Selector", FiberSelector))
        yield
