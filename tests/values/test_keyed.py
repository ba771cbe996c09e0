"""Tables by key: the same bits as folds of plain dicts in the fixed tree, however the merges are divided."""

from __future__ import annotations

import datetime
import mmap
import os
import pickle
import resource
from collections import Counter, defaultdict
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import anyio
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipedist
from pipedist.combiners import (
    KeyedTable,
    by_key_counter,
    by_key_max,
    by_key_min,
    by_key_moments,
    by_key_nunique,
    by_key_quantiles,
    by_key_sum,
    by_key_top_k,
    counter,
    encode_text,
    moments,
    top_k,
)
from pipedist.outputs import summary
from pipedist.outputs.encoding import to_json
from pipedist.protocol.codec import decode, encode
from pipedist.reduction.keyed import texts
from pipedist.reduction.keyed.keys import sorted_rows
from pipedist.reduction.keyed.ranges import Ranges
from pipedist.reduction.keyed.table import merge
from pipedist.reduction.keyed.values import RELATIVE_ERROR, buckets_of, middles
from pipedist.reduction.tree import FoldTree
from pipedist.runs import keyed_fold

M = "tests.values.test_keyed"

TEXT = st.one_of(
    st.sampled_from(["", "a", "ab", "abcdefgh", "abcdefghi", "é", "a\0", "\ud800", "😀"]),
    st.text(max_size=20),
)
KEYS = st.one_of(
    st.lists(TEXT, max_size=8),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8),
    st.lists(st.integers(0, 2**64 - 1), max_size=8),
    st.lists(st.dates(), max_size=8),
)


@settings(max_examples=40)
@given(st.lists(TEXT, max_size=20))
def test_texts_are_ranked_and_found_as_python_sorts_them(strings: list[str]) -> None:
    found = texts.of_strings(strings)
    codes, first = texts.ranks(found)
    distinct = found.take(first)
    assert distinct.strings() == sorted(set(strings))
    assert [distinct.strings()[code] for code in codes] == strings
    for text in [*strings, "b"]:
        place = distinct.find(text)
        assert sorted({*strings, text})[place if place >= 0 else -1 - place] == text
        assert (place >= 0) == (text in strings)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=30), st.sampled_from([4, 16, 40, 62]))
def test_integers_are_ordered_stably(values: list[int], bits: int) -> None:
    packed = np.array([value % (1 << bits) for value in values])
    for has_runs in (False, True):
        order, found = sorted_rows(packed, 1 << bits, has_runs=has_runs)
        assert order.tolist() == np.argsort(packed, kind="stable").tolist()
        assert found.tolist() == sorted(packed.tolist())


@settings(max_examples=40)
@given(KEYS, st.lists(st.integers(0, 7), max_size=30), st.integers(1, 3))
def test_a_table_is_a_dict_whose_keys_are_sorted(keys: list[Any], picks: list[int], width: int) -> None:
    if any(isinstance(key, str) and "\ud800" in key for key in keys):
        keys = [*map(str, keys)]
    rows = [keys[pick % len(keys)] for pick in picks] if keys else []
    columns = [rows, [str(pick) for pick in picks[: len(rows)]], picks[: len(rows)]][:width]
    counts = counter.of(tuple(columns)) if width > 1 else counter.of(rows)
    plain = Counter(zip(*columns, strict=True)) if width > 1 else Counter(rows)
    assert dict(counts) == plain == counts
    assert list(counts) == sorted(plain)
    assert [counts[key] for key in plain] == list(plain.values())
    assert all(key in counts for key in plain)
    assert (("x",) * width) not in counts
    assert counter(dict(plain), {}) == counts
    assert decode(encode(counts), may_import=True) == counts
    assert counts.largest(3) == sorted(counts.items(), key=lambda item: -item[1])[:3]


FLOATS = st.floats(-1e6, 1e6) | st.sampled_from([0.1, 1e16, -1e16, np.inf, np.nan, -0.0])
CALLS = st.lists(  # steps of calls of rows
    st.lists(st.lists(st.tuples(st.sampled_from("abcde"), FLOATS), max_size=5), max_size=3),
    min_size=1,
    max_size=9,
)


