"""`resources: {gpus: N}`: who owns GPUs gets the calls that need any; a fake `nvidia-smi` lists them."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.core import gpus as accelerators
from pipedist.errors import PlanError, SpecError, UsageError
from pipedist.plan import compile_plan
from pipedist.plan.view import as_json, as_text
from pipedist.spec import load
from tests.worker import gpu_functions

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Say how many GPUs this machine has, and which of them this process is let see."""
    tool = tmp_path / "bin" / "nvidia-smi"

    def has(gpus: int | None, visible: str | None = None) -> None:
        tool.parent.mkdir(exist_ok=True)
        if gpus is None:
            tool.unlink(missing_ok=True)
        else:
            lines = "".join(f"GPU {n}: NVIDIA H100 (UUID: GPU-{n}{n})\n" for n in range(gpus))
            tool.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}END\n")
            tool.chmod(stat.S_IRWXU)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
        if visible is None:
            monkeypatch.delenv(accelerators.VISIBLE, raising=False)
        else:
            monkeypatch.setenv(accelerators.VISIBLE, visible)

    monkeypatch.setattr(accelerators, "_DRIVER", str(tmp_path / "driver"))
    for name in accelerators._TPU_SIGNS:
        monkeypatch.delenv(name, raising=False)
    has(0)
    return has


def spec_of(
    folder: Path, gpus: float, *, replicas: int = 2, workers: int = 2, **stage: Any
) -> dict[str, Any]:
    if stage.get("collectives"):
        stage["run"] = gpu_functions.meet
    else:
        stage |= {"run": gpu_functions.look, "with": {"folder": str(folder)}}
    return {
        "pipedist": 1,
        "replicas": replicas,
        "cluster": {"workers": workers},
        "dataset": {"range": 24, "batch": replicas},
        "stages": {
            "seen": {"resources": {"gpus": gpus}, **stage},
            "rows": {"gather": 0, "of": "seen"},
        },
    }


async def rows_of(spec: dict[str, Any], **options: Any) -> dict[str, np.ndarray]:
    async with pipedist.open(spec, **options) as run:
        rows: dict[str, np.ndarray] = (await run.results())["rows"]
        return rows


# -- what there is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "visible", "seen"),
    [
        (0, None, ()),
        (2, None, ("0", "1")),
        (4, "2,0", ("2", "0")),
        (2, "1,7,0", ("1",)),
        (2, "", ()),
        (2, "-1", ()),
        (0, "0", ()),
        (2, "GPU-11, MIG-22", ("GPU-11", "MIG-22")),
        (2, "0,0", ("0",)),
        (None, "0", ()),
    ],
)
def test_what_the_driver_has_and_the_environment_lets_see_is_found(
    machine: Machine, gpus: int | None, visible: str | None, seen: tuple[str, ...]
) -> None:
    machine(gpus, visible)
    assert accelerators.found().gpus == seen
    assert accelerators.named() == (seen if visible else ())


def test_without_the_tool_the_drivers_files_count(machine: Machine, tmp_path: Path) -> None:
    machine(None)
    assert "no nvidia-smi" in accelerators.found().how
    for name in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / "driver" / name).mkdir(parents=True)
    assert accelerators.found().gpus == ("0", "1")


def test_a_failing_tool_finds_no_gpus_and_is_reported(machine: Machine, tmp_path: Path) -> None:
    machine(2)
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert accelerators.found().gpus == ()
    assert "exit status 9" in accelerators.found().how


def test_a_tpu_is_named_where_no_gpu_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "local")
    assert "TPU_NAME is set, but a TPU is no GPU" in accelerators.found().how


@pytest.mark.parametrize(
    ("gpus", "each", "workers", "owned"),
    [
        ("01", 1, 3, ["0", "1", ""]),
        ("0123", 2, 3, ["01", "23", ""]),
        ("012", 2, 2, ["01", ""]),
        ("01", 0.5, 5, ["0", "1", "0", "1", ""]),
        ("0", 0.3, 4, ["0", "0", "0", ""]),
        ("0", 1 / 3, 4, ["0", "0", "0", ""]),
        ("", 1, 1, [""]),
        ("0123", 1, 2, ["0", "1"]),
    ],
)
def test_gpus_are_divided_among_workers(gpus: str, each: float, workers: int, owned: list[str]) -> None:
    assert ["".join(group) for group in accelerators.owned(tuple(gpus), each, workers)] == owned


