"""Feeds: what is offered, what an element's id is, what happens when the data ends or fails."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipedist
from pipedist.coordinator import PassHandle
from pipedist.coordinator.measurements import PassRecord, Recorder
from pipedist.coordinator.spans import DriverWork
from pipedist.core.functions import reference
from pipedist.datasets.division import Division
from pipedist.datasets.feeds import IndexedFeed, SequentialFeed, StepBatch
from pipedist.datasets.sources import SourceError, open_source
from pipedist.datasets.sources.base import ReaderSource
from pipedist.datasets.sources.memory import RangeReader
from pipedist.journal.log_format import EMPTY, LogEntry, RecordLog, read_log
from pipedist.protocol import messages as msg
from pipedist.protocol.program import Emit, Program, StageProgram
from pipedist.runs.kept_values import Spool
from pipedist.runs.quarantine import PassQuarantine
from pipedist.scheduler import PassSettings
from pipedist.scheduler.commands import CallsQuarantined, Cause
from tests.coordinator.wire import Wire, wired

F = "tests.runs.functions"


def indexed(
    n: int, batch: int, replicas: int, *, epochs: int = 1, drop: bool = False, **kw: Any
) -> IndexedFeed:
    source = open_source("range", {"start": 0, "stop": n, "step": 1}, folder=Path())
    division = Division(n, batch, replicas, drop)
    return IndexedFeed(source, "d", division, epochs=epochs, shuffle_seed=kw.get("seed"))


async def pulled(feed: Any, count: int) -> list[StepBatch]:
    offers: list[StepBatch] = []
    while got := await feed.pull(count):
        offers += got
    return offers


@settings(deadline=None)
@given(
    n=st.integers(0, 50),
    batch=st.integers(1, 9),
    replicas=st.integers(1, 5),
    epochs=st.integers(1, 3),
    drop=st.booleans(),
    count=st.integers(1, 8),
)
def test_an_indexed_feed_follows_the_division(
    n: int, batch: int, replicas: int, epochs: int, drop: bool, count: int
) -> None:
    division = Division(n, batch, replicas, drop)
    feed = indexed(n, batch, replicas, epochs=epochs, drop=drop)
    offers = asyncio.run(pulled(feed, count))
    steps = [(s, o.parts) for o in offers for s in range(o.first, o.last)]
    total = division.steps_per_epoch * epochs
    assert steps == [(s, division.parts(s)) for s in range(total)]
    assert sum(o.elements for o in offers) == sum(division.rows(s) for s in range(total))
    for first in range(total + 1):
        for last in range(first, total + 1):
            assert feed.elements(first, last) == sum(division.rows(s) for s in range(first, last))


@pytest.mark.asyncio
async def test_a_shuffle_keeps_the_order_of_the_epochs_in_use_only() -> None:
    feed = indexed(10, 5, 1, epochs=50, seed=1)
    for step in range(100):
        ids = feed.shards(step, step + 1, local=True).ids
        assert ids is not None
        assert set(ids[0] // 10) == {step // 2}
        feed.release(step)
        assert len(feed._orders) <= 2


def test_a_shuffle_that_does_not_fit_in_memory_raises() -> None:
    source = open_source("range", {"stop": 2**62}, folder=Path())
    feed = IndexedFeed(source, "d", Division(2**62, 2, 1), epochs=1, shuffle_seed=0)
    with pytest.raises(SourceError, match=r"order of 4,611,686,018,427,387,904 elements .* `shuffle: false`"):
        feed.shards(0, 1, local=True)


@pytest.mark.asyncio
async def test_leases_of_values_are_cut_by_bytes() -> None:
    """A worker elsewhere can't read the source: once some shards were sent, offers tell their size."""
    feed = indexed(1000, 100, 2)
    assert [o.bytes for o in await feed.pull(1)] == [0]
    shards = feed.shards(0, 2, local=False)
    assert shards.values is not None
    assert [len(v) for v in shards.values] == [50, 50]
    assert [o.bytes for o in await feed.pull(2)] == [1600]


def sequential(rows: Any, **kw: Any) -> SequentialFeed:
    source = open_source("function", {"call": rows}, folder=Path())
    return SequentialFeed(source, **{"batch": 4, "replicas": 2, "drop_remainder": False, "epochs": 1, **kw})


