"""Tests that need an accelerator: replicas compute on their assigned devices."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.core import gpus as accelerators


def _devices() -> int:
    """Return how many CUDA devices there are, without loading what would read their number for good."""
    return 0 if importlib.util.find_spec("torch") is None else len(accelerators.found().gpus)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        _devices() == 0, reason="no CUDA device, or no torch: make test-gpu on a machine with both"
    ),
]


@pytest.mark.asyncio
async def test_replicas_train_on_their_devices_and_agree() -> None:
    def step(x: float) -> tuple[str, int, float]:
        import torch

        ctx = pipedist.get_replica_context()
        assert ctx is not None
        mine = torch.full((1024,), x, device=ctx.device, dtype=torch.float32)
        total = ctx.all_reduce("sum", mine.sum().cpu().numpy())
        return ctx.device, torch.cuda.device_count(), float(total)

    count = _devices()
    devices = [f"cuda:{number % count}" for number in range(4)]
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.MirroredStrategy(cluster, devices=devices)
        x = strategy.distribute_values_from_function(lambda ctx: float(ctx.replica_id_in_sync_group))
        names, seen, totals = await strategy.run(step, args=(x,))
    assert all(name.startswith("cuda:") for name in names)
    assert set(seen) <= {min(2, count)}  # each worker has two of the replicas, and sees their devices
    assert set(totals) == {1024.0 * (0 + 1 + 2 + 3)}


@pytest.mark.asyncio
async def test_calls_that_need_a_gpu_have_one_to_themselves_and_return_its_tensors() -> None:
    def square(shard: np.ndarray, ctx: Any) -> dict[str, Any]:
        import torch

        x = torch.as_tensor(shard, device=ctx.device)
        assert x.is_cuda
        assert torch.cuda.device_count() == 1  # it sees its own alone
        return {"rows": x * x, "half": (x / 2).to(torch.bfloat16), "pid": torch.tensor([os.getpid()])}

    spec = {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"arrays": np.arange(64, dtype=np.float32), "batch": 8},
        "stages": {
            "squares": {"run": square, "resources": {"gpus": 1}},
            "all": {"gather": 0, "of": "squares"},
        },
    }
    async with pipedist.open(spec, workers=_devices() + 1) as run:
        rows = (await run.results())["all"]
    assert np.array_equal(rows["rows"], np.arange(64, dtype=np.float32) ** 2)
    assert np.array_equal(rows["half"].astype(np.float32), np.arange(64, dtype=np.float32) / 2)
    assert len(set(rows["pid"].tolist())) <= _devices()


@pytest.mark.asyncio
async def test_a_collective_takes_tensors_of_a_gpu() -> None:
    def step(shard: np.ndarray, ctx: Any) -> Any:
        import torch

        mine = torch.as_tensor(shard, device=ctx.device)
        return torch.as_tensor(ctx.all_reduce("sum", mine.sum()), device=ctx.device).reshape(1)

    spec = {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"arrays": np.arange(16, dtype=np.int64), "batch": 16},
        "stages": {
            "total": {"run": step, "collectives": True, "resources": {"gpus": 0.5}},
            "all": {"gather": 0, "of": "total"},
        },
    }
    async with pipedist.open(spec, workers=2) as run:
        assert (await run.results())["all"].tolist() == [120, 120]
