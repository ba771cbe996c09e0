from __future__ import annotations

import asyncio
import gc
import select
import socket

import numpy as np
import pytest
import zmq

from pipedist.errors import LocalProtocolError, RemoteProtocolError, UsageError
from pipedist.protocol.codec import decode, encode
from pipedist.protocol.messages import Bind, LogLine, Refuse, Results, Stop
from pipedist.transport.config import SocketSettings
from pipedist.transport.dealer import ConnectionLost, Dealer
from pipedist.transport.endpoints import ipc_endpoint, private_directory
from pipedist.transport.keys import new_keys
from pipedist.transport.router import Router

from .memory import SMALL, until
from .sockets import WAIT_S, blocking, dealer, descriptors, is_gone, log, router

TREE = {"x": np.arange(100_000.0), "y": [1, np.arange(5)], "z": np.arange(2000)}


@pytest.mark.asyncio
@pytest.mark.parametrize("over", ["ipc", "tcp"])
@pytest.mark.parametrize("copy", [True, False])
async def test_there_and_back(over: str, copy: bool) -> None:
    keys = new_keys() if over == "tcp" else None
    async with router(keys=keys) as (opened, inbox):
        assert opened.endpoint.startswith(over)
        with dealer(opened, keys, b"w0") as worker:
            await blocking(lambda: worker.send(Results(1, 0, 1, 5), encode(TREE), copy=copy))
            who, message, frames = await inbox.get()
            assert (who, message) == (b"w0", Results(1, 0, 1, 5))
            got = decode(frames)
            assert np.array_equal(got["x"], TREE["x"])
            assert got["x"].flags.aligned
            assert not got["x"].flags.writeable
            assert opened.send(who, Bind(7), encode(TREE))
            assert await blocking(worker.poll, WAIT_S)
            message, frames = await blocking(worker.recv)
            assert message == Bind(7)
            assert np.array_equal(decode(frames)["z"], TREE["z"])
        assert inbox.rejects.empty()


@pytest.mark.asyncio
async def test_messages_to_several_peers_are_packed_before_the_first_is_sent() -> None:
    async with router() as (opened, inbox):
        with dealer(opened, None, b"a") as first, dealer(opened, None, b"b") as second:
            for worker in (first, second):
                worker.send(log())
                await inbox.get()
            not_allowed = Bind("no number")  # type: ignore[arg-type]
            with pytest.raises(LocalProtocolError):
                opened.send_all([(b"a", Bind(1), []), (b"b", not_allowed, [])])
            sent = opened.send_all([(b"a", Bind(2), []), (b"unknown", Bind(2), []), (b"b", Bind(2), [])])
            assert sent == [True, False, True]
            for worker in (first, second):
                assert (await blocking(worker.recv))[0] == Bind(2)


@pytest.mark.asyncio
async def test_many_messages_arrive_in_order_and_other_tasks_have_their_turn() -> None:
    count, turns, heard = 3000, 0, []
    all_heard = asyncio.Event()

    def on_message(identity: bytes, message: LogLine, frames: list[memoryview]) -> None:
        heard.append((message.step, turns))
        if len(heard) == count:
            all_heard.set()

    async def take_turns() -> None:
        nonlocal turns
        while not all_heard.is_set():
            turns += 1
            await asyncio.sleep(0)

    settings = SocketSettings(queue_messages_max=2 * count, frames_per_wake_up=32)
    async with router(on_message=on_message, settings=settings) as (opened, _):
        with dealer(opened, settings=settings) as worker:
            # All of them are there before the loop looks for the first time.
            for number in range(count):
                worker.send(LogLine("s", number, 0, ""))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(take_turns())
                await asyncio.wait_for(all_heard.wait(), WAIT_S)
    assert [step for step, _ in heard] == list(range(count))
    assert len({turn for _, turn in heard}) >= count * 2 // 32 // 2


