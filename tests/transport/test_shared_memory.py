"""Frames in shared memory, between real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from typing import Any

import numpy as np
import pytest

from pipedist.errors import UsageError
from pipedist.protocol.codec import decode, encode
from pipedist.protocol.limits import GIB, KIB, MIB
from pipedist.protocol.messages import Assign, Bind, Cancel, LogLine, Results
from pipedist.transport.config import SharedMemory, SocketSettings

from .memory import SMALL, block, children, is_shared, lent_bytes, memory_left, peers, pool_of, until
from .sockets import WAIT_S, blocking, dealer, descriptors, router

TREE = {
    "large": np.arange(100_000.0),
    "small": np.arange(5),
    "many": [np.full((100, 100), i, np.float64) for i in range(8)],
    "text": "x" * 100_000,
    "odd": np.arange(70_001, dtype=np.uint8)[1:],
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(np.array_equal(a, b))


@pytest.mark.asyncio
@pytest.mark.parametrize("shared_memory", [SMALL, None], ids=["shared", "frames"])
async def test_both_transports_carry_the_same_tree_both_ways(shared_memory: SharedMemory | None) -> None:
    async with router(shared_memory=shared_memory) as (opened, inbox):
        with dealer(opened, name=b"w0") as worker:
            worker.send(LogLine("", 0, 0, ""))
            await inbox.get()
            for _ in range(2):  # with the second message, slots are used again
                assert opened.send(b"w0", Bind(7), encode(TREE))
                message, frames = await blocking(worker.recv)
                assert message == Bind(7)
                there = decode(frames)
                await blocking(lambda there=there: worker.send(Results(1, 0, 1, 5), encode(there)))
                _, message, frames = await inbox.get()
                assert message == Results(1, 0, 1, 5)
                back = decode(frames)
                for tree in (there, back):
                    assert equal(tree, TREE)
                    assert is_shared(tree["large"]) == is_shared(tree["many"][3]) == bool(shared_memory)
                    assert not is_shared(tree["small"])
                    assert not tree["large"].flags.writeable
                    assert tree["large"].flags.aligned
                del there, back, tree, frames
                gc.collect()
        assert inbox.rejects.empty()


@pytest.mark.asyncio
async def test_views_stay_as_they_were_however_many_batches_pass() -> None:
    rounds = 2000
    async with peers() as (peer,):
        ours = []
        for number in range(rounds):
            keep = number % 100 == 0
            back = await peer.double(block(number), keep=keep)
            if keep:
                ours.append((number, back[3:5]))  # a view of a view is enough
        assert len(ours) == 20
        assert all(is_shared(view) and (view == 2 * number).all() for number, view in ours)
        assert await peer.sums_of_kept() == [number * 8192.0 for number, _ in ours]
        # Otherwise the same few slots were used all the time.
        assert pool_of(peer.opened).size_bytes <= 4 * MIB
        assert await peer.faults() == ["read-only"] * 20


@pytest.mark.asyncio
async def test_slots_come_back_with_the_last_view() -> None:
    async with peers() as (peer,):
        pool = pool_of(peer.opened)
        for number in range(5):
            await peer.double(block(number), keep=True)
        assert lent_bytes(pool) == 5 * 64 * KIB
        peer.send(Cancel(1))
        await until(lambda: lent_bytes(pool) == 0)


@pytest.mark.asyncio
async def test_without_a_free_slot_frames_go_through_the_socket() -> None:
    tiny = SharedMemory(lent_bytes_max=1 * MIB, borrowed_bytes_max=1 * MIB)
    async with peers(shared_memory=tiny) as (peer,):
        ours = [await peer.double(block(number), keep=True) for number in range(40)]
        assert lent_bytes(pool_of(peer.opened)) == 1 * MIB
        assert [is_shared(value) for value in ours] == [True] * 16 + [False] * 24
        assert all((value == 2 * number).all() for number, value in enumerate(ours))
        assert await peer.sums_of_kept() == [number * 8192.0 for number in range(40)]
        peer.send(Cancel(1))
        ours.clear()
        await until(lambda: lent_bytes(pool_of(peer.opened)) == 0)
        assert is_shared(await peer.double(block(1)))


@pytest.mark.asyncio
async def test_a_full_pool_makes_room_for_other_sizes() -> None:
    async with peers(shared_memory=SharedMemory(4 * MIB, 4 * MIB)) as (peer,):
        before = (0, 0)
        for turn in range(6):
            for size_bytes in (1 * MIB, 256 * KIB, 3 * MIB, 64 * KIB):
                kept = [await peer.double(block(i, size_bytes)) for i in range(4 * MIB // size_bytes)]
                assert all(map(is_shared, kept))
                del kept
            pool = pool_of(peer.opened)
            assert pool.size_bytes <= 4 * MIB
            now = (descriptors(), (await peer.figures())[0])
            if turn == 1:
                before = now
        # A slot or two more may have been needed where one was given back late, never one a batch.
        assert now[0] - before[0] <= 8
        assert now[1] - before[1] <= 8


@pytest.mark.asyncio
async def test_five_hundred_batches_leave_memory_and_descriptors_as_they_were() -> None:
    rounds, size_bytes = 500, 1 * MIB
    async with peers(shared_memory=SharedMemory()) as (peer,):
        figures = []
        for number in range(rounds):
            back = await peer.double(block(number, size_bytes))
            assert back[-1] == 2 * number
            del back
            if number % 100 == 50:
                theirs = await peer.figures()
                figures.append((descriptors(), theirs[0], theirs[1]))
        for ours, theirs, _ in figures:  # a slot or two more may have been needed, never one a batch
            assert ours - figures[0][0] <= 8
            assert theirs - figures[0][1] <= 8
        assert figures[-1][2] - figures[0][2] < 4 * MIB
        assert pool_of(peer.opened).size_bytes <= 8 * MIB


# --- the ends of processes ------------------------------------------------------------------


@pytest.mark.asyncio
async def test_slots_borrowed_by_a_killed_process_come_back_and_its_own_stay() -> None:
    gc.collect()  # what earlier tests have left does not go meanwhile
    before, left = descriptors(), memory_left()
    async with peers(2, settings=SocketSettings(linger_s=0.01)) as (victim, other):
        kept = [await victim.double(block(number), keep=True) for number in range(10)]
        assert lent_bytes(pool_of(victim.opened)) == 10 * 64 * KIB
        await victim.kill()
        await until(lambda: lent_bytes(pool_of(victim.opened)) == 0)
        for number in range(200):
            assert is_shared(await other.double(block(number)))
        assert all((array == 2 * number).all() for number, array in enumerate(kept))
    assert all((array == 2 * number).all() for number, array in enumerate(kept))
    del kept
    gc.collect()
    await until(lambda: descriptors() <= before)
    assert memory_left() == left


@pytest.mark.asyncio
async def test_the_end_of_a_process_is_seen_though_its_child_holds_the_link() -> None:
    async with peers() as (peer,):
        await peer.double(block(1), keep=True)
        peer.send(Cancel(5))
        await peer.double(block(2))
        (child,) = children(peer.process.pid)
        try:
            await peer.kill()
            await until(lambda: lent_bytes(pool_of(peer.opened)) == 0)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.asyncio
async def test_a_forked_child_gives_nothing_back() -> None:
    async with peers() as (peer,):
        await peer.double(block(7), keep=True)
        peer.send(Cancel(4))
        for number in range(50):
            await peer.double(block(number))
        assert await peer.sums_of_kept() == [7 * 8192.0]


@pytest.mark.asyncio
async def test_a_message_sent_before_a_sudden_end_can_still_be_read() -> None:
    async with peers(settings=SocketSettings(linger_s=WAIT_S)) as (peer,):
        await peer.double(block(1))
        peer.send(Assign(0, 0, 0, 1, 0), block(21))
        _, _, frames = await peer.inbox.get()
        del frames
        peer.send(Assign(0, 0, 0, 1, 0), block(21))
        await peer.kill()
        listener = peer.opened._listener
        assert listener is not None
        await until(lambda: not listener._members)
        # Its last words may have left in time, and be read after its end was seen.
        while not peer.inbox.messages.empty():
            _, _, frames = peer.inbox.messages.get_nowait()
            assert (decode(frames) == 42).all()
        assert peer.inbox.rejects.empty()
        assert listener.frames(peer.identity, []) == []


@pytest.mark.asyncio
async def test_a_process_that_wakes_during_a_write_does_no_harm() -> None:
    async with peers(2) as (sleeper, successor):
        of_sleeper = [await sleeper.double(block(number), keep=True) for number in range(10)]
        sleeper.send(Cancel(3))
        sleeper.send(Assign(0, 0, 0, 1, 0), block(500))
        await sleeper.is_stopped()
        sleeper.opened.drop(sleeper.identity)  # the scheduler has fenced it
        ours = []
        for number in range(300):
            value = await successor.double(block(number), keep=number % 50 == 0)
            ours += [value] * (number % 50 == 0)
        sleeper.signal(signal.SIGCONT)
        for number in range(300):
            await successor.double(block(1000 + number))
        assert successor.inbox.messages.empty()  # nothing of the sleeper's is heard
        assert all((array == 2 * number).all() for number, array in enumerate(of_sleeper))
        assert all((array == 100 * index).all() for index, array in enumerate(ours))
        assert await successor.sums_of_kept() == [number * 8192.0 for number in range(0, 300, 50)]


@pytest.mark.asyncio
async def test_slots_that_a_stopped_process_reads_are_not_written_to() -> None:
    async with peers(2) as (sleeper, other):
        for number in range(10):
            await sleeper.double(block(number), keep=True)
        sleeper.signal(signal.SIGSTOP)
        await sleeper.is_stopped()
        for number in range(300):
            await other.double(block(1000 + number))
        sleeper.signal(signal.SIGCONT)
        assert await sleeper.sums_of_kept() == [number * 8192.0 for number in range(10)]


@pytest.mark.asyncio
async def test_a_closed_router_leaves_readers_their_frames() -> None:
    left = memory_left()
    async with router(shared_memory=SMALL) as (opened, inbox):
        worker = dealer(opened, name=b"w0")
        worker.send(LogLine("", 0, 0, ""))
        await inbox.get()
        listener = opened._listener
        assert listener is not None
        await until(lambda: b"w0" in listener._links)
        assert opened.send(b"w0", Bind(1), encode(block(5)))
    with worker:
        _, frames = await blocking(worker.recv)
        array = decode(frames)
    assert is_shared(array)
    assert (array == 5).all()
    del array, frames
    gc.collect()
    await until(lambda: memory_left() == left)  # the thread that received them may still hold them


# --- settings -------------------------------------------------------------------------------


def test_how_much_a_cluster_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEDIST_SHARED_MEMORY", raising=False)
    found = SharedMemory.of_cluster(4)
    assert found is not None
    assert found.borrowed_bytes_max * 4 == found.lent_bytes_max <= GIB // 2
    monkeypatch.setenv("PIPEDIST_SHARED_MEMORY", "1")
    assert SharedMemory.of_cluster(4) == found
    monkeypatch.setenv("PIPEDIST_SHARED_MEMORY", "0")
    assert SharedMemory.of_cluster(4) is None
    monkeypatch.setenv("PIPEDIST_SHARED_MEMORY", "yes")
    with pytest.raises(UsageError, match="PIPEDIST_SHARED_MEMORY='yes': expected 1, or 0"):
        SharedMemory.of_cluster(4)


@pytest.mark.asyncio
@pytest.mark.parametrize("missing", ["memfd_create", "socket"])
async def test_a_system_without_such_memory_sends_frames(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: object, **_kwargs: object) -> int:
        raise OSError(38, "Function not implemented")

    if missing == "memfd_create":
        monkeypatch.setattr(os, "memfd_create", fails)
    else:
        monkeypatch.setattr("socket.socket.listen", fails)
    before = descriptors()
    async with router(shared_memory=SMALL) as (opened, inbox):
        with dealer(opened, name=b"w0") as worker:
            worker.send(LogLine("", 0, 0, ""), encode(block(3)))
            _, _, frames = await inbox.get()
            assert not is_shared(decode(frames))
            assert opened.send(b"w0", Bind(1), encode(block(4)))
            _, frames = await blocking(worker.recv)
            assert not is_shared(decode(frames))
            assert (decode(frames) == 4).all()
            await asyncio.sleep(0)
        assert inbox.rejects.empty()
    await until(lambda: descriptors() <= before + 1)  # what pyzmq keeps for the process


def test_encoding_keeps_no_array_alive() -> None:
    """A frame's memory is free as soon as it was sent, not when the collector runs."""
    gc.collect()
    gc.disable()
    try:
        array = block(1)
        frames = encode([array, {"x": array}])
        del frames
        assert sys.getrefcount(array) == 2
    finally:
        gc.enable()


