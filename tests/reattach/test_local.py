"""Local workers that outlive the process of their run, for `cluster.rejoin_s`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pipedist.worker.kernel import WORKER_NAME
from tests.reattach.jobs import Outcome, until
from tests.reattach.local_jobs import local_job

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="needs process descriptors: run it on Linux"
)


def test_what_is_finished_is_taken_over_by_the_resumed_run(tmp_path: Path, undisturbed: Outcome) -> None:
    """Also what ran when the process of the run was killed. It is killed twice."""
    with local_job(tmp_path) as job:
        job.kill_at(4)
        stayed = job.supervisors()
        assert len(stayed) == 2
        job.kill_at(9, "--resume")
        assert job.supervisors() == stayed
        with job.start("--resume") as last:
            assert last.ends() == 0, last.said
        assert set(job.calls().values()) == {1}, f"executed again: {job.calls()}"
        assert job.outcome() == undisturbed
        assert "what this run waits for" not in last.said
        job.leaves_nothing()
        assert not (tmp_path / "out/.pipedist/workers.json").exists()


def test_nobody_comes_and_nothing_is_left(tmp_path: Path) -> None:
    """One worker is idle then, the other ones in calls that have no end."""
    with local_job(tmp_path, workers=3, rejoin_s=1.0, steps=1) as job:
        job.hold(0)
        with job.start() as run:
            until(lambda: len(job.calls()) == 2)
            run.has(3)
            run.process.kill()
            run.ends()
        run.hears("the process of its run is gone: what it has finished is kept", 3)
        run.hears(r"its scheduler is gone, and none came back at ipc://\S+ within 1 s", 3)
        job.leaves_nothing()


def test_workers_that_are_told_to_leave_while_they_wait_leave_nothing(tmp_path: Path) -> None:
    with local_job(tmp_path) as job:
        job.kill_at(4)
        for pid in job.supervisors():
            os.kill(pid, signal.SIGTERM)
        job.leaves_nothing()


def test_without_rejoin_s_they_end_with_their_run(tmp_path: Path) -> None:
    with local_job(tmp_path, rejoin_s=None) as job:
        job.hold(3)
        with job.start() as run:
            job.reaches(3)
            run.process.kill()
            run.ends()
        job.leaves_nothing()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_run_that_is_interrupted_takes_its_workers_with_it(tmp_path: Path, number: signal.Signals) -> None:
    with local_job(tmp_path, steps=400) as job:
        held = [job.hold(step) for step in range(5, 25)]  # whoever comes is held before much is issued
        with job.start() as run:
            job.reaches(5)
            os.killpg(run.process.pid, number)  # the terminal's Ctrl-C is for everybody in front of it
            run.hears("no new calls start")
            for each in held:
                each.unlink()
            assert run.ends() == 128 + number, run.said
        job.leaves_nothing()
        assert "kept for who resumes" not in run.said
        with job.start("--resume") as again:
            assert again.ends() == 0, again.said
        job.leaves_nothing()
        resumed = job.outcome()
        with job.start("--restart") as anew:
            assert anew.ends() == 0, anew.said
        assert job.outcome() == resumed


def test_a_run_that_is_ended_at_once_takes_its_workers_with_it(tmp_path: Path) -> None:
    """The third signal ends its process; its workers, which are stopped, could not have heard of the end."""
    with local_job(tmp_path) as job:
        job.hold(5)
        with job.start() as run:
            job.reaches(5)
            until(lambda: list(job.alive().values()).count(WORKER_NAME) == 2)
            for pid in job.alive():
                if pid != run.process.pid:
                    os.kill(pid, signal.SIGSTOP)
            for said in ("no new calls start", "ending the run at once", ""):
                run.process.send_signal(signal.SIGINT)
                run.hears(said)
            assert run.ends() == 128 + signal.SIGINT, run.said
        job.leaves_nothing()
        assert not (tmp_path / "out/.pipedist/workers.json").exists()


@pytest.mark.slow
def test_what_was_finished_with_other_code_is_executed_again(tmp_path: Path) -> None:
    with local_job(tmp_path) as job:
        job.kill_at(6)
        before = job.calls()
        job.mend()
        with job.start("--resume") as again:
            assert again.ends() == 0, again.said
        assert "changed since then: module mine" in again.said
        assert {job.calls()[call] for call in before if call[0] == 6} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
def test_the_resumed_run_has_other_workers(tmp_path: Path, workers: int, undisturbed: Outcome) -> None:
    """Those that are not wanted hand back what they have finished."""
    with local_job(tmp_path, workers=3) as job:
        job.kill_at(6)
        with job.start("--resume", "--workers", str(workers)) as again:
            assert again.ends() == 0, again.said
        assert set(job.calls().values()) == {1}, f"executed again: {job.calls()}"
        assert again.said.count("hands back what it has finished, and is sent away") == max(0, 3 - workers)
        assert job.outcome() == undisturbed
        job.leaves_nothing()


@pytest.mark.slow
def test_two_runs_have_their_own_workers(tmp_path: Path, undisturbed: Outcome) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with local_job(tmp_path / "a") as one, local_job(tmp_path / "b") as other:
        for job in (one, other):
            job.kill_at(6)
        of_other = other.supervisors()
        with one.start("--resume") as again:
            assert again.ends() == 0, again.said
        one.leaves_nothing()
        assert other.supervisors() == of_other
        with other.start("--resume") as again:
            assert again.ends() == 0, again.said
        other.leaves_nothing()
        for job in (one, other):
            assert set(job.calls().values()) == {1}, f"executed again: {job.calls()}"
            assert job.outcome() == undisturbed


@pytest.mark.slow
def test_a_run_that_begins_anew_gets_nothing_of_the_one_before(tmp_path: Path, undisturbed: Outcome) -> None:
    with local_job(tmp_path) as job:
        job.kill_at(6)
        before = job.calls()
        with job.start("--restart") as again:
            assert again.ends() == 0, again.said
        # What ran when the run was killed goes on, and may have been counted after that.
        assert all(count >= 1 + before[call] for call, count in job.calls().items()), job.calls()
        assert job.outcome() == undisturbed
        job.leaves_nothing()


@pytest.mark.slow
def test_workers_whose_standard_error_is_gone_wait_all_the_same(tmp_path: Path, undisturbed: Outcome) -> None:
    """A run in a pipeline of the shell, which is killed as a whole."""
    with local_job(tmp_path) as job:
        held = job.hold(6)
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "pipedist", "run", "spec.yaml", "--output", "out"]
        with (
            open(writing, "wb") as pipe,
            subprocess.Popen(command, cwd=tmp_path, env=job.environment, stdout=pipe, stderr=pipe) as process,
        ):
            job.reaches(6)
            stayed = job.supervisors()
            os.close(reading)
            process.kill()
        held.unlink()
        with job.start("--resume") as again:
            assert again.ends() == 0, again.said
        assert len(stayed) == 2
        assert set(job.calls().values()) == {1}, f"executed again: {job.calls()}"
        assert job.outcome() == undisturbed


def test_a_worker_that_is_killed_as_a_whole_is_replaced(tmp_path: Path, undisturbed: Outcome) -> None:
    with local_job(tmp_path) as job:
        held = job.hold(6)
        with job.start() as run:
            job.reaches(6)
            before = job.supervisors()
            os.kill(min(before), signal.SIGKILL)
            until(lambda: len(job.supervisors()) == 2 and job.supervisors() != before)
            held.unlink()
            assert run.ends() == 0, run.said
        assert job.outcome() == undisturbed
        job.leaves_nothing()


@pytest.mark.slow
def test_all_of_them_are_killed_too(tmp_path: Path, undisturbed: Outcome) -> None:
    """The resumed run finds a directory that nobody is in, uses it, and removes it."""
    with local_job(tmp_path) as job:
        job.kill_at(6)
        for pid in job.supervisors():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not job.alive())
        with job.start("--resume") as again:
            assert again.ends() == 0, again.said
        assert job.outcome() == undisturbed
        job.leaves_nothing()


@pytest.mark.slow
def test_elements_that_kill_are_found_with_such_workers_too(tmp_path: Path) -> None:
    """However often a process dies in a call, its supervisor starts the next one: here, eight times."""
    with local_job(tmp_path, workers=1) as job:
        (tmp_path / "mine.py").write_text(
            "import os, signal\n"
            "def work(x, folder):\n"
            "    if 10 in x:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "    return x\n"
        )
        spec = tmp_path / "spec.yaml"
        spec.write_text(
            spec.read_text().replace('{run: "mine:work",', '{run: "mine:work", on_error: quarantine,')
        )
        with job.start() as run:
            assert run.ends() == 3, run.said
            assert len(run.named("has joined")) == 1, "one supervisor has started all of them"
        document = json.loads((tmp_path / "out/.pipedist/results.json").read_text())
        assert document["ledger"] == {"elements": 48, "committed": 47, "quarantined": 1, "lost": 0}
        job.leaves_nothing()
