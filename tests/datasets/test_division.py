"""The contract's arithmetic: which element goes where."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.datasets.division import Division, permutation

GOLDEN = [7, 2, 5, 0, 8, 9, 4, 6, 1, 3]
GOLDEN_DIGEST = "27e0646d7756be6d"

divisions = st.builds(
    Division,
    length=st.integers(0, 200),
    batch=st.integers(1, 60),
    replicas=st.integers(1, 9),
    drop_remainder=st.booleans(),
)


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [
        (4, 3, [2, 2, 0]),
        (4, 5, [1, 1, 1, 1, 0]),
        (6, 2, [3, 3]),
        (5, 2, [3, 2]),
        (1, 1, [1]),
        (9, 4, [3, 3, 3, 0]),
    ],
)
def test_chunks_are_those_of_tf_distribute(rows: int, parts: int, sizes: list[int]) -> None:
    division = Division(rows, rows, parts)
    assert [len(division.ids(0, replica)) for replica in range(parts)] == sizes


def test_range_of_six_in_batches_of_four_on_two_replicas() -> None:
    division = Division(length=6, batch=4, replicas=2)
    assert division.steps_per_epoch == 2
    assert [list(division.ids(s, r)) for s in (0, 1) for r in (0, 1)] == [[0, 1], [2, 3], [4], [5]]
    assert [list(division.ids(s, r)) for s in (2, 3) for r in (0, 1)] == [[6, 7], [8, 9], [10], [11]]
    assert division.bounds(3, 1) == (1, 5, 6)


def test_drop_remainder_drops_the_short_step() -> None:
    division = Division(length=6, batch=4, replicas=2, drop_remainder=True)
    assert division.steps_per_epoch == 1
    assert list(division.ids(1, 0)) == [6, 7]  # step 1 is the first of the next epoch


@given(divisions)
def test_two_epochs_are_partitioned_exactly_and_in_order(division: Division) -> None:
    steps = division.steps_per_epoch
    epochs = []
    for epoch in (0, 1):
        elements: list[int] = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            shards = [division.ids(step, replica) for replica in range(division.replicas)]
            size = -(-division.rows(step) // division.replicas)
            assert [len(shard) for shard in shards] == [
                min(size, max(0, division.rows(step) - replica * size)) for replica in range(len(shards))
            ]
            assert division.parts(step) == sum(1 for shard in shards if len(shard))
            assert division.calls(step + 1) == division.calls(step) + division.parts(step)
            assert all(len(shard) for shard in shards[: division.parts(step)])
            assert 0 < division.rows(step) <= division.batch
            for replica, shard in enumerate(shards):
                which, start, stop = division.bounds(step, replica)
                assert (which, stop - start) == (epoch, len(shard))
                if len(shard):
                    assert shard.start == epoch * division.length + start
            elements += [element for shard in shards for element in shard]
        epochs.append(elements)
    kept = division.length
    if division.drop_remainder:
        kept -= division.length % division.batch
    assert epochs == [list(range(kept)), list(range(division.length, division.length + kept))]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.integers(0, 50), st.data())
def test_shards_in_a_row_are_those_one_by_one(
    length: int, batch: int, replicas: int, drop: bool, count: int, data: st.DataObject
) -> None:
    division = Division(length, batch, replicas, drop)
    steps = division.steps_per_epoch
    if steps == 0:
        return
    step, replica = data.draw(st.integers(0, 2 * steps - 1)), data.draw(st.integers(0, replicas - 1))
    call, end = step * replicas + replica, (step // steps + 1) * steps * replicas
    calls = range(call, min(call + count, end))
    assert division.bounds_from(step, replica, count) == [
        division.bounds(*divmod(each, replicas))[1:] for each in calls
    ]


def test_steps_and_replicas_out_of_range_are_errors() -> None:
    with pytest.raises(IndexError, match="0 steps an epoch"):
        Division(0, 4, 2).parts(0)
    with pytest.raises(IndexError, match="replica 2 of 2"):
        Division(8, 4, 2).ids(0, 2)
    with pytest.raises(IndexError):
        Division(8, 4, 2).rows(-1)


@given(st.integers(-(2**70), 2**70), st.text(max_size=8), st.integers(0, 5), st.integers(0, 300))
def test_a_permutation_has_each_row_once_and_depends_on_nothing_else(
    seed: int, name: str, epoch: int, n: int
) -> None:
    order = permutation(seed, name, epoch, n)
    assert order.dtype == np.int64
    assert not order.flags.writeable
    assert np.array_equal(np.sort(order), np.arange(n))
    assert np.array_equal(order, permutation(seed, name, epoch, n))


def test_permutations_differ_by_seed_name_and_epoch() -> None:
    keys = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (-1, "a", 0), (0, "a\x000", 0)]
    orders = {tuple(permutation(seed, name, epoch, 50).tolist()) for seed, name, epoch in keys}
    assert len(orders) == len(keys)


def test_the_permutation_is_the_documented_one_for_ever() -> None:
    assert permutation(0, "dataset", 0, 10).tolist() == GOLDEN
    digest = hashlib.sha256(permutation(7, "flights", 3, 1000).astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == GOLDEN_DIGEST
