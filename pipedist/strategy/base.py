"""What all strategies can do: run functions, combine values, change variables, be current."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Final

import anyio.lowlevel
import anyio.to_thread
import numpy as np

from pipedist import values
from pipedist.core import trees
from pipedist.core.misuse_hints import TfNames
from pipedist.core.types import Tree
from pipedist.strategy import variables
from pipedist.strategy.context import require_cross_replica, scope_of
from pipedist.strategy.inputs import InputStrategy
from pipedist.strategy.variables import Variable
from pipedist.values import Mirrored, PerReplica, ReduceOp
from pipedist.worker.strategy_views import ReplicaStrategy
from pipedist.worker.variables.access import component as component_of

_INLINE_BYTES_MAX: Final = 2**20
"""Larger values are combined in a thread: the loop that feeds the workers must not stand still."""


_TF_NAMES: Final = {
    "experimental_distribute_dataset": "`distribute_dataset`",
    "experimental_distribute_datasets_from_function": "`distribute_datasets_from_function`",
    "experimental_distribute_values_from_function": "`distribute_values_from_function`",
    "experimental_local_results": "`local_results`",
    "experimental_make_numpy_dataset": "`make_numpy_dataset`",
    "experimental_run_v2": "`run`",
    "extended": "its methods stand on the strategy itself",
    "unwrap": "`local_results`",
}


class BaseStrategy(InputStrategy, TfNames):
    """Owns R replicas: runs functions on them, and combines what they return."""

    _tf_names: ClassVar = _TF_NAMES

    pickled_alike: ClassVar = True
    """In a function it is pickled to the same bytes at any time."""

    _is_default: ClassVar = False
    """The strategy outside of every scope: nothing of it leaves this process."""

    def __init__(self, replicas: int, devices: tuple[str, ...] = ()) -> None:
        super().__init__(replicas)
        self._devices = devices
        self._forgotten: deque[int] = deque()
        """Spaces of variables that nobody has any more."""

    @property
    def devices(self) -> tuple[str, ...]:
        """What each replica computes on, in order of replica id: `ctx.device` of its functions."""
        return self._devices or ("cpu",) * self._replicas

    def _make_variable(self, *_args: Any, **_options: Any) -> object | None:
        """Return a variable of the strategy's own kind; None: it has none but `pipedist.Variable`.

        Args: those of `pipedist.Variable`.
        """
        return None

    @property
    def _variables_in_one_place(self) -> bool:
        """Whether there is one copy of every variable, an on_read one too."""
        return self._identity

    @abstractmethod
    async def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tree:
        """Call `fn` on every replica.

        It runs in worker processes, on copies of what it captures: what it changes there, other than by
        returning it or assigning to a `pipedist.Variable`, is lost.

        Where it is cancelled, the workers still do the step, and nothing of it counts; the next run that uses
        variables begins after it. A step that hangs ends with its workers: `LocalCluster.restart`.

        Args:
            fn: a replica function, sync or async; with a parameter named `ctx` it also gets the
                ReplicaContext.
            args, kwargs: its arguments; each replica gets its own component wherever a PerReplica
                stands in them, and a copy of everything else. Arrays arrive read-only.

        Returns:
            What it returned, in its structure, with every leaf a PerReplica; None stays None.

        Raises:
            TypeError: `fn` can't be called, `kwargs` is no mapping, or an argument can't be sent to
                workers (UnsendableError, which names its place).
            ValueError: `args` is neither tuple nor list; an argument has another number of components
                than there are replicas; or the replicas returned different structures (the text shows
                two).
            CallError: `fn` raised; of several replicas, the lowest one's exception is `__cause__`.
            RuntimeError: called inside a replica function.
        """

    def scope(self) -> AbstractContextManager[BaseStrategy]:
        """Return a context manager that makes this strategy current: `with strategy.scope():`.

        Raises:
            RuntimeError: on entering, where another strategy is current.
        """
        return scope_of(self)

    async def reduce(self, reduce_op: ReduceOp | str, value: Tree, axis: int | Sequence[int] | None) -> Tree:
        """Combine the replicas' values to one (tf.distribute.Strategy.reduce).

        Args:
            reduce_op: a ReduceOp or its name.
            value: a tree with PerReplica leaves. An on_write variable counts as its value, an on_read
                one as what each replica has.
            axis: None: across replicas, element by element; an int, or several: also along these
                axes of every component. It must be said; MEAN with an axis divides by the true
                number of rows, with None by the number of replicas, empty ones included.

        Returns:
            A tree of the same structure, without PerReplica.

        Raises:
            ValueError: there is no such op or axis, shapes don't fit, or SUM of a plain value.
            TypeError: a dtype can't be reduced; the text names the leaf.
            OverflowError: an integer result does not fit its dtype.
            RuntimeError: called inside a replica function.
        """
        require_cross_replica("Strategy.reduce")
        given = self._components(value, mirrored=False)
        whole = values.per_replica([self._own(given)]) if self._identity else given
        return await _computed(partial(values.reduce, reduce_op, whole, axis, self._replicas), whole)

    async def reduce_to(self, reduce_op: ReduceOp | str, value: Tree) -> Tree:
        """Combine the replicas' values, and give the result to every replica (`extended.reduce_to`).

        Args:
            reduce_op, value: as for `reduce`, with axis None.

        Returns:
            A tree of the same structure whose leaves are Mirrored; of a strategy whose values are its
            one replica's own, plain.

        Raises:
            ValueError, TypeError, OverflowError, RuntimeError: as for `reduce`.
        """
        return self.broadcast(await self.reduce(reduce_op, value, axis=None))

    async def batch_reduce_to(self, reduce_op: ReduceOp | str, batch: Sequence[Tree]) -> list[Tree]:
        """Combine several values at once (`extended.batch_reduce_to`).

        Args:
            reduce_op: for all of them.
            batch: the values, each as for `reduce_to`.

        Returns:
            What `reduce_to` gives for each.

        Raises:
            ValueError, TypeError, OverflowError, RuntimeError: as for `reduce`; the text names the place.
        """
        reduced: list[Tree] = await self.reduce_to(reduce_op, list(batch))
        return reduced

    def broadcast(self, value: Tree) -> Tree:
        """Give every replica the same value (`extended.broadcast_to`).

        Args:
            value: a tree without PerReplica leaves. A variable counts as its value.

        Returns:
            A tree of the same structure whose leaves are Mirrored; of a strategy whose values are its
            one replica's own, the value.

        Raises:
            ValueError: there is a PerReplica in it: it has a value for each replica already.
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
        """Let a function change a variable outside of replica functions (`extended.update`).

        Args:
            variable: made in this strategy's scope.
            fn: called here as `fn(copy, *args, **kwargs)`, once for each value that the variable has:
                once for all replicas, or, if it is on_read, for each. `copy` has `value`, `assign`,
                `assign_add` and `assign_sub`.
            args, kwargs: of a PerReplica in them each replica's copy gets its component.

        Returns:
            What it returned, per replica.

        Raises:
            ValueError: the replicas have one value, and an argument has one for each, which is not
                Mirrored; or it does not fit; or the variable was made in no scope, or another strategy's.
            TypeError: `variable` is no variable, or `fn` can't be called.
            RuntimeError: called inside a replica function, or while a run uses the variable.
        """
        require_cross_replica("Strategy.update")
        await anyio.lowlevel.checkpoint()
        if not callable(fn):
            raise TypeError(f"update needs a function, not {fn!r} of type {type(fn).__name__}")
        result = self._update(variable, fn, args, kwargs or {})
        return self._own(result) if self._identity else result

    def _update(
        self, variable: Any, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tree:
        return variables.update(self, variable, fn, args, kwargs)

    async def gather(self, value: Tree, axis: int) -> Tree:
        """Put the replicas' values end to end (tf.distribute.Strategy.gather).

        Args:
            value: a tree with PerReplica leaves, of arrays whose shapes differ along `axis` only.
            axis: the axis along which they are put together, in order of replica id.

        Returns:
            A tree of the same structure, without PerReplica. A strategy whose values are its one
            replica's own returns the value as it is.

        Raises:
            ValueError: there is no such axis, or shapes don't fit.
            RuntimeError: called inside a replica function.
        """
        require_cross_replica("Strategy.gather")
        given = self._components(value, mirrored=True)
        if self._identity:
            await anyio.lowlevel.checkpoint()
            return self._own(given)
        return await _computed(partial(values.gather, given, axis, self._replicas), given)

    def local_results(self, value: Tree) -> tuple[Tree, ...]:
        """Return what each replica has, as a tuple in order of replica id.

        Args:
            value: a PerReplica, a variable, or a tree of them; a plain value gives a tuple of one, and so
                does a variable that the strategy keeps in one place.

        Raises:
            ValueError: a PerReplica has another number of components.
            TypeError: a value is a coroutine: an `await` is missing.
        """
        return values.local_results(self._components(value, mirrored=True), self._replicas)

    def __reduce__(self) -> tuple[Any, ...]:
        """A strategy that a replica function has captured arrives there as its replica's side of it."""
        return ReplicaStrategy, (self._replicas,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._replicas} replicas>"

    def _joined(self, components: Sequence[Tree]) -> Tree:
        if self._identity:
            return components[0]
        if all(type(component) in _LEAVES for component in components):
            return PerReplica(components)  # the common case, cheaper
        return values.per_replica(components)

    def _own(self, value: Tree) -> Tree:
        return values.select(value, 0)

    def _components(self, value: Tree, *, mirrored: bool) -> Tree:
        """Return a value with what the replicas have in place of variables.

        Args:
            mirrored: also where all have the same, which is a plain value otherwise.
        """
        if type(value) is PerReplica:
            return value

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
        """Return what each replica is called with: (args, kwargs).

        Args:
            argument: what travels in place of a variable; None: the variable.
        """
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"args is {args!r} of type {type(args).__name__}; expected a tuple: args=(value,)"
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs is {kwargs!r} of type {type(kwargs).__name__}; expected a dict")
        if not kwargs and all(type(arg) in _ARGUMENTS for arg in args):  # the common case, cheaper
            self._check_components(args)
            return [
                (tuple([arg[replica] if type(arg) is PerReplica else arg for arg in args]), {})
                for replica in range(self._replicas)
            ]
        leaves, treedef = trees.flatten((tuple(args), dict(kwargs or {})))
        self._check_components(leaves)
        split = False
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, PerReplica):
                split = True
            elif argument is not None and isinstance(leaf, Variable):
                leaves[place] = argument(leaf)
        if not split:
            return [trees.unflatten(treedef, leaves)] * self._replicas
        return [
            trees.unflatten(
                treedef, [leaf[replica] if isinstance(leaf, PerReplica) else leaf for leaf in leaves]
            )
            for replica in range(self._replicas)
        ]

    def _check_components(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, PerReplica) and len(leaf) != self._replicas:
                raise ValueError(
                    f"an argument has {len(leaf)} components, but this strategy has {self._replicas} "
                    "replicas: it comes from another strategy"
                )


_LEAVES: Final = frozenset({np.ndarray, int, float, bool, str, bytes, complex})
"""Types of results that are leaves, and not None."""

_ARGUMENTS: Final = _LEAVES | {PerReplica}
"""Types of arguments that are leaves, and travel as they are."""


async def _computed(compute: Callable[[], Tree], value: Tree) -> Tree:
    """Compute on the loop if the value is small, else in a thread."""
    if _bytes_of(value) <= _INLINE_BYTES_MAX:
        # No more than a look: a step's barrier, where the loop has its turn, comes with its `run`.
        await anyio.lowlevel.checkpoint_if_cancelled()
        return compute()
    return await anyio.to_thread.run_sync(compute)


def _bytes_of(value: Tree) -> int:
    size = 0
    for leaf in (value,) if type(value) is PerReplica else trees.flatten(value)[0]:
        for component in leaf if isinstance(leaf, PerReplica) else (leaf,):
            size += getattr(component, "nbytes", 0)
    return size
