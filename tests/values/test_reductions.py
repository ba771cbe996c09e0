from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipedist import values
from pipedist.reduction import exact_integers
from pipedist.reduction.tree import FoldTree, ReduceOp, Reduction
from tests.values.numbers import (
    FLOATS,
    INTEGERS,
    bits,
    float_components,
    fold_by_definition,
    integer_components,
    rounded,
)

OPS = [op.value for op in ReduceOp]
BY_DTYPE = pytest.mark.parametrize("dtype", INTEGERS)


def reduced(op: str, axis: Any, components: list[Any]) -> Any:
    reduction = Reduction.of(op, axis)
    fold: FoldTree[Any] = FoldTree(reduction.combine)
    for index, component in enumerate(components):
        fold.push(index, reduction.partial(component))
    return reduction.finish(fold.result())


def exactly(op: str, column: list[int]) -> int | None:
    if op == "sum":
        return sum(column)
    if op == "prod":
        return math.prod(column)
    return (min if op == "min" else max)(column) if column else None


@BY_DTYPE
@settings(max_examples=40)
@given(st.data())
def test_integers_are_exact_and_checked_at_the_end(dtype: str, data: Any) -> None:
    components = data.draw(integer_components(dtype))
    op = data.draw(st.sampled_from(["sum", "prod", "min", "max"]))
    info = np.iinfo(dtype)
    columns = np.concatenate(components).astype(object)
    expected = [exactly(op, list(columns[:, i])) for i in (0, 1)]
    if expected == [None, None]:
        assert reduced(op, 0, components) is None
    elif all(info.min <= value <= info.max for value in expected):
        result = reduced(op, 0, components)
        assert result.dtype == dtype
        assert result.tolist() == expected
    else:
        with pytest.raises(OverflowError, match=dtype):
            reduced(op, 0, components)
    # The whole at once is a scalar, which is folded by Python's own integers.
    total = exactly(op, [int(value) for value in columns.ravel()])
    if total is not None and info.min <= total <= info.max:
        assert reduced(op, (0, 1), components) == total


@BY_DTYPE
@settings(max_examples=40)
@given(st.data())
def test_a_mean_of_integers_is_correctly_rounded(dtype: str, data: Any) -> None:
    components = data.draw(integer_components(dtype))
    result = reduced("mean", 0, components)
    assert result.dtype == (np.float32 if np.dtype(dtype).itemsize <= 2 else np.float64)
    rows = np.concatenate(components).astype(object)
    for i in (0, 1):
        if len(rows) == 0:
            assert np.isnan(result[i])
        else:
            assert result[i] == rounded(Fraction(sum(rows[:, i]), len(rows)), result.dtype)
    if len(rows):
        whole = reduced("mean", (0, 1), components)
        assert whole == rounded(Fraction(int(rows.sum()), rows.size), result.dtype)


@given(st.integers(-(2**40), 2**40), st.integers(1, 2**30))
def test_a_float32_mean_is_rounded_once(total: int, count: int) -> None:

    dtype = np.dtype(np.float32)
    expected = rounded(Fraction(total, count), dtype)
    assert exact_integers.divide(total, count, dtype) == expected
    assert exact_integers.mean(np.array([[total]]), count, dtype)[0] == expected


@given(st.integers(2**53, 2**62), st.integers(1, 1000), st.booleans())
def test_a_float64_mean_is_rounded_once(total: int, count: int, negative: bool) -> None:

    total = -total if negative else total
    assert exact_integers.mean(np.array([[total]]), count, np.dtype(np.float64))[0] == float(
        Fraction(total, count)
    )


