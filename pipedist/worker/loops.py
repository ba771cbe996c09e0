"""The event loops that a worker's async functions run on."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

Outside = Callable[[], AbstractContextManager[None]]
"""Marks the time in which a replica only waits for the outside world."""


class PersistentLoop:
    """An event loop: made when the first async function needs it, then kept."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._selector: _Selector | None = None

    def run(self, awaitable: Awaitable[Any], outside: Outside = contextlib.nullcontext) -> Any:
        """Run until `awaitable` is done and return its result.

        Args:
            outside: entered whenever the loop has nothing to do but wait.
        """
        import asyncio  # only async functions need it

        if self._loop is None or self._selector is None:
            self._selector = _Selector()
            self._loop = asyncio.SelectorEventLoop(self._selector)
        asyncio.set_event_loop(self._loop)
        before, self._selector.outside = self._selector.outside, outside
        try:
            return self._loop.run_until_complete(awaitable)
        finally:
            self._selector.outside = before

    def close(self) -> None:
        """Close the loop, if there ever was one."""
        if self._loop is not None:
            self._loop.close()
            self._loop = self._selector = None


class _Selector(selectors.DefaultSelector):
    """Waits `outside`."""

    outside: Outside = staticmethod(contextlib.nullcontext)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        with self.outside():
            return super().select(timeout)
