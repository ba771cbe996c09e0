from __future__ import annotations

import contextlib
import dataclasses
import math
import struct
import sys
import tracemalloc
import types
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipedist.core import ragged
from pipedist.errors import RemoteProtocolError
from pipedist.protocol import codec, encoder, layout
from pipedist.protocol.codec import UnsendableError, decode, encode
from pipedist.protocol.limits import DEPTH_MAX, MessageLimits


class Point(NamedTuple):
    x: Any
    y: Any


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Batch:
    rows: Any
    label: str = ""
    derived: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.derived = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        little = a.dtype.newbyteorder("<")
        return a.shape == b.shape and little == b.dtype and a.astype(little).tobytes() == b.tobytes()
    if isinstance(a, np.str_ | np.bytes_):
        return bool(a == b)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)


def round_trip(tree: Any) -> Any:
    return decode([bytes(frame) for frame in encode(tree)])


DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
    hnp.byte_string_dtypes(min_len=1),
    hnp.unicode_string_dtypes(min_len=1, endianness="?"),
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=6))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=())),
    st.binary(),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers()),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
    st.builds(np.bool_, st.booleans()),
    st.builds(np.str_, st.text()),
    st.builds(np.bytes_, st.binary()),
    st.just(np.datetime64("2020-01-01")),
)
TREES = st.recursive(
    SCALARS | ARRAYS,
    lambda t: st.one_of(
        st.lists(t, max_size=4),
        st.lists(t, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5) | st.integers(-(2**70), 2**70), t, max_size=4),
        st.builds(Point, t, t),
        st.builds(Batch, t, st.text(max_size=5)),
        st.builds(Frozen, t),
    ),
    max_leaves=12,
)


@given(TREES)
def test_any_tree_comes_back_with_every_bit(tree: Any) -> None:
    for _ in range(3):  # the layout of a header is known from the third time on
        assert same(tree, round_trip(tree))


@given(ARRAYS)
def test_received_arrays_are_read_only_contiguous_and_aligned(array: np.ndarray) -> None:
    got = round_trip([array, array])[1]
    assert got.flags.c_contiguous
    assert got.flags.aligned
    assert not got.flags.writeable
    assert got.dtype.isnative


def test_nan_payload_negative_zero_and_signalling_nan() -> None:
    bits = np.array([0x7FF8DEADBEEF0001, 0xFFF0000000000001, 0x8000000000000000], np.uint64)
    for tree in (bits.view(np.float64), [np.float64(x) for x in bits.view(np.float64)]):
        assert same(tree, round_trip(tree))
    value = struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))[0]
    assert same([value, -0.0], round_trip([value, -0.0]))


def test_large_arrays_are_frames_of_their_own_memory() -> None:
    array = np.arange(100_000.0).reshape(100, 1000)
    header, frame = encode({"x": array})
    assert len(header) < 200
    assert np.shares_memory(np.frombuffer(frame, np.uint8), array)
    assert np.shares_memory(decode([header, frame])["x"], array)


def test_medium_arrays_share_a_frame_so_many_of_them_are_few_frames() -> None:
    tree = [np.full(512, i) for i in range(1000)]
    frames = encode(tree)
    assert len(frames) == 1 + math.ceil(1000 * 4096 / layout.SHARED_FRAME_BYTES_MAX)
    assert same(tree, decode(frames))


def test_mixed_sizes_keep_their_order() -> None:
    tree = [np.full(n, n) for n in (1, 100, 10_000, 200, 20_000, 300, 200_000, 5, 400)]
    assert same(tree, round_trip(tree))


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
        np.arange(200_000)[::2],
        np.arange(20_000, dtype=">f8"),
        np.array("x" * 1000),
        np.array("x" * 50_000),
        np.zeros((0, 2**40)),
        np.zeros((3, 0)),
        np.array(5),
        np.arange("2000-01", "2900-01", dtype="M8[D]"),
        np.array(["NaT", "2020"], "M8[25s]"),
        np.broadcast_to(np.float32(3), (500, 500)),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_awkward_layouts(array: np.ndarray) -> None:
    assert same(array, round_trip(array))


