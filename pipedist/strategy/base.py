"""The base of all strategies: run functions, combine values, update variables, enter scopes."""

from __future__ import annotations

import inspect
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar, Final
from weakref import WeakValueDictionary

import anyio.lowlevel
import anyio.to_thread
import numpy as np

from pipedist import values
from pipedist.core import trees
from pipedist.core.misuse_hints import AsyncOnly, TfNames
from pipedist.core.types import Tree
from pipedist.reduction.tree import Reduction
from pipedist.strategy import variables
from pipedist.strategy.context import VariableOwner, require_cross_replica, scope_of
from pipedist.strategy.distributed import InputStrategy
from pipedist.strategy.function_references import require_callable
from pipedist.strategy.variables import Variable
from pipedist.values import Mirrored, PerReplica, ReduceOp
from pipedist.worker.context import check_call_arguments
from pipedist.worker.strategy_views import ReplicaStrategy
from pipedist.worker.variables.access import VariableTree
from pipedist.worker.variables.access import component as component_of

_INLINE_BYTES_MAX: Final = 2**20  # larger values are combined in a thread: the event loop feeds workers

_FLAT: Final = frozenset(
    {PerReplica, Variable, np.ndarray, np.float64, np.float32, np.int64, int, float, bool, str}
)
"""Frequent types of arguments that are leaves."""

_NUMBERS: Final = frozenset({int, float, np.float64, np.float32, np.int64})


