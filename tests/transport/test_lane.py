"""Messages over the lane, between real sockets and processes."""

from __future__ import annotations

import array
import asyncio
import fcntl
import gc
import os
import signal
import socket
import struct
import termios
from pathlib import Path

import numpy as np
import pytest

import pipedist
from pipedist.errors import RemoteProtocolError
from pipedist.messages import Assign, Bind, Cancel, LogLine, Refuse, Results, Stop
from pipedist.transport.client_socket import ClientSocket
from pipedist.transport.codec import decode, encode
from pipedist.transport.keys import new_keys
from pipedist.transport.lane.framing import HEAD
from pipedist.transport.limits import MIB
from pipedist.transport.rendezvous import ipc_endpoint, private_directory
from pipedist.transport.settings import Settings
from pipedist.transport.zeromq import ConnectionLost, Router

from .lanes import RawLane, laned, lanes, raw_lane, stream
from .memory import SMALL, block, children, is_shared, peers, until
from .sockets import WAIT_S, Inbox, blocking, dealer, descriptors, first_frame, is_gone, log, router
from .test_rogues import GARBAGE, LIMITS, is_served, raw

LARGE = np.arange(8 * MIB + 3, dtype=np.float64)  # more than a slot holds


# --- which road -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_road_is_the_lane_exactly_where_memory_is_shared() -> None:
    keys = new_keys()
    async with router() as (opened, _), router(keys=keys) as (far, _):
        for there in (dealer(opened), dealer(far, keys)):
            assert isinstance(there._road, ClientSocket)
            there.close()
    async with lanes() as (opened, inbox):
        with laned(opened, b"w0") as worker:
            await is_served(opened, inbox, worker, b"w0")
            assert opened._lanes is not None
            assert b"w0" in opened._lanes


@pytest.mark.asyncio
async def test_without_descriptors_newcomers_take_zeromq(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_args: object, **_options: object) -> int:
        raise OSError(24, "Too many open files")

    async with lanes() as (opened, inbox):
        with laned(opened, b"early") as early:
            await is_served(opened, inbox, early, b"early")
            monkeypatch.setattr("pipedist.transport.shared_memory.listener.Link", none_left)
            with laned(opened, b"refused") as refused, pytest.raises(ConnectionLost):
                await blocking(refused.recv)
            with dealer(opened, name=b"later") as later:
                assert isinstance(later._road, ClientSocket)
                await is_served(opened, inbox, later, b"later")
            await is_served(opened, inbox, early, b"early")


# --- messages -------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("copy", [True, False])
async def test_there_and_back_in_order_from_the_first_message_on(copy: bool) -> None:
    sizes = [0, 1, 50, 511, 513, 5000, 32_768, 65_535, 65_536, 70_000, 200_000]
    async with lanes() as (opened, inbox):
        with laned(opened, b"w0") as worker:

            def send() -> None:
                for step, size in enumerate(sizes * 3):
                    worker.send(Results(step, 0, 1, 5), encode(np.full(size, step % 100, "u1")), copy=copy)

            sending = asyncio.create_task(blocking(send))
            for step, size in enumerate(sizes * 3):
                who, message, frames = await inbox.get()
                assert (who, message) == (b"w0", Results(step, 0, 1, 5))
                assert decode(frames).tolist() == [step % 100] * size
                assert opened.send(b"w0", Bind(step), frames)
            await sending
            for step, size in enumerate(sizes * 3):
                message, frames = await blocking(worker.recv)
                assert message == Bind(step)
                value = decode(frames)
                assert value.tolist() == [step % 100] * size
                assert not value.flags.writeable
        assert inbox.rejects.empty()


