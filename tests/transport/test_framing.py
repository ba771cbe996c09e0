from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.errors import RemoteProtocolError
from pipedist.transport.lane.framing import HEAD, Assembler
from pipedist.transport.limits import LIMITS, Limits

from .lanes import stream

SMALL = Limits(
    head_bytes_max=100, header_bytes_max=200, frame_bytes_max=600, frames_max=10, message_bytes_max=800
)


def assembled(data: bytes, pieces: list[int], limits: Limits = LIMITS) -> list[list[bytes]]:
    """What is made of a stream that comes in pieces of these sizes, and then as a whole."""
    assembler, messages, at, turn = Assembler(limits), [], 0, 0
    while at < len(data):
        piece = data[at : at + pieces[turn]] if turn < len(pieces) else data[at:]
        turn += 1
        if assembler.unfilled:
            room = assembler.unfilled[0]
            piece = piece[: room.nbytes]
            room[: len(piece)] = piece
            assembler.filled(len(piece))
        else:
            assembler.feed(piece)
        at += len(piece)
        while (frames := assembler.take()) is not None:
            assert all(frame.readonly for frame in frames)
            messages.append(list(map(bytes, frames)))
    return messages


MESSAGES = st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=5), max_size=6)


@given(MESSAGES, st.lists(st.integers(1, 300), max_size=60))
def test_messages_are_the_same_however_the_stream_is_cut(
    messages: list[list[bytes]], pieces: list[int]
) -> None:
    assert assembled(b"".join(map(stream, messages)), pieces) == messages


@given(st.binary(max_size=400), st.lists(st.integers(1, 100), max_size=10))
def test_noise_is_refused_or_waited_for(noise: bytes, pieces: list[int]) -> None:
    with contextlib.suppress(RemoteProtocolError):  # which is all that it may raise
        assembled(noise, pieces, SMALL)


def test_frames_are_aligned_in_memory() -> None:
    import numpy as np

    assembler = Assembler(LIMITS)
    assembler.feed(stream([b"x" * 33, bytes(100)]) + stream([b"y" * 7, bytes(4000)]))
    for _ in range(2):
        frames = assembler.take()
        assert frames is not None
        assert all(np.frombuffer(frame, np.uint8).ctypes.data % 16 == 0 for frame in frames)


def test_a_view_of_a_small_message_keeps_nothing_else_alive() -> None:
    assembler = Assembler(LIMITS)
    assembler.feed(stream([b"small"]) + stream([bytes(50_000)]))
    small, large = assembler.take(), assembler.take()
    assert small is not None
    assert large is not None
    assert len(small[0].obj) < 100  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "head"),
    [
        ("a head that is none", HEAD.pack(0, 0, 0)),
        ("a head that is none", HEAD.pack(1, 1, 10)),
        ("more than 10 frames", HEAD.pack(11, 0, 1)),
        ("more than 10 frames", HEAD.pack(2**32 - 1, 0, 1)),
        ("a first frame of 18446744073709551615 bytes", HEAD.pack(1, 0, 2**64 - 1)),
        ("a frame of 601 bytes", HEAD.pack(2, 0, 1) + struct.pack("<QQ", 601, 0)),
        ("more than 800 bytes", HEAD.pack(3, 0, 1) + struct.pack("<QQQ", 600, 600, 0)),
    ],
)
def test_sizes_are_looked_at_before_there_is_memory_for_them(words: str, head: bytes) -> None:
    assembler = Assembler(SMALL)
    assembler.feed(head)
    with pytest.raises(RemoteProtocolError, match=words):
        assembler.take()
    assert not assembler.unfilled
