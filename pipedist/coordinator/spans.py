"""Measurements of a run as they are kept: spans of calls, work in the driver, events, durations of calls."""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

_DURATIONS_PER_OCTAVE = 8
_OCTAVES = 42  # of nanoseconds: up to an hour and more; the last one has everything above
_BUCKETS = _OCTAVES * _DURATIONS_PER_OCTAVE


class SpanEnd(IntEnum):
    """How a span ended."""

    DONE = 0
    FAILED = 1
    TIMED_OUT = 2
    LOST = 3  # its worker died
    CANCELLED = 4  # by the scheduler, also because another worker was faster


SPAN = np.dtype(
    [
        ("pass", "u2"),
        ("worker", "u2"),
        ("outcome", "u1"),
        ("attempt", "u1"),
        ("merged", "u4"),  # spans that this one replaces
        ("lo", "i8"),
        ("hi", "i8"),  # the calls are in [lo, hi); all of them, if none is merged
        ("calls", "i8"),
        ("queued", "i8"),  # when the first step could be executed
        ("sent", "i8"),
        ("started", "i8"),
        ("finished", "i8"),
        ("busy", "i8"),
        ("bytes_out", "i8"),
    ]
)


class DriverWork(IntEnum):
    """Work in the driver that is recorded."""

    READ = 0  # of the data of a lease
    FOLD = 1  # of steps
    COMMIT = 2  # of the journal


class DriverSpan(Struct, frozen=True):
    """Work in the driver, in nanoseconds since the recorder was made."""

    work: DriverWork
    began: int
    ended: int
    text: str  # for people

    @property
    def duration(self) -> int:
        return self.ended - self.began


class Mark(Struct, frozen=True):
    """An event: the death of a worker, or a retry."""

    at_ns: int
    text: str  # for people


class DurationHistogram:
    """A histogram of durations of calls, with eight buckets for each power of two."""

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS

    def add(self, duration_ns: float, calls: int) -> None:
        bucket = int(math.log2(duration_ns) * _DURATIONS_PER_OCTAVE) if duration_ns > 1 else 0
        self._counts[bucket if bucket < _BUCKETS else _BUCKETS - 1] += calls

    def quantile_s(self, q: float) -> float:
        """Return the duration below which a share `q` of the calls is, within 5 percent, in seconds."""
        sums = np.cumsum(self._counts)
        if not sums[-1]:
            return 0.0
        bucket = int(np.searchsorted(sums, q * sums[-1]))
        return float(2 ** ((bucket + 0.5) / _DURATIONS_PER_OCTAVE) * 1e-9)


def thin(spans: NDArray[np.void]) -> NDArray[np.void]:
    """Join pairs of successive spans of each pass and worker, and return half as many, in order of their ends.

    Spans that failed are joined only with others of the same outcome. If none can be joined, the older half is dropped.
    """
    order = np.lexsort((spans["finished"], spans["outcome"], spans["worker"], spans["pass"]))
    ordered = spans[order]
    joined, second = ordered[0::2].copy(), ordered[1::2]
    size = len(second)
    same = np.ones(size, bool)
    for key in ("pass", "worker", "outcome"):
        same &= joined[key][:size] == second[key]
    first = joined[:size][same]
    other = second[same]
    for key in ("merged", "calls", "busy", "bytes_out"):
        first[key] += other[key]
    for key in ("lo", "queued", "sent", "started"):
        first[key] = np.minimum(first[key], other[key])
    for key in ("hi", "finished", "attempt"):
        first[key] = np.maximum(first[key], other[key])
    joined[np.flatnonzero(same)] = first
    kept = np.concatenate([joined, second[~same]])
    kept = kept[np.argsort(kept["finished"], kind="stable")]
    return kept[len(kept) // 2 :] if len(kept) == len(spans) else kept
