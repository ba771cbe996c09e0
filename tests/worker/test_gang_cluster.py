"""Gangs on real clusters: the scheduler's own gangs, shared memory, deaths, hung members."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from pipedist import LocalCluster
from pipedist.coordinator import PassHandle
from pipedist.errors import CallError, CollectiveMismatchError, UsageError
from pipedist.protocol.codec import encode
from pipedist.scheduler import PassSettings
from tests.worker.test_gangs import gang

pytestmark = pytest.mark.asyncio


def open_gang(cluster: LocalCluster, function: str, replicas: int, **settings: Any) -> PassHandle:
    return cluster.coordinator.open_pass(
        gang(function, replicas, **settings),
        name=function,
        settings=PassSettings(replicas, ordered=False, pulled=False, gang=True),
    )


async def step(cluster: LocalCluster, function: str, values: list[Any], **settings: Any) -> list[Any]:
    handle = open_gang(cluster, function, len(values), **settings)
    async with asyncio.timeout(60):
        return [slots["y"] for slots in await handle.call_step(values)]


async def all_join(cluster: LocalCluster) -> None:
    """Wait until a gang is spread over all workers: it takes those that are there."""
    async with asyncio.timeout(60):
        while len({found[3] for found in await step(cluster, "says_who_it_is", [0] * 4)}) < cluster.workers:
            pass


def digest(values: list[Any]) -> str:
    return hashlib.sha256(b"".join(bytes(frame) for frame in encode(values))).hexdigest()


@pytest.mark.timeout(300)  # five clusters
async def test_the_bits_depend_neither_on_workers_nor_on_the_transport() -> None:
    digests = set()
    for workers in (1, 2, 4):
        for shared in (True, False) if workers > 1 else (True,):
            async with LocalCluster(workers=workers, shared_memory=shared) as cluster:
                await all_join(cluster)
                for function in ("every_kind", "every_kind_async"):
                    digests.add(digest(await step(cluster, function, [0] * 4)))
                transport = await step(cluster, "every_kind", [0] * 4, communication=(0, None, "transport"))
                digests.add(digest(transport))
    assert len(digests) == 1


async def test_eight_replicas_on_one_worker_for_many_steps() -> None:
    async with LocalCluster(workers=1) as cluster:
        handle = open_gang(cluster, "one_at_a_time", 8)
        async with asyncio.timeout(60):
            for found in await asyncio.gather(*[handle.call_step([0] * 8) for _ in range(10)]):
                assert [slots["y"] for slots in found] == [[1] * 5] * 8


@pytest.mark.parametrize("shared", [True, False])
async def test_killing_a_worker_in_a_collective_retries_the_gang_with_the_same_bits(
    tmp_path: Path, shared: bool
) -> None:
    async with LocalCluster(workers=2, shared_memory=shared) as cluster:
        await all_join(cluster)
        (tmp_path / "died").touch()
        undisturbed = await step(cluster, "dies_once", [str(tmp_path)] * 4)
        (tmp_path / "died").unlink()
        assert digest(await step(cluster, "dies_once", [str(tmp_path)] * 4)) == digest(undisturbed)
        assert (tmp_path / "died").exists()


@pytest.mark.parametrize(("workers", "shared"), [(1, True), (2, True), (2, False)])
async def test_a_hung_member_is_killed_and_the_gang_restarts(
    tmp_path: Path, workers: int, shared: bool
) -> None:
    async with LocalCluster(workers=workers, shared_memory=shared) as cluster:
        await all_join(cluster)
        for replica in range(4):
            (tmp_path / f"came{replica}").touch()
        undisturbed = await step(cluster, "hangs_once", [str(tmp_path)] * 4)
        for replica in range(4):
            (tmp_path / f"came{replica}").unlink()
        assert digest(await step(cluster, "hangs_once", [str(tmp_path)] * 4)) == digest(undisturbed)
        assert len(os.listdir(tmp_path)) == 4


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "kind", ["kind", "op", "shape", "dtype", "tree", "order", "source", "function", "returned"]
)
async def test_a_mismatch_is_the_steps_error(kind: str, shared: bool) -> None:
    async with LocalCluster(workers=2, shared_memory=shared) as cluster:
        await all_join(cluster)
        with pytest.raises(CallError) as caught:
            await step(cluster, "mismatch", [kind] * 4)  # at once: hung replicas have ten minutes
        assert isinstance(caught.value.__cause__, CollectiveMismatchError)
        assert "gang_functions.py" in str(caught.value.__cause__)
        assert await step(cluster, "in_main_thread", [0] * 4)  # the next step works


@pytest.mark.parametrize("shared", [True, False])
async def test_the_lowest_replica_that_raised_is_the_steps_error(shared: bool) -> None:
    async with LocalCluster(workers=2, shared_memory=shared) as cluster:
        await all_join(cluster)
        for failing in (3, 0):
            with pytest.raises(CallError) as caught:
                await step(cluster, "raises_on", [failing] * 4)
            assert caught.value.replica == failing
            assert isinstance(caught.value.__cause__, KeyError)


async def test_shared_is_rejected_without_shared_memory() -> None:
    async with LocalCluster(workers=2, shared_memory=False) as cluster:
        await all_join(cluster)
        with pytest.raises(CallError) as caught:
            await step(cluster, "every_kind", [0] * 2, communication=(0, None, "shared"))
        assert isinstance(caught.value.__cause__, UsageError)
        with pytest.raises(CallError, match="'shared' needs") as caught:
            await step(cluster, "forced", [0] * 2)
        assert isinstance(caught.value.__cause__, ValueError)
    async with LocalCluster(workers=2) as cluster:
        await all_join(cluster)
        assert await step(cluster, "forced", [0] * 2) == [2, 2]
