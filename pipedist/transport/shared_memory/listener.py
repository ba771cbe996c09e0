"""The Router's end: one pool for all workers, and a link to each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.wire import Reference
from pipedist.transport.config import SharedMemory
from pipedist.transport.endpoints import SHARED_MEMORY_SUFFIX
from pipedist.transport.shared_memory.link import BYTES, HELLO, WELCOME, Link
from pipedist.transport.shared_memory.pool import Pool

_BACKLOG: Final = 4096
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class _Member:
    """A process with a link; `pidfd` is readable at its end, even if a child of it holds the link; -1: none."""

    link: Link

    def __init__(self, pidfd: int) -> None:
        self.identity = b""
        self.pidfd = pidfd


class Listener:
    """Shares memory with the Dealers of one Router, in its event loop; OSError: this kernel can't."""

    def __init__(
        self,
        ipc_path: str,  # path of the Router's ipc endpoint
        settings: SharedMemory,
        *,
        grace_s: float,  # frames of an ended process are valid so long: for messages on their way
        on_link: Callable[[bytes], None],  # identity; raises RemoteProtocolError to refuse it
        on_end: Callable[[bytes], None],  # gets its identity when a process has ended, after the grace
        on_fault: Callable[[bytes, str], None],  # (identity, reason); identity b"": unknown
    ) -> None:
        self._settings = settings
        self._grace_s = grace_s
        self._on_link = on_link
        self._on_end = on_end
        self._on_fault = on_fault
        self._path = ipc_path + SHARED_MEMORY_SUFFIX
        self._members: set[_Member] = set()
        self._ungreeted: set[_Member] = set()
        self._links: dict[bytes, Link] = {}
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        self.pool = Pool(settings.lent_bytes_max, self._retire)
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            self._socket.bind(self._path)
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            raise
        self._loop.add_reader(self._socket, self._accept)

    def look(self) -> None:
        """Take the links that were opened, and their greetings, if the loop has not done so yet."""
        self._accept()
        for member in list(self._ungreeted):
            self._read(member)

    def lend(
        self, identity: bytes, payload: Sequence[bytes | memoryview]
    ) -> tuple[list[Reference], list[bytes | memoryview]]:
        link = self._links.get(identity)
        return ([], list(payload)) if link is None else link.lend(payload)

    def frames(self, identity: bytes, references: Sequence[Reference]) -> list[memoryview]:
        link = self._links.get(identity)
        if link is None:
            raise RemoteProtocolError("references to memory that it does not share")
        link.read()  # it may have retired what it refers to
        return link.frames(references)

    def forget(self, identity: bytes) -> None:
        """Forget a peer's memory; frames in use, and slots lent to its live process, stay."""
        self._links.pop(identity, None)
        timer = self._timers.pop(identity, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._refuse_newcomers()
        self._links.clear()
        for member in list(self._members):
            self._end(member)
        self.pool.close()

    def _retire(self, serial: int) -> None:
        for member in self._members:
            member.link.retire(serial)

    def _accept(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptors left
                self._refuse_newcomers()
                return
            try:
                self._admit(connection)
            except OSError:  # no memory or descriptors
                connection.close()
                self._refuse_newcomers()
                return

    def _refuse_newcomers(self) -> None:
        """Stop listening: later workers find no socket, and share no memory."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _admit(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.geteuid():
            connection.close()
            self._on_fault(b"", f"process {pid} of user {uid} may not share our memory")
            return
        connection.setblocking(False)
        member = _Member(_pidfd(pid))
        try:
            member.link = Link(
                connection,
                borrowed_bytes_max=self._settings.borrowed_bytes_max,
                greeting=HELLO,
                on_greeting=lambda body: self._greeted(member, body),
            )
        except OSError:
            _close_descriptor(member.pidfd)
            raise
        self._members.add(member)
        self._ungreeted.add(member)
        self._loop.add_reader(connection, self._read, member)
        if member.pidfd >= 0:
            self._loop.add_reader(member.pidfd, self._ended, member)
        self._read(member)  # its greeting

    def _greeted(self, member: _Member, body: bytes) -> Pool:
        if not 1 <= len(body) <= 255 or body in self._links:
            raise RemoteProtocolError("the identity of another process, or none")
        self._on_link(body)
        member.identity = body
        self._ungreeted.discard(member)
        self._links[body] = member.link
        with contextlib.suppress(OSError):  # it is gone: `_read` finds out too
            member.link.greet(WELCOME, BYTES.pack(self._settings.borrowed_bytes_max))
        return self.pool

    def _read(self, member: _Member) -> None:
        try:
            member.link.read()
        except RemoteProtocolError as error:
            self._end(member)
            self._on_fault(member.identity, f"the link of a peer brought {error}")
            return
        if not member.link.is_open:
            self._end(member)

    def _ended(self, member: _Member) -> None:
        """A process is gone: read its last packets, which its last messages may refer to."""
        self._read(member)
        self._end(member)
        timer = self._timers.pop(member.identity, None)
        if timer is not None:
            timer.cancel()
            self._expire_later(member.identity, self._forget_ended)

    def _forget_ended(self, identity: bytes) -> None:
        self.forget(identity)
        self._on_end(identity)

    def _expire_later(self, identity: bytes, expire: Callable[[bytes], None]) -> None:
        self._timers[identity] = self._loop.call_later(self._grace_s, expire, identity)

    def _end(self, member: _Member) -> None:
        if member not in self._members:
            return
        self._members.discard(member)
        self._ungreeted.discard(member)
        if member.pidfd >= 0:
            self._loop.remove_reader(member.pidfd)
            _close_descriptor(member.pidfd)
        self._loop.remove_reader(member.link.connection)
        member.link.close()
        if member.identity in self._links:
            self._expire_later(member.identity, self.forget)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:  # another namespace, or it is gone: then the end of the link shows it
        return -1


def _close_descriptor(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