@pytest.mark.asyncio
@pytest.mark.parametrize("drop", [False, True])
async def test_a_sequential_feed_over_epochs(drop: bool) -> None:
    feed = sequential(lambda: iter(np.arange(10)), epochs=3, drop_remainder=drop)
    offers = await pulled(feed, 2)
    per_epoch = 2 if drop else 3
    assert feed.steps_total == 3 * per_epoch
    assert len(offers) == 3 * per_epoch
    ids = [list(x) for step in range(3 * per_epoch) for x in feed.ids(step)]
    flat = [i for part in ids for i in part]
    assert flat == [e * 10 + i for e in range(3) for i in range(8 if drop else 10)]
    assert [feed.epoch(s) for s in range(3 * per_epoch)] == [e for e in range(3) for _ in range(per_epoch)]
    feed.release(4)
    assert min(feed._blocks) == 4


@pytest.mark.asyncio
@pytest.mark.parametrize("later", [9, 11, 0])
async def test_epochs_of_another_length_are_refused(later: int) -> None:
    lengths = iter([10, later])
    feed = sequential(lambda: iter(np.arange(next(lengths))), epochs=2)
    with pytest.raises(SourceError, match="epoch 1 has"):
        await pulled(feed, 100)


@pytest.mark.asyncio
async def test_what_was_read_before_an_error_comes_first() -> None:
    def rows() -> Iterator[int]:
        yield from range(9)
        raise OSError("the tape broke")

    feed = sequential(rows)
    got = await feed.pull(100)
    assert [o.elements for o in got] == [4, 4]
    for _ in range(2):
        with pytest.raises(SourceError, match="element 9: OSError: the tape broke"):
            await feed.pull(100)


@pytest.mark.asyncio
async def test_runs_over_datasets_that_fail_or_are_empty() -> None:
    def broken() -> Iterator[int]:
        yield from range(9)
        raise OSError("the tape broke")

    def spec(rows: Any, **dataset: Any) -> dict[str, Any]:
        return {
            "pipedist": 1,
            "replicas": 2,
            "dataset": {"function": {"call": rows}, "batch": 4, **dataset},
            "stages": {
                "y": {"run": f"{F}:double"},
                "t": {"reduce": "sum", "of": "y", "axis": 0},
                "e": {"reduce": "sum", "of": "y", "axis": 0, "per": "epoch"},
                "s": {"gather": 0, "of": "y", "per": "step"},
            },
        }

    async with asyncio.timeout(100), pipedist.LocalCluster(workers=2) as cluster:
        async with pipedist.open(spec(broken), cluster=cluster) as run:
            seen = []
            with pytest.raises(SourceError, match="the tape broke"):  # noqa: PT012
                async for step in run.steps("y"):
                    seen.append(step.index)
            assert seen == list(range(len(seen)))
            ledger = run.ledger()
            assert ledger.elements == ledger.committed + ledger.lost
        async with pipedist.open(spec(lambda: iter(()), epochs=2), cluster=cluster) as run:
            result = await run.results()
            assert result["t"] is None
            assert result["e"] == [None, None]
            assert result["s"] == []
            assert result.ledger == pipedist.Ledger()
        async with pipedist.open(
            spec(lambda: iter(range(10)), epochs=3, drop_remainder=True), cluster=cluster
        ) as run:
            result = await run.results()
            assert [int(v) for v in result["e"]] == [56, 56, 56]
            assert [v.tolist() for v in result["s"]] == [[0, 2, 4, 6], [8, 10, 12, 14]] * 3
            assert result.ledger == pipedist.Ledger(24, 24)
        nothing = {
            **spec(broken),
            "dataset": {"range": 3, "batch": 4, "epochs": 2, "drop_remainder": True},
        }
        async with pipedist.open(nothing, cluster=cluster) as run:
            assert [step async for step in run.steps("y")] == []
            assert (await run.results())["e"] == [None, None]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("local", [True, False])
def test_some_elements_of_a_call_are_what_the_whole_has_at_these_places(
    seed: int | None, local: bool
) -> None:
    feed = indexed(100, 20, 2, epochs=2, seed=seed)
    call = 11  # of the second epoch
    whole = feed.shards(call, call + 1, local=False)
    assert whole.values is not None
    assert feed.separable(call) == 10
    some = feed.shards(call, call + 1, elements=[(0, 2), (7, 8)], local=local)
    assert some.ids is not None
    assert np.asarray(some.ids[0]).tolist() == [np.asarray(feed._ids(call))[i] for i in (0, 1, 7)]
    if local:
        assert some.values is None, "the worker reads them itself"
    else:
        assert some.values is not None
        assert some.values[0].tolist() == [whole.values[0][i] for i in (0, 1, 7)]


def test_some_elements_of_a_text_are_located(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(10)))
    source = open_source("text", {"path": [str(tmp_path / "a.txt")]}, folder=tmp_path)
    feed = IndexedFeed(source, "d", Division(10, 10, 2, False), epochs=1, shuffle_seed=None)
    some = feed.shards(1, 2, elements=[(1, 3)], local=True)
    assert some.locations is not None
    assert source.read(some.locations[0]) == ["line 6", "line 7"]


