"""Results of calls: decoded, stored, and found in workers' caches.

A dialled-in worker caches results under a key (`key_of`), which is the same only for the same pass of the same
run with the same program and code. Cached results whose key no open pass has are ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame, decode
from pipedist.scheduler import events as ev
from pipedist.scheduler.commands import CallsQuarantined

Slots = dict[str, Tree]  # the result of one call: slot name -> tree
CALL_BYTES = 512  # estimated memory of a call's decoded result beyond its bytes: dict, leaves, objects
_CACHED = re.compile(r"([0-9a-f]{32}):([0-9]{1,18})-([0-9]{1,18})", re.ASCII)

_Ranges = tuple[tuple[int, int], ...]


class Chunk(Struct, frozen=True):
    """The results of calls [lo, hi), from one message."""

    lo: int
    hi: int
    calls: list[Slots]  # one entry per call; arrays are views of the received frames
    size: int  # bytes that they hold, for the limit on unread results


def open_chunk(
    lo: int, hi: int, frames: Sequence[Frame], slots: frozenset[str], required: frozenset[str]
) -> Chunk:
    """Decode and check the results in a message, before they are accepted.

    Raise RemoteProtocolError if it is malformed, or not one entry per call with these slots; none may lack a `required`
    one.
    """
    calls = decode(frames)
    if type(calls) is not list or len(calls) != hi - lo:
        raise RemoteProtocolError(f"the results of calls [{lo}, {hi}) do not have one entry per call")
    for call in calls:
        if type(call) is not dict or not required <= call.keys() <= slots:
            raise RemoteProtocolError(
                f"a result of calls [{lo}, {hi}) does not have the slots that its program emits: "
                f"{', '.join(sorted(slots)) or 'none'}"
            )
    size = CALL_BYTES * len(calls)
    for frame in frames:
        size += memoryview(frame).nbytes
    return Chunk(lo, hi, calls, size)


class ResultStore:
    """The results of one pass that are not consumed yet."""

    def __init__(self) -> None:
        self._results: dict[int, Slots] = {}
        self._sizes: dict[int, int] = {}  # bytes of each chunk, under the last call that releases them

    @property
    def bytes_mean(self) -> float:
        return sum(self._sizes.values()) / max(1, len(self._results))

    def put(self, chunk: Chunk) -> None:
        """Store a chunk; none of its calls is stored yet."""
        self._results.update(zip(range(chunk.lo, chunk.hi), chunk.calls, strict=True))
        self._sizes[chunk.hi - 1] = chunk.size

    def take(self, first: int, last: int, replicas: int) -> tuple[list[list[Slots]], int]:
        """Remove the results of steps [first, last); return them, and their bytes.

        A step's results are in replica order, without calls that were not made (empty shards) or failed.
        """
        pop, lo, hi = self._results.pop, first * replicas, last * replicas
        if last - first == 1:
            slots_of = [pop(call, None) for call in range(lo, hi)]
            size = 0
            for call in range(lo, hi):
                size += self._sizes.pop(call, 0)
            return [[slots for slots in slots_of if slots is not None]], size
        if replicas == 1:  # as many lists as calls: the inner loop would be most of the cost
            steps = [[] if (slots := pop(call, None)) is None else [slots] for call in range(lo, hi)]
        else:
            steps = [
                [slots for call in range(at, at + replicas) if (slots := pop(call, None)) is not None]
                for at in range(lo, hi, replicas)
            ]
        done = [call for call in self._sizes if lo <= call < hi]
        return steps, sum(map(self._sizes.pop, done))

    def all(self) -> dict[int, Slots]:
        return dict(self._results)

    def clear(self) -> None:
        self._results.clear()
        self._sizes.clear()


class FailedElement(Struct, frozen=True):
    """The exception of an element's last attempt, in place of its result."""

    text: str


