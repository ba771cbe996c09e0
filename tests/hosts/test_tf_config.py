"""Programs that are started once per host, each with its own TF_CONFIG; here three of them, on loopback."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import pytest

import pipedist
from pipedist.cluster import tf_config as task_cluster
from pipedist.cluster.tf_config import loopback_key_file
from pipedist.coordinator import worker_pool
from pipedist.errors import PipedistError, RunCancelled, UsageError, WorkersLost
from pipedist.protocol.codec import decode
from pipedist.transport.keys import write_key_file
from tests import preloaded
from tests.ports import free_port
from tests.state_size import entries

PROGRAM = """
import asyncio, json, os, signal, sys, time
import pipedist

def cubes(shard, ctx, go=None, victim=None):
    task = f"{ctx.cluster.type}/{ctx.cluster.index}"
    print("call at", task)
    while victim not in (None, task) and not os.path.exists("died"):
        time.sleep(0.01)  # otherwise the others may have done everything before it begins
    if victim == task and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getppid(), signal.SIGKILL)  # the program itself; its worker process goes with it
        os.kill(os.getpid(), signal.SIGKILL)
    return shard ** 3

def fails(shard):
    raise ValueError("no such luck")

def spec(function, **with_):
    return {
        "pipedist": 1, "replicas": 2, "dataset": {"range": 400, "batch": 4},
        "stages": {
            "cubes": {"run": function, "with": with_}, "total": {"reduce": "sum", "of": "cubes", "axis": 0}
        },
    }

async def total(cluster):
    await cluster.coordinator.wait_ready(3)
    async with pipedist.open(spec(cubes, victim=os.environ.get("VICTIM")), cluster=cluster) as run:
        return dict(await run.results())

async def with_strategy(cluster):
    resolver = pipedist.TFConfigClusterResolver()
    strategy = pipedist.MultiWorkerMirroredStrategy(cluster, cluster_resolver=resolver)
    values = await strategy.run(lambda: pipedist.get_replica_context().replica_id_in_sync_group * 3)
    return list(strategy.local_results(values))

async def wrong(cluster):
    async with pipedist.open(spec(fails), cluster=cluster) as run:
        return dict(await run.results())

async def main():
    async with pipedist.open_cluster(join_s=60) as cluster:
        first = await cluster.everywhere(total)
        second = await cluster.everywhere(total) if "TWICE" in os.environ else None
        if "TWICE" in os.environ:
            assert await cluster.everywhere(with_strategy) == [0, 3, 6]
        error = ""
        if "FAIL" in os.environ:
            try:
                await cluster.everywhere(wrong)
            except pipedist.PipedistError as caught:
                error = f"{type(caught).__name__}: {caught}"
        if "DIE" in os.environ:
            if cluster.is_scheduling:
                os.kill(os.getpid(), signal.SIGKILL)
            await cluster.everywhere(total)
        print(json.dumps({
            "task": f"{cluster.task_type}/{cluster.task_id}", "first": int(first["total"]),
            "same": second is None or second == first, "error": error,
        }))

