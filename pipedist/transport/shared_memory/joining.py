"""The worker's end: how a Dealer finds the memory that its Router shares."""

from __future__ import annotations

import socket
from typing import Final

from pipedist.errors import RemoteProtocolError
from pipedist.transport.limits import GIB
from pipedist.transport.rendezvous import SHARED_MEMORY_SUFFIX
from pipedist.transport.shared_memory import notices
from pipedist.transport.shared_memory.link import Link
from pipedist.transport.shared_memory.pool import Pool
from pipedist.transport.shared_memory.settings import is_supported

_BORROWED_BYTES_MAX: Final = 64 * GIB  # the Router decides, and is trusted


def join(ipc_path: str, identity: bytes) -> Link | None:
    """Open a link to a Router; None where it shares no memory.

    Args:
        ipc_path: path of the Router's ipc endpoint, in a private directory.
        identity: of the Dealer.
    """
    if not is_supported():
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link: Link | None = None

    def greeted(body: bytes) -> Pool:
        if len(body) != notices.BYTES.size or link is None:
            raise RemoteProtocolError("a malformed greeting on the link")
        return Pool(notices.BYTES.unpack(body)[0], link.retire)

    try:
        connection.setblocking(False)
        connection.connect(ipc_path + SHARED_MEMORY_SUFFIX)
        link = Link(
            connection,
            borrowed_bytes_max=_BORROWED_BYTES_MAX,
            greeting=notices.WELCOME,
            on_greeting=greeted,
        )
        link.greet(notices.HELLO, identity)
    except OSError:  # no such socket, or no memory: frames will do
        connection.close()
        if link is not None:
            link.close()
        return None
    return link
