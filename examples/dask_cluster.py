"""Workers kept by Dask: a million square roots, on a Dask of this process or on one that runs already.

pip install 'pipedist[dask]'
python examples/dask_cluster.py                         # Dask workers of its own
python examples/dask_cluster.py tcp://10.0.0.1:8786   # those of this scheduler
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
        pipedist.DaskCluster(workers=2, address=address) as cluster,
        pipedist.open(SPEC, cluster=cluster) as run,
    ):
        result = await run.results()
    print(f"mean of sqrt over 1,000,000 elements: {result['mean']:.6f}")


asyncio.run(main(*sys.argv[1:] or ["local"]))
