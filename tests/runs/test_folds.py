"""Folds and spools by themselves: the fixed tree, epochs, bounded work, bounded memory."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedist.coordinator import GroupedByStep
from pipedist.core import trees
from pipedist.errors import OutputError
from pipedist.outputs import open_sink
from pipedist.protocol.codec import decode, encode
from pipedist.protocol.program import ReaderConfig
from pipedist.reduction.tree import FoldTree, Reduction
from pipedist.runs import gather_fold, reduce_fold
from pipedist.runs.combine_fold import CombineFold
from pipedist.runs.folds import THREAD_OBJECTS, Per
from pipedist.runs.gather_fold import GatherFold
from pipedist.runs.kept_values import Spool
from pipedist.runs.pass_feeds import SpoolFeed
from pipedist.runs.reduce_fold import ReduceFold
from pipedist.values import PerReplica, gather, reduce


def tree(groups: Sequence[Sequence[Any]]) -> Any:
    """What a worker does with a fold call: the fixed tree over groups of the fixed tree in each."""
    outer: FoldTree[str] = FoldTree(lambda a, b: f"({a} {b})")
    for index, group in enumerate(groups):
        inner: FoldTree[str] = FoldTree(lambda a, b: f"({a} {b})")
        for replica, part in enumerate(group):
            inner.push(replica, part)
        node = inner.result()
        if node is not None:
            outer.push(index, node)
    return outer.result()


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["reduce", "gather"])
async def test_the_event_loop_runs_while_large_components_are_folded(verb: str) -> None:
    component = [np.zeros(1)] * (THREAD_OBJECTS + 1)
    reduction = Reduction.of("sum", None)
    fold = ReduceFold("a", "run", reduction, None) if verb == "reduce" else GatherFold("a", "run", 0, None)
    part = reduction.partial(component) if verb == "reduce" else component
    for act in (lambda: fold.add(0, [[part]]), lambda: fold.finish(1)):
        async with anyio.create_task_group() as tasks:
            other = anyio.Event()

            async def set_other(event: anyio.Event = other) -> None:
                event.set()

            tasks.start_soon(set_other)
            await act()
            assert other.is_set()
    assert len(fold.result) == len(component)


class Worker:
    """Folds groups after a while that is another one each time; counts what runs at one time."""

    def __init__(self, fails_at: int = -1) -> None:
        self.running = self.most = self.calls = 0
        self.fails_at = fails_at

    async def call(self, groups: list[list[Any]]) -> Any:
        self.calls += 1
        number = self.calls
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(number * 7 % 5):
            await anyio.lowlevel.checkpoint()
        self.running -= 1
        if number == self.fails_at:
            raise RuntimeError(f"call {number}")
        return tree(groups)


async def combined(steps: list[list[Any]], per: Any = "run", worker: Worker | None = None) -> Any:
    fold = CombineFold("c", per, (worker or Worker()).call, None, calls_max=3)
    async with anyio.create_task_group() as tasks:
        fold.attach(tasks)
        for at in range(0, len(steps), 7):
            await fold.add(0, steps[at : at + 7])
        await fold.finish(1)
    return fold.result


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), max_size=600))
def test_a_combine_is_the_fixed_tree_whatever_returns_first(parts: list[int]) -> None:
    steps = [[f"{step}.{r}" for r in range(n)] for step, n in enumerate(parts)]
    assert anyio.run(combined, steps) == tree(steps)


@pytest.mark.asyncio
async def test_combine_over_three_levels_with_bounded_work() -> None:
    steps = [[str(step)] for step in range(16**2 * 3 + 21)]
    worker = Worker()
    assert await combined(steps, worker=worker) == tree(steps)
    assert worker.most <= 3
    assert await combined(steps[:40], "step") == [s[0] for s in steps[:40]]
    assert await combined(steps[:40], "epoch") == [tree(steps[:40])]
    assert await combined([]) is None


@pytest.mark.asyncio
async def test_a_combine_that_fails_ends_the_fold() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await combined([[str(step)] for step in range(1000)], worker=Worker(fails_at=5))
    assert caught.group_contains(RuntimeError, match="call 5")


@pytest.mark.asyncio
@pytest.mark.parametrize("tiny", [4, 1024])
async def test_a_gather_of_tiny_parts_is_that_of_all(tiny: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_fold, "TINY_PARTS", tiny)
    for value in (lambda i: np.arange(i % 3), lambda i: {"a": np.array([i]), "b": np.array(["x" * (i % 4)])}):
        fold = GatherFold("g", "run", 0, None)
        for i in range(0, 50, 2):
            await fold.add(0, [[value(i), value(i + 1)]])
        await fold.finish(1)
        made = [value(i) for i in range(50)]
        if isinstance(made[0], dict):
            assert fold.result["a"].tolist() == list(range(50))
            assert fold.result["b"].tolist() == ["x" * (i % 4) for i in range(50)]
        else:
            assert fold.result.tolist() == np.concatenate(made).tolist()
            assert fold.result.dtype == np.int64


@pytest.mark.asyncio
@pytest.mark.parametrize(("later", "kind"), [(100, "U"), (0, "O")])
async def test_whether_gathered_texts_are_objects_depends_on_all_of_them(
    later: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 201 parts would be objects alone, which a concatenation of them before the end must not decide."""
    texts = [*["x"] * 200, *["y" * 2000] * (1 + later)]
    for tiny in (100, 201, 10_000):
        monkeypatch.setattr(gather_fold, "TINY_PARTS", tiny)
        fold = GatherFold("g", "run", 0, None)
        for text in texts:
            await fold.add(0, [[np.array([text])]])
        await fold.finish(1)
        assert (fold.result.dtype.kind, fold.result.tolist()) == (kind, texts), tiny


