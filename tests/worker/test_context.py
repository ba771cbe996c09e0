"""The replica context."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pipedist.worker.context import ReplicaContext, get_replica_context


def make(**changes: object) -> ReplicaContext:
    fields = {
        "replica_id_in_sync_group": 1,
        "num_replicas_in_sync": 4,
        "step": 2,
        "epoch": 0,
        "stage": "clean",
        "elements": range(3, 6),
        "seed": 11,
    }
    return ReplicaContext(**{**fields, **changes})  # type: ignore[arg-type]


def test_there_is_none_outside_of_a_call() -> None:
    assert get_replica_context() is None


def test_elements_are_read_only_int64() -> None:
    ids = make().elements
    assert ids is not None
    assert (ids.dtype, ids.tolist(), ids.flags.writeable) == (np.int64, [3, 4, 5], False)
    assert make(elements=None).elements is None


def test_the_documented_algorithm_of_rng() -> None:
    digest = int.from_bytes(hashlib.sha256(b"clean").digest()[:8], "big")
    expected = np.random.Generator(np.random.PCG64(np.random.SeedSequence([11, digest, 2, 1])))
    ctx = make()
    assert ctx.rng.integers(0, 2**63, 4).tolist() == expected.integers(0, 2**63, 4).tolist()
    assert ctx.rng is ctx.rng


@pytest.mark.parametrize(
    "change", [{"seed": 12}, {"stage": "other"}, {"step": 3}, {"replica_id_in_sync_group": 0}]
)
def test_other_calls_get_other_numbers(change: dict[str, object]) -> None:
    assert make(**change).rng.random() != make().rng.random()


@pytest.mark.parametrize("method", ["run", "reduce", "gather", "scope"])
def test_cross_replica_methods_say_what_to_do_instead(method: str) -> None:
    strategy = make().strategy
    assert strategy.num_replicas_in_sync == 4
    with pytest.raises(RuntimeError, match="cross-replica context"):
        getattr(strategy, method)("sum")


def test_what_else_the_strategy_refuses() -> None:
    with pytest.raises(ValueError, match="make the dataset outside"):
        make().strategy.distribute_dataset([])
    with pytest.raises(AttributeError):
        _ = make().strategy.nonsense
