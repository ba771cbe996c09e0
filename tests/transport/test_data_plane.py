"""Runs with and without shared memory give the same bytes, through the public API."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.protocol.wire import Reference
from pipedist.transport.shared_memory.link import Link
from tests.runs import test_determinism as bits

from .memory import is_shared, memory_left, until
from .sockets import descriptors

F = "tests.runs.functions"
ROWS = np.random.default_rng(0).standard_normal((60, 20_000)).astype(np.float32)

kept: list[tuple[np.ndarray[Any, Any], float]] = []
"""What `remembers` has seen, in a worker, with its sum."""


def remembers(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Keeps its shards, as user code may, and returns their values later."""
    kept.append((x, float(x.sum())))
    intact = all(float(old.sum()) == total for old, total in kept)
    return {"x": x * 2, "intact": np.array([intact]), "shared": np.array([is_shared(x)])}


def spec(folder: str, run: str = "dies_once") -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "plane",
        "replicas": 2,
        "dataset": {"arrays": ROWS, "batch": 4},
        "stages": {
            "y": {"run": f"{F}:{run}", "with": {"folder": folder} if folder else {}},
            "total": {"reduce": "sum", "of": "y", "axis": 0},
            "rows": {"gather": 0, "of": "y"},
        },
        "outputs": {"total": "total.npy", "rows": "rows.npy"},
    }


@pytest.fixture
def borrowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the shared frames that this process gets."""
    counts: list[int] = []
    original = Link.frames

    def counting(self: Link, references: Sequence[Reference]) -> list[memoryview]:
        counts.append(len(references))
        return original(self, references)

    monkeypatch.setattr(Link, "frames", counting)
    return counts


@pytest.mark.slow
def test_killed_workers_and_the_transport_never_change_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, borrowed: list[int]
) -> None:
    before = memory_left()
    found = {}
    for setting in ("0", "1"):
        monkeypatch.setenv("PIPEDIST_SHARED_MEMORY", setting)
        deaths = tmp_path / f"deaths{setting}"
        deaths.mkdir()
        folder = tmp_path / f"out{setting}"
        pipedist.run(spec(str(deaths)), workers=2, output=folder)
        assert len(list(deaths.iterdir())) >= 3
        found[setting] = bits.digests(folder)
        assert bool(borrowed) == (setting == "1")
    assert found["0"] == found["1"]
    assert len(found["0"]) == 2
    assert memory_left() == before


@pytest.mark.parametrize("setting", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_every_bit_of_the_determinism_spec(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = bits.spec(f"{bits.F}:jittered")
    monkeypatch.setenv("PIPEDIST_SHARED_MEMORY", setting)
    found = bits.outputs(tmp_path / "here", document, workers=2)
    monkeypatch.setenv("PIPEDIST_SHARED_MEMORY", "0")
    assert found == bits.outputs(tmp_path / "reference", document, workers=1)


@pytest.mark.asyncio
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "frames"])
async def test_the_parameter_of_a_cluster(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEDIST_SHARED_MEMORY", raising=False)
    async with pipedist.LocalCluster(workers=2, shared_memory=shared) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        dataset = strategy.distribute_dataset(strategy.make_numpy_dataset(ROWS).batch(4))
        seen = 0
        async for x in dataset:
            result = await strategy.run(remembers, args=(x,))
            for part, of in zip(strategy.local_results(result), strategy.local_results(x), strict=True):
                assert np.array_equal(part["x"], of * 2)
                assert part["intact"].all()
                assert part["shared"].all() == is_shared(part["x"]) == shared
                seen += 1
        assert seen == 30


@pytest.mark.asyncio
async def test_clusters_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEDIST_SHARED_MEMORY", raising=False)

    async def once() -> None:
        async with pipedist.LocalCluster(workers=2) as cluster:
            strategy = pipedist.Strategy(cluster, replicas=2)
            parts = pipedist.PerReplica([ROWS, ROWS])
            await strategy.run(np.negative, args=(parts,))
            cluster.kill(0)
            await strategy.run(np.negative, args=(parts,))

    await once()
    before = descriptors()
    for _ in range(3):
        await once()
    await until(lambda: descriptors() <= before)  # ZeroMQ closes some in a thread of its own
