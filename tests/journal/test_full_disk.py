"""A disk that is really full: one clear error, and a journal from which the run goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journal.killing import NEVER, Job, everything


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can't be mounted here: that takes privileges")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_ends_the_run_which_can_be_resumed(small_disk: Path, tmp_path: Path) -> None:
    steps = 120
    spec = everything(tmp_path, steps)
    straight = Job(tmp_path / "straight", spec)
    assert straight.run() == 0, straight.stderr
    (tmp_path / "calls").unlink()

    (small_disk / "out").mkdir()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "out").symlink_to(small_disk / "out")
    filler = small_disk / "filler"
    filler.write_bytes(bytes(900 * 1024))
    job = Job(tmp_path / "job", spec)
    assert job.run(kill_at=NEVER) == 1
    assert "No space left on device" in job.stderr
    assert "Traceback" not in job.stderr
    assert job.stderr.count("--resume") == 1
    done = job.history().passes["0/dataset"].steps
    assert 0 < done < steps
    before = job.calls_in(tmp_path / "calls")
    filler.unlink()
    assert job.run("--resume") == 0, job.stderr
    again = {call for call, n in job.calls_in(tmp_path / "calls").items() if n > before[call]}
    assert not {call for call in again if call[0] == "numbers" and call[1] < done}
    assert job.outcome()[1] == straight.outcome()[1]
