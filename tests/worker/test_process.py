"""A real worker process, with a fake scheduler."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipedist.cluster.launchers.local import LocalLauncher
from pipedist.coordinator.launcher import WorkerExit
from pipedist.datasets.sources import open_source
from pipedist.protocol.codec import decode, encode
from pipedist.protocol.messages import (
    Assign,
    Bind,
    Cancel,
    Cancelled,
    Failed,
    Goodbye,
    Hello,
    LogLine,
    Refuse,
    Results,
    Unbind,
)
from pipedist.protocol.program import Emit, ReaderConfig
from pipedist.worker.process import ExitCode
from tests import preloaded
from tests.worker.fake_scheduler import FakeScheduler, program

FUNCTIONS = "tests.worker.replica_functions"
ROOT = Path(__file__).parents[2]
TRIES = 20
"""How often to try for an order of events that cannot be forced, but is likely."""

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def one_worker(**settings: Any) -> AsyncIterator[tuple[FakeScheduler, bytes, LocalLauncher]]:
    async with FakeScheduler() as scheduler:
        launcher = LocalLauncher(scheduler.endpoint, **settings)
        launcher.on_exit = scheduler.exits.put_nowait
        async with launcher:
            launcher.start("w0", 3)
            identity, hello = await scheduler.joins(launcher)
            assert (hello.worker, hello.incarnation, hello.pid) == ("w0", 3, launcher.pids["w0"])
            yield scheduler, identity, launcher
            scheduler._router.send(identity, Refuse("the test is over"))


async def test_a_worker_executes_a_range_and_leaves_on_stop() -> None:
    async with one_worker() as (scheduler, identity, launcher):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:double"))
        lease = scheduler.assign(identity, pass_id, [np.arange(n) for n in range(5)], lo=10)
        found: list[list[int]] = []
        while len(found) < 5:
            _, results, frames = await scheduler.take(Results)
            assert (results.lease, results.lo) == (lease, 10 + len(found))
            assert results.busy_ns > 0
            found += [entry["y"].tolist() for entry in decode(frames)]
            assert results.hi == 10 + len(found)
        assert found == [list(range(0, 2 * n, 2)) for n in range(5)]
        pid = launcher.pids["w0"]
        scheduler.stop(identity)
        _, goodbye, _ = await scheduler.take(Goodbye)
        assert (goodbye.worker, goodbye.incarnation) == ("w0", 3)
        assert await scheduler.exit() == WorkerExit("w0", 3, pid, 0, None, "exit code 0")
        assert launcher.pids == {}


async def _run(functions: Any, values: list[Any], **settings: Any) -> list[Any]:
    async with one_worker() as (scheduler, identity, _):
        functions = [functions] if isinstance(functions, str) else functions
        pass_id = scheduler.bind(identity, program(*[f"{FUNCTIONS}:{f}" for f in functions], **settings))
        scheduler.assign(identity, pass_id, values)
        found = await scheduler.outcomes(len(values))
        return [f if isinstance(f, Failed) else f["y"] for f in found]


async def test_an_exception_fails_its_call_only() -> None:
    found = await _run("fail_on_odd", [0, 1, 2, 3])
    assert (found[0], found[2]) == (0, 2)
    failed = found[1]
    assert (failed.call, failed.stage, failed.module, failed.name) == (1, "s0", "builtins", "KeyError")
    assert failed.text == "'odd 1'"
    assert failed.retryable
    assert "fail_on_odd" in failed.traceback
    assert "pipedist/worker" not in failed.traceback
    assert found[3].call == 3


async def test_a_result_that_cannot_be_sent_names_stage_and_path_and_is_not_retried() -> None:
    found = await _run("unsendable_on_odd", [0, 1, 2])
    assert (found[0], found[2]) == (0, 2)
    assert (found[1].stage, found[1].name, found[1].retryable) == ("s0", "UnsendableError", False)
    assert "a/1/b" in found[1].text
    assert "'s0'" in found[1].text


async def test_the_context_names_the_call_and_the_seed_determines_its_random_numbers() -> None:
    found = await _run("describe", [10, 11, 12], replicas=2, kwargs={"scale": 0.5})
    assert [(f["step"], f["replica"]) for f in found] == [(0, 0), (0, 1), (1, 0)]
    assert all(
        (f["of"], f["stage"], f["epoch"], f["elements"], f["scale"]) == (2, "s0", 0, None, 0.5) for f in found
    )
    assert all(f["same"] for f in found)
    digest = int.from_bytes(__import__("hashlib").sha256(b"s0").digest()[:8], "big")
    expected = np.random.Generator(np.random.PCG64(np.random.SeedSequence([7, digest, 1, 0]))).random()
    assert found[2]["random"] == expected


async def test_shards_and_values_between_stages_are_read_only_and_c_ordered() -> None:
    assert await _run("flags", [np.arange(10_000.0)]) == [[False, True]]
    assert await _run(["transposed", "flags"], [np.arange(3.0)], chain=True) == [[False, True]]


async def test_results_are_c_ordered() -> None:
    (found,) = await _run("transposed", [np.arange(3.0)])
    assert found.tolist() == [[0, 3], [1, 4], [2, 5]]


async def test_user_code_runs_in_the_main_thread_of_a_process_named_pipedist_worker() -> None:
    assert await _run("in_thread_of", [0]) == [[True, "pipedist-worker\n"]]


async def test_a_worker_inherits_no_secrets_and_no_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("shadow = True\n")
    monkeypatch.chdir(tmp_path)
    secret = os.open(tmp_path / "secret", os.O_CREAT)
    (found,) = await _run("environment", [0])
    os.close(secret)
    assert found["threads"] == "1"
    assert "" not in found["path"]
    assert str(tmp_path) not in found["path"]
    assert not found["shadowed"]
    assert found["stdin"] == "/dev/null"
    assert not any("secret" in name for name in found["fds"])


async def test_class_functions_are_made_once_with_their_arguments() -> None:
    assert await _run("Model", [1, 2, 3], kwargs={"scale": 2}) == [[2, 1], [4, 1], [6, 1]]


async def test_an_instance_never_serves_two_calls_at_once() -> None:
    assert await _run("AsyncModel", [5, 6, 7]) == [[5, 0], [6, 1], [7, 2]]


async def test_a_class_without_call_fails_without_retry() -> None:
    (failed,) = await _run("Uncallable", [0])
    assert (failed.name, failed.retryable) == ("TypeError", False)
    assert "__call__" in failed.text


async def test_async_functions_overlap_on_one_loop_and_report_in_order() -> None:
    assert await _run("meet", list(range(4))) == [0, 1, 2, 3]
    assert await _run("loops", list(range(40))) == [1] * 40


async def test_a_cancelled_error_fails_its_call_only() -> None:
    found = await _run("cancelled_on_odd", [0, 1, 2])
    assert (found[0], found[1].name, found[2]) == (0, "CancelledError", 2)


async def test_a_reused_buffer_does_not_mix_results() -> None:
    found = await _run("ReusesItsBuffer", [1.0, 2.0, 3.0])
    assert [(f["buffer"][0], f["view"][0]) for f in found] == [(1, 1), (2, 2), (3, 3)]


async def test_no_call_sees_changes_that_another_made_to_its_arguments() -> None:
    assert await _run(["append", "append"], [[0], [0]], kwargs={"more": []}) == [[0, 1], [0, 1]]


async def test_apply_and_combine() -> None:
    assert await _run("apply_me", [[(1, 2), {"c": 3}]], form="apply") == [[1, 2, 3, 0]]
    found = await _run(
        "add", [[["a", "b", "c", "d", "e"]], [["a", "b"], ["c"], [], ["d"]], [[]]], form="combine"
    )
    assert found == ["(((ab)(cd))e)", "(((ab)c)d)", None]


async def test_a_missing_function_fails_every_call_with_the_nearest_name() -> None:
    found = await _run("dubble", [1, 2])
    assert [(f.call, f.name, f.retryable) for f in found] == [
        (0, "FunctionNotFound", False),
        (1, "FunctionNotFound", False),
    ]
    assert "did you mean 'double'?" in found[0].text


async def test_partials_and_shards_are_emitted() -> None:
    emits = (Emit("shard", -1), Emit("sum", 0, "sum", (0,)), Emit("value", 0))
    async with one_worker() as (scheduler, identity, _):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:double", emits=emits))
        scheduler.assign(identity, pass_id, [np.arange(3)])
        (found,) = await scheduler.outcomes(1)
        assert isinstance(found, dict)
        assert list(found) == ["shard", "sum", "value"]
        assert found["shard"].tolist() == [0, 1, 2]
        assert found["value"].tolist() == [0, 2, 4]


async def test_elements_follow_from_the_division_where_ids_are_not_sent() -> None:
    reader = ReaderConfig(None, 4, 6, False)
    async with one_worker() as (scheduler, identity, _):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:describe", replicas=2, reader=reader))
        scheduler.assign(identity, pass_id, [0, 0, 0, 0, 0])
        scheduler.assign(identity, pass_id, [0], lo=5, ids=[np.array([3, 1])])
        found = [f["y"] for f in await scheduler.outcomes(6)]  # type: ignore[index]
        assert [f["elements"].tolist() for f in found] == [[0, 1], [2, 3], [4], [5], [6, 7], [3, 1]]
        assert [f["epoch"] for f in found] == [0, 0, 0, 0, 1, 1]


async def test_printed_and_logged_lines_name_the_call() -> None:
    async with one_worker() as (scheduler, identity, _):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:talk", replicas=2))
        scheduler.assign(identity, pass_id, [5], lo=3)
        await scheduler.outcomes(1)
        scheduler.stop(identity)
        await scheduler.take(Goodbye)
        origins = [(log.stage, log.step, log.replica) for log in scheduler.logs]
        assert origins == [("s0", 1, 1)] * 5
        assert [log.text for log in scheduler.logs] == [
            "imported the replica functions",
            "printed 5",
            "to stderr 5",
            "logged 5",
            "unfinished",
        ]


async def test_finished_calls_are_reported_while_the_next_one_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with one_worker() as (scheduler, identity, _):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:maybe_wait"))
        scheduler.assign(identity, pass_id, ["", "", str(gate), ""])
        assert await scheduler.outcomes(2) == [{"y": ""}] * 2  # the third call waits for us
        gate.touch()
        assert await scheduler.outcomes(2) == [{"y": str(gate)}, {"y": ""}]


async def test_short_calls_share_messages() -> None:
    async with one_worker() as (scheduler, identity, _):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:identity"))
        scheduler.assign(identity, pass_id, list(range(2000)))
        messages = 0
        done = 0
        while done < 2000:
            _, results, _ = await scheduler.take(Results)
            assert results.lo == done
            done = results.hi
            messages += 1
        assert messages < 1000  # of 2000; some fifty where the worker is not kept waiting


async def test_a_cancelled_lease_that_waits_is_dropped(tmp_path: Path) -> None:
    """In a fixed order: `test_driver`. Here, a Cancel may come later than the end of the call before."""
    async with one_worker() as (scheduler, identity, _):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:maybe_wait"))
        for number in range(TRIES):
            gate = tmp_path / f"gate{number}"
            first = scheduler.assign(identity, pass_id, [str(gate)])
            waiting = scheduler.assign(identity, pass_id, ["", ""])
            last = scheduler.assign(identity, pass_id, [""])
            scheduler.send(identity, Cancel(waiting))
            gate.touch()
            leases = []
            while last not in leases:
                leases.append((await scheduler.take(Results))[1].lease)
            if waiting not in leases:
                break
        assert leases == [first, last]


async def test_a_stop_is_seen_between_calls(tmp_path: Path) -> None:
    for number in range(TRIES):
        gate, never = tmp_path / f"gate{number}", tmp_path / f"never{number}"
        async with one_worker() as (scheduler, identity, _):
            pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:maybe_wait"))
            scheduler.assign(identity, pass_id, [str(gate), *([""] * 100)])
            scheduler.assign(identity, pass_id, [str(never)])
            scheduler.stop(identity)
            gate.touch()
            message: object = None
            while not isinstance(message, Goodbye):
                _, message, _ = await scheduler.take(object)
                if isinstance(message, LogLine) and never.name in message.text:
                    never.touch()  # the Stop has come late: it has begun that call
            assert (await scheduler.exit()).code == 0
        if not never.exists():
            break
    assert not never.exists()


async def test_an_unbound_pass_is_dropped() -> None:
    async with one_worker() as (scheduler, identity, _):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:Model", kwargs={"scale": 1}))
        scheduler.assign(identity, pass_id, [1])
        await scheduler.outcomes(1)
        scheduler.send(identity, Unbind(pass_id))
        again = scheduler.bind(identity, program(f"{FUNCTIONS}:Model", kwargs={"scale": 2}))
        scheduler.assign(identity, again, [1])
        assert await scheduler.outcomes(1) == [{"y": [2, 2]}]


@pytest.mark.parametrize(
    ("function", "code", "signum"),
    [
        ("exit_hard", 7, None),
        ("segfault", None, signal.SIGSEGV),
    ],
)
async def test_a_crash_names_the_call_and_its_code(
    function: str, code: int | None, signum: int | None
) -> None:
    async with one_worker() as (scheduler, identity, launcher):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:{function}"))
        lease = scheduler.assign(identity, pass_id, [0, 1, 2, 3], lo=40)
        exit_ = await scheduler.exit()
        assert (exit_.code, exit_.signal, exit_.running) == (code, signum, (lease, 42, 1))
        assert launcher.pids == {}


@pytest.mark.parametrize(
    ("function", "name", "text"),
    [
        ("exit_softly", "SystemExit", "the function called sys.exit(5)"),
        ("exit_in_loop", "SystemExit", "the function called sys.exit(5)"),
        ("Exits", "SystemExit", "the function called sys.exit(5)"),
        ("interrupt", "KeyboardInterrupt", "the function raised it; a worker ignores Ctrl-C"),
        ("base_exception", "Custom", "gone"),
    ],
)
async def test_a_function_that_requests_an_exit_fails_its_call_without_retry(
    function: str, name: str, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    failed, other = await _run(function, [2, 3])
    assert (failed.name, failed.text, failed.retryable) == (name, text, False)
    name = "__call__" if function == "Exits" else function
    assert failed.traceback.splitlines()[1].endswith(f"in {name}")
    assert other == 3  # in the same worker
    assert " ends" not in capfd.readouterr().err


async def test_sys_exit_in_a_task_of_a_function_ends_the_worker_with_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with one_worker() as (scheduler, identity, _):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:exit_in_own_task"))
        scheduler.assign(identity, pass_id, [0])
        assert (await scheduler.exit()).code == 5
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("a task of a replica function called sys.exit(5)")


async def test_errors_of_data_name_the_first_stage_and_need_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n2\nno\n4\n")
    config = {"path": [str(tmp_path / "a.csv")], "columns": {"x": "int64"}}
    with closing(open_source("csv", config, folder=tmp_path)) as source:
        reader = ReaderConfig(source.config, 1, 4, False)
        async with one_worker() as (scheduler, identity, _):
            pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:identity", reader=reader))
            scheduler.assign(identity, pass_id, locations=[source.locate(range(2, 3))], lo=2)
            (failed,) = await scheduler.outcomes(1)
    assert isinstance(failed, Failed)
    assert (failed.stage, failed.name, failed.traceback) == ("s0", "SourceError", "")
    assert "a.csv:4" in failed.text
    assert not failed.retryable


@pytest.mark.parametrize("function", ["unsendable_on_odd", "text_on_odd"])
async def test_results_of_the_wrong_kind_need_no_traceback(function: str) -> None:
    emits = (Emit("y", 0, *(("sum", (0,)) if function == "text_on_odd" else ())),)
    (failed,) = await _run(function, [1], emits=emits)
    assert (failed.traceback, failed.retryable) == ("", False)


async def test_a_traceback_begins_with_the_function(tmp_path: Path) -> None:
    (combined,) = await _run("add_badly", [[["a", "b"]]], form="combine")
    assert combined.traceback.splitlines()[1].endswith("in add_badly")
    (called,) = await _run("double", [1], kwargs={"wrong": 1})
    assert (called.name, called.traceback) == ("TypeError", "")


def _as_sent(folder: Path) -> list[list[bytes]]:
    """What a scheduler's process that has the class sends: a Bind's payload, and an Assign's."""
    script = folder / "sends.py"
    script.write_text(
        "import json\nfrom pipedist.protocol.codec import encode\n"
        "from pipedist.protocol.program import to_frames\nfrom shapes_of_ours import Shape\n"
        "from tests.worker.fake_scheduler import program\n"
        f"sent = program('shapes_of_ours:area', kwargs={{'shape': Shape(3)}}, code=({str(folder)!r},))\n"
        "frames = to_frames(sent), encode([None, None, [Shape(3)]])\n"
        "print(json.dumps([[bytes(frame).hex() for frame in part] for part in frames]))\n"
    )
    sent = preloaded.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    ).stdout
    return [[bytes.fromhex(frame) for frame in part] for part in json.loads(sent)]


