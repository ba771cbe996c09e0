"""Says what a run waits for: by itself, where it has not moved for long, and when SIGUSR1 asks.

The signal's handler is a plain one, as those of `interruption`; what it wants said is said by the event
loop, because only between two events is the scheduler's state whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

NUMBER = signal.SIGUSR1
"""The signal that asks."""


class Explainable(Protocol):
    """What a run offers to whoever asks why it does not go on."""

    @property
    def silent_s(self) -> float:
        """For how long nothing has moved."""

    def why(self) -> Mapping[str, Any]:
        """Return what it waits for."""


class Patience:
    """Decides when a run has been silent for long enough to be told: after a time, then after twice as long.

    Args:
        first_s: the first time.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._next_s = first_s

    def is_over(self, silent_s: float) -> bool:
        """Return whether it is to be told now; once for each time."""
        if silent_s < self._first_s:
            self._next_s = self._first_s  # it has moved
            return False
        if silent_s < self._next_s:
            return False
        while self._next_s <= silent_s:
            self._next_s *= 2
        return True


class StallGuard:
    """Tells what a run waits for; its context handles the signal, in the main thread only.

    Args:
        tell: shows lines to the user.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self._run: Explainable | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._patience = Patience(1.0)
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(NUMBER, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(NUMBER, self._before)

    @contextlib.contextmanager
    def watching(self, run: Explainable, stall_s: float) -> Iterator[None]:
        """While this context is open, inside the run's event loop, it is known what the run waits for."""
        self._loop = asyncio.get_running_loop()
        self._run = run
        self._patience = Patience(stall_s)
        try:
            yield
        finally:
            self._run = None

    def look(self) -> None:
        """Tell what the run waits for if it has been silent for long; called again and again."""
        if self._run is not None and self._patience.is_over(self._run.silent_s):
            self.explain()

    def explain(self) -> None:
        """Tell what the run waits for."""
        from pipedist.pipeline.why import lines  # seldom asked for

        if self._run is None:
            self.tell("pipedist: the run has not begun")
        else:
            self.tell("\n".join(["pipedist: what this run waits for:", *lines(dict(self._run.why()))]))

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._run is None or self._loop is None or self._loop.is_closed():
            self.tell("pipedist: the run has not begun, or is over")
        else:
            self._loop.call_soon_threadsafe(self.explain)
