"""Results of calls: decoded, stored, and found in workers' caches.

A dialled-in worker caches results under a key (`key_of`), which is the same only for the same pass of the same
run with the same program and code. Cached results whose key no open pass has are ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame, decode
from pipedist.protocol.columns import SlotValues
from pipedist.protocol.layout import ClassNotFound
from pipedist.protocol.program import StageProgram
from pipedist.scheduler import events as ev
from pipedist.scheduler.commands import CallsQuarantined

Slots = dict[str, Tree]  # the result of one call: slot name -> tree
Stacked = SlotValues[NDArray[Any]]  # the results of calls that are one array each
CALL_BYTES = 512  # estimated memory of a call's decoded result beyond its bytes: dict, leaves, objects
_CACHED = re.compile(r"([0-9a-f]{32}):([0-9]{1,18})-([0-9]{1,18})", re.ASCII)

_Ranges = tuple[tuple[int, int], ...]


class Chunk(Struct, frozen=True):
    """The results of calls [lo, hi), from one message."""

    lo: int
    hi: int
    calls: list[Slots] | Stacked  # one entry per call; arrays are views of the received frames
    size: int  # bytes that they hold, for the limit on unread results


class UnknownClass(RemoteProtocolError):
    """A result has a class that this process can't find: a mistake of the function, not of its worker."""


def open_chunk(
    lo: int, hi: int, frames: Sequence[Frame], slots: frozenset[str], required: frozenset[str]
) -> Chunk:
    """Decode and check the results in a message, before they are accepted.

    Raise RemoteProtocolError if it is malformed, or not one entry per call with these slots; none may lack a `required`
    one. Raise UnknownClass if a class is not found here.
    """
    try:
        calls = decode(frames, stacked=True)
    except RemoteProtocolError as error:
        if isinstance(error.__cause__, ClassNotFound):
            raise UnknownClass(str(error.__cause__)) from error
        raise
    if (type(calls) is not list and type(calls) is not SlotValues) or len(calls) != hi - lo:
        raise RemoteProtocolError(f"the results of calls [{lo}, {hi}) do not have one entry per call")
    for call in calls[:1] if type(calls) is SlotValues else calls:  # SlotValues have one slot
        if type(call) is not dict or not required <= call.keys() <= slots:
            raise RemoteProtocolError(
                f"a result of calls [{lo}, {hi}) does not have the slots that its program emits: "
                f"{', '.join(sorted(slots)) or 'none'}"
            )
    size = CALL_BYTES * len(calls)
    for frame in frames:
        size += memoryview(frame).nbytes
    return Chunk(lo, hi, calls, size)


class GroupedByStep(Sequence[list[Tree]]):
    """The results or values of the calls of consecutive steps, as the list of each step.

    Args:
        values: of all calls, in order.
        replicas: the number of calls of each step.
    """

    __slots__ = ("replicas", "values")

    def __init__(self, values: Stacked | NDArray[Any], replicas: int) -> None:
        self.values = values
        self.replicas = replicas

    def __len__(self) -> int:
        return len(self.values) // self.replicas

    @overload
    def __getitem__(self, place: int) -> list[Tree]: ...
    @overload
    def __getitem__(self, place: slice) -> GroupedByStep: ...
    def __getitem__(self, place: int | slice) -> list[Tree] | GroupedByStep:
        if isinstance(place, slice):
            first, last, _ = place.indices(len(self))
            return GroupedByStep(self.values[first * self.replicas : last * self.replicas], self.replicas)
        if not 0 <= place < len(self):
            raise IndexError(place)
        return list(self.values[place * self.replicas : (place + 1) * self.replicas])

    def __iter__(self) -> Iterator[list[Tree]]:
        each = [iter(self.values)] * self.replicas
        return map(list, zip(*each, strict=True))


