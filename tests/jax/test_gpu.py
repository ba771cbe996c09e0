"""TPUStrategy on GPUs: needs a CUDA device, and jax with CUDA."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

import pipedist
from pipedist.core import gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpus.found().gpus, reason="no CUDA device: make test-gpu on a machine with one"),
]


def test_replicas_are_gpus() -> None:
    async def check() -> None:
        async with pipedist.LocalCluster(workers=1) as cluster:
            strategy = pipedist.TPUStrategy(cluster, platform="gpu")
            x = strategy.distribute_values_from_function(lambda context: np.arange(3, dtype=np.float32))
            total = await strategy.run(lambda x, ctx: ctx.all_reduce("sum", x), (x,))
            assert np.array_equal(total[0], np.arange(3) * strategy.num_replicas_in_sync)

    anyio.run(check)
