"""Workers that real engines have placed outlive the process of their run, for `cluster.rejoin_s`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.staying import WORKERS, EngineJob, engine, engine_job
from tests.reattach.jobs import Outcome, until

MODULES = {"dask": "distributed", "ray": "ray", "ray-client": "ray"}


def there(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(MODULES[kind]) is None,
        reason=f"{kind} is not installed here: make test-engines",
    )


pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),  # engines start many processes; it bounds hangs only
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs sealed memory: run it on Linux"),
]


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=there(kind)) for kind in MODULES])
def at(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    with engine(request.param) as found:
        yield found


def killed(job: EngineJob, step: int, *flags: str) -> set[int]:
    """Kill the run when somebody executes a step, with workers that have finished others; return those."""
    held = job.hold(step)
    with job.start(*flags) as run:
        job.reaches(step)
        seen: list[set[int]] = []
        until(lambda: seen.append(job.kept()) or len(seen[-1]) == WORKERS)  # type: ignore[func-returns-value]
        stayed = seen[-1]
        os.killpg(run.process.pid, signal.SIGKILL)
        assert run.ends() == -signal.SIGKILL
    held.unlink()
    return stayed


def test_what_is_finished_is_taken_over_by_the_resumed_run(
    tmp_path: Path, at: dict[str, str], undisturbed: Outcome
) -> None:
    """It is killed twice; the calls that ran then are taken over too."""
    with engine_job(tmp_path, at) as job:
        stayed = killed(job, 4)
        assert job.pointer.stat().st_mode & 0o777 == 0o600
        assert killed(job, 9, "--resume") == stayed
        with job.start("--resume") as last:
            assert last.ends() == 0, last.said
        assert set(job.calls().values()) == {1}, f"executed again: {job.calls()}, {last.said}"
        assert job.outcome() == undisturbed
        assert not job.ours(), "nothing is left, at once"
        assert job.in_engine() == []
        assert not job.pointer.exists()


def test_nobody_comes_and_nothing_is_left(tmp_path: Path, at: dict[str, str]) -> None:
    with engine_job(tmp_path, at, rejoin_s=2.0) as job:
        job.hold(4)  # for ever: in a call that has no end they are told to end, too
        with job.start() as run:
            job.reaches(4)
            run.process.kill()
            run.ends()
        assert job.in_engine() != []
        until(lambda: not job.ours())
        until(lambda: job.in_engine() == [])


def test_a_run_that_is_interrupted_takes_its_workers_with_it(tmp_path: Path, at: dict[str, str]) -> None:
    with engine_job(tmp_path, at, steps=400) as job:
        held = [job.hold(step) for step in range(5, 25)]  # whoever comes is held before much is issued
        with job.start() as run:
            job.reaches(5)
            os.killpg(run.process.pid, signal.SIGINT)
            run.hears("no new calls start")
            for each in held:
                each.unlink()
            assert run.ends() == 128 + signal.SIGINT, run.said
        assert not job.ours()
        assert job.in_engine() == []
        assert not job.pointer.exists()
        with job.start("--resume") as again:
            assert again.ends() == 0, again.said
        assert len(job.calls()) == 800
        assert job.in_engine() == []


def test_where_the_port_is_taken_they_are_replaced(
    tmp_path: Path, at: dict[str, str], undisturbed: Outcome
) -> None:
    with engine_job(tmp_path, at) as job:
        stayed = killed(job, 6)
        host, port = _endpoint(job)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((host, port))
            other.listen(1)
            with job.start("--resume") as again:
                again.hears("workers of the killed process can't find this one: it can't listen at")
                assert again.ends() == 0, again.said
        assert job.outcome() == undisturbed
        assert not stayed & job.ours()
        assert job.in_engine() == []


def _endpoint(job: EngineJob) -> tuple[str, int]:
    host, _, port = json.loads(job.pointer.read_text())["endpoint"].removeprefix("tcp://").rpartition(":")
    return host, int(port)


def test_a_worker_that_is_lost_meanwhile_is_replaced(
    tmp_path: Path, at: dict[str, str], undisturbed: Outcome
) -> None:
    """Its supervisor is killed: another one is there, which waits too."""
    with engine_job(tmp_path, at) as job:
        stayed = killed(job, 6)
        os.kill(min(stayed), signal.SIGKILL)
        until(lambda: len(job.kept()) == WORKERS)
        with job.start("--resume") as again:
            assert again.ends() == 0, again.said
        assert job.outcome() == undisturbed
        assert job.in_engine() == []