@pytest.mark.asyncio
async def test_frames_of_64_mib_for_which_there_is_no_slot() -> None:
    async with lanes() as (opened, inbox):
        with laned(opened, b"w0") as worker:
            sending = asyncio.create_task(blocking(lambda: worker.send(log("large"), encode([LARGE, 1]))))
            _, _, frames = await inbox.get()
            await sending
            value = decode(frames)[0]
            assert np.array_equal(value, LARGE)
            assert not is_shared(value)
            assert value.flags.aligned
            assert not value.flags.writeable
            assert opened.send(b"w0", Bind(1), frames)
            _, frames = await blocking(worker.recv)
            assert np.array_equal(decode(frames)[0], LARGE)


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

    async with lanes(on_message=on_message, settings=Settings(frames_per_wake_up=32)) as (opened, _):
        with raw_lane(opened) as peer:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(take_turns())
                for first in range(0, count, 1000):  # in few writes: many of them are read at once
                    many = [stream([first_frame(LogLine("s", first + n, 0, ""))]) for n in range(1000)]
                    await blocking(peer.end.sendall, b"".join(many))
                await asyncio.wait_for(all_heard.wait(), WAIT_S)
    assert [step for step, _ in heard] == list(range(count))
    assert len({turn for _, turn in heard}) >= count // 32


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
    async with lanes(on_message=on_message) as (opened, _):
        with laned(opened) as worker:
            for number in range(3):
                worker.send(LogLine("s", number, 0, ""))
            assert [await asyncio.wait_for(heard.get(), WAIT_S) for _ in range(2)] == [1, 2]
    assert [type(error) for error in reported] == [KeyError]


@pytest.mark.asyncio
async def test_polling_without_a_message_is_false_in_time() -> None:
    async with lanes() as (opened, _):
        with laned(opened) as worker:
            assert not worker.poll(0)
            assert not await blocking(worker.poll, 0.05)
            with pytest.raises(ConnectionLost, match="sent no message"):
                await blocking(worker.recv, 0.05)


# --- back-pressure --------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_a_peer_does_not_read_yet_waits_and_keeps_its_order() -> None:
    count, payload = 3000, [bytes(20_000)]
    async with lanes() as (opened, inbox):
        with laned(opened, b"w0") as worker, laned(opened, b"w1") as other:
            await is_served(opened, inbox, worker, b"w0")
            for number in range(count):
                assert opened.send(b"w0", Bind(number), payload)
            await is_served(opened, inbox, other, b"w1")

            def read() -> list[int]:
                return [worker.recv()[0].pass_id for _ in range(count)]

            assert await blocking(read) == list(range(count))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "limit", [{"outbox_messages_max": 5}, {"outbox_bytes_max": 5 * 100_000}], ids=["messages", "bytes"]
)
async def test_a_peer_that_never_reads_is_overrun_and_lost(limit: dict[str, int]) -> None:
    async with lanes(settings=Settings(**limit)) as (opened, inbox):
        with laned(opened, b"w0") as worker:
            await is_served(opened, inbox, worker, b"w0")
            sent = 0
            while opened.send(b"w0", Bind(sent), [bytes(100_000)]):
                sent += 1
                assert sent < 1000
            lost, reason = inbox.lost.get_nowait()
            assert lost == b"w0"
            assert "overrun" in reason
            assert "overrun" in inbox.rejects.get_nowait()
            assert not opened.send(b"w0", Bind(0))

            def read() -> None:
                for number in range(sent):
                    assert worker.recv()[0] == Bind(number)

            with pytest.raises(ConnectionLost, match="was lost"):  # in the middle of a message
                await blocking(read)


@pytest.mark.asyncio
async def test_a_dealer_waits_for_room_for_a_bounded_time() -> None:
    async with lanes() as (opened, _):
        with laned(opened) as worker:

            def send_many() -> None:
                for _ in range(1000):  # the loop does not run, so nobody reads
                    worker.send(log(), [bytes(100_000)], timeout_s=0.2)

            with pytest.raises(ConnectionLost, match=r"took no message for 0\.2 s"):
                send_many()
            with pytest.raises(ConnectionLost, match=r"took no message for 0\.2 s"):
                worker.send(log())  # the half of a message has left


@pytest.mark.asyncio
async def test_a_stopped_process_keeps_nobody_waiting_and_gets_everything() -> None:
    async with peers(2) as (sleeper, other):
        sleeper.signal(signal.SIGSTOP)
        await sleeper.is_stopped()
        for number in range(2000):
            sleeper.send(Assign(0, 0, 0, 1, 0), np.full(500, number, np.float64))
        for number in range(50):
            assert (await other.double(block(number)) == 2 * number).all()
        sleeper.signal(signal.SIGCONT)
        for number in range(2000):
            who, _, frames = await sleeper.inbox.get()
            assert who == sleeper.identity
            assert (decode(frames) == 2 * number).all()


