"""Whether two executions of a call gave the same: what `--verify` compares.

A value is compared leaf by leaf, by digests of the bytes that would be sent. Leaves that can't be sent (of a
value that never leaves the worker) are not compared: what differs in them shows in what is made of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from msgspec import Struct

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.errors import NonDeterministicError
from pipedist.protocol.codec import UnsendableError, encode
from pipedist.worker.array_isolation import own

_DIGEST_BYTES = 16


class Digests(Struct, frozen=True):
    """What a value was.

    Args:
        leaves: digest of each leaf, by its path; "" of a bare one.
        structure: of the tree around them.
    """

    leaves: Mapping[str, bytes]
    structure: str


def digests_of(value: Tree) -> Digests:
    """Return the digests of a value as it is now: whoever holds it may change it later."""
    leaves, structure = trees.flatten(value)
    paths = trees.treedef_paths(structure)
    found = ((path, _digest(leaf)) for path, leaf in zip(paths, leaves, strict=True))
    return Digests({path: digest for path, digest in found if digest is not None}, trees.describe(structure))


def _digest(leaf: trees.Leaf) -> bytes | None:
    try:
        frames = encode(own([leaf])[0])
    except UnsendableError:
        return None
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for frame in frames:
        digest.update(frame)
    return digest.digest()


def check_same(first: Digests, second: Digests) -> None:
    """Compare two executions of a stage's function on one shard.

    Raises:
        NonDeterministicError: they differ; it names the first place, in the order of paths.
    """
    before, now = first.leaves, second.leaves
    for path in dict.fromkeys((*before, *now)):
        if before.get(path) != now.get(path):
            place = f"at {path!r} in its value" if path else "in its value"
            one = path not in before or path not in now
            raise NonDeterministicError(_text(f"{place}{', which one of them has not' if one else ''}"))
    if first.structure != second.structure:
        raise NonDeterministicError(_text(f"{first.structure} and then {second.structure}"))


def _text(where: str) -> str:
    return (
        f"two executions of this call gave different results, {where}: the function is not deterministic in "
        "(shard, with, ctx), so another run may give other results. Usual causes: clocks; random numbers "
        "that are not of ctx.rng; what one call leaves behind for the next, in globals or in an instance; "
        "the order of a set; threads"
    )