@pytest.mark.asyncio
async def test_a_gather_does_not_keep_a_million_small_objects() -> None:
    fold = GatherFold("g", "run", 0, None)
    for _ in range(20):
        await fold.add(0, [[np.zeros(1)] for _ in range(1000)])
    assert len(fold._parts) < 1100
    await fold.finish(1)
    assert fold.result.shape == (20_000,)


@pytest.mark.asyncio
async def test_a_gather_never_promotes_and_names_the_component_that_does_not_fit() -> None:
    for odd, error in ((np.zeros(1, np.float32), TypeError), (np.zeros((1, 2)), ValueError)):
        fold = GatherFold("g", "run", 0, None)
        with pytest.raises(error, match=r"^step 1, replica 0: .*: step 0, replica 0 has .*, this one "):
            await fold.add(0, [[np.zeros(1)], [odd]])
    fold = GatherFold("g", "run", 0, None)
    with pytest.raises(ValueError, match="scalar"):
        await fold.add(0, [[np.float64(1.0)]])


@pytest.mark.asyncio
async def test_a_reduce_has_the_same_value_in_any_batches() -> None:
    reduction = Reduction.of("sum", 0)
    values = np.random.default_rng(1).standard_normal((500, 3, 2)).astype(np.float32)
    steps = [[reduction.partial(row) for row in step[: 1 + i % 3]] for i, step in enumerate(values)]
    found = []
    for size in (1, 7, 500):
        fold = ReduceFold("r", "run", reduction, None)
        for at in range(0, 500, size):
            await fold.add(0, steps[at : at + size])
        await fold.finish(1)
        found.append(fold.result.tobytes())
    assert len(set(found)) == 1


@pytest.mark.asyncio
async def test_every_epoch_has_its_value_also_an_empty_one() -> None:
    reduction = Reduction.of("sum", 0)
    part = reduction.partial(np.array([1, 2]))
    fold = ReduceFold("r", "epoch", reduction, None)
    await fold.add(1, [[part], [part]])
    await fold.finish(4)
    assert fold.result == [None, 6, None, None]
    fold = ReduceFold("r", "step", reduction, None)
    await fold.add(0, [[part], []])
    await fold.finish(1)
    assert fold.result == [3, None]


