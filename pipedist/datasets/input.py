"""Options and contexts of distributed input, with the names of tf.distribute."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from pipedist.core.arguments import check_int


class AutoShardPolicy(enum.StrEnum):
    """The division of a dataset among input pipelines (tf.data.experimental.AutoShardPolicy).

    An input pipeline is a logical reader of the dataset: it feeds a fixed set of replicas, independently
    of worker processes.
    """

    AUTO = "AUTO"
    """FILE if the pipeline reads enough files; else DATA."""

    DATA = "DATA"
    """Every pipeline reads everything, and pipeline w keeps chunks w, w + W, ..."""

    FILE = "FILE"
    """Whole files: pipeline w reads files w, w + W, ...; fewer than W files are an error."""

    OFF = "OFF"
    """Every pipeline delivers everything: each element W times per epoch, with W pipelines."""

    HINT = "HINT"
    """`shard(SHARD_HINT, SHARD_HINT)` in the dataset becomes shard(W, w); nothing else is divided."""

    @classmethod
    def of(cls, value: Any) -> AutoShardPolicy:
        """Return the policy that `value` is or names, ignoring case.

        Raises:
            ValueError: there is no such policy.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise ValueError(f"unknown auto-shard policy {value!r}: expected one of {', '.join(cls.__members__)}")


class InputReplicationMode(enum.StrEnum):
    """The calls of an input function (tf.distribute.InputReplicationMode)."""

    PER_WORKER = "PER_WORKER"
    """Once for each input pipeline; its replicas take turns with consecutive elements."""

    PER_REPLICA = "PER_REPLICA"
    """Once for each replica, which is then an input pipeline of its own."""


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Options of a distributed dataset (tf.distribute.InputOptions, without those for devices).

    Args:
        per_replica_buffer_size: steps read ahead, at least 1.
        replication_mode: PER_REPLICA only for `distribute_datasets_from_function`.

    Raises:
        ValueError: a value is out of range.
        TypeError: a value has the wrong type, or an option is unknown.

    Example:
        options = pipedist.InputOptions(replication_mode=pipedist.InputReplicationMode.PER_WORKER)
        dataset = strategy.distribute_dataset(data, options)
    """

    per_replica_buffer_size: int = 1
    replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER

    def __post_init__(self) -> None:
        check_int("per_replica_buffer_size", self.per_replica_buffer_size, at_least=1)
        if not isinstance(self.replication_mode, str):
            raise TypeError(
                f"replication_mode is {self.replication_mode!r}; expected an InputReplicationMode"
            )
        try:
            object.__setattr__(self, "replication_mode", InputReplicationMode(self.replication_mode))
        except ValueError:
            raise ValueError(
                f"replication_mode is {self.replication_mode!r}; expected PER_WORKER or PER_REPLICA"
            ) from None


@dataclass(frozen=True, slots=True)
class InputContext:
    """The input pipeline that a dataset function feeds (tf.distribute.InputContext).

    Args:
        num_input_pipelines: number of pipelines, at least 1.
        input_pipeline_id: number of this pipeline, 0 to num_input_pipelines - 1.
        num_replicas_in_sync: number of replicas of all pipelines, at least 1.

    Raises:
        ValueError: a number is out of range.
        TypeError: a number is not an int.

    Example:
        def dataset_of(context):
            data = pipedist.Dataset.range(100)
            mine = data.shard(context.num_input_pipelines, context.input_pipeline_id)
            return mine.batch(context.get_per_replica_batch_size(8))


        dataset = strategy.distribute_datasets_from_function(dataset_of)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name, least in (
            ("num_input_pipelines", 1),
            ("input_pipeline_id", 0),
            ("num_replicas_in_sync", 1),
        ):
            object.__setattr__(self, name, check_int(name, getattr(self, name), at_least=least))
        if self.input_pipeline_id >= self.num_input_pipelines:
            raise ValueError(
                f"input_pipeline_id is {self.input_pipeline_id}, but there are "
                f"{self.num_input_pipelines} input pipelines: expected 0 to {self.num_input_pipelines - 1}"
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return a replica's share of a global batch.

        Args:
            global_batch_size: elements, a multiple of num_replicas_in_sync.

        Raises:
            ValueError: it is negative or does not divide evenly.
            TypeError: it is not an int (8.0 is not).
        """
        size = check_int("global_batch_size", global_batch_size, at_least=0)
        share, rest = divmod(size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"the global batch size {size} is not divisible by the {self.num_replicas_in_sync} "
                "replicas in sync"
            )
        return share

    def __str__(self) -> str:
        return (
            f"pipedist.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


@dataclass(frozen=True, slots=True)
class ValueContext:
    """The replica of a value function (tf.distribute.experimental.ValueContext).

    Args:
        replica_id_in_sync_group: the replica's number, 0 to num_replicas_in_sync - 1.
        num_replicas_in_sync: number of replicas.

    Example:
        values = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
