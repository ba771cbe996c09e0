"""Lists of like items travel as columns; what comes back is what would come without them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import reduce
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipedist.errors import RemoteProtocolError
from pipedist.protocol import columns, encoder, layout
from pipedist.protocol.codec import UnsendableError, decode, encode
from pipedist.protocol.columns import ARRAY, DICT, LIST, PLAIN, SCALAR, TUPLE, SlotValues
from pipedist.reduction.tree import Reduction

from .test_codec import ARRAYS, DTYPES, SCALARS, TREES, Point, nest, same

Draw = Callable[[st.SearchStrategy[Any]], Any]


def has_columns(frames: list[Any]) -> bool:
    return bytes(frames[0][:1]) == bytes([layout.COLUMNS])


def round_trip(tree: Any) -> Any:
    return decode([bytes(frame) for frame in encode(tree)])


def shapes_of_items(draw: Draw, depth: int = 3) -> Callable[[], Any]:
    """Draw the form of items; return a strategy for one."""
    kind = draw(st.sampled_from(["array", "scalar", "leaf", "any", *["dict", "list", "tuple"] * (depth > 0)]))
    if kind == "array":
        dtype, shape = draw(DTYPES), draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
        return lambda: draw(hnp.arrays(dtype, shape))
    if kind == "scalar":
        dtype = draw(DTYPES.filter(lambda dtype: dtype.kind not in "US"))
        return lambda: draw(hnp.arrays(dtype, (1,)))[0]
    if kind == "leaf":
        leaf = draw(st.sampled_from([st.floats(), st.integers(), st.text(max_size=3), st.none()]))
        return lambda: draw(leaf)
    if kind == "any":
        return lambda: draw(SCALARS | ARRAYS)
    below = [shapes_of_items(draw, depth - 1) for _ in range(draw(st.integers(0, 3)))]
    if kind == "dict":
        key, count = st.text(max_size=3) | st.integers(-9, 9), len(below)
        keys = draw(st.lists(key, unique=True, min_size=count, max_size=count))
        return lambda: {key: item() for key, item in zip(keys, below, strict=True)}
    return lambda: (list if kind == "list" else tuple)(item() for item in below)


@settings(max_examples=150)
@given(st.data())
def test_lists_of_like_items_come_back_with_every_bit(data: Any) -> None:
    item = shapes_of_items(data.draw)
    items = [item() for _ in range(data.draw(st.integers(columns.ITEMS_MIN, 20)))]
    if data.draw(st.booleans()):
        items[data.draw(st.integers(0, len(items) - 1))] = data.draw(TREES)
    assert same(items, round_trip(items))


@given(st.lists(TREES, min_size=columns.ITEMS_MIN, max_size=12))
def test_lists_of_anything_come_back_with_every_bit(items: list[Any]) -> None:
    assert same(items, round_trip(items))


SUM = Reduction.of("sum", None)
LIKE: dict[str, Callable[[int], Any]] = {
    "arrays of one element": lambda k: {"y": np.array([k])},
    "floats": lambda k: {"y": float(k)},
    "arrays and numbers": lambda k: {"y": np.full((2, 3), k, np.float32), "n": float(k), "t": (k, [None])},
    "NumPy scalars": lambda k: {"y": np.float32(k)},
    "partials of arrays": lambda k: {"s": SUM.partial(np.array([k, k]))},
    "partials of floats": lambda k: {"s": SUM.partial(float(k))},
    "two slots": lambda k: {"a": np.array([k]), "b": np.array([float(k)])},
}


@pytest.mark.parametrize("item", LIKE.values(), ids=LIKE.keys())
def test_the_results_of_short_calls_are_columns(item: Callable[[int], Any]) -> None:
    items = [item(k) for k in range(300)]
    frames = encode(items)
    assert has_columns(frames)
    assert same(items, decode(frames))


UNLIKE: dict[str, list[Any]] = {
    "few": [{"y": np.array([k])} for k in range(columns.ITEMS_MIN - 1)],
    "numbers": [float(k) for k in range(100)],
    "small ints": [{"y": k} for k in range(100)],
    "other keys": [{"y": float(k)} for k in range(50)] + [{"z": 0.0}],
    "True as a key": [{1: 1.5}] * 20 + [{True: 2.5}],
    "arrays that are much together": [np.zeros(64) for _ in range(2049)],
    "large arrays": [np.zeros(1000) for _ in range(20)],
    "an empty list": [[] for _ in range(100)],
}


@pytest.mark.parametrize("items", UNLIKE.values(), ids=UNLIKE.keys())
def test_other_lists_are_not(items: list[Any]) -> None:
    try:
        frames = encode(items)
    except UnsendableError as error:
        assert "key True" in str(error)  # noqa: PT017
        return
    assert not has_columns(frames)
    assert same(items, decode(frames))


def test_both_forms_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for item in LIKE.values():
        items = [item(k) for k in range(50)]
        in_columns = round_trip(items)
        monkeypatch.setattr(encoder, "ITEMS_MIN", 1000)
        assert not has_columns(encode(items))
        assert same(in_columns, round_trip(items))
        monkeypatch.undo()


def test_received_arrays_are_read_only_contiguous_and_aligned() -> None:
    for item in round_trip([np.full((3, 2), k, np.int16) for k in range(40)]):
        assert item.flags.c_contiguous
        assert item.flags.aligned
        assert not item.flags.writeable


@pytest.mark.parametrize("bad", [{1, 2}, object, {(1,): 2}, nest(200)], ids=["set", "class", "key", "nest"])
def test_unsendable_items_are_named_without_columns_too(bad: Any) -> None:
    items = [{"y": np.array([k]), "z": 0} for k in range(20)]
    items[13]["z"] = bad
    with pytest.raises(UnsendableError, match="13"):
        encode(items)


def header(count: Any, column: Any) -> list[bytes]:
    packer = encoder._Encoder()
    return [bytes([layout.COLUMNS]) + packer.pack([count, column])]


FLOATS = [PLAIN, [1.5] * 10]
MALFORMED: dict[str, list[bytes]] = {
    "nothing": [bytes([layout.COLUMNS])],
    "twice": [bytes([layout.COLUMNS, layout.COLUMNS]) + msgpack.packb([10, FLOATS])],
    "no list": [bytes([layout.COLUMNS]) + msgpack.packb(3)],
    "no count": header("x", FLOATS),
    "negative count": header(-1, FLOATS),
    "bool as count": header(True, [PLAIN, [1.5]]),
    "too few": header(11, FLOATS),
    "too many": header(9, FLOATS),
    "unknown kind": header(10, [9, [1.5] * 10]),
    "kind that is no int": header(10, [5.0, [1.5] * 10]),
    "kind of a bool": header(10, [True, np.zeros(10)]),
    "list for an array": header(10, [ARRAY, [1.5] * 10]),
    "array of other length": header(10, [ARRAY, np.zeros((9, 100))]),
    "array without items": header(10, [ARRAY, np.zeros(10)]),
    "scalars with a shape": header(10, [SCALAR, np.zeros((10, 2))]),
    "array of text": header(10, [ARRAY, np.array([["ab"]] * 10)]),
    "0-d array": header(1, [SCALAR, np.zeros(())]),
    "dict without keys": header(10, [DICT, [FLOATS]]),
    "dict with a float key": header(10, [DICT, [1.5], [FLOATS]]),
    "dict with a key twice": header(10, [DICT, ["a", "a"], [FLOATS, FLOATS]]),
    "dict with too few columns": header(10, [DICT, ["a", "b"], [FLOATS]]),
    "list of no columns": header(10, [LIST, 3]),
    "column that is a number": header(10, [TUPLE, [3]]),
    "empty column": header(10, [LIST, [[]]]),
    "column with more": header(10, [LIST, [FLOATS], 3]),
    "lists from nothing": header(1_000_000, [LIST, []]),
    "arrays from nothing": header(1 << 40, [ARRAY, np.zeros((1 << 40, 0), np.int8)]),
    "one slot, array of other length": header(10, [DICT, ["a"], [[ARRAY, np.zeros((9, 100))]]]),
    "one slot, array of text": header(10, [DICT, ["a"], [[ARRAY, np.array([["ab"]] * 10)]]]),
    "one slot, list for an array": header(10, [DICT, ["a"], [[ARRAY, [1.5] * 10]]]),
    "one slot, no column": header(10, [DICT, ["a"], []]),
    "one slot, column with more": header(10, [DICT, ["a"], [[ARRAY, np.zeros((10, 2)), 3]]]),
    "slots that are a number": header(10, [DICT, 1, [FLOATS]]),
    "deep": header(1, reduce(lambda column, _: [LIST, [column]], range(300), FLOATS)),
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("stacked", [False, True])
def test_malformed_columns_are_rejected(frames: list[bytes], stacked: bool) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(frames, stacked=stacked)


@pytest.mark.parametrize("item", LIKE.values(), ids=LIKE.keys())
def test_arrays_of_one_slot_stay_stacked(item: Callable[[int], Any]) -> None:
    items = [item(k) for k in range(300)]
    found = decode(encode(items), stacked=True)
    if len(items[0]) > 1 or type(items[0].get("y")) is not np.ndarray:
        assert same(items, found)
        return
    assert type(found) is SlotValues
    assert same(items, list(found))
    assert same(items[100:200], list(found[100:200]))
    assert same(items[7], found[7])
    assert found.values.shape == (300, 1)
    assert not found.values.flags.writeable


def test_columns_inside_a_tree_are_nothing_but_a_reserved_byte() -> None:
    with pytest.raises(RemoteProtocolError):
        decode([b"\x92\x01" + header(10, FLOATS)[0]])


def test_a_small_message_makes_no_large_tree() -> None:
    column = [LIST, [[LIST, []] for _ in range(1000)]]
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="too many for its size"):
            decode(header(30_000, column))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_fuzz() -> None:
    random = np.random.default_rng(0)
    for items in (
        [{"y": np.array([k]), "t": (float(k), [np.float32(k)])} for k in range(12)],
        [{"y": np.array([k])} for k in range(12)],
    ):
        _fuzz(items, random)


def _fuzz(items: list[Any], random: np.random.Generator) -> None:
    first, *rest = map(bytes, encode(items))
    assert first[0] == layout.COLUMNS
    for at in range(len(first)):
        for bit in range(8):
            flipped = bytearray(first)
            flipped[at] ^= 1 << bit
            _attempt([bytes(flipped), *rest])
        _attempt([first[:at], *rest])
    for _ in range(3000):
        damaged = bytearray(first)
        for _ in range(int(random.integers(1, 6))):
            damaged[int(random.integers(1, len(damaged)))] = int(random.integers(256))
        _attempt([bytes(damaged), *rest])


def _attempt(frames: list[bytes]) -> None:
    for stacked in (False, True):
        try:
            decode(frames, stacked=stacked)
        except RemoteProtocolError:
            continue


KEYS = st.just((1,)) | st.text(max_size=2)


@given(TREES | st.recursive(st.just(0), lambda t: st.lists(t) | st.dictionaries(KEYS, t)))
def test_the_check_of_small_trees_agrees_with_the_check_of_all_trees(tree: Any) -> None:
    for whole in (tree, nest(200), [Point(tree, 1)], {True: tree}, [msgpack.Timestamp(1), tree]):
        verdicts = []
        for nodes in (layout._SMALL_NODES, -1):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(layout, "_SMALL_NODES", nodes)
                try:
                    layout.check_nodes(whole)
                    verdicts.append("")
                except layout.UnsuitableTree as error:
                    verdicts.append(str(error))
        assert verdicts[0] == verdicts[1]
