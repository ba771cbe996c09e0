"""Variables where an array is expected: NumPy takes their values, `Strategy.update` their copies.

A variable that is cut into shards along its first axis (tf.distribute's ShardedVariable)."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from pipedist import values
from pipedist.core import trees
from pipedist.core.misuse_hints import TfNames
from pipedist.core.types import Tree
from pipedist.values import Mirrored, PerReplica
from pipedist.worker.variables.rules import (
    Array,
    How,
    Traits,
    VariableAggregation,
    VariableSynchronization,
    operand_of,
    updated,
)


class ArrayOperators(NDArrayOperatorsMixin):
    """Lets NumPy take an object for the array that it holds: `x @ w`, `np.dot(x, w)`, `w + 1`."""

    __slots__ = ()

    def value(self) -> Array:
        """Return the value now: an array, read-only."""
        raise TypeError(f"{type(self).__name__} holds no value")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        value = self.value()
        if dtype is not None and np.dtype(dtype) != value.dtype:
            return value.astype(dtype)
        return value.copy() if copy else value

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        changed = inputs[:1] if method == "at" else kwargs.get("out", ())  # read-only or not
        if any(isinstance(each, ArrayOperators) for each in changed):
            raise TypeError(
                f"a {type(self).__name__} can't be changed in place, as by `w += x` or `np.add.at(w, i, x)`: "
                "write `w.assign_add(x)`, with an x of the same shape"
            )
        plain = [each.value() if isinstance(each, ArrayOperators) else each for each in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.value()[index]

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())  # without it Python asks for v[0], v[1], ...: of a number there is none

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())


class Assignable(ArrayOperators, ABC):
    """Reads like an array, and is assigned: what every variable is, wherever it is used."""

    __slots__ = ()

    def numpy(self) -> Array:
        """Return the value now, as an array of the caller's own; see `value`."""
        return self.value().copy()

    def assign(self, value: object) -> Any:
        """Set the value; what that means here and what it returns, the class says.

        Args:
            value: an array of the variable's dtype and shape, or Python numbers.

        Raises:
            ValueError: dtype or shape don't fit.
            OverflowError: an integer result does not fit the dtype.
        """
        return self._change("assign", value)

    def assign_add(self, delta: object) -> Any:
        """Add to the value; see `assign`."""
        return self._change("assign_add", delta)

    def assign_sub(self, delta: object) -> Any:
        """Subtract from the value; see `assign`."""
        return self._change("assign_sub", delta)

    @abstractmethod
    def _change(self, how: How, operand: object) -> Any:
        """Assign, add or subtract."""


class AnyVariable(Assignable, TfNames):
    """Tells what a variable was declared as, on whichever side it is used."""

    __slots__ = ()

    _tf_names: ClassVar = {"read_value": "`value()`", "values": "`local_values`"}

    @property
    @abstractmethod
    def _traits(self) -> Traits:
        """What of the variable never changes."""

    @property
    def name(self) -> str:
        """Its name, for people."""
        return self._traits.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its value."""
        return self._traits.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of its value."""
        return self._traits.dtype

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should change it."""
        return self._traits.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """ON_WRITE or ON_READ."""
        return self._traits.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the replicas' values become one."""
        return self._traits.aggregation


class VariableCopy(Assignable):
    """One copy of a variable, while `Strategy.update` lets a function change it.

    Assigning returns the copy's new value, read-only.

    Args:
        traits: the variable's.
        value: the copy's value.
    """

    __slots__ = ("_traits", "_value")

    def __init__(self, traits: Traits, value: Array) -> None:
        self._traits = traits
        self._value = value

    def value(self) -> Array:
        """Return the value now: an array, read-only."""
        return self._value

    def _change(self, how: How, operand: object) -> Array:
        self._value = updated(self._traits, self._value, how, operand_of(self._traits, operand, how))
        return self._value


