"""A peer that breaks the rules of shared memory loses its connection; other peers are not affected."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import zmq

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.codec import decode, encode
from pipedist.protocol.limits import KIB, LIMITS, MIB, MessageLimits
from pipedist.protocol.messages import LogLine, Results
from pipedist.protocol.wire import START, Reference, pack, seal, unseal, weave
from pipedist.transport.router import Router
from pipedist.transport.shared_memory import link as links
from pipedist.transport.shared_memory import pool
from pipedist.transport.shared_memory.borrowed import LEDGER_BYTES

from .memory import SMALL, block, is_shared, until
from .sockets import Inbox, blocking, dealer, descriptors, first_frame, log, router
from .test_rogues import raw

SLOT = 64 * KIB
ALL_SEALS = 0x17


def memory(size_bytes: int = SLOT, seals: int = ALL_SEALS) -> int:
    descriptor = os.memfd_create("rogue", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, 1033, seals)
    return descriptor


class Rogue:
    """A process with a good link and a good connection, which then does as it likes."""

    def __init__(self, opened: Router, name: bytes = b"rogue") -> None:
        self.name = name
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.connect(opened.endpoint.removeprefix("ipc://") + ".mem")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, name)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(opened.endpoint)

    def hello(self) -> None:
        self.greeting(memory(LEDGER_BYTES))

    def greeting(self, *handed: int) -> None:
        self.packet(links.HELLO + self.name, *handed)

    def packet(self, data: bytes, *handed: int) -> None:
        socket.send_fds(self.link, [data], handed)
        for descriptor in handed:
            os.close(descriptor)

    def segment(self, descriptor: int, number: int = 0, slots: int = 1, slot_bytes: int = SLOT) -> None:
        body = links.SEGMENT_FORM.pack(number, number, slots, slot_bytes)
        self.packet(links.SEGMENT + body, descriptor)

    def message(self, *references: Reference, header: bytes = b"h", frames: Sequence[bytes] = ()) -> None:
        first = seal(pack(Results(1, 0, 1, 5)), header, references)
        self.say([first, *frames])

    def say(self, frames: Sequence[bytes]) -> None:
        self.socket.send_multipart(frames)

    def close(self) -> None:
        self.link.close()
        self.socket.close()
        self.context.term()


@asynccontextmanager
async def rogue() -> AsyncIterator[tuple[Router, Inbox, Rogue]]:
    async with router(shared_memory=SMALL) as (opened, inbox):
        it = Rogue(opened)
        try:
            yield opened, inbox, it
        finally:
            it.close()


async def honest_peer_works(opened: Router, inbox: Inbox) -> None:
    with dealer(opened, name=b"honest") as worker:
        worker.send(LogLine("", 0, 0, ""))
        assert (await inbox.get())[0] == b"honest"
        listener = opened._listener
        assert listener is not None
        await until(lambda: b"honest" in listener._links)
        await blocking(lambda: worker.send(Results(1, 0, 1, 5), encode(block(3))))
        who, _, frames = await inbox.get()
        assert who == b"honest"
        assert is_shared(decode(frames))


def unknown_segment(it: Rogue) -> None:
    it.message(Reference(1, 9, 0, 1, SLOT))


def slot_beyond_the_end(it: Rogue) -> None:
    it.segment(memory())
    it.message(Reference(1, 0, 1, 1, SLOT))


def frame_beyond_the_end(it: Rogue) -> None:
    it.segment(memory())
    it.message(Reference(1, 0, 0, 1, SLOT + 1))


def empty_frame(it: Rogue) -> None:
    it.segment(memory())
    it.message(Reference(1, 0, 0, 1, 0))


def slot_twice(it: Rogue) -> None:
    it.segment(memory())
    it.message(Reference(1, 0, 0, 1, SLOT), Reference(2, 0, 0, 2, SLOT))


def place_beyond_the_payload(it: Rogue) -> None:
    it.segment(memory())
    it.message(Reference(3, 0, 0, 1, SLOT))


def places_out_of_order(it: Rogue) -> None:
    it.segment(memory(2 * SLOT), slots=2)
    it.message(Reference(2, 0, 0, 1, SLOT), Reference(1, 0, 1, 2, SLOT), frames=[b"x"])


def retired_segment(it: Rogue) -> None:
    it.segment(memory())
    it.packet(links.RETIRED + links.SERIAL.pack(0))
    it.message(Reference(1, 0, 0, 1, SLOT))


def in_the_headers_place(it: Rogue) -> None:
    it.segment(memory())
    it.message(Reference(0, 0, 0, 1, SLOT))


def no_header(it: Rogue) -> None:
    it.segment(memory())
    it.message(Reference(1, 0, 0, 1, SLOT), header=b"")


def cut_off_table(it: Rogue) -> None:
    it.say([START.pack(0, 1) + bytes(23)])


def table_that_claims_more(it: Rogue) -> None:
    it.say([START.pack(0, 2**32 - 1) + bytes(48)])


def unsealed_memory(it: Rogue) -> None:
    it.segment(memory(seals=0))


def memory_that_may_shrink(it: Rogue) -> None:
    it.segment(memory(seals=ALL_SEALS & ~0x2))


def memory_that_others_may_write(it: Rogue) -> None:
    it.segment(memory(seals=ALL_SEALS & ~0x10))


def smaller_memory_than_announced(it: Rogue) -> None:
    it.segment(memory(), slots=2)


def a_file(it: Rogue) -> None:
    it.segment(os.open("/dev/zero", os.O_RDONLY))


def a_pipe(it: Rogue) -> None:
    readable, writable = os.pipe()
    os.close(writable)
    it.segment(readable)


def too_much_memory(it: Rogue) -> None:
    it.segment(memory(16 * MIB), slots=256)


def absurd_numbers(it: Rogue) -> None:
    it.segment(memory(), number=2**32 - 1, slots=2**32 - 1, slot_bytes=2**64 - 1)


def a_number_twice(it: Rogue) -> None:
    it.segment(memory())
    it.segment(memory())


def segment_without_memory(it: Rogue) -> None:
    it.packet(links.SEGMENT + links.SEGMENT_FORM.pack(0, 0, 1, SLOT))


def two_descriptors(it: Rogue) -> None:
    it.packet(links.SEGMENT + links.SEGMENT_FORM.pack(0, 0, 1, SLOT), memory(), memory())


def many_descriptors(it: Rogue) -> None:
    it.packet(links.SEGMENT + links.SEGMENT_FORM.pack(0, 0, 1, SLOT), *(memory() for _ in range(100)))


def an_endless_packet(it: Rogue) -> None:
    it.packet(links.RETIRED + bytes(10_000))


def an_unknown_packet(it: Rogue) -> None:
    it.packet(b"?")


def a_second_greeting(it: Rogue) -> None:
    it.hello()


def retiring_what_is_not_there(it: Rogue) -> None:
    it.packet(links.RETIRED + links.SERIAL.pack(5))


KINDS: list[Callable[[Rogue], None]] = [
    unknown_segment,
    slot_beyond_the_end,
    frame_beyond_the_end,
    empty_frame,
    slot_twice,
    place_beyond_the_payload,
    places_out_of_order,
    retired_segment,
    in_the_headers_place,
    no_header,
    cut_off_table,
    table_that_claims_more,
    unsealed_memory,
    memory_that_may_shrink,
    memory_that_others_may_write,
    smaller_memory_than_announced,
    a_file,
    a_pipe,
    too_much_memory,
    absurd_numbers,
    a_number_twice,
    segment_without_memory,
    two_descriptors,
    many_descriptors,
    an_endless_packet,
    an_unknown_packet,
    a_second_greeting,
    retiring_what_is_not_there,
]


@pytest.mark.asyncio
@pytest.mark.parametrize("does", KINDS, ids=lambda does: does.__name__)
async def test_a_rogue_costs_itself_the_connection(does: Callable[[Rogue], None]) -> None:
    before = descriptors()
    async with rogue() as (opened, inbox, it):
        it.hello()
        it.say([first_frame(log())])
        assert (await inbox.get())[0] == it.name
        listener = opened._listener
        assert listener is not None
        assert it.name in listener._links
        does(it)
        reason = await inbox.reject("rogue")
        assert inbox.lost.get_nowait()[0] == it.name, reason
        assert inbox.messages.empty()
        assert it.name not in listener._links
        assert not opened.send(it.name, LogLine("", 0, 0, ""))
        await honest_peer_works(opened, inbox)
    await until(lambda: descriptors() <= before + 1)  # what pyzmq keeps for the process


@pytest.mark.asyncio
async def test_a_rogue_whose_greeting_is_wrong_gets_no_memory() -> None:
    async with rogue() as (opened, inbox, it):
        it.greeting(memory(LEDGER_BYTES, seals=0))
        await inbox.reject("seals")
        await honest_peer_works(opened, inbox)


@pytest.mark.asyncio
async def test_a_link_can_not_be_taken_over() -> None:
    async with rogue() as (opened, inbox, it):
        it.hello()
        listener = opened._listener
        assert listener is not None
        await until(lambda: it.name in listener._links)
        first = listener._links[it.name]
        other = Rogue(opened)
        other.hello()
        await inbox.reject("identity of another")
        assert listener._links.get(it.name) is first
        assert first.is_open
        other.close()


@pytest.mark.asyncio
async def test_a_retired_slot_is_gone_before_the_loop_reads_the_link() -> None:
    async with rogue() as (opened, inbox, it):
        it.hello()
        listener = opened._listener
        assert listener is not None
        await until(lambda: it.name in listener._links)
        it.segment(memory())
        it.message(Reference(1, 0, 0, 1, SLOT))
        await inbox.get()
        asyncio.get_running_loop().remove_reader(listener._links[it.name].connection)
        it.packet(links.RETIRED + links.SERIAL.pack(0))
        it.message(Reference(1, 0, 0, 2, SLOT))
        await inbox.reject("that it did not lend")


@pytest.mark.asyncio
async def test_references_without_a_link_or_a_router_that_shares() -> None:
    async with router(shared_memory=SMALL) as (opened, inbox):
        first = seal(pack(Results(1, 0, 1, 5)), b"h", [Reference(1, 0, 0, 1, SLOT)])
        with raw(opened.endpoint, b"without") as stranger:
            stranger.send(first)
            await inbox.reject("does not share")
    async with router() as (opened, inbox):
        with dealer(opened) as worker:
            worker._socket.send(first)
            await inbox.reject("which is off")
            worker2 = dealer(opened, name=b"w2")
            worker2.send(LogLine("", 0, 0, ""))
            await inbox.get()
            opened._server._socket.send_multipart([b"w2", first])
            with pytest.raises(RemoteProtocolError, match="does not share"):
                await blocking(worker2.recv)
            worker2.close()


def test_a_sealed_segment_can_neither_shrink_nor_be_written_by_others() -> None:
    ours, descriptor = pool.create_memory("test", SLOT)
    try:
        ours[:4] = b"here"
        theirs = pool.map_received(descriptor, SLOT)
        assert theirs[:4] == b"here"
        ours[:4] = b"then"  # our own map stays writable: slots are used again
        assert theirs[:4] == b"then"
        with pytest.raises(TypeError):
            theirs[:4] = b"nope"
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, SLOT)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        with pytest.raises(PermissionError):
            os.write(descriptor, b"nope")
        assert not np.frombuffer(theirs, np.uint8).flags.writeable
    finally:
        os.close(descriptor)


def test_the_bytes_of_shared_frames_count() -> None:
    table = [Reference(1, 0, 0, 1, 100), Reference(2, 0, 1, 2, 100)]
    head, header, references = unseal(memoryview(seal(b"head", b"header", table)), LIMITS)
    assert (bytes(head), bytes(header), references) == (b"head", b"header", table)
    frames = [header, memoryview(b"last")]
    shared = [memoryview(bytes(100))] * 2
    weave(frames, references, shared, LIMITS)
    assert [frame.nbytes for frame in frames] == [6, 100, 100, 4]
    for limits in (MessageLimits(message_bytes_max=209), MessageLimits(frames_max=3)):
        with pytest.raises(RemoteProtocolError, match="with shared ones"):
            weave([memoryview(b"header"), memoryview(b"last")], references, shared, limits)