def add(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {k: a[k] + b[k] if k in a and k in b else a.get(k, b.get(k)) for k in {**a, **b}}  # type: ignore[misc]


def folded(combine: Any, groups: list[list[Any]]) -> Any:
    nodes: FoldTree[Any] = FoldTree(combine)
    for place, group in enumerate(groups):
        node: FoldTree[Any] = FoldTree(combine)
        for index, part in enumerate(group):
            node.push(index, part)
        if group:
            nodes.push(place, node.result())
    return nodes.result()


def bits(mapping: Any) -> dict[str, Any]:
    return {key: np.float64(value).tobytes() for key, value in mapping.items() if value == value}


@settings(max_examples=40)
@given(CALLS, st.integers(1, 4))
def test_floats_have_the_bits_of_a_fold_of_dicts_in_the_fixed_tree(calls: Any, count: int) -> None:
    def plain(rows: Any) -> dict[str, float]:
        sums: dict[str, float] = {}
        for key, x in rows:
            sums[key] = sums.get(key, 0.0) + x
        return sums

    groups = [[by_key_sum.of([k for k, _ in rows], [x for _, x in rows]) for rows in step] for step in calls]
    if not any(rows for step in calls for rows in step):
        return
    expected = folded(add, [[plain(rows) for rows in step] for step in calls])
    whole = by_key_sum.merge_groups(groups)
    assert bits(whole) == bits(expected)
    assert bits(merged_in_ranges(groups, count)) == bits(expected)


def merged_in_ranges(groups: list[list[KeyedTable]], count: int) -> KeyedTable:
    cut = Ranges([part for group in groups for part in group if part.rows], count)
    pieces = []
    for place in range(count):
        parts = iter(cut.cut(place))
        found = [[next(parts) if part.rows else part for part in group] for group in groups]
        pieces.append(merge(decode(encode(found))))
    return cut.join(pieces)


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.tuples(TEXT, st.integers(0, 3), TEXT), max_size=9), max_size=5), st.integers(1, 6)
)
def test_texts_of_several_columns_are_merged_in_ranges(parts: Any, count: int) -> None:
    parts = [[row for row in rows if "\ud800" not in row[0] + row[2]] for rows in parts]
    tables = [[counter.of(rows)] for rows in parts if rows]
    if tables:
        merged = merged_in_ranges(tables, count)
        assert dict(merged) == sum(map(Counter, parts), Counter())
        assert list(merged) == sorted(merged)
        assert decode(encode(merged)) == merged


@settings(max_examples=40)
@given(CALLS)
def test_moments_by_key_have_the_bits_of_a_fold_of_dicts(calls: Any) -> None:
    groups = [
        [by_key_moments.of([k for k, _ in rows], np.array([x for _, x in rows])) for rows in step]
        for step in calls
    ]
    if not any(groups):
        return

    def combine(a: Any, b: Any) -> Any:
        return {k: moments(a[k], b[k]) if k in a and k in b else a.get(k, b.get(k)) for k in {**a, **b}}

    result = by_key_moments.merge_groups(groups)
    expected = folded(combine, [[dict(part) for part in group] for group in groups])
    for key, found in result.items():
        assert repr(sorted(found.items())) == repr(sorted(expected[key].items()))
    assert list(result) == sorted(expected)
    np.testing.assert_array_equal(
        by_key_moments.std(result, ddof=1), [moments.std(result[key], ddof=1) for key in result]
    )


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-(2**90), 2**90)), max_size=4), max_size=4)
)
def test_sums_of_integers_of_any_size_are_exact(parts: Any) -> None:
    whole = [row for part in parts for row in part]
    result = by_key_sum.merge_groups([[{}, *({k: n} for k, n in whole)]])
    assert result == {key: sum(n for k, n in whole if k == key) for key in sorted({k for k, _ in whole})}


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(-3, 3)), max_size=9), min_size=1, max_size=4
    ),
    st.sampled_from([0.0, 0.25, 0.5, 0.99, 1.0]),
)
def test_distinct_values_and_quantiles_are_those_of_all_rows(parts: Any, level: float) -> None:
    whole: dict[str, list[float]] = defaultdict(list)
    for key, value in (row for part in parts for row in part):
        whole[key].append(10.0**value)
    split = [([k for k, _ in part], [10.0**v for _, v in part]) for part in parts]
    unique = by_key_nunique.merge_groups(
        [[by_key_nunique.of(k, np.array(v).view(np.int64)) for k, v in split]]
    )
    assert unique == {key: len(set(values)) for key, values in sorted(whole.items())}
    sketch = by_key_quantiles.merge_groups([[by_key_quantiles.of(k, v) for k, v in split]])
    for (key, values), found in zip(
        sorted(whole.items()), by_key_quantiles.quantile(sketch, [level]), strict=True
    ):
        exact = sorted(values)[int(np.floor(level * (len(values) - 1)))]
        assert abs(found[0] - exact) <= exact * RELATIVE_ERROR
        assert sketch[key]["count"] == len(values)


