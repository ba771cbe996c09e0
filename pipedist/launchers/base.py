"""What a launcher is: it starts and ends worker processes, and tells when one is gone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, Self

from msgspec import Struct


class WorkerExit(Struct, frozen=True):
    """A worker process is gone.

    Args:
        worker, incarnation: which.
        pid: its process id; 0 where it never came to life.
        code: its exit code, None where a signal ended it.
        signal: the signal that ended it, None where it exited.
        text: how it ended, for people: "signal 9 (SIGKILL)", "exit code 3".
        running: (lease, call, stage) that it was executing (`pipedist.worker.progress.Running`); None where
            it was not, or nobody knows.
        timed_out: it was ended because of that: it took longer than it may.
    """

    worker: str
    incarnation: int
    pid: int
    code: int | None
    signal: int | None
    text: str
    running: tuple[int, ...] | None = None
    timed_out: bool = False


def describe_exit(code: int | None, signum: int | None) -> str:
    """Return how a process ended, for people: "signal 11 (SIGSEGV)", "exit code 3"."""
    if signum is None:
        return f"exit code {code}"
    try:
        return f"signal {signum} ({signal.Signals(signum).name})"
    except ValueError:
        return f"signal {signum}"  # a real-time signal, which has no name


class Launcher(Protocol):
    """Starts and ends workers which connect to one scheduler.

    Made with the scheduler's endpoint. Use it with `async with`, in the event loop on which
    `on_exit` is to be called; entering does not wait until workers can be started.
    """

    on_exit: Callable[[WorkerExit], None]
    """Told of each worker that is gone, however it ended; called on the event loop."""

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of the workers that are alive, by name: of the latest incarnation."""
        ...

    def running(self, worker: str) -> tuple[int, ...] | None:
        """Return what a worker executes now, as `WorkerExit.running`; None: nothing, or nobody can see it.

        It is looked for only here: that it can be seen costs a worker nothing.
        """
        ...

    def start(self, worker: str, incarnation: int) -> None:
        """Start a worker process; returns at once. That it failed is told to `on_exit`.

        Earlier incarnations of it are killed, if they are still there.
        """
        ...

    def kill(self, worker: str, incarnation: int | None = None) -> None:
        """Kill a worker with SIGKILL; returns at once. Nothing happens if it is gone already.

        Args:
            incarnation: only this one; None: the latest.
        """
        ...

    def watch(self, every_s: float | None) -> None:
        """Kill workers whose stages' functions take longer than they may (`WorkerExit.timed_out`).

        Args:
            every_s: how often to look, seconds; None: never.
        """
        ...

    async def close(self, grace_s: float) -> None:
        """Wait until all workers are gone, kill those that are not after `grace_s`, then end."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
