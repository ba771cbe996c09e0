"""The replica context."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from pipedist.collectives.requests import CollectiveRequest
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


def test_there_is_no_context_outside_of_a_call() -> None:
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
def test_errors_of_cross_replica_methods_name_the_alternative(method: str) -> None:
    strategy = make().strategy
    assert strategy.num_replicas_in_sync == 4
    with pytest.raises(RuntimeError, match="cross-replica context"):
        getattr(strategy, method)("sum")


class Recorded:
    is_async = False

    def __init__(self) -> None:
        self.requests: list[CollectiveRequest] = []

    def call(self, request: CollectiveRequest) -> str:
        self.requests.append(request)
        return "result"


def test_requests_name_the_collective_and_the_call_site() -> None:
    meets = Recorded()
    ctx = make(collectives=meets)
    results = [
        ctx.all_reduce("max", {"a": 1}),
        ctx.all_gather([2], axis=1),
        ctx.broadcast("x", source=3),
        ctx.barrier(),
        ctx.merge_call(lambda strategy, x, *, y: (strategy.num_replicas_in_sync, x, y), (5,), {"y": 6}),
        ctx._request("broadcast", 7, source=2, label="assign of variable 'w'"),
    ]
    assert results == ["result"] * 6
    asked = [(r.kind, r.tree, r.op, r.axis, r.source) for r in meets.requests]
    assert asked == [
        ("all_reduce", {"a": 1}, "max", 0, 0),
        ("all_gather", [2], "sum", 1, 0),
        ("broadcast", "x", "sum", 0, 3),
        ("barrier", None, "sum", 0, 0),
        ("merge_call", ((5,), {"y": 6}), "sum", 0, 0),
        ("broadcast", 7, "sum", 0, 2),
    ]
    assert {str(r.where).partition(":")[0] for r in meets.requests} == {"test_context.py"}
    assert "<lambda>" in meets.requests[4].label
    assert meets.requests[5].label == "assign of variable 'w'"
    body = meets.requests[4].function
    assert body is not None
    assert body(5, y=6) == (4, 5, 6)


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "error"),
    [
        (None, (), None, TypeError),
        (test_requests_name_the_collective_and_the_call_site, "ab", None, ValueError),
        (test_requests_name_the_collective_and_the_call_site, (), [1], TypeError),
    ],
)
def test_merge_call_rejects_wrong_arguments(fn: Any, args: Any, kwargs: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make(collectives=Recorded()).merge_call(fn, args, kwargs)


def test_merge_call_needs_a_plain_function() -> None:
    async def body(strategy: object) -> None:
        return None

    with pytest.raises(TypeError, match="plain function"):
        make(collectives=Recorded()).merge_call(body)


def test_other_methods_of_the_strategy_are_rejected() -> None:
    with pytest.raises(ValueError, match="make the dataset outside"):
        make().strategy.distribute_dataset([])
    with pytest.raises(AttributeError):
        _ = make().strategy.nonsense