def test_memory_mapped_file_travels_as_an_array(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(10))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert same(np.arange(10), round_trip(mapped))


def test_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for n in (3, 100_000):
        array = np.arange(n).astype(ml_dtypes.bfloat16)
        got = round_trip([array, array[0]])
        assert got[0].dtype == array.dtype
        assert got[0].tobytes() == array.tobytes()
        assert type(got[1]) is ml_dtypes.bfloat16


def test_bfloat16_where_ml_dtypes_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setattr(layout, "_array_descriptions", {})
    body = struct.pack("<BB8sB", 1, 8, b"bfloat16", 0).ljust(16, b"\0") + b"\0\0"
    with pytest.raises(RemoteProtocolError, match="install it"):
        decode([msgpack.packb(msgpack.ExtType(layout.INLINE, body))])


def test_unaligned_frames_are_copied_into_place() -> None:
    array = np.arange(100_000.0)
    header, frame = encode(array)
    shifted = memoryview(b"x" + bytes(frame))[1:]
    got = decode([header, shifted])
    assert got.flags.aligned
    assert same(array, got)


# --- what can't be sent ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": [1, {2, 3}]}, ["a set", "at a/1"]),
        ({"a": (0, lambda: 0)}, ["a function", "at a/1"]),
        ([np.array([1, None])], ["an array of dtype object whose cells are int", "at 0", "send arrays"]),
        (
            {"x": np.array([b"a", "a"])[:0].astype(object)} | {"y": np.array(["a", b"a"], object)},
            ["bytes and str", "at y"],
        ),
        ({"r": np.zeros(2, [("x", int)])}, ["structured", "dict", "at r"]),
        (Point(1, object()), ["an object", "at y"]),
        (Batch(object()), ["an object", "at rows"]),
        (Counter(a=1), ["collections.Counter", "as the whole value", "dict(...)"]),
        ({"a": {(1, 2): 3}}, ["key (1, 2) of type tuple", "at a"]),
        ({True: 1}, ["key True of type bool"]),
        ({np.str_("a"): 1}, ["key np.str_('a') of type str_", "use str(key)"]),
        ({np.int64(1): 1}, ["key np.int64(1) of type int64", "use int(key)"]),
        ([np.ma.masked_array([1], [True])], ["MaskedArray", "x.filled", "at 0"]),
        ([np.ones((1, 1)).view(np.matrix)], ["matrix", "np.asarray", "at 0"]),
        ({"a": range(3), "b": {1: 2}.keys()}, ["dict_keys", "sorted(...)", "at b"]),
        ([1 << 8 * 5000], ["an int of 5001 bytes", "at 0"]),
        ([slice("a", 2)], ["a slice", "at 0"]),
        ([np.void(b"xx")], ["a NumPy scalar", "at 0"]),
        ({"x": msgpack.ExtType(1, b"\0")}, ["ExtType", "at x"]),
        (msgpack.Timestamp(1), ["Timestamp"]),
        ([types.SimpleNamespace()], ["types.SimpleNamespace", "at 0"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unsendable_values_are_named_with_their_path(tree: Any, words: list[str]) -> None:
    with pytest.raises(UnsendableError) as caught:
        encode(tree)
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, TypeError)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 1 has no such type")
def test_strings_of_variable_width_become_objects() -> None:
    texts = np.array(["a", "bcd\0"], dtype=np.dtypes.StringDType())
    assert decode(encode({"x": texts}))["x"].tolist() == ["a", "bcd\0"]


CELLS = {
    "texts": ["", "é\0", "ends\0", None, "\ud800", "x" * 100_000],
    "no cells": [],
    "nulls": [None, None],
    "bytes": [b"", b"\0\0", None, bytes(100_000)],
    "lists": [np.arange(3), np.arange(0), None],
    "lists of texts": [np.array(["a", "bcd"]), np.array([""]), np.array(["e\0"], object)],
    "lists of lists": [np.fromiter([np.arange(2), np.arange(1)], object, 2), np.empty(0, object)],
    "matrices": [np.ones((2, 3)), np.ones((1, 3))],
    "unlike lists": [np.arange(3), np.ones(2), np.array(["a"])],
    "records": [{"a": [1, None, {"b": "c"}]}, None, {}, [1.5, b"\0"]],
}


def plain(cell: Any) -> Any:
    return (
        [cell.dtype.kind.replace("U", "O"), cell.shape, cell.tolist()]
        if isinstance(cell, np.ndarray)
        else cell
    )


@pytest.mark.parametrize("cells", CELLS.values(), ids=CELLS)
def test_object_arrays_keep_their_cells(cells: list[Any]) -> None:
    array = np.fromiter(cells, object, len(cells))
    for view in (array, array.reshape(1, -1, 1), array[::-1]):
        frames = encode({"x": view})
        got = decode(frames)["x"]
        assert (got.dtype, got.shape, got.flags.writeable) == (array.dtype, view.shape, False)
        assert repr(list(map(plain, got.flat))) == repr(list(map(plain, view.flat)))
        assert [bytes(frame) for frame in encode({"x": got})] == [bytes(frame) for frame in frames]


def test_one_long_text_does_not_widen_the_others() -> None:
    texts = np.array(["y" * 200_000, *["short"] * 500])
    assert sum(len(bytes(frame)) for frame in encode(texts)) < 300_000
    got = decode(encode(texts))
    assert got.dtype == object
    assert got.tolist() == texts.tolist()
    assert decode(encode(texts[:1])).dtype == texts.dtype


def test_a_class_inside_a_function_is_rejected() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    with pytest.raises(UnsendableError, match=r"Local.*top level.*at 0"):
        encode([Local(1)])


def nest(levels: int) -> Any:
    tree: Any = 0
    for _ in range(levels):
        tree = [tree]
    return tree


def test_depth() -> None:
    assert round_trip(nest(DEPTH_MAX)) == nest(DEPTH_MAX)
    with pytest.raises(UnsendableError, match="more than 128 levels"):
        encode(nest(DEPTH_MAX + 1))
    for tree in (nest(DEPTH_MAX + 1), nest(300)):
        with pytest.raises(RemoteProtocolError, match="more than 128 levels"):
            decode([msgpack.packb(tree)])
    with pytest.raises(RemoteProtocolError):
        decode([b"\x91" * 100_000 + b"\x90"])


def test_a_cycle_is_rejected() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(UnsendableError, match="cycle"):
        encode(tree)


def test_a_shared_node_that_would_explode_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ELEMENTS_MAX", 1 << 16)
    tree: Any = 0
    for _ in range(100):
        tree = [tree, tree]
    with pytest.raises(UnsendableError, match="elements"):
        encode(tree)


# --- classes --------------------------------------------------------------------------------


def test_records_are_rebuilt_without_calling_their_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = encode([Batch([1], "a"), Pair(1, 2)])
    monkeypatch.setattr(Batch, "__post_init__", lambda self: pytest.fail("was called"))
    batch, pair = decode(frames)
    assert type(batch) is Batch
    assert (batch.rows, batch.label, batch.derived) == ([1], "a", 1)
    assert type(pair) is Pair


def record(text: str, *values: Any) -> list[bytes]:
    return [msgpack.packb([layout.RECORD, text, *values])]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("not_imported_module:X(a)", "not imported here"),
        ("os:system(a)", "neither a namedtuple nor a dataclass"),
        ("subprocess:Popen(args)", "neither a namedtuple nor a dataclass"),
        ("builtins:object()", "neither a namedtuple nor a dataclass"),
        ("numpy:f2py.main(a)", "neither a namedtuple nor a dataclass"),
        (f"{__name__}:Frozen(other)", "at the sender"),
        (f"{__name__}:Frozen(value)", "1 fields, but 2 were received"),
        (f"{__name__}:Frozen", "malformed"),
        ("__import__('os')(a)", "malformed"),
        ("", "malformed"),
    ],
)
def test_classes_of_a_peer_are_checked(text: str, match: str) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        decode(record(text, 1, 2))


