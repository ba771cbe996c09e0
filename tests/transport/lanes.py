"""A Router with lanes, and raw ends of them, for tests."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from pipedist.transport.lane.client import LaneEnd
from pipedist.transport.lane.framing import frame_up
from pipedist.transport.shared_memory import notices, segments
from pipedist.transport.shared_memory.borrowed import LEDGER_BYTES
from pipedist.transport.zeromq import Dealer, Router

from .memory import SMALL
from .sockets import WAIT_S, Inbox, identity, router


@asynccontextmanager
async def lanes(**options: Any) -> AsyncIterator[tuple[Router, Inbox]]:
    async with router(shared_memory=SMALL, **options) as opened:
        yield opened


def laned(opened: Router, name: bytes | None = None, **options: Any) -> Dealer:
    """A Dealer, which has a lane."""
    found = Dealer(opened.endpoint, identity=name or identity(), keys=None, **options)
    assert isinstance(found._road, LaneEnd)
    return found


class RawLane:
    """A link and our end of a lane, which then does as it likes."""

    def __init__(self, opened: Router) -> None:
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.connect(opened.endpoint.removeprefix("ipc://") + ".mem")
        self.end, self.theirs = socket.socketpair()
        self.end.settimeout(WAIT_S)

    def hello(self, name: bytes, handed: int | None = None) -> None:
        """Greet; `handed` stands where the Router's end of the lane should."""
        _, ledger = segments.create("raw", LEDGER_BYTES)
        lane = self.theirs.fileno() if handed is None else handed
        socket.send_fds(self.link, [notices.HELLO + name], [ledger, lane])
        os.close(ledger)

    def say(self, *frames: bytes) -> None:
        self.end.sendall(stream(frames))

    def heard(self) -> bytes:
        """Everything that comes until the lane is cut."""
        self.theirs.close()
        data = b""
        try:
            while more := self.end.recv(65536):
                data += more
        except ConnectionResetError:
            pass  # cut with something unread in it
        return data

    def close(self) -> None:
        for end in (self.link, self.end, self.theirs):
            end.close()


def stream(frames: Sequence[bytes]) -> bytes:
    return b"".join(frame_up(frames))


@contextmanager
def raw_lane(opened: Router, name: bytes = b"rogue") -> Iterator[RawLane]:
    peer = RawLane(opened)
    try:
        peer.hello(name)
        yield peer
    finally:
        peer.close()