class BaseStrategy(InputStrategy, VariableOwner, TfNames):
    """Owns R replicas, runs functions on them, and combines the results."""

    _tf_names: ClassVar = {
        "experimental_distribute_dataset": "`distribute_dataset`",
        "experimental_distribute_datasets_from_function": "`distribute_datasets_from_function`",
        "experimental_distribute_values_from_function": "`distribute_values_from_function`",
        "experimental_local_results": "`local_results`",
        "experimental_make_numpy_dataset": "`make_numpy_dataset`",
        "experimental_run_v2": "`run`",
        "extended": "the methods of the strategy itself",
        "unwrap": "`local_results`",
    }

    pickles_identically: ClassVar = True  # one that a function captures always pickles to the same bytes

    def __init__(self, replicas: int, devices: tuple[str, ...] = ()) -> None:
        super().__init__(replicas)
        self._devices = devices
        self.unused_spaces: deque[int] = deque()
        self.made: WeakValueDictionary[int, Any] = WeakValueDictionary()

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each replica, in order of replica id: `ctx.device` in its functions."""
        return self._devices or ("cpu",) * self._replicas

    @abstractmethod
    async def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tree:
        """Call `fn` on every replica: see `pipedist.Strategy.run`."""

    def scope(self) -> AbstractContextManager[BaseStrategy]:
        """Return a context manager that makes this strategy current: `with strategy.scope():`.

        Raises:
            RuntimeError: on entering, if another strategy is current.
        """
        return scope_of(self)

    async def reduce(self, reduce_op: ReduceOp | str, value: Tree, axis: int | Sequence[int] | None) -> Tree:
        """Combine the replicas' values into one (tf.distribute.Strategy.reduce).

        Args:
            reduce_op: a ReduceOp or its name.
            value: a tree with PerReplica leaves. An on_write variable stands for its value, an on_read
                variable for the values of the replicas.
            axis: None: across replicas, element by element; an int, or several: also along these
                axes of every component. MEAN with an axis divides by the true number of rows, with None
                by the number of replicas, empty ones included.

        Returns:
            A tree of the same structure, without PerReplica.

        Raises:
            ValueError: the op is unknown, the axis is out of range, shapes differ, or a plain value has no
                such reduction.
            TypeError: a dtype can't be reduced; the text names the leaf.
            OverflowError: an integer result does not fit its dtype.
            RuntimeError: called inside a replica function.
        """
        require_cross_replica("Strategy.reduce")
        given = self._components(value, mirrored=False)
        whole = values.per_replica([self._only(given)]) if self._identity else given
        if type(whole) is PerReplica and _NUMBERS.issuperset(map(type, whole.components)):
            # quick: the loop need not be checked
            return values.reduce(reduce_op, whole, axis, self._replicas)
        return await _computed(partial(values.reduce, reduce_op, whole, axis, self._replicas), whole)

    def compile(
        self,
        fn: Callable[..., Any],
        *,
        reduce: ReduceOp | str | None = None,
        axis: int | Sequence[int] | None = None,
    ) -> CompiledStep:
        """Bind a replica function, and the reduction of its results, for a training loop.

            step = strategy.compile(loss_fn, reduce="mean")
            async for x in dataset:
                loss = await step(x)

        The result is that of `run`, then `reduce`. With an axis, workers reduce rows before they send results; these
        steps are counted apart from those of `run`, so `ctx.step` and `ctx.rng` are those of a function of its own.

        Args:
            fn: as for `run`.
            reduce: a ReduceOp or its name; None: the results stay per replica.
            axis: as for `reduce`.

        Returns:
            An object that is called as `await step(*args, **kwargs)`, with the arguments of `fn`.

        Raises:
            TypeError: `fn` is not callable, or `axis` has another type.
            ValueError: the op is unknown, or an axis is given without an op.
        """
        return CompiledStep(self._run_reduced, fn, reduce, axis)

    async def _run_reduced(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reduction: Reduction | None,
    ) -> Tree:
        result = await self.run(fn, args, kwargs)
        return result if reduction is None else await self.reduce(reduction.op, result, reduction.axis)

    async def reduce_to(self, reduce_op: ReduceOp | str, value: Tree) -> Tree:
        """Reduce, and give the result to every replica (tf: `extended.reduce_to`).

        Args:
            reduce_op, value: as for `reduce`, with axis None.

        Returns:
            A tree of the same structure with Mirrored leaves; plain leaves if the strategy keeps values
            plain (one_device, default).

        Raises:
            ValueError, TypeError, OverflowError, RuntimeError: as for `reduce`.
        """
        return self.broadcast(await self.reduce(reduce_op, value, axis=None))

    async def batch_reduce_to(self, reduce_op: ReduceOp | str, batch: Sequence[Tree]) -> list[Tree]:
        """Reduce several values with one call (tf: `extended.batch_reduce_to`).

        Args:
            reduce_op: for all of them.
            batch: the values, each as for `reduce_to`.

        Returns:
            The result of `reduce_to` for each.

        Raises:
            ValueError, TypeError, OverflowError, RuntimeError: as for `reduce`; the text names the leaf.
        """
        reduced: list[Tree] = await self.reduce_to(reduce_op, list(batch))
        return reduced

    def broadcast(self, value: Tree) -> Tree:
        """Give every replica the same value (tf: `extended.broadcast_to`).

        Args:
            value: a tree without PerReplica leaves. A variable stands for its value.

        Returns:
            A tree of the same structure with Mirrored leaves; the value itself if the strategy keeps
            values plain.

        Raises:
            ValueError: a leaf is a PerReplica, which has one value per replica already.
            RuntimeError: called inside a replica function.
        """
        require_cross_replica("Strategy.broadcast")
        given = self._components(value, mirrored=False)
        leaves, treedef = trees.flatten(given)
        if any(isinstance(leaf, PerReplica) for leaf in leaves):
            raise ValueError(
                "broadcast of a per-replica value: every replica has one already; reduce it first"
            )
        if self._identity:
            return given
        return trees.unflatten(treedef, [Mirrored([leaf] * self._replicas) for leaf in leaves])

    async def update(
        self,
        variable: Variable,
        fn: Callable[..., Tree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tree:
        """Change a variable by a function, outside of replica functions (tf: `extended.update`).

        Args:
            variable: made in this strategy's scope.
            fn: called in this process as `fn(copy, *args, **kwargs)`, once for each value of the variable:
                once for all replicas, or once for each if the variable is on_read. `copy` has `value`,
                `assign`, `assign_add` and `assign_sub`.
            args, kwargs: a copy of replica r gets component r of a PerReplica in them.

        Returns:
            The results, per replica.

        Raises:
            ValueError: the replicas share one value, and an argument is a PerReplica whose components differ;
                or the number of its components is wrong; or the variable was not made in this strategy's
                scope; or `args` is neither tuple nor list.
            TypeError: `variable` is not a variable, `fn` is not callable, or `kwargs` is not a mapping.
            RuntimeError: called inside a replica function, or while a run uses the variable.
        """
        require_cross_replica("Strategy.update")
        await anyio.lowlevel.checkpoint()
        if not callable(fn):
            raise TypeError(f"update needs a function, not {fn!r} of type {type(fn).__name__}")
        result = self._update(variable, fn, args, kwargs or {})
        return values.select(result, 0) if self._identity else result

    def _update(
        self, variable: Any, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tree:
        return variables.update(self, variable, fn, args, kwargs)

    async def gather(self, value: Tree, axis: int) -> Tree:
        """Concatenate the replicas' values (tf.distribute.Strategy.gather).

        Args:
            value: a tree with PerReplica leaves, of arrays whose shapes differ along `axis` only.
            axis: the axis of concatenation; the order is that of replica ids.

        Returns:
            A tree of the same structure, without PerReplica; the value itself if the strategy keeps
            values plain.

        Raises:
            ValueError: the axis is out of range, or sizes along other axes differ.
            RuntimeError: called inside a replica function.
        """
        require_cross_replica("Strategy.gather")
        given = self._components(value, mirrored=True)
        if self._identity:
            await anyio.lowlevel.checkpoint()
            return self._only(given)
        return await _computed(partial(values.gather, given, axis, self._replicas), given)

    async def save(self, path: str | os.PathLike[str]) -> None:
        """Save the values of all variables of this strategy to a file.

        The file is replaced atomically. It is a `.npz` for `numpy.load`: an array for each variable, by its name;
        the array of an on_read variable has a row per replica.

        Args:
            path: in an existing folder, with any ending.

        Raises:
            ValueError: two variables have the same name.
            OSError: the file can't be written; an earlier one stays.
            RuntimeError: called inside a replica function.
        """
        require_cross_replica("Strategy.save")
        arrays = {name: variable.saved() for name, variable in variables.by_name(self).items()}
        await anyio.to_thread.run_sync(variables.write, Path(path), arrays)

    async def restore(self, path: str | os.PathLike[str]) -> None:
        """Set all variables of this strategy to the values in a file of `save`, with the same bits.

        Names in the file that no variable has are ignored.

        Raises:
            ValueError: the file has no value for a variable, or one of another dtype or shape; no variable
                changes, and the text lists all differences. Or `save` did not make the file, or it is damaged.
            OSError: the file can't be opened.
            RuntimeError: called inside a replica function, or while a run uses a variable.
        """
        require_cross_replica("Strategy.restore")
        named = variables.by_name(self)
        saved, there = await anyio.to_thread.run_sync(variables.read, Path(path), list(named))
        variables.restore(named, saved, there, Path(path))

    def local_results(self, value: Tree) -> tuple[Tree, ...]:
        """Return the value of each replica, as a tuple in order of replica id.

        Args:
            value: a PerReplica, a variable, or a tree of them; a plain value gives a tuple of one, and so
                does a variable of which the strategy keeps one copy.

        Raises:
            ValueError: a PerReplica has another number of components.
            TypeError: a value is a coroutine, because an `await` is missing.
        """
        return values.local_results(self._components(value, mirrored=True), self._replicas)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the replica's view of the strategy, for functions that capture it."""
        return ReplicaStrategy, (self._replicas,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._replicas} replicas>"

    def _only(self, value: Tree) -> Tree:
        """Return the value of the only replica; raise ValueError if the value is that of several."""
        [only] = values.local_results(value, 1)
        return only

    def _joined(self, components: Sequence[Tree]) -> Tree:
        return components[0] if self._identity else values.per_replica(components)

    def _components(self, value: Tree, *, mirrored: bool) -> Tree:
        """Return the value with each variable replaced by its values; if they are one, a Mirrored if `mirrored`."""
        if type(value) is PerReplica:
            return value
        if isinstance(value, VariableTree):
            value = value.variables

        def leaf(item: Any) -> Any:
            if not isinstance(item, Variable):
                if inspect.isawaitable(item):
                    raise TypeError(f"a value is a {type(item).__name__}: `await` it first")
                return item
            return component_of(item._traits, item._copies, mirrored=mirrored)

        return trees.tree_map(leaf, value)

    def _arguments(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        argument: Callable[[Variable], Any] | None = None,
    ) -> list[Tree]:
        """Return the arguments (args, kwargs) of each replica, with `argument(v)` in place of a variable v."""
        check_call_arguments(args, kwargs)
        if args and not kwargs and _FLAT.issuperset(map(type, args)):  # the common case, cheaper
            columns, replicas = [], self._replicas
            for value in args:
                if type(value) is Variable and argument is not None:
                    value = argument(value)
                column = value.components if type(value) is PerReplica else (value,) * replicas
                if len(column) != replicas:
                    break
                columns.append(column)
            else:
                return list(zip(zip(*columns, strict=True), repeat({}, replicas), strict=True))
        leaves, treedef = trees.flatten((tuple(args), dict(kwargs or {})))
        split = False
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, PerReplica):
                split = True
                if len(leaf.components) != self._replicas:
                    raise ValueError(
                        f"an argument has {len(leaf)} components, but this strategy has {self._replicas} "
                        "replicas: it comes from another strategy"
                    )
            elif argument is not None and isinstance(leaf, Variable):
                leaves[place] = argument(leaf)
        if not split:
            return [trees.unflatten(treedef, leaves)] * self._replicas
        columns = [
            leaf.components if isinstance(leaf, PerReplica) else (leaf,) * self._replicas for leaf in leaves
        ]
        return [trees.unflatten(treedef, own) for own in zip(*columns, strict=True)]


