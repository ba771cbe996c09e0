"""Nothing is left behind, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launchers.processes import wait_gone, wait_state

ROOT = Path(__file__).parents[2]


@contextmanager
def parent(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], list[int], int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.launchers.parent", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            yield process, told["workers"], told["server"]
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("how", [(), ("busy",), ("thread",), ("fork",)])
def test_a_killed_parent_leaves_nothing(how: tuple[str, ...]) -> None:
    with parent(*how) as (process, workers, server):
        os.kill(process.pid, signal.SIGKILL)
        assert wait_gone([*workers, server]) == []


def test_stopped_workers_go_with_their_parent() -> None:
    with parent() as (process, workers, server):
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
            wait_state(pid, "T")
        os.kill(process.pid, signal.SIGKILL)
        assert wait_gone([*workers, server]) == []


def test_workers_go_with_their_fork_server_also_if_they_are_stopped() -> None:
    with parent() as (_, workers, server):
        os.kill(workers[0], signal.SIGSTOP)
        wait_state(workers[0], "T")
        os.kill(server, signal.SIGKILL)
        assert wait_gone(workers) == []
