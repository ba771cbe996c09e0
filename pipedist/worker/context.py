"""What a replica function can know about the call that it is executing.

`ctx.rng` is the only source of randomness that keeps results reproducible: a PCG64 generator
whose `numpy.random.SeedSequence` has the entropy

    [seed, int.from_bytes(sha256(stage name)[:8], "big"), step, replica]

so it depends on nothing else: not on the worker, the attempt, or the calls before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from numpy.random import Generator

_CROSS_REPLICA = {
    "run": "call the other function directly, or make it a stage of its own",
    "reduce": "return the value, and reduce what Strategy.run returns (in a spec: a `reduce` stage)",
    "gather": "return the value, and gather what Strategy.run returns (in a spec: a `gather` stage)",
    "local_results": "a replica function sees its own component only",
    "distribute_dataset": "make the dataset outside and pass its elements as arguments",
    "distribute_datasets_from_function": "make the dataset outside and pass its elements as arguments",
    "distribute_values_from_function": "make the values outside and pass them as arguments",
    "scope": "open the scope outside",
}
"""Methods of Strategy that need all replicas, and what to do in a replica function instead."""


class ReplicaStrategy:
    """Stands for the strategy inside a replica function (tf.distribute: `ctx.strategy`).

    It knows how many replicas there are. Methods that need all replicas raise RuntimeError.
    """

    __slots__ = ("num_replicas_in_sync",)

    def __init__(self, num_replicas_in_sync: int) -> None:
        self.num_replicas_in_sync = num_replicas_in_sync

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name not in _CROSS_REPLICA:
            raise AttributeError(f"the strategy has no attribute {name!r} inside a replica function")

        def refuse(*_args: object, **_kwargs: object) -> NoReturn:
            # Misuse of an argument, so to say: what is distributed belongs outside (tf.distribute
            # accepts it); the others are calls at the wrong moment.
            error = ValueError if name.startswith("distribute_") else RuntimeError
            raise error(
                f"Strategy.{name} requires cross-replica context, but was called in a replica "
                f"function: {_CROSS_REPLICA[name]}"
            )

        return refuse


class ReplicaContext:
    """The call that a replica function is executing (tf.distribute.ReplicaContext).

    Args:
        replica_id_in_sync_group: this replica's number, 0..num_replicas_in_sync-1.
        num_replicas_in_sync: R.
        step: number of the global batch, counted over all epochs.
        epoch: which reading of the dataset the step belongs to; 0 where there is no dataset.
        stage: name of the stage.
        elements: int64[n], ids of the shard's elements (epoch * N + index), or None where the
            call's value is no shard of a dataset, or its length is not known.
        seed: the spec's seed.
    """

    __slots__ = (
        "_elements",
        "_rng",
        "_seed",
        "epoch",
        "num_replicas_in_sync",
        "replica_id_in_sync_group",
        "stage",
        "step",
    )

    def __init__(
        self,
        *,
        replica_id_in_sync_group: int,
        num_replicas_in_sync: int,
        step: int,
        epoch: int,
        stage: str,
        elements: NDArray[np.int64] | range | None,
        seed: int,
    ) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync
        self.step = step
        self.epoch = epoch
        self.stage = stage
        self._elements = elements
        self._seed = seed
        self._rng: Generator | None = None

    @property
    def elements(self) -> NDArray[np.int64] | None:
        """Ids of the shard's elements, int64[n], read-only; None where it has none."""
        if isinstance(self._elements, range):
            ids = np.arange(self._elements.start, self._elements.stop, self._elements.step, dtype=np.int64)
            ids.flags.writeable = False
            self._elements = ids
        return self._elements

    @property
    def rng(self) -> Generator:
        """The call's own random generator; every attempt of the call gets the same numbers."""
        if self._rng is None:
            from numpy.random import PCG64, Generator, SeedSequence  # most functions draw no numbers

            entropy = [self._seed, stage_digest(self.stage), self.step, self.replica_id_in_sync_group]
            self._rng = Generator(PCG64(SeedSequence(entropy)))
        return self._rng

    @property
    def strategy(self) -> ReplicaStrategy:
        """The strategy, as far as one replica may use it."""
        return ReplicaStrategy(self.num_replicas_in_sync)

    def __repr__(self) -> str:
        return (
            f"ReplicaContext(stage={self.stage!r}, step={self.step}, "
            f"replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync})"
        )


@lru_cache(maxsize=1024)
def stage_digest(stage: str) -> int:
    """Return the number that stands for a stage's name in the seeds of its calls."""
    return int.from_bytes(hashlib.sha256(stage.encode()).digest()[:8], "big")


current: ContextVar[ReplicaContext | None] = ContextVar("pipedist_replica_context", default=None)
"""Set around every call of a replica function."""


def get_replica_context() -> ReplicaContext | None:
    """Return the call that is being executed, or None outside a replica function.

    tf.distribute has a default replica context outside of any strategy; pipedist has none, so
    None also answers the question "am I in a replica function?".
    """
    return current.get()