class QuarantinedCall(Struct, frozen=True):
    """A call that is over, with quarantined elements: the result of the others, and what was quarantined."""

    result: Slots
    command: CallsQuarantined
    elements: int  # number of quarantined elements


class ElementStore:
    """Results of elements of calls that are not over yet, of stages with `per: element`.

    Another attempt of the call gets them with its lease, so that it executes only the other elements. `FailedElement`s
    are those that have no attempt left.
    """

    def __init__(self) -> None:
        self.added = 0  # the number of results that were added
        self._calls: dict[int, dict[tuple[int, int], Tree]] = {}

    @property
    def count(self) -> int:
        return sum(map(len, self._calls.values()))

    def add(self, call: int, stage: int, element: int, result: Tree) -> None:
        self.added += 1
        self._calls.setdefault(call, {})[stage, element] = result

    def of(self, lo: int, hi: int) -> list[list[Tree]] | None:
        """Return [call, stage, element, result, failure] of elements of calls [lo, hi), None if there is none."""
        if not self._calls:
            return None
        return [
            [call, *at, None, result.text] if isinstance(result, FailedElement) else [call, *at, result, ""]
            for call in range(lo, hi)
            for at, result in self._calls.get(call, {}).items()
        ] or None

    def drop(self, lo: int, hi: int) -> None:
        for call in range(lo, hi) if self._calls else ():
            self._calls.pop(call, None)

    def all(self) -> dict[tuple[int, int, int], Tree]:
        """Return the results by (call, stage, element)."""
        return {(c, *at): result for c, results in self._calls.items() for at, result in results.items()}

    def clear(self) -> None:
        self._calls.clear()


def key_of(stamp: str, program: Sequence[Frame]) -> str:
    """Return the key of a pass's cached results: of its stamp and program."""
    digest = hashlib.sha256(stamp.encode())
    for frame in program:
        digest.update(memoryview(frame).nbytes.to_bytes(8, "little"))
        digest.update(frame)
    return digest.hexdigest()[:32]


class CachedResultIndex:
    """The calls whose results each worker has cached, as of its latest Hello."""

    def __init__(self) -> None:
        self._workers: dict[str, tuple[int, Mapping[str, _Ranges]]] = {}

    def add(self, hello: msg.Hello, passes: Mapping[str, int]) -> list[ev.CallsCached]:
        """Record a worker's cached results; return the events for open passes, or raise RemoteProtocolError."""
        cached = _parse_cached(hello.cached)
        self._workers.pop(hello.worker, None)
        if not cached:
            return []
        self._workers[hello.worker] = (hello.incarnation, cached)
        return [
            ev.CallsCached(hello.worker, hello.incarnation, passes[key], ranges)
            for key, ranges in cached.items()
            if key in passes
        ]

    def of_pass(self, key: str, pass_id: int) -> Iterator[ev.CallsCached]:
        """Yield the events for a pass that opens now."""
        for worker, (incarnation, cached) in list(self._workers.items()):
            if key and key in cached:
                yield ev.CallsCached(worker, incarnation, pass_id, cached[key])

    def forget(self, worker: str, incarnation: int) -> None:
        if worker in self._workers and self._workers[worker][0] == incarnation:
            del self._workers[worker]


def _parse_cached(texts: Iterable[str]) -> dict[str, _Ranges]:
    cached: dict[str, list[tuple[int, int]]] = {}
    for count, text in enumerate(texts):
        found = _CACHED.fullmatch(text)
        if found is None or count >= msg.CACHED_RANGES_MAX:
            raise RemoteProtocolError(f"malformed cached results: {text[:80]!r}, or too many ranges")
        key, lo, hi = found[1], int(found[2]), int(found[3])
        if lo >= hi:
            raise RemoteProtocolError(f"malformed cached results: calls [{lo}, {hi})")
        cached.setdefault(key, []).append((lo, hi))
    return {key: tuple(sorted(ranges)) for key, ranges in cached.items()}
