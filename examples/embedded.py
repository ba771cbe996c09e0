"""The embedded API: one cluster, a sweep over a parameter, results streamed step by step."""

import anyio
import numpy as np

import pipedist


def tail(x, threshold):
    """Values above a threshold: how many, and their sum."""
    above = x[x > threshold]
    return {"count": len(above), "sum": above.sum()}


def spec(values):
    return {
        "pipedist": 1,
        "params": {"threshold": 0.0},
        "replicas": 4,
        "dataset": {"arrays": values, "batch": 10_000},
        "stages": {
            "tail": {"run": tail, "with": {"threshold": "${params.threshold}"}},
            "total": {"reduce": "sum", "of": "tail", "axis": None},
        },
    }


async def main():
    document = spec(np.random.default_rng(0).standard_normal(100_000))
    async with pipedist.LocalCluster(workers=2) as cluster:  # its workers serve all runs
        for threshold in (0.0, 1.0, 2.0):
            async with pipedist.open(document, cluster=cluster, params={"threshold": threshold}) as run:
                counts = []
                async for step in run.steps("tail", "total"):  # in step order, as they become visible
                    assert len(step["tail"]) == 4  # a PerReplica: one component for each replica
                    counts.append(int(step["total"]["count"]))  # of a reduce: this step's own value
                result = await run.results()
                print(f"above {threshold}: {result['total']['count']} of 100000, by step {counts}")


if __name__ == "__main__":
    anyio.run(main)