def test_buckets_are_ordered_and_near_their_values() -> None:
    x = np.array([-np.inf, -1e300, -2.0, -0.0, 5e-324, 1e-300, 1.0, 1.99, 1e300, np.inf, np.nan])
    buckets = buckets_of(x)
    assert (np.diff(buckets) >= 0).all()
    found = middles(buckets)
    finite = np.isfinite(x)
    assert (np.abs(found[finite] - x[finite]) <= np.abs(x[finite]) / 128 + 1e-300).all()
    assert found[~finite].tolist()[:2] == [-np.inf, np.inf]
    assert np.isnan(by_key_quantiles.of(["a", "a"], [1.0, np.nan])["a"]["p50"])
    assert by_key_quantiles.of(["a", "b"], [1.0, np.nan], skip_missing=True)["a"]["count"] == 1


DATES = st.sampled_from(["NaT", "1969-12-31", "2020-01-01", "2020-01-02", "2020-02-01", "2021-01-01"])


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("Dsh"), st.lists(st.tuples(DATES, st.integers(0, 23)), min_size=1)),
        min_size=2,
        max_size=5,
    ),
    st.integers(2, 4),
)
def test_dates_of_several_units_and_nat_are_keys_in_every_range(parts: Any, count: int) -> None:
    tables, expected = [], Counter[Any]()
    for unit, rows in parts:
        keys = np.array([np.datetime64(day) + np.timedelta64(hour, "h") for day, hour in rows], f"M8[{unit}]")
        tables.append(counter.of(keys))
        expected.update(None if np.isnat(key) else key.astype("M8[s]").item() for key in keys)
    whole = merge([tables])
    ranges = Ranges(tables, count)
    joined = ranges.join([merge([ranges.cut(place)]) for place in range(count)])
    assert list(joined.items()) == list(whole.items())
    found = {key and np.datetime64(key, "s").item(): value for key, value in whole.items()}
    assert found == expected
    assert [whole[key] for key in whole] == list(whole.values())


def test_rows_without_a_date_are_one_key() -> None:
    keys = np.array(["NaT", "2020-01-01", "NaT", "2021-01-01", "NaT"], "M8[D]")
    sums = by_key_sum.of(keys, [1, 2, 3, 4, 5])
    assert sums[datetime.date(2020, 1, 1)] == 2
    assert sums[None] == sums[np.datetime64("NaT")] == 9
    values = [1, 1, 2, 1, 2]
    assert by_key_counter.of(keys, values)[None] == {1: 1, 2: 2}
    assert dict(by_key_nunique.of(keys, values)) == {
        None: 2,
        datetime.date(2020, 1, 1): 1,
        datetime.date(2021, 1, 1): 1,
    }
    assert by_key_top_k.of(keys, values, k=2)[None]["value"].tolist() == [2, 2]
    assert by_key_quantiles.of(keys, values)[None]["count"] == 3
    assert list(counter.of(np.array(["2020-01-01", "1960-01-01"], ">M8[D]"))) == [
        datetime.date(1960, 1, 1),
        datetime.date(2020, 1, 1),
    ]