def test_a_class_that_is_defined_again_is_the_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = record(f"{__name__}:Frozen(value)", 7)
    assert type(decode(frames)) is Frozen
    again = dataclasses.make_dataclass("Frozen", ["value"])
    again.__module__ = __name__
    monkeypatch.setattr(sys.modules[__name__], "Frozen", again)
    assert type(decode(frames)) is again
    monkeypatch.setattr(sys.modules[__name__], "Frozen", dataclasses.make_dataclass("Frozen", ["other"]))
    with pytest.raises(RemoteProtocolError, match="at the sender"):
        decode(frames)


@pytest.mark.parametrize("known", [Batch([1]), Pair(1, 2)])
def test_nodes_below_a_known_class_are_checked(known: Any) -> None:
    encode([known])
    values = {"rows": {(1, 2): 3}} if type(known) is Batch else {"second": {(1, 2): 3}}
    bad = dataclasses.replace(known, **values) if type(known) is Batch else known._replace(**values)
    with pytest.raises(UnsendableError, match="keys"):
        encode([bad])


def test_naming_a_module_runs_none_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "codec_lazy.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Box:\n    v: int\n"
        "def __getattr__(name):\n    raise SystemExit(name)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    frames = record("codec_lazy:Box(v)", 7)
    with pytest.raises(RemoteProtocolError, match="not imported"):
        decode(frames)
    assert decode(frames, may_import=True).v == 7
    with pytest.raises(RemoteProtocolError, match="neither a namedtuple"):
        decode(record("codec_lazy:Absent(v)", 7))


