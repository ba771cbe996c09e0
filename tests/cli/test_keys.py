"""`pipedist keys new`: the two files of a cluster's keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipedist.transport.keys import read_key_file
from tests.cli.conftest import Command

NAMES = ["cluster.key", "cluster.worker.key"]


def test_it_makes_a_file_for_each_side(pipedist: Command, tmp_path: Path) -> None:
    done = pipedist("keys", "new")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in NAMES] == [0o600, 0o600]
    run, workers = (read_key_file(tmp_path / name) for name in NAMES)
    assert run.server is not None
    assert workers.server is None  # whoever takes a worker's file can't stand in for the run
    assert workers.client == run.client
    lines = done.stdout.splitlines()
    assert lines[0].startswith("cluster.key ")
    assert "launcher: connect" in lines[0]
    assert lines[1].startswith("cluster.worker.key ")
    assert "pipedist worker --connect" in lines[1]
    assert "secret" not in done.stdout.lower()


def test_the_name_is_the_users(pipedist: Command, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    assert pipedist("keys", "new", "--output", "here/lab").returncode == 0
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["lab", "lab.worker"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_overwritten(pipedist: Command, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    done = pipedist("keys", "new")
    assert done.returncode == 2
    assert f"{name} exists already" in done.stderr
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "precious")]


def test_a_link_is_not_followed(pipedist: Command, tmp_path: Path) -> None:
    (tmp_path / "cluster.worker.key").symlink_to(tmp_path / "elsewhere")
    assert pipedist("keys", "new").returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.worker.key"]


def test_a_missing_folder_is_reported(pipedist: Command) -> None:
    done = pipedist("keys", "new", "--output", "nowhere/cluster.key")
    assert done.returncode == 2
    assert "can't write key file nowhere/cluster.key" in done.stderr


@pytest.mark.parametrize("name", ["", ".", "/", "folder"])
def test_a_folder_is_no_name_of_a_file(pipedist: Command, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    done = pipedist("keys", "new", "--output", name)
    assert done.returncode == 2
    assert done.stderr.startswith(f"pipedist: --output {name!r} is a folder. Give a file, such as '")


def test_the_command_for_workers_is_quoted_for_a_shell(pipedist: Command) -> None:
    done = pipedist("keys", "new", "--output", "my keys.txt")
    assert "--key-file 'my keys.worker.txt'\n" in done.stdout
