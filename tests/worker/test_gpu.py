"""What needs an accelerator: replicas compute on the devices that they were assigned."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

import pytest

import pipedist


def _devices() -> int:
    """Return how many CUDA devices there are, without loading what would read their number for good."""
    if importlib.util.find_spec("torch") is None or (command := shutil.which("nvidia-smi")) is None:
        return 0
    listed = subprocess.run([command, "--list-gpus"], capture_output=True, text=True, check=False)
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


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
