"""The parameter server's strategy (tf.distribute.ParameterServerStrategy)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pipedist.core import trees
from pipedist.core.arguments import check_int
from pipedist.core.types import Tree
from pipedist.datasets.input import InputOptions
from pipedist.datasets.logical import Dataset
from pipedist.errors import UsageError
from pipedist.strategy.context import require_outside
from pipedist.strategy.parameters import CommitOrder, ParameterVariable
from pipedist.strategy.partitioners import shard_sizes
from pipedist.strategy.per_worker import ReplicatedDataset
from pipedist.strategy.replicated import Cluster, Strategy
from pipedist.worker.variables.access import ShardedVariable
from pipedist.worker.variables.rules import Array, declare, first_value

if TYPE_CHECKING:
    from pipedist.strategy.cluster_coordinator import ClusterCoordinator


class WorkerCluster(Cluster, Protocol):
    """What a parameter server needs of a cluster."""

    @property
    def workers(self) -> int:
        """How many workers there are to be."""
        ...


class ParameterServerStrategy(Strategy):
    """Workers that read and change variables kept in one place, each at its own pace.

    Functions are scheduled by a `pipedist.ClusterCoordinator`. Each has one replica, and values are
    plain. The variables live in this process; a worker gets their values with a closure, and sends
    back what it assigns.

        async with pipedist.LocalCluster(workers=4) as cluster:
            strategy = pipedist.ParameterServerStrategy(cluster)
            with strategy.scope():
                w = pipedist.Variable(np.zeros(3))
            async with pipedist.ClusterCoordinator(strategy) as coordinator:
                for _ in range(100):
                    await coordinator.schedule(lambda: w.assign_add(gradient(w)))

    Args:
        cluster: an open cluster.
        variable_partitioner: called with a variable's shape and dtype, says how many shards its first axis
            is cut into, such as `pipedist.MinSizePartitioner(256 << 10, 4)`; None: variables are not cut.
            A scalar never is.
        parameter_servers: how many places variables and shards are dealt to, in turn; a variable's
            `parameter_server` says which. All of them are in this process, so that it changes no value.
        workers: logical workers, the number of turns that per-worker datasets are dealt in; None: as
            many as the cluster has worker processes. Say it where results are not to depend on that.
        seed: as for `Strategy`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or out of range.
    """

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
        self._coordinator: ClusterCoordinator | None = None
        self._turns = CommitOrder()
        """Of the closures; for the coordinator."""

    @property
    def workers(self) -> int:
        """The number of logical workers."""
        return self._workers

    @property
    def _identity(self) -> bool:
        return True

    def create_variable(
        self,
        initial_value: object,
        *,
        trainable: bool | None = None,
        name: str = "variable",
        dtype: object = None,
        synchronization: object = None,
        aggregation: object = None,
    ) -> ParameterVariable | ShardedVariable:
        """Return a new variable, cut into shards if the partitioner says so.

        `pipedist.Variable`, in the strategy's scope, calls it.

        Args:
            initial_value, trainable, name, dtype: as for `pipedist.Variable`.
            synchronization, aggregation: of no effect here, as there is but one replica; checked.

        Raises:
            ValueError, TypeError: as for `pipedist.Variable`; or the partitioner returned no list of ones
                whose first element alone may be larger.
        """
        require_outside("creating a variable", "create it outside, and use it inside")
        value = first_value(initial_value, dtype, name)
        shards = self._shards_of(value)
        if shards == 1:
            return self._placed_variable(name, value, trainable, synchronization, aggregation)
        parts, first = [], 0
        for index, rows in enumerate(shard_sizes(len(value), shards)):
            part = value[first : first + rows]
            first += rows
            parts.append(
                self._placed_variable(f"{name}/part_{index}", part, trainable, synchronization, aggregation)
            )
        return ShardedVariable(name, parts)

    def _coordinated_by(self, coordinator: ClusterCoordinator) -> None:
        """Take note of the strategy's coordinator; there is but one.

        Raises:
            UsageError: there is one already.
        """
        if self._coordinator is not None:
            raise UsageError(f"{self!r} has a ClusterCoordinator already: use that one")
        self._coordinator = coordinator

    def _make_variable(self, *args: Any, **options: Any) -> ParameterVariable | ShardedVariable:
        return self.create_variable(*args, **options)

    def _update(
        self, variable: Any, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tree:
        if isinstance(variable, ShardedVariable):
            raise TypeError(f"update of {variable!r}: update each of its `variables`")
        if not isinstance(variable, ParameterVariable):
            return super()._update(variable, fn, args, kwargs)
        return variable.update(self._turns, fn, args, kwargs)

    def _components(self, value: Tree, *, mirrored: bool) -> Tree:
        plain = trees.tree_map(
            lambda leaf: leaf.value() if isinstance(leaf, ParameterVariable | ShardedVariable) else leaf,
            value,
        )
        return super()._components(plain, mirrored=mirrored)

    def _placed_variable(
        self, name: str, value: Array, trainable: bool | None, synchronization: object, aggregation: object
    ) -> ParameterVariable:
        traits = declare(
            value,
            name=name,
            trainable=trainable,
            synchronization=synchronization,
            aggregation=aggregation,
            replicas=1,
            one_place=True,
        )
        number = self._placed
        self._placed += 1
        return ParameterVariable(self._turns, number, traits, value, number % self._servers)

    def _shards_of(self, value: Array) -> int:
        """Return how many shards a variable is cut into."""
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