def has_said(opened: Router, name: bytes, size_bytes: int) -> None:
    """Wait until so much has come from a peer, and don't read it."""
    assert opened._lanes is not None
    connection = opened._lanes._lanes[name].connection
    unread = array.array("i", [0])
    while unread[0] < size_bytes:
        fcntl.ioctl(connection, termios.FIONREAD, unread)


# --- ends -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_a_process_said_before_it_was_killed_arrives() -> None:
    async with peers(settings=Settings(linger_s=WAIT_S)) as (peer,):
        for number in range(20):
            peer.send(Assign(0, 0, 0, 1, 0), np.full(1000, number, np.float64))
        has_said(peer.opened, peer.identity, 20 * 8000)
        peer.signal(signal.SIGKILL)
        peer.process.wait(WAIT_S)
        for number in range(20):
            _, _, frames = await peer.inbox.get()
            assert (decode(frames) == 2 * number).all()
        await is_gone(peer.opened, peer.identity)
        assert peer.inbox.lost.empty()


@pytest.mark.asyncio
async def test_the_end_of_a_process_ends_its_lane_though_a_child_holds_it() -> None:
    async with peers(settings=Settings(linger_s=0.05)) as (peer,):
        peer.send(Cancel(5))
        await peer.double(block(2))
        (child,) = children(peer.process.pid)
        try:
            await peer.kill()
            await until(lambda: not peer.opened.send(peer.identity, Bind(1)))
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.asyncio
async def test_a_dealer_reads_what_came_before_and_then_learns_of_the_end() -> None:
    async with lanes() as (opened, inbox):
        worker = laned(opened, b"w0")
        await is_served(opened, inbox, worker, b"w0")
        assert opened.send(b"w0", Stop("over"))
        assert opened.send(b"w0", Bind(1), encode(block(7)))
        worker.send(log("never read"))
    with worker:
        assert worker.recv()[0] == Stop("over")
        assert (decode(worker.recv()[1]) == 7).all()
        with pytest.raises(ConnectionLost, match="was lost"):
            worker.recv()
        with pytest.raises(ConnectionLost, match="was lost"):
            worker.send(log())


@pytest.mark.asyncio
async def test_closing_sends_what_waits() -> None:
    async with lanes(settings=Settings(linger_s=WAIT_S)) as (opened, inbox):
        worker = laned(opened, b"w0")
        await is_served(opened, inbox, worker, b"w0")
        for number in range(300):
            assert opened.send(b"w0", Bind(number), [bytes(30_000)])

        def read() -> list[int]:
            return [worker.recv()[0].pass_id for _ in range(300)]

        reading = asyncio.create_task(blocking(read))
    assert await reading == list(range(300))
    worker.close()


@pytest.mark.asyncio
async def test_closing_that_is_cancelled_leaves_no_descriptor() -> None:
    """asyncio's own cancellation, as of `asyncio.timeout`, knows nothing of anyio's shields."""
    heard = asyncio.Event()
    gc.collect()
    before = descriptors()
    with private_directory() as directory:
        opened = Router(
            ipc_endpoint(directory),
            keys=None,
            on_message=lambda *_: heard.set(),
            on_reject=lambda _reason: None,
            shared_memory=SMALL,
        )
        await opened.__aenter__()
        with laned(opened, b"w0") as worker:
            worker.send(log())
            await heard.wait()
            for number in range(300):  # more than it reads
                assert opened.send(b"w0", Bind(number), [bytes(30_000)])
            closing = asyncio.ensure_future(opened.__aexit__(None, None, None))
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
    del opened
    gc.collect()
    assert descriptors() <= before


