"""Workers that connect by themselves: `run_worker` in its own process, over TCP with keys."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from pipedist.errors import UsageError
from pipedist.protocol.code_archive import take
from pipedist.protocol.codec import encode
from pipedist.protocol.messages import (
    Code,
    Goodbye,
    Heartbeat,
    Hello,
    LogLine,
    Refuse,
    Results,
    Stop,
    Welcome,
)
from pipedist.transport.dealer import ConnectionLost
from pipedist.transport.keys import write_key_file
from pipedist.worker import boot, supervised_process
from pipedist.worker.process import ExitCode
from pipedist.worker.process_setup import WorkerSettings
from pipedist.worker.progress import CallProgress
from pipedist.worker.supervised_process import WorkerProcess
from pipedist.worker.supervisor import Supervisor, run_worker
from tests import preloaded
from tests.cluster.launchers.processes import children_of, ids_in, wait_gone, wait_state
from tests.worker.fake_scheduler import FakeScheduler, program

FUNCTIONS = "tests.worker.replica_functions"
ROOT = Path(__file__).parents[2]
PATIENCE_S = 60

pytestmark = pytest.mark.asyncio


class Supervised:
    """A scheduler, and the process under test."""

    def __init__(self, scheduler: FakeScheduler, process: asyncio.subprocess.Process) -> None:
        self.scheduler = scheduler
        self.process = process

    async def take(self, *kinds: type) -> tuple[bytes, object]:
        """The next message of one of these kinds."""
        while True:
            identity, message, _ = await asyncio.wait_for(self.scheduler.inbox.get(), PATIENCE_S)
            if isinstance(message, kinds):
                return identity, message

    async def ended(self) -> tuple[int, str]:
        """Return the exit code, and the text on stderr."""
        _, stderr = await asyncio.wait_for(self.process.communicate(), PATIENCE_S)
        assert self.process.returncode is not None
        return self.process.returncode, stderr.decode()


async def dial_in(
    endpoint: str, key_file: Path, join_s: float = 60.0, *, fresh: bool = False
) -> asyncio.subprocess.Process:
    script = (
        "import sys; from pipedist.worker.supervisor import Supervisor, run_worker; "
        f"sys.exit(run_worker({endpoint!r}, {str(key_file)!r}, join_s={join_s}, leave_s=60))"
    )
    start = asyncio.create_subprocess_exec if fresh else preloaded.create_subprocess_exec
    return await start(
        sys.executable,
        "-c",
        script,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@asynccontextmanager
async def supervised(tmp_path: Path, *, fresh: bool = False) -> AsyncIterator[Supervised]:
    """Start a supervisor, in a new interpreter if it is to be fresh."""
    key_file = tmp_path / "keys.json"
    async with FakeScheduler(write_key_file(key_file).server) as scheduler:
        process = await dial_in(scheduler.endpoint, key_file, fresh=fresh)
        try:
            yield Supervised(scheduler, process)
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()


async def test_it_joins_works_and_leaves(tmp_path: Path) -> None:
    async with supervised(tmp_path) as it:
        identity, hello = await it.take(Hello)
        assert isinstance(hello, Hello)
        assert hello.worker.startswith(f"{os.uname().nodename}:{it.process.pid}:")
        assert hello.incarnation == 0
        it.scheduler.send(identity, Welcome("c", 0.1, (os.fsencode(ROOT),)))
        pass_id = it.scheduler.bind(identity, program(f"{FUNCTIONS}:identity"))
        it.scheduler.assign(identity, pass_id, [3])
        assert await it.scheduler.outcomes(1, aside=(LogLine, Heartbeat)) == [{"y": 3}]
        it.scheduler.stop(identity)
        code, stderr = await it.ended()
        assert code == 0
        # On a busy machine it has reported before that it waits.
        (joined,) = (line for line in stderr.splitlines() if "waiting for the driver" not in line)
        assert joined.startswith(
            f"pipedist worker {hello.worker} at {it.scheduler.endpoint}: joined cluster c, 1"
        )


async def test_the_supervisor_sends_heartbeats_for_a_busy_worker(tmp_path: Path) -> None:
    async with supervised(tmp_path) as it:
        identity, _ = await it.take(Hello)
        it.scheduler.send(identity, Welcome("c", 0.1, (os.fsencode(ROOT),)))
        supervisor, _ = await it.take(Heartbeat)
        it.scheduler.send(supervisor, Welcome("c", 0.02, ()))
        pass_id = it.scheduler.bind(identity, program(f"{FUNCTIONS}:hold_the_interpreter"))
        it.scheduler.assign(identity, pass_id, [1])
        await it.take(LogLine)  # the call has begun
        for _ in range(5):
            assert (await it.take(Heartbeat))[0] == supervisor


@pytest.mark.parametrize("ends", [False, True])
async def test_a_supervisor_that_was_suspended_while_the_run_ended_stops(tmp_path: Path, ends: bool) -> None:
    """When it goes on, the order to stop and the loss of the connection are both there; `ends`: its worker
    process has seen that loss by then.
    """
    key_file = tmp_path / "keys.json"
    async with FakeScheduler(write_key_file(key_file).server) as scheduler:
        supervisor = Supervisor(scheduler.endpoint, str(key_file), threads=1, join_s=10.0)
        process = Ended(ExitCode.CONNECTION_LOST if ends else None)
        await asyncio.to_thread(supervisor._exchange, process, 0)
        identity, _, _ = await scheduler.take(Heartbeat)
        scheduler.send(identity, Stop("that is all"))
    dealer = supervisor._dealer
    assert dealer is not None
    with pytest.raises(ConnectionLost):  # noqa: PT012
        while True:
            dealer.send(Heartbeat(supervisor.worker, 0), timeout_s=PATIENCE_S)
    supervisor._next_at = 0.0
    if ends:
        supervisor._progress.end()
    try:
        assert await asyncio.to_thread(supervisor._watch, process, 0) is ExitCode.STOPPED
    finally:
        supervisor._disconnect(0.0)
        dealer.close(0.0)
        supervisor._progress.close()


class Ended:
    """A worker process that has ended with a code, or goes on (None) until it is ended."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def is_stuck(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("the supervisor waits for another scheduler")

    def end(self, *, grace_s: float = 0.0) -> int:
        return self.code or 0


