"""What came back from the calls of a pass and is not consumed yet."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.codec import Frame, decode

Slots = dict[str, Tree]
"""What one call sent back: slot name -> tree."""

CALL_BYTES = 512
"""What one call's decoded result is taken to cost beyond its bytes: a dict, its leaves, their objects."""


class Chunk(Struct, frozen=True):
    """The results of calls [lo, hi), from one message.

    Args:
        calls: one entry a call; arrays are views of the received frames.
        size: the bytes that they hold, as far as the valve is concerned.
    """

    lo: int
    hi: int
    calls: list[Slots]
    size: int


def open_chunk(
    lo: int, hi: int, frames: Sequence[Frame], slots: frozenset[str], *, partial: bool = False
) -> Chunk:
    """Decode a message's results, believing nothing.

    They are decoded before they count, so that what can't be read costs the sender its
    connection, and its calls go elsewhere.

    Args:
        slots: what the pass's program has each call send back.
        partial: a call may lack some of them: in a gang, stages are not called with empty shards.

    Raises:
        RemoteProtocolError: the payload is malformed, or not one entry a call with these slots.
    """
    calls = decode(frames)
    if type(calls) is not list or len(calls) != hi - lo:
        raise RemoteProtocolError(f"the results of calls [{lo}, {hi}) do not have one entry a call")
    for call in calls:
        if type(call) is not dict or not (call.keys() == slots or (partial and call.keys() <= slots)):
            raise RemoteProtocolError(
                f"a result of calls [{lo}, {hi}) has not the slots that its program emits: "
                f"{', '.join(sorted(slots)) or 'none'}"
            )
    size = CALL_BYTES * len(calls) + sum(memoryview(frame).nbytes for frame in frames)
    return Chunk(lo, hi, calls, size)


class ResultStore:
    """The results of one pass that are not consumed yet."""

    def __init__(self) -> None:
        self._results: dict[int, Slots] = {}
        self._sizes: dict[int, int] = {}
        """Bytes of each chunk, under its last call: they are let go with it."""

    @property
    def bytes_mean(self) -> float:
        """Bytes that the results of one call hold, on average."""
        return sum(self._sizes.values()) / max(1, len(self._results))

    def put(self, chunk: Chunk) -> None:
        """Keep a chunk; its calls are not there yet."""
        self._results.update(zip(range(chunk.lo, chunk.hi), chunk.calls, strict=True))
        self._sizes[chunk.hi - 1] = chunk.size

    def take(self, first: int, last: int, replicas: int) -> tuple[list[list[Slots]], int]:
        """Remove and return the results of steps [first, last).

        Returns:
            For each step its results in replica order, without calls that were not made (empty
            shards) or failed; and the bytes that are let go.
        """
        pop, lo, hi = self._results.pop, first * replicas, last * replicas
        if replicas == 1:  # as many lists as calls: the loop inside would be most of the cost
            steps = [[] if (slots := pop(call, None)) is None else [slots] for call in range(lo, hi)]
        else:
            steps = [
                [slots for call in range(at, at + replicas) if (slots := pop(call, None)) is not None]
                for at in range(lo, hi, replicas)
            ]
        done = [call for call in self._sizes if lo <= call < hi]
        return steps, sum(self._sizes.pop(call) for call in done)

    def clear(self) -> None:
        """Let everything go."""
        self._results.clear()
        self._sizes.clear()