# -- the plan --------------------------------------------------------------------------------


def problem_of(document: dict[str, Any], workers: int = 2) -> str:
    with pytest.raises(PlanError) as caught:
        compile_plan(load(document), workers=workers)
    return str(caught.value)


def test_missing_gpus_are_reported_before_anything_runs(machine: Machine, tmp_path: Path) -> None:
    text = problem_of(spec_of(tmp_path, 1))
    assert "stages.seen.resources.gpus: `seen` needs 1 GPU per call, but there is none here" in text
    assert "nvidia-smi lists them" in text
    assert "workers that dial in from one (`launcher: connect`)" in text
    machine(1)
    assert "`seen` needs 2 GPUs per call, but there is 1 here" in problem_of(spec_of(tmp_path, 2))


def test_a_gang_needs_gpus_for_all_its_replicas(machine: Machine, tmp_path: Path) -> None:
    machine(4)
    gang = spec_of(tmp_path, 1, replicas=4, collectives=True)
    text = problem_of(gang)
    assert (
        "its 4 replicas run at the same time, each on a worker with 1 GPU, but only 2 of 2 workers have that"
        in text
    )
    assert "`--workers 4`" in text
    compile_plan(load(gang), workers=4).close()
    machine(2)
    assert "only 2 of 4 workers have that; there are 2 here" in problem_of(gang, workers=4)
    halves = spec_of(tmp_path, 0.5, replicas=4, collectives=True)
    compile_plan(load(halves), workers=4).close()


def test_the_plan_shows_who_owns_gpus(machine: Machine, tmp_path: Path) -> None:
    machine(1)
    plan = compile_plan(load(spec_of(tmp_path, 1)), workers=2)
    assert "needs 1 GPU per call: 1 of 2 workers own it" in as_text(plan)
    assert as_json(plan)["phases"][0][0]["gpus"] == 1
    plan.close()


def test_with_workers_that_dial_in_nothing_is_refused(machine: Machine, tmp_path: Path) -> None:
    document = spec_of(tmp_path, 1)
    document["cluster"] = {
        "launcher": "connect",
        "listen": "tcp://127.0.0.1:0",
        "key_file": str(tmp_path / "key"),
    }
    plan = compile_plan(load(document), workers=1)
    assert "needs 1 GPU per call: workers that dial in bring them" in as_text(plan)
    plan.close()


