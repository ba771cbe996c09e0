"""Values of a run stage kept on disk for a later phase, and the feed that reads them again."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed, StepBatch
from pipedist.errors import FoldError, OutputError, PipedistError
from pipedist.journal.log_format import EMPTY, LogEntry, RecordLog
from pipedist.protocol.codec import decode
from pipedist.protocol.program import ReaderConfig, Shards


class Spool:
    """The committed values of one run stage, step by step, in a log.

    In memory there are a few numbers a step.

    Args:
        stage: whose values these are, for errors.
        log: the journal's, which survives the process. None: a temporary file of no name: whatever
            kills the process, nothing is left on disk.
    """

    def __init__(self, stage: str, log: RecordLog | None = None) -> None:
        self.stage = stage
        self._is_temporary = log is None
        self._log = log if log is not None else self._temporary()
        self._starts = array("q")
        """Where the frames of each step begin."""
        self._frames = array("q", [0])
        """Number of the first frame of each step, in `_sizes`."""
        self._sizes = array("q")
        """Bytes of each frame."""
        self._holes: dict[int, tuple[int, ...]] = {}
        """By step, shards without a value."""
        self._parts = array("l")
        self._bytes = array("q", [0])
        """Bytes of the frames before each step, and in all."""
        self._elements = array("q", [0])
        """Elements before each step, and in all."""
        self._epochs = array("l")
        self._latest: tuple[int, list[Tree], list[Tree]] = (-1, [], [])

    def _temporary(self) -> RecordLog:
        import tempfile  # few specs keep values

        with tempfile.TemporaryFile(prefix="pipedist-") as file:
            return RecordLog(os.dup(file.fileno()), EMPTY, self._unwritable)

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._parts)

    def append(
        self,
        parts: Sequence[Tree],
        ids: Sequence[Tree],
        *,
        elements: int,
        epoch: int,
        holes: Sequence[int] = (),
    ) -> None:
        """Keep the values of the next step.

        Args:
            parts: those of the shards that are not empty, and maybe of empty ones behind them.
            ids: the element ids of the shards that are not empty.
            holes: those of them that have no value: all of it was set aside.

        Raises:
            OutputError, JournalError: the disk is full, or fails.
        """
        values = list(parts)
        for hole in holes:
            values.insert(hole, None)
        self._index(self._log.append([list(ids), values], [len(ids), elements, epoch, *holes]))

    def restore(self, entries: Iterable[LogEntry]) -> None:
        """Take up the steps that the log has already."""
        for entry in entries:
            self._index(entry)

    def _index(self, entry: LogEntry) -> None:
        parts, elements, epoch, *holes = entry.meta
        if holes:
            self._holes[len(self._parts)] = tuple(holes)
        self._sizes.extend(entry.sizes)
        self._frames.append(len(self._sizes))
        self._starts.append(entry.at)
        self._bytes.append(self._bytes[-1] + sum(entry.sizes))
        self._parts.append(parts)
        self._elements.append(self._elements[-1] + elements)
        self._epochs.append(epoch)

    def finish(self) -> None:
        """Take note that there are no more steps: they may be read now.

        Raises:
            OutputError, JournalError: the disk is full, or fails.
        """
        self._log.flush()

    def _unwritable(self, error: OSError) -> PipedistError:
        import tempfile

        return OutputError(
            f"can't keep the values of stage {self.stage} for a later phase in {tempfile.gettempdir()} "
            f"(TMPDIR): {error.strerror or error}"
        )

    def read(self, step: int) -> tuple[list[Tree], list[Tree]]:
        """Return the element ids and the values of a step's parts, as they were given."""
        if self._latest[0] != step:
            sizes = self._sizes[self._frames[step] : self._frames[step + 1]]
            starts = accumulate(sizes, initial=self._starts[step])
            fd = self._log.fd
            ids, parts = decode([os.pread(fd, n, at) for n, at in zip(sizes, starts, strict=False)])
            self._latest = (step, ids, parts)
        return self._latest[1], self._latest[2]

    def parts(self, step: int) -> int:
        """Return the number of shards of a step that are not empty."""
        return self._parts[step]

    def holes(self, step: int) -> tuple[int, ...]:
        """Return which of these shards have no value."""
        return self._holes.get(step, ())

    def bytes(self, first: int, last: int) -> int:
        """Return the size of steps [first, last)."""
        return self._bytes[last] - self._bytes[first]

    def elements(self, first: int, last: int) -> int:
        """Return the number of elements of steps [first, last)."""
        return self._elements[last] - self._elements[first]

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        return self._epochs[step]

    def close(self) -> None:
        """Let a temporary file go; the journal closes its own."""
        self._latest = (-1, [], [])
        if self._is_temporary:
            self.close_log()

    def close_log(self) -> None:
        """Close the file, whosoever it is."""
        self._log.close()


class SpoolFeed(Feed):
    """Feeds the values of a run of an earlier phase, in the same steps and shards."""

    def __init__(self, spool: Spool, replicas: int, batch: int) -> None:
        self._spool = spool
        self._replicas = replicas
        self._next = 0
        self.steps_total: int | None = len(spool)
        self.reader = ReaderConfig(None, batch, -1, False)

    async def begin_at(self, step: int) -> None:
        """Pass over the steps before `step`."""
        self._next = step

    async def pull(self, count: int) -> list[StepBatch]:
        """Return the next steps."""
        spool, first = self._spool, self._next
        self._next = min(len(spool), first + count)
        offers = []
        kinds = groupby(
            range(first, self._next),
            key=lambda step: (spool.parts(step), spool.epoch(step), spool.holes(step)),
        )
        for (parts, _, holes), same in kinds:
            last = first + len(list(same))
            elements, size = spool.elements(first, last), spool.bytes(first, last)
            offers.append(StepBatch(first, last, parts, elements, size, holes))
            first = last
        return offers

    def shards(self, lo: int, hi: int, *, local: bool) -> Shards:
        """Return the kept values of calls [lo, hi).

        Raises:
            FoldError: an empty shard has none, because the stage was not called with it.
        """
        ids: list[Tree] = []
        values = []
        for call in range(lo, hi):
            step, part = divmod(call, self._replicas)
            step_ids, step_values = self._spool.read(step)
            if part in self._spool.holes(step):
                raise FoldError(
                    self._spool.stage,
                    f"step {step} has no value for replica {part}, whose shard was set aside, to join a "
                    "collective with: put both stages into one phase",
                )
            if part >= len(step_values):
                raise FoldError(
                    self._spool.stage,
                    f"step {step} has no shard for replica {part}, so there is no value for it to join a "
                    "collective with: add `collectives: true` here too, or `drop_remainder: true`",
                )
            ids.append(step_ids[part] if part < len(step_ids) else range(0))
            values.append(step_values[part])
        return Shards(ids=ids, values=values)

    def release(self, before: int) -> None:
        """Nothing is held here."""

    def elements(self, first: int, last: int) -> int:
        """Return the number of elements of steps [first, last)."""
        return self._spool.elements(first, last)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        return self._spool.epoch(step)

    def ids(self, step: int) -> list[Tree]:
        """Return the element ids of each shard that is not empty."""
        return list(self._spool.read(step)[0])