class ResultStore:
    """The results of one pass that are not consumed yet.

    Args:
        in_order: whether they are taken in order.
    """

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._results: dict[int, Slots] = {}
        self._columns: dict[int, Stacked] = {}  # those that came stacked, by first call; if taken in order
        self._sizes: dict[int, int] = {}  # bytes of each chunk, under the last call that releases them

    @property
    def bytes_mean(self) -> float:
        calls = len(self._results) + sum(map(len, self._columns.values()))
        return sum(self._sizes.values()) / max(1, calls)

    def put(self, chunk: Chunk) -> None:
        """Store a chunk; none of its calls is stored yet."""
        if self._in_order and type(chunk.calls) is SlotValues:
            self._columns[chunk.lo] = chunk.calls
        else:
            self._results.update(zip(range(chunk.lo, chunk.hi), chunk.calls, strict=True))
        self._sizes[chunk.hi - 1] = chunk.size

    def take(self, first: int, last: int, replicas: int) -> tuple[Sequence[list[Slots]], int]:
        """Remove the results of steps [first, last); return them, and their bytes.

        A step's results are in replica order, without calls that were not made (empty shards) or failed.
        """
        lo, hi = first * replicas, last * replicas
        done = range(lo, hi) if last - first == 1 else [call for call in self._sizes if lo <= call < hi]
        size = sum([self._sizes.pop(call, 0) for call in done])
        if self._columns and (stacked := self._take_stacked(lo, hi)) is not None:
            return GroupedByStep(stacked, replicas), size
        pop = self._results.pop
        if last - first == 1:
            slots_of = [pop(call, None) for call in range(lo, hi)]
            return [[slots for slots in slots_of if slots is not None]], size
        if replicas == 1:  # as many lists as calls: the inner loop would be most of the cost
            return [[] if (slots := pop(call, None)) is None else [slots] for call in range(lo, hi)], size
        return [
            [slots for call in range(at, at + replicas) if (slots := pop(call, None)) is not None]
            for at in range(lo, hi, replicas)
        ], size

    def _take_stacked(self, lo: int, hi: int) -> Stacked | None:
        """Remove the results of calls [lo, hi) if all are stacked, and alike; if not, store them one by one."""
        columns = {at: self._columns.pop(at) for at in sorted(at for at in self._columns if lo <= at < hi)}
        if not columns:
            return None
        at, column = next(reversed(columns.items()))
        if at + len(column) > hi:
            columns[at], self._columns[hi] = column[: hi - at], column[hi - at :]
        arrays = [column.values for column in columns.values()]
        kinds = {(column.slot, column.values.dtype, column.values.shape[1:]) for column in columns.values()}
        if len(kinds) == 1 and sum(map(len, arrays)) == hi - lo:
            if len(arrays) == 1:
                return SlotValues(column.slot, arrays[0])
            joined = np.concatenate(arrays)
            joined.flags.writeable = False  # as received ones: a reader gets views, which folds have too
            return SlotValues(column.slot, joined)
        for at, column in columns.items():
            self._results.update(zip(range(at, hi), column, strict=False))
        return None

    def all(self) -> dict[int, Slots]:
        stacked = {lo + at: slots for lo, column in self._columns.items() for at, slots in enumerate(column)}
        return self._results | stacked

    def clear(self) -> None:
        self._results.clear()
        self._columns.clear()
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
    are those that have no attempt left. In a call that is executed without some elements, a function of whole shards
    returns other values for the rest, so results that were made from its values are dropped.

    Args:
        stages: of the program.
    """

    def __init__(self, stages: Sequence[StageProgram]) -> None:
        self.added = 0  # the number of results that were added
        self._calls: dict[int, dict[tuple[int, int], Tree]] = {}
        alone: set[int] = set()
        for at, stage in enumerate(stages):
            if stage.per_element and (stage.of < 0 or stage.of in alone):
                alone.add(at)
        self._alone = frozenset(alone)  # the stages whose results depend on no other element
        self._divided: set[int] = set()  # the calls that are executed without some elements

    @property
    def count(self) -> int:
        return sum(map(len, self._calls.values()))

    def add(self, call: int, stage: int, element: int, result: Tree) -> None:
        if call in self._divided and stage not in self._alone:
            return
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

    def divide(self, call: int) -> None:
        """Drop the results of a call that depend on other elements, and keep no more of them."""
        self._divided.add(call)
        found = self._calls.pop(call, {})
        if kept := {at: result for at, result in found.items() if at[0] in self._alone}:
            self._calls[call] = kept

    def drop(self, lo: int, hi: int) -> None:
        for call in range(lo, hi) if self._calls or self._divided else ():
            self._calls.pop(call, None)
            self._divided.discard(call)

    def all(self) -> dict[tuple[int, int, int], Tree]:
        """Return the results by (call, stage, element)."""
        return {(c, *at): result for c, results in self._calls.items() for at, result in results.items()}

    def clear(self) -> None:
        self._calls.clear()
        self._divided.clear()


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