@pytest.mark.asyncio
async def test_sending_does_not_lose_the_wake_up_for_arrivals() -> None:
    rounds = 500
    async with router() as (opened, inbox):
        with dealer(opened) as first, dealer(opened) as second:

            def talk() -> None:
                for number in range(rounds):
                    for worker in (first, second):
                        worker.send(LogLine("s", number, 0, ""))
                    for worker in (first, second):
                        worker.recv()

            async def answer() -> None:
                for _ in range(2 * rounds):
                    who, _, _ = await inbox.get()
                    assert opened.send(who, Bind(1))

            await asyncio.gather(blocking(talk), answer())


@pytest.mark.asyncio
async def test_a_failing_handler_does_not_stall_the_messages_after_it() -> None:
    heard: asyncio.Queue[int] = asyncio.Queue()
    reported: list[BaseException] = []

    def on_message(identity: bytes, message: LogLine, frames: list[memoryview]) -> None:
        if message.step == 0:
            raise KeyError("handler")
        heard.put_nowait(message.step)

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    async with router(on_message=on_message) as (opened, _):
        with dealer(opened) as worker:
            for number in range(3):
                worker.send(LogLine("s", number, 0, ""))
            assert [await asyncio.wait_for(heard.get(), WAIT_S) for _ in range(2)] == [1, 2]
    assert [type(error) for error in reported] == [KeyError]


# --- back-pressure --------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_unread_messages_wait_and_keep_their_order() -> None:
    count = 3000
    settings = SocketSettings(queue_messages_max=4)
    payload = [bytes(20_000)]
    async with router(settings=settings) as (opened, inbox):
        with dealer(opened, settings=settings) as worker:
            worker.send(log())
            who, _, _ = await inbox.get()
            for number in range(count):
                assert opened.send(who, Bind(number), payload)

            def read() -> list[int]:
                return [worker.recv()[0].pass_id for _ in range(count)]

            assert await blocking(read) == list(range(count))


@pytest.mark.asyncio
async def test_a_peer_that_does_not_read_does_not_keep_the_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0
    async with router(settings=SocketSettings(queue_messages_max=2)) as (opened, inbox):
        with dealer(opened, settings=SocketSettings(queue_messages_max=2)) as worker:
            worker.send(log())
            who, _, _ = await inbox.get()
            for number in range(100):
                assert opened.send(who, Bind(number), [bytes(100_000)])
            send = opened._server._try_send

            def counting(parts: list[bytes | memoryview]) -> bool | None:
                nonlocal tries
                tries += 1
                return send(parts)

            monkeypatch.setattr(opened._server, "_try_send", counting)
            await asyncio.sleep(0.2)
            assert 1 <= tries < 200

            def read() -> list[int]:
                return [worker.recv()[0].pass_id for _ in range(100)]

            assert await blocking(read) == list(range(100))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "limit", [{"outbox_messages_max": 5}, {"outbox_bytes_max": 5 * 100_000}], ids=["messages", "bytes"]
)
async def test_a_peer_that_never_reads_fills_its_queue_and_is_lost(limit: dict[str, int]) -> None:
    settings = SocketSettings(queue_messages_max=2, **limit)
    async with router(settings=settings) as (opened, inbox):
        with dealer(opened, settings=settings) as worker:
            worker.send(log())
            who, _, _ = await inbox.get()
            sent = 0
            while opened.send(who, Bind(sent), [bytes(100_000)]):
                sent += 1
                assert sent < 1000
            lost, reason = inbox.lost.get_nowait()
            assert lost == who
            assert "send queue is full" in reason
            assert "send queue is full" in inbox.rejects.get_nowait()
            assert not opened.send(who, Bind(0))


@pytest.mark.asyncio
async def test_a_dealer_waits_for_room_for_a_bounded_time() -> None:
    settings = SocketSettings(queue_messages_max=2)
    async with router(settings=settings) as (opened, _):
        with dealer(opened, settings=settings) as worker:

            def send_many() -> None:
                for _ in range(1000):
                    worker.send(log(), [bytes(100_000)], timeout_s=0.2)

            # The loop does not run, so nobody reads.
            with pytest.raises(ConnectionLost, match=r"took no message for 0\.2 s"):
                send_many()


