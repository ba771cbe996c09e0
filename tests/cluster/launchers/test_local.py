"""The local launcher with a real fork server and real workers."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipedist.cluster.launchers.forkserver import OutOfMemoryKills
from pipedist.cluster.launchers.local import LocalLauncher
from pipedist.coordinator.launcher import WorkerExit
from pipedist.errors import LocalProtocolError, UsageError
from pipedist.protocol.messages import Stop
from pipedist.worker.boot import describe_exit
from tests.cluster.launchers.processes import ids_in, name_of, wait_gone
from tests.worker.fake_scheduler import PATIENCE_S, FakeScheduler, program

FUNCTIONS = "tests.worker.replica_functions"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server without CPU time for a while still ends, and its end is reported."""
    monkeypatch.setattr("pipedist.cluster.launchers.local.END_S", 60.0)
    monkeypatch.setattr("pipedist.cluster.launchers.local._GONE_S", 20.0)


@asynccontextmanager
async def launched(
    *names: str, **settings: float
) -> AsyncIterator[tuple[FakeScheduler, LocalLauncher, dict[str, bytes]]]:
    async with FakeScheduler() as scheduler:
        launcher = LocalLauncher(scheduler.endpoint, **settings)  # type: ignore[arg-type]
        launcher.on_exit = scheduler.exits.put_nowait
        async with launcher:
            identities: dict[str, bytes] = {}
            for name in names:
                launcher.start(name, 0)
            for _ in names:
                identity, hello = await scheduler.joins(launcher)
                identities[hello.worker] = identity
            yield scheduler, launcher, identities
            for identity in identities.values():
                scheduler._router.send(identity, Stop("the test is over"))


@pytest.mark.asyncio
async def test_processes_have_names() -> None:
    async with launched("w0", "w1") as (_, launcher, _ids):
        assert name_of(launcher.server_pid) == "pipedist-fork"
        assert [name_of(pid) for pid in launcher.pids.values()] == ["pipedist-worker"] * 2


@pytest.mark.asyncio
async def test_the_running_call_of_a_worker_is_visible_and_leaves_nothing() -> None:
    async with launched("w0", "w1") as (scheduler, launcher, ids):
        assert launcher.running("w0") is None
        assert launcher.running("nobody") is None
        pass_id = scheduler.bind(ids["w0"], program(f"{FUNCTIONS}:maybe_wait"))
        lease = scheduler.assign(ids["w0"], pass_id, ["/nonexistent/never"])
        while (running := launcher.running("w0")) is None:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        assert running == (lease, 0, 1)
        assert launcher.running("w1") is None
        before = len(os.listdir(f"/proc/{launcher.server_pid}/fd"))
        for incarnation in (1, 2, 3):
            launcher.start("w0", incarnation)  # which ends the one before
            await scheduler.joins(launcher)
        assert launcher.running("w0") is None
        while len(os.listdir(f"/proc/{launcher.server_pid}/fd")) > before:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        launcher.kill("w0")


@pytest.mark.asyncio
async def test_leaving_ends_everything() -> None:
    async with launched("w0", "w1") as (_, launcher, _ids):
        pids = [*launcher.pids.values(), launcher.server_pid]
    assert wait_gone(pids, within_s=0) == []
    assert launcher.pids == {}


@pytest.mark.asyncio
async def test_leaving_kills_a_worker_that_does_not_leave_in_time() -> None:
    async with launched("w0") as (scheduler, launcher, ids):
        pass_id = scheduler.bind(ids["w0"], program(f"{FUNCTIONS}:maybe_wait"))
        scheduler.assign(ids["w0"], pass_id, ["/nonexistent/never"])
        await asyncio.wait_for(scheduler.inbox.get(), PATIENCE_S)
        await launcher.close(grace_s=0.01)
        assert (await scheduler.exit()).text == "signal 9 (SIGKILL)"
        assert wait_gone([launcher.server_pid], within_s=0) == [] if launcher.server_pid else True
        with pytest.raises(LocalProtocolError, match="not open"):
            launcher.start("w0", 1)


