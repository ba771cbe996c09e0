from __future__ import annotations

import contextlib
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.errors import LocalProtocolError, RemoteProtocolError
from pipedist.messages import Assign, Bind, Failed, Heartbeat, Message, Refuse, Welcome
from pipedist.transport.config import LIMITS, STRING_BYTES_MAX
from pipedist.transport.wire import pack, unpack

FIELDS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**63 - 1),
    str: st.text(st.characters(exclude_categories=())),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    tuple[str, ...]: st.lists(st.text()).map(tuple),
}
MESSAGES = st.one_of(
    *[
        st.builds(cls, **{name: FIELDS[kind] for name, kind in typing.get_type_hints(cls).items()})
        for cls in typing.get_args(Message)
    ]
)


@given(MESSAGES)
def test_every_message_comes_back(message: Message) -> None:
    assert unpack(pack(message)) == message
    assert unpack(memoryview(pack(message))) == message


def test_an_int_is_fine_for_a_float() -> None:
    assert unpack(pack(Welcome("c", 2, ()))) == Welcome("c", 2.0, ())


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (Bind(-1), r"Bind.pass_id must be an int from 0"),
        (Bind(1 << 63), r"Bind.pass_id"),
        (Bind(True), r"Bind.pass_id must be an int .*not True"),
        (Assign(1, 2, 3, 4, False), r"Assign.attempt must be an int .*not False"),
        (Assign(1, 2, -3, 4, 0), r"Assign.lo must be an int .*not -3"),
        (Assign(1, 2, 3, 1 << 63, 0), r"Assign.hi must be an int"),
        (Refuse(b"x"), r"Refuse.reason must be a str"),
        (Refuse("é" * STRING_BYTES_MAX), r"Refuse.reason must be a str of at most"),
        (Welcome("c", float("nan"), ()), r"Welcome.heartbeat_s must be a finite float"),
        (Welcome("c", 1.0, ["a"]), r"Welcome.sys_path must be a tuple"),
        ("text", "is no message"),
    ],
)
def test_a_wrong_field_is_our_own_fault(message: Any, match: str) -> None:
    with pytest.raises(LocalProtocolError, match=match):
        pack(message)


def test_a_message_beyond_the_limit_is_refused_on_both_ends() -> None:
    path = ("x" * STRING_BYTES_MAX,) * 5
    with pytest.raises(LocalProtocolError, match="limit"):
        pack(Welcome("c", 1.0, path))
    with pytest.raises(RemoteProtocolError, match="limit"):
        unpack(bytes(LIMITS.head_bytes_max + 1))


ASSIGN = [6, 1, 2, 3, 4, 0, 0]


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc1",
        msgpack.packb(None),
        msgpack.packb([]),
        msgpack.packb(["6", 1]),
        msgpack.packb([True, 1]),
        msgpack.packb([99, 1]),
        msgpack.packb(ASSIGN[:-1]),
        msgpack.packb([*ASSIGN, 0]),
        msgpack.packb([6, 1, 2, 3, 4, -1, 0]),
        msgpack.packb([6, 1, 2, 3, 4, 2**64 - 1, 0]),
        msgpack.packb([6, 1, 2, 3, 4, False, 0]),
        msgpack.packb([6, 1, 2, 3, 4, "0", 0]),
        msgpack.packb([6, 1, 2, 3, 4, 0.0, 0]),
        msgpack.packb([3, b"bytes"]),
        msgpack.packb([3, ["list"]]),
        msgpack.packb([3, {"a": 1}]),
        msgpack.packb([3, msgpack.ExtType(1, b"x")]),
        msgpack.packb([2, "c", float("inf"), [], 0.0]),
        msgpack.packb([2, "c", 1.0, [1], 0.0]),
        msgpack.packb([2, "c", 1.0, ["a"] * 5000, 0.0]),
        msgpack.packb(ASSIGN) + b"\0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x92\x03\xa2\xff\xff",
        b"\x91" * 100_000,
        b"\x92\x03\xd6\xff" + bytes(4),
    ],
)
def test_what_pack_does_not_write_is_refused(head: bytes) -> None:
    assert unpack(msgpack.packb(ASSIGN)) == Assign(1, 2, 3, 4, 0)
    with pytest.raises(RemoteProtocolError):
        unpack(head)


@given(st.binary(max_size=60))
def test_random_bytes_are_a_message_or_an_error(head: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        unpack(head)


def test_fuzz_of_real_messages() -> None:
    for message in (Failed(1, 2, "s", "m", "n", "text", "tb", True), Heartbeat("w0", 3)):
        head = pack(message)
        for at in range(len(head)):
            for bit in range(8):
                flipped = bytearray(head)
                flipped[at] ^= 1 << bit
                with contextlib.suppress(RemoteProtocolError):
                    unpack(flipped)
            with pytest.raises(RemoteProtocolError):
                unpack(head[:at])
