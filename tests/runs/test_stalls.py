"""What a run says of itself while it does not go on."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import struct
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest

import pipedist
from pipedist.cluster.launchers.local import LocalLauncher
from pipedist.coordinator.diagnostics import name_all
from pipedist.coordinator.worker_registry import Peer
from pipedist.errors import UsageError
from pipedist.outputs.run_record import LIVE, PRIVATE
from pipedist.runs.diagnostics import _entry, _line, _send_status, document, lines, query_status, serve_status
from pipedist.runs.pass_journal import RunJournal
from pipedist.scheduler import PassSettings
from pipedist.scheduler.diagnostics import Explanation, Reason, Wait
from pipedist.worker.progress import Running, unpack_running

F = "tests.runs.functions"
PATIENCE_S = 120.0


def stalled(folder: Path, *, step: int = 1, **stages: Any) -> dict[str, Any]:
    """Return a spec that waits in one step until the file `go` is in a folder."""
    return {
        "pipedist": 1,
        "name": "stalled",
        "replicas": 2,
        "dataset": {"range": 40, "batch": 4},
        "stages": {
            "y": {"run": f"{F}:waits_in_step", "with": {"folder": str(folder), "step": step}},
            "total": {"reduce": "sum", "of": "y", "axis": 0},
            **stages,
        },
    }


async def until(run: pipedist.Run, holds: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Return what a run waits for, as soon as that is as it should be."""
    with anyio.fail_after(PATIENCE_S):
        while not holds(waits := run.why().get("waits", [])):  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.01)
    return waits


def of(reason: str, waits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [wait for wait in waits if wait["reason"] == reason]


@pytest.mark.asyncio
async def test_a_call_that_does_not_return(tmp_path: Path) -> None:
    async with pipedist.open(stalled(tmp_path), workers=2, output=tmp_path / "out") as run:
        assert run.why()["state"] == "starting"
        assert lines(run.why()) == [f"run {run.id} of stalled: starting"]
        assert run.silent_s == 0.0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.results)
            waits = await until(run, lambda waits: [w["step"] for w in of("running", waits)] == [1, 1])
            assert [(w["stages"], w["calls"]) for w in of("running", waits)] == [("y", 1)] * 2
            assert {w["worker"] for w in of("running", waits)} == {"w0", "w1"}
            live = tmp_path / "out" / PRIVATE / LIVE
            status = await anyio.to_thread.run_sync(query_status, live, PATIENCE_S)
            assert status is not None
            report = json.loads(status)
            assert (report["run"], report["state"], report["phases"]) == (run.id, "running", 1)
            assert report["passes"][0]["steps_done"] == 1
            assert report["silent_s"] > 0.0
            assert stat.S_IMODE(live.stat().st_mode) == 0o700
            text = "\n".join(lines(report))
            assert "workers: 2 ready, 2 of them busy" in text
            assert "y: step 1, replica 0: running on w" in text
            (tmp_path / "go").touch()
        assert run.why()["state"] == "ended"
    assert not live.exists(), "nothing is left of it"


@pytest.mark.asyncio
async def test_another_dataset_goes_on_while_a_call_of_one_hangs(tmp_path: Path) -> None:
    spec = stalled(tmp_path)
    spec["datasets"] = {"hangs": spec.pop("dataset"), "goes_on": {"range": 400, "batch": 4}}
    spec["stages"]["y"]["of"] = "hangs"
    spec["stages"] |= {"z": {"run": f"{F}:double", "of": "goes_on"}, "all": {"gather": 0, "of": "z"}}
    async with pipedist.open(spec | {"replicas": 1}, workers=2) as run, anyio.create_task_group() as tasks:
        tasks.start_soon(run.results)
        waits = await until(run, lambda waits: bool(waits) and {w["stages"] for w in waits} == {"y"})
        done = {pass_["stages"]: pass_["steps_done"] for pass_ in run.why()["passes"]}
        assert done == {"y": 1, "z": 100}
        assert [(w["step"], w["stage"]) for w in of("running", waits)][:1] == [(1, "y")]
        (tmp_path / "go").touch()


