"""The driver process dies, its workers survive: their finished calls are not executed again."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.reattach.jobs import Job, Outcome, until


def test_cached_results_count_in_the_resumed_run(tmp_path: Path, undisturbed: Outcome) -> None:
    """Including the calls that ran when the driver was killed. It is killed twice."""
    job = Job(tmp_path)
    with ExitStack() as stack:
        flags: tuple[str, ...] = ()
        worker = None
        for turn, step in enumerate((4, 9), 1):
            held = job.hold(step)
            run = stack.enter_context(job.run(*flags))
            run.hears("waiting for workers")
            worker = worker or stack.enter_context(job.worker())
            job.reaches(step)
            run.process.kill()
            assert run.ends() == -signal.SIGKILL
            held.unlink()  # what runs goes on, and is kept too
            worker.hears("finished calls are kept for the resumed run", turn)
            flags = ("--resume",)
        assert worker is not None
        again = stack.enter_context(job.run("--resume"))
        assert again.ends() == 0, again.said
        assert worker.ends() == 0, worker.said
        assert len(re.findall("joined cluster", worker.said)) == 3
    assert set(job.calls().values()) == {1}, f"executed again: {job.calls()}"
    assert job.outcome() == undisturbed


@pytest.mark.slow
def test_two_workers_report_the_results_that_each_has_cached(tmp_path: Path, undisturbed: Outcome) -> None:
    """The resumed run waits for both before it deals anything."""
    job = Job(tmp_path, workers=2)
    held = job.hold(9)
    with job.run() as run, ExitStack() as stack:
        run.hears("waiting for workers")
        workers = [stack.enter_context(job.worker()) for _ in range(2)]
        job.reaches(9)
        for worker in workers:
            worker.hears("joined cluster")
        run.process.kill()
        run.ends()
        held.unlink()
        for worker in workers:
            worker.hears("the connection to .* was lost")
        with job.run("--resume") as again:
            assert again.ends() == 0, again.said
            assert [worker.ends() for worker in workers] == [0, 0]
    assert set(job.calls().values()) == {1}, f"executed again: {job.calls()}"
    assert job.outcome() == undisturbed


@pytest.mark.slow
def test_results_of_other_code_are_computed_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.outlived(6) as worker:
        before = job.calls()
        job.mend()
        with job.run("--resume", "--force-code") as again:
            assert again.ends() == 0, again.said
            assert worker.ends() == 0, worker.said
    said = re.findall(r"durable: y: (\d+) step", again.said)
    done = int(said[0]) if said else 0  # it was killed before its first commit
    for call in before:
        assert job.calls()[call] == (1 if call[0] < done else 2), call
    assert "module mine has changed" in again.said


@pytest.mark.slow
def test_a_run_that_begins_anew_gets_nothing_of_the_one_before(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.outlived(6) as worker:
        before = job.calls()
        with job.run("--restart") as again:
            assert again.ends() == 0, again.said
            assert worker.ends() == 0, worker.said
    for call, count in job.calls().items():
        assert count == 1 + before[call], call


@pytest.mark.slow
def test_a_worker_whose_scheduler_never_comes_back_reports_it_and_ends(tmp_path: Path) -> None:
    """One is idle then, the other one in a call that has no end."""
    job = Job(tmp_path, workers=2, rejoin_s=1.0, steps=1)
    job.hold(0)
    with job.run() as run, ExitStack() as stack:
        run.hears("waiting for workers")
        workers = [stack.enter_context(job.worker()) for _ in range(3)]
        for worker in workers:
            worker.hears("joined cluster")
        until(lambda: len(job.calls()) == 2)
        run.hears("sent a heartbeat", 3)  # so each supervisor too knows how long to wait
        run.process.kill()
        run.ends()
        for worker in workers:
            assert worker.ends() == 1
            gone = f"the driver at {job.endpoint} is gone, and none has come back within 1 s"
            assert gone in worker.said