def test_a_spec_without_gpus_looks_for_none(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = spec_of(tmp_path, 1)
    document["stages"]["seen"]["resources"] = None
    monkeypatch.setattr(accelerators, "installed", None)
    compile_plan(load(document), workers=1).close()


@pytest.mark.parametrize("gpus", [0, -1, 1.5, 65, True, "1", None, float("nan")], ids=repr)
def test_only_numbers_of_gpus_are_gpus(tmp_path: Path, gpus: Any) -> None:
    with pytest.raises(SpecError, match=r"resources\.gpus: `gpus` must be an integer from 1 to 64"):
        load(spec_of(tmp_path, gpus))


@pytest.mark.parametrize("resources", [1, [], {"gpu": 1}, {"gpus": 1, "ram": 2}, {}], ids=repr)
def test_resources_are_gpus_alone(tmp_path: Path, resources: Any) -> None:
    document = spec_of(tmp_path, 1)
    document["stages"]["seen"]["resources"] = resources
    with pytest.raises(SpecError, match="resources"):
        load(document)


# -- the run ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_calls_run_where_a_gpu_is_and_see_it_alone(machine: Machine, tmp_path: Path) -> None:
    machine(2)
    rows = await rows_of(spec_of(tmp_path, 1, workers=3))
    assert len(rows["pid"]) == 24
    assert set(rows["device"]) == {"cuda:0"}
    assert len(set(rows["pid"])) <= 2
    assert set(rows["visible"]) <= {"0", "1"}


@pytest.mark.asyncio
async def test_calls_that_need_two_see_two(machine: Machine, tmp_path: Path) -> None:
    machine(4, "3,1,0,2")
    rows = await rows_of(spec_of(tmp_path, 2, workers=2))
    assert set(rows["visible"]) <= {"3,1", "0,2"}
    assert set(rows["device"]) == {"cuda:0"}


@pytest.mark.asyncio
async def test_a_fraction_lets_calls_share_one(machine: Machine, tmp_path: Path) -> None:
    machine(1)
    rows = await rows_of(spec_of(tmp_path, 0.5, replicas=2, workers=3, collectives=True))
    assert set(rows["visible"]) == {"0"}
    assert all(a != b for a, b in zip(rows["pid"][::2], rows["pid"][1::2], strict=True))  # of one step
    rows = await rows_of(spec_of(tmp_path, 1, workers=3))
    assert len(set(rows["pid"])) == 1


@pytest.mark.asyncio
async def test_a_gang_has_a_gpu_for_each_replica(machine: Machine, tmp_path: Path) -> None:
    machine(3)
    rows = await rows_of(spec_of(tmp_path, 1, replicas=2, workers=3, collectives=True))
    assert set(rows["visible"]) <= {"0", "1", "2"}
    assert all(a != b for a, b in zip(rows["pid"][::2], rows["pid"][1::2], strict=True))
    assert list(rows["sum"]) == [4 * (row // 2) + 1 for row in range(24)]


@pytest.mark.asyncio
async def test_a_worker_that_dies_is_replaced_by_one_that_owns_the_same(
    machine: Machine, tmp_path: Path
) -> None:
    machine(1)
    document = spec_of(tmp_path / "locks", 1, workers=2)
    (tmp_path / "locks").mkdir()
    async with pipedist.LocalCluster(workers=2, gpus_per_worker=1) as cluster:
        await asyncio.wait_for(cluster.restart(0), 60)
        rows = await rows_of(document, cluster=cluster)
    assert set(rows["visible"]) == {"0"}
    assert len(set(rows["pid"])) == 1


@pytest.mark.asyncio
async def test_a_stage_that_asks_for_none_has_the_processor(machine: Machine, tmp_path: Path) -> None:
    machine(1)
    document = spec_of(tmp_path, 1)
    document["stages"]["after"] = {"run": gpu_functions.describe, "of": "seen"}
    document["stages"]["rows"] = {"gather": 0, "of": "after"}
    assert set((await rows_of(document))["device"]) == {"cpu"}


@pytest.mark.asyncio
async def test_a_cluster_without_gpus_is_refused_a_spec_that_needs_them(
    machine: Machine, tmp_path: Path
) -> None:
    machine(2)
    async with pipedist.LocalCluster(workers=1) as cluster:
        with pytest.raises(PlanError, match="the cluster was made without gpus_per_worker"):
            await rows_of(spec_of(tmp_path, 1), cluster=cluster)


@pytest.mark.parametrize(
    ("each", "text"),
    [
        (2, "`gpus_per_worker` is 2, but this machine has 1 GPUs: .*nvidia-smi lists them"),
        (1.5, "`gpus_per_worker` must be 0, an integer up to 64, or a fraction, got 1.5"),
        (-1, "a fraction, got -1"),
        (True, "a fraction, got True"),
    ],
)
def test_a_cluster_is_refused_gpus_that_are_not_there(machine: Machine, each: float, text: str) -> None:
    machine(1)

    async def enter() -> None:
        async with pipedist.LocalCluster(workers=1, gpus_per_worker=each):
            pass

    with pytest.raises(UsageError, match=text):
        asyncio.run(enter())


@pytest.mark.asyncio
@pytest.mark.parametrize("by", ["cluster", "spec"])
async def test_the_event_loop_runs_while_the_gpus_are_counted(
    machine: Machine, tmp_path: Path, by: str
) -> None:
    machine(1)
    tool = tmp_path / "bin" / "nvidia-smi"
    lines = tool.read_text().partition("\n")[2]
    begun, go = tmp_path / "begun", tmp_path / "go"
    wait = f"touch {begun}; for i in $(seq 1000); do [ -e {go} ] && break; sleep 0.01; done; [ -e {go} ] || exit 9"
    tool.write_text(f"#!/bin/sh\n{wait}\n{lines}")

    async def enter() -> None:
        if by == "cluster":
            async with pipedist.LocalCluster(workers=1, gpus_per_worker=1) as cluster:
                assert cluster.supply.gpus == ("0",)
        else:
            async with pipedist.open(spec_of(tmp_path, 1, workers=1)) as run:
                assert run.plan.supply.gpus == ("0",)

    async def let_go() -> None:
        while not os.path.exists(begun):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.001)
        go.touch()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(enter())
        tasks.create_task(let_go())
