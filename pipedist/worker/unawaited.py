"""What async functions were given to await: whatever they return without having awaited is an error.

A coroutine that nobody awaits does nothing. A collective would not be made, and an assignment be lost,
in all replicas alike: nobody would notice but by a wrong result.
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import Any

from pipedist.collectives.requests import CollectiveRequest


class Owed:
    """The collectives that one replica's async function has asked for, and not begun to await."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: list[tuple[Coroutine[Any, Any, Any], CollectiveRequest]] = []

    def add(
        self, request: CollectiveRequest, collective: Coroutine[Any, Any, Any]
    ) -> Coroutine[Any, Any, Any]:
        """Take note of a collective that is to be awaited, and return it."""
        self._open = [each for each in self._open if _is_new(each[0])]  # so that it stays short
        self._open.append((collective, request))
        return collective

    def settle(self) -> None:
        """Take note that the function has returned.

        Raises:
            RuntimeError: it did not await one; the text says which, and where it stands.
        """
        lost = self.drop()
        if lost:
            request = lost[0]
            raise RuntimeError(
                f"{request.label or request.kind}, at {request.where}, was not awaited, so it was not done: "
                "an async function writes `await` before it"
            )

    def drop(self) -> list[CollectiveRequest]:
        """Forget them all; return those that nobody has awaited."""
        lost = []
        for collective, request in self._open:
            if _is_new(collective):
                collective.close()  # Python would warn of it, by a name that means nothing to the user
                lost.append(request)
        self._open = []
        return lost


def _is_new(collective: Coroutine[Any, Any, Any]) -> bool:
    return inspect.getcoroutinestate(collective) == inspect.CORO_CREATED
