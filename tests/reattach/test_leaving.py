"""A dialled-in worker is terminated, stopped, or disconnected, and the others continue."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipedist.worker.process_setup import WORKER_NAME
from tests.reattach.jobs import Job, until


def test_sigterm_lets_running_calls_finish_and_none_is_repeated(tmp_path: Path) -> None:
    job = Job(tmp_path, workers=2)
    held = job.hold(3)
    with job.run() as run, ExitStack() as stack:
        run.hears("waiting for workers")
        leaving = stack.enter_context(job.worker("--grace-s", "60"))
        job.reaches(3)  # it executes a call, and others wait behind it
        staying = stack.enter_context(job.worker())
        staying.hears("joined cluster")
        leaving.process.terminate()
        leaving.hears("leaving: its call may take")
        held.unlink()
        assert leaving.ends() == 0, leaving.said
        assert run.ends() == 0, run.said
        assert staying.ends() == 0, staying.said
    assert set(job.calls().values()) == {1}, job.calls()


@pytest.mark.slow
def test_a_call_that_outlasts_the_grace_time_is_reassigned(tmp_path: Path) -> None:
    job = Job(tmp_path, workers=2)
    held = job.hold(3)
    with job.run() as run, ExitStack() as stack:
        run.hears("waiting for workers")
        leaving = stack.enter_context(job.worker("--grace-s", "0.5"))
        job.reaches(3)
        job.commits(3)  # what it has not reported goes with its process
        leaving.process.terminate()
        assert leaving.ends() == 0, leaving.said
        assert "its unfinished call will be reassigned" in leaving.said
        held.unlink()
        stack.enter_context(job.worker())
        assert run.ends() == 0, run.said
    calls = job.calls()
    assert calls.pop((3, 0)) == 2
    assert set(calls.values()) == {1}, calls


def test_an_idle_worker_leaves_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, steps=1)
    held = job.hold(0)
    with job.run() as run, ExitStack() as stack:
        run.hears("waiting for workers")
        workers = [stack.enter_context(job.worker("--grace-s", "60")) for _ in range(3)]
        for worker in workers:
            worker.hears("joined cluster")
        until(lambda: len(job.calls()) == 2)
        for worker in workers:
            worker.process.terminate()
        held.unlink()
        assert [worker.ends() for worker in workers] == [0, 0, 0]
        stack.enter_context(job.worker())
        assert run.ends() == 0, run.said
    assert set(job.calls().values()) == {1}, job.calls()


@pytest.mark.slow
def test_a_worker_process_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    """Its supervisor sees it: the heartbeat goes on, so the scheduler does not."""
    job = Job(tmp_path)
    held = job.hold(3)
    with job.run() as run:
        run.hears("waiting for workers")
        with job.worker() as worker:
            job.reaches(3)
            (child,) = (pid for pid in children(worker.process.pid) if is_worker(pid))
            os.kill(child, signal.SIGSTOP)
            held.unlink()
            worker.hears(r"stopped for 3 s, then killed with signal 9 \(SIGKILL\)")
            assert run.ends() == 0, run.said
            assert worker.ends() == 0, worker.said
    calls = job.calls()
    assert calls.pop((3, 0)) == 2  # it ran when its process was stopped
    for (step, replica), count in calls.items():  # what was not reported yet is gone with the process
        assert count == 1 if step > 3 else count <= 2, (step, replica, calls)


def is_worker(pid: int) -> bool:
    """Return whether a process is a worker: the server of test processes is another child of theirs."""
    return Path(f"/proc/{pid}/comm").read_text().strip() == WORKER_NAME


def children(pid: int) -> list[int]:
    """Return the child processes of one."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]
