"""Peers that are wrong, hostile or broken: they get nothing in, and honest ones don't notice."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zmq

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.limits import MessageLimits
from pipedist.protocol.messages import Bind, Refuse
from pipedist.protocol.wire import START, pack, seal
from pipedist.transport.config import SocketSettings
from pipedist.transport.dealer import ConnectionLost, Dealer
from pipedist.transport.keys import ClusterKeys, ServerKeys, new_keys
from pipedist.transport.router import Router

from .sockets import WAIT_S, Inbox, blocking, dealer, first_frame, is_gone, log, other_keys, router


@contextmanager
def raw(endpoint: str, name: bytes, keys: ClusterKeys | None = None) -> Iterator[Any]:
    """A bare ZeroMQ client, which keeps to none of our rules."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.routing_id = name
    peer.sndtimeo = peer.rcvtimeo = round(WAIT_S * 1000)
    if keys is not None:
        peer.curve_serverkey = keys.client.server_public
        peer.curve_publickey = keys.client.public
        peer.curve_secretkey = keys.client.secret
    peer.connect(endpoint)
    try:
        yield peer
    finally:
        context.destroy(linger=0)


async def is_served(opened: Router, inbox: Inbox, worker: Dealer, name: bytes) -> None:
    """Check that an honest peer gets replies, and that no message of another peer arrived."""
    await blocking(worker.send, log("honest"))
    who, message, _ = await inbox.get()
    assert (who, message) == (name, log("honest"))
    assert opened.send(who, Bind(3))
    assert (await blocking(worker.recv))[0] == Bind(3)


@pytest.mark.asyncio
async def test_plaintext_to_a_curve_endpoint() -> None:
    keys = new_keys()
    async with router(keys=keys) as (opened, inbox):
        with dealer(opened, keys, b"honest") as worker, raw(opened.endpoint, b"rogue") as rogue:
            rogue.send(first_frame(log("evil")))
            await inbox.reject("does not speak the protocol", "went away")
            await is_served(opened, inbox, worker, b"honest")
            assert inbox.messages.empty()


@pytest.mark.asyncio
async def test_an_unknown_key_is_rejected_and_both_ends_report_it() -> None:
    keys = new_keys()
    async with router(keys=keys) as (opened, inbox):
        with dealer(opened, keys, b"honest") as worker, dealer(opened, other_keys(keys)) as rogue:
            with pytest.raises(RemoteProtocolError, match="refused this worker's key"):
                await blocking(rogue.poll, WAIT_S)
            with pytest.raises(RemoteProtocolError, match="refused this worker's key"):
                await blocking(rogue.send, log("evil"))
            assert "unknown key" in await inbox.reject("unknown key")
            await is_served(opened, inbox, worker, b"honest")
            assert inbox.messages.empty()


@pytest.mark.asyncio
async def test_a_worker_with_the_wrong_server_key_gives_up() -> None:
    keys, others = new_keys(), new_keys()
    wrong = ClusterKeys(
        type(keys.client)(others.client.server_public, keys.client.public, keys.client.secret), None
    )
    async with router(keys=keys) as (opened, inbox):
        with (
            dealer(opened, wrong) as worker,
            pytest.raises(RemoteProtocolError, match=r"key file is that of another cluster.*\. Copy the"),
        ):
            await blocking(worker.poll, WAIT_S)
        assert inbox.messages.empty()


@pytest.mark.asyncio
async def test_zap_fails_closed_without_its_handler() -> None:
    keys = new_keys()
    async with router(keys=keys) as (opened, inbox):
        with dealer(opened, keys, b"early") as early:
            await is_served(opened, inbox, early, b"early")
            assert opened._server._zap is not None
            opened._server._zap.close()
            settings = SocketSettings(handshake_s=0.5)
            with (
                dealer(opened, keys, b"late", settings=settings) as late,
                pytest.raises(RemoteProtocolError),
            ):
                await blocking(late.poll, WAIT_S)
            await is_served(opened, inbox, early, b"early")
            assert inbox.messages.empty()


@pytest.mark.asyncio
@pytest.mark.parametrize("begin", ["while it lasts", "after it is over"])
async def test_a_replayed_session_is_worthless(begin: str) -> None:
    """The recorded messages of a worker are rejected when they are sent again: each session has its own keys."""
    keys = new_keys()
    async with router(keys=keys) as (opened, inbox):
        host, _, port = opened.endpoint.removeprefix("tcp://").rpartition(":")
        overheard: list[bytes] = []

        async def overhear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward = await asyncio.open_connection(host, int(port))

            async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, record: bool) -> None:
                while chunk := await source.read(65536):
                    if record:
                        overheard.append(chunk)
                    sink.write(chunk)
                sink.close()

            await asyncio.gather(pass_on(reader, onward[1], True), pass_on(onward[0], writer, False))

        async def replay() -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(ConnectionError):
                for chunk in overheard:  # each in its turn: on all at once the router would hang up
                    writer.write(chunk)
                    with contextlib.suppress(TimeoutError):
                        while await asyncio.wait_for(reader.read(65536), 0.3):
                            pass
            writer.close()

        between = await asyncio.start_server(overhear, "127.0.0.1", 0)
        async with between:
            through = f"tcp://127.0.0.1:{between.sockets[0].getsockname()[1]}"
            with Dealer(through, identity=b"honest", keys=keys.client) as worker:
                await is_served(opened, inbox, worker, b"honest")
                if begin == "while it lasts":
                    await replay()
                    await is_served(opened, inbox, worker, b"honest")
            if begin == "after it is over":
                await is_gone(opened, b"honest")
                await replay()
        assert inbox.messages.empty()
        assert len(b"".join(overheard)) > 200  # a handshake and a message


