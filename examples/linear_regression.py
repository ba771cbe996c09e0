"""Training on several replicas: variables, collectives, and the gradients' sum (tf.distribute's shape)."""

import anyio
import numpy as np

import pipedist

ROWS, BATCH, RATE = 400, 50, 0.4


def data():
    x = np.random.default_rng(0).normal(size=(ROWS, 3))
    return x, x @ [1.0, -2.0, 0.5] + 0.25


async def main():
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.MirroredStrategy(cluster)
        with strategy.scope():
            w = pipedist.Variable(np.zeros(3), name="w", aggregation="sum")
            b = pipedist.Variable(0.0, name="b", aggregation="sum")

        def step(x, y):
            rows = pipedist.get_replica_context().all_reduce("sum", len(x))
            error = x @ w + b - y
            w.assign_sub(RATE / rows * (x.T @ error))  # the sum of what the replicas bring is subtracted
            b.assign_sub(RATE / rows * error.sum())
            return error * error

        dataset = strategy.distribute_dataset(pipedist.Dataset.from_tensor_slices(data()).batch(BATCH))
        for epoch in range(5):
            async for batch in dataset:
                squared = await strategy.run(step, args=batch)
            print(f"epoch {epoch}: {await strategy.reduce('mean', squared, axis=0):.6f}")
        print("w =", w.numpy().round(3), "b =", b.numpy().round(3))


if __name__ == "__main__":
    anyio.run(main)
