"""all_reduce is `values.reduce(op, per_replica, axis=None)`, bit for bit, however replicas are spread."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipedist import values
from pipedist.collectives import folding, shared
from pipedist.collectives.options import CommunicationOptions
from pipedist.core import trees
from tests.collectives.gangs import TRANSFERS, Replica, run_gang

OPS = ("sum", "mean", "min", "max", "prod")
DTYPES = (
    "float32", "float64", "float16", ml_dtypes.bfloat16, "complex64", "complex128", "longdouble", ">f4",
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i8",
)  # fmt: skip
FLOATS = [0.0, -0.0, 1.0, -1.5, 3.25e-3, 1e30, np.inf, -np.inf, np.nan, 65504.0, 1e-45, 7.0]

LOOSE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bits(tree: Any) -> Any:
    leaves, treedef = trees.flatten(tree)
    return treedef, [(type(x), x.dtype, x.shape, leaf_bits(x)) for x in leaves]


def leaf_bits(x: Any) -> Any:
    if x.dtype == np.longdouble:  # six of its sixteen bytes say nothing
        return [f"{v!r}" for v in np.ravel(x)]
    return x.tobytes()


def make_array(rng: np.random.Generator, dtype: Any, shape: tuple[int, ...], *, wide: bool) -> Any:
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        low, high = (int(info.min), int(info.max)) if wide else (max(int(info.min), -3), 3)
        return rng.integers(low, high, shape, dtype=kind.newbyteorder("="), endpoint=True).astype(kind)
    with np.errstate(all="ignore"):
        array = np.asarray(
            rng.choice(FLOATS, shape) * np.where(rng.random(shape) < 0.5, 1, rng.random(shape))
        )
        return array.astype(kind)


def outcome(function: Any) -> Any:
    try:
        return bits(function())
    except (OverflowError, TypeError, ValueError) as error:
        return type(error), str(error)


def check(sizes: list[int], op: str, components: list[Any], **how: Any) -> None:
    replicas = sum(sizes)
    expected = outcome(lambda: values.reduce(op, values.per_replica(components), None, replicas))

    def function(replica: Replica) -> Any:
        return outcome(lambda: replica.all_reduce(op, components[replica.number]))

    for found in run_gang(sizes, function, **how):
        assert found == expected


@pytest.mark.parametrize("transfer", TRANSFERS)
@given(data=st.data())
@LOOSE
def test_any_tree_any_split(transfer: str, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    op = data.draw(st.sampled_from(OPS))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    wide = data.draw(st.booleans())
    specs = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([d for d in DTYPES if op not in ("min", "max") or "complex" not in str(d)]),
                st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 0), (33, 4), (1000,)]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    components = []
    for _ in range(sum(sizes)):
        leaves = [make_array(rng, dtype, shape, wide=wide) for dtype, shape in specs]
        components.append(leaves[0] if len(leaves) == 1 else {"a": leaves[0], "n": None, "rest": leaves[1:]})
    check(sizes, op, components, transfer=transfer)


@given(data=st.data())
@LOOSE
def test_large_vectors_in_any_packs(data: st.DataObject) -> None:
    sizes = data.draw(st.sampled_from([[1, 1], [2, 1], [1, 1, 1], [1, 2, 1], [3, 2]]))
    op = data.draw(st.sampled_from(OPS))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    dtype = data.draw(st.sampled_from(["float32", "float64", "float16", "int8", "int32", "int64"]))
    pack = data.draw(st.sampled_from([4096, 12288, 65536]))
    wanted = data.draw(st.sampled_from([0, 1, 100, 5000, 1 << 30]))
    options = CommunicationOptions(bytes_per_pack=max(wanted, 0 if wanted == 0 else 512))
    # All members wait for each other at each piece, and on a busy machine each wait can take milliseconds: half a
    # pack makes a vector large, and some pieces more show what more of them would.
    itemsize = np.dtype(dtype).itemsize
    large = pack // 2 // itemsize + 1
    piece = min(options.bytes_per_pack or pack, pack) // itemsize
    elements = data.draw(st.integers(large, large + 16 * piece))
    components = [
        {
            "x": make_array(rng, dtype, (elements,), wide=False),
            "y": make_array(rng, "float32", (5,), wide=False),
        }
        for _ in range(sum(sizes))
    ]
    check(sizes, op, components, pack_bytes=pack, options=options)


def test_large_vectors_use_the_pipelined_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties above are worth nothing if everything were small."""
    taken = []
    fold = shared._Piece.fold

    def counting(piece: Any, *parities: int) -> None:
        taken.append(1)
        fold(piece, *parities)

    monkeypatch.setattr(shared._Piece, "fold", counting)
    components = [np.arange(60_000, dtype=np.float32) + r for r in range(2)]
    check([1, 1], "sum", components, pack_bytes=65536)
    assert len(taken) == 2 * -(-240_000 // 65536)


def test_overflow_in_one_slice_is_everybodys_error() -> None:
    components = [np.full(60_000, 100, np.int8) for _ in range(2)]
    for component in components:
        component[:59_990] = 1
    check([1, 1], "sum", [{"deep": {"x": c}} for c in components], pack_bytes=4096)


def test_the_next_collective_works_after_an_overflow() -> None:
    def function(replica: Replica) -> Any:
        with pytest.raises(OverflowError, match=r"200 does not fit int8"):
            replica.all_reduce("sum", np.full(20_000, 100, np.int8))
        return float(replica.all_reduce("sum", 1.5))

    assert run_gang([1, 1], function, pack_bytes=4096) == [3.0, 3.0]
    assert run_gang([1, 1], function, transfer="queue") == [3.0, 3.0]
    assert run_gang([2], function) == [3.0, 3.0]


def test_numbers_of_python_count_as_64_bit() -> None:
    check([1, 1], "sum", [2, 3])
    check([1, 1], "sum", [2, np.int64(3)])
    check([1, 1], "mean", [2.5, 3.0])
    check([2], "mean", [1, 4])
    check([1, 1], "sum", [1 << 62, 1 << 62])  # the sum overflows, each fits


def test_results_are_the_replicas_own() -> None:
    def function(replica: Replica) -> Any:
        x = np.ones(1 << 19, np.float32)
        total = replica.all_reduce("sum", x)
        total += replica.number
        replica.barrier()
        again = replica.all_reduce("sum", x)
        return x[0], total[0], again[0], total.flags.writeable, not np.shares_memory(total, again)

    for sizes in ([1, 1], [2], [2, 1]):
        count = sum(sizes)
        expected = [(1, count + r, count, True, True) for r in range(count)]
        assert run_gang(sizes, function) == expected


def test_what_replicas_share_is_read_when_it_is_brought() -> None:
    """A scratch array of a module belongs to all replicas of a process, one after the other."""
    scratch = np.zeros(10)

    def function(replica: Replica) -> Any:
        scratch[:] = replica.number + 1
        total = replica.all_reduce("sum", scratch)
        scratch[:] = replica.number + 1
        return total[0], replica.all_gather(scratch)[::10].tolist()

    assert run_gang([3], function) == [(6, [1, 2, 3])] * 3


def test_kernels_are_quiet(recwarn: pytest.WarningsRecorder) -> None:
    big = np.full(4, 3e38, np.float32)
    out = np.empty(4, np.float32)
    folding.quietly(folding.kernel_for(values.ReduceOp.SUM, big.dtype).fold, [big, big], out)
    assert np.isinf(out).all()
    assert not recwarn.list
