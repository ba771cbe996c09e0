from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedist.reduction import batched
from pipedist.reduction.batched import push_steps
from pipedist.reduction.tree import FoldTree, Partial, Reduction
from tests.values.numbers import bits

OPS = ("sum", "mean", "min", "max", "prod")
COMPONENTS: dict[str, st.SearchStrategy[Any]] = {
    "float": st.floats(),
    "float64": st.floats().map(np.float64),
    "float32": st.floats(width=32).map(np.float32),
    "float16": st.floats(width=16).map(np.float16),
    "int": st.integers(-(2**70), 2**70),
    "uint8": st.integers(0, 255).map(np.uint8),
    "arrays": st.lists(st.floats(width=32), min_size=3, max_size=3).map(lambda x: np.array(x, np.float32)),
    "half arrays": st.lists(st.floats(width=16), min_size=2, max_size=2).map(
        lambda x: np.array(x, np.float16)
    ),
    "no columns": st.just(np.zeros((0,), np.float32)),
    "integer arrays": st.lists(st.integers(-9, 9), min_size=2, max_size=2).map(np.array),
    "trees": st.floats().map(lambda x: {"a": x, "b": [x]}),
}


def slowly(reduction: Reduction, steps: Iterable[list[Partial]]) -> Partial | None:
    """The fold, step by step and call by call."""
    over_steps: FoldTree[Partial] = FoldTree(reduction.combine)
    for index, parts in enumerate(steps):
        over_replicas: FoldTree[Partial] = FoldTree(reduction.combine)
        for replica, part in enumerate(parts):
            over_replicas.push(replica, part)
        if parts:
            over_steps.push(index, over_replicas.result())
    return over_steps.result()


def finished(reduction: Reduction, partial: Partial | None) -> Any:
    try:
        value = reduction.finish(partial)
    except OverflowError as error:
        return str(error)
    leaves = value.values() if isinstance(value, dict) else [value]
    return [bits(leaf) for leaf in leaves]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", COMPONENTS)
@settings(max_examples=15)
@given(st.data())
def test_runs_have_the_bits_of_the_fold_one_by_one(op: str, kind: str, data: Any) -> None:
    reduction = Reduction.of(op, None)
    replicas = data.draw(st.integers(1, 5))
    some = data.draw(st.lists(COMPONENTS[kind], min_size=1, max_size=7))
    count = data.draw(st.integers(0, 150))
    ragged = data.draw(st.booleans())
    partials = [reduction.partial(component) for component in some]
    random = np.random.default_rng(count)
    calls = [random.integers(replicas + 1) if ragged else replicas for _ in range(count)]
    steps = [[partials[i] for i in random.integers(len(some), size=n)] for n in calls]
    tree: FoldTree[Partial] = FoldTree(reduction.combine)
    at = 0
    while at < count:
        size = data.draw(st.integers(1, 100))
        push_steps(reduction, tree, at, steps[at : at + size])
        at += size
    assert finished(reduction, tree.result()) == finished(reduction, slowly(reduction, steps))


def test_runs_of_numbers_combine_a_logarithm_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    reduction = Reduction.of("sum", None)
    combined = 0

    def combine(a: Partial, b: Partial) -> Partial:
        nonlocal combined
        combined += 1
        return reduction.combine(a, b)

    for component in (1.5, 3, np.float32(2), np.ones(4, np.float32)):
        combined = 0
        tree: FoldTree[Partial] = FoldTree(combine)
        push_steps(reduction, tree, 0, [[reduction.partial(component)]] * 1000)
        assert combined < 20
        assert np.all(reduction.finish(tree.result()) == 1000 * component)


def test_errors_of_a_run_are_those_of_the_fold() -> None:
    reduction = Reduction.of("sum", None)
    for other in (np.float32(1), {"a": 1.0}, np.ones(2)):
        tree: FoldTree[Partial] = FoldTree(reduction.combine)
        steps = [[reduction.partial(1.0)]] * 50 + [[reduction.partial(other)]]
        push_steps(reduction, tree, 0, steps)
        with pytest.raises((TypeError, ValueError), match="can't be reduced together"):
            tree.result()


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_a_range_is_cut_into_nodes_of_the_tree(lo: int, count: int) -> None:
    runs = batched._aligned(lo, lo + count)
    at = lo
    for start, size in runs:
        assert start == at
        assert size & (size - 1) == 0
        assert start % size == 0
        at += size
    assert at == lo + count
    assert len(runs) <= 2 * (lo + count).bit_length()