async def test_values_of_classes_in_the_code_folder_are_received(tmp_path: Path) -> None:
    (tmp_path / "shapes_of_ours.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Shape:\n    a: int\n"
        "def area(x, shape):\n    return x * shape.a\n"
    )
    bound, sent = _as_sent(tmp_path)
    async with one_worker() as (scheduler, identity, _):
        scheduler.send(identity, Bind(1), bound)
        scheduler.assign(identity, 1, [2])
        assert await scheduler.outcomes(1) == [{"y": 6}]
    async with one_worker() as (scheduler, identity, _):  # without the folder
        nowhere = encode([])
        scheduler.send(identity, Bind(1), [*nowhere, *bound[1:]])
        scheduler.send(identity, Assign(1, 1, 0, 2, 0), encode([None, None, [2, 3]]))
        for number, failed in enumerate(await scheduler.outcomes(2)):
            assert isinstance(failed, Failed)
            assert (failed.call, failed.name, failed.retryable) == (number, "Unloadable", False)
            assert "shapes_of_ours.Shape" in failed.text
        scheduler.passes, scheduler.leases = 1, 2
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:identity"))
        scheduler.send(identity, Assign(2, pass_id, 5, 6, 0), sent)
        scheduler.assign(identity, pass_id, [7])
        failed, done = await scheduler.outcomes(2)
        assert isinstance(failed, Failed)
        assert (failed.call, failed.stage, failed.name) == (5, "s0", "Unloadable")
        assert "shapes_of_ours.Shape" in failed.text
        assert done == {"y": 7}


