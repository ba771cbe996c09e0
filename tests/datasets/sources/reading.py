"""Reads a source the way a worker does: from what was sent, with a reader of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.datasets.sources import Ids, Source, open_reader
from pipedist.protocol.codec import decode, encode


def read_elsewhere(source: Source, ids: Ids) -> Any:
    """Return a shard as a worker reads it; the source's own reading must be the same."""
    assert source.portable
    frames = [bytes(frame) for frame in encode([source.config, source.locate(ids)])]
    config, location = decode(frames)
    reader = open_reader(config)
    try:
        shard = reader.read(location)
    finally:
        reader.close()
    assert_sealed(shard)
    own = source.read(source.locate(ids))
    assert_sealed(own)
    assert_same(own, shard)
    if source.by_id:
        assert_same(ids, location)
    return shard


def assert_sealed(shard: Tree) -> None:
    """Check what holds for every array that a replica function receives."""
    for leaf in trees.flatten(shard)[0]:
        if isinstance(leaf, np.ndarray):
            assert type(leaf) is np.ndarray
            assert leaf.flags.c_contiguous
            assert leaf.flags.aligned
            assert not leaf.flags.writeable
            assert leaf.dtype.isnative


def assert_same(one: Tree, other: Tree) -> None:
    """Check that two trees have the same structure and the same bits."""
    (left, left_def), (right, right_def) = trees.flatten(one), trees.flatten(other)
    assert left_def == right_def
    for a, b in zip(left, right, strict=True):
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert a.dtype == object or a.tobytes() == b.tobytes()
            assert list(map(bytes, encode(a))) == list(map(bytes, encode(b)))
        else:
            assert a == b
