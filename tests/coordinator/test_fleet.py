"""Who is let in, who is put out, and what the scheduler hears of it; router and launcher are records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from pipedist.coordinator.launcher import WorkerExit
from pipedist.coordinator.worker_pool import Fleet
from pipedist.protocol import messages as msg
from pipedist.scheduler import Event
from pipedist.scheduler import events as ev
from pipedist.worker.process_setup import make_hello


class Record:
    """Stands for a router and a launcher."""

    def __init__(self) -> None:
        self.reached = True
        self.sent: list[tuple[bytes, msg.Message]] = []
        self.killed: list[tuple[str, int | None]] = []
        self.started: list[tuple[str, int]] = []
        self.events: list[Event] = []

    def send(self, identity: bytes, message: msg.Message, payload: Any = ()) -> bool:
        self.sent.append((identity, message))
        return self.reached

    def drop(self, identity: bytes, reason: str = "") -> None:
        return

    def start(self, worker: str, incarnation: int) -> None:
        self.started.append((worker, incarnation))

    def kill(self, worker: str, incarnation: int | None = None) -> None:
        self.killed.append((worker, incarnation))

    def told(self, identity: bytes) -> msg.Message:
        """What was sent to this identity last."""
        return next(message for to, message in reversed(self.sent) if to == identity)


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def fleet(record: Record) -> Iterator[Fleet]:
    it = Fleet(
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


def test_a_worker_that_is_put_out_is_fenced_and_its_next_incarnation_may_join(
    fleet: Fleet, record: Record
) -> None:
    fleet.greet(b"a", hello("far", 0))
    fleet.heard(b"s", "far", 0)
    assert record.events[-1] == ev.HeartbeatReceived("far", 0)
    fleet.expel("far", 0, "not heard for 4 s")
    assert record.told(b"a") == msg.Refuse("not heard for 4 s")
    fleet.turn_away(b"a")
    assert isinstance(record.told(b"a"), msg.Refuse)
    assert record.killed == []

    before = len(record.events)
    fleet.heard(b"s", "far", 0)  # its supervisor is back: it must end what hangs
    assert record.told(b"s") == msg.Refuse("this incarnation is not a member", before=1)
    assert len(record.events) == before

    fleet.heard(b"s", "far", 1)
    assert record.events[-1] == ev.HeartbeatReceived("far", 1)
    fleet.greet(b"b", hello("far", 1))
    assert isinstance(record.told(b"b"), msg.Welcome)
    asyncio.run(fleet.dismiss("over", 0.0))
    assert record.told(b"b") == record.told(b"s") == msg.Stop("over")


@pytest.mark.asyncio
async def test_workers_that_dialled_in_have_time_to_say_goodbye(fleet: Fleet, record: Record) -> None:
    fleet.launcher = None
    fleet.greet(b"a", hello("far", 0))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(fleet.dismiss("over", 60.0))
        await asyncio.sleep(0)
        assert record.told(b"a") == msg.Stop("over")
        assert not leaving.done()
        fleet.left(msg.Goodbye("far", 0, "it was told to"))
    assert len(fleet) == 0


@pytest.mark.parametrize("crashed", [False, True])
def test_a_crash_that_a_supervisor_tells_is_no_graceful_leave(
    fleet: Fleet, record: Record, crashed: bool
) -> None:
    fleet.greet(b"a", hello("far", 0))
    fleet.left(msg.Goodbye("far", 0, "signal 11 (SIGSEGV)", crashed))
    assert record.events[-1] == ev.WorkerLost("far", 0, "signal 11 (SIGSEGV)", graceful=not crashed)


def test_an_exit_says_which_call_was_running(fleet: Fleet, record: Record) -> None:
    fleet.start("w0", 0)
    fleet.exited(WorkerExit("w0", 0, 9, None, 11, "signal 11 (SIGSEGV)", (3, 41)))
    assert record.events[-1] == ev.WorkerLost("w0", 0, "signal 11 (SIGSEGV)", running=(3, 41))


def test_a_connection_that_is_gone_before_the_exit_is_told_hides_no_call(
    fleet: Fleet, record: Record
) -> None:
    fleet.start("w0", 0)
    fleet.greet(b"a", replace(make_hello("w0", 0), boot="here"))
    fleet.greet(b"b", hello("far", 0))
    before = len(record.events)
    record.reached = False
    fleet.send("w0", msg.Stop("over"))
    assert len(record.events) == before
    assert record.killed == [("w0", 0)]
    fleet.exited(WorkerExit("w0", 0, 9, None, 9, "signal 9 (SIGKILL)", (3, 41)))
    assert record.events[-1] == ev.WorkerLost("w0", 0, "signal 9 (SIGKILL)", running=(3, 41))
    fleet.send("far", msg.Stop("over"))
    assert record.events[-1] == ev.WorkerLost("far", 0, "its connection is gone")


def test_a_connection_that_is_gone_before_a_supervisor_says_why_hides_no_call(
    fleet: Fleet, record: Record
) -> None:
    fleet.greet(b"a", hello("far", 0))
    fleet.heard(b"s", "far", 0)
    before = len(record.events)
    record.reached = False
    fleet.send("far", msg.Stop("over"))
    assert len(record.events) == before
    fleet.left(msg.Goodbye("far", 0, "signal 9 (SIGKILL)", crashed=True, lease=3, call=41))
    assert record.events[-1] == ev.WorkerLost("far", 0, "signal 9 (SIGKILL)", running=(3, 41))


def test_only_the_incarnation_that_is_meant_is_killed(fleet: Fleet, record: Record) -> None:
    fleet.start("w0", 0)
    fleet.greet(b"a", make_hello("w0", 0))
    fleet.expel("w0", 0, "it broke the protocol")
    assert record.killed == [("w0", 0)]
    fleet.start("w0", 1)  # its process is still there
    assert record.killed == [("w0", 0)] * 2
    assert record.started == [("w0", 0)]
    fleet.exited(WorkerExit("w0", 0, 9, None, 9, "signal 9 (SIGKILL)"))
    assert record.started == [("w0", 0), ("w0", 1)]


def test_silence_is_three_heartbeats(fleet: Fleet, record: Record) -> None:
    """So it is known after three heartbeats, and a second for the road at most."""
    fleet.greet(b"a", hello("far", 0))
    welcome = record.told(b"a")
    assert isinstance(welcome, msg.Welcome)
    assert 3 * welcome.heartbeat_s <= 4.0 <= 3 * welcome.heartbeat_s + 1


def test_who_is_refused_is_told_with_the_reason(fleet: Fleet, record: Record) -> None:
    told: list[str] = []
    fleet._on_refuse = lambda reason, _again: told.append(reason)
    fleet.greet(b"a", replace(hello("far", 0), wire=99))
    fleet.turn_away(b"one:7.0.ab")
    fleet.turn_away(b"\x00\xff")
    assert told == [
        f"worker 'far' of {hello('far', 0).host!r}: it speaks protocol 99 (the run {msg.WIRE_VERSION})",
        "a message from connection 'one:7.0.ab', which is no member's",
        "a message from connection '\\x00\\xff', which is no member's",
    ]
