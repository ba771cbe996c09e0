"""Workers that join, are evicted or leave, and the resulting events; router and launcher are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from pipedist.coordinator.launcher import WorkerExit
from pipedist.coordinator.worker_pool import WorkerPool
from pipedist.protocol import messages as msg
from pipedist.scheduler import Event
from pipedist.scheduler import events as ev
from pipedist.worker.process_setup import make_hello


class Record:
    """A fake router and launcher that records its calls."""

    def __init__(self) -> None:
        self.reached = True
        self.sent: list[tuple[bytes, msg.Message]] = []
        self.killed: list[tuple[str, int | None]] = []
        self.started: list[tuple[str, int]] = []
        self.events: list[Event] = []

    def send(self, identity: bytes, message: msg.Message, payload: Any = ()) -> bool:
        self.sent.append((identity, message))
        return self.reached

    def keep(self, identity: bytes) -> None:
        return

    def release(self, identity: bytes) -> None:
        return

    def drop(self, identity: bytes, reason: str = "") -> None:
        return

    def start(self, worker: str, incarnation: int) -> None:
        self.started.append((worker, incarnation))

    def kill(self, worker: str, incarnation: int | None = None) -> None:
        self.killed.append((worker, incarnation))

    def last(self, identity: bytes) -> msg.Message:
        """Return the last message to this identity."""
        return next(message for to, message in reversed(self.sent) if to == identity)


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def pool(record: Record) -> Iterator[WorkerPool]:
    it = WorkerPool(
        record.events.append,
        cluster_id="c",
        router=record,  # type: ignore[arg-type]
        names=("w0",),
        dial_in=True,
        boot="here",
        heartbeat_timeout_s=4.0,
    )
    it.launcher = record  # type: ignore[assignment]
    return it


def hello(worker: str, incarnation: int) -> msg.Hello:
    return replace(make_hello(worker, incarnation), boot="there")


def test_an_evicted_worker_is_rejected_and_its_next_incarnation_may_join(
    pool: WorkerPool, record: Record
) -> None:
    pool.on_hello(b"a", hello("far", 0))
    pool.on_heartbeat(b"s", "far", 0)
    assert record.events[-1] == ev.HeartbeatReceived("far", 0)
    pool.evict("far", 0, "no heartbeat for 4 s")
    assert record.last(b"a") == msg.Refuse("no heartbeat for 4 s")
    pool.reject(b"a")
    assert isinstance(record.last(b"a"), msg.Refuse)
    assert record.killed == []

    before = len(record.events)
    pool.on_heartbeat(b"s", "far", 0)  # its supervisor is back: it must end the process that hangs
    assert record.last(b"s") == msg.Refuse("this incarnation is not a member", before=1)
    assert len(record.events) == before

    pool.on_heartbeat(b"s", "far", 1)
    assert record.events[-1] == ev.HeartbeatReceived("far", 1)
    pool.on_hello(b"b", hello("far", 1))
    assert isinstance(record.last(b"b"), msg.Welcome)
    asyncio.run(pool.stop_all("over", 0.0))
    assert record.last(b"b") == record.last(b"s") == msg.Stop("over")


@pytest.mark.asyncio
async def test_dialled_in_workers_have_time_to_say_goodbye(pool: WorkerPool, record: Record) -> None:
    pool.launcher = None
    pool.on_hello(b"a", hello("far", 0))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(pool.stop_all("over", 60.0))
        await asyncio.sleep(0)
        assert record.last(b"a") == msg.Stop("over")
        assert not leaving.done()
        pool.on_goodbye(msg.Goodbye("far", 0, "it got a Stop"))
    assert len(pool) == 0


@pytest.mark.parametrize("crashed", [False, True])
def test_a_crash_that_a_supervisor_reports_is_no_graceful_leave(
    pool: WorkerPool, record: Record, crashed: bool
) -> None:
    pool.on_hello(b"a", hello("far", 0))
    pool.on_goodbye(msg.Goodbye("far", 0, "signal 11 (SIGSEGV)", crashed))
    assert record.events[-1] == ev.WorkerLost("far", 0, "signal 11 (SIGSEGV)", graceful=not crashed)


@pytest.mark.asyncio
async def test_a_restart_waits_for_the_next_process_of_a_worker_that_has_not_joined(
    pool: WorkerPool, record: Record
) -> None:
    pool.start("w0", 0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        restarted = tasks.create_task(pool.restart("w0"))
        await asyncio.sleep(0)
        assert record.killed == [("w0", None)]
        pool.on_hello(b"a", replace(make_hello("w0", 0), boot="here"))  # sent before the signal came
        for _ in range(3):
            await asyncio.sleep(0)
        assert not restarted.done()
        pool.on_exit(WorkerExit("w0", 0, 9, None, 9, "signal 9 (SIGKILL)", None))
        pool.start("w0", 1)
        pool.on_hello(b"b", replace(make_hello("w0", 1), boot="here"))


def test_an_exit_reports_the_running_call(pool: WorkerPool, record: Record) -> None:
    pool.start("w0", 0)
    pool.on_exit(WorkerExit("w0", 0, 9, None, 11, "signal 11 (SIGSEGV)", (3, 41)))
    assert record.events[-1] == ev.WorkerLost("w0", 0, "signal 11 (SIGSEGV)", running=(3, 41))


def test_a_connection_lost_before_the_exit_is_reported_hides_no_call(
    pool: WorkerPool, record: Record
) -> None:
    pool.start("w0", 0)
    pool.on_hello(b"a", replace(make_hello("w0", 0), boot="here"))
    pool.on_hello(b"b", hello("far", 0))
    before = len(record.events)
    record.reached = False
    pool.send("w0", msg.Stop("over"))
    assert len(record.events) == before
    assert record.killed == [("w0", 0)]
    pool.on_exit(WorkerExit("w0", 0, 9, None, 9, "signal 9 (SIGKILL)", (3, 41)))
    assert record.events[-1] == ev.WorkerLost("w0", 0, "signal 9 (SIGKILL)", running=(3, 41))
    pool.send("far", msg.Stop("over"))
    assert record.events[-1] == ev.WorkerLost("far", 0, "its connection is gone")


def test_a_connection_lost_before_a_supervisor_reports_the_crash_hides_no_call(
    pool: WorkerPool, record: Record
) -> None:
    pool.on_hello(b"a", hello("far", 0))
    pool.on_heartbeat(b"s", "far", 0)
    before = len(record.events)
    record.reached = False
    pool.send("far", msg.Stop("over"))
    assert len(record.events) == before
    pool.on_goodbye(msg.Goodbye("far", 0, "signal 9 (SIGKILL)", crashed=True, lease=3, call=41))
    assert record.events[-1] == ev.WorkerLost("far", 0, "signal 9 (SIGKILL)", running=(3, 41))


def test_only_the_evicted_incarnation_is_killed(pool: WorkerPool, record: Record) -> None:
    pool.start("w0", 0)
    pool.on_hello(b"a", make_hello("w0", 0))
    pool.evict("w0", 0, "it broke the protocol")
    assert record.killed == [("w0", 0)]
    pool.start("w0", 1)  # its process is still there
    assert record.killed == [("w0", 0)] * 2
    assert record.started == [("w0", 0)]
    pool.on_exit(WorkerExit("w0", 0, 9, None, 9, "signal 9 (SIGKILL)"))
    assert record.started == [("w0", 0), ("w0", 1)]


def test_the_heartbeat_timeout_is_three_heartbeats(pool: WorkerPool, record: Record) -> None:
    """Silence is detected after three heartbeats, and at most a second of latency."""
    pool.on_hello(b"a", hello("far", 0))
    welcome = record.last(b"a")
    assert isinstance(welcome, msg.Welcome)
    assert 3 * welcome.heartbeat_s <= 4.0 <= 3 * welcome.heartbeat_s + 1


def test_rejections_are_reported_with_their_reason(pool: WorkerPool, record: Record) -> None:
    reasons: list[str] = []
    pool._on_reject = lambda reason, _repeated: reasons.append(reason)
    pool.on_hello(b"a", replace(hello("far", 0), wire=99))
    pool.reject(b"one:7.0.ab")
    pool.reject(b"\x00\xff")
    assert reasons == [
        f"worker 'far' of {hello('far', 0).host!r}: it speaks protocol 99 (the run {msg.WIRE_VERSION})",
        "a message from connection 'one:7.0.ab', which is not a member",
        "a message from connection '\\x00\\xff', which is not a member",
    ]


def test_values_for_supervisors_that_dial_in_later_are_bounded(
    monkeypatch: pytest.MonkeyPatch, pool: WorkerPool, record: Record
) -> None:
    monkeypatch.setattr("pipedist.coordinator.worker_pool.SHARED_VALUES_MAX", 3)
    for number in range(1000):
        pool.share([b"%d" % number])
    pool.on_heartbeat(b"s", "far", 0)
    assert [m for _, m in record.sent if isinstance(m, msg.Share)] == [msg.Share(n) for n in (998, 999, 1000)]
