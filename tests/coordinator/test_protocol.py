"""A message that breaks the protocol costs its worker the connection, never the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.coordinator.worker_registry import Peer, rejection_reason
from pipedist.protocol import messages as msg
from pipedist.worker.process_setup import make_hello
from tests.coordinator.functions import RUBBISH
from tests.coordinator.wire import named

F = "tests.coordinator.functions"


def document(run: str, **with_: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "dataset": {"range": 40, "batch": 2},
        "stages": {"y": {"run": f"{F}:{run}", "with": with_}, "out": {"gather": 0, "of": "y"}},
    }


async def result_of(cluster: pipedist.LocalCluster, spec: dict[str, Any]) -> pipedist.Result:
    async with asyncio.timeout(60), pipedist.open(spec, cluster=cluster) as run:
        return await run.results()


@pytest.mark.asyncio
async def test_malformed_results_are_computed_by_another_worker(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        for kind in RUBBISH:
            before = cluster.coordinator.rejected
            result = await result_of(cluster, document("rubbish", folder=str(tmp_path), kind=kind))
            assert (tmp_path / kind).exists()
            assert np.array_equal(result["out"], np.arange(40) * 2), kind
            assert result.ledger == pipedist.Ledger(40, 40)
            assert cluster.coordinator.rejected > before, kind


@pytest.mark.asyncio
async def test_a_worker_that_breaks_the_protocol_is_replaced(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        await cluster.ready()
        for name in ("forbidden", "hello_again"):
            before, pids = cluster.coordinator.rejected, set(cluster.pids.values())
            result = await result_of(cluster, document(name, folder=str(tmp_path)))
            assert np.array_equal(result["out"], np.arange(40) * 2)
            assert cluster.coordinator.rejected > before
            await cluster.ready()
            assert len(pids - set(cluster.pids.values())) == 1


def why(hello: msg.Hello, **given: Any) -> str:
    settings: dict[str, Any] = {"started": {}, "managed": False, "dial_in": True, "current": None}
    return rejection_reason(hello, **{**settings, **given})


def test_reasons_to_reject_a_worker() -> None:
    first = make_hello("w0", 1)
    assert why(first) == ""
    assert why(first, managed=True, started={"w0": 1}) == ""
    assert "was not started by this cluster" in why(first, managed=True, started={"w0": 2})
    assert "'w0' is none of them" in why(first, dial_in=False)
    assert "has joined already" in why(first, current=Peer(b"x", "w0", 1, True))
    assert "a later incarnation" in why(first, current=Peer(b"x", "w0", 2, True))
    assert why(first, current=Peer(b"x", "w0", 0, True)) == ""


@pytest.mark.asyncio
async def test_an_unregistered_connection_can_not_act_as_a_worker() -> None:
    """Messages as the router passes them on, from a connection that has not joined."""
    async with pipedist.LocalCluster(workers=1) as cluster:
        await cluster.ready()
        coordinator = cluster.coordinator
        for message in (
            msg.Goodbye("w0", 0, "I am done"),
            msg.Heartbeat("w0", 0),
            msg.Results(1, 0, 1, 0),
            make_hello("w0", 0),
            make_hello("w0", 99),
            make_hello("w7", 0),
        ):
            before = coordinator.rejected
            coordinator._on_message(b"stranger", message, [])
            assert coordinator.rejected == before + 1
            assert coordinator.workers_ready == 1
        spec = {
            "pipedist": 1,
            "dataset": {"range": 4, "batch": 2},
            "stages": {"t": {"reduce": "sum", "of": "dataset", "axis": 0}},
        }
        assert (await result_of(cluster, spec))["t"] == 6


@pytest.mark.asyncio
async def test_one_connection_is_one_worker_and_a_later_incarnation_replaces_the_previous_one(
    tmp_path: Path,
) -> None:
    async with pipedist.ConnectCluster(key_file=tmp_path / "keys") as cluster:
        coordinator = cluster.coordinator

        def says(identity: bytes, worker: str, incarnation: int) -> tuple[int, int]:
            before = coordinator.rejected
            name, proof = named(worker)
            coordinator._on_message(identity, make_hello(name, incarnation, proof=proof), [])
            return coordinator.workers_ready, coordinator.rejected - before

        assert says(b"1", "a", 0) == (1, 0)
        assert says(b"1", "b", 0) == (0, 0)  # two names over one connection: both are gone
        assert says(b"2", "a", 3) == (1, 0)
        assert says(b"3", "a", 2) == (1, 1)
        assert says(b"4", "a", 3) == (1, 1)
        assert says(b"5", "a", 4) == (1, 0)
        assert says(b"6", "b", 0) == (2, 0)
