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
    from pipedist.cluster.base import LocalCluster as LocalCluster
    from pipedist.cluster.engine_clusters import DaskCluster as DaskCluster
    from pipedist.cluster.engine_clusters import RayCluster as RayCluster
    from pipedist.cluster.remote import ConnectCluster as ConnectCluster
    from pipedist.cluster.resolvers import ClusterResolver as ClusterResolver
    from pipedist.cluster.resolvers import ClusterSpec as ClusterSpec
    from pipedist.cluster.resolvers import SimpleClusterResolver as SimpleClusterResolver
    from pipedist.cluster.resolvers import UnionResolver as UnionResolver
    from pipedist.cluster.resolvers_environment import SlurmClusterResolver as SlurmClusterResolver
    from pipedist.cluster.resolvers_environment import TFConfigClusterResolver as TFConfigClusterResolver
    from pipedist.cluster.resolvers_kubernetes import KubernetesClusterResolver as KubernetesClusterResolver
    from pipedist.cluster.resolvers_tpu import DeviceAssignment as DeviceAssignment
    from pipedist.cluster.resolvers_tpu import TPUClusterResolver as TPUClusterResolver
    from pipedist.cluster.resolvers_tpu import TPUTopology as TPUTopology
    from pipedist.cluster.tf_config import TaskCluster as TaskCluster
    from pipedist.cluster.tf_config import open_cluster as open_cluster
    from pipedist.collectives.options import CommunicationOptions as CommunicationOptions
    from pipedist.datasets.element import ArraySpec as ArraySpec
    from pipedist.datasets.input import AutoShardPolicy as AutoShardPolicy
    from pipedist.datasets.input import InputContext as InputContext
    from pipedist.datasets.input import InputOptions as InputOptions
    from pipedist.datasets.input import InputReplicationMode as InputReplicationMode
    from pipedist.datasets.input import ValueContext as ValueContext
    from pipedist.datasets.logical import Dataset as Dataset
    from pipedist.datasets.sources.base import SourceReader as SourceReader
    from pipedist.errors import CallError as CallError
    from pipedist.errors import CollectiveMismatchError as CollectiveMismatchError
    from pipedist.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from pipedist.errors import FoldError as FoldError
    from pipedist.errors import JournalError as JournalError
    from pipedist.errors import OutOfRangeError as OutOfRangeError
    from pipedist.errors import OutputError as OutputError
    from pipedist.errors import PipedistError as PipedistError
    from pipedist.errors import PlanError as PlanError
    from pipedist.errors import Problem as Problem
    from pipedist.errors import QuarantineError as QuarantineError
    from pipedist.errors import RetryAfter as RetryAfter
    from pipedist.errors import RunCancelled as RunCancelled
    from pipedist.errors import RunDrained as RunDrained
    from pipedist.errors import SpecError as SpecError
    from pipedist.errors import UsageError as UsageError
    from pipedist.errors import WorkerDied as WorkerDied
    from pipedist.errors import WorkersLost as WorkersLost
    from pipedist.outputs.class_sink import SinkWriter as SinkWriter
    from pipedist.runs.api import open as open
    from pipedist.runs.api import run as run
    from pipedist.runs.mapping import AsyncResults as AsyncResults
    from pipedist.runs.mapping import Quarantined as Quarantined
    from pipedist.runs.mapping import amap as amap
    from pipedist.runs.mapping import imap as imap
    from pipedist.runs.mapping import map as map
    from pipedist.runs.result import Ledger as Ledger
    from pipedist.runs.result import Progress as Progress
    from pipedist.runs.result import Result as Result
    from pipedist.runs.run import Run as Run
    from pipedist.runs.subscription import Part as Part
    from pipedist.runs.subscription import Step as Step
    from pipedist.runs.sync_stream import SyncStream as SyncStream
    from pipedist.runs.sync_stream import stream as stream
    from pipedist.strategy import CentralStorageStrategy as CentralStorageStrategy
    from pipedist.strategy import DistributedDataset as DistributedDataset
    from pipedist.strategy import MirroredStrategy as MirroredStrategy
    from pipedist.strategy import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from pipedist.strategy import OneDeviceStrategy as OneDeviceStrategy
    from pipedist.strategy import Strategy as Strategy
    from pipedist.strategy import Variable as Variable
    from pipedist.strategy import get_strategy as get_strategy
    from pipedist.strategy import has_strategy as has_strategy
    from pipedist.strategy import in_cross_replica_context as in_cross_replica_context
    from pipedist.strategy import strategy_of as strategy_of
    from pipedist.strategy.closures import ClosureCancelled as ClosureCancelled
    from pipedist.strategy.closures import RemoteValue as RemoteValue
    from pipedist.strategy.cluster_coordinator import ClusterCoordinator as ClusterCoordinator
    from pipedist.strategy.parameter_server import ParameterServerStrategy as ParameterServerStrategy
    from pipedist.strategy.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
    from pipedist.strategy.partitioners import MaxSizePartitioner as MaxSizePartitioner
    from pipedist.strategy.partitioners import MinSizePartitioner as MinSizePartitioner
    from pipedist.strategy.tpu import TPUStrategy as TPUStrategy
    from pipedist.values import Mirrored as Mirrored
    from pipedist.values import PerReplica as PerReplica
    from pipedist.values import ReduceOp as ReduceOp
    from pipedist.worker.context import ReplicaContext as ReplicaContext
    from pipedist.worker.context import get_replica_context as get_replica_context
    from pipedist.worker.variables.access import ShardedVariable as ShardedVariable
    from pipedist.worker.variables.access import VariableTree as VariableTree
    from pipedist.worker.variables.rules import VariableAggregation as VariableAggregation
    from pipedist.worker.variables.rules import VariableSynchronization as VariableSynchronization

