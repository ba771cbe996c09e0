from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from pipedist.transport.zeromq.pump import Pump


@contextmanager
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://pump")
        theirs.connect("inproc://pump")
        yield ours, theirs


@pytest.mark.asyncio
async def test_messages_that_arrive_after_the_edge_is_consumed_are_seen() -> None:
    heard: list[tuple[bytes, bool]] = []
    with pair() as (ours, theirs):
        pump = Pump(ours, lambda frame, more: heard.append((frame.bytes, more)), frames_per_wake_up=10)
        pump.start()
        for _ in range(10):  # what the connection itself brings is over
            await asyncio.sleep(0)
        theirs.send_multipart([b"a", b"b"])
        while not ours.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # as a send may do, on its way
            pass
        for _ in range(10):
            await asyncio.sleep(0)
        assert heard == []
        pump.look_again()
        pump.look_again()
        await asyncio.sleep(0)
        assert heard == [(b"a", True), (b"b", False)]
        pump.stop()


@pytest.mark.asyncio
async def test_a_message_of_more_frames_than_a_turn_is_read_in_several() -> None:
    turns: list[int] = []
    done = asyncio.Event()

    def take(frame: zmq.Frame, more: bool) -> None:
        turns.append(turn)
        if not more:
            done.set()

    turn = 0
    with pair() as (ours, theirs):
        pump = Pump(ours, take, frames_per_wake_up=3)
        theirs.send_multipart([b""] * 10)
        pump.start()
        while not done.is_set():
            turn += 1
            await asyncio.sleep(0)
        assert len(turns) == 10
        assert max(map(turns.count, turns)) <= 2 * 3  # once due, and once woken up
        pump.stop()


@pytest.mark.asyncio
async def test_a_handler_that_sends_or_fails_does_not_end_the_reading() -> None:
    heard: list[bytes] = []
    done = asyncio.Event()
    failed: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))
    with pair() as (ours, theirs):

        def take(frame: zmq.Frame, more: bool) -> None:
            heard.append(frame.bytes)
            ours.send(b"answer")
            pump.look_again()
            if frame.bytes == b"bad":
                raise KeyError
            if frame.bytes == b"last":
                done.set()

        pump = Pump(ours, take, frames_per_wake_up=2)
        pump.start()
        for word in (b"one", b"bad", b"two", b"bad", b"last"):
            theirs.send(word)
        await asyncio.wait_for(done.wait(), 60)
        assert heard == [b"one", b"bad", b"two", b"bad", b"last"]
        assert [type(error) for error in failed] == [KeyError, KeyError]
        pump.stop()
