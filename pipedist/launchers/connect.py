"""Workers that dial in: started by people or by a batch system, with `pipedist worker --connect`.

There is nothing to start here, and no process to watch: each of them has a supervisor on its own
host (`pipedist.worker.supervisor`), which restarts it, and whose heartbeats say that it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from pipedist.errors import LocalProtocolError
from pipedist.launchers.base import WorkerExit


class ConnectLauncher:
    """Stands where a launcher is expected, for a cluster whose workers all dial in.

    Args:
        endpoint: the scheduler's.
        expel: tells the supervisor of a worker to kill it: there is no other way to reach it.
    """

    def __init__(self, endpoint: str, *, expel: Callable[[str], None]) -> None:
        self.endpoint = endpoint
        self.on_exit: Callable[[WorkerExit], None] = _ignore
        self._expel = expel

    @property
    def pids(self) -> Mapping[str, int]:
        """No process of this host's: always empty."""
        return {}

    def start(self, worker: str, incarnation: int) -> None:
        """Refuse: such workers come by themselves.

        Raises:
            LocalProtocolError: always.
        """
        raise LocalProtocolError(
            f"worker {worker} (incarnation {incarnation}) was to be started, but this cluster's workers "
            "dial in; run `pipedist worker --connect` where they are to be"
        )

    def kill(self, worker: str, incarnation: int | None = None) -> None:
        """Have the worker's supervisor kill it; the supervisor's next worker joins anew.

        Args:
            incarnation: of no importance here: a supervisor has one worker at a time.
        """
        self._expel(worker)

    async def close(self, grace_s: float) -> None:
        """Do nothing: the scheduler has told the workers to stop, and their supervisors see to it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(0.0)


def _ignore(_exit: WorkerExit) -> None:
    return