@pytest.mark.asyncio
@pytest.mark.parametrize("sight", ["seen", "unseen"])
async def test_of_a_call_of_several_stages_the_one_that_runs_is_named(
    tmp_path: Path, sight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sight == "unseen":  # as of a worker that dialled in
        monkeypatch.setattr(LocalLauncher, "running", lambda _self, _worker: None)
    spec = stalled(tmp_path)
    y = spec["stages"]["y"]
    spec["stages"] = {
        "before": {"run": f"{F}:double"},
        "z": y | {"of": "before"},
        "after": {"run": f"{F}:double", "of": "z"},
        "out": {"gather": 0, "of": "after"},
    }
    async with pipedist.open(spec, workers=1) as run, anyio.create_task_group() as tasks:
        tasks.start_soon(run.results)
        stage, where = ("z", "in stage z") if sight == "seen" else ("", "in one of its stages")
        wanted = [("before -> z -> after", stage, 1, where)]
        keys = ("stages", "stage", "step", "text")
        waits = await until(
            run, lambda waits: [tuple(w[k] for k in keys) for w in of("running", waits)] == wanted
        )
        assert all("stage" not in w for w in waits if w["reason"] != "running")
        line = next(line for line in lines(run.why()) if "running on" in line)
        assert line.startswith("  before -> z -> after: step 1, replica ")
        assert line.endswith(f" s; {where}")
        (tmp_path / "go").touch()


def test_a_worker_that_is_ahead_of_what_it_has_sent() -> None:
    program = {"stages": ("a", "b"), "stage_of": lambda running: "ab"[running.stage - 1]}
    handle = SimpleNamespace(name="a -> b", settings=PassSettings(2), policy=SimpleNamespace(**program))
    wait = Wait(1, Reason.RUNNING, 4, 5, worker="w0", for_s=1.0, lease=7)
    report = Explanation(0.0, (wait,), 1, 1, (), ())

    def named(running: tuple[int, int, int] | None) -> tuple[str, str]:
        handles = {1: cast(Any, handle)}
        [waiting] = name_all(report, handles, lambda _worker: running, lambda _worker: None).waits
        return waiting.stage, waiting.text

    assert named((7, 4, 2)) == ("b", "in stage b")
    ahead = "in stage a of step 3, replica 1: earlier results are not sent yet"
    assert named((7, 7, 1)) == ("a", ahead)
    assert named((6, 4, 2)) == named(None) == ("", "in one of its stages"), "that is another lease's"


@pytest.mark.parametrize(
    ("is_local", "host", "shown"), [(True, "", "process 4711"), (False, "node7", "process 4711 of node7")]
)
def test_the_process_of_a_running_call_is_named(is_local: bool, host: str, shown: str) -> None:
    policy = SimpleNamespace(stages=("a",))
    handle = SimpleNamespace(name="a", settings=PassSettings(2), policy=policy)
    calls = (
        Wait(1, Reason.RUNNING, 4, 5, worker="w0", for_s=1.0),
        Wait(1, Reason.FREE_WORKER, 5, 6, text="all are busy"),
    )
    peer = Peer(b"id", "w0", 0, is_local, pid=4711, host="node7")
    stall = name_all(
        Explanation(0.0, calls, 1, 1, (), ()), {1: cast(Any, handle)}, lambda _: None, {"w0": peer}.get
    )
    running, waiting = [_entry(asdict(wait)) for wait in stall.waits]
    assert (running["pid"], running.get("host", "")) == (4711, host)
    assert not {"pid", "host"} & {*waiting}
    assert _line(running) == f"a: step 2, replica 0: running on w0 ({shown}) for 1.0 s"


def test_what_was_read_while_a_worker_came_and_went() -> None:
    assert unpack_running(b"") is None
    assert unpack_running(struct.pack("8q", -1, 4, 1, 0, 0, 0, 0, 0)) is None
    assert unpack_running(struct.pack("8q", 2, 4, 1, 0, 0, 0, 0, 0)) == Running(2, 4, 1)


@pytest.mark.asyncio
async def test_a_subscriber_that_takes_nothing(tmp_path: Path) -> None:
    spec = stalled(tmp_path, step=-1) | {"dataset": {"range": 4000, "batch": 4}}
    async with pipedist.open(spec, workers=1) as run:
        stream = run.steps("y")
        await anext(stream)
        waits = await until(run, lambda waits: bool(of("subscriber", waits)))
        [wait] = of("subscriber", waits)
        assert wait["text"] == "the reader of the stream of y has not taken 64 items"
        await stream.aclose()


@pytest.mark.asyncio
async def test_a_state_that_is_not_there_yet(tmp_path: Path) -> None:
    spec = stalled(tmp_path)
    with_ = {"folder": str(tmp_path), "state": "${state.state}"}
    spec["stages"] = {
        "y": {"run": f"{F}:waits_with_state", "with": with_},
        "total": {"reduce": "sum", "of": "y", "axis": 0, "per": "step"},
        "state": {"update": "tests.runs.training_functions:add", "of": "total", "init": 0},
    }
    async with pipedist.open(spec, workers=2) as run, anyio.create_task_group() as tasks:
        tasks.start_soon(run.results)
        waits = await until(run, lambda waits: [w["step"] for w in of("state", waits)] == [2])
        [wait] = of("state", waits)
        assert (wait["step"], wait["text"]) == (
            2,
            "step 2 reads the states that are updated after step 1",
        )
        assert {(w["step"], w["stages"]) for w in of("running", waits)} == {(1, "y")}
        (tmp_path / "go").touch()


@pytest.mark.asyncio
async def test_a_slow_disk_is_reported_as_the_reason() -> None:
    answered = threading.Event()

    class Slow:
        def commit(self, *_: object, **__: object) -> None:
            assert answered.wait(PATIENCE_S)

    journal = RunJournal(Slow(), None, "")  # type: ignore[arg-type]
    assert journal.committing_since is None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(journal.commit, [])
        with anyio.fail_after(PATIENCE_S):
            while journal.committing_since is None:  # noqa: ASYNC110 - nobody tells
                await anyio.sleep(0.01)
        answered.set()
    assert journal.committing_since is None


@pytest.mark.asyncio
async def test_the_journal_and_the_outputs_are_named(tmp_path: Path) -> None:
    async with pipedist.open(stalled(tmp_path, step=-1), workers=1) as run:
        await run.results()
        execution = run._execution
        assert execution is not None
        report = document("r", "n", "running", execution)
        assert [wait["reason"] for wait in report["waits"]] == ["outputs"]
        execution._journal = RunJournal(None, None, "")  # type: ignore[arg-type]
        execution._journal.committing_since = 0.0
        report = document("r", "n", "running", execution)
        assert [wait["reason"] for wait in report["waits"]] == ["journal"]
        assert "waits for journal for" in lines(report)[-1]


# -- the door ------------------------------------------------------------------------------------------


async def asked(folder: Path, answer: Callable[[], bytes], then: Callable[[], Awaitable[None]]) -> None:
    async with serve_status(folder, answer) as is_served:
        assert is_served
        await then()


@pytest.mark.asyncio
async def test_the_status_socket_has_a_long_path_and_a_long_status(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120) / "live"
    folder.parent.mkdir()
    answer = b"y" * 5_000_000

    async def twice() -> None:
        for _ in range(2):
            assert await anyio.to_thread.run_sync(query_status, folder, PATIENCE_S) == answer

    await asked(folder, lambda: answer, twice)
    assert query_status(folder, 1.0) is None


@pytest.mark.asyncio
async def test_what_a_killed_run_has_left_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "why"))
    assert query_status(folder, 1.0) is None, "nobody listens"

    async def once() -> None:
        assert await anyio.to_thread.run_sync(query_status, folder, PATIENCE_S) == b"here"

    await asked(folder, lambda: b"here", once)
    assert not folder.exists()


