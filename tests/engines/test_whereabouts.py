"""What a cluster leaves for the next process of its run, and what that does with it: no engine is needed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipedist.engine_clusters import POINTER, EngineCluster
from pipedist.errors import UsageError
from pipedist.launchers import whereabouts
from pipedist.launchers.whereabouts import Succession, Whereabouts
from pipedist.transport.keys import ClusterKeys, key_text, new_keys
from tests.engines.here import HereEngine

ROOT = Path(__file__).parents[2]


def cluster_of(engine: HereEngine, folder: Path, listen: str | None = None) -> EngineCluster:
    return EngineCluster(
        1, engine, listen=listen, threads_per_replica=1, limits=None, folder=folder, rejoin_s=30
    )


async def left_by_a_killed_process(folder: Path) -> Whereabouts:
    """Leave what a process leaves that is killed: the file, with a port that is free again."""
    async with cluster_of(HereEngine(0), folder):
        left = whereabouts.read(folder / POINTER)
    assert left is not None
    assert not (folder / POINTER).exists(), "left in order, nothing is left behind"
    whereabouts.write(folder / POINTER, left)
    return left


@pytest.mark.asyncio
async def test_the_next_process_has_the_endpoint_and_the_keys(tmp_path: Path) -> None:
    left = await left_by_a_killed_process(tmp_path)
    assert (tmp_path / POINTER).stat().st_mode & 0o777 == 0o600
    engine = HereEngine(0)
    async with cluster_of(engine, tmp_path) as cluster:
        (terms,) = engine.told
        assert cluster.coordinator.endpoint == terms.endpoint == left.endpoint
        assert terms.keys == key_text(ClusterKeys(left.keys.client, None))
        assert terms.join_s == 30
        assert engine.succession == Succession(left.succession.run, 2, 30)
        assert engine.dismissed == []
        again = whereabouts.read(tmp_path / POINTER)
        assert again is not None
        assert again.succession.life == 2


@pytest.mark.asyncio
async def test_a_process_with_other_terms_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = await left_by_a_killed_process(tmp_path)
    engine = HereEngine(0)
    async with cluster_of(engine, tmp_path, listen="tcp://127.0.0.1:*"):
        assert engine.told[0].keys != key_text(ClusterKeys(left.keys.client, None))
        assert engine.succession is not None
        assert engine.succession.run != left.succession.run
        assert [each.run for each in engine.dismissed] == [left.succession.run]
    assert "were placed on something else, or with other terms: they are replaced" in capsys.readouterr().err


@pytest.mark.asyncio
async def test_a_process_that_cannot_listen_there_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = await left_by_a_killed_process(tmp_path)
    host, _, port = left.endpoint.removeprefix("tcp://").rpartition(":")
    engine = HereEngine(0)
    with socket.socket() as other:
        other.bind((host, int(port)))
        other.listen(1)
        async with cluster_of(engine, tmp_path) as cluster:
            assert cluster.coordinator.endpoint != left.endpoint
            assert len(engine.dismissed) == 1
    said = capsys.readouterr().err
    assert f"it can't listen at {left.endpoint} (Address already in use): they are replaced" in said


@pytest.mark.asyncio
async def test_without_a_folder_nothing_outlives_the_process(tmp_path: Path) -> None:
    engine = HereEngine(0)
    async with EngineCluster(1, engine, listen=None, threads_per_replica=1, limits=None, rejoin_s=30):
        assert engine.succession is None


def test_what_is_not_to_be_trusted_counts_as_nothing(tmp_path: Path) -> None:
    path = tmp_path / POINTER
    keys = new_keys()
    whereabouts.write(path, Whereabouts(Succession("0" * 16, 3, 0), "tcp://127.0.0.1:1", keys, "x"))
    good = whereabouts.read(path)
    assert good is not None
    assert (good.succession.life, good.keys) == (3, keys)
    document = json.loads(path.read_text())
    for change in (
        {"format": 2},
        {"run": "../../etc"},
        {"run": 1},
        {"life": 0},
        {"life": "1"},
        {"endpoint": None},
        {"keys": "{}"},
        {"keys": key_text(replace(keys, server=None))},
        {"placing": None},
    ):
        path.write_text(json.dumps({**document, **change}))
        assert whereabouts.read(path) is None, change
    path.write_text(json.dumps(document))
    path.chmod(0o644)
    assert whereabouts.read(path) is None, "others may have read the keys"
    path.unlink()
    assert whereabouts.read(path) is None
    (tmp_path / "other").symlink_to(path)
    whereabouts.write(path, good)
    assert whereabouts.read(tmp_path / "other") is None


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:x", "tcp://203.0.113.255:5555", "tcp://127.0.0.1:99999"]
)
def test_why_nobody_can_listen_is_told(endpoint: str) -> None:
    assert whereabouts.why_deaf(endpoint) != ""
    assert whereabouts.why_deaf("tcp://127.0.0.1:0") == ""
    assert whereabouts.why_deaf("tcp://[::1]:0") == "" or not socket.has_ipv6


def test_the_names_of_the_earlier_processes(tmp_path: Path) -> None:
    succession = Succession("0123456789abcdef", 3, 1.0)
    assert succession.earlier == ["pipedist-0123456789abcdef-2", "pipedist-0123456789abcdef-1"]
    with pytest.raises(UsageError, match="can't write"):
        whereabouts.write(
            tmp_path / "none" / POINTER, Whereabouts(succession, "tcp://127.0.0.1:1", new_keys(), "")
        )


@pytest.mark.parametrize("command", ["validate", "plan", "run"])
@pytest.mark.parametrize("launcher", ["ray", "dask"])
def test_an_engine_of_the_runs_own_is_refused(tmp_path: Path, launcher: str, command: str) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"pipedist: 1\ncluster: {{launcher: {launcher}, address: local, rejoin_s: 30}}\n"
        "dataset: {range: 4, batch: 2}\nstages: {t: {reduce: sum, of: dataset, axis: 0}}\n"
    )
    words = [sys.executable, "-m", "pipedist", command, str(spec)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert "`rejoin_s` with `address: local`: that engine ends with the process of the run" in done.stderr
    assert "spec.yaml:2:" in done.stderr