@pytest.mark.asyncio
async def test_values_that_are_in_a_file_are_not_kept(tmp_path: Path) -> None:
    fold = GatherFold("g", "run", 0, open_sink(tmp_path / "g.npy", shape="run", gather=True), keep=False)
    for i in range(10):
        await fold.add(0, [[np.array([i])]])
    await fold.finish(1)
    assert fold._parts == []
    assert fold._sink is not None
    fold._sink.finish()
    assert np.load(tmp_path / "g.npy").tolist() == list(range(10))


def _rows(i: int) -> Any:
    return {"id": np.arange(i, i + i % 3), "score": np.full(i % 3, i / 7)}


def _words(i: int) -> Any:
    return np.array(["x" * (i % 5)])


def _mixed(i: int) -> Any:
    return np.full(1 if i % 7 else 300, i, np.int64)


def _wide(i: int) -> Any:
    return np.full((2, i % 2 + 1), i)


TABLES = ["g.npz", "g.csv", "g.jsonl", "g.json", "g.parquet"]
IN_FILES = [
    *[(name, value, 0) for name in TABLES for value in (_rows, _words, _mixed)],
    *[("g.npy", value, 0) for value in (_words, _mixed)],
    *[(name, _wide, 1) for name in ("g.npy", "g.npz", "g.jsonl", "g.json")],
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "value", "axis"), IN_FILES)
async def test_a_file_has_the_same_bytes_however_its_parts_come(
    name: str, value: Callable[[int], Any], axis: int, tmp_path: Path
) -> None:
    found = set()
    for size in (1, 3, 64):
        sink = open_sink(tmp_path / name, shape="run", gather=True, axis=axis)
        fold = GatherFold("g", "run", axis, sink, keep=False)
        for at in range(0, 64, size):
            await fold.add(0, [[value(i)] for i in range(at, min(at + size, 64))])
        await fold.finish(1)
        found.add(sink.finish().read_bytes())
    assert len(found) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "value", "axis"), IN_FILES)
async def test_a_component_that_is_none_is_nothing_in_a_file_too(
    name: str, value: Callable[[int], Any], axis: int, tmp_path: Path
) -> None:
    found = []
    for nothing in ([None], []):
        sink = open_sink(tmp_path / name, shape="run", gather=True, axis=axis)
        fold = GatherFold("g", "run", axis, sink, keep=False)
        for i in range(6):
            await fold.add(0, [nothing, [value(i)]])
        await fold.finish(1)
        found.append(sink.finish().read_bytes())
    assert found[0] == found[1]


@pytest.mark.asyncio
@pytest.mark.parametrize("per", ["run", "epoch"])
@pytest.mark.parametrize("streams", [False, True])
async def test_the_error_of_a_misfit_does_not_depend_on_batching(
    per: Per, streams: bool, tmp_path: Path
) -> None:
    parts: list[Any] = [np.zeros((2, 3)), np.zeros((0, 3)), np.zeros((1, 3)), np.zeros((2, 4))]
    errors = set()
    for size in (1, 2, 4):
        sink = open_sink(tmp_path / "g.npz", shape="run", gather=True) if streams and per == "run" else None
        fold = GatherFold("g", per, 0, sink)
        *before, last = [[[part] for part in parts[at : at + size]] for at in range(0, 4, size)]
        for steps in before:
            await fold.add(0, steps)
        with pytest.raises(ValueError, match=r"step 3, replica 0: .*\(2, 3\), this one \(2, 4\)") as failed:
            await fold.add(0, last)
        errors.add(str(failed.value))
        if sink is not None:
            sink.abort()
    assert len(errors) == 1


def _stack(lo: int, hi: int, width: int = 2, dtype: str = "int64") -> GroupedByStep:
    values = np.arange(lo * width, hi * width, dtype=dtype).reshape(hi - lo, 1, width)
    return GroupedByStep(values, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["", "g.npz", "g.jsonl"])
