"""Variables as arrays: base classes, sharded variables, and the copies that `Strategy.update` changes."""

from __future__ import annotations

import inspect
import operator
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, SupportsIndex

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from pipedist import values
from pipedist.core import trees
from pipedist.core.misuse_hints import TfNames
from pipedist.core.names import few
from pipedist.core.types import Tree
from pipedist.values import Mirrored, PerReplica
from pipedist.worker.context import check_call_arguments, get_replica_context
from pipedist.worker.variables.rules import (
    Array,
    AssignMethod,
    Traits,
    VariableAggregation,
    VariableSynchronization,
    operand_of,
    updated,
)


class ArrayOperators(NDArrayOperatorsMixin):
    """Lets NumPy use an object as an array: `x @ w`, `np.dot(x, w)`, `w + 1`."""

    __slots__ = ()

    def value(self) -> Array:
        """Return the current value, a read-only array."""
        raise TypeError(f"{type(self).__name__} holds no value")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        value = np.asarray(self.value())  # an array that JAX traces raises its error
        if dtype is not None and np.dtype(dtype) != value.dtype:
            return value.astype(dtype)
        return value.copy() if copy else value

    def __jax_array__(self) -> Any:
        return self.value()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        changed = inputs[:1] if method == "at" else kwargs.get("out", ())  # read-only or writable
        if any(isinstance(each, ArrayOperators) for each in changed):
            raise TypeError(
                f"a {type(self).__name__} can't be changed in place, as in `w += x` or `np.add.at(w, i, x)`: "
                "write `w.assign_add(x)`, with an x of the same shape"
            )
        plain = [each.value() if isinstance(each, ArrayOperators) else each for each in inputs]
        if method == "__call__" and not isinstance(self.value(), np.ndarray):
            return getattr(self.value().__array_namespace__(), ufunc.__name__)(*plain, **kwargs)
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.value()[index]

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())  # Python would use v[0], v[1], ... instead, which a number does not have

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())


class Assignable(ArrayOperators, ABC):
    """The base of all variables: reads like an array, and can be assigned."""

    __slots__ = ()

    def numpy(self) -> Array:
        """Return a writable copy of the current value; see `value`."""
        return self.value().copy()

    def assign(self, value: object) -> Any:
        """Set the value. The subclass defines the time of effect, and the result.

        Args:
            value: an array of the variable's dtype and shape, or Python numbers.

        Raises:
            ValueError: dtype or shape differ.
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
    def _change(self, method: AssignMethod, operand: object) -> Any: ...

    def _check(self, method: AssignMethod, operand: object) -> None:
        """Raise the errors of `_change`, as far as they depend on dtype and shape."""


class AnyVariable(Assignable, TfNames):
    """A variable with its declared properties, in the driver or a worker."""

    __slots__ = ()

    _tf_names: ClassVar = {
        "read_value": "`value()`",
        "values": "`local_values`",
        "scatter_add": "`d = np.zeros(w.shape, w.dtype)`, `np.add.at(d, rows, x)`, `w.assign_add(d)`",
        "scatter_sub": "`d = np.zeros(w.shape, w.dtype)`, `np.add.at(d, rows, x)`, `w.assign_sub(d)`",
    }

    @property
    @abstractmethod
    def _traits(self) -> Traits: ...

    def _check(self, method: AssignMethod, operand: object) -> None:
        operand_of(self._traits, operand, method)

    @property
    def name(self) -> str:
        """Name: in errors, and in the file of `Strategy.save`."""
        return self._traits.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self._traits.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the value."""
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
        """The aggregation of the replicas' values."""
        return self._traits.aggregation


class VariableCopy(Assignable):
    """A copy of a variable, which the function of `Strategy.update` may change.

    Assignments return the copy's new value, read-only.
    """

    __slots__ = ("_traits", "_value")

    def __init__(self, traits: Traits, value: Array) -> None:
        self._traits = traits
        self._value = value

    def value(self) -> Array:
        return self._value

    def _change(self, method: AssignMethod, operand: object) -> Array:
        self._value = updated(self._traits, self._value, method, operand_of(self._traits, operand, method))
        return self._value


