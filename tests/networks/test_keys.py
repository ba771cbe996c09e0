"""Keys for workers on another host, on the command line only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipedist.transport.keys import write_key_file
from tests.networks.hosts import Network
from tests.networks.runs import Work, files_of

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
WAIT_S = 60


def on(hosts: Network, name: str, cwd: Path, *args: str) -> subprocess.Popen[bytes]:
    """Start `pipedist ARGS` on a host."""
    with (cwd / f"{name}.stderr").open("ab") as errors:
        return hosts[name].start([sys.executable, "-m", "pipedist", *args], cwd=cwd, stderr=errors, env=ENV)


@pytest.mark.slow
def test_only_workers_with_the_clusters_keys_join(
    hosts: Network, work: Work, expected: dict[str, bytes]
) -> None:
    folder = work.folder
    work.open_gate()
    endpoint = f"tcp://{hosts['scheduler'].address}:5555"
    work.write_spec(f'launcher: connect, listen: "{endpoint}", key_file: cluster.key')
    made = on(hosts, "scheduler", folder, "keys", "new")
    said, _ = made.communicate(timeout=WAIT_S)
    assert made.returncode == 0
    assert b"cluster.worker.key" in said
    write_key_file(folder / "another.key")

    run = on(hosts, "scheduler", folder, "run", str(work.spec), "--output", str(folder / "out"))
    with run:
        try:
            stranger = on(
                hosts, "three", folder, "worker", "--connect", endpoint, "--key-file", "another.key"
            )
            stranger.communicate(timeout=WAIT_S)
            assert stranger.returncode == 1
            assert "key" in (folder / "three.stderr").read_text()
            assert work.begun() == []  # it was sent nothing

            member = on(
                hosts, "one", folder, "worker", "--connect", endpoint, "--key-file", "cluster.worker.key"
            )
            member.communicate(timeout=WAIT_S)
            assert member.returncode == 0, (folder / "one.stderr").read_text()
            run.communicate(timeout=WAIT_S)
            assert run.returncode == 0
        finally:
            run.kill()
    told = (folder / "scheduler.stderr").read_text()
    assert f"pipedist worker --connect {endpoint} --key-file {folder}/cluster.worker.key" in told
    assert files_of(folder / "out") == expected
    assert {host for _, _, host in work.begun()} == {"one"}


def test_the_workers_key_can_not_impersonate_the_run(hosts: Network, work: Work) -> None:
    """With the workers' file a run can't listen: it lacks the key by which workers know the run."""
    made = on(hosts, "scheduler", work.folder, "keys", "new")
    made.communicate(timeout=WAIT_S)
    listen = f"tcp://{hosts['one'].address}:5555"
    work.write_spec(f'launcher: connect, listen: "{listen}", key_file: cluster.worker.key')
    run = on(hosts, "one", work.folder, "run", str(work.spec))
    run.communicate(timeout=WAIT_S)
    assert run.returncode == 2
    assert "server_secret" in (work.folder / "one.stderr").read_text()
