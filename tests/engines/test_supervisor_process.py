"""Supervisor processes, and clusters of them: real processes, no engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio.to_thread
import pytest

import pipedist
from pipedist.cluster.engine_clusters import EngineCluster
from pipedist.cluster.launchers import supervisor_process
from pipedist.cluster.launchers.engines import not_installed, require
from pipedist.cluster.launchers.ray import copy_code
from pipedist.cluster.launchers.supervisor_process import JoinConfig, SupervisorProcess
from pipedist.errors import UsageError, WorkersLost
from pipedist.protocol import code_archive
from pipedist.scheduler import SchedulerLimits
from pipedist.transport.keys import ClusterKeys, key_text, new_keys
from tests import preloaded
from tests.cluster.launchers.processes import children_of, wait_gone, wait_state
from tests.engines.here import GONE_S, HereEngine
from tests.engines.placing import (
    F,
    digest,
    document,
    processes_with,
    steps_begun,
    undisturbed,
    wait_until,
)

ROOT = Path(__file__).parents[2]


SOON = SchedulerLimits(heartbeat_timeout_s=4)
"""A shorter timeout for tests that kill supervisors, which then can't send Goodbye."""


def cluster_of(
    engine: HereEngine, workers: int = 2, threads: int = 1, limits: SchedulerLimits | None = None
) -> EngineCluster:
    return EngineCluster(workers, engine, None, threads, limits, force=False)


@pytest.mark.asyncio
async def test_workers_dial_in_and_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("PIPEDIST_TEST_MARK", mark)
    files = len(os.listdir("/proc/self/fd"))
    engine = HereEngine(2)
    async with cluster_of(engine) as cluster:
        await cluster.ready()
        async with pipedist.open(document("roots"), cluster=cluster) as run:
            assert digest(await run.results()) == await anyio.to_thread.run_sync(undisturbed)
        with pytest.raises(pipedist.CallError):
            async with pipedist.open(document("raises"), cluster=cluster) as run:
                await run.results()
    assert [each.wait(0) for each in engine.supervisors] == ["", ""], "told to leave, by the scheduler"
    assert wait_until(lambda: not processes_with(mark)), processes_with(mark)
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files), "a thread closes the last ones"


@pytest.mark.asyncio
async def test_a_killed_supervisor_is_started_again(tmp_path: Path) -> None:
    engine = HereEngine(1)
    async with cluster_of(engine, workers=1, limits=SOON) as cluster:
        await cluster.ready()
        before = engine.supervisors[0].pid
        async with pipedist.open(document("dies_once", marker=str(tmp_path / "m")), cluster=cluster) as run:
            found = digest(await run.results())
        assert engine.supervisors[0].pid not in (0, before)
    assert found == await anyio.to_thread.run_sync(undisturbed)


@pytest.mark.asyncio
async def test_elements_that_kill_are_looked_for_without_the_engine() -> None:
    """That takes more deaths in a row than a host may have that is no good."""
    spec = {
        "pipedist": 1,
        "dataset": {"range": 8, "batch": 4},
        "stages": {
            "y": {"run": f"{F}:dies_of_threes", "on_error": "quarantine"},
            "total": {"reduce": "sum", "of": "y", "axis": 0},
        },
    }
    engine = HereEngine(1)
    async with cluster_of(engine, workers=1) as cluster:
        await cluster.ready()
        before = engine.supervisors[0].pid
        async with pipedist.open(spec, cluster=cluster) as run:
            result = await run.results()
        assert engine.supervisors[0].pid == before, "the supervisor has stayed"
    assert result.ledger == pipedist.Ledger(elements=8, committed=7, quarantined=1)
    assert result["total"] == sum(range(8)) - 3


@pytest.mark.asyncio
async def test_processes_of_user_code_do_not_hide_the_end(tmp_path: Path) -> None:
    """It has the pipe in which the supervisor tells why it leaves: that one does not end with it."""
    engine, marker = HereEngine(1), tmp_path / "m"
    try:
        async with cluster_of(engine, workers=1, limits=SOON) as cluster:
            await cluster.ready()
            spec = document("leaves_one_behind", marker=str(marker))
            async with pipedist.open(spec, cluster=cluster) as run:
                found = digest(await run.results())
        assert found == await anyio.to_thread.run_sync(undisturbed)
    finally:
        os.kill(int(marker.read_text()), signal.SIGKILL)


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def seen_of(pid: int) -> str:
    """Return the properties of a process that other users can see, and its open files."""
    process = Path(f"/proc/{pid}")
    texts = [(process / file).read_bytes().decode() for file in ("cmdline", "environ")]
    for entry in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # it has just been closed
            texts.append(os.readlink(entry))
    return " ".join(texts)


