"""Values of a run stage kept on disk for a later phase, and the feed that reads them again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from pipedist.feeds import Feed, Offer
from pipedist.program import ReaderConfig, Shards, Tree
from pipedist.transport.codec import decode, encode


@dataclass(frozen=True, slots=True)
class _Kept:
    """One step: where its parts are, and what is known of it."""

    places: tuple[tuple[int, tuple[int, ...]], ...]
    ids: tuple[Tree, ...]
    elements: int
    epoch: int


class Spool:
    """The committed values of one run stage, step by step, in an unnamed temporary file.

    The file has no name: whatever kills the process, nothing is left on disk.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="pipedist-")  # noqa: SIM115 - closed by close()
        self._end = 0
        self.steps: list[_Kept] = []

    def append(self, parts: Sequence[Tree | None], ids: Sequence[Tree], *, elements: int, epoch: int) -> None:
        """Keep the parts of the next step; None is an empty shard, and comes last.

        Args:
            ids: element ids of each part that is not None.
        """
        places = []
        for part in parts:
            if part is None:
                continue
            frames = encode(part)
            start = self._end
            for frame in frames:
                self._file.write(frame)
            sizes = tuple(memoryview(f).nbytes for f in frames)
            self._end += sum(sizes)
            places.append((start, sizes))
        self.steps.append(_Kept(tuple(places), tuple(ids), elements, epoch))

    def read(self, step: int, part: int) -> Tree:
        """Return a part again."""
        start, sizes = self.steps[step].places[part]
        self._file.flush()
        frames = []
        for size in sizes:
            frames.append(os.pread(self._file.fileno(), size, start))
            start += size
        return decode(frames)

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


class SpoolFeed(Feed):
    """Feeds the values of a run of an earlier phase, in the same steps and shards."""

    def __init__(self, spool: Spool, replicas: int, batch: int) -> None:
        self._spool = spool
        self._replicas = replicas
        self._next = 0
        self.steps_total: int | None = len(spool.steps)
        self.reader = ReaderConfig(None, batch, -1, False)

    async def pull(self, count: int) -> list[Offer]:
        """Return the next steps."""
        first = self._next
        self._next = min(len(self._spool.steps), first + count)
        steps = enumerate(self._spool.steps[first : self._next], first)
        return [Offer(i, i + 1, len(kept.places), kept.elements) for i, kept in steps]

    def shards(self, lo: int, hi: int, *, local: bool) -> Shards:
        """Return the kept values of calls [lo, hi)."""
        calls = [divmod(call, self._replicas) for call in range(lo, hi)]
        return Shards(
            ids=[self._spool.steps[step].ids[part] for step, part in calls],
            values=[self._spool.read(step, part) for step, part in calls],
        )

    def release(self, before: int) -> None:
        """Nothing is held here."""

    def elements(self, step: int) -> int:
        """Return the number of elements of a step."""
        return self._spool.steps[step].elements

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        return self._spool.steps[step].epoch

    def ids(self, step: int) -> list[Tree]:
        """Return the element ids of each shard that is not empty."""
        return list(self._spool.steps[step].ids)