@pytest.mark.asyncio
async def test_leaving_that_is_cancelled_kills_everything() -> None:
    """asyncio's own cancellation, as of `asyncio.timeout`, knows nothing of anyio's shields."""
    async with launched("w0") as (scheduler, launcher, ids):
        pass_id = scheduler.bind(ids["w0"], program(f"{FUNCTIONS}:maybe_wait"))
        scheduler.assign(ids["w0"], pass_id, ["/nonexistent/never"])
        await asyncio.wait_for(scheduler.inbox.get(), PATIENCE_S)
        pids = [*launcher.pids.values(), launcher.server_pid]
        leaving = asyncio.ensure_future(launcher.close(grace_s=60))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert wait_gone(pids) == []


@pytest.mark.asyncio
async def test_a_worker_for_which_there_is_no_descriptor_costs_no_other_one() -> None:
    async with launched("w0") as (scheduler, launcher, _):
        worker, server = launcher.pids["w0"], launcher.server_pid
        before = resource.prlimit(server, resource.RLIMIT_NOFILE)
        resource.prlimit(server, resource.RLIMIT_NOFILE, (3, before[1]))
        launcher.start("w1", 0)
        exit_ = await scheduler.exit()
        assert (exit_.worker, exit_.text) == ("w1", "can't fork a worker process: Too many open files")
        resource.prlimit(server, resource.RLIMIT_NOFILE, before)
        launcher.start("w1", 1)
        identity, hello = await scheduler.joins(launcher)
        assert (hello.worker, hello.incarnation) == ("w1", 1)
        assert launcher.pids == {"w0": worker, "w1": hello.pid}
        scheduler._router.send(identity, Stop("the test is over"))


@pytest.mark.asyncio
async def test_kill_and_replace() -> None:
    async with launched("w0", "w1") as (scheduler, launcher, _):
        killed = launcher.pids["w0"]
        launcher.kill("w0")
        exit_ = await scheduler.exit()
        assert exit_ == WorkerExit("w0", 0, killed, None, signal.SIGKILL, "signal 9 (SIGKILL)")
        assert list(launcher.pids) == ["w1"]
        launcher.kill("w0")  # gone already
        launcher.start("w0", 1)
        _, hello = await scheduler.joins(launcher)
        assert (hello.worker, hello.incarnation) == ("w0", 1)
        assert sorted(launcher.pids) == ["w0", "w1"]


@pytest.mark.asyncio
async def test_a_later_incarnation_replaces_an_earlier_one_that_is_still_there() -> None:
    async with launched("w0") as (scheduler, launcher, _):
        launcher.start("w0", 1)
        exit_ = await scheduler.exit()
        assert (exit_.worker, exit_.incarnation, exit_.signal) == ("w0", 0, signal.SIGKILL)
        _, hello = await scheduler.joins(launcher)
        assert hello.incarnation == 1
        assert launcher.pids == {"w0": hello.pid}
        with pytest.raises(LocalProtocolError, match="started twice"):
            launcher.start("w0", 1)


@pytest.mark.asyncio
async def test_a_killed_fork_server_is_replaced() -> None:
    async with launched("w0", "w1") as (scheduler, launcher, _):
        server = launcher.server_pid
        workers = list(launcher.pids.values())
        os.kill(server, signal.SIGKILL)
        exits = [await scheduler.exit() for _ in range(2)]
        assert {e.worker for e in exits} == {"w0", "w1"}
        assert all("fork server" in e.text and "SIGKILL" in e.text for e in exits)
        assert wait_gone(workers) == []
        launcher.start("w0", 1)
        await scheduler.joins(launcher)
        assert launcher.server_pid not in (0, server)
        os.kill(launcher.server_pid, signal.SIGKILL)
        await scheduler.exit()
        assert len(launcher._old_servers) == 1, "the first one was reaped, and is forgotten"


