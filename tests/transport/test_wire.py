from __future__ import annotations

import contextlib
import os
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.errors import LocalProtocolError, RemoteProtocolError
from pipedist.protocol.limits import LIMITS, MIB
from pipedist.protocol.messages import Assign, Bind, Failed, Heartbeat, Message, Refuse, Stalled, Welcome
from pipedist.protocol.wire import pack, unpack

FIELDS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**63 - 1),
    int | None: st.none() | st.integers(0, 2**63 - 1),
    str: st.text(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    bytes: st.binary(),
    tuple[int, ...]: st.lists(st.integers(0, 2**63 - 1), max_size=64).map(tuple),
    tuple[str, ...]: st.lists(st.text()).map(tuple),
    tuple[bytes, ...]: st.lists(st.binary()).map(tuple),
    tuple[tuple[int, str], ...]: st.lists(st.tuples(st.integers(0, 2**63 - 1), st.text())).map(tuple),
}
MESSAGES = st.one_of(
    *[
        st.builds(cls, **{name: FIELDS[kind] for name, kind in typing.get_type_hints(cls).items()})
        for cls in Message.__subclasses__()
    ]
)


@given(MESSAGES)
def test_every_message_comes_back(message: Message) -> None:
    assert unpack(pack(message)) == message
    assert unpack(memoryview(pack(message))) == message


def test_lone_surrogates_arrive_escaped() -> None:
    assert unpack(pack(Refuse("half: \ud800", 3))) == Refuse("half: \\ud800", 3)
    assert unpack(pack(Stalled(1, ("\ud800", "b"), ""))) == Stalled(1, ("\\ud800", "b"), "")


def test_a_path_that_is_no_text_comes_back() -> None:
    path = "/tmp/\udcff"
    (came,) = unpack(pack(Welcome("c", 1.0, (os.fsencode(path),)))).sys_path
    assert os.fsdecode(came) == path


def test_an_int_is_fine_for_a_float() -> None:
    assert unpack(pack(Welcome("c", 2, ()))) == Welcome("c", 2.0, ())


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (Bind(-1), r"Expected `int` >= 0 - at `Bind.pass_id`"),
        (Bind(1 << 63), r"Expected `int` <= 9223372036854775807 - at `Bind.pass_id`"),
        (Bind(1 << 64), r"can't send: "),
        (Bind(True), r"Expected `int`, got `bool` - at `Bind.pass_id`"),
        (Assign(1, 2, 3, 4, False), r"Expected `int`, got `bool` - at `Assign.attempt`"),
        (Assign(1, 2, -3, 4, 0), r"Expected `int` >= 0 - at `Assign.lo`"),
        (Assign(1, 2, 3, 1 << 63, 0), r"at `Assign.hi`"),
        (Refuse(b"x"), r"Expected `str`, got `bytes` - at `Refuse.reason`"),
        (Refuse(object()), r"can't send: .*object"),
        (Refuse("é" * MIB), r"Expected `str` of length <= 262144 - at `Refuse.reason`"),
        (Welcome("c", float("nan"), ()), r"Expected `float` .* - at `Welcome.heartbeat_s`"),
        (Welcome("c", float("inf"), ()), r"Expected `float` .* - at `Welcome.heartbeat_s`"),
        (Welcome("c", 1.0, ["a"]), r"Expected `bytes`, got `str` - at `Welcome.sys_path\[0\]`"),
        (Welcome("c", 1.0, (bytes(1 << 17),)), r"Expected `bytes` of length <= .* - at `Welcome.sys_path"),
        ("text", "is not a message"),
        ((6, 1, 2, 3, 4, 0, 0), "is not a message"),
    ],
)
def test_a_wrong_field_is_a_local_error(message: Any, match: str) -> None:
    with pytest.raises(LocalProtocolError, match=match):
        pack(message)


def test_a_message_beyond_the_limit_is_rejected_on_both_ends() -> None:
    path = (b"x" * (1 << 16),) * 65
    with pytest.raises(LocalProtocolError, match="limit"):
        pack(Welcome("c", 1.0, path))
    with pytest.raises(RemoteProtocolError, match="limit"):
        unpack(bytes(LIMITS.head_bytes_max + 1))


ASSIGN = [6, 1, 2, 3, 4, 0, 0, False]


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
        msgpack.packb([6, 1, 2, 3, 4, -1, 0, False]),
        msgpack.packb([6, 1, 2, 3, 4, 2**64 - 1, 0, False]),
        msgpack.packb([6, 1, 2, 3, 4, False, 0, False]),
        msgpack.packb([6, 1, 2, 3, 4, "0", 0, False]),
        msgpack.packb([6, 1, 2, 3, 4, 0.0, 0, False]),
        msgpack.packb([3, b"bytes"]),
        msgpack.packb([3, ["list"]]),
        msgpack.packb([3, {"a": 1}]),
        msgpack.packb([3, msgpack.ExtType(1, b"x")]),
        msgpack.packb([3, "reason"]),
        msgpack.packb([3, b"bytes", 0]),
        msgpack.packb([3, ["list"], 0]),
        msgpack.packb([3, {"a": 1}, 0]),
        msgpack.packb([3, msgpack.ExtType(1, b"x"), 0]),
        msgpack.packb([3, "\ud800", 0], unicode_errors="surrogatepass"),
        msgpack.packb([3, "x" * (1 << 19), 0]),
        msgpack.packb([2, "c", float("inf"), [], 0.0, ""]),
        msgpack.packb([2, "c", float("nan"), [], 0.0, ""]),
        msgpack.packb([2, "c", 1.0, [1], 0.0, ""]),
        msgpack.packb([2, "c", 1.0, ["a"], 0.0, ""]),
        msgpack.packb([2, "c", 1.0, [b"a"] * 5000, 0.0, ""]),
        msgpack.packb([4, 1, "", 1]),
        msgpack.packb(ASSIGN) + b"\0",
        b"\xdc\0\x08" + msgpack.packb(ASSIGN)[1:],
        b"\x96\x02\xa1c\x01\xdd\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x92\x03\xa2\xff\xff",
        b"\x91" * 100_000,
        b"\x92\x03\xd6\xff" + bytes(4),
    ],
)
def test_heads_that_pack_does_not_write_are_rejected(head: bytes) -> None:
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
