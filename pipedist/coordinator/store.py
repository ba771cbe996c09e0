"""What came back from the calls of a pass, kept as it arrived, decoded when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipedist.program import Tree
from pipedist.transport.codec import Frame, decode

Slots = dict[str, Tree]
"""What one call sent back: slot name -> tree."""


@dataclass(slots=True)
class Chunk:
    """The results of calls [lo, hi), from one message.

    Args:
        frames: as received; decoded at the first look.
        size: their bytes.
    """

    lo: int
    hi: int
    worker: str
    frames: Sequence[Frame]
    size: int
    left: int = 0
    _calls: list[Slots] | None = None

    def calls(self) -> list[Slots]:
        """Return one entry a call.

        Raises:
            RemoteProtocolError: if the payload is not what a worker may send.
        """
        if self._calls is None:
            self._calls = decode(self.frames)
            self.frames = ()
        return self._calls


class ResultStore:
    """The results of one pass that are not consumed yet."""

    def __init__(self) -> None:
        self._chunks: dict[int, Chunk] = {}
        self._current: Chunk | None = None

    def put(self, chunk: Chunk) -> None:
        """Keep a chunk; its calls are not there yet."""
        chunk.left = chunk.hi - chunk.lo
        self._chunks[chunk.lo] = chunk

    def take(self, call: int) -> tuple[Slots | None, int]:
        """Remove a call's result; the calls of a chunk must be taken in order.

        Returns:
            The result, None if there is none (an empty shard, a failed call); and the bytes
            that were let go with it (a chunk's bytes go with its last call).
        """
        chunk = self._current
        if chunk is None or not chunk.lo <= call < chunk.hi:
            chunk = self._chunks.get(call) or self._find(call)
            if chunk is None:
                return None, 0
            self._current = chunk
        slots = chunk.calls()[call - chunk.lo]
        chunk.left -= 1
        if chunk.left:
            return slots, 0
        self._chunks.pop(chunk.lo, None)
        self._current = None
        return slots, chunk.size

    def _find(self, call: int) -> Chunk | None:
        """Return the chunk that holds a call in its middle: rare, where a chunk was left half read."""
        return next((c for c in self._chunks.values() if c.lo <= call < c.hi), None)