@pytest.mark.asyncio
async def test_a_worker_that_stays_stopped_is_killed() -> None:
    """That one that goes on is not: `test_forkserver`."""
    async with launched("w0", "w1", stopped_s_max=0.3) as (scheduler, launcher, ids):
        os.kill(launcher.pids["w1"], signal.SIGSTOP)
        exit_ = await scheduler.exit()
        assert exit_.worker == "w1"
        assert exit_.text == "stopped for 0.3 s, then killed with signal 9 (SIGKILL)"
        pass_id = scheduler.bind(ids["w0"], program(f"{FUNCTIONS}:identity"))
        scheduler.assign(ids["w0"], pass_id, [1])
        assert await scheduler.outcomes(1) == [{"y": 1}]


@pytest.mark.asyncio
async def test_ctrl_c_leaves_the_fork_server_alone() -> None:
    async with launched("w0") as (scheduler, launcher, _):
        os.kill(launcher.server_pid, signal.SIGINT)
        launcher.start("w1", 0)
        _, hello = await scheduler.joins(launcher)
        assert hello.worker == "w1"


@pytest.mark.asyncio
@pytest.mark.parametrize("ends", ["normally", "worker killed", "server killed", "exec"])
async def test_what_user_code_has_started_ends_with_its_worker(tmp_path: Path, ends: str) -> None:
    async with launched("w0", "w1") as (scheduler, launcher, ids):
        worker, server = launcher.pids["w0"], launcher.server_pid
        function = "leave_processes_and_exec" if ends == "exec" else "leave_processes"
        pass_id = scheduler.bind(ids["w0"], program(f"{FUNCTIONS}:{function}"))
        scheduler.assign(ids["w0"], pass_id, [str(tmp_path / "ids")])
        left = await asyncio.to_thread(ids_in, tmp_path / "ids")
        if ends == "worker killed":
            os.kill(worker, signal.SIGKILL)
        elif ends == "server killed":
            os.kill(server, signal.SIGKILL)
        elif ends == "normally":
            scheduler.stop(ids["w0"])
        exit_ = await scheduler.exit()
        assert wait_gone([worker, *left]) == []
        if ends == "exec":
            assert exit_.text == "replaced by another program (exec), then killed with signal 9 (SIGKILL)"
        else:
            assert exit_.code == (0 if ends == "normally" else None)


@pytest.mark.asyncio
async def test_closing_ends_what_user_code_has_started(tmp_path: Path) -> None:
    async with launched("w0") as (scheduler, launcher, ids):
        pass_id = scheduler.bind(ids["w0"], program(f"{FUNCTIONS}:leave_processes"))
        scheduler.assign(ids["w0"], pass_id, [str(tmp_path / "ids")])
        left = await asyncio.to_thread(ids_in, tmp_path / "ids")
        await launcher.close(grace_s=0.0)
    assert wait_gone(left) == []


def test_it_works_in_a_thread_beside_a_running_loop() -> None:
    seen: list[str] = []

    async def inner() -> None:
        async with launched("w0") as (_, launcher, _ids):
            seen.extend(launcher.pids)

    async def outer() -> None:
        thread = threading.Thread(target=lambda: asyncio.run(inner()))
        thread.start()
        await asyncio.to_thread(thread.join)

    asyncio.run(outer())
    assert seen == ["w0"]


@pytest.mark.asyncio
async def test_a_fork_server_that_cannot_start_is_reported_as_an_exit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with LocalLauncher("ipc:///nowhere/at-all") as launcher:
        exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        launcher.on_exit = exits.put_nowait
        launcher.start("w0", 0)
        exit_ = await asyncio.wait_for(exits.get(), PATIENCE_S)
        assert "exit code 1" in exit_.text
        assert exit_.pid == 0


