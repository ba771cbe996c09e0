"""A worker name needs a proof, even while no worker of that name is connected; all workers share the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import pipedist
from pipedist.protocol import messages as msg
from pipedist.worker.identity import is_proven, new_name
from pipedist.worker.process_setup import make_hello

NAME, PROOF = new_name("vm:17")
ROGUE = new_name("vm:17")[1]
OTHERS: list[Callable[[str], msg.Hello | msg.Heartbeat | msg.Goodbye]] = [
    lambda proof: make_hello(NAME, 0, proof=proof),
    lambda proof: make_hello(NAME, 7, proof=proof),
    lambda proof: msg.Heartbeat(NAME, 0, proof),
    lambda proof: msg.Heartbeat(NAME, 7, proof),
    lambda proof: msg.Goodbye(NAME, 0, "gone", proof=proof),
    lambda proof: msg.Goodbye(NAME, 0, "signal 11", crashed=True, proof=proof),
]


def test_a_name_has_one_proof() -> None:
    assert is_proven(NAME, PROOF)
    for proof in ("", ROGUE, PROOF[:-1], PROOF + "0", PROOF.upper(), "\ud800"):
        assert not is_proven(NAME, proof)
    for name in ("", "vm", "vm:17", NAME + "a", NAME.replace("17", "18"), f"worker/1:{NAME}", "\ud800:a"):
        assert not is_proven(name, PROOF)


def test_names_are_never_alike() -> None:
    assert len({new_name("vm:17") for _ in range(1000)}) == 1000


@pytest.mark.asyncio
@pytest.mark.parametrize("message", OTHERS)
async def test_the_name_of_a_living_worker_can_not_be_taken(
    tmp_path: Path, message: Callable[[str], msg.Message]
) -> None:
    async with pipedist.ConnectCluster(key_file=tmp_path / "keys") as cluster:
        coordinator = cluster.coordinator
        coordinator._on_message(b"worker", make_hello(NAME, 0, proof=PROOF), [])
        coordinator._on_message(b"supervisor", msg.Heartbeat(NAME, 0, PROOF), [])
        honest = coordinator._pool.of(NAME)
        assert honest is not None
        for number, proof in enumerate(["", ROGUE]):
            coordinator._on_message(b"rogue%d" % number, message(proof), [])
            assert coordinator._pool.of(NAME) == honest
            assert coordinator._pool._supervisors[NAME].identity == b"supervisor"
        coordinator._on_message(b"supervisor", msg.Goodbye(NAME, 0, "over", proof=PROOF), [])
        assert coordinator.workers_ready == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("has_been_there", [True, False])
async def test_the_name_of_an_absent_worker_can_not_be_taken(tmp_path: Path, has_been_there: bool) -> None:
    """It has just left, or is about to rejoin the driver that resumes the run."""
    async with pipedist.ConnectCluster(key_file=tmp_path / "keys") as cluster:
        coordinator = cluster.coordinator
        if has_been_there:
            coordinator._on_message(b"worker", make_hello(NAME, 0, proof=PROOF), [])
            coordinator._on_message(b"supervisor", msg.Goodbye(NAME, 0, "crash", True, proof=PROOF), [])
        for number, message in enumerate(OTHERS):
            coordinator._on_message(b"rogue%d" % number, message(ROGUE), [])
            assert coordinator.workers_ready == 0
            assert coordinator._pool._supervisors == {}
        coordinator._on_message(b"next", make_hello(NAME, 1, proof=PROOF), [])
        assert coordinator.workers_ready == 1
        coordinator._on_message(b"supervisor", msg.Goodbye(NAME, 1, "over", proof=PROOF), [])
