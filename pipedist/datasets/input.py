"""What input functions are told, and how a dataset is distributed (tf.distribute's words)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from pipedist.arguments import check_int


class AutoShardPolicy(enum.StrEnum):
    """How a dataset is divided among input pipelines (tf.data.experimental.AutoShardPolicy).

    An input pipeline is a LOGICAL reader of the dataset: it feeds a fixed set of replicas, and has
    nothing to do with worker processes.
    """

    AUTO = "AUTO"
    """FILE if the pipeline reads files, and enough of them; else DATA."""

    DATA = "DATA"
    """Everybody reads everything and keeps its own: pipeline w takes chunks w, w + W, ..."""

    FILE = "FILE"
    """Whole files: pipeline w reads files w, w + W, ...; an error where there are fewer than W."""

    OFF = "OFF"
    """Every pipeline delivers everything: with W pipelines each element comes W times in an epoch."""

    HINT = "HINT"
    """`shard(SHARD_HINT, SHARD_HINT)` in the dataset becomes shard(W, w); nothing else is divided."""

    @classmethod
    def of(cls, value: Any) -> AutoShardPolicy:
        """Return the policy that `value` is or names, in any case.

        Raises:
            ValueError: there is no such policy.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise ValueError(f"unknown auto-shard policy {value!r}: expected one of {', '.join(cls.__members__)}")


class InputReplicationMode(enum.StrEnum):
    """How often an input function is called (tf.distribute.InputReplicationMode)."""

    PER_WORKER = "PER_WORKER"
    """Once for each input pipeline; its replicas take turns with consecutive elements."""

    PER_REPLICA = "PER_REPLICA"
    """Once for each replica, which is then an input pipeline of its own."""


@dataclass(frozen=True, slots=True)
class InputOptions:
    """How to distribute a dataset (tf.distribute.InputOptions, without what devices need).

    Args:
        per_replica_buffer_size: steps read ahead, at least 1.
        replication_mode: PER_REPLICA is for `distribute_datasets_from_function` only.

    Raises:
        ValueError: a value is out of range.
        TypeError: a value is of the wrong kind, or there is no such option.
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
    """What a dataset function is told about the pipeline it feeds (tf.distribute.InputContext).

    Args:
        num_input_pipelines: how many pipelines there are, at least 1.
        input_pipeline_id: which one this is, 0 to num_input_pipelines - 1.
        num_replicas_in_sync: how many replicas they feed together, at least 1.

    Raises:
        ValueError: a number is out of range.
        TypeError: a number is no int.
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
            TypeError: it is no int (8.0 is none).
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
    """What a value function is told about its replica (tf.distribute.experimental.ValueContext).

    Args:
        replica_id_in_sync_group: the replica's number, 0 to num_replicas_in_sync - 1.
        num_replicas_in_sync: how many replicas there are.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