async def test_a_crash_is_reported_at_once_and_the_next_incarnation_joins(tmp_path: Path) -> None:
    async with supervised(tmp_path) as it:
        _, first = await it.take(Hello)
        assert isinstance(first, Hello)
        await it.take(Heartbeat)
        os.kill(first.pid, signal.SIGKILL)
        _, goodbye = await it.take(Goodbye)
        assert goodbye == Goodbye(first.worker, 0, "signal 9 (SIGKILL)", crashed=True, proof=first.proof)
        _, second = await it.take(Hello)
        assert isinstance(second, Hello)
        assert (second.worker, second.incarnation) == (first.worker, 1)
        assert second.pid != first.pid


@pytest.mark.slow
async def test_a_process_that_stays_stopped_is_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path) as it:
        _, first = await it.take(Hello)
        assert isinstance(first, Hello)
        await it.take(Heartbeat)
        os.kill(first.pid, signal.SIGSTOP)
        _, goodbye = await it.take(Goodbye)
        reason = "stopped for 3 s, then killed with signal 9 (SIGKILL)"
        assert goodbye == Goodbye(first.worker, 0, reason, crashed=True, proof=first.proof)
        _, second = await it.take(Hello)
        assert isinstance(second, Hello)
        assert second.incarnation == 1


async def test_a_process_that_replaces_its_program_is_killed_with_its_copies(tmp_path: Path) -> None:
    async with supervised(tmp_path) as it:
        identity, first = await it.take(Hello)
        assert isinstance(first, Hello)
        it.scheduler.send(identity, Welcome("c", 0.1, (os.fsencode(ROOT),)))
        pass_id = it.scheduler.bind(identity, program(f"{FUNCTIONS}:leave_processes_and_exec"))
        lease = it.scheduler.assign(identity, pass_id, [str(tmp_path / "ids")], lo=5)
        _, goodbye = await it.take(Goodbye)
        reason = "replaced by another program (exec), then killed with signal 9 (SIGKILL)"
        assert goodbye == Goodbye(first.worker, 0, reason, True, lease, 5, 1, proof=first.proof)
        _, second = await it.take(Hello)
        assert isinstance(second, Hello)
        assert second.incarnation == 1
        assert wait_gone([first.pid, *ids_in(tmp_path / "ids")]) == []