def two_clients() -> tuple[ClusterKeys, ClusterKeys]:
    """Two clients that the server accepts."""
    first = new_keys()
    second = other_keys(first)
    assert first.server is not None
    both = frozenset({first.client.public, second.client.public})
    server = ServerKeys(first.server.public, first.server.secret, both)
    return ClusterKeys(first.client, server), ClusterKeys(second.client, server)


@pytest.mark.asyncio
async def test_a_valid_key_with_another_peers_identity() -> None:
    keys, rogue_keys = two_clients()
    async with router(keys=keys) as (opened, inbox):
        with dealer(opened, keys, b"w0") as worker, dealer(opened, keys, b"w1") as other:
            await is_served(opened, inbox, worker, b"w0")
            # While the owner is connected, and after it is gone.
            with raw(opened.endpoint, b"w0", rogue_keys) as rogue:
                watch = rogue.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                assert await blocking(watch.poll, WAIT_S * 1000)
                watch.close()
                rogue.send(first_frame(log("evil")))
                for _ in range(20):
                    await is_served(opened, inbox, worker, b"w0")
            await blocking(worker.close)
            await is_gone(opened, b"w0")
            with dealer(opened, rogue_keys, b"w0") as impostor:
                await blocking(impostor.send, log("evil"))
                assert "another key" in await inbox.reject("another key")
                with pytest.raises(ConnectionLost):
                    await blocking(impostor.recv)
            await is_served(opened, inbox, other, b"w1")
            assert inbox.messages.empty()


GARBAGE: dict[str, list[bytes]] = {
    # what the reason says -> frames
    "malformed message: Expected `array`, got `object`": [seal(b"\xde\xad\xbe\xef")],
    "malformed message: Input data was truncated": [seal(b"")],
    "a first frame of 0 bytes": [b""],
    "a first frame of 7 bytes": [bytes(7)],
    "a head of 4294967295 bytes": [START.pack(2**32 - 1, 0) + pack(Bind(1))],
    "and 4294967295 references": [START.pack(2, 2**32 - 1) + bytes(100)],
    "malformed message: Invalid value 99": [seal(b"\x92\x63\x01")],
    "Expected `array` of at least length 6, got 2": [seal(b"\x92\x06\x01")],
    "malformed message": [seal(b"\xdd\xff\xff\xff\xff")],
    "a head of 1500 bytes": [seal(bytes(1500))],
    "a first frame of 4000 bytes": [bytes(4000)],
    "a header of 2500 bytes": [seal(pack(Bind(1)), bytes(2500))],
    "frames without a header": [first_frame(Bind(1)), bytes(100)],
    "more than 10 frames": [first_frame(Bind(1)), *[b""] * 20],
    "more than 8000 bytes": [first_frame(Bind(1), b"x"), bytes(5000), bytes(5000)],
}
LIMITS = MessageLimits(
    head_bytes_max=1000, header_bytes_max=2000, frame_bytes_max=6000, frames_max=10, message_bytes_max=8000
)


@pytest.mark.asyncio
@pytest.mark.parametrize(("words", "frames"), GARBAGE.items(), ids=GARBAGE.keys())
@pytest.mark.parametrize("over", ["ipc", "tcp"])
async def test_garbage_costs_its_sender_the_connection(words: str, frames: list[bytes], over: str) -> None:
    keys = new_keys() if over == "tcp" else None
    async with router(keys=keys, limits=LIMITS) as (opened, inbox):
        with dealer(opened, keys, b"honest") as worker:
            await is_served(opened, inbox, worker, b"honest")
            with raw(opened.endpoint, b"rogue", keys) as rogue:
                watch = rogue.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                rogue.send_multipart(frames)
                reason = await inbox.reject("peer rogue sent")
                assert words in reason
                assert inbox.lost.get_nowait() == (b"rogue", reason)
                assert rogue.recv() == first_frame(Refuse(reason))
                rogue.send(first_frame(log("evil")))
                assert await blocking(watch.poll, WAIT_S * 1000), "the connection was not cut"
                watch.close()
            await is_served(opened, inbox, worker, b"honest")
            assert inbox.messages.empty()
            assert inbox.lost.empty()


