from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.preloaded import run_module

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def pipedist(tmp_path: Path) -> Command:
    """Carries out `pipedist ARGS...` in a folder of its own."""

    def carry_out(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        return run_module("pipedist", *args, cwd=tmp_path, env={"COLUMNS": "120", **env})

    return carry_out


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A small spec with its functions: squares of 0..9, summed, gathered, and counted by parity."""
    (tmp_path / "squares.py").write_text(
        "import os, time\n"
        "import numpy as np\n"
        "def squares(shard, ctx, factor=1):\n"
        "    print('shard of', len(shard))\n"
        "    return (shard * shard * factor).astype(np.int64)\n"
        "def fail(shard, ctx):\n"
        "    if ctx.step == 1:\n"
        "        raise ValueError('seven is bad')\n"
        "    return shard\n"
        "def slow(shard, ctx):\n"
        "    open('began', 'a').close()\n"
        "    while not os.path.exists('go'):\n"
        "        time.sleep(0.01)\n"
        "    open('ended', 'a').close()\n"
        "    return shard\n"
    )
    path = tmp_path / "squares.yaml"
    path.write_text(
        "pipedist: 1\n"
        "params: {factor: 1}\n"
        "replicas: 2\n"
        "cluster: {workers: 1}\n"
        "dataset: {range: 10, batch: 4}\n"
        "stages:\n"
        '  squares: {run: "squares:squares", with: {factor: "${params.factor}"}}\n'
        "  total: {reduce: sum, of: squares, axis: 0}\n"
        "  steps: {reduce: sum, of: squares, axis: 0, per: step}\n"
        "  rows: {gather: 0, of: squares}\n"
        "outputs: {rows: rows.npy}\n"
    )
    return path
