"""pipedist: declarative pipelines over per-replica values.

A dataset is divided into steps, and each step into shards, one per replica. A replica function runs once
on each shard, in any free worker process; the per-replica values are streamed back, and reduced or
gathered in a fixed order. The spec and the seed decide every bit of the result.

Names are imported on first use, so that `import pipedist` alone is fast.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from pipedist._version import __version__

# Whether an array is copied before it is sent, or reused for the next result, depends on its number of references
# (`worker.array_isolation`, `collectives.folding`); without the GIL that number is not exact, and an array that user
# code still changes would be sent. Threads also share plain dicts and lists. Copying always would cover the first
# only, and no other build is tested, so such a build is refused as a whole.
if "t" in getattr(sys, "abiflags", ""):
    raise ImportError(
        f"pipedist needs Python with a GIL, and {sys.executable} is a free-threaded build: without the GIL, results "
        "could change after they are returned. Install a standard build of Python, and create the environment with it."
    )

if TYPE_CHECKING:
    from pipedist.cluster.base import LocalCluster
    from pipedist.cluster.engine_clusters import DaskCluster, RayCluster
    from pipedist.cluster.remote import ConnectCluster
    from pipedist.cluster.resolvers import ClusterResolver, ClusterSpec, SimpleClusterResolver, UnionResolver
    from pipedist.cluster.resolvers_environment import SlurmClusterResolver, TFConfigClusterResolver
    from pipedist.cluster.resolvers_kubernetes import KubernetesClusterResolver
    from pipedist.cluster.tf_config import TaskCluster, open_cluster
    from pipedist.collectives.options import CommunicationOptions
    from pipedist.datasets.element import ArraySpec
    from pipedist.datasets.input import (
        AutoShardPolicy,
        InputContext,
        InputOptions,
        InputReplicationMode,
        ValueContext,
    )
    from pipedist.datasets.logical import Dataset
    from pipedist.errors import (
        CallError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        FoldError,
        JournalError,
        OutOfRangeError,
        OutputError,
        PipedistError,
        PlanError,
        Problem,
        RetryAfter,
        RunCancelled,
        RunDrained,
        SpecError,
        UsageError,
        WorkerDied,
        WorkersLost,
    )
    from pipedist.runs.api import open, run
    from pipedist.runs.result import Ledger, Progress, Result
    from pipedist.runs.run import Run
    from pipedist.runs.subscription import Part, Step
    from pipedist.strategy import (
        CentralStorageStrategy,
        DistributedDataset,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        Strategy,
        Variable,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
        strategy_of,
    )
    from pipedist.strategy.closures import ClosureCancelled, RemoteValue
    from pipedist.strategy.cluster_coordinator import ClusterCoordinator
    from pipedist.strategy.parameter_server import ParameterServerStrategy
    from pipedist.strategy.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
    from pipedist.values import Mirrored, PerReplica, ReduceOp
    from pipedist.worker.context import ReplicaContext, get_replica_context
    from pipedist.worker.variables.access import ShardedVariable
    from pipedist.worker.variables.rules import VariableAggregation, VariableSynchronization

_HOMES = {
    "pipedist.cluster.resolvers": "ClusterResolver ClusterSpec SimpleClusterResolver UnionResolver",
    "pipedist.cluster.resolvers_environment": "SlurmClusterResolver TFConfigClusterResolver",
    "pipedist.cluster.resolvers_kubernetes": "KubernetesClusterResolver",
    "pipedist.collectives.options": "CommunicationOptions",
    "pipedist.cluster.remote": "ConnectCluster",
    "pipedist.datasets.element": "ArraySpec",
    "pipedist.datasets.input": "AutoShardPolicy InputContext InputOptions InputReplicationMode ValueContext",
    "pipedist.datasets.logical": "Dataset",
    "pipedist.cluster.engine_clusters": "DaskCluster RayCluster",
    "pipedist.errors": (
        "CallError CollectiveMismatchError CollectiveTimeoutError FoldError JournalError "
        "OutOfRangeError OutputError PipedistError PlanError Problem RetryAfter RunCancelled RunDrained "
        "SpecError UsageError WorkerDied WorkersLost"
    ),
    "pipedist.cluster.base": "LocalCluster",
    "pipedist.strategy.partitioners": "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner",
    "pipedist.runs.api": "open run",
    "pipedist.runs.result": "Ledger Progress Result",
    "pipedist.runs.run": "Run",
    "pipedist.runs.subscription": "Part Step",
    "pipedist.strategy": (
        "CentralStorageStrategy DistributedDataset MirroredStrategy "
        "MultiWorkerMirroredStrategy OneDeviceStrategy Strategy Variable get_strategy "
        "has_strategy in_cross_replica_context strategy_of"
    ),
    "pipedist.strategy.cluster_coordinator": "ClusterCoordinator",
    "pipedist.strategy.parameter_server": "ParameterServerStrategy",
    "pipedist.strategy.closures": "ClosureCancelled RemoteValue",
    "pipedist.cluster.tf_config": "TaskCluster open_cluster",
    "pipedist.values": "Mirrored PerReplica ReduceOp",
    "pipedist.worker.context": "ReplicaContext get_replica_context",
    "pipedist.worker.variables.access": "ShardedVariable",
    "pipedist.worker.variables.rules": "VariableAggregation VariableSynchronization",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "ArraySpec",
    "AutoShardPolicy",
    "CallError",
    "CentralStorageStrategy",
    "ClosureCancelled",
    "ClusterCoordinator",
    "ClusterResolver",
    "ClusterSpec",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicationOptions",
    "ConnectCluster",
    "DaskCluster",
    "Dataset",
    "DistributedDataset",
    "FixedShardsPartitioner",
    "FoldError",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "JournalError",
    "KubernetesClusterResolver",
    "Ledger",
    "LocalCluster",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "OutOfRangeError",
    "OutputError",
    "ParameterServerStrategy",
    "Part",
    "PerReplica",
    "PipedistError",
    "PlanError",
    "Problem",
    "Progress",
    "RayCluster",
    "ReduceOp",
    "RemoteValue",
    "ReplicaContext",
    "Result",
    "RetryAfter",
    "Run",
    "RunCancelled",
    "RunDrained",
    "ShardedVariable",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "SpecError",
    "Step",
    "Strategy",
    "TFConfigClusterResolver",
    "TaskCluster",
    "UnionResolver",
    "UsageError",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "WorkerDied",
    "WorkersLost",
    "__version__",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "open_cluster",
    "run",
    "strategy_of",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'pipedist' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])
