"""Shards that are read in blocks equal those that are read one by one."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedist.datasets.sources import open_source
from pipedist.protocol.program import ReaderConfig, Shards
from pipedist.worker import inputs
from pipedist.worker.inputs import LeaseShards, ShardFinder

ROWS = 23


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sources")
    np.save(folder / "f.npy", np.asfortranarray(np.arange(ROWS * 3.0).reshape(ROWS, 3)))
    np.savez(folder / "d.npz", a=np.arange(ROWS), b=np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2))
    words = ["x" * (n % 7) for n in range(ROWS)]
    np.save(folder / "words.npy", np.array(words))
    pq.write_table(pa.table({"n": list(range(ROWS)), "w": words}), folder / "t.parquet")
    pq.write_table(pa.table({"n": [None if n == 20 else n for n in range(ROWS)]}), folder / "bad.parquet")
    found = {}
    for name, kind in (
        ("f.npy", "npy"),
        ("d.npz", "npz"),
        ("words.npy", "npy"),
        ("t.parquet", "parquet"),
        ("bad.parquet", "parquet"),
    ):
        source = open_source(kind, {"path": [name]}, folder=Path(folder))
        found[name] = dict(source.config)
        source.close()
    found["range"] = {"kind": "range", "start": 5, "stop": 5 + ROWS * 2, "step": 2}
    return found


def described(finder: Any) -> Any:
    try:
        value, elements, epoch = finder()
    except Exception as error:
        return type(error), str(error)
    columns = value if isinstance(value, dict) else {"": value}
    reported = {
        k: (c.dtype, c.shape, c.tobytes(), c.flags.writeable, c.flags.c_contiguous)
        for k, c in columns.items()
    }
    return reported, list(elements), epoch


@pytest.mark.parametrize("name", ["f.npy", "d.npz", "words.npy", "t.parquet", "bad.parquet", "range"])
@given(
    st.integers(1, 7),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 30),
    st.integers(1, 60),
    st.integers(16, 600),
)
@settings(max_examples=40, deadline=None)
def test_blocks_give_the_same_shards_as_separate_reads(
    configs: dict[str, dict[str, Any]],
    name: str,
    batch: int,
    replicas: int,
    drop: bool,
    lo: int,
    count: int,
    block_bytes: int,
) -> None:
    reader = ReaderConfig(configs[name], batch, ROWS, drop)
    alone, together = ShardFinder(reader, replicas), ShardFinder(reader, replicas)
    before, inputs.BLOCK_BYTES_MAX = inputs.BLOCK_BYTES_MAX, block_bytes
    try:
        lease = LeaseShards(together, Shards(), lo, lo + count)
        for call in range(lo, lo + count):
            expected = described(lambda call=call: alone.find(Shards(), call - lo, call))
            assert described(lambda call=call: lease.find(call)) == expected
    finally:
        inputs.BLOCK_BYTES_MAX = before
        alone.close()
        together.close()


def test_a_defect_of_a_reader_is_not_hidden(configs: dict[str, dict[str, Any]]) -> None:
    finder = ShardFinder(ReaderConfig(configs["range"], 1, ROWS, False), 1)
    lease = LeaseShards(finder, Shards(), 0, ROWS)
    lease.find(0)
    read = finder._reader.read

    def defective(rows: range) -> Any:
        if len(rows) > 1:
            raise TypeError("a defect")
        return read(rows)

    finder._reader.read = defective
    with pytest.raises(TypeError, match="a defect"):
        lease.find(1)
    finder.close()


def test_short_shards_are_read_together(configs: dict[str, dict[str, Any]]) -> None:
    reader = ReaderConfig(configs["range"], 1, ROWS, False)
    finder = ShardFinder(reader, 1)
    lease = LeaseShards(finder, Shards(), 0, ROWS)
    lease.find(0)
    reads = []
    read = finder._reader.read
    finder._reader.read = lambda rows: (reads.append(rows), read(rows))[1]
    for call in range(1, ROWS):
        lease.find(call)
    assert reads == [range(1, ROWS)]


def test_a_value_that_was_sent_is_freed_when_the_next_call_begins() -> None:
    values = [np.zeros(3), np.ones(3)]
    watched = [weakref.ref(value) for value in values]
    lease = LeaseShards(ShardFinder(None, 1), Shards(values=list(values)), 0, 2)
    del values
    assert lease.find(0).value is lease.find(0).value  # other stages may look again
    for call in range(2):
        block, at = lease.from_call(call)
        assert block.values[at] is watched[call]()
    assert watched[0]() is None
