from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.reduction.tree import FoldTree
from tests.values.numbers import fold_by_definition


def pair(a: object, b: object) -> tuple[object, object]:
    return (a, b)


@given(st.sets(st.integers(0, 200)))
def test_the_shape_is_that_of_the_definition(indices: set[int]) -> None:
    fold: FoldTree[object] = FoldTree(pair)
    for index in sorted(indices):
        fold.push(index, index)
    assert fold.result() == fold_by_definition({index: index for index in indices}, pair)


@given(st.integers(1, 300))
def test_the_result_may_be_asked_for_at_any_time(n: int) -> None:
    fold: FoldTree[object] = FoldTree(pair)
    for index in range(n):
        fold.push(index, index)
        assert fold.result() == fold_by_definition(
            dict.fromkeys(range(index + 1)) | {i: i for i in range(index + 1)}, pair
        )


def test_it_holds_a_logarithm_of_its_leaves() -> None:
    fold: FoldTree[int] = FoldTree(lambda a, b: a + b)
    for index in range(5000):
        fold.push(index, 1)
        assert len(fold._pending) <= 14
    assert fold.result() == 5000


def test_leaves_come_in_increasing_order() -> None:
    fold: FoldTree[int] = FoldTree(lambda a, b: a + b)
    assert fold.result() is None
    fold.push(3, 1)
    for index in (3, 2, -1):
        with pytest.raises(ValueError, match="increasing"):
            fold.push(index, 1)
    with pytest.raises(ValueError, match="increasing"):
        FoldTree(pair).push(-1, 1)
