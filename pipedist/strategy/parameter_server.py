"""The parameter server's strategy and variables (tf.distribute.ParameterServerStrategy).

Closures commit in the order in which they were scheduled. Version j of all variables is their value after
the first j closures have committed. Closure k, with a staleness of S, reads version k - S, or a later one
that the program had observed when it scheduled the closure: the version read never depends on the speed of
closures. A variable keeps all versions that may still be read; they share unchanged arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, Protocol

from pipedist.core import trees
from pipedist.core.arguments import check_int
from pipedist.core.types import Tree
from pipedist.datasets.input import InputOptions
from pipedist.datasets.logical import Dataset
from pipedist.errors import UsageError
from pipedist.strategy.context import NotForReplicas, require_outside
from pipedist.strategy.partitioners import shard_sizes
from pipedist.strategy.per_worker import ReplicatedDataset
from pipedist.strategy.replicated import ClusterLike, Strategy
from pipedist.worker.variables.access import AnyVariable, ShardedVariable, update_copies
from pipedist.worker.variables.closures import Change, ClosureVariable, SentVariable
from pipedist.worker.variables.rules import (
    Array,
    AssignMethod,
    Traits,
    VariableSynchronization,
    declare,
    first_value,
    operand_of,
    updated,
)


class CommitOrder:
    """The number of committed closures, and the part of it that the program has observed."""

    def __init__(self) -> None:
        self.committed = 0  # closures before this number have committed; the latest version of the variables
        self.observed = 0  # the latest version that the program has observed
        self.oldest_readable = 0  # closures that are not sent yet read this version or a later one

    def observe_latest(self) -> None:
        self.observed = self.committed

    def observe(self, number: int) -> None:
        """Record that the program has seen closure `number` committed."""
        self.observed = max(self.observed, min(number + 1, self.committed))


class ParameterVariable(AnyVariable):
    """A variable of a parameter server; made by `pipedist.Variable` in the strategy's scope.

    Outside of closures it has its latest value, and is assigned immediately, which returns None: call
    `join` first if the order matters. In a closure that captures it or gets it as an argument, it is a
    `pipedist.worker.variables.closures.ClosureVariable`.

    Args:
        number: unique in its strategy.
        parameter_server: the number of the parameter server that holds it.
    """

    __slots__ = ("__weakref__", "_order", "_traits", "_versions", "number", "parameter_server")

    _traits: Traits

    def __init__(
        self, order: CommitOrder, number: int, traits: Traits, value: Array, parameter_server: int
    ) -> None:
        self.parameter_server = parameter_server
        self._order = order
        self.number = number
        self._traits = traits
        self._versions: deque[tuple[int, Array]] = deque([(order.committed, value)])
        """(version, value) of every change, from the oldest version that may still be read."""

    def value(self) -> Array:
        """Return the latest value, read-only: that after all committed closures."""
        self._order.observe_latest()
        return self._versions[-1][1]

    def __repr__(self) -> str:
        return f"<ParameterVariable {self._traits.label} on parameter server {self.parameter_server}>"

    def __reduce__(self) -> tuple[Any, ...]:
        captured = _captured.get()
        if captured is None:
            raise NotForReplicas(
                f"the {self._traits.label} is a parameter server's: only closures of "
                "ClusterCoordinator.schedule can use it"
            )
        captured[self.number] = self
        return ClosureVariable, (self.number,)

    def update(
        self, order: CommitOrder, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tree:
        """Change the value by a function: see `BaseStrategy.update`; `order` is that of its strategy."""
        if not self.is_of(order):
            raise ValueError(
                f"the {self._traits.label} belongs to another strategy: call `update` of that one"
            )
        before = self.value()
        [after], result = update_copies(self._traits, [before], fn, args, kwargs)
        if after is not before:
            self.assign(after)
        return result

    def saved(self) -> Array:
        """Return the value for a file, see `Strategy.save`."""
        return self.latest

    restored = AnyVariable.assign

    def require_unused(self) -> None:
        """Do nothing: closures read versions, which stay."""

    def is_of(self, order: CommitOrder) -> bool:
        """Return whether the variable belongs to the strategy with this commit order."""
        return self._order is order

    def as_of(self, version: int) -> SentVariable:
        """Return the value that is sent to a closure which reads a version."""
        value = next(value for since, value in reversed(self._versions) if since <= version)
        return SentVariable(self._traits.to_wire(), value)

    def after(self, value: Array, method: AssignMethod, operand: object) -> Array:
        return updated(self._traits, value, method, operand_of(self._traits, operand, method))

    @property
    def latest(self) -> Array:
        """The latest value; reading it does not count as observed by the program."""
        return self._versions[-1][1]

    def put(self, version: int, value: Array) -> None:
        """Set the value from a version on, and drop versions that can't be read any more."""
        while self._versions and self._versions[-1][0] >= version:
            self._versions.pop()
        self._versions.append((version, value))
        while len(self._versions) > 1 and self._versions[1][0] <= self._order.oldest_readable:
            self._versions.popleft()

    def _change(self, method: AssignMethod, operand: object) -> None:
        require_outside("assigning to a parameter server's variable", "capture it in a closure instead")
        new = self.after(self.latest, method, operand)
        self._order.observe_latest()
        self.put(self._order.committed, new)