def test_a_float32_mean_at_a_midpoint_is_rounded_once() -> None:

    count = 2**52 - 1
    total = count + 2**28  # total / count is 1 + 2**-24, halfway between two float32, and a bit more
    assert total / count == 1 + 2**-24
    dtype = np.dtype(np.float32)
    above = np.nextafter(np.float32(1), np.float32(2))
    assert exact_integers.divide(total, count, dtype) == above
    assert exact_integers.divide(-total, count, dtype) == -above
    assert exact_integers.mean(np.array([[total, -total, count]]), count, dtype).tolist() == [
        above,
        -above,
        1,
    ]
    assert exact_integers.divide(2**24 + 1, 2**24, dtype) == 1  # a true tie goes to even


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), st.integers(0, 2))
def test_sums_of_any_size_stay_exact(values: list[int], unsigned: int) -> None:

    arrays = [np.array([v + 2**63 if unsigned else v], np.uint64 if unsigned else np.int64) for v in values]
    limbs, bound = exact_integers.sum_rows(arrays[0], ())
    for x in arrays[1:]:
        limbs, bound = exact_integers.add(limbs, bound, *exact_integers.sum_rows(x, ()))
    for _ in range(120):  # far beyond two limbs
        limbs, bound = exact_integers.add(limbs, bound, limbs, bound)
    total = sum(int(x[0]) for x in arrays) << 120
    assert exact_integers.to_integers(limbs)[0] == total
    assert abs(total) <= bound


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=60)
@given(st.data())
def test_any_order_of_arrival_gives_the_same_bits(dtype: str, data: Any) -> None:
    components = data.draw(float_components(dtype))
    op = data.draw(st.sampled_from(OPS))
    axis = data.draw(st.sampled_from([0, (0, 1), -1]))
    if axis == -1:
        assume(len({part.shape for part in components}) == 1)
    reduction = Reduction.of(op, axis)
    arrived = data.draw(st.permutations(range(len(components))))
    partials: dict[int, Any] = {}
    for index in arrived:
        partials[index] = reduction.partial(components[index])
    fold: FoldTree[Any] = FoldTree(reduction.combine)
    for index in sorted(partials):
        fold.push(index, partials[index])
    result = reduction.finish(fold.result())
    expected = reduction.finish(fold_by_definition(partials, reduction.combine))
    if result is None:
        assert expected is None
    else:
        assert bits(result) == bits(expected)
        nan = np.isnan(np.atleast_1d(result))
        assert bits(np.atleast_1d(result)[nan]) == bits(np.full(nan.sum(), np.nan, result.dtype))


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_a_float32_sum_is_the_fixed_tree_in_float32(values: list[float]) -> None:
    vectors = [np.array([value, -value], np.float32) for value in values]
    with np.errstate(all="ignore"):
        expected = fold_by_definition(dict(enumerate(vectors)), lambda a, b: a + b)
    expected = np.where(np.isnan(expected), np.float32("nan"), expected)
    assert bits(reduced("sum", None, vectors)) == bits(expected)
    scalars = [np.float32(value) for value in values]
    assert bits(reduced("sum", None, scalars)) == bits(expected[0])


@pytest.mark.parametrize("op", OPS)
def test_half_floats_fold_in_float32(op: str) -> None:
    parts = [np.array([60000.0, 1.0], np.float16), np.array([60000.0, 2.0**-11], np.float16)]
    result = reduced(op, None, [*parts, *parts])
    assert result.dtype == np.float16
    wide = np.stack([*parts, *parts]).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = getattr(np, op)(wide, axis=0).astype(np.float16)
    assert bits(result) == bits(expected)


@pytest.mark.parametrize("op", OPS)
def test_bfloat16_folds_in_float32(op: str) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes").bfloat16
    parts = [np.array([256, 1], bfloat16), np.array([1, 3], bfloat16)] * 2
    result = reduced(op, None, parts)
    assert result.dtype == bfloat16
    expected = getattr(np, op)(np.stack(parts).astype(np.float32), axis=0).astype(bfloat16)
    assert bits(result) == bits(expected)


@pytest.mark.parametrize(
    ("op", "integers", "floats"), [("sum", 0, 0.0), ("prod", 1, 1.0), ("mean", math.nan, math.nan)]
)
def test_no_rows(op: str, integers: float, floats: float) -> None:
    for dtype, expected in (("int32", integers), ("float32", floats)):
        result = reduced(op, 0, [np.empty((0, 2), dtype)] * 3)
        np.testing.assert_array_equal(result, [expected, expected])