def test_parts_of_microseconds_are_not_dropped() -> None:
    import pandas

    times = [pandas.Timestamp(1, unit="ns"), pandas.Timestamp(2, unit="ns"), pandas.NaT]
    spans = [pandas.Timedelta(1, unit="ns"), datetime.timedelta(1)]
    with pytest.raises(TypeError, match=r"no whole number of microseconds: .*to_numpy"):
        counter.of(times)
    with pytest.raises(TypeError, match="no whole number of microseconds"):
        counter.of([np.datetime64(1, "ns"), datetime.datetime(2020, 1, 1)])
    with pytest.raises(TypeError, match="no whole number of microseconds"):
        by_key_sum.of([1, 1], spans)
    assert len(counter.of(pandas.Series(times).to_numpy())) == 3
    assert counter.of([pandas.Timestamp("2020-01-01"), pandas.NaT])[datetime.datetime(2020, 1, 1)] == 1


def test_values_that_no_table_has_are_absent() -> None:
    sums = by_key_sum.of([1, 2, 3], [1.0, np.nan, 3.0])
    assert not any(key in sums for key in (np.nan, np.inf, np.str_("1"), None))
    assert sums.largest(3) == [(3, 3.0), (1, 1.0)]


@pytest.mark.parametrize("keys", [["a", "b"], encode_text(["a", "b"]), np.array(["a", "b"]), [2**63, 1]])
@pytest.mark.parametrize("dtype", ["f2", "f8", ml_dtypes.bfloat16])
def test_quantiles_skip_missing_values_of_any_column(keys: Any, dtype: Any) -> None:
    found = by_key_quantiles.of(keys, np.array([1, np.nan], dtype), skip_missing=True)
    assert [each["count"] for each in found.values()] == [1]
    with pytest.raises(TypeError, match="some keys are text"):
        by_key_quantiles.of([1, "a"], np.array([1, np.nan]), skip_missing=True)


def test_values_are_neither_rounded_nor_wrapped_by_other_components() -> None:
    large = 2**53 + 1
    assert top_k(top_k.of([], 2), top_k.of([large], 2))["values"].tolist() == [large]
    assert top_k(top_k.of([large], 2), top_k.of([], 2))["values"].tolist() == [large]
    unsigned = np.array([1], np.uint64)
    with pytest.raises(TypeError, match="int64 and uint64"):
        top_k(top_k.of(unsigned, 2), top_k.of([large], 2))
    with pytest.raises(TypeError, match="int64 and uint64"):
        by_key_top_k(by_key_top_k.of([1], unsigned, k=2), by_key_top_k.of([1], [large], k=2))
    with pytest.raises(TypeError, match="<U1 and int64"):
        by_key_top_k(
            by_key_top_k.of([1], [1], 2, {"a": [7]}),
            by_key_top_k.of([1], [1], 2, {"a": ["x"]}),
        )
    with pytest.raises(OverflowError, match=r"datetime64\[ns\]"):
        counter(counter.of(np.array(["9999-12-31"], "M8[D]")), counter.of(np.array(["2020-01-01"], "M8[ns]")))
    years = np.array([200 * 365] * 2, "m8[D]").astype("m8[ns]")
    with pytest.raises(OverflowError, match="a sum of durations"):
        by_key_sum.of([1, 1], years)
    with pytest.raises(OverflowError, match="a sum of durations"):
        by_key_sum(by_key_sum.of([1], years[:1]), by_key_sum.of([1], years[:1]))
    assert np.isnat(by_key_sum.of([1, 1], np.array([1, "NaT"], "m8[s]"))[1])


def test_columns_whose_ranges_together_exceed_64_bits_are_merged() -> None:
    rng = np.random.default_rng(3)
    columns = [np.append(rng.integers(-(2**60), 2**60, 30), [5, 5]) for _ in range(3)]
    parts = [counter.of(tuple(column[place::2] for column in columns)) for place in range(2)]
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    merged = counter(*parts)
    assert dict(merged) == Counter(rows)
    assert list(merged) == sorted(set(rows))


