"""Many worker processes on one host finish a run, with the bytes of a few, and leave nothing behind.

8 of them in the ordinary suite; `make test-many` takes 64, and says what they cost.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import pipedist
from pipedist.cluster.base import LocalCluster
from tests.cluster.launchers.processes import wait_gone

WORKERS = int(os.environ.get("PIPEDIST_TEST_MANY", "8"))
CODE = """\
import os, time
import numpy as np

def work(shard, ctx, folder):
    open(os.path.join(folder, str(os.getpid())), "a").close()
    end = time.monotonic() + 100
    while len(os.listdir(folder)) < WORKERS and time.monotonic() < end:
        time.sleep(0.01)  # so every worker has a part
    return np.sin(shard) * ctx.rng.standard_normal(len(shard))
"""
SPEC = """\
pipedist: 1
name: many
replicas: 8
dataset: {{range: 16000, batch: 64}}
stages:
  work: {{run: "many_code:work", with: {{folder: "{folder}"}}}}
  total: {{reduce: sum, of: work, axis: 0}}
  rows: {{gather: 0, of: work}}
outputs: {{rows: rows.npy, total: total.json}}
"""


def own_bytes(pid: int) -> int:
    """Return a process's share of the memory that is in use: what others have too is divided."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no Pss of process {pid}")


async def execute(spec: Path, output: Path, workers: int) -> tuple[list[int], int]:
    """Return the workers' pids, and the bytes that they had at the end."""
    async with LocalCluster(workers=workers) as cluster:
        async with pipedist.open(spec, cluster=cluster, output=output) as run:
            result = await run.results()
        assert (result.ledger.committed, result.ledger.lost) == (16_000, 0)
        pids = list(cluster.coordinator.pids.values())
        held = sum(own_bytes(pid) for pid in pids)
    return pids, held


def files_of(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}


@pytest.mark.asyncio
@pytest.mark.timeout(400)
async def test_many_workers_finish_a_run(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "many_code.py").write_text(CODE.replace("WORKERS", str(WORKERS)))
    spec = tmp_path / "many.yaml"
    spec.write_text(SPEC.format(folder=seen))

    began = time.monotonic()
    pids, held = await execute(spec, tmp_path / "many", WORKERS)
    took_s = time.monotonic() - began
    assert len(set(pids)) == WORKERS
    assert {int(name) for name in os.listdir(seen)} == set(pids)
    assert wait_gone(pids) == []
    print(
        f"{WORKERS} workers: {took_s:.1f} s with their start and end, "
        f"{held / WORKERS / 2**20:.1f} MiB each (Pss, at the end)"
    )

    await execute(spec, tmp_path / "few", 2)  # nobody waits: all were seen
    assert files_of(tmp_path / "many") == files_of(tmp_path / "few")
