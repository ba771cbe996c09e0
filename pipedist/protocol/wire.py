"""Messages to bytes and back, and the first frame that carries them.

A message is msgpack: a list of its class's tag and its fields, whose types and limits are those of
`pipedist.protocol.messages`. Both ends check every field. The first frame joins the message (HEAD), the first
frame of its payload (HEADER, see `pipedist.protocol.codec`) and references to frames in shared memory,
because on a socket one more frame costs more than a copy:

    [bytes of the head: u32] [number of references: u32] [references] [head] [header]

All integers are little-endian. The other frames of a message are the payload's arrays. Referenced frames are not
sent: the receiver inserts each one at its place among the payload's frames (`weave`).
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Sequence
from functools import reduce
from itertools import starmap
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec

from pipedist.errors import LocalProtocolError, RemoteProtocolError
from pipedist.protocol.limits import LIMITS, MessageLimits
from pipedist.protocol.messages import Message

START: Final = struct.Struct("<II")
ENTRY: Final = struct.Struct("<IIIIQ")

_encode: Final = msgspec.msgpack.Encoder().encode
_MESSAGES: Final = Message.__subclasses__()
_decode: Final = msgspec.msgpack.Decoder(reduce(operator.or_, _MESSAGES)).decode


def _list_start(cls: type[Message]) -> bytes:
    items = [None] * (1 + len(cls.__struct_fields__))
    return _encode(items)[: -len(items)]


_STARTS: Final[dict[type[Any], bytes]] = {cls: _list_start(cls) for cls in _MESSAGES}
"""Each class's first bytes: a list of all fields. msgspec also accepts fewer, if the others have defaults."""

_START_BYTES_MAX: Final = max(map(len, _STARTS.values()))


class Reference(NamedTuple):
    """A reference to a frame in a slot of shared memory."""

    place: int  # its index among the frames of the payload; the header has index 0
    segment: int  # the segment's serial
    slot: int  # index in the segment
    loan: int  # number of the loan
    size_bytes: int  # size of the frame


def pack(message: Message) -> bytes:
    """Return a message's bytes; lone surrogates in its texts, which UTF-8 can't encode, are escaped.

    Raises LocalProtocolError for a value that the receiver would reject.
    """
    cls = type(message)
    if cls not in _STARTS:
        raise LocalProtocolError(f"{cls.__qualname__} is not a message")
    try:
        head = _encode(message)
        _decode(head)  # msgspec checks fields when it decodes, and only then
    except UnicodeEncodeError:
        return pack(_escaped(message))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"can't send: {_located(cls, str(error))}") from None
    if len(head) > LIMITS.head_bytes_max:
        raise LocalProtocolError(f"{cls.__name__} of {len(head)} bytes, the limit is {LIMITS.head_bytes_max}")
    return head


def unpack(head: bytes | bytearray | memoryview) -> Message:
    """Return the message that `pack` wrote, or raise RemoteProtocolError."""
    size_bytes = len(head) if isinstance(head, (bytes, bytearray)) else head.nbytes
    if size_bytes > LIMITS.head_bytes_max:
        raise RemoteProtocolError(f"a message of {size_bytes} bytes, the limit is {LIMITS.head_bytes_max}")
    try:
        message: Message = _decode(head)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RemoteProtocolError(f"malformed message: {error}") from error
    if not bytes(head[:_START_BYTES_MAX]).startswith(_STARTS[type(message)]):
        raise RemoteProtocolError(f"malformed message: {type(message).__name__} with fields missing")
    return message


def seal(head: bytes, header: bytes | memoryview = b"", references: Sequence[Reference] = ()) -> bytes:
    """Return a message's first frame; references are in order of their places."""
    start = START.pack(len(head), len(references))
    if not references:  # the common case, cheaper
        return b"".join((start, head, header))
    return b"".join([start, *starmap(ENTRY.pack, references), head, header])


def unseal(first: memoryview, limits: MessageLimits) -> tuple[memoryview, memoryview, list[Reference]]:
    """Return the head, payload header and references of a first frame, or raise RemoteProtocolError."""
    size_bytes = first.nbytes
    if size_bytes < START.size:
        raise RemoteProtocolError(f"malformed message: a first frame of {size_bytes} bytes")
    head_bytes, count = START.unpack_from(first)
    begin = START.size + count * ENTRY.size if count else START.size
    end = begin + head_bytes
    if count > limits.frames_max or end > size_bytes:
        raise RemoteProtocolError(
            f"malformed message: a head of {head_bytes} bytes and {count} references "
            f"in a first frame of {size_bytes} bytes"
        )
    if head_bytes > limits.head_bytes_max:
        raise RemoteProtocolError(f"a head of {head_bytes} bytes, the limit is {limits.head_bytes_max}")
    if size_bytes - end > limits.header_bytes_max:
        raise RemoteProtocolError(
            f"a header of {size_bytes - end} bytes, the limit is {limits.header_bytes_max}"
        )
    return first[begin:end], first[end:], parse_references(first[START.size : begin]) if count else []


def parse_references(table: memoryview) -> list[Reference]:
    """Return the references in a table of whole entries; raise RemoteProtocolError if not in order."""
    references = list(map(Reference._make, ENTRY.iter_unpack(table)))
    places = list(map(itemgetter(0), references))
    if places[0] == 0 or not all(map(operator.lt, places, places[1:])):
        raise RemoteProtocolError("references that are not in order")
    return references


def weave(
    frames: list[memoryview],
    references: Sequence[Reference],
    shared: Sequence[memoryview],
    limits: MessageLimits,
) -> None:
    """Insert shared frames at their places among the others, or raise RemoteProtocolError."""
    size_bytes = 0
    for frame in frames:
        size_bytes += frame.nbytes
    for reference, frame in zip(references, shared, strict=True):
        if reference.place > len(frames):
            raise RemoteProtocolError(f"a shared frame {reference.place} in a payload of {len(frames)}")
        frames.insert(reference.place, frame)
        size_bytes += frame.nbytes
    if len(frames) > limits.frames_max or size_bytes > limits.message_bytes_max:
        raise RemoteProtocolError(
            f"a message of {len(frames)} frames and {size_bytes} bytes, with shared ones"
        )


def first_frame_bytes_max(limits: MessageLimits) -> int:
    return START.size + limits.frames_max * ENTRY.size + limits.head_bytes_max + limits.header_bytes_max


def _escaped(message: Message) -> Message:
    fields = msgspec.structs.asdict(message)
    return msgspec.structs.replace(message, **{name: _plain(value) for name, value in fields.items()})


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_plain, value))
    return value.encode("utf-8", "backslashreplace").decode() if type(value) is str else value


def _located(cls: type[Message], reason: str) -> str:
    """Replace a field's index in msgspec's text by its name."""
    names = ("tag", *cls.__struct_fields__)
    return re.sub(r"\$\[(\d+)\]", lambda place: f"{cls.__name__}.{names[int(place[1])]}", reason, count=1)