def test_keys_of_several_columns_have_names_and_dates() -> None:
    day = datetime.date(2024, 2, 29)
    table = by_key_min.of(
        {"day": [day, day, datetime.date(2023, 1, 1)], "hub": ["JFK", "JFK", "EWR"]}, [3, 1, 2]
    )
    assert table[day, "JFK"] == 1
    assert table == {(datetime.date(2023, 1, 1), "EWR"): 2, (day, "JFK"): 1}
    assert list(table.columns()) == ["day", "hub", "value"]
    assert to_json(table)[1] == {"day": "2024-02-29", "hub": "JFK", "value": 1}
    days = counter.of([day, day])
    assert (days[day], days[np.datetime64(day)], "2024-02-29" in days) == (2, 2, False)
    assert by_key_max({day: 1}, {day: 2}) == {day: 2}
    pairs = counter.of(zip(["a", "a"], ["b", "b"], strict=True))
    assert (pairs["a", "b"], pairs.get(("a", "x")), pairs.get("a")) == (2, None, None)
    assert pickle.loads(pickle.dumps(pairs)) == pairs
    assert repr(counter.of("abcde")) == "<5 keys: {'a': 1, 'b': 1, 'c': 1, 'd': 1, ...}>"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: counter({"a": 1}, {1: 1}),
            TypeError,
            "keys are text in some components, and integers in others",
        ),
        (lambda: counter({"a": 0.5}, {}), TypeError, "use by_key_sum"),
        (lambda: counter(by_key_moments.of(["a"], [1.0]), {}), TypeError, "not a table of moments"),
        (lambda: by_key_sum(counter.of((["a"], ["b"])), {"a": 1}), ValueError, "the key columns"),
        (lambda: counter.of((["a"], [1, 2])), ValueError, "key columns of different lengths"),
        (lambda: counter.of([("a", 1), ("a",)]), TypeError, "have another length"),
        (lambda: counter.of([-1, 2**63]), TypeError, "at most 64 bits"),
        (lambda: by_key_sum({"a": np.zeros(2)}, {"a": np.zeros(3)}), ValueError, "shapes"),
        (lambda: by_key_quantiles({"a": 1}, {}), TypeError, "not dicts"),
        (lambda: by_key_min({"a": -1}, {"a": 2**64 - 1}), OverflowError, "return floats"),
        (lambda: by_key_moments.of(["a"], ["x"]), TypeError, "needs real numbers"),
        (lambda: by_key_sum.of(["a"], [datetime.date(2024, 1, 1)]), TypeError, "dates can't be added"),
        (lambda: by_key_max.of([1, 1], [datetime.date(2024, 1, 1), 2]), TypeError, "got date and int"),
        (lambda: by_key_top_k.of(["a"], [1], 0), ValueError, "k >= 1"),
        (lambda: by_key_top_k.of(["a"], [1], 1, {"x": [1, 2]}), ValueError, "do not match 'x'"),
        (lambda: by_key_top_k.of(["a"], ["x"], 1), TypeError, "column 'value'"),
        (
            lambda: by_key_top_k(by_key_top_k.of([1], [1], 1), by_key_top_k.of([1], [1], 2)),
            ValueError,
            "use one k",
        ),
        (lambda: by_key_top_k(by_key_top_k.of([1], [1], 1), {1: 2}), TypeError, "not dicts"),
        (lambda: counter.of([datetime.datetime.now(datetime.UTC)]), TypeError, "has a time zone"),
    ],
)
def test_misuse_is_an_error(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("of", [list, lambda dates: np.array(dates, object)])
def test_dates_of_python_are_keys_and_values(of: Any) -> None:
    day, next_day = datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)
    time = datetime.datetime(2024, 1, 2, 3, 4, 5, 6)
    last = by_key_max.of(["a", "b", "a", "c"], of([day, day, next_day, None]))
    assert last.value_columns["value"].dtype == np.dtype("M8[D]")
    assert decode(encode(by_key_max(last, {"a": day})))["a"] == np.datetime64("2024-01-02")
    assert np.isnat(last["c"])
    assert by_key_max.of([1, 1], of([next_day, time]))[1] == np.datetime64(time)
    assert by_key_sum.of([1, 1], of([time - datetime.datetime(2024, 1, 2)] * 2))[1] == np.timedelta64(
        22_090_000_012, "us"
    )
    assert dict(counter.of(of([day, next_day, day]))) == {day: 2, next_day: 1}
    assert counter.of((["a", "b"], of([time, time])))["b", time] == 1


@settings(max_examples=40)
@given(st.dictionaries(TEXT, st.integers(1, 2**70), max_size=8))
def test_a_dict_of_counts_has_the_bits_of_its_rows(counts: dict[str, int]) -> None:
    subclasses = {np.str_(word): count for word, count in counts.items() if "\0" not in word}
    rows = by_key_sum.of(list(counts), list(counts.values()))
    assert bits(by_key_sum.component(counts)) == bits(rows)
    assert bits(counter.component(counts)) == bits(replace(rows, kind="counter", names=["value"]))
    assert counter.component(subclasses) == subclasses


