"""Which call a worker is executing, where its parent can read it after a crash.

A segmentation fault, `os._exit` or SIGKILL leaves a process no time to say what it was doing.
So the number of the running call stands in memory that is shared with the process that started
the worker, which reads it when the worker is gone: the death is then charged to the right call,
also where finished calls before it had not been reported.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

_IDLE = -1


class Progress:
    """Two int64 in shared memory: lease and call, -1 while nothing runs.

    Made before the fork, it is shared by parent and child. There is one writer.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16)
        self._cells = memoryview(self._memory).cast("q")
        self.idle()

    def idle(self) -> None:
        """Note that nothing is being executed."""
        self._cells[0] = self._cells[1] = _IDLE

    def of_lease(self, lease: int) -> Callable[[int], None]:
        """Return what notes down that a call of this lease runs now."""
        cells = self._cells

        def begin(call: int) -> None:
            cells[1] = call
            cells[0] = lease

        return begin

    def read(self) -> tuple[int, int] | None:
        """Return (lease, call) that is being executed, or None."""
        lease, call = self._cells[0], self._cells[1]
        return None if lease == _IDLE or call == _IDLE else (lease, call)

    def close(self) -> None:
        """Let go of the memory."""
        self._cells.release()
        self._memory.close()
