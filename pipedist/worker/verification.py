"""Comparison of two executions of a call, for `--verify`.

The values of a call's stages are compared leaf by leaf, by digests of the bytes that would be sent. Leaves that cannot
be sent (in a value that never leaves the worker) are not compared: a difference in them shows in the values computed
from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from msgspec import Struct

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.errors import NonDeterministicError
from pipedist.protocol.encoder import UnsendableError, encode
from pipedist.worker.array_isolation import take_ownership

_DIGEST_BYTES = 16


class Digests(Struct, frozen=True):
    """The structure of a value, and the digest of each leaf by path ("" for a bare leaf)."""

    leaves: Mapping[str, bytes]
    structure: str


def digests_of(value: Tree) -> Digests:
    leaves, structure = trees.flatten(value)
    paths = trees.treedef_paths(structure)
    found = ((path, _digest(leaf)) for path, leaf in zip(paths, leaves, strict=True))
    return Digests({path: digest for path, digest in found if digest is not None}, trees.describe(structure))


def _digest(leaf: trees.Leaf) -> bytes | None:
    try:
        frames = encode(take_ownership([leaf])[0])
    except UnsendableError:
        return None
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for frame in frames:
        digest.update(frame)
    return digest.digest()


def check_same(first: Digests, second: Digests) -> None:
    """Compare two executions of a stage's function on one shard."""
    before, now = first.leaves, second.leaves
    path = next((p for p in (*before, *now) if before.get(p) != now.get(p)), None)
    if path is not None:
        where = f"at {path!r} in its value" if path else "in its value"
        where += "" if path in before and path in now else ", which only one of them has"
    elif first.structure != second.structure:
        where = f"{first.structure} and then {second.structure}"
    else:
        return
    raise NonDeterministicError(
        f"two executions of this call gave different results, {where}: the function is not deterministic in "
        "(shard, with, ctx), so another run may give other results. Usual causes: clocks; random numbers "
        "that do not come from ctx.rng; state that one call leaves for the next, in globals or in an instance; "
        "the order of a set; threads"
    )