@pytest.mark.asyncio
async def test_some_elements_of_a_sequential_feed() -> None:
    source = open_source("function", {"call": sequence, "with": {}}, folder=Path())
    feed = SequentialFeed(source, batch=8, replicas=2, drop_remainder=False, epochs=1)
    await feed.pull(2)
    assert feed.separable(3) == 4
    some = feed.shards(3, 4, elements=[(0, 1), (2, 4)], local=False)
    assert some.ids is not None
    assert some.values is not None
    assert some.ids[0].tolist() == [12, 14, 15]
    assert some.values[0]["x"].tolist() == [12, 14, 15]


def sequence() -> Iterator[dict[str, Any]]:
    return ({"x": np.int64(i)} for i in range(20))


# -- reads that block ------------------------------------------------------------------------


class ServedLoop:
    """Called by a read that blocks until the event loop has served something else."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.reads = 0

    def __call__(self) -> None:
        self.reads += 1
        served = threading.Event()
        self.loop.call_soon_threadsafe(served.set)
        assert served.wait(2), "the event loop is blocked by a read"


class BlockingSource(ReaderSource):
    """Integers that workers can't read, and whose reads block."""

    portable = False
    why_not_portable = "it is a test"

    def __init__(self, before_read: Callable[[], None], length: int = 10) -> None:
        config = {"start": 0, "stop": length, "step": 1}
        super().__init__(length, {}, RangeReader(config))
        self.before_read = before_read

    def read(self, location: Any) -> Any:
        self.before_read()
        return super().read(location)


def program() -> Program:
    stage = StageProgram("s", reference("json:dumps"), -1, {})
    return Program(seed=0, replicas=1, reader=None, stages=(stage,), emits=(Emit("v", 0),))


@asynccontextmanager
async def executed(wire: Wire, feed: Any, record: PassRecord | None = None) -> AsyncIterator[PassHandle]:
    """Open a pass with a feed at a coordinator, and run the feed."""
    settings = PassSettings(1)
    handle = wire.coordinator.open_pass(program(), name="p", settings=settings, feed=feed, record=record)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(handle.run_feed)
        yield handle
        tasks.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until a condition holds; at most 10 s."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - set by threads and by the coordinator
            await anyio.sleep(0.001)


def blocking_feed(before_read: Callable[[], None]) -> IndexedFeed:
    source = BlockingSource(before_read)
    return IndexedFeed(source, "d", Division(10, 1, 1, False), epochs=1, shuffle_seed=None)


@pytest.mark.asyncio
async def test_the_event_loop_is_served_while_shards_are_read_for_a_worker() -> None:
    blocked = ServedLoop()
    async with wired() as wire:
        wire.join("a")
        async with executed(wire, blocking_feed(blocked)):
            await until(lambda: len(wire.sent_to("a.0", msg.Assign)) == 1)
            assert wire.payload("a.0", msg.Assign)[2][0].tolist() == [0]
        assert blocked.reads >= 1


@pytest.mark.asyncio
async def test_a_read_in_the_driver_is_recorded() -> None:
    recorder = Recorder()
    async with wired() as wire:
        wire.join("a")
        async with executed(wire, blocking_feed(lambda: None), recorder.begin_pass("p", ["s"], 1, 0)):
            await until(lambda: len(wire.sent_to("a.0", msg.Assign)) == 1)
    span = recorder.driver[0]
    assert (span.work, span.text) == (DriverWork.READ, "p")
    assert span.began <= span.ended


@pytest.mark.asyncio
async def test_a_lease_is_not_sent_before_an_earlier_one_and_not_after_its_cancellation() -> None:
    reading, release = threading.Event(), threading.Event()

    def wait() -> None:
        reading.set()
        assert release.wait(10)

    async with wired() as wire:
        wire.join("a")
        async with executed(wire, blocking_feed(wait)) as handle:
            await until(reading.is_set)
            settings = PassSettings(1, ordered=False, pulled=False)
            value = wire.coordinator.open_pass(program(), name="q", settings=settings)
            value.begin_step([1], lambda *_: None)
            handle.close()
            await until(lambda: len(wire.sent_to("a.0", msg.Cancel)) > 0)
            assert wire.sent_to("a.0", msg.Assign) == []
            wire.say("a.0", msg.Cancelled(wire.last("a.0", msg.Cancel).lease))
            await until(lambda: len(wire.sent_to("a.0", msg.Assign)) > 0)
            release.set()
        assert [m.pass_id for m in wire.sent_to("a.0", msg.Assign)] == [value.id]