@pytest.mark.asyncio
async def test_a_dropped_peer_is_neither_heard_nor_spoken_to() -> None:
    async with lanes() as (opened, inbox):
        with laned(opened, b"fenced") as fenced, laned(opened, b"told") as told:
            await is_served(opened, inbox, fenced, b"fenced")
            await is_served(opened, inbox, told, b"told")
            opened.drop(b"fenced")
            opened.drop(b"fenced")
            assert not opened.send(b"fenced", Bind(1))
            fenced.send(log("late"))
            with pytest.raises(ConnectionLost):
                await blocking(fenced.recv)
            opened.drop(b"told", "its payload was malformed")
            assert (await blocking(told.recv))[0] == Refuse("its payload was malformed")
            assert inbox.rejects.get_nowait() == "its payload was malformed"
            assert inbox.messages.empty()
            assert inbox.lost.empty()


@pytest.mark.asyncio
async def test_no_descriptor_is_left() -> None:
    async def once() -> None:
        async with lanes() as (opened, inbox):
            with laned(opened, b"w0") as worker:
                await is_served(opened, inbox, worker, b"w0")
                await blocking(lambda: worker.send(log(), encode(block(1))))
                assert (await inbox.get())[0] == b"w0"
            await is_gone(opened, b"w0")

    await once()
    gc.collect()
    before = descriptors()
    for _ in range(3):
        await once()
    assert descriptors() <= before


def sockets_of(pid: int) -> set[str]:
    found = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return {name for name in found if name.startswith("socket:")}


@pytest.mark.asyncio
async def test_no_worker_holds_the_lane_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEDIST_SHARED_MEMORY", raising=False)
    async with pipedist.LocalCluster(workers=2) as cluster:
        strategy = pipedist.Strategy(cluster, replicas=2)
        ones = pipedist.PerReplica([np.ones(1), np.ones(1)])
        await cluster.ready()
        await cluster.restart(0)  # its successor is forked while the other one has its lane
        for _ in range(3):
            await strategy.run(np.negative, args=(ones,))
        first, second = map(sockets_of, cluster.pids.values())
        assert len(first) >= 2  # a link and a lane
        assert not first & second


# --- rogues ---------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(("words", "frames"), GARBAGE.items(), ids=GARBAGE.keys())
async def test_garbage_costs_its_sender_the_connection(words: str, frames: list[bytes]) -> None:
    async with lanes(limits=LIMITS) as (opened, inbox):
        with laned(opened, b"honest") as worker, raw_lane(opened) as rogue:
            rogue.say(*frames)
            reason = await inbox.reject("peer rogue sent")
            assert words in reason
            assert inbox.lost.get_nowait() == (b"rogue", reason)
            rogue.end.sendall(stream([first_frame(log("evil"))]))
            assert await blocking(rogue.heard) == stream([first_frame(Refuse(reason))])
            await is_served(opened, inbox, worker, b"honest")
            assert inbox.messages.empty()
            assert inbox.lost.empty()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "data",
    [b"\xff" * 64, HEAD.pack(1, 0, 2**64 - 1), HEAD.pack(2**32 - 1, 0, 1), bytes(16)],
    ids=["noise", "endless", "bomb", "nothing"],
)
async def test_a_head_that_is_wrong_costs_its_sender_the_connection(data: bytes) -> None:
    async with lanes() as (opened, inbox):
        with laned(opened, b"honest") as worker, raw_lane(opened) as rogue:
            rogue.end.sendall(data)
            reason = await inbox.reject("peer rogue sent")
            rogue.end.sendall(data)
            assert await blocking(rogue.heard) == stream([first_frame(Refuse(reason))])
            await is_served(opened, inbox, worker, b"honest")


@pytest.mark.asyncio
@pytest.mark.parametrize("cut_at", [1, 15, 16, 20, 60_000])
async def test_the_half_of_a_message_is_never_heard(cut_at: int) -> None:
    whole = stream([first_frame(log("evil"), bytes(100_000))])
    async with lanes() as (opened, inbox):
        with laned(opened, b"honest") as worker, raw_lane(opened) as rogue:
            rogue.end.sendall(whole[:cut_at])
            await is_served(opened, inbox, worker, b"honest")
            rogue.close()
            await is_gone(opened, b"rogue")
            await is_served(opened, inbox, worker, b"honest")
            assert inbox.messages.empty()


def memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.asyncio
async def test_an_announced_frame_of_4_gib_takes_no_memory_before_it_comes() -> None:
    announced = HEAD.pack(2, 0, 50) + struct.pack("<QQ", 4 << 30, 0)
    before = memory_bytes()
    async with lanes() as (opened, inbox):
        with laned(opened, b"honest") as worker, raw_lane(opened) as rogue:
            rogue.end.sendall(announced + bytes(64))
            await is_served(opened, inbox, worker, b"honest")
            assert memory_bytes() - before < 64 * MIB


async def refused(opened: Router, inbox: Inbox, rogue: RawLane, *words: str) -> None:
    await inbox.reject(*words)
    assert await blocking(rogue.heard) == b""
    assert inbox.messages.empty()
    assert inbox.lost.empty()


@pytest.mark.asyncio
async def test_an_identity_belongs_to_who_came_first_on_either_road() -> None:
    async with lanes() as (opened, inbox):
        with laned(opened, b"near") as near, raw(opened.endpoint, b"far") as far:
            await is_served(opened, inbox, near, b"near")
            far.send(first_frame(log("honest")))
            assert (await inbox.get())[0] == b"far"
            for name in (b"near", b"far"):  # taken on either road, from a lane
                with raw_lane(opened, name) as rogue:
                    rogue.say(first_frame(log("evil")))
                    await refused(opened, inbox, rogue, "identity of another", "of another process")
            with raw(opened.endpoint, b"near") as rogue:  # and from ZeroMQ
                rogue.send(first_frame(log("evil")))
                await inbox.reject("of another process")
            await is_served(opened, inbox, near, b"near")
            far.send(first_frame(log("honest")))
            assert (await inbox.get())[0] == b"far"
        await is_gone(opened, b"near")
        with raw_lane(opened, b"near") as rogue:  # also when it is gone
            await refused(opened, inbox, rogue, "identity of another", "of another process")


@pytest.mark.asyncio
async def test_another_user_gets_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lanes() as (opened, inbox):
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with raw_lane(opened) as rogue:
            await refused(opened, inbox, rogue, "may not share")


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["file", "pipe", "datagram", "tcp", "listening"])
async def test_what_is_no_lane_is_not_taken(what: str, tmp_path: Path) -> None:
    pipe = os.pipe()
    file = os.memfd_create("no lane")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        datagrams, tcp = socket.socketpair(type=socket.SOCK_DGRAM), socket.socket()
        kinds = {
            "file": file,
            "pipe": pipe[0],
            "datagram": datagrams[0].fileno(),
            "tcp": tcp.fileno(),
            "listening": listening.fileno(),
        }
        before = descriptors()
        async with lanes() as (opened, inbox):
            rogue = RawLane(opened)
            rogue.hello(b"rogue", kinds[what])
            await refused(opened, inbox, rogue, "a lane that can't be used")
            rogue.close()
            with laned(opened, b"rogue") as honest:  # nothing is left of it, not even its name
                await is_served(opened, inbox, honest, b"rogue")
        assert descriptors() <= before + 1  # what pyzmq keeps for the process
        for end in (*datagrams, tcp):
            end.close()
    for descriptor in (*pipe, file):
        os.close(descriptor)


@pytest.mark.asyncio
async def test_more_peers_than_the_limit_are_refused() -> None:
    async with lanes(settings=Settings(peers_max=1)) as (opened, inbox):
        with laned(opened, b"w0") as worker:
            await is_served(opened, inbox, worker, b"w0")
            with raw_lane(opened) as rogue:
                await refused(opened, inbox, rogue, "more than 1 peers")
            await is_served(opened, inbox, worker, b"w0")


@pytest.mark.asyncio
async def test_a_malformed_message_of_the_scheduler_is_an_error() -> None:
    async with lanes() as (opened, inbox):
        with laned(opened, b"w0") as worker:
            await is_served(opened, inbox, worker, b"w0")
            assert opened._lanes is not None
            opened._lanes.send(b"w0", [b"garbage"])
            with pytest.raises(RemoteProtocolError, match="malformed"):
                await blocking(worker.recv)
            opened._lanes._lanes[b"w0"].connection.send(b"\xff" * 64)
            with pytest.raises(RemoteProtocolError, match="sent malformed"):
                await blocking(worker.recv)
