"""TPUStrategy over several processes, as on several hosts: one mesh, also after workers died in a step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import pipedist

REPLICAS = 4


def ramp(strategy: Any) -> Any:
    return strategy.distribute_values_from_function(
        lambda context: np.arange(3.0) ** 0.5 + context.replica_id_in_sync_group
    )


def collect(x: Any, ctx: Any) -> Any:
    return ctx.all_reduce("sum", x), ctx.all_gather(x, 0), ctx.replica_id_in_sync_group + 0, ctx.step


def text(result: Any) -> list[Any]:
    return [np.asarray(each).tolist() for value in result for each in value]


def dies_once(marker: str, how: int = signal.SIGKILL) -> Any:
    def step(x: Any, ctx: Any) -> Any:
        import jax

        path = Path(marker)
        if jax.process_index() == jax.process_count() - 1 and not path.exists():
            path.touch()
            os.kill(os.getpid(), how)
        return collect(x, ctx)

    return step


async def check(workers: int, folder: Path) -> None:
    with anyio.fail_after(100):
        async with pipedist.LocalCluster(workers=workers) as cluster:
            strategy = pipedist.TPUStrategy(cluster, platform="cpu", replicas=REPLICAS)
            each = REPLICAS // workers
            assert strategy.devices == tuple(f"cpu:{replica % each}" for replica in range(REPLICAS))
            x = ramp(strategy)
            with strategy.scope():
                total = pipedist.Variable(np.zeros(3), aggregation="sum")
            first = await strategy.run(collect, (x,))
            whole = np.concatenate(list(x))
            for own in first[1]:
                assert np.array_equal(own, whole)
            np.testing.assert_allclose(first[0][0], sum(x), rtol=1e-15)
            assert list(first[2]) == list(range(REPLICAS))
            killed = await strategy.run(dies_once(str(folder / "died")), (x,))
            assert (folder / "died").exists()
            assert text(killed) == text(first)
            for _ in range(2):
                await strategy.run(lambda x: total.assign_add(x), (x,))
            np.testing.assert_allclose(total.numpy(), 2 * sum(x), rtol=1e-15)
            odd = pipedist.PerReplica([np.zeros(2)] * (REPLICAS - 1) + [np.zeros(1)])
            with pytest.raises(pipedist.CallError, match="all_gather of float64"):
                await strategy.run(lambda x, ctx: ctx.all_gather(x, 0), (odd,))
            assert text(await strategy.run(collect, (x,)))[: 3 * REPLICAS] == text(first)[: 3 * REPLICAS]


def test_two_processes_are_one_mesh(tmp_path: Path) -> None:
    anyio.run(check, 2, tmp_path)


@pytest.mark.slow
def test_four_processes_are_one_mesh(tmp_path: Path) -> None:
    anyio.run(check, 4, tmp_path)


@pytest.mark.slow
def test_a_worker_that_stops_in_a_step_is_replaced(tmp_path: Path) -> None:
    async def stop() -> None:
        with anyio.fail_after(100):
            async with pipedist.LocalCluster(workers=2) as cluster:
                strategy = pipedist.TPUStrategy(cluster, platform="cpu", replicas=REPLICAS)
                x = ramp(strategy)
                with anyio.fail_after(
                    30
                ):  # also in the first step: gloo would wait as long for its connections
                    found = await strategy.run(dies_once(str(tmp_path / "stopped"), signal.SIGSTOP), (x,))
                assert (tmp_path / "stopped").exists()
                np.testing.assert_allclose(found[0][0], sum(x), rtol=1e-15)

    anyio.run(stop)


WAITED = "the mesh of a TPUStrategy has waited 4 s for members 1"


def hanging(marker: str, times: int) -> dict[str, Any]:
    """Return a spec whose function hangs in the last process, so many times."""

    def total(shard: Any, ctx: Any) -> Any:
        import time

        import jax

        if jax.process_index() == 1:
            with Path(marker).open("a+") as file:
                file.write("x")
                if file.tell() <= times:
                    time.sleep(60)
        return ctx.all_reduce("sum", shard.sum())[None]

    compiled = {"compile": "jax", "collectives": {"timeout_s": 4}, "resources": {"devices": "cpu"}}
    return {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 8, "batch": 8},
        "stages": {"total": {"run": total, **compiled}, "totals": {"gather": 0, "of": "total"}},
    }


def test_a_process_that_hangs_while_it_traces_is_named_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert pipedist.run(hanging(str(tmp_path / "hung"), 1), workers=2)["totals"].tolist() == [28, 28]
    assert WAITED in caplog.text


@pytest.mark.slow
def test_a_step_whose_process_always_hangs_fails_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(pipedist.CallError, match=WAITED):
        pipedist.run(hanging(str(tmp_path / "hung"), 99), workers=2)
