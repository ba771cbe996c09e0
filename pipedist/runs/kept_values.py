"""The committed values of run stages that other passes read, on disk (`pipedist.runs.rebatching` divides them)."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from pipedist.core.types import Tree
from pipedist.errors import OutputError, PipedistError
from pipedist.journal.log_format import EMPTY, LogEntry, RecordLog
from pipedist.protocol.codec import decode


class Spool:
    """The committed values of one run stage, step by step, in a log on disk.

    Memory holds only a few numbers for each step.

    Args:
        log: a log of the journal, which survives the process. None: a temporary file without a name, which
            disappears with the process.
    """

    def __init__(self, stage: str, log: RecordLog | None = None) -> None:
        self.stage = stage
        self._is_temporary = log is None
        self._log = log if log is not None else self._temporary()
        self._starts = array("q")  # file offset of the frames of each step
        self._frames = array("q", [0])  # index of the first frame of each step in `_sizes`
        self._sizes = array("q")
        self._bytes = array("q", [0])  # bytes of the frames before each step, and in total
        self._elements = array("q", [0])  # elements before each step, and in total
        self.epochs = array("l")

    def _temporary(self) -> RecordLog:
        import tempfile  # rarely needed

        with tempfile.TemporaryFile(prefix="pipedist-") as file:
            return RecordLog(os.dup(file.fileno()), EMPTY, self._unwritable)

    def __len__(self) -> int:
        return len(self.epochs)

    def append(
        self,
        parts: Sequence[Tree],
        ids: Sequence[Tree],
        *,
        elements: int,
        epoch: int,
        removed: Sequence[tuple[int, NDArray[np.int64]]] = (),
    ) -> None:
        """Append the values of the next step.

        Args:
            parts: values of the shards that are not empty, possibly followed by those of empty shards; None for a
                shard that was quarantined as a whole.
            ids: the element ids of the shards that are not empty.
            removed: replicas with quarantined elements, and their positions in the shard.
        """
        tree = [list(ids), list(parts), *([[list(each) for each in removed]] if removed else [])]
        self._index(self._log.append(tree, [len(ids), elements, epoch]))

    async def restore(self, entries: Iterable[LogEntry]) -> None:
        """Restore the steps of a log, in a thread, because all of it is read and checked."""

        def index() -> None:
            for entry in entries:
                self._index(entry)

        await anyio.to_thread.run_sync(index)

    def _index(self, entry: LogEntry) -> None:
        _, elements, epoch, *_ = entry.meta
        self._sizes.extend(entry.sizes)
        self._frames.append(len(self._sizes))
        self._starts.append(entry.at)
        self._bytes.append(self._bytes[-1] + sum(entry.sizes))
        self._elements.append(self._elements[-1] + elements)
        self.epochs.append(epoch)

    def finish(self) -> None:
        """Flush the log after the last step, so that it can be read."""
        self._log.flush()

    def _unwritable(self, error: OSError) -> PipedistError:
        import tempfile

        return OutputError(
            f"can't store the values of stage {self.stage} for a later phase in {tempfile.gettempdir()} "
            f"(TMPDIR): {error.strerror or error}"
        )

    def read(self, step: int) -> list[Tree]:
        """Return the ids, the values and, if there are any, the removed positions of a step, from the disk."""
        sizes = self._sizes[self._frames[step] : self._frames[step + 1]]
        starts = accumulate(sizes, initial=self._starts[step])
        fd = self._log.fd
        found: list[Tree] = decode([os.pread(fd, n, at) for n, at in zip(sizes, starts, strict=False)])
        return found

    def bytes(self, first: int, last: int) -> int:
        return self._bytes[last] - self._bytes[first]

    def elements(self, first: int, last: int) -> int:
        return self._elements[last] - self._elements[first]

    def close(self) -> None:
        """Close a temporary file; a log of the journal is closed by the journal."""
        if self._is_temporary:
            self.close_log()

    def close_log(self) -> None:
        """Close the log, even if it belongs to the journal."""
        self._log.close()