async def test_signals_to_the_whole_process_group_do_not_end_the_worker() -> None:
    async with one_worker() as (scheduler, identity, launcher):
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(launcher.pids["w0"], number)
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:identity"))
        scheduler.assign(identity, pass_id, [1])
        assert await scheduler.outcomes(1) == [{"y": 1}]


async def test_another_number_of_threads_is_rejected() -> None:
    (failed,) = await _run("identity", [0], threads=2)
    assert not failed.retryable
    assert "threads_per_replica: 2" in failed.text


async def test_a_rejected_worker_prints_the_reason_and_exits(capfd: pytest.CaptureFixture[str]) -> None:
    async with FakeScheduler() as scheduler:
        launcher = LocalLauncher(scheduler.endpoint)
        launcher.on_exit = scheduler.exits.put_nowait
        async with launcher:
            launcher.start("w0", 0)
            identity, _, _ = await scheduler.take(Hello)
            scheduler.send(identity, Refuse("it is full here"))
            assert (await scheduler.exit()).code == ExitCode.REFUSED
    assert "it is full here" in capfd.readouterr().err


async def test_a_worker_leaves_a_scheduler_that_breaks_the_protocol(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with one_worker() as (scheduler, identity, _):
        scheduler.send(identity, Assign(1, 99, 0, 1, 0))
        assert (await scheduler.exit()).code == ExitCode.PROTOCOL
    assert "pass 99" in capfd.readouterr().err


async def test_a_worker_notices_the_end_of_its_scheduler(capfd: pytest.CaptureFixture[str]) -> None:
    async with FakeScheduler() as scheduler:
        launcher = LocalLauncher(scheduler.endpoint)
        launcher.on_exit = scheduler.exits.put_nowait
        async with launcher:
            launcher.start("w0", 0)
            identity, _ = await scheduler.welcome()
            pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:identity"))
            scheduler.assign(identity, pass_id, [1])
            assert await scheduler.outcomes(1) == [{"y": 1}]  # it has joined
            await scheduler._router.__aexit__(None, None, None)
            assert (await scheduler.exit()).code == ExitCode.CONNECTION_LOST
            await scheduler._router.__aenter__()


async def test_a_scheduler_that_ends_while_a_worker_joins_may_come_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A worker exits only after its own time limit."""
    async with FakeScheduler() as scheduler:
        launcher = LocalLauncher(scheduler.endpoint)
        launcher.on_exit = scheduler.exits.put_nowait
        async with launcher:
            launcher.start("w0", 0)
            await scheduler.take(Hello)
            await scheduler._router.__aexit__(None, None, None)
            assert (await scheduler.exit()).code == ExitCode.CONNECTION_LOST
            await scheduler._router.__aenter__()
    assert "was lost" in capfd.readouterr().err


async def test_a_worker_leaves_if_no_scheduler_replies(capfd: pytest.CaptureFixture[str]) -> None:
    async with FakeScheduler() as scheduler:
        launcher = LocalLauncher(scheduler.endpoint, join_s=0.05)
        launcher.on_exit = scheduler.exits.put_nowait
        async with launcher:
            launcher.start("w0", 0)
            assert (await scheduler.exit()).code == ExitCode.UNANSWERED
    assert "did not reply" in capfd.readouterr().err


async def test_a_cancel_is_confirmed_when_no_call_of_the_lease_runs(tmp_path: Path) -> None:
    """Whether the lease has begun or not: whatever comes of it comes before."""
    gate = tmp_path / "gate"
    async with one_worker() as (scheduler, identity, _):
        pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:maybe_wait"))
        cancelled = scheduler.assign(identity, pass_id, [str(gate)])
        scheduler.send(identity, Cancel(cancelled))
        gate.touch()
        _, confirmed, _ = await scheduler.take(Cancelled, aside=(LogLine, Results))
        assert confirmed.lease == cancelled
        other = scheduler.assign(identity, pass_id, [""])
        _, results, _ = await scheduler.take(Results)
        assert results.lease == other