# --- the end of a connection ----------------------------------------------------------------


@pytest.mark.asyncio
async def test_sending_to_a_peer_that_vanished_is_false() -> None:
    async with router() as (opened, inbox):
        assert not opened.send(b"never-heard", Bind(1))
        worker = dealer(opened)
        worker.send(log())
        who, _, _ = await inbox.get()
        assert opened.send(who, Bind(1))
        await blocking(worker.close)
        await is_gone(opened, who)
        assert not opened.send(who, Bind(2))
        assert inbox.lost.empty()


@pytest.mark.asyncio
async def test_a_dropped_peer_neither_receives_nor_is_received() -> None:
    async with router() as (opened, inbox):
        with dealer(opened, name=b"fenced") as fenced, dealer(opened, name=b"other") as other:
            fenced.send(log())
            assert (await inbox.get())[0] == b"fenced"
            opened.drop(b"fenced")
            opened.drop(b"fenced")
            opened.drop(b"unknown")
            assert not opened.send(b"fenced", Bind(1))
            fenced.send(log("late"))
            with pytest.raises(ConnectionLost):
                await blocking(fenced.recv)
            other.send(log())
            assert (await inbox.get())[0] == b"other"
            assert inbox.rejects.empty()
            assert inbox.lost.empty()


@pytest.mark.asyncio
async def test_a_dealer_reads_earlier_messages_before_it_reports_the_end() -> None:
    async with router() as (opened, inbox):
        worker = dealer(opened)
        worker.send(log())
        who, _, _ = await inbox.get()
        opened.send(who, Stop("over"))
        opened.send(who, Bind(1), encode(TREE))
        assert await blocking(worker.poll, WAIT_S)
        assert worker.recv()[0] == Stop("over")
        assert await blocking(worker.poll, WAIT_S)
    with worker:
        _, frames = worker.recv()
        assert np.array_equal(decode(frames)["x"], TREE["x"])
        with pytest.raises(ConnectionLost, match="was lost"):
            await blocking(worker.recv)
        with pytest.raises(ConnectionLost, match="was lost"):
            worker.send(log())