@pytest.mark.asyncio
async def test_a_frame_beyond_the_limit_is_not_even_received() -> None:
    async with router(limits=LIMITS) as (opened, inbox):
        with dealer(opened, name=b"honest") as worker, raw(opened.endpoint, b"rogue") as rogue:
            watch = rogue.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            rogue.send_multipart([first_frame(Bind(1), b"x"), bytes(LIMITS.frame_bytes_max + 1)])
            assert await blocking(watch.poll, WAIT_S * 1000)
            watch.close()
            await is_served(opened, inbox, worker, b"honest")
            assert inbox.messages.empty()


@pytest.mark.asyncio
async def test_a_bomb_of_empty_frames_is_read_but_not_collected() -> None:
    count, turns, done = 100_000, 0, asyncio.Event()

    async def take_turns() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    async with router() as (opened, inbox):
        with dealer(opened, name=b"honest") as worker, raw(opened.endpoint, b"rogue") as rogue:
            await blocking(rogue.send_multipart, [first_frame(Bind(1)), *[b""] * count])
            tracemalloc.start()
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(take_turns())
                    assert "frames" in await inbox.reject("peer rogue sent")
                    done.set()
                assert tracemalloc.get_traced_memory()[1] < 40_000_000
            finally:
                tracemalloc.stop()
            assert turns > count / SocketSettings().frames_per_wake_up / 2
            await is_served(opened, inbox, worker, b"honest")
            assert inbox.messages.empty()


@pytest.mark.asyncio
@pytest.mark.parametrize("over", ["ipc", "tcp"])
async def test_bytes_that_are_no_zeromq_at_all(over: str) -> None:
    keys = new_keys() if over == "tcp" else None
    noise = np.random.default_rng(0)
    async with router(keys=keys) as (opened, inbox):
        with dealer(opened, keys, b"honest") as worker:
            await is_served(opened, inbox, worker, b"honest")
            for _ in range(50):
                kind = socket.AF_INET if over == "tcp" else socket.AF_UNIX
                with socket.socket(kind, socket.SOCK_STREAM) as rogue:
                    host, _, port = opened.endpoint.removeprefix("tcp://").rpartition(":")
                    rogue.connect(
                        (host, int(port)) if over == "tcp" else opened.endpoint.removeprefix("ipc://")
                    )
                    rogue.sendall(noise.bytes(int(noise.integers(1, 300))))
            await is_served(opened, inbox, worker, b"honest")
            assert inbox.messages.empty()


@pytest.mark.asyncio
async def test_ten_thousand_messages_of_noise_on_a_live_socket() -> None:
    noise = np.random.default_rng(1)
    honest = first_frame(log("evil"))
    settings = SocketSettings(peers_max=64)
    # The limits are as in production: what may look honest is read as honest.
    async with router(settings=settings) as (opened, inbox):
        with dealer(opened, name=b"honest") as worker:
            await is_served(opened, inbox, worker, b"honest")
            with raw(opened.endpoint, b"rogue") as rogue:  # of those below, none may come in before it goes
                rogue.send(b"noise")
                await inbox.reject("peer rogue sent")
            for round_ in range(100):
                with raw(opened.endpoint, f"rogue{round_}".encode()) as rogue:
                    for _ in range(100):
                        damaged = bytearray(honest)
                        damaged[int(noise.integers(len(damaged)))] ^= 1 << int(noise.integers(8))
                        try:
                            rogue.send_multipart([bytes(damaged)] * int(noise.integers(1, 4)), zmq.DONTWAIT)
                        except zmq.Again:
                            break
                    await asyncio.sleep(0)
            while not inbox.messages.empty():
                who, _, _ = inbox.messages.get_nowait()
                assert who.startswith(b"rogue")
            await blocking(worker.send, log("honest"))
            async with asyncio.timeout(WAIT_S):
                while (await inbox.get())[:2] != (b"honest", log("honest")):
                    pass


@pytest.mark.asyncio
async def test_identities_beyond_the_limit_are_rejected_but_dropped_ones_make_room() -> None:
    async with router(settings=SocketSettings(peers_max=2)) as (opened, inbox):
        with dealer(opened, name=b"w0") as first, dealer(opened, name=b"w1") as second:
            await is_served(opened, inbox, first, b"w0")
            await is_served(opened, inbox, second, b"w1")
            opened.keep(b"w0")
            opened.keep(b"w1")
            with dealer(opened, name=b"w2") as third:
                await blocking(third.send, log())
                assert "more than 2 peers" in await inbox.reject("peers")
            opened.drop(b"w0")
            with dealer(opened, name=b"w3") as fourth:
                await is_served(opened, inbox, fourth, b"w3")
            await is_served(opened, inbox, second, b"w1")


def test_no_secret_is_shown() -> None:
    keys = new_keys()
    assert keys.server is not None
    text = repr(keys)
    assert keys.client.secret.decode() not in text
    assert keys.server.secret.decode() not in text
