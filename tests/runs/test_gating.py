"""Steps are let in one after the other, whatever the feed has read ahead."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import anyio
import numpy as np
import pytest

from pipedist.core.types import Tree
from pipedist.datasets.division import Division
from pipedist.datasets.feeds import Feed, IndexedFeed, SequentialFeed, StepBatch
from pipedist.datasets.sources import Source, open_source
from pipedist.runs.pass_feeds import GatedFeed


class Blocks(Source):
    """Five elements, in whatever blocks are asked for, from front to back."""

    length = None
    random_access = False
    portable = False
    config: ClassVar[dict[str, Tree]] = {}
    by_id = False

    def blocks(self, batch: int):  # type: ignore[no-untyped-def]
        for start in range(0, 5, batch):
            yield np.arange(start, min(5, start + batch))

    def locate(self, ids: Tree) -> Tree:
        raise NotImplementedError

    def read(self, location: Tree) -> Tree:
        raise NotImplementedError

    def close(self) -> None:
        pass


def sequential(epochs: int = 2) -> Feed:
    return SequentialFeed(Blocks(), batch=2, replicas=2, drop_remainder=False, epochs=epochs)


def indexed(epochs: int = 2) -> Feed:
    source = Blocks()
    return IndexedFeed(source, "d", Division(5, 2, 2), epochs=epochs, shuffle_seed=None)


FEEDS = pytest.mark.parametrize("make", [sequential, indexed])


def steps(offers: list[StepBatch]) -> list[int]:
    return [step for offer in offers for step in range(offer.first, offer.last)]


async def blocked(feed: GatedFeed) -> bool:
    """Return whether the next steps have been read, and are not handed out."""
    pulled = asyncio.ensure_future(feed.pull(10))
    while not (pulled.done() or feed.held_back):
        await anyio.lowlevel.checkpoint()
    for _ in range(10):  # nothing else is waited for
        await anyio.lowlevel.checkpoint()
    return pulled.cancel()


@FEEDS
@pytest.mark.asyncio
async def test_one_step_at_a_time(make) -> None:  # type: ignore[no-untyped-def]
    feed = GatedFeed(make(), "step", lambda: {"w": [1, 7]})
    ends = []
    for step in range(6):
        assert steps(await feed.pull(10)) == [step]
        assert step == 5 or await blocked(feed)
        ends.append(await feed.ends_epoch(step))
        feed.admit(step=step + 1, epoch=0)
    assert ends == [False, False, True] * 2
    assert await feed.pull(10) == []
    assert feed.steps_total == 6


@pytest.mark.asyncio
async def test_what_calls_read_is_sent_with_their_shards() -> None:
    feed = GatedFeed(sequential(), "step", lambda: {"w": [1, 7]})
    await feed.pull(1)
    assert feed.shards(0, 2, local=True).states == {"w": [1, 7]}


@pytest.mark.asyncio
async def test_states_are_those_of_the_assignment_however_late_the_data_is_read() -> None:
    versions = {"w": [1, 7]}
    source = open_source("range", {"stop": 12}, folder=Path())
    data = IndexedFeed(source, "d", Division(12, 4, 2, False), epochs=1, shuffle_seed=None)
    feed = GatedFeed(data, "step", lambda: dict(versions))
    await feed.pull(1)
    read = feed.request(0, 2, local=False)
    versions["w"] = [1, 8]
    assert callable(read)
    assert read().states == {"w": [1, 7]}


@FEEDS
@pytest.mark.asyncio
async def test_one_epoch_at_a_time(make) -> None:  # type: ignore[no-untyped-def]
    feed = GatedFeed(make(), "epoch", first_epoch=-1)
    assert await blocked(feed)
    for epoch in range(2):
        assert await feed.next_epoch() == epoch
        feed.admit(step=0, epoch=epoch)
        found: list[int] = []
        while len(found) < 3:
            found += steps(await feed.pull(2))
        assert found == [3 * epoch + s for s in range(3)]
        assert [await feed.ends_epoch(step) for step in found] == [False, False, True]
        assert epoch == 1 or await blocked(feed)
    assert await feed.next_epoch() is None


@FEEDS
@pytest.mark.asyncio
async def test_an_end_wakes_waiting_readers(make) -> None:  # type: ignore[no-untyped-def]
    feed = GatedFeed(make(), "step")
    await feed.pull(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_nothing, feed)
        await anyio.lowlevel.checkpoint()
        feed.end()
    assert feed.steps_total == 1


async def _nothing(feed: GatedFeed) -> None:
    assert await feed.pull(5) == []


@pytest.mark.asyncio
async def test_the_end_of_an_epoch_can_be_queried_while_the_feed_is_read() -> None:
    """Both look at the next step: what one of them takes is not missing for the other."""
    for _ in range(30):
        feed = GatedFeed(sequential(1), "run")
        first = await feed.pull(1)
        assert steps(first) == [0]
        answers: list[bool] = []

        async def ask(feed: GatedFeed = feed, answers: list[bool] = answers) -> None:
            answers.append(await feed.ends_epoch(0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed.pull, 2)
            tasks.start_soon(ask)
        assert answers == [False]


@FEEDS
@pytest.mark.asyncio
async def test_a_reading_that_ends_before_its_data(make) -> None:  # type: ignore[no-untyped-def]
    feed = GatedFeed(make(), "run", steps_max=4)
    found: list[int] = []
    while offers := await feed.pull(3):
        found += steps(offers)
    assert found == [0, 1, 2, 3]
    assert feed.steps_total == 4


@pytest.mark.asyncio
async def test_an_offer_is_cut_where_less_is_wanted() -> None:
    feed = GatedFeed(indexed(), "epoch")
    assert await feed.next_epoch() == 0
    offers = [await feed.pull(1) for _ in range(3)]
    assert [(o.first, o.last, o.elements) for (o,) in offers] == [(0, 1, 2), (1, 2, 2), (2, 3, 1)]