asyncio.run(main())
"""

CUBES = sum(k**3 for k in range(400))


@contextmanager
def programs(
    folder: Path, jobs: dict[str, int], *, program: str = PROGRAM, **env: str
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    (folder / "program.py").write_text(program)
    cluster = {job: [f"127.0.0.1:{free_port()}" for _ in range(count)] for job, count in jobs.items()}
    with ExitStack() as stack:
        started = {}
        for job, count in jobs.items():
            for index in range(count):
                config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
                process = preloaded.Popen(
                    [sys.executable, "program.py"],
                    cwd=folder,
                    env={**os.environ, "TMPDIR": str(folder), "TF_CONFIG": config, **env},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                stack.callback(process.communicate)
                stack.callback(process.kill)
                started[f"{job}/{index}"] = process
        yield started


def test_the_program_in_the_documents_prints_the_documented_output(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "one-program-per-host.md").read_text()
    (program,) = re.findall(r"```python title=.*?\n(.*?)```", page, re.DOTALL)
    (told,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    with programs(tmp_path, {"worker": 2}, program=program) as started:
        ends = [process.communicate(timeout=100) for process in started.values()]
    assert "".join(out for out, _ in ends) == told, ends


def outcome(process: subprocess.Popen[str]) -> dict[str, object]:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param({"worker": 3}, id="workers", marks=pytest.mark.slow),
        pytest.param({"worker": 2, "chief": 1}, id="chief"),
    ],
)
def test_every_program_has_the_same_result(tmp_path: Path, jobs: dict[str, int]) -> None:
    with programs(tmp_path, jobs, TWICE="1", FAIL="1") as started:
        scheduling = "chief/0" if "chief" in jobs else "worker/0"
        for task, process in started.items():
            found = outcome(process)
            assert (found["task"], found["first"], found["same"]) == (task, CUBES, True)
            error = str(found["error"])
            assert "no such luck" in error
            assert error.startswith(
                "CallError" if task == scheduling else f"RemoteError: {scheduling} failed"
            )


def test_one_that_is_killed_changes_nothing_for_the_others(tmp_path: Path) -> None:
    with programs(tmp_path, {"worker": 3}, VICTIM="worker/2") as started:
        assert outcome(started["worker/0"])["first"] == CUBES
        assert outcome(started["worker/1"])["first"] == CUBES
        started["worker/2"].communicate(timeout=60)
        assert started["worker/2"].returncode == -9
        assert (tmp_path / "died").exists()


def test_without_the_scheduling_program_the_others_say_so(tmp_path: Path) -> None:
    with programs(tmp_path, {"worker": 3}, DIE="1") as started:
        for task in ("worker/1", "worker/2"):
            _, err = started[task].communicate(timeout=100)
            assert started[task].returncode == 1
            assert "RunCancelled: worker/0 at tcp://127.0.0.1" in err


def config(monkeypatch: pytest.MonkeyPatch, cluster: object, kind: str = "worker", index: int = 0) -> None:
    text = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
    monkeypatch.setenv("TF_CONFIG", text)


def supervisors_end() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("pipedist-supervisor"):
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.asyncio
async def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config(monkeypatch, {"worker": [f"127.0.0.1:{free_port()}" for _ in range(3)]}, index=0)
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(task_cluster, "print_notice", told.set_result)

    async def leave() -> None:
        async with pipedist.open_cluster(join_s=60):
            pass

    task = asyncio.ensure_future(leave())
    text = await asyncio.wait_for(told, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert text == "waiting for tasks, for at most 60 s: worker/1, worker/2"


@pytest.mark.asyncio
async def test_work_without_any_worker_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config(monkeypatch, {"worker": [f"127.0.0.1:{free_port()}"]}, index=0)
    async with pipedist.open_cluster(join_s=1) as cluster:
        for supervisor in cluster._supervisors:
            supervisor.leave(at_once=True)
        with pytest.raises(WorkersLost, match="all workers of worker/0 have ended"):
            await asyncio.wait_for(cluster.coordinator.wait_ready(2), 60)


@pytest.mark.asyncio
@pytest.mark.parametrize("index", [0, 1])
async def test_leaving_that_is_cancelled_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: int
) -> None:
    """Both programs wait for the other one, which is not there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config(monkeypatch, {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}, index=index)
    cluster = pipedist.open_cluster(join_s=60)
    entered = asyncio.Event()

    async def work() -> None:
        async with cluster:
            entered.set()

    task = asyncio.ensure_future(work())
    await entered.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    supervisors_end()
    with pytest.raises(UsageError):
        cluster.coordinator  # noqa: B018


