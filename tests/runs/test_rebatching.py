"""Re-batching: which elements of which values make a step, whatever arrives when."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedist.datasets.division import Division
from pipedist.errors import FoldError
from pipedist.protocol.program import ReaderConfig, Shards
from pipedist.runs.pass_feeds import AHEAD_BYTES_MAX, AHEAD_STEPS_MAX, SpoolFeed
from pipedist.runs.rebatching import KeptShard, KeptStep, StepCutter, kept_shards

READER = ReaderConfig(None, 1, -1, False)


def input_steps(
    division: Division, epochs: int, removed: frozenset[int]
) -> list[tuple[int, int, list[KeptShard]]]:
    """Return the steps of a stage whose value of element i is 10 * i; `removed` are quarantined ids."""
    made = []
    for step in range(division.steps_per_epoch * epochs):
        ids, values, gone = [], [], []
        for replica in range(division.parts(step)):
            own = np.array(division.ids(step, replica))
            out = np.isin(own, list(removed))
            ids.append(own[~out])
            values.append(None if out.all() else {"x": own[~out] * 10})
            if out.any() and not out.all():
                gone.append((replica, np.flatnonzero(out)))
        rows = division.rows(step)
        shards = kept_shards(ids, values, rows, division.replicas, gone)
        made.append((step // division.steps_per_epoch, rows, shards))
    return made


def rows_of(step: KeptStep) -> list[list[int]]:
    """Return the element ids of each shard, after a check of its value."""
    found = []
    for replica in range(step.parts):
        ids = [int(i) for i in step.ids(replica)]
        if replica not in step.skipped:
            assert (step.value(replica)["x"] == np.array(ids) * 10).all()
        else:
            assert ids == []
        found.append(ids)
    return found


CASES = {
    "n": st.integers(1, 40),
    "batch": st.integers(1, 9),
    "other": st.integers(1, 30),
    "replicas": st.integers(1, 4),
    "epochs": st.integers(1, 3),
    "removed": st.frozensets(st.integers(0, 119), max_size=12),
}


@settings(deadline=None)
@given(**CASES, first=st.integers(0, 12))
def test_steps_are_ranges_of_positions_wherever_the_cutter_begins(
    n: int, batch: int, other: int, replicas: int, epochs: int, removed: frozenset[int], first: int
) -> None:
    made = input_steps(Division(n, batch, replicas), epochs, removed)
    wanted = Division(n, other, replicas)
    cutter = StepCutter(other, replicas)
    skipped = cutter.seek(first, [(epoch, rows) for epoch, rows, _ in made])
    steps = [
        step for epoch, rows, shards in made[skipped:] for step in cutter.add(epoch, rows, 8 * rows, shards)
    ]
    steps += cutter.end()
    total = wanted.steps_per_epoch * epochs
    assert len(steps) == max(0, total - first)
    for number, step in enumerate(steps, first):
        ids = [wanted.ids(number, replica) for replica in range(wanted.parts(number))]
        assert rows_of(step) == [[i for i in shard if i not in removed] for shard in ids]
        assert (step.elements, step.epoch) == (wanted.rows(number), number // wanted.steps_per_epoch)
        assert step.bytes == 8 * step.elements


@settings(deadline=None)
@given(**CASES)
def test_without_a_batch_steps_and_values_are_the_same(
    n: int, batch: int, other: int, replicas: int, epochs: int, removed: frozenset[int]
) -> None:
    made = input_steps(Division(n, batch, replicas), epochs, removed)
    cutter = StepCutter(0, replicas)
    skipped = cutter.seek(other, [(epoch, rows) for epoch, rows, _ in made])
    assert skipped == min(other, len(made))
    for epoch, rows, shards in made[skipped:]:
        [step] = cutter.add(epoch, rows, 8, shards)
        made_here = [r for r, shard in enumerate(shards) if shard.value is not None]
        assert all(step.value(replica) is shards[replica].value for replica in made_here)
        assert step.skipped == tuple(r for r, shard in enumerate(shards) if shard.value is None)
    assert cutter.end() == []


def made_of(values: list[Any]) -> KeptStep:
    cutter = StepCutter(2 * len(values), 1)
    shards = [KeptShard(value, range(2 * n, 2 * n + 2), 2) for n, value in enumerate(values)]
    steps = [step for shard in shards for step in cutter.add(0, 2, 1, [shard])]
    return steps[0]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([np.arange(3), np.arange(2)], "one row for each of the 2 elements"),
        ([np.arange(2), 3], "one row for each"),
        ([None, np.arange(2)], "one row for each"),
        ([np.arange(2), {"x": np.arange(2)}], "different structures"),
        ([np.arange(2), np.arange(2.0)], "dtype"),
    ],
)
def test_values_that_cannot_be_joined_are_errors(values: list[Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        made_of(values).value(0)


# -- the feed --------------------------------------------------------------------------------


def live_feed(batch: int = 4) -> SpoolFeed:
    feed = SpoolFeed("decoded", None, 1, batch, READER)
    feed.follow()
    return feed


def put(feed: SpoolFeed, *steps: int, size: int = 8, value: Any = None) -> None:
    for step in steps:
        rows = np.arange(2 * step, 2 * step + 2) if value is None else value
        feed.put(0, 2, size, [KeptShard(rows, range(2 * step, 2 * step + 2), 2)])


@pytest.mark.asyncio
async def test_a_step_waits_for_its_last_element_and_the_last_one_for_the_end() -> None:
    feed = live_feed()
    pulled: list[Any] = []

    async def pull() -> None:
        while found := await feed.pull(1):
            pulled.extend(found)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pull)
        for step, complete in enumerate([0, 1, 1, 2, 2]):
            put(feed, step)
            await anyio.wait_all_tasks_blocked()
            assert len(pulled) == complete
        feed.end()
    assert [(each.first, each.last, each.elements) for each in pulled] == [(0, 1, 4), (1, 2, 4), (2, 3, 2)]
    assert feed.steps_total == 3
    read = feed.request(0, 3, local=True)
    assert callable(read)  # values are joined in a thread
    shards = read()
    assert [value.tolist() for value in shards.values or ()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("size", "steps"), [(8, AHEAD_STEPS_MAX), (AHEAD_BYTES_MAX // 2, 2), (2 * AHEAD_BYTES_MAX, 1)]
)
async def test_the_maker_waits_while_too_much_is_not_divided_yet(size: int, steps: int) -> None:
    feed = live_feed(batch=2 * steps + 2)
    for step in range(steps):
        await feed.room()
        put(feed, step, size=size)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.room)
        await anyio.wait_all_tasks_blocked()
        assert len(tasks._tasks) == 1  # type: ignore[attr-defined]
        tasks.start_soon(feed.pull, 1)  # takes them for its step, although this is not complete
        await anyio.wait_all_tasks_blocked()
        assert len(tasks._tasks) == 1  # type: ignore[attr-defined]
        put(feed, steps)
    assert list(feed._held) == [0]


@pytest.mark.asyncio
async def test_a_closed_feed_holds_its_maker_back_no_longer() -> None:
    feed = live_feed()
    put(feed, 0, size=AHEAD_BYTES_MAX)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.room)
        await anyio.wait_all_tasks_blocked()
        await feed.aclose()
    put(feed, 1, size=AHEAD_BYTES_MAX)
    await feed.room()


@pytest.mark.asyncio
async def test_a_feed_whose_maker_failed_is_starved_after_its_last_whole_step() -> None:
    feed = live_feed()
    put(feed, 0, 1, 2)
    feed.cut_off()
    assert not feed.is_starved(0)
    with anyio.move_on_after(0.01):
        while True:
            await feed.pull(1)
    assert list(feed._held) == [0]
    assert not feed.is_starved(0)
    assert feed.is_starved(1)


@pytest.mark.asyncio
async def test_elements_are_sent_separately_if_values_have_a_row_for_each() -> None:
    feed = live_feed()
    put(feed, 0, 1)
    feed.end()
    await feed.pull(1)
    assert feed.separable(0) == 4
    read = feed.request(0, 1, local=True, elements=[(0, 1), (2, 4)])
    assert callable(read)
    shards: Shards = read()
    assert [list(ids) for ids in shards.ids or ()] == [[0, 2, 3]]
    assert [value.tolist() for value in shards.values or ()] == [[0, 2, 3]]

    whole = live_feed(batch=0)
    put(whole, 0, value=7)
    await whole.pull(1)
    assert whole.separable(0) == 0
    assert whole.shards(0, 1, local=True).values == [7]


@pytest.mark.asyncio
async def test_elements_are_separable_beside_an_input_shard_of_which_nothing_remains() -> None:
    feed = live_feed()
    put(feed, 0)
    feed.put(0, 2, 8, kept_shards([range(0)], [None], 2, 1))
    feed.end()
    await feed.pull(1)
    assert feed.separable(0) == 2
    read = feed.request(0, 1, local=True, elements=[(1, 2)])
    assert callable(read)
    shards: Shards = read()
    assert [list(ids) for ids in shards.ids or ()] == [[1]]
    assert [value.tolist() for value in shards.values or ()] == [[1]]


@pytest.mark.asyncio
async def test_values_without_a_row_per_element_end_the_pass_with_the_stage() -> None:
    feed = live_feed()
    put(feed, 0, 1, value=7)
    await feed.pull(1)
    with pytest.raises(FoldError, match=r"decoded: its values can't be divided into calls: .* 2 elements"):
        feed.shards(0, 1, local=True)


def test_ranges_of_steps_are_adjacent() -> None:
    feed = live_feed(batch=2)
    put(feed, *range(5))
    feed.end()
    batches = anyio.run(feed.pull, 9)
    assert all(a.last == b.first for a, b in pairwise(batches))
    assert sum(each.elements for each in batches) == 10