@pytest.mark.parametrize("per", ["run", "epoch", "step"])
async def test_stacked_parts_are_gathered_as_others(name: str, per: Per, tmp_path: Path) -> None:
    found = []
    for stacked in (False, True):
        shape = "run" if per == "run" else "per"
        sink = open_sink(tmp_path / f"{stacked}-{name}", shape=shape, gather=True) if name else None
        fold = GatherFold("g", per, 0, sink)
        for lo, hi in ((0, 300), (300, 301), (301, 1500), (1500, 3000)):
            steps = _stack(lo, hi)
            await fold.add(0, steps if stacked else list(steps))
        await fold.finish(1)
        values = [fold.result] if per == "run" else fold.result
        assert np.array_equal(np.concatenate(values), np.arange(6000).reshape(3000, 2))
        found.append([len(values), sink.finish().read_bytes() if sink is not None else b""])
    assert found[0] == found[1]


@pytest.mark.asyncio
@pytest.mark.parametrize("misfit", [{"width": 3}, {"dtype": "float64"}], ids=str)
async def test_the_error_of_a_stacked_misfit_is_that_of_others(misfit: dict[str, Any]) -> None:
    errors = set()
    for stacked in (False, True):
        fold = GatherFold("g", "run", 0, None)
        await fold.add(0, _stack(0, 20))
        steps = _stack(20, 40, **misfit)
        with pytest.raises((TypeError, ValueError), match="step 20, replica 0") as failed:
            await fold.add(0, steps if stacked else list(steps))
        errors.add(str(failed.value))
    assert len(errors) == 1


@pytest.mark.asyncio
async def test_a_stack_of_arrays_without_rows_is_nothing() -> None:
    fold = GatherFold("g", "run", 0, None)
    await fold.add(0, GroupedByStep(np.zeros((20, 0)), 1))
    await fold.add(0, _stack(0, 20))
    await fold.finish(1)
    assert fold.result.shape == (20, 2)


@pytest.mark.asyncio
async def test_values_of_epochs_need_not_fit_together() -> None:
    fold = GatherFold("g", "epoch", 0, None)
    await fold.add(0, [[{"a": np.zeros((2, 3))}]])
    await fold.add(1, [[{"a": np.zeros((2, 4))}]])
    await fold.finish(2)
    assert [value["a"].shape for value in fold.result] == [(2, 3), (2, 4)]


@pytest.mark.asyncio
async def test_tiny_parts_that_come_together_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = open_sink(tmp_path / "g.npy", shape="run", gather=True)
    appended: list[int] = []
    append = sink.append
    monkeypatch.setattr(sink, "append", lambda value: (appended.append(len(value)), append(value)))
    fold = GatherFold("g", "run", 0, sink, keep=False)
    await fold.add(0, [[np.array([i]), np.array([i, i])] for i in range(1000)])
    await fold.add(0, [[np.arange(1000), np.array([1])], [np.array([1])]])
    assert appended == [3000, 1000, 2]
    with pytest.raises(TypeError, match=r"step 1003, replica 1: .*dtype"):
        await fold.add(0, [[np.array([1])], [np.array([1]), np.array([1.0])], [np.array([1.0])]])
    sink.abort()