def test_output_below_python_does_not_reach_stdout() -> None:
    script = """
import asyncio, os
from tests.cluster.launchers.test_local import launched, program, FUNCTIONS
async def main():
    async with launched("w0") as (scheduler, launcher, ids):
        pass_id = scheduler.bind(ids["w0"], program(f"{FUNCTIONS}:write_below"))
        scheduler.assign(ids["w0"], pass_id, [1])
        await scheduler.outcomes(1)
asyncio.run(main())
"""
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == b""
    assert b"from below" in done.stderr


@pytest.mark.parametrize("threads", [0, -1, True])
def test_threads_are_checked(threads: int) -> None:
    with pytest.raises(UsageError, match="`threads` must be an integer of 1 or more"):
        LocalLauncher("ipc:///x", threads=threads)


def test_endings_are_described() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "signal 11 (SIGSEGV)"
    assert describe_exit(-50) == "signal 50"


@pytest.mark.asyncio
@pytest.mark.parametrize("function", ["hold_the_interpreter", "maybe_wait"])
async def test_a_function_that_takes_too_long_costs_its_worker(function: str) -> None:
    async with launched("w0", "w1") as (scheduler, launcher, ids):
        launcher.watch(0.05)
        slow = program(f"{FUNCTIONS}:{function}")
        timed = replace(slow, stages=(replace(slow.stages[0], timeout_s=0.3),))
        pass_id = scheduler.bind(ids["w0"], timed)
        value = "/nonexistent/never" if function == "maybe_wait" else 1
        lease = scheduler.assign(ids["w0"], pass_id, [value], lo=5)
        exit_ = await scheduler.exit()
        assert (exit_.worker, exit_.signal, exit_.running, exit_.timed_out) == (
            "w0",
            signal.SIGKILL,
            (lease, 5, 1),
            True,
        )
        assert list(launcher.pids) == ["w1"]


@pytest.mark.asyncio
async def test_a_function_within_its_timeout_or_without_a_watch_is_not_killed() -> None:
    async with launched("w0") as (scheduler, launcher, ids):
        plain = program(f"{FUNCTIONS}:identity")
        timed = replace(plain, stages=(replace(plain.stages[0], timeout_s=1e-6),))
        pass_id = scheduler.bind(ids["w0"], timed)
        scheduler.assign(ids["w0"], pass_id, [1, 2, 3])
        assert await scheduler.outcomes(3) == [{"y": 1}, {"y": 2}, {"y": 3}]
        launcher.watch(0.001)
        timed = replace(plain, stages=(replace(plain.stages[0], timeout_s=60.0),))
        pass_id = scheduler.bind(ids["w0"], timed)
        scheduler.assign(ids["w0"], pass_id, [4])
        assert await scheduler.outcomes(1) == [{"y": 4}]
        assert launcher.pids


def test_the_kernels_count_of_processes_killed_for_want_of_memory(tmp_path: Path) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "fs"
    assert not OutOfMemoryKills(groups, mount).grew(), "there are no control groups"
    for line, file in [("0::/a/b", "a/b/memory.events"), ("4:memory:/c", "memory/c/memory.oom_control")]:
        groups.write_text(f"9:name=systemd:/\n{line}\n")
        (mount / file).parent.mkdir(parents=True)
        (mount / file).write_text("low 0\noom_kill 3\n")
        kills = OutOfMemoryKills(groups, mount)
        assert not kills.grew()
        (mount / file).write_text("low 0\noom_kill 4\n")
        assert kills.grew()
        assert not kills.grew()


def test_a_cluster_that_is_never_left_does_not_block_the_garbage_collection() -> None:
    script = """
import asyncio, gc
import pipedist

async def main():
    cluster = pipedist.LocalCluster(workers=1)
    await cluster.__aenter__()
    await cluster.ready()

gc.disable()
asyncio.run(main())
gc.collect()
print("collected")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "collected\n"