_HOMES = {
    "pipedist.cluster.resolvers": "ClusterResolver ClusterSpec SimpleClusterResolver UnionResolver",
    "pipedist.cluster.resolvers_environment": "SlurmClusterResolver TFConfigClusterResolver",
    "pipedist.cluster.resolvers_kubernetes": "KubernetesClusterResolver",
    "pipedist.cluster.resolvers_tpu": "DeviceAssignment TPUClusterResolver TPUTopology",
    "pipedist.collectives.options": "CommunicationOptions",
    "pipedist.cluster.remote": "ConnectCluster",
    "pipedist.datasets.element": "ArraySpec",
    "pipedist.datasets.sources.base": "SourceReader",
    "pipedist.outputs.class_sink": "SinkWriter",
    "pipedist.datasets.input": "AutoShardPolicy InputContext InputOptions InputReplicationMode ValueContext",
    "pipedist.datasets.logical": "Dataset",
    "pipedist.cluster.engine_clusters": "DaskCluster RayCluster",
    "pipedist.errors": (
        "CallError CollectiveMismatchError CollectiveTimeoutError FoldError JournalError "
        "OutOfRangeError OutputError PipedistError PlanError Problem QuarantineError RetryAfter RunCancelled "
        "RunDrained SpecError UsageError WorkerDied WorkersLost"
    ),
    "pipedist.cluster.base": "LocalCluster",
    "pipedist.strategy.partitioners": "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner",
    "pipedist.runs.api": "open run",
    "pipedist.runs.mapping": "AsyncResults Quarantined amap imap map",
    "pipedist.runs.result": "Ledger Progress Result",
    "pipedist.runs.run": "Run",
    "pipedist.runs.sync_stream": "SyncStream stream",
    "pipedist.runs.subscription": "Part Step",
    "pipedist.strategy": (
        "CentralStorageStrategy DistributedDataset MirroredStrategy "
        "MultiWorkerMirroredStrategy OneDeviceStrategy Strategy Variable get_strategy "
        "has_strategy in_cross_replica_context strategy_of"
    ),
    "pipedist.strategy.cluster_coordinator": "ClusterCoordinator",
    "pipedist.strategy.tpu": "TPUStrategy",
    "pipedist.strategy.parameter_server": "ParameterServerStrategy",
    "pipedist.strategy.closures": "ClosureCancelled RemoteValue",
    "pipedist.cluster.tf_config": "TaskCluster open_cluster",
    "pipedist.values": "Mirrored PerReplica ReduceOp",
    "pipedist.worker.context": "ReplicaContext get_replica_context",
    "pipedist.worker.variables.access": "ShardedVariable VariableTree",
    "pipedist.worker.variables.rules": "VariableAggregation VariableSynchronization",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

_BUILTINS = ("map", "open")
__all__ = [name for name in (*_HOME, "__version__") if name not in _BUILTINS]  # a star import keeps those


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'pipedist' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_BUILTINS])