TOP_ROWS = st.lists(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.sampled_from([0.5, 1, 2, np.nan])), max_size=8
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(TOP_ROWS, st.integers(1, 3), st.integers(1, 2), st.integers(1, 4))
def test_the_largest_values_of_each_key_are_those_of_all_rows(
    parts: Any, k: int, width: int, count: int
) -> None:
    numbered = [[(*row, at * 10 + place) for place, row in enumerate(part)] for at, part in enumerate(parts)]
    tables = [
        by_key_top_k.of(
            tuple([row[at] for row in part] for at in range(width))
            if width > 1
            else [row[0] for row in part],
            np.array([row[2] for row in part], float),
            k,
            {
                "name": np.array([f"n{row[3]}" for row in part], object),
                "id": np.array([row[3] for row in part]),
            },
        )
        for part in numbered
    ]
    whole: dict[Any, list[Any]] = defaultdict(list)
    present = [row for part in numbered for row in part if row[2] == row[2]]
    for *key, value, number in sorted(present, key=lambda row: (-row[2], row[3])):
        whole[tuple(key) if width > 1 else key[0]].append((value, f"n{number}", number))
    expected = {key: rows[:k] for key, rows in whole.items()}
    if not expected:
        return
    groups = [[table] for table in tables]
    for merged in (
        by_key_top_k.merge_groups(groups),
        merged_in_ranges(groups, count),
        reduce(by_key_top_k, tables),
    ):
        assert list(merged) == sorted(expected)
        assert merged.rows == sum(map(len, expected.values()))
        for key, columns in merged.items():
            assert list(zip(*(column.tolist() for column in columns.values()), strict=True)) == expected[key]
        assert [row["id"] for row in merged.records()] == [
            row[2] for key in sorted(expected) for row in expected[key]
        ]


# -- in runs


def counted(x: np.ndarray) -> Any:
    """Return another type of result in each call, of one meaning."""
    words = [f"w{each % 1000}" for each in x * x]
    plain: dict[str, int] = defaultdict(int)
    for word in words:
        plain[word] += 1
    return [Counter(words), plain, counter.of(words), dict(plain)][x[0] % 4]


def summed(x: np.ndarray) -> Any:
    return by_key_sum.of((x * x % 997, [f"{each % 13}" for each in x]), 0.1 * x)


def longest(x: np.ndarray) -> Any:
    return by_key_top_k.of(
        [f"k{each}" for each in x % 50], x * 7 % 1000, 2, {"x": x, "word": [f"w{each}" for each in x]}
    )


def fails_once(x: np.ndarray, marker: str) -> Any:
    if 700 in x and not Path(marker).exists():
        Path(marker).touch()
        import os

        os.kill(os.getpid(), 9)
    return summed(x)


def test_bits_do_not_depend_on_workers_deaths_ranges_or_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: dict[str, Any] = {
        "pipedist": 1,
        "name": "keyed",
        "replicas": 2,
        "dataset": {"range": 2000, "batch": 50},
        "stages": {
            "words": {"run": f"{M}:counted"},
            "counts": {"reduce": "pipedist.combiners:counter", "of": "words"},
            "sums": {"run": f"{M}:summed"},
            "by_key": {"reduce": "pipedist.combiners:by_key_sum", "of": "sums"},
            "rows": {"run": f"{M}:longest"},
            "top": {"reduce": "pipedist.combiners:by_key_top_k", "of": "rows"},
        },
        "outputs": {"counts": "counts.csv", "by_key": "by_key.csv", "top": "top.csv"},
    }
    plain = pipedist.run(spec, workers=1, output=tmp_path / "plain")
    monkeypatch.setattr(keyed_fold, "RANGE_BYTES_MAX", 20_000)
    monkeypatch.setattr(keyed_fold, "MEMORY_BYTES_MAX", 10_000)
    spec["stages"]["sums"] = {"run": f"{M}:fails_once", "with": {"marker": str(tmp_path / "marker")}}
    divided = pipedist.run(spec, workers=3, output=tmp_path / "divided")
    assert (tmp_path / "marker").exists()
    for name in ("counts.csv", "by_key.csv", "top.csv"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "divided" / name).read_bytes()
    assert divided["counts"] == plain["counts"] == Counter(f"w{x * x % 1000}" for x in range(2000))
    assert bits(divided["by_key"]) == bits(plain["by_key"])
    assert divided["by_key"].value_columns["value"].base is not None  # a view of a file
    assert isinstance(divided["counts"], KeyedTable)
    assert divided["top"]["k7"]["x"].tolist() == [857, 1857]  # both have 999