@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max_skip_empty_components_and_propagate_nan(op: str) -> None:
    empty, rows = np.empty((0, 1), np.float32), np.array([[1.0], [2.0]], np.float32)
    assert reduced(op, 0, [empty, rows, empty]) == [getattr(np, op)(rows)]
    assert np.isnan(reduced(op, 0, [rows, np.array([[np.nan]], np.float32)]))
    assert np.isnan(reduced(op, None, [np.nan, 1.0]))
    assert np.isnan(reduced(op, None, [1.0, np.nan]))
    assert reduced(op, 0, [empty, empty]) is None


def test_a_product_that_is_too_large_may_become_zero() -> None:
    big = np.full(3, 2**40)
    zero = np.array([0, 0, 5])
    with pytest.raises(OverflowError):
        reduced("prod", None, [big, big, zero])
    assert reduced("prod", None, [big, big, zero * [1, 1, 0]]).tolist() == [0, 0, 0]
    assert reduced("prod", None, [2**40, 2**40, 0]) == 0
    with pytest.raises(OverflowError, match="beyond"):
        reduced("prod", None, [2**40, -(2**40)])


def test_python_numbers_count_as_int64_and_float64() -> None:
    result = reduced("sum", None, [{"n": 1, "x": 0.5}, {"n": np.int64(2), "x": np.float64(0.25)}])
    assert (type(result["n"]), type(result["x"])) == (np.int64, np.float64)
    assert result == {"n": 3, "x": 0.75}
    with pytest.raises(OverflowError, match=r"leaf 'n'.*int64"):
        reduced("sum", None, [{"n": 2**63 - 1}, {"n": 1}])
    assert reduced("mean", None, [2**63 - 1, 2**63 - 3]) == float(2**63 - 2)


def test_sums_of_many_rows_do_not_stand_still() -> None:
    ones = np.ones((2**24 + 1000, 2), np.float32)
    assert abs(reduced("sum", 0, [ones])[0] - len(ones)) <= 4
    assert reduced("mean", 0, [ones]).tolist() == [1.0, 1.0]
    # A count that is no float32 is not rounded to one before it divides.
    count = 2**24 + 1
    mean = Reduction.of("mean", 0).finish([0, [["f4", count, float(2**24)]]])
    assert mean == np.float32(2**24 / count) != 1.0


@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
def test_many_rows_without_columns(op: str) -> None:
    rows = np.zeros((2**15, 0), np.float32)
    assert Reduction.of(op, 0).finish(Reduction.of(op, 0).partial(rows)).shape == (0,)


def test_complex_numbers_have_a_sum_and_no_minimum() -> None:
    assert reduced("mean", None, [1 + 2j, 3j]) == 0.5 + 2.5j
    assert reduced("sum", 0, [np.array([1j, 2], np.complex64)]).dtype == np.complex64
    with pytest.raises(TypeError, match="complex"):
        reduced("min", None, [1j])


def test_big_endian_and_transposed_arrays_give_the_same_bits() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
    for other in (rows.astype(">f4"), np.asfortranarray(rows)):
        assert bits(reduced("sum", 0, [other])) == bits(reduced("sum", 0, [rows]))
    assert reduced("max", 0, [np.array([1, 2], ">i4")]).dtype == np.int32


@pytest.mark.parametrize(
    "leaf", [True, np.array([True]), "text", b"bytes", np.array(["x"]), object(), [set()]]
)
def test_what_is_not_numeric_is_refused_with_its_path(leaf: object) -> None:
    with pytest.raises(TypeError, match=r"leaf 'a/1.*: expected numbers"):
        Reduction.of("sum", None).partial({"a": [1, leaf]})


