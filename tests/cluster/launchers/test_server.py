"""Fork servers that are started ahead of time: taken over, or ended, never left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipedist
from pipedist.cluster.launchers import server
from pipedist.cluster.launchers.local import LocalLauncher
from pipedist.cluster.launchers.server import Spare, prepare, take
from tests.cluster.launchers.processes import children_of, wait_gone

ROOT = Path(__file__).parents[3]
SPEC = {
    "pipedist": 1,
    "dataset": {"range": 4, "batch": 2},
    "stages": {"total": {"reduce": "sum", "of": "dataset", "axis": 0}},
}


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    before = children_of(os.getpid())
    yield
    gc.collect()
    assert server._spares == []
    assert children_of(os.getpid()).keys() <= before.keys()


def waiting() -> list[int]:
    return [spare.pid for spare in server._spares]


def test_a_spare_is_ended_and_reaped_by_its_starter() -> None:
    spare = prepare()
    (pid,) = waiting()
    spare.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    spare.end()
    Spare().end()


def test_a_spare_that_is_forgotten_is_ended() -> None:
    spare = prepare()
    (pid,) = waiting()
    del spare
    assert wait_gone([pid], within_s=0) == []


@pytest.mark.asyncio
async def test_a_launcher_takes_the_spare_over() -> None:
    with prepare() as spare:
        (pid,) = waiting()
        with prepare():
            assert waiting() == [pid], "one is enough"
            async with LocalLauncher("ipc:///nowhere/at-all") as launcher:
                assert launcher.server_pid == pid
                spare.end()
                assert pid in children_of(os.getpid()), "it is the launcher's now"
                assert take_another() != pid
    assert wait_gone([pid], within_s=0) == []


def take_another() -> int:
    other = take(1)
    other.discard()
    return other.pid


def test_a_spare_that_does_not_fit_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with prepare():
        (spare,) = server._spares
        assert spare.fits(1)
        assert not spare.fits(2)
        monkeypatch.setenv("PIPEDIST_TEST_OF_SURROUNDINGS", "1")
        assert not spare.fits(1)
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        assert not spare.fits(1)
        monkeypatch.undo()
        spare.kill()
        spare.wait()
        assert not spare.fits(1)


def test_a_wrong_spec_leaves_no_server() -> None:
    before = children_of(os.getpid())
    for door in (pipedist.run, pipedist.open):
        with pytest.raises(pipedist.SpecError) as caught:
            door({**SPEC, "nonsense": 1})
        assert children_of(os.getpid()) == before
        assert caught.tb, "its frames, which are there still, keep nothing alive"


@pytest.mark.asyncio
async def test_a_plan_that_fails_leaves_no_server() -> None:
    before = children_of(os.getpid())
    run = pipedist.open({**SPEC, "dataset": {"npy": {"path": "/nonexistent/*.npy"}, "batch": 2}})
    with pytest.raises(pipedist.PlanError):
        await run.__aenter__()
    assert children_of(os.getpid()) == before
    assert run.name == "spec", "it is there still, and keeps nothing alive"


@pytest.mark.asyncio
async def test_a_run_that_is_never_entered_leaves_no_server() -> None:
    run = pipedist.open(SPEC)
    (pid,) = waiting()
    del run
    gc.collect()
    assert wait_gone([pid], within_s=0) == []


def test_a_spec_that_is_not_there_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_exec", None)
    with pytest.raises(pipedist.SpecError, match="this file does not exist"):
        pipedist.run("/nonexistent/spec.yaml")


@pytest.mark.asyncio
async def test_workers_that_dial_in_need_no_server(tmp_path: Path) -> None:
    before = children_of(os.getpid())
    keys = str(tmp_path / "keys.json")
    cluster = {"launcher": "connect", "listen": "tcp://127.0.0.1:*", "workers": 1, "key_file": keys}
    async with pipedist.open({**SPEC, "cluster": cluster}):
        assert children_of(os.getpid()) == before


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.asyncio
async def test_other_threads_need_another_server() -> None:
    before = children_of(os.getpid())
    async with pipedist.open({**SPEC, "threads_per_replica": 2}, workers=1) as run:
        (pid,) = children_of(os.getpid()).keys() - before.keys()
        assert b"OMP_NUM_THREADS=2\0" in environment_of(pid)
        assert (await run.results())["total"] == 6


def test_a_spare_goes_with_a_process_that_is_killed() -> None:
    script = (
        "import time; from pipedist.cluster.launchers import server; spare = server.prepare()\n"
        "print(server._spares[0].pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    assert wait_gone([pid]) == [], "it may have been loading still"


def test_a_forked_child_leaves_its_parents_spare_alone() -> None:
    script = """
import os, sys
from pipedist.cluster.launchers import server
spare = server.prepare()
pid = os.fork()
if pid == 0:
    assert not server._spares[0].fits(1)
    spare.end()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert server._spares[0].fits(1)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_command_line_that_is_wrong_leaves_no_server(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("pipedist: 1\n")
    for words in (["--bogus"], []):
        done = subprocess.Popen(
            [sys.executable, "-m", "pipedist", "run", str(tmp_path / "spec.yaml"), *words],
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        _, told = done.communicate(timeout=60)
        assert done.returncode == 2, told
        with pytest.raises(ProcessLookupError):
            os.killpg(done.pid, signal.SIGKILL)  # nobody of its session is left


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (["run", "spec.yaml"], True),
        (["run", "--workers", "2", "spec.yaml"], True),
        (["run", "missing.yaml"], False),
        (["run", "spec.yaml", "--help"], False),
        (["validate", "spec.yaml"], False),
        (["plan", "spec.yaml"], False),
        (["schema"], False),
        ([], False),
    ],
)
def test_only_a_run_gets_a_start_fork_server(
    words: list[str], starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipedist import cli

    (tmp_path / "spec.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with cli._start_fork_server(words):
        assert bool(server._spares) == starts