@pytest.mark.parametrize("ends", ["stopped", "killed", "scheduler gone", "leaves"])
async def test_what_user_code_has_started_ends_with_its_worker(tmp_path: Path, ends: str) -> None:
    async with supervised(tmp_path) as it:
        identity, hello = await it.take(Hello)
        assert isinstance(hello, Hello)
        it.scheduler.send(identity, Welcome("c", 0.1, (os.fsencode(ROOT),)))
        pass_id = it.scheduler.bind(identity, program(f"{FUNCTIONS}:leave_processes"))
        it.scheduler.assign(identity, pass_id, [str(tmp_path / "ids")])
        await it.take(Results)
        left = ids_in(tmp_path / "ids")
        if ends == "stopped":
            it.scheduler.stop(identity)
        elif ends == "killed":
            os.kill(hello.pid, signal.SIGKILL)
        elif ends == "leaves":
            it.process.terminate()
        else:
            await it.scheduler._router.__aexit__()
        assert await asyncio.to_thread(wait_gone, [hello.pid, *left]) == []


async def test_an_interrupt_while_a_worker_starts_is_ignored(tmp_path: Path) -> None:
    """Imports that are interrupted print a traceback."""
    async with supervised(tmp_path, fresh=True) as it:
        interrupted: set[int] = set()
        while it.scheduler.inbox.empty():
            for pid in children_of(it.process.pid):
                os.kill(pid, signal.SIGINT)
                interrupted.add(pid)
            await asyncio.sleep(0)
        _, hello = await it.take(Hello)
        assert isinstance(hello, Hello)
        assert interrupted == {hello.pid}
        it.process.terminate()
        code, stderr = await it.ended()
        assert (code, "Traceback" in stderr) == (0, False), stderr


async def test_a_process_that_goes_on_was_not_stopped_for_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(supervised_process, "time", clock)
    monkeypatch.setattr(
        boot, "Popen", subprocess.Popen
    )  # it has one thread while it imports: all stops at once
    files = [os.memfd_create(name) for name in ("progress", "kept", "proof")]
    os.ftruncate(files[0], CallProgress.BYTES)
    endpoint = f"ipc://{tmp_path}/unused"
    settings = WorkerSettings(endpoint, worker="w", incarnation=0, key_file="", threads=1, join_s=60.0)
    process = WorkerProcess(settings, progress=files[0], cache=files[1], proof=files[2])
    try:
        pid = process._process.pid
        for seconds in (2.9, 3.1):
            os.kill(pid, signal.SIGSTOP)
            wait_state(pid, "T")
            assert not process.is_stuck()
            clock.now += seconds
            if seconds < 3:
                assert not process.is_stuck()
                assert process.describe(-9) == "signal 9 (SIGKILL)"  # killed for another reason
                os.kill(pid, signal.SIGCONT)
                clock.now += 100.0  # not checked meanwhile
                assert not process.is_stuck()
        assert process.is_stuck()
        assert process.describe(-9) == "stopped for 3 s, then killed with signal 9 (SIGKILL)"
    finally:
        process.end()
        for file in files:
            os.close(file)


async def test_a_function_that_exceeds_its_timeout_ends_the_process(tmp_path: Path) -> None:
    async with supervised(tmp_path) as it:
        identity, first = await it.take(Hello)
        assert isinstance(first, Hello)
        it.scheduler.send(identity, Welcome("c", 0.1, (os.fsencode(ROOT),)))
        slow = program(f"{FUNCTIONS}:hold_the_interpreter")
        timed = replace(slow, stages=(replace(slow.stages[0], timeout_s=0.3),))
        pass_id = it.scheduler.bind(identity, timed)
        lease = it.scheduler.assign(identity, pass_id, [1], lo=5)
        _, goodbye = await it.take(Goodbye)
        reason = "its call took longer than its timeout_s"
        assert goodbye == Goodbye(first.worker, 0, reason, True, lease, 5, 1, True, first.proof)
        _, second = await it.take(Hello)
        assert isinstance(second, Hello)
        assert second.incarnation == 1