class Column:
    """As a data frame's column: NumPy makes an array of it, without its labels."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.ones(2)


@pytest.mark.parametrize(
    ("leaf", "advice"),
    [
        (np.ma.masked_array([1, 2], [False, True]), r"a masked array; x\.filled"),
        (Column(), r"Column; np\.asarray"),
        (Counter("ab"), r"Counter; dict\("),
        ({1, 2}, r"set; sorted\("),
        ((x for x in [1]), r"generator; np\.array\(list"),
    ],
)
@pytest.mark.parametrize("axis", [None, 0])
def test_what_would_lose_something_is_refused_with_what_to_return(
    leaf: object, advice: str, axis: Any
) -> None:
    with pytest.raises(TypeError, match=f"sum of the value: expected numbers, got {advice}"):
        Reduction.of("sum", axis).partial(leaf)


def test_partials_that_do_not_fit_together() -> None:
    reduction = Reduction.of("sum", None)
    one = reduction.partial({"a": np.ones(2)})
    with pytest.raises(ValueError, match=r"leaf 'a': components of shapes \(2,\) and \(1,\)"):
        reduction.combine(one, reduction.partial({"a": np.ones(1)}))
    with pytest.raises(TypeError, match="leaf 'a': components of dtypes float64 and float32"):
        reduction.combine(one, reduction.partial({"a": np.ones(2, np.float32)}))
    with pytest.raises(ValueError, match=r"\{'a': \*\} and \{'b': \*\}; .*combiners:by_key"):
        reduction.combine(one, reduction.partial({"b": np.ones(2)}))


@pytest.mark.parametrize("op", ["SUM", "Sum", "sum", ReduceOp.SUM])
def test_operators_have_names(op: str) -> None:
    assert ReduceOp.of(op) is ReduceOp.SUM


@pytest.mark.parametrize("op", ["median", "", None, 3, True, np.sum])
def test_other_operators_are_refused_with_the_five_names(op: Any) -> None:
    with pytest.raises(ValueError, match="'sum', 'mean', 'min', 'max', 'prod'"):
        ReduceOp.of(op)


def test_axes_are_lists_tuples_and_negative() -> None:
    matrix = np.arange(6.0).reshape(2, 3)
    for axis in (0, (0,), [0], -2, np.int64(0)):
        assert reduced("sum", axis, [matrix]).tolist() == [3, 5, 7]
    for axis in ([0, 1], (-1, 0)):
        assert reduced("sum", axis, [matrix]) == 15
    assert reduced("sum", (), [matrix, matrix]).tolist() == (2 * matrix).tolist()


@pytest.mark.parametrize("axis", [True, [False], 0.0, "0", [None]])
def test_what_is_no_int_is_no_axis(axis: Any) -> None:
    with pytest.raises(TypeError, match="axis"):
        Reduction.of("sum", axis)


def test_axes_out_of_range_and_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        Reduction.of("sum", [0, 0])
    for axis, text in ((2, "out of range"), (-3, "out of range"), ([0, -2], "twice")):
        with pytest.raises(ValueError, match=text):
            Reduction.of("sum", axis).partial(np.ones((2, 2)))
    with pytest.raises(ValueError, match="a scalar has no axes"):
        Reduction.of("sum", 0).partial(1.0)


def test_partials_travel() -> None:
    from pipedist.protocol.codec import decode, encode

    component = {"f": np.float32(1.5), "i": np.arange(3), "h": np.ones(2, np.float16), "n": 7, "z": None}
    for op in OPS:
        reduction = Reduction.of(op, None)
        partial = reduction.partial(component)
        there = decode([bytes(frame) for frame in encode(partial)])
        result = reduction.finish(reduction.combine(there, there))
        expected = reduction.finish(reduction.combine(partial, partial))
        assert {key: bits(leaf) for key, leaf in result.items()} == {
            key: bits(leaf) for key, leaf in expected.items()
        }


@pytest.mark.parametrize("op", ["sum", "mean", "min"])
@given(components=st.lists(st.floats(), min_size=1, max_size=40))
def test_floats_of_replicas_are_reduced_as_in_the_fold_tree(op: str, components: list[float]) -> None:
    """Sums of Python floats take a shorter path."""
    found = values.reduce(op, values.PerReplica(components), None, len(components))
    assert type(found) is np.float64
    assert bits(found) == bits(reduced(op, None, components))
