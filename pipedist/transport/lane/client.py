"""A Dealer's end of its lane: blocking, for one thread."""

from __future__ import annotations

import math
import select
import socket
import time

from pipedist.errors import PipedistError, RemoteProtocolError
from pipedist.transport.client_socket import ConnectionLost
from pipedist.transport.lane.framing import Assembler, frame_up
from pipedist.transport.lane.stream import CHUNK_BYTES, SEND_BUFFER_BYTES, read, write
from pipedist.transport.limits import Limits
from pipedist.transport.shared_memory.joining import join
from pipedist.transport.shared_memory.link import Link

_POLL_S_MAX = 60.0
"""poll(2) counts milliseconds in an int; a longer wait is made of several."""


class LaneEnd:
    """Sends to and receives from one Router on this host.

    Args:
        endpoint: the Router's, for people.
        connection: our end.
        link: over which the other end was handed over.
        limits: sizes.
    """

    def __init__(self, endpoint: str, connection: socket.socket, link: Link, limits: Limits) -> None:
        self.link: Link | None = link
        self._endpoint = endpoint
        self._connection = connection
        self._assembler = Assembler(limits)
        self._frames: list[memoryview] | None = None
        """The next message, where it has come as a whole."""
        self._failure: PipedistError | None = None
        self._is_drained = False
        """All that there was a moment ago was read: the next look, if it does not wait, can be spared."""
        self._is_open = True
        self._fd = connection.fileno()
        self._link_fd = link.connection.fileno()
        self._poller = select.poll()
        self._poller.register(self._fd, select.POLLIN)
        self._poller.register(self._link_fd, select.POLLIN)

    def send(self, parts: list[bytes | memoryview], *, copy: bool, timeout_s: float) -> None:
        """Write a message; see `Dealer.send`. It has left when this returns, so `copy` changes nothing."""
        if self._failure is not None:
            raise self._failure
        left = buffers = frame_up(parts)
        try:
            left = write(self._connection, buffers)
            if left:
                left = self._write_waiting(left, timeout_s)
        except OSError:
            # What has arrived can still be read; the end of it tells what has happened.
            raise self._lost() from None
        except BaseException:  # raised by a handler of a signal
            self._failure = self._lost()
            raise
        if left:
            error = ConnectionLost(f"{self._endpoint} took no message for {timeout_s:g} s")
            if left is not buffers:  # the half of a message: what follows would be taken for its rest
                self._failure = error
            raise error

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message; see `Dealer.poll`."""
        if self._frames is not None:
            return True
        was_drained, self._is_drained = self._is_drained, False
        if was_drained and timeout_s <= 0:
            return False
        left_s, deadline = timeout_s, 0.0
        while True:
            try:
                self._frames = self._assembler.take()
            except RemoteProtocolError as error:
                self._failure = RemoteProtocolError(f"{self._endpoint} sent {error}")
            if self._frames is not None:
                self._is_drained = self._is_drained and self._assembler.is_empty
                return True
            if self._failure is not None:
                raise self._failure
            if left_s > 0:
                deadline = deadline or time.monotonic() + timeout_s
                self._wait(left_s)
                left_s = deadline - time.monotonic()
            if not self._read() and left_s <= 0:
                return False

    def recv(self) -> list[memoryview]:
        """Return the frames of the message that `poll` has found."""
        frames = self._frames
        if frames is None:
            raise ConnectionLost(f"{self._endpoint} sent no message")
        self._frames = None
        return frames

    def close(self, linger_s: float | None = None) -> None:
        """Close; may be called twice. Nothing waits to be sent, so that there is nothing to linger for."""
        if self._is_open:
            self._is_open = False
            self._connection.close()
            self._assembler.release()
            if self.link is not None:
                self.link.close()
                self.link = None  # what it has mapped goes with the last view of it

    def _read(self) -> bool:
        """Read once; return whether anything has come, if only the end."""
        is_filling = bool(self._assembler.unfilled)
        try:
            size_bytes = read(self._connection, self._assembler)
            self._is_drained = not is_filling and size_bytes < CHUNK_BYTES
            if not size_bytes:
                self._failure = self._lost()
        except BlockingIOError:
            return False
        except OSError:  # the Router has closed without reading all
            self._failure = self._lost()
        return True

    def _write_waiting(self, left: list[bytes | memoryview], timeout_s: float) -> list[bytes | memoryview]:
        """Write with patience; return what is left."""
        deadline = time.monotonic() + timeout_s
        self._poller.modify(self._fd, select.POLLOUT)
        try:
            while left and (left_s := deadline - time.monotonic()) > 0:
                self._wait(left_s)
                left = write(self._connection, left)
        finally:
            self._poller.modify(self._fd, select.POLLIN)
        return left

    def _wait(self, left_s: float) -> None:
        """Wait until the lane is ready, for a bounded time; take what the link brought meanwhile."""
        for descriptor, _ in self._poller.poll(math.ceil(min(left_s, _POLL_S_MAX) * 1000)):
            if descriptor == self._link_fd and self.link is not None:
                self.link.read()  # memory that is not needed any more need not stay mapped
                if not self.link.is_open:
                    self._poller.unregister(self._link_fd)

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self._endpoint} was lost")


def open_lane(endpoint: str, path: str, identity: bytes, limits: Limits) -> LaneEnd | None:
    """Open a lane to a Router on this host; None where it takes none.

    Args:
        endpoint, path: of the Router's ipc socket.
        identity: of this peer.
    """
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # no descriptors
        return None
    with theirs:
        link = join(path, identity, theirs.fileno())
    if link is None:
        ours.close()
        return None
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return LaneEnd(endpoint, ours, link, limits)
