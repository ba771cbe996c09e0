"""The Router's ends of all lanes, in its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import anyio

from pipedist.errors import RemoteProtocolError
from pipedist.transport.lane.framing import Assembler, frame_up
from pipedist.transport.lane.stream import SEND_BUFFER_BYTES, read, write
from pipedist.transport.limits import Limits
from pipedist.transport.outbox import Outbox
from pipedist.transport.settings import Settings


class _Lane:
    """One lane.

    Args:
        is_silent: its peer was dropped: it is neither heard nor spoken to.
        is_mute: nothing can be written to it any more.
        is_due: messages that were read wait for their turn.
    """

    __slots__ = ("assembler", "connection", "identity", "is_due", "is_mute", "is_silent", "outbox", "timer")

    def __init__(
        self, identity: bytes, connection: socket.socket, limits: Limits, settings: Settings
    ) -> None:
        self.identity = identity
        self.connection = connection
        self.assembler = Assembler(limits)
        self.outbox = Outbox(settings)
        self.is_silent = False
        self.is_mute = False
        self.is_due = False
        self.timer: asyncio.TimerHandle | None = None


class Lanes:
    """Receives from and sends to the Dealers that have a lane; never waits.

    Each lane that can be read has one turn in each round of the loop, of one read and a bounded number
    of messages, so that no peer keeps others waiting.

    Args:
        on_message: called with (identity, frames), in order.
        on_fault: told (identity, reason) of a peer that broke the rules; it goes on from "it sent".
        limits, settings: sizes and times.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[bytes, list[memoryview]], None],
        on_fault: Callable[[bytes, str], None],
        limits: Limits,
        settings: Settings,
    ) -> None:
        self._on_message = on_message
        self._on_fault = on_fault
        self._limits = limits
        self._settings = settings
        self._lanes: dict[bytes, _Lane] = {}
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._drained = anyio.Event()

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._lanes

    def open(self, identity: bytes, descriptor: int) -> None:
        """Begin to listen to a peer.

        Args:
            identity: which has no lane yet.
            descriptor: our end, as it was handed over; stays the caller's.

        Raises:
            RemoteProtocolError: it can't be used.
        """
        try:
            connection = _connection(descriptor)
        except OSError as error:
            raise RemoteProtocolError(f"a lane that can't be used: {error.strerror}") from None
        lane = self._lanes[identity] = _Lane(identity, connection, self._limits, self._settings)
        self._loop.add_reader(connection, self._read, lane)

    def send(self, identity: bytes, parts: list[bytes | memoryview]) -> bool:
        """Send a message, now or as soon as there is room; return False where the peer is gone.

        Raises:
            RemoteProtocolError: too much waits for it already.
        """
        lane = self._lanes.get(identity)
        if lane is None or lane.is_silent or lane.is_mute:
            return False
        left = frame_up(parts)
        if not lane.outbox.messages:
            try:
                left = write(lane.connection, left)
            except OSError:
                self._mute(lane)
                return False
            if not left:
                return True
            self._loop.add_writer(lane.connection, self._flush, lane)
        lane.outbox.add(left)
        return True

    def silence(self, identity: bytes, last_words: bytes = b"") -> None:
        """Neither hear nor speak to a peer any more; its lane is cut when it next speaks.

        Args:
            last_words: a frame, sent if there is room.
        """
        lane = self._lanes.get(identity)
        if lane is None or lane.is_silent:
            return
        lane.is_silent = True
        lane.assembler.release()
        left: list[bytes | memoryview] = []
        with contextlib.suppress(OSError):
            if last_words and not lane.outbox.messages and not lane.is_mute:
                left = write(lane.connection, frame_up([last_words]))
        if left or lane.outbox.messages:
            self._cut(lane)  # it may have read the half of a message: better that it sees an end

    def end(self, identity: bytes, within_s: float) -> None:
        """A peer's process has ended: read what it said, but don't wait for children that hold its end."""
        lane = self._lanes.get(identity)
        if lane is not None and lane.timer is None:
            lane.timer = self._loop.call_later(within_s, self._cut, lane)

    async def close(self) -> None:
        """Send what waits, for a bounded time, and close all lanes; nobody is heard any more."""
        self._is_closing = True
        try:
            with anyio.move_on_after(self._settings.linger_s, shield=True):
                while any(lane.outbox.messages for lane in self._lanes.values()):
                    self._drained = anyio.Event()
                    await self._drained.wait()
        finally:
            for lane in list(self._lanes.values()):
                self._cut(lane)

    # --- receiving ------------------------------------------------------------------------

    def _read(self, lane: _Lane) -> None:
        if lane.is_due:
            return  # first what was read before
        if lane.is_silent:
            self._cut(lane)
            return
        try:
            goes_on = read(lane.connection, lane.assembler)
        except BlockingIOError:
            return
        except OSError:  # it closed without reading all
            goes_on = False
        if not goes_on:
            self._cut(lane)
        else:
            self._deliver(lane)

    def _deliver(self, lane: _Lane) -> None:
        lane.is_due = False
        try:
            for _ in range(self._settings.frames_per_wake_up):
                if lane.is_silent:
                    return
                try:
                    frames = lane.assembler.take()
                except RemoteProtocolError as error:
                    self._on_fault(lane.identity, str(error))
                    return
                if frames is None:
                    return
                if not self._is_closing:
                    self._on_message(lane.identity, frames)
        except BaseException:
            # A failing function is reported by the loop; the messages after it must not wait for it.
            self._deliver_soon(lane)
            raise
        self._deliver_soon(lane)

    def _deliver_soon(self, lane: _Lane) -> None:
        lane.is_due = True
        self._loop.call_soon(self._deliver, lane)

    # --- sending --------------------------------------------------------------------------

    def _flush(self, lane: _Lane) -> None:
        """Send what waits for a peer, as far as there is room."""
        outbox = lane.outbox
        while outbox.messages:
            try:
                left = write(lane.connection, outbox.messages[0])
            except OSError:
                self._mute(lane)
                return
            if left:
                outbox.cut(left)
                return
            outbox.pop()
        self._loop.remove_writer(lane.connection)
        self._drained.set()

    def _mute(self, lane: _Lane) -> None:
        """Writing has failed; what the peer said last is still to be read, up to its end."""
        lane.is_mute = True
        lane.outbox.clear()
        self._loop.remove_writer(lane.connection)
        with contextlib.suppress(OSError):
            lane.connection.shutdown(socket.SHUT_WR)
        self._drained.set()

    def _cut(self, lane: _Lane) -> None:
        if self._lanes.get(lane.identity) is not lane:
            return
        del self._lanes[lane.identity]
        if lane.timer is not None:
            lane.timer.cancel()
        self._loop.remove_reader(lane.connection)
        self._loop.remove_writer(lane.connection)
        # Also where another process holds the same end: the peer is to see it.
        with contextlib.suppress(OSError):
            lane.connection.shutdown(socket.SHUT_RDWR)
        lane.connection.close()
        lane.is_silent = True
        lane.outbox.clear()
        lane.assembler.release()
        self._drained.set()


def _connection(descriptor: int) -> socket.socket:
    """Return a socket of our own for a peer's descriptor.

    Raises:
        OSError: it is no stream between two processes of this host.
    """
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise
    try:
        if connection.family != socket.AF_UNIX or connection.type != socket.SOCK_STREAM:
            raise OSError(0, "it is no unix stream socket")
        connection.getpeername()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    except BaseException:
        connection.close()
        raise
    return connection