async def test_a_crash_names_the_call(tmp_path: Path) -> None:
    async with supervised(tmp_path) as it:
        identity, first = await it.take(Hello)
        assert isinstance(first, Hello)
        it.scheduler.send(identity, Welcome("c", 0.1, (os.fsencode(ROOT),)))
        pass_id = it.scheduler.bind(identity, program(f"{FUNCTIONS}:segfault"))
        lease = it.scheduler.assign(identity, pass_id, [0, 1, 2, 3], lo=40)
        _, goodbye = await it.take(Goodbye)
        assert goodbye == Goodbye(
            first.worker, 0, "signal 11 (SIGSEGV)", True, lease, 42, 1, proof=first.proof
        )


@pytest.mark.parametrize("code", sorted(ExitCode))
async def test_an_exit_code_of_user_code_is_a_crash_whatever_it_means_to_the_worker(
    tmp_path: Path, code: int
) -> None:
    async with supervised(tmp_path) as it:
        identity, first = await it.take(Hello)
        assert isinstance(first, Hello)
        it.scheduler.send(identity, Welcome("c", 0.1, (os.fsencode(ROOT),)))
        pass_id = it.scheduler.bind(identity, program(f"{FUNCTIONS}:exit_with"))
        lease = it.scheduler.assign(identity, pass_id, [int(code)], lo=5)
        _, goodbye = await it.take(Goodbye)
        assert goodbye == Goodbye(first.worker, 0, f"exit code {code}", True, lease, 5, 1, proof=first.proof)
        _, second = await it.take(Hello)
        assert isinstance(second, Hello)
        assert second.incarnation == 1


async def test_the_scheduler_can_have_the_process_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path) as it:
        _, first = await it.take(Hello)
        supervisor, _ = await it.take(Heartbeat)
        it.scheduler.send(supervisor, Refuse("its call takes too long"))
        _, second = await it.take(Hello)
        assert isinstance(first, Hello)
        assert isinstance(second, Hello)
        assert second.incarnation == 1
        assert wait_gone([first.pid], within_s=0) == []
        it.scheduler.send(supervisor, Stop("that is all"))
        code, stderr = await it.ended()
        assert code == 0
        assert "its call takes too long" in stderr
        assert "that is all" in stderr
        assert wait_gone([second.pid], within_s=0) == []


async def test_an_order_for_an_earlier_process_does_not_cost_the_next_one(tmp_path: Path) -> None:
    async with supervised(tmp_path) as it:
        await it.take(Hello)
        supervisor, _ = await it.take(Heartbeat)
        for _ in range(10):  # as many heartbeats wait in a network that is away, and each is answered
            it.scheduler.send(supervisor, Refuse("this incarnation is not a member", before=1))
        identity, second = await it.take(Hello)
        assert isinstance(second, Hello)
        assert second.incarnation == 1
        it.scheduler.send(identity, Welcome("c", 0.1, (os.fsencode(ROOT),)))
        pass_id = it.scheduler.bind(identity, program(f"{FUNCTIONS}:identity"))
        it.scheduler.assign(identity, pass_id, [3])
        assert await it.scheduler.outcomes(1, aside=(LogLine, Heartbeat, Goodbye)) == [{"y": 3}]
        it.scheduler.stop(identity)
        code, stderr = await it.ended()
        assert code == 0
        assert stderr.count("evicted by the driver") == 1


async def test_a_worker_that_loses_its_connection_alone_joins_anew(tmp_path: Path) -> None:
    """Its supervisor asks anew, too: it must not take the scheduler for gone for ever."""
    async with supervised(tmp_path) as it:
        identity, _ = await it.take(Hello)
        it.scheduler.send(identity, Welcome("c", 60.0, (os.fsencode(ROOT),)))
        supervisor, _ = await it.take(Heartbeat)
        it.scheduler.send(supervisor, Welcome("c", 60.0, (), 10.0))
        pass_id = it.scheduler.bind(identity, program(f"{FUNCTIONS}:identity"))
        it.scheduler.assign(identity, pass_id, [3])
        assert await it.scheduler.outcomes(1, aside=(LogLine, Heartbeat)) == [{"y": 3}]
        it.scheduler.assign(identity, pass_id, [4])
        it.scheduler.drop(identity)  # what it answers costs it the connection
        found: list[tuple[bytes, Hello | Heartbeat]] = []
        while len(found) < 2:
            sender, kind = await it.take(Hello, Heartbeat)
            assert isinstance(kind, Hello | Heartbeat)
            if kind.incarnation:  # a beat of before may have come meanwhile
                found.append((sender, kind))
        (anew, second), (again, other) = found
        assert isinstance(second, Hello) != isinstance(other, Hello)
        assert {anew, again}.isdisjoint({identity, supervisor})
        it.scheduler.send(again if isinstance(other, Hello) else anew, Stop("that is all"))
        assert (await it.ended())[0] == 0