# -- spools ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_spool_gives_back_steps_and_ids() -> None:
    spool = Spool("y")
    parts = [[{"a": np.arange(i + r), "s": "x"} for r in range(i % 3)] for i in range(50)]
    for i, step in enumerate(parts):
        spool.append(step, [range(i, i + 1)] * len(step), elements=len(step), epoch=i // 20)
    spool.finish()
    feed = SpoolFeed("y", spool, 3, 0, ReaderConfig(None, 4, -1, False))
    offers = [*await feed.pull(20), *await feed.pull(1000)]
    assert await feed.pull(1) == []
    assert [s for o in offers for s in range(o.first, o.last)] == list(range(50))
    for offer in offers:
        for step in range(offer.first, offer.last):
            assert offer.parts == len(parts[step])
            shards = feed.shards(step * 3, step * 3 + offer.parts, local=True)
            assert shards.ids == feed.ids(step) == [range(step, step + 1)] * offer.parts
            assert shards.values is not None
            for got, kept in zip(shards.values, parts[step], strict=True):
                assert np.array_equal(got["a"], kept["a"])
                assert got["s"] == "x"
            assert feed.epoch(step) == step // 20
    assert sum(o.elements for o in offers) == feed.elements(0, 50) == sum(map(len, parts))
    assert all(o.bytes > 0 for o in offers)
    spool.close()


def test_a_spool_that_can_not_be_written_names_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool("huge")
    with open("/dev/full", "wb", buffering=0) as full:
        os.dup2(full.fileno(), spool._log.fd)
    spool.append([np.zeros(1)], [range(1)], elements=1, epoch=0)  # small: it is written later
    with pytest.raises(OutputError, match=r"stage huge .*No space left"):
        spool.append([np.zeros(100_000)], [range(1)], elements=1, epoch=0)
    spool.close()


def test_a_spool_keeps_numbers_not_objects() -> None:
    spool = Spool("y")
    spool.append([1, 2], [range(1), range(1)], elements=2, epoch=0)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(2000):
        spool.append([1, 2], [range(1), range(1)], elements=2, epoch=0)
    gc.collect()
    assert len(gc.get_objects()) - before < 200
    spool.close()


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_large_components_are_folded_beside_the_event_loop(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that progress is shown, and Ctrl-C has an effect, while they are reduced."""
    threads: list[int] = []
    real = reduce_fold.push_steps

    def push_steps(*args: Any) -> None:
        threads.append(threading.get_ident())
        real(*args)

    async def main(size: int) -> Any:
        reduction = Reduction.of("sum", None)
        fold = ReduceFold("s", "run", reduction, None)
        parts = [reduction.partial(np.full(size, replica, dtype)) for replica in range(4)]
        await fold.add(0, [parts])
        await fold.finish(1)
        return fold.result

    monkeypatch.setattr(reduce_fold, "push_steps", push_steps)
    monkeypatch.setattr(reduce_fold, "THREAD_BYTES", 4 * 1000 * 8)
    assert anyio.run(main, 100).tolist() == [6] * 100
    assert threads == [threading.get_ident()]
    assert anyio.run(main, 2000).tolist() == [6] * 2000
    assert threads[1] != threading.get_ident()


BLANK = np.array([])  # the result of a function that finds no row in a shard


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "rows", [np.array([5, 6]), np.array([[5, 6]]), np.array(["a"]), np.array([1], np.float32)]
)
@pytest.mark.parametrize("first", [True, False])
async def test_a_result_without_rows_has_the_dtype_and_shape_of_the_others(
    rows: Any, first: bool, tmp_path: Path
) -> None:
    steps = [[BLANK], [rows], [BLANK]] if first else [[rows], [BLANK]]
    fold = GatherFold("g", "run", 0, None)
    sink = open_sink(tmp_path / "g.npy", shape="run", gather=True, axis=0)
    written = GatherFold("g", "run", 0, sink, keep=False)
    for step in steps:
        await fold.add(0, [step])
        await written.add(0, [step])
    for each in (fold, written):
        await each.finish(1)
    for found in (fold.result, np.load(sink.finish())):
        assert found.dtype == rows.dtype
        assert found.tolist() == rows.tolist()
    assert gather(PerReplica([BLANK, rows, BLANK]), 0, 3).dtype == rows.dtype


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl", "npz"])
@pytest.mark.parametrize("first", [True, False])
async def test_leaves_without_rows_take_the_dtype_of_rows_in_files(
    ending: str, first: bool, tmp_path: Path
) -> None:
    rows = {"id": np.array([7, 8]), "text": np.array(["a", "b"], object)}
    blank = {"id": BLANK, "text": np.array([], object)}
    sink = open_sink(tmp_path / f"g.{ending}", shape="run", gather=True, axis=0)
    written = GatherFold("g", "run", 0, sink, keep=False)
    for part in (blank, rows, blank) if first else (rows, blank):
        await written.add(0, [[part]])
    await written.finish(1)
    path = sink.finish()
    if ending == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        assert parquet.read_table(path).to_pydict() == {"id": [7, 8], "text": ["a", "b"]}
    elif ending == "npz":
        assert np.load(path)["id"].dtype == np.int64
    else:
        assert path.read_text().count("7") == 1
        assert "7.0" not in path.read_text()


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", ["npz", "json"])
async def test_a_leaf_without_rows_beside_rows_takes_the_dtype_of_others_in_files(
    ending: str, tmp_path: Path
) -> None:
    sink = open_sink(tmp_path / f"g.{ending}", shape="run", gather=True, axis=0)
    written = GatherFold("g", "run", 0, sink, keep=False)
    blank = {"hits": BLANK, "read": np.array([5]), "text": BLANK}
    found = {"hits": np.array([7, 8]), "read": np.array([6]), "text": np.array(["a\0"], object)}
    found["text"] = np.array(["a", "b"]) if ending == "npz" else found["text"]
    for part in (blank, found, blank):
        await written.add(0, [[part]])
    await written.finish(1)
    path = sink.finish()
    if ending == "npz":
        with np.load(path) as values:
            assert {name: values[name].tolist() for name in values} == {
                "hits": [7, 8],
                "read": [5, 6, 5],
                "text": ["a", "b"],
            }
            assert values["hits"].dtype == np.int64
    else:
        assert json.loads(path.read_text()) == {"hits": [7, 8], "read": [5, 6, 5], "text": ["a\0"]}


@pytest.mark.asyncio
async def test_results_that_all_have_no_rows_are_one_without_rows(tmp_path: Path) -> None:
    for blank in (BLANK, {"a": BLANK, "b": BLANK}):
        fold = GatherFold("g", "run", 0, None)
        await fold.add(0, [[blank], [blank]])
        await fold.finish(1)
        assert trees.structure(fold.result) == trees.structure(blank)
        assert all(leaf.shape == (0,) for leaf in trees.flatten(fold.result)[0])
    sink = open_sink(tmp_path / "g.npy", shape="run", gather=True, axis=0)
    written = GatherFold("g", "run", 0, sink, keep=False)
    await written.add(0, [[BLANK], [BLANK]])
    await written.finish(1)
    assert np.load(sink.finish()).shape == (0,)


@pytest.mark.asyncio
async def test_a_value_without_rows_is_the_first_one_of_its_step_or_run() -> None:
    narrow = {"id": BLANK, "text": np.array([], "<U1")}
    wide = {"id": BLANK, "text": np.array([], "<U9")}
    for batches in ([[[narrow], [wide]]], [[[narrow]], [[wide]]]):
        fold = GatherFold("g", "run", 0, None)
        for steps in batches:
            await fold.add(0, steps)
        await fold.finish(1)
        assert fold.result["text"].dtype == "<U1"
    fold = GatherFold("g", "step", 0, None)
    await fold.add(0, [[narrow], [None], [wide]])
    await fold.finish(1)
    assert [step and step["text"].dtype.str for step in fold.result] == ["<U1", None, "<U9"]


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("rows", [np.array([5, 6]), np.array([[5, 6], [7, 8]]), np.array([1.5], np.float32)])
def test_a_reduction_leaves_results_without_rows_out(op: str, rows: Any) -> None:
    expected = reduce(op, PerReplica([rows]), 0, 1)
    for parts in ([BLANK, rows], [rows, BLANK], [BLANK, BLANK, rows, BLANK]):
        found = reduce(op, PerReplica(parts), 0, len(parts))
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()
    with pytest.raises((TypeError, ValueError)):  # a component, not rows
        reduce(op, PerReplica([BLANK, rows]), None, 2)


def value_in(path: Path) -> list[Any]:
    """Return the values of the steps in a file, as text or numbers."""
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path)["value"].to_pylist()
    if path.suffix == ".npz":
        return np.load(path)["data"].tolist()
    if path.suffix == ".npy":
        return np.load(path).tolist()
    text = path.read_text()
    if path.suffix == ".json":
        return json.loads(text)
    return (
        text.split()[1:]
        if path.suffix == ".csv"
        else [json.loads(row)["value"] for row in text.split("\n")[:-1]]
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("ending", ["npy", "npz", "csv", "parquet", "jsonl", "json"])
async def test_steps_before_the_first_rows_have_the_dtype_of_these(
    ending: str, killed: bool, tmp_path: Path
) -> None:
    reduction = Reduction.of("sum", 0)
    steps = [[BLANK, BLANK], [BLANK], [np.array([2**60 + 1]), BLANK], [BLANK]]
    sink = open_sink(tmp_path / f"s.{ending}", shape="per", gather=False)
    fold = ReduceFold("s", "step", reduction, sink)
    for at, parts in enumerate(steps):
        if killed and at == 2:
            sink.abort()
            state, sink = fold.state(), open_sink(tmp_path / f"s.{ending}", shape="per", gather=False)
            fold = ReduceFold("s", "step", reduction, sink)
            await fold.restore(decode(encode(state)), ())
        await fold.add(0, [[reduction.partial(part) for part in parts]])
    await fold.finish(1)
    assert [(value.dtype, int(value)) for value in fold.result] == [
        (np.int64, each) for each in (0, 0, 2**60 + 1, 0)
    ]
    expected: list[Any] = [0, 0, 2**60 + 1, 0]
    assert value_in(sink.finish()) == (list(map(str, expected)) if ending == "csv" else expected)


@pytest.mark.asyncio
@pytest.mark.parametrize(("op", "expected"), [("sum", 0), ("prod", 1), ("mean", np.nan)])
async def test_a_leaf_without_rows_waits_beside_one_with_rows(op: str, expected: float) -> None:
    reduction = Reduction.of(op, 0)
    fold = ReduceFold("s", "step", reduction, None)
    fold.watch()
    hits = np.ones((2, 3), np.float32)
    for part in ({"hits": BLANK, "n": np.array([1])}, {"hits": hits, "n": np.array([1])}):
        await fold.add(0, [[reduction.partial(part)]])
    await fold.add(0, [[reduction.partial({"hits": BLANK, "n": np.array([1])})]])
    await fold.finish(1)
    for value in (
        fold.result[0],
        fold.result[2],
        fold.take_fresh()[2],
    ):  # an update can't wait, but knows later
        assert value["hits"].dtype == np.float32
        np.testing.assert_array_equal(value["hits"], np.full(3, expected))


@pytest.mark.asyncio
async def test_steps_that_never_have_rows_are_float64(tmp_path: Path) -> None:
    reduction = Reduction.of("sum", 0)
    sink = open_sink(tmp_path / "s.npy", shape="per", gather=False)
    fold = ReduceFold("s", "step", reduction, sink)
    await fold.add(
        0, [[reduction.partial(BLANK)]] * (3 * reduce_fold.WAITING_MAX)
    )  # equal ones take no memory
    await fold.finish(1)
    found = np.load(sink.finish())
    assert found.dtype == np.float64
    assert found.tolist() == [0] * (3 * reduce_fold.WAITING_MAX)


@pytest.mark.asyncio
async def test_values_that_wait_for_a_dtype_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_fold, "WAITING_MAX", 3)
    reduction = Reduction.of("sum", 0)
    fold = ReduceFold("s", "step", reduction, None)
    for number in range(4):
        await fold.add(0, [[reduction.partial({"hits": BLANK, "n": np.array([number])})]])
    with pytest.raises(ValueError, match=r"'hits' had no rows in more than 3 values.*int64.*np.empty"):
        await fold.add(0, [[reduction.partial({"hits": np.array([1]), "n": np.array([1])})]])


@pytest.mark.asyncio
@pytest.mark.parametrize("op", ["min", "max"])
async def test_a_first_call_without_rows_does_not_decide_whether_a_file_fits(op: str, tmp_path: Path) -> None:
    reduction = Reduction.of(op, 0)
    sink = open_sink(tmp_path / "s.npy", shape="run", gather=False)
    fold = ReduceFold("s", "run", reduction, sink)
    for part in (BLANK, np.array([4])):
        await fold.add(0, [[reduction.partial(part)]])
    await fold.finish(1)
    assert np.load(sink.finish()) == 4


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ([{1: 2}], "step 0, replica 0: element 0 of the list has the key 1, .*text"),
        ([{"a": 1}, None], "step 0, replica 0: element 1 of the list is a NoneType, and a record is a dict"),
    ],
)
async def test_lists_that_are_no_records_are_reported_with_element_and_cause(part: Any, message: str) -> None:
    fold = GatherFold("g", "run", 0, None)
    with pytest.raises((ValueError, TypeError), match=message):
        await fold.add(0, [[part]])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("part", "hint"),
    [
        (["a", "b"], "a list is a tree of values: to return one array, use np.array"),
        ({"n": np.arange(2), "path": ["a", "b"]}, "'path' is a list, a tree of values: .*np.array"),
        ({"n": np.array(2), "path": [np.arange(2)]}, "or reduce$"),  # the list is not the problem
    ],
)
async def test_a_list_of_values_is_reported_with_the_array_to_return_instead(part: Any, hint: str) -> None:
    fold = GatherFold("g", "run", 0, None)
    with pytest.raises(ValueError, match=hint):
        await fold.add(0, [[part]])


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", ["csv", "parquet", "npy", "npz"])
async def test_records_that_a_file_can_not_hold_are_reported_at_once(ending: str, tmp_path: Path) -> None:
    sink = open_sink(tmp_path / f"g.{ending}", shape="run", gather=True)
    fold = GatherFold("g", "run", 0, sink, keep=False)
    with pytest.raises(OutputError, match=r"Write \.jsonl.*\(step 0, replica 0\)"):
        await fold.add(0, [[[{}, {}] if ending in ("csv", "parquet") else [{"a": 1}]]])
    sink.abort()


@pytest.mark.asyncio
async def test_a_shape_that_differs_is_reported_with_its_step_when_it_is_combined_later() -> None:
    reduction = Reduction.of("sum", None)
    fold = ReduceFold("s", "run", reduction, None)
    for size in [2, 2, 2, 2, 3, 3, 3]:  # the steps 4 to 6 are combined with the others at the end
        await fold.add(0, [[reduction.partial(np.zeros(size))]])
    with pytest.raises(
        ValueError, match=r"^step 4, replica 0 does not fit step 0, replica 0: .*\(2,\) and \(3,\)"
    ):
        await fold.finish(1)
    assert fold.misfit_at == (4, 0)


@pytest.mark.asyncio
async def test_dtypes_that_differ_are_reported_with_both_places() -> None:
    reduction = Reduction.of("sum", 0)
    parts = [np.array([1]), BLANK, np.array([1.5])]
    fold: Any = ReduceFold("s", "run", reduction, None)
    for part in parts:
        await fold.add(0, [[reduction.partial(part)]])
    with pytest.raises(TypeError, match=r"^step 2, replica 0 does not fit step 0, replica 0: .*astype"):
        await fold.finish(1)
    fold = GatherFold("g", "run", 0, None)
    with pytest.raises(TypeError, match=r"step 2, replica 0: .*step 0, replica 0 has dtype int64.*astype"):
        await fold.add(0, [[part] for part in parts])


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", ["npy", "csv"])
async def test_a_step_that_does_not_fit_its_file_is_named(ending: str, tmp_path: Path) -> None:
    reduction = Reduction.of("sum", 0)
    sink = open_sink(tmp_path / f"s.{ending}", shape="per", gather=False)
    fold = ReduceFold("s", "step", reduction, sink)
    steps = [[reduction.partial(part)] for part in (BLANK, BLANK, np.array([1]), np.array([1.5]))]
    with pytest.raises(OutputError, match=r"first int64, now float64\. .*astype.* \(step 3\)"):
        await fold.add(0, steps)
    sink.abort()
