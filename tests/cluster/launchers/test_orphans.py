"""No process or socket remains, whichever process is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pipedist.transport.endpoints import private_directory_of, remove_private_directory
from tests.cluster.launchers.processes import wait_gone, wait_state

ROOT = Path(__file__).parents[3]


@contextmanager
def parent(
    *arguments: str, folder: Path | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], list[int], int]]:
    """A process with a launcher; its ipc sockets are in a directory of its own in `folder`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.launchers.parent", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, **({"TMPDIR": str(folder)} if folder else {})},
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            yield process, told["workers"], told["server"]
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("how", [(), ("busy",), ("holding",), ("thread",), ("fork",)])
def test_a_killed_parent_leaves_nothing(how: tuple[str, ...]) -> None:
    with TemporaryDirectory(dir="/tmp") as made:
        folder = Path(made)
        for other in ("pipedist-elsewhere", "mine"):
            (folder / other).mkdir(mode=0o700)
        with parent(*how, folder=folder) as (process, workers, server):
            assert len(list(folder.iterdir())) == 3
            os.kill(process.pid, signal.SIGKILL)
            assert wait_gone([*workers, server]) == []
            assert sorted(x.name for x in folder.iterdir()) == ["mine", "pipedist-elsewhere"]


def test_leftovers_of_processes_killed_at_once_are_removed_by_the_next_launcher() -> None:
    """A batch system, or a control group without memory, kills all: no process remains to remove the sockets."""
    with TemporaryDirectory(dir="/tmp") as made:
        folder = Path(made)
        with parent(folder=folder) as (process, workers, server):
            for pid in (process.pid, server, *workers):
                os.kill(pid, signal.SIGSTOP)  # none of them sees another one's end
            for pid in (server, *workers, process.pid):  # the end of the parent would continue the server
                os.kill(pid, signal.SIGKILL)
            assert wait_gone([*workers, server]) == []
        (left,) = folder.iterdir()
        with parent(folder=folder):
            (present,) = folder.iterdir()
            assert present != left


def test_a_killed_server_leaves_its_parents_sockets_alone() -> None:
    with TemporaryDirectory(dir="/tmp") as made, parent(folder=Path(made)) as (_, workers, server):
        os.kill(server, signal.SIGKILL)
        assert wait_gone([*workers, server]) == []
        (left,) = Path(made).iterdir()
        assert list(left.iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
def test_a_stopped_server_and_what_workers_have_started_go_with_their_parent(number: int) -> None:
    with TemporaryDirectory(dir="/tmp") as made:
        folder = Path(made)
        with parent("left", folder=folder) as (process, workers, server):
            for pid in (workers[1], server):
                os.kill(pid, signal.SIGSTOP)
                wait_state(pid, "T")
            os.kill(process.pid, number)
            assert wait_gone([*workers, server]) == []
            assert [path.name for path in folder.iterdir()] == ["ids"]


@pytest.mark.parametrize("when", ["directory", "closed"])
def test_a_directory_without_workers_goes_with_a_killed_parent(when: str) -> None:
    """The fork server does not know it yet, or has ended already."""
    with TemporaryDirectory(dir="/tmp") as made:
        folder = Path(made)
        with parent(when, folder=folder) as (process, _, server):
            os.kill(process.pid, signal.SIGKILL)
            assert wait_gone([process.pid, server]) == []
            assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_only_a_directory_of_ours_is_removed(tmp_path: Path, mode: int) -> None:
    ours, other, link = tmp_path / "pipedist-a", tmp_path / "b", tmp_path / "pipedist-link"
    for folder in (ours, other):
        folder.mkdir()
        folder.chmod(mode)
    link.symlink_to(other)
    for folder in (ours, other, link):
        named = private_directory_of(f"ipc://{folder}/x")
        assert named == (str(ours) if (folder, mode) == (ours, 0o700) else "")
        remove_private_directory(str(folder))
    assert ours.exists() == (mode != 0o700)
    assert other.exists()
    assert link.is_symlink()


def test_stopped_workers_go_with_their_parent() -> None:
    with parent() as (process, workers, server):
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
            wait_state(pid, "T")
        os.kill(process.pid, signal.SIGKILL)
        assert wait_gone([*workers, server]) == []


def test_workers_go_with_their_fork_server_also_if_they_are_stopped() -> None:
    # All are killed, and so nobody removes the directory of their sockets.
    with TemporaryDirectory(dir="/tmp") as made, parent(folder=Path(made)) as (_, workers, server):
        os.kill(workers[0], signal.SIGSTOP)
        wait_state(workers[0], "T")
        os.kill(server, signal.SIGKILL)
        assert wait_gone(workers) == []
