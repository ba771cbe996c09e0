"""pipedist: declarative pipelines over per-replica values.

A dataset is cut into steps, and each step into shards, one a replica; a replica function runs
once on each shard, in whichever worker process is free; the per-replica values stream back and
are reduced or gathered in a fixed order. The spec and the seed decide every bit of the result.

Names are imported when they are first used: `import pipedist` alone costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipedist.version import __version__

if TYPE_CHECKING:
    from pipedist.connect_cluster import ConnectCluster
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
        FoldError,
        OutOfRangeError,
        OutputError,
        PipedistError,
        PlanError,
        Problem,
        RunCancelled,
        RunDrained,
        SpecError,
        UsageError,
        WorkerDied,
        WorkersLost,
    )
    from pipedist.local_cluster import LocalCluster
    from pipedist.pipeline import Ledger, Part, Progress, Result, Run, Step, open, run
    from pipedist.strategy import (
        CentralStorageStrategy,
        DistributedDataset,
        OneDeviceStrategy,
        Strategy,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from pipedist.values import Mirrored, PerReplica, ReduceOp
    from pipedist.worker.context import ReplicaContext, get_replica_context

_HOMES = {
    "pipedist.connect_cluster": ("ConnectCluster",),
    "pipedist.datasets.element": ("ArraySpec",),
    "pipedist.datasets.input": (
        "AutoShardPolicy",
        "InputContext",
        "InputOptions",
        "InputReplicationMode",
        "ValueContext",
    ),
    "pipedist.datasets.logical": ("Dataset",),
    "pipedist.errors": (
        "CallError",
        "FoldError",
        "OutOfRangeError",
        "OutputError",
        "PipedistError",
        "PlanError",
        "Problem",
        "RunCancelled",
        "RunDrained",
        "SpecError",
        "UsageError",
        "WorkerDied",
        "WorkersLost",
    ),
    "pipedist.local_cluster": ("LocalCluster",),
    "pipedist.pipeline": ("Ledger", "Part", "Progress", "Result", "Run", "Step", "open", "run"),
    "pipedist.strategy": (
        "CentralStorageStrategy",
        "DistributedDataset",
        "OneDeviceStrategy",
        "Strategy",
        "get_strategy",
        "has_strategy",
        "in_cross_replica_context",
    ),
    "pipedist.values": ("Mirrored", "PerReplica", "ReduceOp"),
    "pipedist.worker.context": ("ReplicaContext", "get_replica_context"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ArraySpec",
    "AutoShardPolicy",
    "CallError",
    "CentralStorageStrategy",
    "ConnectCluster",
    "Dataset",
    "DistributedDataset",
    "FoldError",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Ledger",
    "LocalCluster",
    "Mirrored",
    "OneDeviceStrategy",
    "OutOfRangeError",
    "OutputError",
    "Part",
    "PerReplica",
    "PipedistError",
    "PlanError",
    "Problem",
    "Progress",
    "ReduceOp",
    "ReplicaContext",
    "Result",
    "Run",
    "RunCancelled",
    "RunDrained",
    "SpecError",
    "Step",
    "Strategy",
    "UsageError",
    "ValueContext",
    "WorkerDied",
    "WorkersLost",
    "__version__",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "open",
    "run",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'pipedist' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