def update_copies(
    traits: Traits,
    copies: Sequence[Array],
    fn: Callable[..., Tree],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[list[Array], Tree]:
    """Call a function for each copy of a variable (tf.distribute: `extended.update`).

    Args:
        copies: one, where the replicas have one value: then the function is called once.
        fn: called with a `VariableCopy` and the arguments, each copy with its own component of them.

    Returns:
        The copies after that, and what the function returned, with a PerReplica in every place.

    Raises:
        ValueError: the replicas have one value, but an argument has one for each.
    """
    if traits.copies:
        sides = [VariableCopy(traits, copy) for copy in copies]
        results = [
            plain(fn(side, *values.select(tuple(args), at), **values.select(dict(kwargs), at)))
            for at, side in enumerate(sides)
        ]
        return [side.value() for side in sides], values.per_replica(results)
    given = (tuple(args), dict(kwargs))
    for leaf in trees.flatten(given)[0]:
        if isinstance(leaf, PerReplica) and not isinstance(leaf, Mirrored):
            raise ValueError(
                f"update of the {traits.label} with a {type(leaf).__name__}: its replicas have one value, "
                "which would become several. Reduce the argument first, or make the variable on_read"
            )
    side = VariableCopy(traits, copies[0])
    own_args, own_kwargs = values.select(given, 0)
    result = plain(fn(side, *own_args, **own_kwargs))
    return [side.value()], trees.tree_map(lambda leaf: Mirrored([leaf] * traits.replicas), result)


def component(traits: Traits, copies: Sequence[Array], *, mirrored: bool) -> Tree:
    """Return what stands for a variable where values of all replicas are combined.

    Args:
        copies: each replica's value; one, where all have the same.
        mirrored: a PerReplica also where all have the same, unless there is but one place for it.
    """
    if traits.copies:
        return PerReplica(copies)
    return Mirrored([copies[0]] * traits.replicas) if mirrored and not traits.one_place else copies[0]


def plain(result: Tree) -> Tree:
    """Return a tree with arrays in place of what holds one (variables, copies of them)."""
    if type(result) is np.ndarray or result is None:
        return result
    if isinstance(result, ArrayOperators):
        return result.value()
    leaves, treedef = trees.flatten(result)
    if not any(isinstance(leaf, ArrayOperators) for leaf in leaves):
        return result
    return trees.unflatten(
        treedef, [leaf.value() if isinstance(leaf, ArrayOperators) else leaf for leaf in leaves]
    )


class ShardedVariable(Assignable):
    """Consecutive rows of one variable, each shard a variable of its own.

    It reads like an array and is assigned like a variable: NumPy takes it, and rows can be indexed:
    `v[ids]` with an array of row numbers is tf.nn.embedding_lookup, and reads only these rows. Assigning
    gives each shard its rows, and returns None; where the value does not fit, no shard is changed.

    Args:
        name: of the whole.
        shards: at least one, in the order of their rows.
    """

    __slots__ = ("_shards", "_starts", "name")

    def __init__(self, name: str, shards: Sequence[AnyVariable]) -> None:
        self.name = name
        self._shards = tuple(shards)
        self._starts: list[int] | None = None

    @property
    def variables(self) -> tuple[AnyVariable, ...]:
        """The shards, each a variable."""
        return self._shards

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return (self._bounds()[-1], *self._shards[0].shape[1:])

    @property
    def dtype(self) -> Any:
        """The value's dtype."""
        return self._shards[0].dtype

    def value(self) -> Array:
        """Return the whole value, put together: an array, read-only."""
        whole = np.concatenate([shard.value() for shard in self._shards])
        whole.flags.writeable = False
        return whole

    def __getitem__(self, index: Any) -> Any:
        """Return what NumPy's indexing of the whole gives; rows alone are read from their shards."""
        if isinstance(index, SupportsIndex) and not isinstance(index, bool | np.ndarray):
            return self._rows(np.array([operator.index(index)]))[0]
        if isinstance(index, list) or (isinstance(index, np.ndarray) and index.dtype.kind in "iu"):
            rows = np.asarray(index)
            if rows.dtype.kind in "iu":
                return self._rows(rows)
        return self.value()[index]

    def __len__(self) -> int:
        return self._bounds()[-1]

    def __iter__(self) -> Iterator[Array]:
        for shard in self._shards:
            yield from shard.value()

    def __repr__(self) -> str:
        return f"<ShardedVariable {self.name!r} {self.dtype}{list(self.shape)} in {len(self._shards)} shards>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedVariable, (self.name, self._shards)

    def _bounds(self) -> list[int]:
        """Return the first row of each shard, and the number of rows."""
        if self._starts is None:
            self._starts = [0]
            for shard in self._shards:
                self._starts.append(self._starts[-1] + shard.shape[0])
        return self._starts

    def _rows(self, rows: Any) -> Array:
        bounds = np.asarray(self._bounds())
        total = int(bounds[-1])
        places = np.where(rows < 0, rows + total, rows)
        if places.size and not 0 <= int(places.min()) <= int(places.max()) < total:
            raise IndexError(f"a row is out of range: {self!r} has {total} rows")
        owners = np.searchsorted(bounds, places, side="right") - 1
        found = np.empty((*places.shape, *self.shape[1:]), self.dtype)
        for owner in np.unique(owners):
            mine = owners == owner
            found[mine] = self._shards[int(owner)].value()[places[mine] - bounds[owner]]
        return found

    def _change(self, how: How, operand: object) -> None:
        whole = np.asarray(operand)
        if whole.shape != self.shape:
            raise ValueError(f"a value of shape {list(whole.shape)} for {self!r}: the shape must be the same")
        if not isinstance(operand, np.ndarray | ArrayOperators) and np.can_cast(
            whole.dtype, self.dtype, "same_kind"
        ):
            whole = whole.astype(self.dtype)  # plain numbers adapt, as they do to one variable
        elif whole.dtype != self.dtype:
            raise ValueError(f"a value of dtype {whole.dtype} for {self!r}: cast it first")
        bounds = self._bounds()
        for shard, lo, hi in zip(self._shards, bounds, bounds[1:], strict=False):
            shard._change(how, whole[lo:hi])
