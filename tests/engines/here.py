"""An engine that needs none: its workers are kept by the process of the test."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import anyio.to_thread

from pipedist.launchers.engines import OnFailed
from pipedist.launchers.hosted import HostedWorker, Terms
from pipedist.launchers.whereabouts import Succession

GONE_S = 60.0
"""How long workers may take to be gone: it bounds a hang."""


class HereEngine:
    """Keeps workers in this very process.

    Args:
        count: how many.
        terms: how they join, instead of what they are told.
    """

    host = "127.0.0.1"
    placing = "here"

    def __init__(self, count: int, terms: Terms | None = None) -> None:
        self.hosted: list[HostedWorker] = []
        self.told: list[Terms] = []
        self.placed = count
        self.succession: Succession | None = None
        self.dismissed: list[Succession] = []
        self._terms = terms

    async def start(self, terms: Terms, on_failed: OnFailed, succession: Succession | None = None) -> None:
        self.told.append(terms)
        self.succession = succession
        loop = asyncio.get_running_loop()

        def tell(how: str) -> None:
            loop.call_soon_threadsafe(on_failed, how)

        for _ in range(self.placed):
            self.hosted.append(HostedWorker(self._terms or terms, tell))

    async def dismiss(self, left: Succession) -> None:
        self.dismissed.append(left)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self.hosted:
            await anyio.to_thread.run_sync(each.close, GONE_S)