@pytest.mark.asyncio
@pytest.mark.parametrize("index", [0, 1])
async def test_one_that_cannot_be_entered_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: int
) -> None:
    """The system has no more threads; an `async with` that was not entered is not exited."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    address = f"127.0.0.1:{free_port()}"
    config(monkeypatch, {"worker": [address, "127.0.0.1:9"]}, index=index)
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "pipedist-supervisor-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    cluster = pipedist.open_cluster(workers=2)
    with pytest.raises(RuntimeError, match="new thread"):
        await cluster.__aenter__()
    supervisors_end()
    with pytest.raises(UsageError):
        cluster.coordinator  # noqa: B018
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        pass  # nobody listens there


def test_missing_settings_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("PIPEDIST_KEY_FILE", raising=False)
    with pytest.raises(UsageError, match="Set TF_CONFIG"):
        pipedist.open_cluster()
    config(monkeypatch, {"worker": ["10.0.0.1:5555"]})
    with pytest.raises(UsageError, match=r"the cluster needs keys.*Create them with `pipedist keys new`"):
        pipedist.open_cluster()
    pipedist.open_cluster(key_file=tmp_path / "key")
    monkeypatch.setenv("PIPEDIST_KEY_FILE", str(tmp_path / "key"))
    pipedist.open_cluster()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["10.0.0.1:5555"]}}))
    with pytest.raises(UsageError, match="TF_CONFIG has no `task`"):
        pipedist.open_cluster()
    spec = pipedist.ClusterSpec({"worker": ["10.0.0.1:5555"]})
    pods = pipedist.SimpleClusterResolver(spec)
    with pytest.raises(UsageError, match=r"SimpleClusterResolver does not know the task.*UnionResolver\("):
        pipedist.open_cluster(pods)
    pipedist.open_cluster(pipedist.UnionResolver(pods, task_type="worker", task_id=0))
    config(monkeypatch, {"ps": ["10.0.0.1:5555"]}, "ps")
    with pytest.raises(UsageError, match="no chief 0, master 0 or worker 0"):
        pipedist.open_cluster()
    config(monkeypatch, {"worker": ["10.0.0.1"]})
    with pytest.raises(UsageError, match="must be HOST:PORT"):
        pipedist.open_cluster()
    for address in ("10.0.0.1:0", "10.0.0.1:65536", "fd00::1:2222", "grpc://10.0.0.1:2222"):
        config(monkeypatch, {"worker": [address]})
        with pytest.raises(UsageError, match=f"the address of worker/0 is '{address}': endpoint"):
            pipedist.open_cluster()
    config(monkeypatch, {"worker": ["10.0.0.1:1"]}, "evaluator")
    with pytest.raises(UsageError, match="task evaluator/0 is not in the cluster"):
        pipedist.open_cluster()


@pytest.mark.asyncio
async def test_a_program_with_other_keys_is_not_left_with_a_driver_that_never_replied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    write_key_file(tmp_path / "other.key")
    config(monkeypatch, {"worker": [listen, "127.0.0.1:9"]}, index=1)
    async with (
        pipedist.ConnectCluster(listen=f"tcp://{listen}", key_file=tmp_path / "cluster.key"),
        pipedist.open_cluster(key_file=tmp_path / "other.key") as cluster,
    ):
        with pytest.raises(RunCancelled, match="rejected this program's workers, which print why"):
            await asyncio.wait_for(cluster.everywhere(anyio.sleep), 60)  # type: ignore[arg-type]
    supervisors_end()


def test_keys_of_a_loopback_address_are_this_users_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = Path(loopback_key_file())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    content = path.read_bytes()
    assert loopback_key_file() == str(path)
    assert path.read_bytes() == content, "a later program has the same keys"
    path.parent.chmod(0o755)
    with pytest.raises(UsageError, match="not a folder that only you can enter"):
        loopback_key_file()
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="not a folder that only you can enter"):
        loopback_key_file()


def test_programs_that_start_at_once_have_the_same_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = tmp_path / "other.key"
    write_key_file(other)

    def write(path: str) -> None:
        """Write the file as if another program had been faster."""
        write_key_file(path)
        Path(path).with_name("loopback.key").write_bytes(other.read_bytes())

    monkeypatch.setattr(task_cluster, "write_key_file", write)
    path = Path(loopback_key_file())
    assert path.read_bytes() == other.read_bytes()
    assert [found.name for found in path.parent.iterdir()] == ["loopback.key"]


@pytest.mark.asyncio
@pytest.mark.parametrize("index", [0, 1])
async def test_the_exception_of_a_supervisor_is_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: int
) -> None:
    """Its disk is full."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(_kind: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: list[str] = []
    monkeypatch.setattr("pipedist.worker.supervisor.ScratchFolder", full)
    monkeypatch.setattr(task_cluster, "print_notice", told.append)
    config(monkeypatch, {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}, index=index)
    cluster = pipedist.open_cluster(join_s=0.1)

    async def use() -> None:
        async with cluster:
            if not cluster.is_scheduling:
                await asyncio.wait_for(cluster.everywhere(anyio.sleep), 60)  # type: ignore[arg-type]

    with pytest.raises(PipedistError, match=r"can't be kept alive on this host: .*No space left"):
        await use()
    assert f"a supervisor of worker/{index} has failed: PipedistError" in told[0]
    supervisors_end()


@pytest.mark.asyncio
async def test_results_for_programs_that_lag_behind_are_bounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Received results are kept until `everywhere` asks for them, the latest ones."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker_pool, "SHARED_BYTES_MAX", 100)
    config(monkeypatch, {"worker": ["127.0.0.1:5555", "127.0.0.1:9"]}, index=1)
    cluster = pipedist.open_cluster()
    for number in range(1, 5001):
        cluster._on_shared(number, [True, number], 10)
    cluster._on_shared(2, [True, 2], 10)  # sent again after a reconnection
    assert entries(cluster._shared) < 100
    with pytest.raises(RunCancelled, match="result 1 of `everywhere` is no longer kept"):
        await cluster.everywhere(anyio.sleep)  # type: ignore[arg-type]
    cluster._called = 4990
    assert await cluster.everywhere(anyio.sleep) == 4991  # type: ignore[arg-type]
    cluster._on_shared(5001, [True, 5001], 1000)
    assert [number for number, _ in cluster._shared] == [5001], "the latest is kept, whatever its size"


@pytest.mark.asyncio
async def test_concurrent_calls_are_executed_in_their_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other programs get results by number, so the order must be that of the calls."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config(monkeypatch, {"worker": [f"127.0.0.1:{free_port()}"]}, index=0)

    async def slow(_cluster: object) -> str:
        for _ in range(10):
            await asyncio.sleep(0)
        return "slow"

    async def fast(_cluster: object) -> str:
        return "fast"

    async with pipedist.open_cluster() as cluster:
        assert await asyncio.gather(cluster.everywhere(slow), cluster.everywhere(fast)) == ["slow", "fast"]
        shared = [decode(list(frames))[1] for _, frames in cluster.coordinator._pool._shared]  # type: ignore[arg-type]
        assert shared == ["slow", "fast"]


@pytest.mark.asyncio
async def test_a_program_that_serves_may_call_concurrently(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config(monkeypatch, {"worker": ["127.0.0.1:5555", "127.0.0.1:9"]}, index=1)
    cluster = pipedist.open_cluster()
    cluster._supervisors.append(None)  # type: ignore[arg-type]
    calls = [asyncio.ensure_future(cluster.everywhere(anyio.sleep)) for _ in range(2)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    for number in (1, 2):
        cluster._on_shared(number, [True, number], 10)
    assert await asyncio.wait_for(asyncio.gather(*calls), 60) == [1, 2]
