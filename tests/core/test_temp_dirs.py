"""Folders that belong to a process: gone with it, or, where it was killed, with the next one's start."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipedist.core.temp_dirs import ScratchFolder

KEEPER = """
import sys, time
from pipedist.core.temp_dirs import ScratchFolder
kept = ScratchFolder("code", sys.argv[1])
print(kept.path, flush=True)
time.sleep(600)
"""


def keeper(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder, and the folder, with something in it."""
    words = [sys.executable, "-c", KEEPER, str(parent)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    (folder / "deep").mkdir()
    (folder / "deep" / "file").touch()
    return process, folder


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_killed_process_leaves_its_folder_to_the_next_one(tmp_path: Path) -> None:
    killed, stale = keeper(tmp_path)
    living, used = keeper(tmp_path)
    try:
        kill(killed)
        assert stale.is_dir(), "no process was there to remove it"
        made = ScratchFolder("code", str(tmp_path))
        assert {path.name for path in tmp_path.iterdir()} == {used.name, Path(made.path).name}
        assert (used / "deep" / "file").exists()
        other = ScratchFolder("other", str(tmp_path))
        assert Path(other.path).stat().st_mode & 0o777 == 0o700
        made.close()
        other.close()
        made.close()
        assert list(tmp_path.iterdir()) == [used]
    finally:
        kill(living)


def stale_name(folder: Path) -> str:
    with_pid = ScratchFolder("code", str(folder))
    with_pid.close()
    return Path(with_pid.path).name


def test_what_is_somebody_elses_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stem = stale_name(tmp_path)[:-1]
    others = {
        stem + "0": lambda path: path.mkdir(mode=0o755),  # never so open
        stem + "1": lambda path: path.write_text("a file"),
        stem + "2": lambda path: path.symlink_to(tmp_path / "target"),
        stem + "33": lambda path: path.mkdir(mode=0o700),  # a longer name
        "pipedist-code-abcdefgh": lambda path: path.mkdir(mode=0o700),
        "pipedist-code-00000000-1-0123": lambda path: path.mkdir(mode=0o700),  # of another host
        "target": lambda path: path.mkdir(mode=0o700),
    }
    for name, make in others.items():
        make(tmp_path / name)
    (tmp_path / stem).mkdir(mode=0o700)
    ScratchFolder("code", str(tmp_path)).close()
    assert {path.name for path in tmp_path.iterdir()} == {*others, stem}
    (tmp_path / (stem + "4")).mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: 12345)  # all of it is another user's
    ScratchFolder("code", str(tmp_path)).close()
    assert (tmp_path / (stem + "4")).is_dir()
    monkeypatch.undo()
    ScratchFolder("code", str(tmp_path)).close()
    assert not (tmp_path / (stem + "4")).exists()


def test_a_folder_that_is_taken_for_a_stale_one_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between making it and locking it."""
    lock, taken = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if len(taken) < 2:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            taken.append(path)
            path.rmdir()
            if len(taken) == 1:
                raise BlockingIOError
        lock(descriptor, how)

    monkeypatch.setattr("fcntl.flock", late)
    made = ScratchFolder("code", str(tmp_path))
    assert Path(made.path) not in taken
    assert list(tmp_path.iterdir()) == [Path(made.path)]
    made.close()


def test_many_at_once(tmp_path: Path) -> None:
    """Processes remove stale folders while others start: no folder in use is removed."""

    def use(_number: int) -> None:
        made = ScratchFolder("code", str(tmp_path))
        (Path(made.path) / "x").touch()
        assert (Path(made.path) / "x").exists()
        made.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(400)))
    assert list(tmp_path.iterdir()) == []


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    first = ScratchFolder("code", str(tmp_path))
    second = ScratchFolder("code", str(tmp_path))
    assert Path(first.path).is_dir()
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []
