from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from pipedist.cli.app import app
from pipedist.cli.simulate_command import SeedProgress, SimulateOptions, execute, parse_costs
from pipedist.errors import UsageError
from pipedist.testing import Faults
from tests.preloaded import run_module

FAILING = f"""
pipedist: 1
replicas: 3
code: {Path(__file__).parents[2]}
dataset: {{range: 60, batch: 6}}
stages:
  each: {{run: "tests.testing.replica_functions:fails"}}
  total: {{reduce: sum, of: each, axis: 0}}
"""

FORGETFUL = FAILING.replace(":fails", ":HowMany") + "params: {what: x}\n"


def test_costs() -> None:
    assert parse_costs("a=0.05, b=2") == {"a": 0.05, "b": 2.0}
    assert parse_costs(None) == {}


@pytest.mark.parametrize("text", ["a", "a=x", "a=-1", "a=1,a=2", "a=inf", "a=nan"])
def test_wrong_costs(text: str) -> None:
    with pytest.raises(UsageError, match="Give STAGE=SECONDS"):
        parse_costs(text)


@pytest.mark.parametrize(
    ("kind", "message"), [("x", "'x'. There are: drop, "), ("dro", "'drop'? There are: drop, ")]
)
def test_an_unknown_fault_is_reported_with_the_known_ones(kind: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        Faults.parse(f"{kind}=0.1")


def test_the_printed_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(SimulateOptions("specs/total.yaml", seeds=3, faults="crash=0.2")) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["seeds"], lines["workers"], lines["violations"]) == ("3", "3", "0")
    assert lines["faults"].startswith("crash ")


def test_progress_is_printed_after_the_first_seed_and_at_growing_intervals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 100.0
    progress = SeedProgress(100, lambda: now_s)
    for simulated in range(1, 101):
        now_s += 7.5
        progress.update(simulated, simulated // 3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "simulate: 1 of 100 seeds, 0 violations, 7.5 s so far, about 12:22 left; --seeds N simulates fewer",
        "simulate: 2 of 100 seeds, 0 violations, 15 s so far, about 12:15 left",
        "simulate: 3 of 100 seeds, 1 violation, 22 s so far, about 12:08 left",
    ]
    assert 5 < len(lines) < 20
    progress = SeedProgress(1, lambda: now_s)
    now_s += 100.0
    progress.update(1, 0)
    assert capsys.readouterr().err == "", "all seeds are done"


def test_a_simulation_prints_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = itertools.count(step=1000)
    options = SimulateOptions("specs/total.yaml", seeds=2, faults="none")
    assert execute(options, clock_s=lambda: float(next(ticks))) == 0
    assert "simulate: 1 of 2 seeds, 0 violations, " in capsys.readouterr().err


def test_a_spec_that_always_fails_fails_its_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(FAILING)
    assert execute(SimulateOptions(str(spec), faults="crash=0.1")) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "stage each, step 2, replica 0, worker w0: ValueError: two is bad" in printed.err
    assert "The spec fails without injected faults. Fix it first; no seeds were simulated." in printed.err


def test_one_seed_of_a_spec_that_always_fails_can_be_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(FAILING)
    assert execute(SimulateOptions(str(spec), seed=1, faults="crash=0.1")) == 1
    printed = capsys.readouterr()
    assert "violations  0" in printed.out
    assert "ValueError: two is bad" in printed.err


def test_seeds_and_seed_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["simulate", "specs/total.yaml", "--seeds", "3", "--seed", "2"])
    assert ended.value.code == 2
    assert "--seeds and --seed exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize("faults", ["none", "crash=0.05"])
def test_the_printed_command_reproduces_the_violation(
    faults: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "a spec.yaml"
    spec.write_text(FORGETFUL)
    options = SimulateOptions(str(spec), seed=3, workers=4, faults=faults, sets=("what=[a, b c]",))
    assert execute(options) == 1
    first = capsys.readouterr().out
    (line,) = [line for line in first.splitlines() if line.startswith("  reproduce: ")]
    _, *arguments = shlex.split(line.removeprefix("  reproduce: "))
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    assert ended.value.code == 1
    assert capsys.readouterr().out == first


KILLED = """
pipedist: 1
dataset: {range: 6, batch: 2}
stages:
  each: {run: "killed:fn"}
  total: {reduce: sum, of: each, axis: 0}
outputs: {total: total.json}
"""


def test_the_remains_of_a_killed_simulation_are_removed_by_the_next_one(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "killed.yaml").write_text(KILLED)

    def simulate(body: str) -> int:
        (tmp_path / "killed.py").write_text(f"import os\ndef fn(x):\n    {body}\n    return x\n")
        env = {"TMPDIR": str(scratch)}
        return run_module(
            "pipedist", "simulate", "killed.yaml", "--seed", "1", cwd=tmp_path, env=env
        ).returncode

    assert simulate("os.kill(os.getpid(), 9)") == -9
    assert len(list(scratch.iterdir())) == 1
    assert simulate("pass") == 0
    assert list(scratch.iterdir()) == []