@pytest.mark.asyncio
async def test_secrets_are_in_memory_only() -> None:
    engine = HereEngine(1)
    async with cluster_of(engine, workers=1) as cluster:
        await cluster.ready()
        secret = json.loads(engine.joins[0].keys)["client_secret"]
        supervisor = engine.supervisors[0].pid
        for pid in (supervisor, *children_of(supervisor)):
            assert secret not in seen_of(pid)
            assert "memfd:pipedist-keys" in seen_of(pid)
            assert re.search(r"[0-9a-f]{64}", command_of(pid)) is None, "the proof of its name"
    assert "server_secret" not in engine.joins[0].keys, "a worker can't stand in for the scheduler"
    assert secret not in repr(engine.joins[0])


@pytest.mark.asyncio
async def test_threads_are_those_of_the_run() -> None:
    async with cluster_of(HereEngine(1), workers=1, threads=3) as cluster:
        spec = {
            "pipedist": 1,
            "threads_per_replica": 3,
            "dataset": {"range": 2, "batch": 2},
            "stages": {
                "t": {"run": f"{F}:threads"},
                "most": {"reduce": "max", "of": "t", "axis": None},
            },
        }
        async with pipedist.open(spec, cluster=cluster) as run:
            assert (await run.results())["most"] == 3


@pytest.mark.asyncio
async def test_a_run_ends_when_no_worker_will_come() -> None:
    """Otherwise the run would wait for ever: only the engine restarts its workers."""
    lost = JoinConfig("nowhere", key_text(ClusterKeys(new_keys().client, None)))
    async with cluster_of(HereEngine(1, lost), workers=1) as cluster:
        with pytest.raises(WorkersLost, match="nowhere"):
            async with pipedist.open(document("roots"), cluster=cluster) as run:
                await run.results()


@contextmanager
def parent_of_supervisor(join: JoinConfig) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has a supervisor, and the supervisor's pid."""
    script = (
        "import json, sys, time\n"
        "from pipedist.cluster.launchers.supervisor_process import JoinConfig, SupervisorProcess\n"
        "kept = SupervisorProcess(JoinConfig(sys.argv[1], json.loads(sys.stdin.readline())))\n"
        "while not kept.pid: time.sleep(0.01)\n"
        "print(kept.pid, flush=True)\n"
        "kept.wait()\n"
    )
    process = preloaded.Popen(
        [sys.executable, "-c", script, join.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(join.keys) + "\n")
            process.stdin.flush()
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.asyncio
@pytest.mark.parametrize("stopped", [False, True])
async def test_a_killed_parent_leaves_nothing_and_its_calls_are_reassigned(
    tmp_path: Path, stopped: bool
) -> None:
    engine = HereEngine(0)
    async with cluster_of(engine, limits=SOON) as cluster:
        with parent_of_supervisor(engine.joins[0]) as (process, supervisor):
            await cluster.ready(1)
            (worker,) = children_of(supervisor)
            async with pipedist.open(document("slow_roots", begun=str(tmp_path)), cluster=cluster) as run:
                results = asyncio.create_task(run.results())
                assert await anyio.to_thread.run_sync(wait_until, lambda: steps_begun(tmp_path) > 5)
                if stopped:
                    os.kill(worker, signal.SIGSTOP)
                    wait_state(worker, "T")
                process.kill()
                assert wait_gone([supervisor, worker], GONE_S) == []
                engine.supervisors.append(SupervisorProcess(engine.joins[0]))
                found = digest(await results)
    assert found == await anyio.to_thread.run_sync(undisturbed)


def test_closing_kills_a_supervisor_that_does_not_leave() -> None:
    """The supervisor is stopped, so it does not react."""
    kept = SupervisorProcess(JoinConfig("tcp://127.0.0.1:1", key_text(new_keys())))
    assert wait_until(lambda: kept.pid != 0)
    supervisor = kept.pid
    assert wait_until(lambda: bool(children_of(supervisor)))
    processes = [supervisor, *children_of(supervisor)]
    os.kill(supervisor, signal.SIGSTOP)
    kept.close(grace_s=0.2)
    assert wait_gone(processes) == []
    assert kept.pid == 0


def test_the_reason_why_a_worker_left_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_process, "STARTS_MAX", 2)
    told: list[str] = []
    kept = SupervisorProcess(JoinConfig("nowhere", key_text(new_keys())), told.append)
    how = kept.wait(GONE_S)
    assert how is not None
    assert "nowhere" in how
    assert "exit code 2" in how
    kept.close(GONE_S)
    assert told == [how]


