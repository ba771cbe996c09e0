"""What ZeroMQ tells about a socket's connections: its monitor events.

`zmq.utils.monitor` can do this too, but importing it costs a worker 50 ms for asyncio.
"""

from __future__ import annotations

import struct
from typing import Final

import zmq

HANDSHAKE_FAILURES: Final[dict[int, str]] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key was refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak the protocol, or has not this cluster's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it went away",
}
"""Why a peer did not get in, as seen by the server."""

FAILURE_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENT: Final = struct.Struct("=hi")  # event, value


def event_of(frame: bytes) -> int:
    """Return the event of a monitor message's first frame."""
    event: int = _EVENT.unpack(frame)[0]
    return event