# --- the link beside ZeroMQ -----------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_first_message_to_a_peer_is_shared_though_the_loop_has_not_seen_its_link() -> None:
    async with router(shared_memory=SMALL) as (opened, inbox):
        listener = opened._listener
        assert listener is not None
        asyncio.get_running_loop().remove_reader(listener._socket)
        with dealer(opened, name=b"w0") as worker:
            worker.send(LogLine("", 0, 0, ""))
            await inbox.get()
            assert opened.send(b"w0", Bind(1), encode(block(5)))
            _, frames = await blocking(worker.recv)
            assert is_shared(decode(frames))


@pytest.mark.asyncio
async def test_without_descriptors_newcomers_use_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_args: object, **_options: object) -> int:
        raise OSError(24, "Too many open files")

    async with router(shared_memory=SMALL) as (opened, inbox):
        with dealer(opened, name=b"early") as early:
            early.send(LogLine("", 0, 0, ""))
            await inbox.get()
            with monkeypatch.context() as patched:
                patched.setattr("pipedist.transport.shared_memory.listener.Link", none_left)
                with dealer(opened, name=b"refused") as refused:
                    refused.send(LogLine("", 0, 0, ""))
                    assert (await inbox.get())[0] == b"refused"
            for name in (b"early", b"later"):
                worker = early if name == b"early" else dealer(opened, name=name)
                worker.send(LogLine("", 0, 0, ""))
                assert (await inbox.get())[0] == name
                assert opened.send(name, Bind(1), encode(block(5)))
                _, frames = await blocking(worker.recv)
                assert is_shared(decode(frames)) == (name == b"early")
                worker.close()


@pytest.mark.asyncio
async def test_a_stopped_process_delays_no_peer_and_gets_every_message() -> None:
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


@pytest.mark.asyncio
async def test_a_peer_is_gone_when_its_process_ends_though_a_child_holds_the_connection() -> None:
    async with peers(settings=SocketSettings(linger_s=0.05)) as (peer,):
        peer.send(Cancel(5))
        await peer.double(block(2))
        (child,) = children(peer.process.pid)
        try:
            await peer.kill()
            await until(lambda: not peer.opened.send(peer.identity, Bind(1)))
        finally:
            os.kill(child, signal.SIGKILL)
