"""What a launcher and its fork server say to each other, over a pair of unix sockets.

Frames: 4 bytes of length, big-endian, then a msgpack list whose first item is the kind.

| to the server | |
|---|---|
| serve, directory, stopped_s_max | said first: where the launcher's sockets are; `ForkServer` |
| start, worker, incarnation, settings | fork a worker; settings: the fields of `WorkerSettings` |
| kill, worker, incarnation | SIGKILL it |
| watch, every_s or nil | kill workers whose stage's function takes too long; nil: no more |
| end | the launcher is done: the end of the stream, which follows, is no accident |

| from the server | |
|---|---|
| started, worker, incarnation, pid, memory | memory: the server's descriptor of its `Progress`, or -1 |
| exited, worker, incarnation, pid, code or nil, signal or nil, text, running or nil, timed out | |

The end of the stream is a message too: to the server, that its launcher is gone or done with it
(it kills every worker and ends); to the launcher, that the server is gone (and its workers with it).
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

FRAME_BYTES_MAX = 1 << 20
"""The largest frame; a start needs a few hundred bytes."""

_LENGTH = struct.Struct(">I")


def pack_frame(*items: object) -> bytes:
    """Return one frame."""
    body: bytes = msgpack.packb(items)
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Puts frames together from what arrives."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """Take in bytes; return the frames that are complete.

        Raises:
            ValueError: if a frame is longer than FRAME_BYTES_MAX.
        """
        self._bytes += data
        frames: list[list[Any]] = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a control frame of {length} bytes, the limit is {FRAME_BYTES_MAX}")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            frames.append(msgpack.unpackb(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]
        return frames
