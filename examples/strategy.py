"""tf.distribute's own shape: a strategy, a distributed dataset, run, reduce, gather."""

import anyio

import pipedist


def square(x):
    return x * x


async def main():
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        dataset = strategy.distribute_dataset(pipedist.Dataset.range(10).batch(4))
        async for x in dataset:
            y = await strategy.run(square, args=(x,))  # PerReplica
            total = await strategy.reduce("sum", y, axis=0)
            rows = await strategy.gather(y, axis=0)
            print([part.tolist() for part in strategy.local_results(y)], int(total), rows.tolist())


if __name__ == "__main__":
    anyio.run(main)
