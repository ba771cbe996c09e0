"""Results that came stacked are taken as any others, in whatever chunks and order they came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedist.coordinator.results import Chunk, GroupedByStep, ResultStore, open_chunk
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.codec import encode
from pipedist.protocol.columns import SlotValues


def chunk_of(lo: int, hi: int, *, stacked: bool, dtype: str = "int64", slot: str = "y") -> Chunk:
    values = np.arange(lo, hi, dtype=dtype).reshape(-1, 1)
    calls = SlotValues(slot, values)
    return Chunk(lo, hi, calls if stacked else list(calls), hi - lo)


def flat(steps: Any) -> list[list[tuple[str, str, list[float]]]]:
    return [
        [(slot, value.dtype.name, value.tolist()) for slots in step for slot, value in slots.items()]
        for step in steps
    ]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_stacked_results_are_taken_as_others(data: Any) -> None:
    replicas = data.draw(st.integers(1, 3))
    steps = data.draw(st.integers(1, 20))
    in_order = data.draw(st.booleans())
    bounds = data.draw(st.lists(st.integers(1, steps * replicas), unique=True).map(sorted))
    ends = sorted({*bounds, steps * replicas})
    dtypes = st.sampled_from(["int64", "int64", "float32"])
    chunks = [
        (lo, hi, data.draw(st.booleans()), data.draw(dtypes))
        for lo, hi in zip([0, *ends[:-1]], ends, strict=True)
    ]
    stored, plain = ResultStore(in_order=in_order), ResultStore(in_order=False)
    for lo, hi, stacked, dtype in data.draw(st.permutations(chunks)):
        stored.put(chunk_of(lo, hi, stacked=stacked, dtype=dtype))
        plain.put(chunk_of(lo, hi, stacked=False, dtype=dtype))
    parts = data.draw(st.lists(st.integers(1, steps), unique=True).map(sorted))
    takes = list(zip([0, *parts], [*parts, steps], strict=True))
    for first, last in takes if in_order else data.draw(st.permutations(takes)):
        assert stored.bytes_mean == plain.bytes_mean
        assert {call: flat([[slots]]) for call, slots in stored.all().items()} == {
            call: flat([[slots]]) for call, slots in plain.all().items()
        }
        found, size = stored.take(first, last, replicas)
        expected, expected_size = plain.take(first, last, replicas)
        assert (flat(found), size) == (flat(expected), expected_size)
        assert len(found) == last - first
    assert stored.all() == {}


def test_arrays_of_chunks_that_fit_stay_stacked() -> None:
    store = ResultStore(in_order=True)
    store.put(chunk_of(10, 20, stacked=True))
    store.put(chunk_of(0, 10, stacked=True))
    found, _ = store.take(0, 15, 1)
    assert type(found) is GroupedByStep
    assert found.values.values.ravel().tolist() == list(range(15))
    assert [slots["y"].tolist() for (slots,) in found[3:5]] == [[3], [4]]
    assert flat([found[14]]) == [[("y", "int64", [14])]]
    with pytest.raises(IndexError):
        found[15]
    rest, _ = store.take(15, 20, 1)
    assert flat(rest) == flat([[{"y": np.array([n])}] for n in range(15, 20)])


def test_results_are_read_only_however_many_chunks_they_came_in() -> None:
    """A reader of a stream gets the memory that folds read later."""
    store = ResultStore(in_order=True)
    slots = frozenset("y")
    for lo in range(0, 40, 10):
        frames = encode([{"y": np.array([call])} for call in range(lo, lo + 10)])
        store.put(open_chunk(lo, lo + 10, frames, slots, slots))
    for first, last in [(0, 10), (10, 25), (25, 40)]:
        steps, _ = store.take(first, last, 1)
        assert type(steps) is GroupedByStep
        assert not any(slots["y"].flags.writeable for (slots,) in steps)
        assert not any(value.flags.writeable for value in steps.values.values)


def test_calls_that_returned_nothing_are_lacking_beside_stacked_ones() -> None:
    store = ResultStore(in_order=True)
    store.put(chunk_of(0, 4, stacked=True))
    store.put(chunk_of(5, 8, stacked=True))
    found, _ = store.take(0, 4, 2)
    assert flat(found)[2] == [("y", "int64", [5])]
    assert list(map(len, found)) == [2, 2, 1, 2]


def test_stacked_results_of_another_slot_are_rejected() -> None:
    frames = encode([{"z": np.array([n])} for n in range(20)])
    with pytest.raises(RemoteProtocolError, match="does not have the slots"):
        open_chunk(0, 20, frames, frozenset("y"), frozenset("y"))
    with pytest.raises(RemoteProtocolError, match="one entry per call"):
        open_chunk(0, 19, frames, frozenset("z"), frozenset("z"))
    with pytest.raises(RemoteProtocolError, match="does not have the slots"):
        open_chunk(0, 20, frames, frozenset("yz"), frozenset("yz"))
