"""The interface of launchers, which start and end worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, Self

from msgspec import Struct


class WorkerExit(Struct, frozen=True):
    """The end of a worker process."""

    worker: str
    incarnation: int
    pid: int  # its process id; 0: it was not started
    code: int | None
    signal: int | None
    text: str  # how it ended, for people: "signal 9 (SIGKILL)", "exit code 3"
    running: tuple[int, ...] | None = None  # (lease, call, stage); None: none, or unknown
    timed_out: bool = False  # it was killed because that call exceeded its timeout


class Launcher(Protocol):
    """Starts and ends workers which connect to one scheduler, in `async with`.

    Entering does not wait until workers can be started.
    """

    on_exit: Callable[[WorkerExit], None]  # called on the event loop for each worker that has ended

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of the latest incarnations of living workers, by name."""
        ...

    def running(self, worker: str) -> tuple[int, ...] | None:
        """Return what a worker executes, as `WorkerExit.running`; it has a cost."""
        ...

    def start(self, worker: str, incarnation: int) -> None:
        """Start a worker process, kill earlier incarnations, and return at once.

        A failure is reported to `on_exit`.
        """
        ...

    def kill(self, worker: str, incarnation: int | None = None) -> None:
        """Kill a worker with SIGKILL, if it lives; None: the latest incarnation."""
        ...

    def watch(self, every_s: float) -> None:
        """Kill workers whose calls exceed their timeout."""
        ...

    async def close(self, grace_s: float) -> None:
        """Wait until all workers have ended; kill them after `grace_s`."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