async def test_both_connections_use_the_current_keys_of_the_file(tmp_path: Path) -> None:
    """Otherwise the worker joins without heartbeats, and is evicted repeatedly."""
    key_file = tmp_path / "keys.json"
    async with FakeScheduler(write_key_file(key_file).server) as scheduler:
        it = Supervised(scheduler, await dial_in(scheduler.endpoint, key_file))
        await it.take(Hello)
        await it.take(Heartbeat)
        key_file.unlink()
        keys = write_key_file(key_file)
    async with FakeScheduler(keys.server, scheduler.endpoint) as another:
        it.scheduler = another
        try:
            await it.take(Hello)
            supervisor, _ = await it.take(Heartbeat)
            another.send(supervisor, Stop("that is all"))
            assert (await it.ended())[0] == 0
        finally:
            if it.process.returncode is None:
                it.process.kill()
                await it.process.communicate()


async def test_a_minimum_rejoin_time_applies_if_the_scheduler_sets_none(
    tmp_path: Path,
) -> None:
    """A program that was stopped for longer than a connection lasts needs its own workers back."""
    keys = write_key_file(tmp_path / "keys.json")
    scheduler = FakeScheduler(keys.server)
    async with scheduler:
        supervisor = Supervisor(
            scheduler.endpoint, str(tmp_path / "keys.json"), threads=1, join_s=60, rejoin_s=60
        )
        running = asyncio.ensure_future(asyncio.to_thread(supervisor.run))
        try:
            await scheduler.take(Hello, aside=Heartbeat)
            identity, _, _ = await scheduler.take(Heartbeat)
            scheduler.send(identity, Welcome("c", 0.1, ()))
            for _ in range(
                5
            ):  # the first one comes a second later, the others after a tenth: Welcome was received
                await scheduler.take(Heartbeat)
        except BaseException:
            supervisor.leave(at_once=True)
            raise
    async with FakeScheduler(keys.server, scheduler.endpoint) as again:
        try:
            identity, hello, _ = await again.take(Hello, aside=(Heartbeat, Goodbye))  # of the one before
            assert hello.incarnation == 1
            again.send(identity, Stop("that is all"))
            assert await asyncio.wait_for(running, PATIENCE_S) == 0
        finally:
            supervisor.leave(at_once=True)


async def test_a_rejected_worker_prints_the_reason_and_does_not_return(tmp_path: Path) -> None:
    async with supervised(tmp_path) as it:
        identity, _ = await it.take(Hello)
        it.scheduler.send(identity, Refuse("it runs numpy 1.0"))
        code, stderr = await it.ended()
        assert code == 1
        assert "it runs numpy 1.0" in stderr


@pytest.mark.parametrize(
    ("signum", "code", "expected"),
    [
        (signal.SIGTERM, 0, "leaving: its call may take"),
        (signal.SIGHUP, 0, "leaving: its call may take"),
        (signal.SIGINT, -signal.SIGINT, "interrupted: its calls will be reassigned"),
    ],
)
async def test_a_signal_ends_it_and_its_worker(tmp_path: Path, signum: int, code: int, expected: str) -> None:
    async with supervised(tmp_path) as it:
        _, hello = await it.take(Hello)
        await it.take(Heartbeat)
        it.process.send_signal(signum)
        _, goodbye = await it.take(Goodbye)
        assert isinstance(goodbye, Goodbye)
        assert not goodbye.crashed
        ended, stderr = await it.ended()
        assert "signal 9" not in stderr
        assert stderr.count(expected) == 1
        assert ended == code, stderr
        assert isinstance(hello, Hello)
        assert wait_gone([hello.pid], within_s=0) == []


