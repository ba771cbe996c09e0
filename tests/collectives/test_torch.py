"""gloo carries torch tensors between real processes; without torch it says so."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pipedist.collectives.options import CommunicationOptions
from pipedist.errors import UsageError
from tests.collectives.gangs import Replica, run_gang
from tests.collectives.processes import Nursery

HAS_TORCH = importlib.util.find_spec("torch") is not None
GLOO = CommunicationOptions(implementation="gloo")  # type: ignore[arg-type]

needs_torch = [
    pytest.mark.torch,
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        not HAS_TORCH, reason="torch is not installed here: make bench-torch, then make test-torch"
    ),
]


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.mark.skipif(HAS_TORCH, reason="torch is installed here")
def test_without_torch_it_says_what_to_do() -> None:
    def function(replica: Replica) -> Any:
        return replica.all_reduce("sum", np.zeros(3), GLOO)

    for outcome in run_gang([1, 1], function):
        assert type(outcome) is UsageError
        assert "implementation gloo needs torch" in str(outcome)


def carried(replicas: int, n: int) -> Any:
    sums = [sum(r + i for r in range(replicas)) for i in range(4)]
    products = [float(np.prod([r + i for r in range(replicas)])) for i in range(4)]
    mean = [s / replicas for s in sums]
    return [
        [mean, mean, "torch.float64"],
        [sums, [0, 1, 2, 3], [i + replicas - 1 for i in range(4)], products],
        [[r, r] for r in range(replicas) for _ in range(r + 1)],
        [[r for r in range(replicas) for _ in range(r)]] * 2,
        [1, 2, 3, 4],
        [
            "TypeError: all_reduce of the value: implementation gloo needs torch tensors, got ndarray; "
            "use torch.from_numpy, or implementation auto",
            "CollectiveMismatchError: collective 5 of this step differs between replicas:",
        ],
        1.5 * replicas,
    ]


@pytest.mark.parametrize("replicas", [2, 3])
def test_gloo(nursery: Nursery, replicas: int) -> None:
    owner = nursery.owner(replicas)
    for serial in (1, 2):
        members = nursery.start(owner, [1] * replicas, "torch_everything", serial=serial)
        for n, member in enumerate(members):
            assert member.outcomes() == [{"value": carried(replicas, n)}]


def test_gloo_needs_a_process_for_each_replica(nursery: Nursery) -> None:
    for member in nursery.start(nursery.owner(3), [1, 2], "torch_needs_a_process_each"):
        for outcome in member.outcomes():
            assert outcome["error"] == "ValueError"
            assert "needs one process per replica, but 3 replicas are spread over 2" in outcome["text"]


for _test in (test_gloo, test_gloo_needs_a_process_for_each_replica):
    for _mark in needs_torch:
        _mark(_test)
