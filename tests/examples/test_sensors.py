"""The example of the test harness: a bug that only a simulation finds, and its output."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.preloaded import run_module

ROOT = Path(__file__).parents[2]
SENSORS = ROOT / "examples" / "sensors"


def test_the_wrong_one_is_caught(tmp_path: Path) -> None:
    shutil.copytree(SENSORS, tmp_path, dirs_exist_ok=True)
    command = "simulate wrong.yaml --seed 7 --faults crash=0.02,slow=0.1"
    wrong = run_module("pipedist", *command.split(), cwd=tmp_path)
    assert wrong.returncode == 1
    assert "stage outliers is " in wrong.stdout
    again = re.search(r"reproduce: pipedist (.*)", wrong.stdout)
    assert again
    assert run_module("pipedist", *again[1].split(), cwd=tmp_path).stdout == wrong.stdout


def test_the_right_one_passes(tmp_path: Path) -> None:
    shutil.copytree(SENSORS, tmp_path, dirs_exist_ok=True)
    right = run_module("pipedist", "simulate", "right.yaml", "--seeds", "10", cwd=tmp_path)
    assert right.returncode == 0
    assert "violations  0\n" in right.stdout


def test_as_a_test_of_ones_own(tmp_path: Path) -> None:
    shutil.copytree(SENSORS, tmp_path, dirs_exist_ok=True)
    options = ["-q", "-p", "no:cacheprovider"]
    if "pipedist.testing.pytest_plugin" not in _plugins():
        options += ["-p", "pipedist.testing.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", *options]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert "1 failed, 1 passed" in ran.stdout
    assert "not deterministic in (shard, with, ctx)" in ran.stdout


def _plugins() -> set[str]:
    from importlib.metadata import entry_points

    return {point.value for point in entry_points(group="pytest11")}
