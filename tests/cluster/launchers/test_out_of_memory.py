"""A worker that the kernel kills for lack of memory: the cause is reported, and only its batch is lost.

In a control group of its own, so that nobody else is short of memory. That takes root:

    sudo make test-memory
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipedist.cluster.launchers.forkserver import OutOfMemoryKills

ROOT = Path(__file__).parents[3]
GROUPS = Path("/sys/fs/cgroup")
MEBIBYTE = 2**20
LIMIT = 320 * MEBIBYTE

SPEC = """
pipedist: 1
name: hungry
replicas: 2
dataset: {range: 24, batch: 8}
stages:
  y: {run: "hungry:eat", with: {culprits: 13}, on_error: POLICY}
  rows: {gather: 0, of: y}
outputs: {rows: rows.json}
"""

CODE = f"""
import numpy as np

def eat(x, culprits):
    if culprits in x:
        np.ones({4 * LIMIT}, np.uint8)
    return x * 2
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of version 1 or 2, of at most LIMIT bytes."""
    memory = GROUPS / "memory"
    files = (
        ("memory.limit_in_bytes", "memory.swappiness")
        if memory.is_dir()
        else ("memory.max", "memory.swap.max")
    )
    made = (memory if memory.is_dir() else GROUPS) / f"pipedist-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / files[0]).write_text(str(LIMIT))
    except OSError as error:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"needs root and control groups of memory ({error}): sudo make test-memory")
    try:
        if (made / files[1]).exists():
            (made / files[1]).write_text("0")
        yield made
    finally:
        made.rmdir()  # refused as long as a process is in it: none is left


def run(group: Path, folder: Path, policy: str) -> tuple[int, dict[str, Any], str]:
    (folder / "hungry.py").write_text(CODE)
    (folder / "spec.yaml").write_text(SPEC.replace("POLICY", policy))
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    pipedist = [
        sys.executable,
        "-m",
        "pipedist",
        "run",
        "spec.yaml",
        "--workers",
        "2",
        "--output",
        "out",
        "--json",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", enter, "sh", *pipedist]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_the_element_that_exhausts_memory_is_set_aside_with_its_cause(group: Path, tmp_path: Path) -> None:
    code, document, _ = run(group, tmp_path, "quarantine")
    assert code == 3
    (entry,) = document["quarantined"]
    assert (entry["element"], entry["stage"]) == (13, "y")
    assert entry["cause"] == "signal 9 (SIGKILL): out of memory"
    assert document["ledger"] == {"elements": 24, "committed": 23, "quarantined": 1, "lost": 0}
    assert json.loads((tmp_path / "out/rows.json").read_text()) == [2 * i for i in range(24) if i != 13]
    (line,) = (tmp_path / "out/quarantine.jsonl").read_text().splitlines()
    assert json.loads(line)["cause"] == entry["cause"]


def test_the_error_names_the_batch_and_the_retries_are_bounded(group: Path, tmp_path: Path) -> None:
    code, document, told = run(group, tmp_path, "fail")
    assert code == 1
    error = document["error"]
    assert (error["stage"], error["step"], error["replica"]) == ("y", 1, 1)
    assert error["message"] == "signal 9 (SIGKILL): out of memory"
    assert "(tried 5 times)" in told


def test_the_group_of_this_process_is_found_in_both_versions(tmp_path: Path) -> None:
    (tmp_path / "memory" / "jobs").mkdir(parents=True)
    counts = tmp_path / "memory" / "jobs" / "memory.oom_control"
    counts.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    groups = tmp_path / "groups"
    groups.write_text("5:devices:/\n4:memory:/jobs\n0::/\n")
    kills = OutOfMemoryKills(groups, tmp_path)
    assert not kills.grew()
    counts.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert kills.grew()
    assert not kills.grew()
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified" / "memory.events").write_text("low 0\noom 4\noom_kill 4\n")
    groups.write_text("0::/unified\n")
    kills = OutOfMemoryKills(groups, tmp_path)
    (tmp_path / "unified" / "memory.events").write_text("low 0\noom 5\noom_kill 5\n")
    assert kills.grew()
