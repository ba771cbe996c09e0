"""TPUStrategy on CPU devices: results, collectives, variables, errors, steps per run."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import anyio
import numpy as np
import pytest

import pipedist
from pipedist import CallError, Dataset, PerReplica

pytestmark = pytest.mark.asyncio(loop_scope="module")


def on_cpu(cluster: Any, replicas: int = 4, **options: Any) -> pipedist.TPUStrategy:
    return pipedist.TPUStrategy(cluster, platform="cpu", replicas=replicas, **options)


def ramp(strategy: Any, dtype: Any = np.float32) -> Any:
    """Return r + [0, 1, 2] in replica r."""
    return strategy.distribute_values_from_function(
        lambda context: np.arange(3, dtype=dtype) + dtype(context.replica_id_in_sync_group)
    )


def same(value: Any, expected: Any) -> None:
    """Compare per-replica values, bits, shapes and dtypes included."""
    assert len(value) == len(expected)
    for a, b in zip(value, expected, strict=True):
        assert (np.asarray(a).dtype, np.shape(a)) == (np.asarray(b).dtype, np.shape(b))
        assert np.array_equal(a, b)


def collect(x: Any, scale: float, ctx: Any) -> Any:
    return {
        "scaled": x * scale,
        "id": ctx.replica_id_in_sync_group + 0,
        "step": ctx.step,
        "constant": [3, "text", None],
        **{op: ctx.all_reduce(op, x) for op in ("sum", "mean", "min", "max", "prod")},
        "gathered": ctx.all_gather(x, axis=-1),
        "sent": ctx.broadcast({"x": x}, source=ctx.num_replicas_in_sync - 1),
    }


@pytest.mark.parametrize("replicas", [8, 4, 2, 1])
async def test_results_equal_those_of_a_mirrored_strategy(cluster: Any, replicas: int) -> None:
    strategy, other = on_cpu(cluster, replicas), pipedist.MirroredStrategy(cluster, replicas=replicas)
    found = await strategy.run(collect, (ramp(strategy), 0.5))
    expected = await other.run(collect, (ramp(other), 0.5))
    assert found["constant"][2] is None
    assert [list(each) for each in found["constant"][:2]] == [[3] * replicas, ["text"] * replicas]
    for key in ("scaled", "sum", "mean", "min", "max", "prod", "gathered"):
        same(found[key], expected[key])
    same(found["sent"]["x"], expected["sent"]["x"])
    assert list(found["id"]) == list(range(replicas))
    assert (await strategy.reduce("sum", found["scaled"], axis=0)) == await other.reduce(
        "sum", expected["scaled"], axis=0
    )
    assert np.array_equal(
        await strategy.gather(found["scaled"], 0), await other.gather(expected["scaled"], 0)
    )
    assert len(strategy.local_results(found["scaled"])) == replicas
    assert strategy.devices == tuple(f"cpu:{replica}" for replica in range(replicas))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int8, np.uint32, np.int64, np.complex64])
async def test_dtypes_are_those_of_numpy(cluster: Any, dtype: Any) -> None:
    def both(x: Any, ctx: Any) -> Any:
        return x, ctx.all_reduce("sum", x), ctx.all_reduce("mean", x)

    strategy, other = on_cpu(cluster), pipedist.MirroredStrategy(cluster, replicas=4)
    found, expected = (
        await strategy.run(both, (ramp(strategy, dtype),)),
        await other.run(both, (ramp(other, dtype),)),
    )
    for a, b in zip(found, expected, strict=True):
        same(a, b)


async def test_a_function_is_compiled_once_for_its_shapes(cluster: Any) -> None:
    def traced(x: Any, flag: bool) -> Any:
        with open(path, "a") as traces:
            traces.write("t")
        return x + 1 if flag else x

    with tempfile.NamedTemporaryFile() as file:
        path = file.name
        strategy = on_cpu(cluster)
        for _ in range(3):
            await strategy.run(traced, (ramp(strategy), True))
        assert len(file.read()) == 1
        await strategy.run(traced, (ramp(strategy), False))  # another constant
        await strategy.run(traced, (ramp(strategy, np.float64), False))  # another dtype
        assert len(file.read()) == 2
        await strategy.aclose()
        again = on_cpu(cluster)
        await again.run(lambda x: x, (ramp(again),))  # another number of the function in its strategy
        await again.run(traced, (ramp(again), True))
        assert file.read() == b""


async def test_incomplete_batches_run_without_collectives(cluster: Any) -> None:
    strategy = on_cpu(cluster)
    batches = strategy.distribute_dataset(Dataset.from_tensor_slices(np.arange(9.0)).batch(8))
    sums = [await strategy.run(lambda x: x.sum(), (batch,)) async for batch in batches]
    assert [list(each) for each in sums] == [[1, 5, 9, 13], [8, 0, 0, 0]]


async def test_gathering_unequal_shapes_names_the_shapes_of_each_replica(cluster: Any) -> None:
    strategy = on_cpu(cluster, 2)
    x = PerReplica([np.zeros((2, 3)), np.zeros((1, 3))])
    with pytest.raises(CallError) as caught:
        await strategy.run(lambda x, ctx: ctx.all_gather(x, 0), (x,))
    assert isinstance(caught.value.__cause__, ValueError)
    text = str(caught.value.__cause__)
    assert "all_gather needs tensors of the same rank and shape in all replicas" in text
    assert "replica 0: all_gather of float64[2, 3]" in text
    assert "replica 1: all_gather of float64[1, 3]" in text


def branches(x: Any) -> Any:
    return x if x.sum() > 1 else -x


def uses_numpy(x: Any) -> Any:
    return np.sort(x)


def draws(x: Any, ctx: Any) -> Any:
    return ctx.rng.normal()


def merges(x: Any, ctx: Any) -> Any:
    return ctx.merge_call(lambda strategy, x: x, (x,))


def fails(x: Any) -> Any:
    raise KeyError("its own error")


async def waits(x: Any) -> Any:
    import asyncio

    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (branches, TypeError, "branches cannot be compiled by JAX.*jax.lax.cond"),
        (
            uses_numpy,
            TypeError,
            "JAX: .*, at test_tpu_strategy.py:[0-9]+ in uses_numpy. .*jax.numpy in place of NumPy",
        ),
        (draws, RuntimeError, "use jax.random"),
        (merges, RuntimeError, "merge_call runs Python code for all replicas at once. Use ctx.all_reduce"),
        (waits, RuntimeError, "may await collectives only"),
        (fails, KeyError, "its own error"),
    ],
)
async def test_functions_that_cannot_be_compiled(cluster: Any, function: Any, error: Any, text: str) -> None:
    strategy = on_cpu(cluster)
    with pytest.raises(CallError) as caught:
        await strategy.run(function, (ramp(strategy),))
    with pytest.raises(error, match=text):
        raise caught.value.__cause__  # type: ignore[misc]
    assert len(await strategy.run(lambda x: x, (ramp(strategy),))) == 4  # the next step works


async def test_arrays_of_text_and_unequal_constants_are_errors(cluster: Any) -> None:
    strategy = on_cpu(cluster, 2)
    with pytest.raises(CallError, match="JAX has no arrays of <U1"):
        await strategy.run(lambda x: x, (np.array(["a"]),))
    values = await strategy.run(lambda x, how: x.sum() if how == "sum" else x, (ramp(strategy), "sum"))
    assert list(values) == [3, 6]


async def test_async_functions_await_collectives(cluster: Any) -> None:
    async def total(x: Any, ctx: Any) -> Any:
        return await ctx.all_reduce("sum", x)

    async def forgets(x: Any, ctx: Any) -> Any:
        ctx.all_reduce("sum", x)
        return x

    strategy = on_cpu(cluster, 2)
    same(await strategy.run(total, (ramp(strategy),)), [np.array([1, 3, 5], np.float32)] * 2)
    with pytest.raises(CallError, match="was not awaited"):
        await strategy.run(forgets, (ramp(strategy),))


def train(w: Any, count: Any) -> Any:
    import jax

    def step(x: Any, rate: float) -> Any:
        gradient = jax.grad(lambda w: ((x * w) ** 2).sum())(w.value())
        w.assign_sub(rate * gradient)
        count.assign_add(x.sum())
        return w * x, x @ w

    return step


async def test_variables_equal_those_of_a_mirrored_strategy(cluster: Any) -> None:
    def plain_step(w: Any, count: Any) -> Any:
        def step(x: Any, rate: float) -> Any:
            w.assign_sub((rate * 2 * x * x * w).astype(np.float32))
            count.assign_add(x.sum())
            return w * x, x @ w

        return step

    results = []
    for strategy, make in (
        (on_cpu(cluster, 2), train),
        (pipedist.MirroredStrategy(cluster, replicas=2), plain_step),
    ):
        with strategy.scope():
            w = pipedist.Variable(np.ones(3, np.float32), name="w", aggregation="sum")
            count = pipedist.Variable(
                np.float32(0), name="count", synchronization="on_read", aggregation="sum"
            )
        for _ in range(3):
            found = await strategy.run(make(w, count), (ramp(strategy), 0.125))
        results.append((w.numpy(), count.value(), *found[0], *found[1]))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


async def test_assignment_rules_hold(cluster: Any) -> None:
    strategy = on_cpu(cluster, 2)
    with strategy.scope():
        plain = pipedist.Variable(np.zeros(3, np.float32), name="plain")
        summed = pipedist.Variable(np.zeros(3, np.float32), name="summed", aggregation="sum")
        first = pipedist.Variable(np.zeros(3, np.float32), name="first", aggregation="only_first_replica")
    for function, text in (
        (lambda x: plain.assign(x), "has no aggregation"),
        (lambda x: summed.assign(x.astype("float64")), "dtype float64 to the variable 'summed'"),
        (lambda x: summed.assign(x[:2]), r"shape \[2\] to the variable 'summed'"),
    ):
        with pytest.raises(CallError, match=text):
            await strategy.run(function, (ramp(strategy),))
    await strategy.run(lambda x: first.assign(x + 1), (ramp(strategy),))
    assert first.numpy().tolist() == [1, 2, 3]
    assert summed.numpy().tolist() == [0, 0, 0]


@pytest.mark.parametrize("steps_per_run", [2, 4, 16])
async def test_steps_per_run_give_the_results_of_single_steps(cluster: Any, steps_per_run: int) -> None:
    async def losses(steps: int | None) -> tuple[list[Any], Any]:
        strategy = on_cpu(cluster, 2, steps_per_run=steps)
        assert strategy.steps_per_run == (steps or 1)
        with strategy.scope():
            w = pipedist.Variable(np.float64(1), aggregation="mean")

        def step(x: Any, ctx: Any) -> Any:
            w.assign(w * 0.5 + ctx.all_reduce("sum", x.sum()))
            return {"w": w.value(), "step": ctx.step}

        data = strategy.distribute_dataset(Dataset.from_tensor_slices(np.arange(22.0) ** 0.5).batch(4, True))
        return [each async for each in strategy.run_steps(step, data)], w.numpy()

    single, last = await losses(None)
    grouped, last_grouped = await losses(steps_per_run)
    assert len(single) == len(grouped) == 5
    for a, b in zip(single, grouped, strict=True):
        same(a["w"], b["w"])
        same(a["step"], b["step"])
    assert np.array_equal(last, last_grouped)


async def test_groups_with_an_incomplete_batch(cluster: Any) -> None:
    strategy = on_cpu(cluster, 2, steps_per_run=3)
    data = strategy.distribute_dataset(Dataset.from_tensor_slices(np.arange(10.0)).batch(4))
    found = [list(each) async for each in strategy.run_steps(lambda x: x.sum(), data)]
    assert found == [[1, 5], [9, 13], [8, 9]]


async def test_same_bits_from_run_to_run(cluster: Any) -> None:
    def mix(x: Any, ctx: Any) -> Any:
        import jax.numpy as jnp

        y = jnp.tanh(x @ x.T)
        return ctx.all_reduce("sum", y), ctx.all_reduce("mean", y.sum())

    strategy = on_cpu(cluster, 8)
    x = strategy.distribute_values_from_function(
        lambda c: np.random.default_rng(c.replica_id_in_sync_group).normal(size=(64, 33)).astype(np.float32)
    )
    before = await strategy.run(mix, (x,))
    await cluster.restart(0)
    after = await strategy.run(mix, (x,))
    for a, b in zip(before, after, strict=True):
        same(a, b)


async def test_a_device_assignment_chooses_the_devices(cluster: Any) -> None:
    topology = pipedist.TPUTopology((4, 1, 1, 1))
    assignment = pipedist.DeviceAssignment(topology, [[[3, 0, 0, 0]], [[1, 0, 0, 0]]])
    strategy = pipedist.TPUStrategy(cluster, platform="cpu", device_assignment=assignment)
    assert strategy.num_replicas_in_sync == 2
    assert strategy.devices == ("cpu:3", "cpu:1")
    assert strategy.device_assignment is assignment
    same(await strategy.run(lambda x: x * 2, (ramp(strategy),)), [2 * x for x in ramp(strategy)])


async def test_wrong_arguments_are_errors(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pipedist.UsageError, match=r"no TPU.*platform='cpu'"):
        pipedist.TPUStrategy(cluster)
    with pytest.raises(ValueError, match="platform is 'npu'"):
        pipedist.TPUStrategy(cluster, platform="npu")
    with pytest.raises(ValueError, match="steps_per_run"):
        on_cpu(cluster, steps_per_run=0)
    with pytest.raises(TypeError, match="TPUClusterResolver"):
        pipedist.TPUStrategy(cluster, "local", platform="cpu")  # type: ignore[arg-type]
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=6")
    assert pipedist.TPUStrategy(cluster, platform="cpu").num_replicas_in_sync == 6


async def test_nothing_imports_jax_without_need() -> None:
    code = (
        "import asyncio, sys, pipedist, numpy as np\n"
        "async def main():\n"
        "    async with pipedist.LocalCluster(workers=1) as cluster:\n"
        "        pipedist.TPUStrategy(cluster, platform='cpu', replicas=2)\n"
        "        loaded = await pipedist.Strategy(cluster).run(lambda: 'jax' in __import__('sys').modules)\n"
        "        assert not loaded[0] and 'jax' not in sys.modules\n"
        "asyncio.run(main())\n"
    )
    await anyio.run_process([sys.executable, "-c", code])


async def test_variables_stay_on_their_devices_between_steps(cluster: Any) -> None:
    strategy = on_cpu(cluster, 2)
    with strategy.scope():
        w = pipedist.Variable(np.zeros(3, np.float32), aggregation="sum")

    def count_copies(x: Any) -> Any:  # traced once, in the worker
        from pipedist.worker.jax_mesh import Mesh

        def counted(self: Any, value: Any) -> Any:
            counts.append(value)
            return put_copies(self, value)

        put_copies, counts = Mesh.put_copies, []
        Mesh.put_copies, Mesh.counts = counted, counts  # type: ignore[method-assign, attr-defined]
        return w.assign_add(x)

    def copied() -> int:
        from pipedist.worker.jax_mesh import Mesh

        return len(Mesh.counts) + 0 * int(w.shape[0])  # type: ignore[attr-defined]

    x = ramp(strategy)
    await strategy.run(count_copies, (x,))
    for _ in range(3):
        await strategy.run(lambda x: w.assign_add(x), (x,))
    assert list(await strategy.run(copied)) == [0, 0]
    w.assign(np.full(3, 5, np.float32))
    await strategy.run(lambda x: w.assign_add(x), (x,))
    assert w.numpy().tolist() == [6, 8, 10]
    await cluster.restart(0)
