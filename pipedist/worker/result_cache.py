"""Reports of finished calls to the machine, and the cache of results that are not durable yet.

A result that was sent can still be lost: the driver process may be killed before its journal holds it. So results
of a pass that can be resumed are cached here until the scheduler sends `Committed`. When the connection is lost,
or the worker is evicted, the cache is written into memory that the supervisor holds (`save`); the next incarnation,
a new process with the code as it is then, reads it (`load`) and offers the calls in its Hello. The scheduler
decides by their key which results are still valid, and recalls these, one or many at a time.

When the cache is full, new results are dropped; the oldest are needed first, because they are used in step order.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgpack
from msgspec import Struct
from msgspec.structs import astuple, replace

from pipedist.core.platform_id import process_usage
from pipedist.core.record_format import frame_bytes, frames_of, pack, whole_records
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.codec import Frame, UnsendableError, decode, encode
from pipedist.protocol.messages import CACHED_RANGES_MAX, AssignGang, Failed, Results
from pipedist.worker.commands import Execute
from pipedist.worker.events import (
    CallRaised,
    CallsFinished,
    ElementsFinished,
    Event,
    StepReturned,
)
from pipedist.worker.failures import CallFailure
from pipedist.worker.lease_run import LeaseRun, RejectedLeaseRun

if TYPE_CHECKING:
    from pipedist.worker.execution import PassExecutor
    from pipedist.worker.gangs import GangRun
    from pipedist.worker.leases import Run
    from pipedist.worker.prepared_step import PreparedStep

CACHED_BYTES_MAX = 256 * 2**20  # maximum size of the results that a worker caches


class CachedCalls(Struct, frozen=True):
    """The results of calls [lo, hi), as they were sent in a Results message."""

    lo: int
    hi: int
    busy_ns: int
    frames: Sequence[Frame]

    @property
    def size_bytes(self) -> int:
        return frame_bytes(self.frames)

    def part(self, lo: int, hi: int) -> CachedCalls:
        if (lo, hi) == (self.lo, self.hi):
            return self
        # may_import is safe: these bytes were written by this worker, not by a peer.
        calls = decode(self.frames, may_import=True)
        share = self.busy_ns * (hi - lo) // (self.hi - self.lo)
        return CachedCalls(lo, hi, share, encode(calls[lo - self.lo : hi - self.lo]))


class ResultCache:
    def __init__(self, bytes_max: int = CACHED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._size_bytes = 0
        self._passes: dict[str, list[CachedCalls]] = {}  # by key, in the order in which they finished

    def __len__(self) -> int:
        return sum(each.hi - each.lo for cached in self._passes.values() for each in cached)

    def add(self, key: str, calls: CachedCalls) -> None:
        """Cache the results of some calls, unless the cache is full."""
        size = calls.size_bytes
        if self._size_bytes + size > self._bytes_max:
            return
        self._size_bytes += size
        self._passes.setdefault(key, []).append(calls)

    def release(self, key: str, before: int) -> None:
        """Drop calls below `before`: they are durable."""
        cached = self._passes.get(key, [])
        rest = [each for each in cached if each.hi > before]
        if len(rest) < len(cached):
            self._size_bytes -= sum(each.size_bytes for each in cached if each.hi <= before)
            self._passes[key] = rest

    def drop(self, key: str) -> None:
        self._size_bytes -= sum(each.size_bytes for each in self._passes.pop(key, ()))

    def offers(self) -> tuple[str, ...]:
        """Return the (largest) cached ranges for Hello, "key:lo-hi"."""
        found = [
            (lo - hi, key, lo, hi)
            for key, cached in self._passes.items()
            for lo, hi in _merged((each.lo, each.hi) for each in cached)
        ]
        return tuple(f"{key}:{lo}-{hi}" for _, key, lo, hi in sorted(found)[:CACHED_RANGES_MAX])

    def recalled(self, key: str, lo: int, hi: int) -> Iterator[CachedCalls]:
        """Yield the results of calls [lo, hi), in order; RemoteProtocolError if some are not cached."""
        for each in sorted(self._passes.get(key, ()), key=lambda each: each.lo):
            until = min(each.hi, hi)
            if each.lo <= lo < until:
                yield each.part(lo, until)
                lo = until
        if lo < hi:
            raise RemoteProtocolError(f"calls [{lo}, {hi}) were recalled, but are not cached")

    # -- from one incarnation to the next ------------------------------------------------

    def save(self, file: int) -> None:
        """Write everything to a file as records: key, calls, time, and frames."""
        os.lseek(file, 0, os.SEEK_SET)
        os.ftruncate(file, 0)
        with open(file, "wb", closefd=False) as out:
            for key, cached in self._passes.items():
                for each in cached:
                    about = msgpack.packb([key, each.lo, each.hi, each.busy_ns])
                    out.writelines(pack([about, *each.frames]))

    def load(self, file: int) -> None:
        """Add the complete records of an earlier incarnation, and empty the file."""
        if size := os.fstat(file).st_size:
            with mmap.mmap(file, size, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                for head in whole_records(view):
                    about, *frames = map(bytes, frames_of(view, head))
                    key, lo, hi, busy_ns = msgpack.unpackb(about)
                    self.add(key, CachedCalls(lo, hi, busy_ns, frames))
        os.ftruncate(file, 0)


def _merged(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], hi))
        else:
            merged.append((lo, hi))
    return merged


class ResultReporter:
    """Reports calls to the machine; the caller holds the machine's lock.

    The machine sees which calls are over, and decides which message is sent; their results stay here until then.
    """

    def __init__(self, handle: Callable[[Event], None], cache: ResultCache) -> None:
        self._handle = handle
        self._cache = cache
        self._keys: dict[int, str] = {}  # keys of the bound passes whose results are cached
        self.payload: Sequence[Frame] = ()  # the results that are being reported
        self._executor: PassExecutor | None = None  # that made them
        self._cpu_ns = process_usage()[1]  # at the last report
        self.recalls: set[int] = set()  # leases whose results are cached already

    # -- executed calls ------------------------------------------------------------------

    def finished(self, lease: int, run: Run) -> None:
        """Report calls that returned."""
        lo, outcomes, busy_ns = run.take()
        if not outcomes or isinstance(run, RejectedLeaseRun):
            return
        self._executor = run.executor
        try:
            self.payload = encode(outcomes)
        except UnsendableError:
            for call, outcome in enumerate(outcomes, lo):
                if (failure := run.executor.outcomes.unsendable(call, outcome)) is not None:
                    self.failed(lease, failure)
                    continue
                self.payload = encode([outcome])
                self._handle(CallsFinished(lease, call, call + 1, busy_ns if call == lo else 0))
        else:
            self._handle(CallsFinished(lease, lo, lo + len(outcomes), busy_ns))
        self.payload, self._executor = (), None

    def step(self, assigned: AssignGang, run: GangRun | PreparedStep) -> bool:
        """Report a step whose calls all returned, and that the machine has not seen; False: a result can't be sent."""
        try:
            self.payload = encode(run.outcomes)
        except UnsendableError:
            return False
        self._executor = run.executor
        self._handle(StepReturned(assigned, run.take().busy_ns))
        self.payload, self._executor = (), None
        return True

    def measured(self, results: Results) -> Results:
        """Return results that are being reported with the costs of executing them."""
        executor, counted_ns = self._executor, self._cpu_ns
        reading_ns, stages_ns = (0, ()) if executor is None else executor.take_costs()
        if executor is not None:
            counted_ns = max(counted_ns, executor.loaded_at_cpu_ns)  # calls don't include imports
        memory_bytes, self._cpu_ns = process_usage()
        spent_ns = self._cpu_ns - counted_ns
        return replace(
            results, reading_ns=reading_ns, stages_ns=stages_ns, memory_bytes=memory_bytes, cpu_ns=spent_ns
        )

    def elements(self, lease: int, run: LeaseRun | RejectedLeaseRun) -> None:
        """Report results of elements of calls that still run; one that can't be sent fails with its call."""
        for call, results in run.elements():
            with contextlib.suppress(UnsendableError):
                self.payload = encode(results)
                self._handle(ElementsFinished(lease, call))
        self.payload = ()

    def failed(self, lease: int, failure: CallFailure) -> None:
        self._handle(CallRaised(Failed(lease, *astuple(failure))))

    # -- cached calls --------------------------------------------------------------------

    def open_pass(self, pass_id: int, key: str) -> None:
        """Cache the results of a pass from now on, under a key; "": do not."""
        if key:
            self._keys[pass_id] = key

    def drop_pass(self, pass_id: int) -> None:
        self._cache.drop(self._keys.pop(pass_id, ""))

    def store(self, pass_id: int, results: Results) -> None:
        calls = CachedCalls(results.lo, results.hi, results.busy_ns, self.payload)
        self._cache.add(self._keys[pass_id], calls)

    def release(self, pass_id: int, before: int) -> None:
        self._cache.release(self._keys[pass_id], before)

    def recalled(self, slice_: Execute) -> None:
        for calls in self._cache.recalled(self._keys[slice_.pass_id], slice_.lo, slice_.hi):
            self.payload = calls.frames
            self._handle(CallsFinished(slice_.lease, calls.lo, calls.hi, calls.busy_ns))
        self.payload = ()
