"""The cache of finished calls, and its transfer to the next incarnation."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.codec import decode, encode
from pipedist.worker.result_cache import CachedCalls, ResultCache


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("cache")
    yield descriptor
    os.close(descriptor)


def calls(lo: int, hi: int) -> CachedCalls:
    outcomes = [{"y": np.full(20_000, call, np.int32), "n": call} for call in range(lo, hi)]
    return CachedCalls(lo, hi, 1000 * (hi - lo), encode(outcomes))


def numbers(cache: ResultCache, key: str, lo: int, hi: int) -> list[int]:
    """The calls that come back, checked."""
    found = []
    for part in cache.recalled(key, lo, hi):
        for call, outcome in enumerate(decode(part.frames), part.lo):
            assert outcome["n"] == call
            np.testing.assert_array_equal(outcome["y"], np.full(20_000, call, np.int32))
            found.append(call)
    return found


def test_saved_results_are_offered_and_recalled_by_the_next_incarnation(file: int) -> None:
    cache = ResultCache()
    for lo, hi in ((0, 3), (3, 4), (9, 12)):
        cache.add("a" * 32, calls(lo, hi))
    cache.add("b" * 32, calls(5, 6))
    cache.save(file)
    after = ResultCache()
    after.load(file)
    assert after.offers() == (f"{'a' * 32}:0-4", f"{'a' * 32}:9-12", f"{'b' * 32}:5-6")
    assert len(after) == 8
    assert numbers(after, "a" * 32, 0, 4) == [0, 1, 2, 3]
    assert numbers(after, "a" * 32, 1, 4) == [1, 2, 3]  # a step of it is durable already
    assert numbers(after, "a" * 32, 10, 11) == [10]
    assert os.fstat(file).st_size == 0
    again = ResultCache()
    again.load(file)
    assert again.offers() == ()


def test_incomplete_records_are_not_loaded(file: int) -> None:
    cache = ResultCache()
    cache.add("a", calls(0, 3))
    cache.save(file)
    os.pwrite(file, bytes(4), 0)  # the first bytes are written last
    after = ResultCache()
    after.load(file)
    assert len(after) == 0


def test_durable_results_are_dropped_and_free_space() -> None:
    size = calls(0, 1).size_bytes
    cache = ResultCache(bytes_max=2 * size + 100)
    for call in range(3):
        cache.add("a", calls(call, call + 1))
    assert cache.offers() == ("a:0-2",)  # the cache was full before the third one
    cache.release("a", 1)
    cache.release("b", 1)
    cache.add("a", calls(3, 4))
    assert cache.offers() == ("a:1-2", "a:3-4")
    cache.drop("a")
    cache.drop("a")
    cache.add("b", calls(0, 2))
    assert cache.offers() == ("b:0-2",)


def test_results_that_were_not_offered_cannot_be_recalled() -> None:
    cache = ResultCache()
    cache.add("a", calls(0, 3))
    with pytest.raises(RemoteProtocolError, match=r"calls \[3, 4\) were recalled, but are not cached"):
        list(cache.recalled("a", 1, 4))