@pytest.mark.asyncio
async def test_a_read_that_fails_in_a_thread_ends_its_pass() -> None:
    def fail() -> None:
        raise SourceError("the disk is gone")

    async with wired() as wire:
        wire.join("a")
        async with executed(wire, blocking_feed(fail)) as handle:
            with pytest.raises(SourceError, match="the disk is gone"):
                async for _ in handle.batches():
                    pass
        assert wire.sent_to("a.0", msg.Assign) == []


@pytest.mark.asyncio
async def test_inputs_of_quarantined_elements_are_read_in_a_thread() -> None:
    blocked = ServedLoop()
    feed = blocking_feed(blocked)
    await feed.pull(3)
    quarantine = PassQuarantine("s", feed, 1)
    quarantine.add(CallsQuarantined(0, 1, 2, ((0, Cause("s", "ValueError: no")),)))
    await quarantine.read_inputs(3)
    assert blocked.reads == 1
    assert [each.input for each in quarantine] == ["1"]


@pytest.mark.asyncio
async def test_spools_are_read_and_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = ServedLoop()

    def blocking(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            blocked()
            return method(*args, **kwargs)

        return call

    monkeypatch.setattr(Spool, "append", blocking(Spool.append))
    monkeypatch.setattr(Spool, "read", blocking(Spool.read))
    doc = {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 8, "batch": 4},
        "stages": {
            "y": {"run": f"{F}:double"},
            "t": {"reduce": "sum", "of": "y", "axis": 0},
            "z": {"run": f"{F}:plus", "of": "y", "with": {"amount": "${stages.t}"}},
            "u": {"reduce": "sum", "of": "z", "axis": 0},
        },
    }
    async with pipedist.open(doc, workers=1) as run:
        result = await run.results()
    assert result["t"] == 56
    assert blocked.reads >= 4


@pytest.mark.asyncio
async def test_the_log_of_a_spool_is_read_in_a_thread_when_a_run_resumes(tmp_path: Path) -> None:
    blocked = ServedLoop()
    before = Spool("y", RecordLog(os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT), EMPTY, RuntimeError))
    for step in range(3):
        before.append([np.arange(2)], [range(2)], elements=2, epoch=step)
    end = before._log.end()

    def places() -> Iterator[LogEntry]:
        for entry, _ in read_log(tmp_path / "log", end):
            blocked()
            yield entry

    after = Spool("y", before._log)
    await after.restore(places())
    assert blocked.reads == len(after) == 3
    assert list(after.epochs) == [0, 1, 2]
    before.close_log()


# -- reads that are cancelled ----------------------------------------------------------------


class HeldRows:
    """Elements 0 to 7, whose first is returned when `release` is set."""

    def __init__(self) -> None:
        self.reading, self.release, self.closed = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> Iterator[int]:
        try:
            for i in range(8):
                self.reading.set()
                assert self.release.wait(10)
                yield i
        finally:
            self.closed.set()


async def abandoned(feed: SequentialFeed, rows: HeldRows) -> None:
    """Cancel a `pull` while the user's iterator blocks."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.pull, 1)
        await until(rows.reading.is_set)
        tasks.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_a_pull_after_a_cancelled_one_gets_every_element() -> None:
    rows = HeldRows()
    feed = sequential(rows, batch=2, replicas=1)
    await abandoned(feed, rows)
    asyncio.get_running_loop().call_later(0, rows.release.set)
    offers = await pulled(feed, 1)
    assert [offer.elements for offer in offers] == [2, 2, 2, 2]
    assert [i for step in range(4) for ids in feed.ids(step) for i in ids] == list(range(8))
    values = feed.shards(0, 4, local=True).values
    assert values is not None
    assert np.concatenate(values).tolist() == list(range(8))


@pytest.mark.asyncio
async def test_a_close_during_a_cancelled_pull_leaves_the_iterator_to_its_thread() -> None:
    rows = HeldRows()
    feed = sequential(rows, batch=2, replicas=1)
    await abandoned(feed, rows)
    with anyio.fail_after(5):
        await feed.aclose()  # waits for nothing
    assert not rows.closed.is_set()
    rows.release.set()
    assert await anyio.to_thread.run_sync(rows.closed.wait, 10)


@pytest.mark.asyncio
async def test_a_close_waits_for_a_cancelled_read_of_a_source() -> None:
    reading, release = threading.Event(), threading.Event()

    def wait() -> None:
        reading.set()
        assert release.wait(10)

    feed = blocking_feed(wait)
    request = feed.request(0, 1, local=False)
    assert callable(request)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: anyio.to_thread.run_sync(request, abandon_on_cancel=True))
        await until(reading.is_set)
        tasks.cancel_scope.cancel()
    asyncio.get_running_loop().call_later(0, release.set)
    await feed.aclose()
    assert not feed._reading.locked()