@pytest.mark.asyncio
async def test_a_message_that_arrives_while_the_loss_is_noticed_is_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The socket is looked at first, then the monitor: a Stop may come between the two, and the loss after it."""
    async with router() as (opened, inbox):
        worker = dealer(opened)
        worker.send(log())
        who, _, _ = await inbox.get()
        opened.send(who, Stop("over"))
        assert await blocking(worker.poll, WAIT_S)
    zmq_poll, looks = zmq.zmq_poll, 0

    def poll(sources: list[tuple[object, int]], wait_ms: int) -> list[tuple[object, int]]:
        nonlocal looks
        looks += 1
        return [] if looks == 1 else zmq_poll(sources, wait_ms)

    with worker:
        assert (await blocking(select.select, [worker._monitor_fd], [], [], WAIT_S))[0]
        worker._is_readable = False
        monkeypatch.setattr(zmq, "zmq_poll", poll)
        assert worker.recv()[0] == Stop("over")
        with pytest.raises(ConnectionLost, match="was lost"):
            worker.recv()


@pytest.mark.asyncio
async def test_polling_without_a_message_is_false_in_time() -> None:
    async with router() as (opened, _):
        with dealer(opened) as worker:
            assert not worker.poll(0)
            assert not await blocking(worker.poll, 0.05)
            with pytest.raises(ConnectionLost, match="sent no message"):
                await blocking(worker.recv, 0.05)


@pytest.mark.asyncio
@pytest.mark.parametrize("over", ["ipc", "tcp"])
async def test_no_descriptor_is_left(over: str) -> None:
    keys = new_keys() if over == "tcp" else None

    async def once() -> None:
        async with router(keys=keys) as (opened, inbox):
            with dealer(opened, keys) as worker:
                await blocking(lambda: worker.send(log(), encode(TREE), copy=False))
                who, _, _ = await inbox.get()
                assert opened.send(who, Bind(1), encode(TREE))
                await blocking(worker.recv)

    await once()  # starts what pyzmq and asyncio keep for the process
    gc.collect()
    before = descriptors()
    for _ in range(3):
        await once()
    await until(lambda: descriptors() <= before)  # ZeroMQ closes some in a thread of its own


@pytest.mark.asyncio
async def test_a_failed_opening_leaves_nothing_and_names_the_port() -> None:
    keys = new_keys()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        gc.collect()
        before = descriptors()
        with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is taken"):
            async with router(f"tcp://127.0.0.1:{port}", keys):
                pytest.fail("was opened")
        await until(lambda: descriptors() <= before)  # ZeroMQ closes some in a thread of its own


@pytest.mark.asyncio
async def test_a_router_that_is_closed_does_not_send() -> None:
    async with router() as (opened, _):
        pass
    with pytest.raises(LocalProtocolError, match="async with"):
        opened.send(b"x", Bind(1))


@pytest.mark.parametrize("name", [b"", b"\0abc", b"x" * 256])
def test_identities_that_are_not_allowed(name: bytes) -> None:
    keys = new_keys()
    with pytest.raises(UsageError, match="identity"):
        Dealer("tcp://127.0.0.1:5555", identity=name, keys=keys.client)


@pytest.mark.asyncio
async def test_a_malformed_message_of_the_scheduler_is_an_error() -> None:
    async with router() as (opened, inbox):
        with dealer(opened) as worker:
            worker.send(log())
            who, _, _ = await inbox.get()
            opened._server._socket.send_multipart([who, b"garbage"])
            with pytest.raises(RemoteProtocolError, match="malformed"):
                await blocking(worker.recv)


@pytest.mark.asyncio
async def test_a_peer_that_is_dropped_with_a_reason_gets_it() -> None:
    async with router() as (opened, inbox):
        with dealer(opened) as worker:
            worker.send(log())
            who, _, _ = await inbox.get()
            opened.drop(who, "its payload was malformed")
            assert (await blocking(worker.recv))[0] == Refuse("its payload was malformed")
            assert inbox.rejects.get_nowait() == "its payload was malformed"


def test_construction_checks_the_endpoint() -> None:
    with pytest.raises(UsageError, match="needs keys"):
        Router("tcp://0.0.0.0:0", keys=None, on_message=print, on_reject=print)


# --- closing --------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_closing_sends_queued_messages() -> None:
    settings = SocketSettings(linger_s=WAIT_S, queue_messages_max=4)
    async with router(settings=settings) as (opened, inbox):
        worker = dealer(opened, settings=settings)
        worker.send(log())
        who, _, _ = await inbox.get()
        for number in range(300):
            assert opened.send(who, Bind(number), [bytes(30_000)])

        def read() -> list[int]:
            return [worker.recv()[0].pass_id for _ in range(300)]

        reading = asyncio.create_task(blocking(read))
    assert await reading == list(range(300))
    worker.close()


@pytest.mark.asyncio
async def test_closing_that_is_cancelled_leaves_no_descriptor() -> None:
    """asyncio's own cancellation, as of `asyncio.timeout`, knows nothing of anyio's shields."""
    settings = SocketSettings(queue_messages_max=4)

    async def once() -> None:
        heard = asyncio.Event()
        with private_directory() as directory:
            opened = Router(
                ipc_endpoint(directory),
                keys=None,
                on_message=lambda *_: heard.set(),
                on_reject=lambda _reason: None,
                shared_memory=SMALL,
                settings=settings,
            )
            await opened.__aenter__()
            with dealer(opened, name=b"w0", settings=settings) as worker:
                worker.send(log())
                await heard.wait()
                for number in range(300):  # more than it reads
                    assert opened.send(b"w0", Bind(number), [bytes(30_000)])
                closing = asyncio.ensure_future(opened.__aexit__(None, None, None))
                await asyncio.sleep(0)
                closing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await closing

    await once()
    gc.collect()
    before = descriptors()
    await once()
    gc.collect()
    await until(lambda: descriptors() <= before)  # ZeroMQ closes some in a thread of its own