async def test_killing_the_supervisor_leaves_no_worker(tmp_path: Path) -> None:
    async with supervised(tmp_path) as it:
        _, hello = await it.take(Hello)
        assert isinstance(hello, Hello)
        it.process.kill()
        assert wait_gone([hello.pid]) == []


async def test_an_unknown_host_is_reported(tmp_path: Path) -> None:
    key_file = tmp_path / "keys.json"
    write_key_file(key_file)
    process = await dial_in("tcp://no-such-host.invalid:9", key_file, join_s=0.2)
    _, stderr = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert "the host 'no-such-host.invalid' can't be found" in stderr.decode()


async def test_the_supervisor_leaves_a_scheduler_that_does_not_reply(tmp_path: Path) -> None:
    key_file = tmp_path / "keys.json"
    write_key_file(key_file)
    process = await dial_in("tcp://127.0.0.1:9", key_file, join_s=0.2)
    _, stderr = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 1
    (line,) = stderr.splitlines()
    assert b"127.0.0.1:9" in line
    assert b"no process listens there. Check that the run has started, and that this is its port" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://127.0.0.1:9", "s\n"),
        ("tcp://no-such-host.invalid:9", "s; the host 'no-such-host.invalid' can't be found: "),
    ],
)
async def test_waiting_is_reported(tmp_path: Path, endpoint: str, expected: str) -> None:
    key_file = tmp_path / "keys.json"
    write_key_file(key_file)
    process = await dial_in(endpoint, key_file, join_s=20)
    try:
        assert process.stderr is not None
        line = await asyncio.wait_for(process.stderr.readline(), PATIENCE_S)
    finally:
        process.terminate()
        await process.communicate()
    assert f"at {endpoint}: waiting for the driver, for at most 20 {expected}" in line.decode()


async def test_an_unusable_endpoint_is_the_only_error_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_key_file(tmp_path / "keys.json")
    with pytest.raises(UsageError, match="malformed"):
        run_worker("nonsense", tmp_path / "keys.json")
    assert capfd.readouterr().err == ""


async def test_other_keys_are_rejected_with_a_clear_message(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    write_key_file(other)
    async with FakeScheduler(write_key_file(tmp_path / "keys.json").server) as scheduler:
        process = await dial_in(scheduler.endpoint, other)
        _, stderr = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 1
    assert b"key" in stderr
    assert scheduler.inbox.empty()


async def test_a_missing_key_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        run_worker("tcp://127.0.0.1:9", tmp_path / "nowhere")


async def test_the_next_supervisor_removes_the_folder_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It contains code from the scheduler, and no process removes it after kill -9."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    key_file = tmp_path / "keys.json"
    source = tmp_path / "source"
    source.mkdir()
    (source / "sent.py").write_text("x = 1\n")
    snapshot = take(str(source))
    async with FakeScheduler(write_key_file(key_file).server) as scheduler:
        started: list[Supervised] = []
        try:
            for _ in range(3):
                process = await dial_in(scheduler.endpoint, key_file)
                started.append(Supervised(scheduler, process))
                identity, hello = await started[-1].take(Hello)
                assert isinstance(hello, Hello)
                scheduler.send(identity, Welcome("c", 0.1, ()))
                code = Code(b"/not/here", snapshot.digest, snapshot.text)
                scheduler.send(identity, code, encode(snapshot.to_tree()))
                pass_id = scheduler.bind(identity, program(f"{FUNCTIONS}:identity"))
                scheduler.assign(identity, pass_id, [3])
                await started[-1].take(Results)
                mine = [folder for folder in scratch.iterdir() if f"-{process.pid}-" in folder.name]
                assert [path.name for path in mine[0].glob("*/*.py")] == ["sent.py"]
                if len(started) == 1:
                    process.kill()
                    await process.communicate()
                    assert mine[0].is_dir()
            assert {int(folder.name.split("-")[3]) for folder in scratch.iterdir()} == {
                it.process.pid for it in started[1:]
            }
            for it in started[1:]:
                it.process.terminate()
                code, stderr = await it.ended()
                assert code == 0, stderr
            assert list(scratch.iterdir()) == []
        finally:
            for it in started:
                if it.process.returncode is None:
                    it.process.kill()
                    await it.process.communicate()
