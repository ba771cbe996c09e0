"""Stock combine functions for `reduce: "pipedist.combiners:NAME"`.

Each has two parts: `NAME.of(...)` makes the component that a replica function returns, and `NAME(a, b)` combines two
components.

    # flights.py
    from pipedist.combiners import by_key_moments

    def delays(shard):
        return by_key_moments.of(shard["carrier"], shard["dep_delay"])

    # spec.yaml
    stages:
      delays: {run: "flights:delays"}
      by_carrier: {reduce: "pipedist.combiners:by_key_moments", of: delays}

| name | value | combined |
|---|---|---|
| `counter` | {value: count} | added |
| `by_key` = `by_key_sum`, `by_key_min`, `by_key_max` | {key: number or array} | key by key |
| `by_key_moments` | {key: count, missing, mean, m2, min, max} | as if of all rows of the key; `std` reads it |
| `by_key_counter` | {key: {value: count}} | added |
| `by_key_nunique` | {key: number of different values} | exactly |
| `by_key_quantiles` | {key: count, p1, ..., p99} | within 1/128 of the value; `quantile` reads other levels |
| `by_key_top_k` | {key: the k largest values, with columns of their rows} | the k largest of each key |
| `moments` | count, missing, mean, m2, min, max | as if of all rows together |
| `top_k` | the k largest values, with their rows | the k largest of both |

Values by key are tables (`KeyedTable`): sorted columns with the access of a dict. They are made and merged as columns,
in ranges of keys on the workers, and on disk beyond 16 MiB, so millions of keys are no problem. Keys are text, integers
or dates, also those of Python, in one or several columns: `of(values)` and `of(keys, values)` take a tuple or a dict of
columns, or a list of tuples. A replica function may also return a plain dict, `collections.Counter` or `defaultdict`.

`moments` and sums of floats are associative up to rounding; the engine's fixed tree makes their bits reproducible. In
a `.csv`, `.parquet` or `.jsonl` file a value by key has a row per key; for `top_k` and `by_key_top_k` a row per value:
`value` and the columns of its rows.

To combine other components by key, as dicts, define an instance of `ByKey` in your module:
`by_key_longest = ByKey("by_key_longest", longest)`, `reduce: "mymodule:by_key_longest"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipedist.core import ragged, trees
from pipedist.core.types import Tree
from pipedist.reduction.keyed.combiners import (
    Counter,
    CounterByKey,
    KeyedCombiner,
    MomentsByKey,
    QuantilesByKey,
    Reduced,
    TopKByKey,
    UniqueByKey,
    array_of,
    check_real,
)
from pipedist.reduction.keyed.keys import Key, common_dtype, group, values_of
from pipedist.reduction.keyed.keys import encode_text as encode_text
from pipedist.reduction.keyed.table import KeyedTable as KeyedTable
from pipedist.reduction.keyed.values import MOMENTS, largest_first, merged_moments, variance

Component = Mapping[Any, Any]


class Moments:
    """Count, mean, variance, minimum and maximum of rows, in float64, in one pass.

    The component is `{"count", "missing", "mean", "m2", "min", "max"}`, with `m2` the sum of squared
    deviations from the mean: numbers for rows of numbers, arrays[...] for rows of shape [...].
    Components are merged by Chan's formula, which does not cancel as a sum of squares does. NaN
    propagates into all fields except the counts; with `skip_missing` it is skipped and counted.
    """

    def of(self, values: ArrayLike, *, skip_missing: bool = False) -> dict[str, Any]:
        """Return the moments of rows.

        Args:
            values: real numbers [rows, ...]; may have no rows.
            skip_missing: skip NaNs, and count them in "missing".

        Raises:
            TypeError: the values are not real numbers.
            ValueError: the values are a scalar, not rows.
        """
        given = np.asarray(values)
        check_real("moments", given)
        if given.ndim == 0:
            raise ValueError("moments needs rows, got a scalar: pass an array with a leading axis")
        x = given.astype(np.float64)
        present = ~np.isnan(x) if skip_missing else np.ones(x.shape, bool)
        count = np.asarray(present.sum(axis=0))
        with np.errstate(all="ignore"):
            some = np.maximum(count, 1)
            mean = np.asarray(np.where(present, x, 0.0).sum(axis=0) / some)
            deviations = np.where(present, x - mean, 0.0)
            # This sum is zero except for rounding: subtracting it corrects the mean and m2.
            drift = deviations.sum(axis=0)
            mean = np.asarray(mean + drift / some)
            m2 = (deviations * deviations).sum(axis=0) - drift * drift / some
            low = np.where(present, x, np.inf).min(axis=0, initial=np.inf)
            high = np.where(present, x, -np.inf).max(axis=0, initial=-np.inf)
        empty = count == 0
        return _numbers(
            {
                "count": count,
                "missing": len(x) - count,
                "mean": np.where(empty, np.nan, mean),
                "m2": np.maximum(m2, 0.0),
                "min": np.where(empty, np.nan, low),
                "max": np.where(empty, np.nan, high),
            }
        )

    def __call__(self, a: Component, b: Component) -> dict[str, Any]:
        """Return the moments of the rows of both components."""
        for part in (a, b):
            if not isinstance(part, Mapping) or set(part) != set(MOMENTS):
                raise TypeError("moments combines what moments.of(values) returned")
        if np.shape(a["mean"]) != np.shape(b["mean"]):
            raise ValueError(
                f"moments of rows of shapes {np.shape(a['mean'])} and {np.shape(b['mean'])} can't be combined"
            )
        return _numbers(merged_moments(a, b))

    def mean(self, component: Component) -> Any:
        """Return the mean; NaN without rows."""
        return component["mean"]

    def variance(self, component: Component, *, ddof: int = 0) -> Any:
        """Return the variance; NaN unless there are more than `ddof` rows.

        Args:
            component: the result of `of` or of a reduction.
            ddof: delta degrees of freedom: the divisor is count - ddof; 1 for a sample's variance.
        """
        return variance(component, ddof=ddof)

    def std(self, component: Component, *, ddof: int = 0) -> Any:
        """Return the standard deviation; see `variance`."""
        value = np.sqrt(self.variance(component, ddof=ddof))
        return value if value.ndim else float(value)


class TopK:
    """The k largest values, largest first, with their rows.

    The component is `{"k", "values", "rows"}`; among equal values the first in dataset order is kept. NaNs
    are ignored.
    """

    def of(self, values: ArrayLike, k: int, rows: Tree = None) -> dict[str, Any]:
        """Return the k largest values.

        Args:
            values: real numbers [rows].
            k: number of values, at least 1; equal in all components.
            rows: a tree of arrays [rows, ...] kept with the values: names, features.

        Raises:
            ValueError: `k` is less than 1, `values` does not have one axis, or an array of `rows` has
                another number of rows.
        """
        x = np.asarray(values)
        if k < 1 or x.ndim != 1:
            raise ValueError(f"top_k needs k >= 1 and values with one axis, got k={k}, shape {x.shape}")
        leaves, treedef = trees.flatten(rows)
        kept = [np.asarray(leaf) for leaf in leaves]
        for path, leaf in zip(trees.treedef_paths(treedef), kept, strict=True):
            if leaf.shape[:1] != x.shape:
                raise ValueError(f"rows {path!r} has shape {leaf.shape}, but there are {len(x)} values")
        order = largest_first(x)[:k]
        return {
            "k": k,
            "values": x[order],
            "rows": trees.unflatten(treedef, [leaf[order] for leaf in kept]),
        }

    def __call__(self, a: Component, b: Component) -> dict[str, Any]:
        """Return the k largest values of both components."""
        for part in (a, b):
            if not isinstance(part, Mapping) or set(part) != {"k", "values", "rows"}:
                raise TypeError("top_k combines what top_k.of(values, k) returned")
        if a["k"] != b["k"]:
            raise ValueError(f"top_k of k={a['k']} and k={b['k']} can't be combined: use one k")
        (left, right), treedef = trees.same_structure([a["rows"], b["rows"]])
        if not len(a["values"]) or not len(b["values"]):  # an empty list has the dtype of floats
            return self.of(**(b if len(b["values"]) else a))
        dtype = common_dtype([a["values"], b["values"]])
        rows = [ragged.concatenate(pair) for pair in zip(left, right, strict=True)]
        values = np.concatenate([a["values"], b["values"]], dtype=dtype)
        return self.of(values, a["k"], trees.unflatten(treedef, rows))


class ByKey:
    """Combines dicts key by key: `{key: component}`.

    Args:
        name: the name of this object in its module, for errors.
        combine: combines two components of one key; not by key itself: several key columns make that of one table.
        of: makes the component of one key's rows; default: `combine.of`.
    """

    name: str

    def __init__(
        self,
        name: str,
        combine: Callable[[Any, Any], Any],
        of: Callable[[NDArray[Any]], Any] | None = None,
    ) -> None:
        if isinstance(combine, KeyedCombiner | ByKey):
            raise TypeError(
                f"{name}: {combine.name} combines by key already: pass it several key columns, as in "
                f"{combine.name}.of((outer, inner), values)"
            )
        self.name = name
        self._combine = combine
        self._of: Callable[[NDArray[Any]], Any] = getattr(combine, "of", None) if of is None else of  # type: ignore[assignment]

    @property
    def combine(self) -> Callable[[Any, Any], Any]:
        """The function that combines two components of one key."""
        return self._combine

    def of(self, keys: Iterable[Key] | NDArray[Any], values: ArrayLike, **options: Any) -> dict[Key, Any]:
        """Group rows by key and return each group's component.

        Args:
            keys: text or integers [rows].
            values: [rows, ...].
            options: passed to the component's `of`, as `skip_missing=True` to that of `moments`.

        Raises:
            ValueError: keys and values differ in their number of rows.
            TypeError: a key is neither text nor an integer.
        """
        rows = np.asarray(values)
        grouping = group([array_of(keys)])
        if rows.shape[:1] != grouping.codes.shape:
            raise ValueError(
                f"{self.name}: keys of shape {grouping.codes.shape} do not match values of shape {rows.shape}"
            )
        order = np.argsort(grouping.codes, kind="stable")
        ends = np.cumsum(np.bincount(grouping.codes, minlength=grouping.count))
        groups = np.split(rows[order], ends[:-1]) if grouping.count else []
        found = values_of(grouping.columns[0], 0, grouping.count)
        return {key: self._of(each, **options) for key, each in zip(found, groups, strict=True)}

    def __call__(self, a: Component, b: Component) -> dict[Key, Any]:
        """Combine components of common keys, and keep the others."""
        _check_dicts(self.name, a, b)
        return {
            key: self._combine(a[key], b[key]) if key in a and key in b else a[key] if key in a else b[key]
            for key in sorted_keys({**a, **b})
        }


def _check_dicts(name: str, a: Any, b: Any) -> None:
    for part in (a, b):
        if not isinstance(part, Mapping):
            raise TypeError(f"{name} combines dicts made by {name}.of(...), not {type(part).__name__}")


def sorted_keys(component: Component) -> list[Any]:
    """Return the sorted keys of a component: integers first, then text."""
    return sorted(component, key=lambda key: (isinstance(key, str), key))


def _numbers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields, with Python numbers in place of arrays without axes."""
    return {name: value if np.ndim(value) else np.asarray(value).item() for name, value in fields.items()}


counter = Counter("counter", "counter")
moments = Moments()
top_k = TopK()
by_key = by_key_sum = Reduced("by_key_sum", "sum", np.add)
by_key_min = Reduced("by_key_min", "min", np.minimum)
by_key_max = Reduced("by_key_max", "max", np.maximum)
by_key_moments = MomentsByKey("by_key_moments", "moments")
by_key_counter = CounterByKey("by_key_counter", "counts")
by_key_nunique = UniqueByKey("by_key_nunique", "unique")
by_key_top_k = TopKByKey("by_key_top_k", "top_k")
by_key_quantiles = QuantilesByKey("by_key_quantiles", "quantiles")