# --- what a peer may not send ---------------------------------------------------------------


def objects(*parts: Any) -> list[bytes]:
    """Return the frames of an object array of given parts, as a list of one item."""
    packed = codec.encode([layout.OBJECTS.data, *parts])
    return [bytes(packed[0]).replace(msgpack.packb(layout.OBJECTS.data), msgpack.packb(layout.OBJECTS), 1)]


def ext(code: int, data: bytes) -> list[bytes]:
    return [msgpack.packb(msgpack.ExtType(code, data))]


def description(dtype: bytes, *shape: int) -> bytes:
    body = struct.pack(f"<B{len(dtype)}sB{len(shape)}Q", len(dtype), dtype, len(shape), *shape)
    units = -(-(1 + len(body)) // 16)
    return (bytes([units]) + body).ljust(units * 16, b"\0")


MALFORMED: dict[str, list[bytes]] = {
    "nothing": [],
    "empty header": [b""],
    "two values": [b"\x01\x02"],
    "cut list": [b"\x93\x01\x02"],
    "list that claims 4 billion": [b"\xdd\xff\xff\xff\xff"],
    "dict that claims 4 billion": [b"\xdf\xff\xff\xff\xff"],
    "bytes that claim 4 billion": [b"\xc6\xff\xff\xff\xff"],
    "reserved byte": [b"\xc1"],
    "bad utf-8": [b"\xa2\xff\xff"],
    "bytes as key": [b"\x81\xc4\x01a\x01"],
    "float as key": [b"\x81\xcb" + bytes(8) + b"\x01"],
    "list as key": [b"\x81\x90\x01"],
    "timestamp": [msgpack.packb(msgpack.Timestamp(1))],
    "timestamp in a list": [msgpack.packb([1, msgpack.Timestamp(1)])],
    "unknown extension": ext(99, b""),
    "unused frame": [b"\x01", b"abc"],
    "lone mark": [msgpack.packb(layout.TUPLE)],
    "mark in the middle": [msgpack.packb([1, layout.TUPLE])],
    "two marks": [msgpack.packb([layout.TUPLE, layout.TUPLE])],
    "mark as key": [b"\x81" + msgpack.packb(layout.TUPLE) + b"\x01"],
    "unknown mark": [msgpack.packb([msgpack.ExtType(layout.MARK, b"\x09"), 1])],
    "slice of two": [msgpack.packb([layout.SLICE, 1, 2])],
    "slice of str": [msgpack.packb([layout.SLICE, 1, 2, "x"])],
    "range step 0": [msgpack.packb([layout.RANGE, 1, 2, 0])],
    "record without a name": [msgpack.packb([layout.RECORD])],
    "record named by an int": [msgpack.packb([layout.RECORD, 3])],
    "long int": ext(layout.BIG_INT, bytes(5000)),
    "short int": ext(layout.BIG_INT, bytes(3)),
    "short complex": ext(layout.COMPLEX, bytes(15)),
    "array without description": ext(layout.INLINE, b""),
    "array with a cut description": ext(layout.INLINE, b"\x09\x03<f8"),
    "description of length 0": ext(layout.INLINE, b"\0" * 32),
    "object dtype": ext(layout.INLINE, description(b"|O", 1) + bytes(8)),
    "record dtype": ext(layout.INLINE, description(b"i4,i4", 1) + bytes(8)),
    "void dtype": ext(layout.INLINE, description(b"|V8", 1) + bytes(8)),
    "big-endian dtype": ext(layout.INLINE, description(b">f8", 1) + bytes(8)),
    "empty dtype": ext(layout.INLINE, description(b"", 1) + bytes(8)),
    "huge str dtype": ext(layout.INLINE, description(b"<U999999999", 1) + bytes(8)),
    "array one byte short": ext(layout.INLINE, description(b"<f8", 2) + bytes(15)),
    "array one byte long": ext(layout.INLINE, description(b"<f8", 2) + bytes(17)),
    "shape that overflows to 0": ext(layout.INLINE, description(b"<f8", 1 << 32, 1 << 32)),
    "shape that wraps": ext(layout.INLINE, description(b"<f8", 1 << 61)),
    "shape beyond int64": ext(layout.INLINE, description(b"<f8", 0, 1 << 63)),
    "bytes after the shape": ext(layout.INLINE, description(b"<f8", 1)[:-1] + b"\1" + bytes(8)),
    "65 dimensions": ext(layout.INLINE, description(b"<f8", *[1] * 65) + bytes(8)),
    "bool of 2": ext(layout.INLINE, description(b"|b1", 1) + b"\x02"),
    "scalar bool of 2": ext(layout.NUMPY_SCALAR, description(b"|b1") + b"\x02"),
    "scalar with a shape": ext(layout.NUMPY_SCALAR, description(b"<f8", 1) + bytes(8)),
    "objects of no kind": objects(9, [1], np.zeros(1, np.int64), np.zeros(0, np.uint8)),
    "objects without parts": objects(ragged.TEXTS, [1]),
    "objects of another shape": objects(ragged.TEXTS, [2], np.zeros(1, np.int64), np.zeros(0, np.uint8)),
    "objects of a negative shape": objects(ragged.TEXTS, [-1], np.zeros(1, np.int64), np.zeros(0, np.uint8)),
    "texts longer than their bytes": objects(ragged.TEXTS, [1], np.array([2]), np.zeros(1, np.uint8)),
    "texts shorter than their bytes": objects(ragged.TEXTS, [1], np.array([0]), np.zeros(1, np.uint8)),
    "texts of length -2": objects(ragged.TEXTS, [2], np.array([-2, 1]), np.zeros(1, np.uint8)),
    "texts that are not utf-8": objects(ragged.TEXTS, [1], np.array([1]), np.full(1, 255, np.uint8)),
    "lengths that overflow": objects(ragged.BYTES, [2], np.array([2**63 - 1, 2]), np.zeros(1, np.uint8)),
    "bytes of floats": objects(ragged.BYTES, [1], np.array([1]), np.zeros(1)),
    "nested cells of numbers": objects(ragged.NESTED, [1], [1]),
    "lists of a scalar": objects(ragged.LISTS, [1], np.array([1]), np.float64(1)),
    "code point beyond unicode": ext(layout.INLINE, description(b"<U1", 1) + b"\xff" * 4),
    "frame that is not there": ext(layout.IN_FRAME, description(b"<f8", 1) + struct.pack("<IQ", 0, 0)),
    "frame too short": [*ext(layout.IN_FRAME, description(b"<f8", 2) + struct.pack("<IQ", 0, 0)), bytes(15)],
    "offset beyond": [*ext(layout.IN_FRAME, description(b"<f8", 1) + struct.pack("<IQ", 0, 16)), bytes(16)],
    "odd offset": [*ext(layout.IN_FRAME, description(b"<f8", 1) + struct.pack("<IQ", 0, 8)), bytes(16)],
    "offset that wraps": [
        *ext(layout.IN_FRAME, description(b"<f8", 1) + struct.pack("<IQ", 0, (1 << 64) - 16)),
        bytes(16),
    ],
    "place cut off": [*ext(layout.IN_FRAME, description(b"<f8", 1) + b"\0\0"), bytes(16)],
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_frames_are_rejected(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(frames)


def test_an_array_beyond_its_frame_is_located() -> None:
    with pytest.raises(RemoteProtocolError, match=r"<?float64\[2\] at byte 0 of a frame of 15 bytes"):
        decode(MALFORMED["frame too short"])


def test_sizes_beyond_the_limits_are_rejected() -> None:
    with pytest.raises(RemoteProtocolError, match="frames"):
        decode([b"\xc0"] * 5, limits=MessageLimits(frames_max=4))
    with pytest.raises(RemoteProtocolError, match="header"):
        decode([msgpack.packb(b"x" * 100)], limits=MessageLimits(header_bytes_max=100))


def test_nested_claims_allocate_nothing() -> None:
    # Each level claims as many elements as there are bytes: 1000 lists of 8 MB, were they believed.
    header = b"".join(b"\xdd" + struct.pack(">I", 1_000_000) for _ in range(1000)) + bytes(1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode([header])
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


# Layouts: a message whose header is known is not parsed

STEP = [None, [((np.arange(400.0), 7), {"z": [np.arange(300, dtype=np.uint16)], "a": "text"})]]


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, Any]:
    known: dict[bytes, Any] = {}
    monkeypatch.setattr(codec, "_layouts", known)
    return known


def known_layouts(layouts: dict[bytes, Any]) -> int:
    return sum(not isinstance(layout, bool) for layout in layouts.values())


def test_a_known_layout_gives_each_message_its_own_contents(layouts: dict[bytes, Any]) -> None:
    trees = []
    for step in range(4):
        tree = [None, [((np.arange(400.0) + step, 7), {"z": [np.full(300, step, np.uint16)], "a": "text"})]]
        trees.append(round_trip(tree))
        assert same(tree, trees[-1])
        assert known_layouts(layouts) == (step > 0)
        assert not trees[-1][1][0][0][0].flags.writeable
    trees[2][1][0][1]["z"].append("changed")
    assert len(trees[3][1][0][1]["z"]) == 1, "containers belong to one message"


@pytest.mark.parametrize("damage", ["short", "fewer", "more"])
def test_frames_that_do_not_fit_a_known_layout_are_the_same_errors(
    damage: str, layouts: dict[bytes, Any]
) -> None:
    header, frame = map(bytes, encode(STEP))
    damaged = {"short": [header, frame[:100]], "fewer": [header], "more": [header, frame, b""]}[damage]
    with pytest.raises(RemoteProtocolError) as unknown:
        decode(damaged)
    for _ in range(3):
        decode([header, frame])
    assert known_layouts(layouts) == 1
    with pytest.raises(RemoteProtocolError) as known:
        decode(damaged)
    assert str(known.value) == str(unknown.value)


def test_results_that_are_one_float_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_float_slots", {})
    for bits in ("3ff8000000000000", "8000000000000000", "7ff8000000000123", "fff0000000000001"):
        [value] = struct.unpack(">d", bytes.fromhex(bits))
        [result] = round_trip([{"loss": value}])
        assert struct.pack(">d", result["loss"]).hex() == bits
    [start] = codec._float_slots
    assert start + bytes(8) == encode([{"loss": 0.0}])[0]
    for other in (bytes(7), bytes(9), bytes(16)):
        with pytest.raises(RemoteProtocolError):
            decode([start + other])
    assert round_trip([{"loss": 7}, {"loss": 2.0}]) == [{"loss": 7}, {"loss": 2.0}]


def test_values_are_checked_in_a_known_layout(layouts: dict[bytes, Any]) -> None:
    header, frame = map(bytes, encode([np.ones(2000, bool)]))
    for _ in range(3):
        decode([header, frame])
    assert known_layouts(layouts) == 1
    with pytest.raises(RemoteProtocolError, match="a bool array with a byte that is neither 0 nor 1"):
        decode([header, b"\2" * len(frame)])


@pytest.mark.parametrize(
    "tree",
    [
        [np.arange(400.0), Batch(1)],
        [np.arange(400.0), Point(1, 2)],
        [np.arange(400.0), np.arange(2)],
        [np.arange(400.0), np.float32(1)],
        [np.arange(400.0), slice(1)],
        [{"a": np.full(400, step)} for step in range(20)],
        {"text": "x" * 600, "a": np.arange(400.0)},
        [1, 2.5],
    ],
    ids=["record", "namedtuple", "small array", "scalar", "slice", "columns", "long header", "no frames"],
)
def test_other_trees_have_no_layout(tree: Any, layouts: dict[bytes, Any]) -> None:
    for _ in range(3):
        assert same(tree, round_trip(tree))
    assert known_layouts(layouts) == 0


def test_the_number_of_known_layouts_is_limited(layouts: dict[bytes, Any]) -> None:
    for number in range(300):
        for _ in range(2):
            round_trip([np.arange(400.0), number])
        assert len(layouts) <= codec._LAYOUTS_MAX


# Arguments: their headers are made once for each form

FORMS: list[list[Any]] = [
    [((np.arange(400.0),), {})],
    [
        ((np.ones((20, 30), np.float32), np.arange(999, dtype=np.int16)), {}),
        ((np.ones((20, 30), np.float32),), {}),
    ],
    [((np.arange(400.0)[::2],), {})],
    [((np.asfortranarray(np.ones((30, 40))),), {})],
    [((np.arange(400.0).astype(">f8"),), {})],
    [((np.ones(600, bool),), {})],
    [((np.arange("1970", "1972", dtype="M8[D]"),), {})],
    [((np.arange(400.0), 1),), {}],
    [((np.arange(400.0), 1), {})],
    [((np.arange(400.0),), {"x": 1})],
    [((np.arange(3.0),), {})],
    [((np.zeros(10_000),), {})],
    [((np.zeros(8000),) * 20, {})],
    [(np.arange(400.0), np.arange(2.0))],
    [((), {})],
    [],
    [np.zeros(10_000), np.ones((100, 200), np.complex64)],
    [np.zeros(400), np.ones((20, 30), np.float32)],
    [np.zeros(400), np.zeros(10_000)],
    [np.zeros((100, 200)).T],
    [[np.zeros(10_000)], [np.zeros(10_000), np.zeros(9_000)]],
    [((np.zeros(10_000), np.zeros(400)), {})],
    [np.zeros((3, 0))],
]


@pytest.mark.parametrize("values", FORMS, ids=range(len(FORMS)))
def test_arguments_are_encoded_as_any_tree(values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_headers", {})
    expected = [bytes(frame) for frame in encode([None, None, values, None])]
    for _ in range(3):
        assert [bytes(frame) for frame in encoder.encode_arguments(values)] == expected


def test_headers_of_arguments_are_kept_by_form(monkeypatch: pytest.MonkeyPatch) -> None:
    headers: dict[Any, bytes] = {}
    monkeypatch.setattr(encoder, "_headers", headers)
    for step in range(3):
        for values in ([((np.arange(400.0) + step,), {})], [np.arange(9_000.0) + step]):
            assert same([None, None, values, None], decode(encoder.encode_arguments(values)))
    assert len(headers) == 2


def test_forms_of_shards_and_arguments_differ() -> None:
    large = np.arange(9_000.0)
    for values in (
        [large],
        [((large,), {})],
        [[large]],
        [large, large],
        [[large, large]],
        [((large, large), {})],
    ):
        for _ in range(2):
            assert same([None, None, values, None], decode(encoder.encode_arguments(values)))


def test_the_number_of_kept_headers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    headers: dict[Any, bytes] = {}
    monkeypatch.setattr(encoder, "_headers", headers)
    for rows in range(200, 500):
        encoder.encode_arguments([((np.arange(float(rows)),), {})])
        assert len(headers) <= encoder._FORMS_MAX


SEEDS = [
    {"a": np.arange(3), "b": (1, 2.5, None, 2**80), "c": np.zeros(10_000), "d": np.arange(1000.0)},
    [Point(1, "x"), Frozen(np.float32(2)), slice(1, None, 2), range(3), 1j, {1: b"abc", "k": [True]}],
    [np.array(["ab", "c"]), np.array([True, False]), np.datetime64("2020-01-01"), np.str_("s")],
]


def attempt(frames: list[bytes]) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode(frames)


def test_fuzz_bit_flips_truncations_and_noise_never_do_harm() -> None:
    random = np.random.default_rng(0)
    tracemalloc.start()
    try:
        for tree in SEEDS:
            header, *rest = map(bytes, encode(tree))
            for _ in range(2):
                decode([header, *rest])
            for _ in range(200):  # frames of a known layout
                attempt([header, *[part[: int(random.integers(len(part) + 1))] for part in rest]])
            for at in range(len(header)):
                attempt([header[:at], *rest])
                for bit in range(8):
                    flipped = bytearray(header)
                    flipped[at] ^= 1 << bit
                    attempt([bytes(flipped), *rest])
            for _ in range(1000):
                damaged = bytearray(header)
                for _ in range(int(random.integers(1, 6))):
                    damaged[int(random.integers(len(damaged)))] = int(random.integers(256))
                attempt([bytes(damaged), *rest])
        for _ in range(3000):
            attempt([random.bytes(int(random.integers(1, 60))) for _ in range(int(random.integers(1, 3)))])
        assert tracemalloc.get_traced_memory()[1] < 64_000_000
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(max_size=80), min_size=1, max_size=3))
def test_random_frames_are_a_tree_or_an_error(frames: list[bytes]) -> None:
    attempt(frames)


def test_the_public_names_are_importable() -> None:
    assert set(codec.__all__) == {"Frame", "UnsendableError", "decode", "encode"}


@pytest.mark.parametrize("value", [0.5, -0.0, float("inf"), True, None, 3, np.float64(2.0), [1.5], "text"])
def test_a_single_result_has_the_frames_of_a_longer_list(value: object) -> None:
    """One number as a result takes a shorter path."""
    slot = "value \ud800"
    (frame,) = encode([{slot: value}])
    (two,) = encode([{slot: value}, {slot: value}])
    assert bytes(two) == b"\x92" + 2 * bytes(frame)[1:]
    assert decode([frame]) == [{slot: value}]