def apply(variables: dict[int, ParameterVariable], changes: Sequence[Change], version: int) -> None:
    """Apply all changes of a closure, or none; they make a version of its variables."""
    new: dict[int, Array] = {}
    for number, method, operand in changes:
        variable = variables[number]
        new[number] = variable.after(new.get(number, variable.latest), method, operand)
    for number, value in new.items():
        variables[number].put(version, value)


_captured: ContextVar[dict[int, ParameterVariable] | None] = ContextVar("pipedist_captured", default=None)
"""Set while a closure's function is pickled."""


@contextmanager
def capturing() -> Iterator[dict[int, ParameterVariable]]:
    """Collect the variables that a function captures, by number, while it is pickled."""
    captured: dict[int, ParameterVariable] = {}
    token = _captured.set(captured)
    try:
        yield captured
    finally:
        _captured.reset(token)


class WorkerCluster(ClusterLike, Protocol):
    """A cluster with a configured number of workers."""

    @property
    def workers(self) -> int: ...


class ParameterServerStrategy(Strategy):
    """Workers that read and change shared variables asynchronously.

    Functions are scheduled by a `pipedist.ClusterCoordinator`. Each runs on one replica, and values are
    plain. The variables live in this process; a worker receives their values with a closure, and returns
    its assignments.

    Args:
        cluster: an open cluster.
        variable_partitioner: returns the number of shards of a variable's first axis from its shape and
            dtype, such as `pipedist.MinSizePartitioner(256 << 10, 4)`; None: variables are not sharded.
            Scalars are never sharded.
        parameter_servers: number of logical parameter servers, to which variables and shards are assigned
            round robin; `parameter_server` of a variable is its number. All are in this process, so the
            number changes no value.
        workers: number of logical workers, among which per-worker datasets are divided; None: the number of
            the cluster's worker processes. Set it if results must not depend on that number.
        seed: as for `Strategy`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or is out of range.

    Example:
        async with pipedist.LocalCluster(workers=4) as cluster:
            strategy = pipedist.ParameterServerStrategy(cluster)
            with strategy.scope():
                w = pipedist.Variable(np.zeros(3))
            async with pipedist.ClusterCoordinator(strategy) as coordinator:
                for _ in range(100):
                    await coordinator.schedule(lambda: w.assign_add(gradient(w)))
    """

    _identity: ClassVar = True
    _variables_in_one_place: ClassVar = True

    def __init__(
        self,
        cluster: WorkerCluster,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        parameter_servers: int = 1,
        workers: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(cluster, 1, seed=seed)
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise TypeError(f"variable_partitioner is {variable_partitioner!r}; expected a partitioner")
        self._partitioner = variable_partitioner
        self._servers = check_int("parameter_servers", parameter_servers, at_least=1)
        self._workers = check_int("workers", cluster.workers if workers is None else workers, at_least=1)
        self._placed = 0
        self._has_coordinator = False
        self._order = CommitOrder()  # commit order of the closures; the coordinator writes it

    @property
    def workers(self) -> int:
        """The number of logical workers."""
        return self._workers

    def create_variable(
        self,
        initial_value: object,
        *,
        trainable: bool | None = None,
        name: str = "variable",
        dtype: object = None,
        synchronization: object = VariableSynchronization.AUTO,
        aggregation: object = None,
    ) -> ParameterVariable | ShardedVariable:
        """Return a new variable, sharded as the partitioner requires.

        `pipedist.Variable` calls it in the strategy's scope.

        Args:
            initial_value, trainable, name, dtype: as for `pipedist.Variable`.
            synchronization, aggregation: checked, but without effect: there is one replica.

        Raises:
            ValueError, TypeError: as for `pipedist.Variable`; or the partitioner did not return a list of
                ones, of which only the first may be larger.
        """
        require_outside("creating a variable", "create it outside, and use it inside")
        value = first_value(initial_value, dtype, name)
        traits_of = partial(
            declare,
            trainable=trainable,
            synchronization=synchronization,
            aggregation=aggregation,
            replicas=1,
            one_place=True,
        )
        shards = self._shards_of(value)
        if shards == 1:
            return self._placed_variable(traits_of(value, name=name), value)
        parts, first = [], 0
        for index, rows in enumerate(shard_sizes(len(value), shards)):
            part = value[first : first + rows]
            first += rows
            parts.append(self._placed_variable(traits_of(part, name=f"{name}/part_{index}"), part))
        return ShardedVariable(name, parts)

    def _attach_coordinator(self) -> None:
        """Record that the strategy has a coordinator, or raise UsageError if it has one already."""
        if self._has_coordinator:
            raise UsageError(f"{self!r} has a ClusterCoordinator already: use that one")
        self._has_coordinator = True

    def _make_variable(self, *args: Any, **options: Any) -> ParameterVariable | ShardedVariable:
        return self.create_variable(*args, **options)

    def _update(
        self, variable: Any, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tree:
        if isinstance(variable, ShardedVariable):
            raise TypeError(f"can't update {variable!r} as a whole: update each of its `variables`")
        if not isinstance(variable, ParameterVariable):
            return super()._update(variable, fn, args, kwargs)
        return variable.update(self._order, fn, args, kwargs)

    def _components(self, value: Tree, *, mirrored: bool) -> Tree:
        plain = trees.tree_map(
            lambda leaf: leaf.value() if isinstance(leaf, ParameterVariable | ShardedVariable) else leaf,
            value,
        )
        return super()._components(plain, mirrored=mirrored)

    def _placed_variable(self, traits: Traits, value: Array) -> ParameterVariable:
        number = self._placed
        self._placed += 1
        variable = ParameterVariable(self._order, number, traits, value, number % self._servers)
        self.made[id(variable)] = variable
        return variable

    def _shards_of(self, value: Array) -> int:
        if self._partitioner is None or value.ndim == 0:
            return 1
        partitions = self._partitioner(shape=value.shape, dtype=value.dtype)
        fits = (
            isinstance(partitions, list | tuple)
            and len(partitions) == value.ndim
            and all(isinstance(each, int) and not isinstance(each, bool) for each in partitions)
        )
        if not fits or partitions[0] < 1 or any(each != 1 for each in partitions[1:]):
            raise ValueError(
                f"the variable_partitioner returned {partitions!r} for the shape {list(value.shape)}; "
                f"expected a list of {value.ndim} ints, all of them 1 but the first, which is at least 1"
            )
        return max(1, min(partitions[0], len(value)))

    def _distributed(
        self, pipelines: Sequence[Dataset], each: int, options: InputOptions
    ) -> ReplicatedDataset:
        return ReplicatedDataset(pipelines, each, identity=True, buffer_steps=options.per_replica_buffer_size)