def test_tables_may_move_to_a_file_while_they_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_fold, "RANGE_BYTES_MAX", 1000)
    groups = [
        [by_key_sum.of(np.arange(100 * place, 1000), np.full(1000 - 100 * place, 0.1))] for place in range(3)
    ]
    expected = bits(by_key_sum.merge_groups(groups))
    whole: list[Any] = []

    async def main() -> None:
        async def call(ranges: Any) -> Any:
            monkeypatch.setattr(keyed_fold, "MEMORY_BYTES_MAX", 0)
            await fold._hold([by_key_sum.of(["other"], [1.0])])  # as if more tables arrived
            assert any(isinstance(part.key_columns[0].base, mmap.mmap) for group in groups for part in group)
            return by_key_sum.merge_groups(ranges)

        fold = keyed_fold.KeyedFold("sums", "run", call, None, calls_max=1)
        for group in groups:
            await fold._hold(group)
        whole.extend(await fold._fold(groups))

    anyio.run(main)
    assert bits(whole[0]) == expected


def test_tables_in_many_files_raise_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_fold, "MEMORY_BYTES_MAX", 0)
    groups = [[by_key_sum.of(["a"], [float(number)])] for number in range(200)]

    async def main() -> None:
        fold = keyed_fold.KeyedFold("sums", "run", None, None, calls_max=1)  # type: ignore[arg-type]
        for group in groups:
            await fold._hold(group)
        assert all(isinstance(group[0].value_columns["value"].base, mmap.mmap) for group in groups)
        used = len(os.listdir("/dev/fd"))
        monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 10, used + 10))
        with pytest.raises(pipedist.PipedistError, match=r"stage sums need more open files.*ulimit -Hn"):
            await fold._hold([by_key_sum.of(["a"], [0.0])])

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 200, limits[1]))
        anyio.run(main)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_error_in_a_range_of_keys_is_raised_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_fold, "RANGE_BYTES_MAX", 1000)
    groups = [[by_key_sum.of(np.arange(500), np.arange(500))] for _ in range(2)]

    async def main() -> None:
        async def call(_: Any) -> Any:
            raise pipedist.FoldError("sums", "too much")

        await keyed_fold.KeyedFold("sums", "run", call, None, calls_max=1)._fold(groups)

    with pytest.raises(pipedist.FoldError, match="too much"):
        anyio.run(main)


def test_a_summary_shows_the_largest_counts_and_the_first_rows() -> None:
    counts = counter.of([x * x % 100 for x in range(1000)])
    found = summary.records(counts)
    assert found is not None
    assert (found.count, found.rows[0], found.rows[-1]) == (22, ["0", "100"], ["... 12 smaller ones", ""])
    assert summary.summarize(counts) == "22 keys"
    assert summary.summarize(counter.of(["a"])) == '{"a": 1}'
    assert summary.summarize(counter.of(["a", "b", "c", "b"])) == '{"b": 2, "a": 1, "c": 1}', (
        "by count, then by key"
    )
    long = counter.of([f"a long key {k // 3}" for k in range(20)])
    assert summary.summarize(long) == "7 keys", "too long for one line: a table"
    assert summary.records(long) is not None
    of_pairs = by_key_counter.of((["a", "b"], [1, 2]), ["x", "y"])
    assert to_json(of_pairs) == [
        {"key/0": "a", "key/1": 1, "value": "x", "count": 1},
        {"key/0": "b", "key/1": 2, "value": "y", "count": 1},
    ]
    rows = summary.records(of_pairs)
    assert rows is not None
    assert rows.rows == [["a, 1", "x", "1"], ["b, 2", "y", "1"]]