def test_code_comes_after_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/copy:/mine")
    assert supervisor_process._environment(("/copy",))["PYTHONPATH"] == "/mine"
    monkeypatch.setenv("PYTHONPATH", "/copy")
    assert "PYTHONPATH" not in supervisor_process._environment(("/copy",))


def test_the_files_that_look_like_code_are_copied_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, to = tmp_path / "code", tmp_path / "to"
    for folder in ("pack/deep", ".git", "__pycache__", "data"):
        (code / folder).mkdir(parents=True)
    for name in ("a.py", "pack/__init__.py", "pack/deep/b.py", ".git/c.py", "data/d.csv", "__pycache__/e.py"):
        (code / name).write_text(name)
    (code / "link.py").symlink_to("/etc/hostname")
    copy_code(code, to)
    copied = sorted(str(path.relative_to(to)) for path in to.rglob("*") if path.is_file())
    assert copied == ["a.py", "data/d.csv", "pack/__init__.py", "pack/deep/b.py"]
    monkeypatch.setattr(code_archive, "FILES_MAX", 2)
    with pytest.raises(UsageError, match="separate folder"):
        copy_code(code, tmp_path / "too many")


def test_a_missing_extra_is_reported_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("no_such_engine", "only_a_folder"):
        with pytest.raises(UsageError, match=r"pip install 'pipedist\[ray\]'"):
            require(module, "ray")
    require("json", "ray")
    assert "Install the same version" in not_installed("ModuleNotFoundError: No module named 'pipedist'")
    assert not_installed("something else") == ""


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(("engine", "module"), [("ray", "ray"), ("dask", "distributed")])
def test_a_missing_extra_is_reported_before_anything_runs(
    tmp_path: Path, command: str, engine: str, module: str
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "pipedist: 1\ndataset: {range: 4, batch: 2}\nstages: {t: {reduce: sum, of: dataset, axis: 0}}\n"
    )
    hide = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        f"u.find_spec = lambda name, *rest: None if name == {module!r} else find(name, *rest)\n"
        "from pipedist.cli import main; main()\n"
    )
    words = [sys.executable, "-c", hide, command, str(spec), "--cluster", engine]
    done = preloaded.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'pipedist[{engine}]'" in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "comes", ["in the wait", "under asyncio.run", "in the start of the thread", "to another thread"]
)
def test_ctrl_c_in_a_notebook_ends_a_run_that_waits_for_its_engine(tmp_path: Path, comes: str) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, signal, sys, threading, time, anyio, pipedist
        from pipedist.cluster.engine_clusters import EngineCluster
        from pipedist.runs import run as runs
        from tests.engines.here import HereEngine
        class NoRoom(HereEngine):
            async def start(self, *_):
                print("waits for room", flush=True)
                if sys.argv[1] == "to another thread":
                    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
                await anyio.sleep_forever()
            async def __aexit__(self, *_):
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.5)
                print("closed", flush=True)
        def cluster_for(*_, **__):
            return EngineCluster(1, NoRoom(1), None, 1, None, force=False)
        runs.cluster_for = cluster_for
        class Slow(threading.Thread):
            def start(self):
                super().start()
                if self.name == "pipedist-run":
                    while True:
                        time.sleep(0.01)  # in turns: a signal just before a wait does not end it
        if sys.argv[1] == "in the start of the thread":
            threading.Thread = Slow
        async def cell():
            stages = {"n": {"reduce": "sum", "of": "dataset", "axis": 0}}
            pipedist.run({"pipedist": 1, "dataset": {"range": 1, "batch": 1}, "stages": stages})
        run = asyncio.new_event_loop().run_until_complete
        if sys.argv[1] == "under asyncio.run":
            run = asyncio.run
        try:
            run(cell())
        except KeyboardInterrupt:
            print("interrupted")
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = preloaded.Popen(
        [sys.executable, str(script), comes], stdout=subprocess.PIPE, text=True, env=environment
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits for room\n"
            if comes != "to another thread":
                process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert out == "closed\ninterrupted\n"