def update_copies(
    traits: Traits,
    copies: Sequence[Array],
    fn: Callable[..., Tree],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[list[Array], Tree]:
    """Call a function for each copy of a variable (StrategyExtended.update).

    Return the new copies, and the results with PerReplica leaves. If all replicas have the same value, there is one
    copy and one call, and an argument that differs among the replicas raises ValueError.
    """
    check_call_arguments(args, kwargs)
    given = (tuple(args), dict(kwargs))
    distributed = [leaf for leaf in trees.flatten(given)[0] if isinstance(leaf, PerReplica)]
    for leaf in distributed:
        values.check_length(leaf, traits.replicas)
    if traits.copies:
        sides = [VariableCopy(traits, copy) for copy in copies]
        results = [
            plain(fn(side, *values.select(given[0], at), **values.select(given[1], at)))
            for at, side in enumerate(sides)
        ]
        return [side.value() for side in sides], values.per_replica(results)
    for leaf in distributed:
        if not isinstance(leaf, Mirrored) and not _is_one_value(leaf):
            raise ValueError(
                f"update of the {traits.label} with a {type(leaf).__name__} whose components differ: all replicas "
                "have the same value, which would become different ones. Reduce the argument first, as in "
                "strategy.reduce('sum', value, axis=None), or make the variable on_read"
            )
    side = VariableCopy(traits, copies[0])
    own_args, own_kwargs = values.select(given, 0)
    result = plain(fn(side, *own_args, **own_kwargs))
    return [side.value()], trees.tree_map(lambda leaf: Mirrored([leaf] * traits.replicas), result)


def _is_one_value(value: PerReplica) -> bool:
    """Return whether all components have the same bits, as those of an `all_reduce` in merge_call."""
    (leaves, treedef), *others = map(trees.flatten, value)
    return all(other == treedef and [*map(_bits, own)] == [*map(_bits, leaves)] for own, other in others)


def _bits(leaf: Any) -> tuple[Any, ...]:
    array = np.asarray(leaf)
    return array.dtype, array.shape, array.tobytes()


@dataclass(frozen=True, eq=False)
class VariableTree:
    """A tree of variables that is read and assigned as one value.

    `pipedist.Variable` makes it of a dict, with one variable for each array. A function uses it like a variable.

    Args:
        variables: the variables in their dicts, lists and tuples; `tree[key]` is a part of them.

    Example:
        w = pipedist.Variable({"kernel": np.zeros((3, 2)), "bias": np.zeros(2)}, aggregation="sum")
        w.assign_sub({"kernel": dk, "bias": db})
        w["kernel"].value(), w.value()["bias"]
    """

    variables: Tree

    if not TYPE_CHECKING:

        @property
        def __array_interface__(self) -> NoReturn:  # not `__array__`: a class that has it is no tree
            raise TypeError(f"{_SEVERAL} and is no array. Use one of them, as in tree[KEY], or tree.value()")

        def _operate(self, *_: Any) -> NoReturn:
            raise TypeError(
                f"{_SEVERAL} and has no arithmetic. Compute with the arrays of tree.value(), or with one variable, "
                "tree[KEY]; tree.assign_add(...) adds to all of them"
            )

        __array_ufunc__ = None  # NumPy's arrays leave arithmetic to the tree
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operate
        __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = _operate

    def __getitem__(self, key: Any) -> Any:
        return self.variables[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.variables)

    def value(self) -> Tree:
        """Return the current values, read-only arrays, in the same structure."""
        return trees.tree_map(lambda variable: variable.value(), self.variables)

    def numpy(self) -> Tree:
        """Return writable copies of the current values."""
        return trees.tree_map(lambda variable: variable.numpy(), self.variables)

    def assign(self, value: Tree) -> Any:
        """Set all values, each as by the `assign` of its variable; none if one of them does not fit.

        Args:
            value: a tree of the same structure.

        Returns:
            None, or a tree of the new values, as `assign` of the variables; in an async function, an awaitable of it.

        Raises:
            ValueError: structure, dtype or shape differ.
            OverflowError: an integer result does not fit its dtype.
        """
        return self._change("assign", value)

    def assign_add(self, delta: Tree) -> Any:
        """Add to all values; see `assign`."""
        return self._change("assign_add", delta)

    def assign_sub(self, delta: Tree) -> Any:
        """Subtract from all values; see `assign`."""
        return self._change("assign_sub", delta)

    def _change(self, method: AssignMethod, operand: Tree) -> Any:
        given = operand.value() if isinstance(operand, VariableTree) else operand
        variables, treedef = trees.flatten(self.variables)
        operands, structure = trees.flatten(given)
        if structure != treedef:
            raise ValueError(_unlike(method, treedef, structure))
        if get_replica_context() is None:  # a replica function that raises assigns nothing anyway
            for variable, own in zip(variables, operands, strict=True):
                variable._check(method, own)
        results = [variable._change(method, own) for variable, own in zip(variables, operands, strict=True)]
        if any(map(inspect.isawaitable, results)):
            return _awaited(treedef, results)
        return None if results[0] is None else trees.unflatten(treedef, results)


_SEVERAL = "a VariableTree has several variables,"


def _unlike(method: str, treedef: trees.Treedef, given: trees.Treedef) -> str:
    """Return the error of an operand whose structure is not that of the variables."""
    own, found = trees.treedef_paths(treedef), trees.treedef_paths(given)
    lists = {
        "lacks": [path for path in own if path not in found],
        "has, without a variable,": [path or "a single value" for path in found if path not in own],
    }
    parts = [f"{verb} {few([*map(repr, paths)], _PATHS_SHOWN)}" for verb, paths in lists.items() if paths]
    if not parts:
        parts = [f"has {trees.excerpt(given)}, and the variables {trees.excerpt(treedef)}"]
    return (
        f"{method} of a VariableTree: its operand {' and '.join(parts)}. Give a tree with the structure of "
        f"tree.value(), or change one variable with tree[KEY].{method}(...)"
    )


_PATHS_SHOWN = 4


async def _awaited(treedef: trees.Treedef, results: Sequence[Awaitable[Array]]) -> Tree:
    return trees.unflatten(treedef, [await result for result in results])


def component(traits: Traits, copies: Sequence[Array], *, mirrored: bool) -> Tree:
    """Return a variable's values on all replicas (one if all have the same), for combining them.

    With `mirrored`, return a PerReplica even then, unless the strategy has a single copy.
    """
    if traits.copies:
        return PerReplica(copies)
    return Mirrored([copies[0]] * traits.replicas) if mirrored and not traits.one_place else copies[0]


def plain(result: Tree) -> Tree:
    """Return a tree with arrays in place of variables and their copies."""
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
    """A variable whose rows are divided into shards (tf's ShardedVariable).

    NumPy can use it as an array, and rows can be indexed: `v[ids]` with an array of row numbers is
    tf.nn.embedding_lookup, and reads only these rows. Assignments set the rows of each shard, and return None; if
    the value does not fit, no shard is changed.

    Args:
        name: of the variable.
        shards: at least one, in the order of their rows.

    Example:
        rows = embeddings[ids]  # reads the rows from the shards that have them
    """

    __slots__ = ("_shards", "_starts", "name")

    def __init__(self, name: str, shards: Sequence[AnyVariable]) -> None:
        self.name = name
        self._shards = tuple(shards)
        self._starts: list[int] | None = None

    @property
    def variables(self) -> tuple[AnyVariable, ...]:
        """The shards."""
        return self._shards

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return (self._bounds()[-1], *self._shards[0].shape[1:])

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        return self._shards[0].dtype

    def value(self) -> Array:
        """Return the concatenated values of the shards, a read-only array."""
        whole = np.concatenate([shard.value() for shard in self._shards])
        whole.flags.writeable = False
        return whole

    def __getitem__(self, index: Any) -> Any:
        """Index the value like NumPy. Whole rows are read from their shards only."""
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
            raise IndexError(f"row out of range: {self!r} has {total} rows")
        owners = np.searchsorted(bounds, places, side="right") - 1
        found = np.empty((*places.shape, *self.shape[1:]), self.dtype)
        for owner in np.unique(owners):
            mine = owners == owner
            found[mine] = self._shards[int(owner)].value()[places[mine] - bounds[owner]]
        return found

    def _change(self, method: AssignMethod, operand: object) -> None:
        whole = np.asarray(operand)
        if whole.shape != self.shape:
            raise ValueError(f"a value of shape {list(whole.shape)} for {self!r}: the shape must be the same")
        if not isinstance(operand, np.ndarray | ArrayOperators) and np.can_cast(
            whole.dtype, self.dtype, "same_kind"
        ):
            whole = whole.astype(self.dtype)  # Python numbers are converted, as for one variable
        elif whole.dtype != self.dtype:
            raise ValueError(f"a value of dtype {whole.dtype} for {self!r}: cast it first")
        bounds = self._bounds()
        for shard, lo, hi in zip(self._shards, bounds, bounds[1:], strict=False):
            shard._change(method, whole[lo:hi])
