"""Strategies: the objects which own the replicas (tf.distribute.Strategy)."""

from pipedist.strategy.base import BaseStrategy
from pipedist.strategy.context import get_strategy, has_strategy, in_cross_replica_context
from pipedist.strategy.distributed import DistributedDataset, DistributedIterator, OptionalStep
from pipedist.strategy.kinds import CentralStorageStrategy, DefaultStrategy, OneDeviceStrategy, Strategy

__all__ = [
    "BaseStrategy",
    "CentralStorageStrategy",
    "DefaultStrategy",
    "DistributedDataset",
    "DistributedIterator",
    "OneDeviceStrategy",
    "OptionalStep",
    "Strategy",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
