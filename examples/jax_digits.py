"""Training on JAX devices: handwritten digits on 8 CPU devices, beside the same training in NumPy.

pip install 'pipedist[jax]'
python examples/jax_digits.py
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import pipedist

sys.path.insert(0, str(Path(__file__).parents[1] / "specs"))
import digits  # its data, first weights, and the gradients in NumPy

REPLICAS, BATCH, STEPS, RATE = 8, 64, 220, 0.5
TOLERANCE = 1e-9  # XLA sums in another order than NumPy: relative difference of the weights, after all steps


def loss(weights, pixels, label):
    hidden = jnp.tanh(pixels @ weights["w1"] + weights["b1"])
    scores = hidden @ weights["w2"] + weights["b2"]
    return (jnp.log(jnp.exp(scores).sum(axis=1)) - scores[jnp.arange(len(label)), label]).sum()


def compiled(weights):
    """Return the step function of the TPUStrategy: its gradients are those of JAX."""

    def step(shard):
        import jax

        value, slopes = jax.value_and_grad(loss)(weights.value(), shard["pixels"], shard["label"])
        weights.assign_sub({name: RATE / BATCH * slope for name, slope in slopes.items()})
        return value

    return step


def plain(weights):
    """Return the step function in NumPy."""

    def step(shard):
        slopes = digits.gradients(shard, weights.value())
        weights.assign_sub({name: RATE / BATCH * slopes[name] for name in weights.value()})
        return slopes["loss"]

    return step


async def train(strategy, make):
    with strategy.scope():
        weights = pipedist.Variable(digits.random(hidden=32, seed=0), aggregation="sum")
    images = pipedist.Dataset.from_tensor_slices(digits.images("train")).repeat(STEPS).batch(BATCH, True)
    losses = []
    async for values in strategy.run_steps(make(weights), strategy.distribute_dataset(images.take(STEPS))):
        losses.append(await strategy.reduce("sum", values, axis=None) / BATCH)
    return weights.numpy(), losses


async def main():
    async with pipedist.LocalCluster(workers=1) as cluster:
        tpu = pipedist.TPUStrategy(cluster, platform="cpu", replicas=REPLICAS, steps_per_run=20)
        trained, losses = await train(tpu, compiled)
        expected, _ = await train(pipedist.MirroredStrategy(cluster, replicas=REPLICAS), plain)
    difference = max(
        float(np.abs(trained[name] - value).max() / np.abs(value).max()) for name, value in expected.items()
    )
    assert difference < TOLERANCE, f"the weights differ by {difference}"
    held_out = digits.images("held_out")
    print(f"{STEPS} steps on {REPLICAS} devices: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"accuracy on held-out images: {digits.correct(held_out, trained).mean():.3f}")
    print(f"largest difference to NumPy: below {TOLERANCE:g}")


asyncio.run(main())