class CompiledStep(AsyncOnly):
    """A replica function, and the reduction of its results, as one call: `Strategy.compile`.

        step = strategy.compile(loss_fn, reduce="mean")
        loss = await step(x)

    Args:
        run: calls a function with args and kwargs on every replica, and reduces the results.
        fn, reduce, axis: as for `Strategy.compile`.

    Raises:
        TypeError: `fn` is not callable, or `axis` has another type.
        ValueError: the op is unknown, or an axis is given without an op.
    """

    def __init__(
        self,
        run: Callable[..., Awaitable[Tree]],
        fn: Callable[..., Any],
        reduce: ReduceOp | str | None,
        axis: int | Sequence[int] | None,
    ) -> None:
        require_callable(fn)
        if reduce is None and axis is not None:
            raise ValueError(f"axis is {axis!r}, but there is no reduction: add reduce='sum', or omit axis")
        self._run = run
        self._fn = fn
        self._reduction = None if reduce is None else Reduction.of(reduce, axis)

    async def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        """Call the function on every replica, and reduce the results.

        Args:
            args, kwargs: as for `Strategy.run`.

        Returns:
            The value of `Strategy.reduce`, with the same bits; without a reduction that of `Strategy.run`.

        Raises:
            TypeError, ValueError, OverflowError, CallError, RuntimeError: as `Strategy.run` and `Strategy.reduce`.
        """
        return await self._run(self._fn, args, kwargs, self._reduction)

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", type(self._fn).__qualname__)
        return f"<CompiledStep {name}>"


async def _computed(compute: Callable[[], Tree], value: Tree) -> Tree:
    """Compute in the event loop if the value is small, else in a thread."""
    if bytes_of(value) <= _INLINE_BYTES_MAX:
        # Does not yield to the event loop: the `run` of each step does.
        await anyio.lowlevel.checkpoint_if_cancelled()
        return compute()
    return await anyio.to_thread.run_sync(compute)


def bytes_of(value: Tree) -> int:
    size = 0
    for leaf in (value,) if type(value) is PerReplica else trees.flatten(value)[0]:
        for component in leaf.components if isinstance(leaf, PerReplica) else (leaf,):
            size += getattr(component, "nbytes", 0)
    return size