@pytest.mark.asyncio
async def test_a_client_that_does_not_read_delays_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    with socket.socket(socket.AF_UNIX) as idle:

        async def connect() -> None:
            await anyio.to_thread.run_sync(idle.connect, str(folder / "why"))
            await anyio.to_thread.run_sync(idle.recv, 1)  # it is being answered

        await asked(folder, lambda: b"z" * 10_000_000, connect)
    assert not folder.exists()


@pytest.mark.asyncio
async def test_a_cancelled_start_leaves_no_socket_open(tmp_path: Path) -> None:
    before = {*os.listdir("/proc/self/fd")}
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with serve_status(tmp_path / "live", lambda: b""):
            await anyio.sleep_forever()
    await asyncio.sleep(0)  # the loop closes a server's sockets
    assert {*os.listdir("/proc/self/fd")} <= before
    assert not (tmp_path / "live").exists()


@pytest.mark.asyncio
async def test_a_connection_during_shutdown_delays_nothing() -> None:
    over = asyncio.Event()
    over.set()
    ours, theirs = socket.socketpair()
    with theirs:
        loop = asyncio.get_running_loop()
        answer = partial(_send_status, lambda: b"z" * 10_000_000, set(), over)
        reader = asyncio.StreamReader()
        await loop.connect_accepted_socket(lambda: asyncio.StreamReaderProtocol(reader, answer), ours)
        assert await anyio.to_thread.run_sync(theirs.recv, 1) == b""


@pytest.mark.asyncio
async def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "live").symlink_to("elsewhere")
    async with serve_status(tmp_path / "live", lambda: b"") as is_served:
        assert not is_served
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_run_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(folder / "why"))
        busy.listen()
        with pytest.raises(UsageError, match="is alive, but has not answered within"):
            query_status(folder, 0.1)
