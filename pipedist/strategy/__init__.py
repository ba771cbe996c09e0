"""Strategies: the objects which own the replicas (tf.distribute.Strategy)."""

from pipedist.strategy.base import BaseStrategy
from pipedist.strategy.context import get_strategy, has_strategy, in_cross_replica_context
from pipedist.strategy.default import DefaultStrategy
from pipedist.strategy.distributed import DistributedDataset, DistributedIterator, OptionalStep
from pipedist.strategy.replicated import Strategy
from pipedist.strategy.step_runs import StepRuns
from pipedist.strategy.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
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
