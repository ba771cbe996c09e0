"""What a worker keeps of finished calls, and hands on to its next incarnation."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.codec import decode, encode
from pipedist.worker.result_cache import KeptCalls, KeptResults


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("kept")
    yield descriptor
    os.close(descriptor)


def calls(lo: int, hi: int) -> KeptCalls:
    outcomes = [{"y": np.full(20_000, call, np.int32), "n": call} for call in range(lo, hi)]
    return KeptCalls(lo, hi, 1000 * (hi - lo), encode(outcomes))


def numbers(kept: KeptResults, key: str, lo: int, hi: int) -> list[int]:
    """The calls that come back, checked."""
    found = []
    for part in kept.recalled(key, lo, hi):
        for call, outcome in enumerate(decode(part.frames), part.lo):
            assert outcome["n"] == call
            np.testing.assert_array_equal(outcome["y"], np.full(20_000, call, np.int32))
            found.append(call)
    return found


def test_what_is_saved_is_offered_and_recalled_by_the_next_incarnation(file: int) -> None:
    kept = KeptResults()
    for lo, hi in ((0, 3), (3, 4), (9, 12)):
        kept.add("a" * 32, calls(lo, hi))
    kept.add("b" * 32, calls(5, 6))
    kept.save(file)
    after = KeptResults()
    after.load(file)
    assert after.offers() == (f"{'a' * 32}:0-4", f"{'a' * 32}:9-12", f"{'b' * 32}:5-6")
    assert len(after) == 8
    assert numbers(after, "a" * 32, 0, 4) == [0, 1, 2, 3]
    assert numbers(after, "a" * 32, 1, 4) == [1, 2, 3]  # a step of it is durable already
    assert numbers(after, "a" * 32, 10, 11) == [10]
    assert os.fstat(file).st_size == 0
    again = KeptResults()
    again.load(file)
    assert again.offers() == ()


def test_what_was_not_wholly_saved_is_not_there(file: int) -> None:
    kept = KeptResults()
    kept.add("a", calls(0, 3))
    kept.save(file)
    os.pwrite(file, bytes(4), 0)  # the first bytes are written last
    after = KeptResults()
    after.load(file)
    assert len(after) == 0


def test_what_is_durable_goes_and_makes_room() -> None:
    size = calls(0, 1).size_bytes
    kept = KeptResults(bytes_max=2 * size + 100)
    for call in range(3):
        kept.add("a", calls(call, call + 1))
    assert kept.offers() == ("a:0-2",)  # there was no room for the third one
    kept.settle("a", 1)
    kept.settle("b", 1)
    kept.add("a", calls(3, 4))
    assert kept.offers() == ("a:1-2", "a:3-4")
    kept.drop("a")
    kept.drop("a")
    kept.add("b", calls(0, 2))
    assert kept.offers() == ("b:0-2",)


def test_what_was_never_offered_can_not_be_recalled() -> None:
    kept = KeptResults()
    kept.add("a", calls(0, 3))
    with pytest.raises(RemoteProtocolError, match=r"calls \[3, 4\) were recalled, but are not kept"):
        list(kept.recalled("a", 1, 4))
