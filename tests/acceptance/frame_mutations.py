"""Damage to messages, decided by a seed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random

from pipedist.protocol.wire import START
from tests.acceptance.recorded import Frames

LENGTHS = (0, 1, 7, 255, 65_535, 2**31 - 1, 2**31, 2**32 - 1)

TAGS = bytes(
    (0xC0, 0xC1, 0xC4, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCF, 0xD3, 0xD4, 0xD8, 0xD9, 0xDB, 0xDC, 0xDD,
     0xDE, 0xDF, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0x00, 0x7F, 0xE0, 0xFF)
)  # fmt: skip
"""Bytes with which msgpack begins something."""


def mutated(corpus: Sequence[Frames], seed: int) -> list[bytes]:
    """Return one of the messages, damaged in one to four places."""
    random = Random(seed)
    frames = list(corpus[random.randrange(len(corpus))])
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        if random.random() < 0.12:
            _rearrange(frames, corpus, random)
            if not frames:
                frames.append(b"")
            continue
        # the first frame contains the message
        at = 0 if random.random() < 0.85 else random.randrange(len(frames))
        damage = _damaged if at else _damaged_within
        frames[at] = damage(frames[at], corpus, random)
    return frames


def _damaged_within(first: bytes, corpus: Sequence[Frames], random: Random) -> bytes:
    """Damage a first frame anywhere; or its head or the payload's header alone, with lengths that fit."""
    size_bytes, references = START.unpack_from(first) if len(first) >= START.size else (len(first), 1)
    end = START.size + size_bytes
    where = random.random()
    if where < 0.3 or references or end > len(first):
        return _damaged(first, corpus, random)
    head, header = first[START.size : end], first[end:]
    if where < 0.5 or not header:
        head = _damaged(head, corpus, random)
    else:
        header = _damaged(header, corpus, random)
    return START.pack(len(head), 0) + head + header


def _rearrange(frames: list[bytes], corpus: Sequence[Frames], random: Random) -> None:
    what = random.randrange(5)
    at = random.randrange(len(frames))
    if what == 0:
        del frames[at]
    elif what == 1:
        frames.insert(at, frames[at])
    elif what == 2:
        frames.append(random.randbytes(random.randrange(100)))
    elif what == 3:
        frames += [b""] * random.choice((1, 10, 300))
    else:
        random.shuffle(frames)
        frames[at] = random.choice(random.choice(corpus))


def _damaged(frame: bytes, corpus: Sequence[Frames], random: Random) -> bytes:
    data = bytearray(frame)
    at = random.randrange(len(data) + 1)
    if random.random() < 0.5:  # the beginning says more than the end
        at = min(at, random.randrange(64))
    what = random.randrange(8)
    if what == 0 and at < len(data):
        data[at] ^= 1 << random.randrange(8)
    elif what == 1:
        data[at : at + 1] = bytes([random.choice(TAGS)])
    elif what == 2:
        del data[at:]
    elif what == 3:
        data[at : at + random.randrange(1, 9)] = b""
    elif what == 4:
        data[at:at] = random.randbytes(random.randrange(1, 12))
    elif what == 5:
        order = random.choice("<>")
        data[at : at + 4] = struct.pack(f"{order}I", random.choice(LENGTHS))
    elif what == 6:
        other = random.choice(corpus)[0]
        begin = random.randrange(len(other) + 1)
        data[at:at] = other[begin : begin + random.randrange(1, 60)]
    else:
        data[at:at] = bytes([random.choice(TAGS)]) * random.choice((1, 2, 40, 2000))
    return bytes(data)
