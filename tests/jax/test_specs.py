"""Compiled functions in a spec: `compile: jax`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.plan import compiler
from pipedist.testing import simulate

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "specs" / "jax_digits.yaml"
SHORT = {"epochs": 1, "hidden": 8}


FUNCTIONS = """
def total(shard, ctx):
    import jax

    is_traced = isinstance(shard, jax.core.Tracer)
    return {"total": ctx.all_reduce("sum", (shard * 1.1).sum())[None], "compiled": jax.numpy.asarray([is_traced])}
"""


def pipedist_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pipedist", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def command(*arguments: str) -> str:
    done = pipedist_command(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def failed(*arguments: str) -> str:
    done = pipedist_command(*arguments)
    assert done.returncode == 2, done.stderr
    return done.stderr


def spec(**stage: Any) -> dict[str, Any]:
    def total(shard: Any, ctx: Any) -> Any:
        return ctx.all_reduce("sum", shard.sum())

    compiled = {"compile": "jax", "collectives": True, "resources": {"devices": "cpu"}}
    return {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 8, "batch": 4},
        "stages": {
            "total": {"run": total, **compiled, **stage},
            "totals": {"gather": 0, "of": "rows"},
            "rows": {"run": lambda x: x[None], **compiled, "of": "total"},
        },
    }


def test_a_spec_trains_as_the_same_functions_in_numpy(tmp_path: Path) -> None:
    def trained(name: str) -> dict[str, Any]:
        folder = tmp_path / name
        pipedist.run(SPEC, params=SHORT, output=folder, workers=1)
        with np.load(folder / "weights.npz") as arrays:
            return dict(arrays)

    first, again = trained("first"), trained("again")
    plain = SPEC.read_text().replace('"jax_digits:gradients"', '"digits:gradients"')
    for line in ("    compile: jax\n", "    resources: {devices: cpu}     # tpu on a TPU VM\n"):
        assert line in plain
        plain = plain.replace(line, "")
    (tmp_path / "digits.py").write_text((ROOT / "specs" / "digits.py").read_text())
    (tmp_path / "plain.yaml").write_text(plain)
    params = [word for name, value in SHORT.items() for word in ("--set", f"{name}={value}")]
    options = ["--workers", "1", "--output", str(tmp_path / "plain"), *params]
    command("run", str(tmp_path / "plain.yaml"), *options)  # another process: another module `digits`
    with np.load(tmp_path / "plain" / "weights.npz") as expected:
        for name, value in first.items():
            assert np.array_equal(value, again[name])
            np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("verify", [False, True])
def test_stages_of_one_call_are_compiled_together(verify: bool) -> None:
    result = pipedist.run(spec(), workers=1, verify=verify)
    assert result["totals"].tolist() == [6, 6, 22, 22]


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ({"collectives": False}, "`compile` needs the devices of the replicas"),
        ({"resources": None}, "`compile` needs the devices of the replicas"),
        ({"compile": None}, "`devices` are for a function with `compile`"),
        ({"resources": {"devices": "npu"}}, "tpu, gpu or cpu"),
        ({"resources": {"devices": "tpu"}}, "needs tpu devices, but there are none here"),
    ],
)
def test_wrong_specs_fail_before_they_run(stage: dict[str, Any], text: str) -> None:
    with pytest.raises(pipedist.UsageError, match=text):
        pipedist.run(spec(**stage), workers=1)


def test_a_host_without_jax_fails_in_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compiler, "find_spec", lambda name: None if name == "jax" else importlib.util.find_spec(name)
    )
    with pytest.raises(pipedist.PlanError, match=r"jax, which is not installed here.*\n?"):
        pipedist.run(spec(), workers=1)


def test_the_plan_shows_the_mesh() -> None:
    assert "compiled by jax for a mesh of 8 cpu devices, 4 each, 1 step per run" in command(
        "plan", str(SPEC), "--workers", "2"
    )


def test_replay_compiles_as_the_run_did(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    path = tmp_path / "total.yaml"
    path.write_text(
        "pipedist: 1\nreplicas: 4\ndataset: {range: 16, batch: 8}\nstages:\n"
        '  total: {run: "functions:total", compile: jax, collectives: true, resources: {devices: cpu}}\n'
        "  totals: {gather: 0, of: total}\n"
    )
    totals = pipedist.run(path, workers=1, output=tmp_path / "out")["totals"]
    replay = ["replay", str(tmp_path / "out"), "--call", "total/1/2"]
    assert json.loads(command(*replay)) == {"compiled": [True], "total": [totals["total"][6]]}
    with (tmp_path / "functions.py").open("a") as file:
        file.write("import jax.numpy\nONES = jax.numpy.ones(3)\n")  # opens the devices
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=4" in failed(*replay)


def test_simulations_need_the_cost_of_compiled_stages() -> None:
    one = {**spec(), "replicas": 3}
    del one["stages"]["rows"], one["stages"]["totals"]
    with pytest.raises(pipedist.UsageError, match=r"--costs total=0\.01"):
        simulate(one, seeds=[0])
    costs = {"total": 0.01}
    with pytest.raises(pipedist.PlanError, match="--workers 1"):
        simulate(one, seeds=[0], workers=2, costs=costs)
    simulate(one, seeds=range(3), workers=3, costs=costs)


@pytest.mark.parametrize("name", ["epoch", "elements"])
def test_untraced_attributes_of_the_context_are_errors(name: str) -> None:
    def read(shard: Any, ctx: Any) -> Any:
        return shard + (getattr(ctx, name) or 0)

    with pytest.raises(pipedist.CallError, match=rf"ctx\.{name} is not there in a function that is compiled"):
        pipedist.run(spec(run=read), workers=1)
