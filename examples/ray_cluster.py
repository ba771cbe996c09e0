"""Workers placed by Ray: a million square roots, on a Ray of this host or on one that runs already.

pip install 'pipedist[ray]'
python examples/ray_cluster.py             # starts a Ray of its own
python examples/ray_cluster.py auto        # the Ray that runs here, or ray://HOST:10001
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

import pipedist

SPEC = {
    "pipedist": 1,
    "replicas": 4,
    "dataset": {"range": 1_000_000, "batch": 100_000},
    "stages": {
        "roots": {"run": lambda shard: np.sqrt(shard)},
        "mean": {"reduce": "mean", "of": "roots", "axis": 0},
    },
}


async def main(address: str) -> None:
    async with (
        pipedist.RayCluster(workers=2, address=address, placement="spread") as cluster,
        pipedist.open(SPEC, cluster=cluster) as run,
    ):
        result = await run.results()
    print(f"mean of sqrt over 1,000,000 elements: {result['mean']:.6f}")


asyncio.run(main(*sys.argv[1:] or ["local"]))
