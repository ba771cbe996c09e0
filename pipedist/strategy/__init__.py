"""Strategies: objects that own the replicas (tf.distribute.Strategy), for programs without a spec.

A strategy runs functions on every replica, distributes datasets, combines per-replica values, and keeps
variables from step to step. Entry points: `Strategy` and its subclasses in `strategies`, `Variable`,
`DistributedDataset`, `get_strategy`; `ParameterServerStrategy` and `ClusterCoordinator` for asynchronous
training. This code runs in the driver process; functions travel to worker processes as calls of ordinary passes
(`passes`), and use their side of strategies and variables there, which is in `pipedist.worker`.
"""

from pipedist.strategy.base import BaseStrategy
from pipedist.strategy.context import has_strategy, in_cross_replica_context
from pipedist.strategy.distributed import DistributedDataset, DistributedIterator, OptionalStep
from pipedist.strategy.replicated import Strategy
from pipedist.strategy.step_runs import StepRuns
from pipedist.strategy.strategies import (
    CentralStorageStrategy,
    DefaultStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    get_strategy,
    strategy_of,
)
from pipedist.strategy.variables import Variable

__all__ = [
    "BaseStrategy",
    "CentralStorageStrategy",
    "DefaultStrategy",
    "DistributedDataset",
    "DistributedIterator",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "OptionalStep",
    "StepRuns",
    "Strategy",
    "Variable",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "strategy_of",
]
