"""The protocol between a launcher and its fork server.

A module of its own: the server must not import the launcher, nor the launcher what workers need.

Frames: 4 bytes of length, big-endian, then a msgpack list whose first item is the kind.

| to the server | |
|---|---|
| serve, directory, stopped_s_max | the first one: the directory of the launcher's sockets; see `ForkServer` |
| start, worker, incarnation, settings | fork a worker; settings: the fields of `WorkerSettings` |
| kill, worker, incarnation | SIGKILL it |
| watch, every_s or nil | kill workers whose call takes too long; nil: no longer |
| end | the launcher closes in order: the end of the stream follows |

| from the server | |
|---|---|
| started, worker, incarnation, pid, memory | memory: the server's descriptor of its `Progress`, or -1 |
| exited, worker, incarnation, pid, code or nil, signal or nil, text, running or nil, timed out | |

At the end of the stream, the server kills every worker and ends; to the launcher it means that the server
and its workers are gone.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

FRAME_BYTES_MAX = 1 << 20
"""The largest frame; a start has a few hundred bytes."""

_LENGTH = struct.Struct(">I")


def pack_frame(*items: object) -> bytes:
    body: bytes = msgpack.packb(items)
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """Add received bytes; return the frames that are complete.

        Raises:
            ValueError: a frame is longer than FRAME_BYTES_MAX.
        """
        self._bytes += data
        frames: list[list[Any]] = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a control frame has {length} bytes; the limit is {FRAME_BYTES_MAX}")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            frames.append(msgpack.unpackb(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]
        return frames
