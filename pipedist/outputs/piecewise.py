"""A tree of arrays that grows piece by piece: one spool for each leaf, in temporary files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

from pipedist.outputs.leaves import Leaves
from pipedist.outputs.spool import ArraySpool
from pipedist.program import Tree

_IN_MEMORY_BYTES = 2**16
"""A leaf that stays smaller than this needs no temporary file: a value may have thousands of leaves."""


class Piecewise:
    """The pieces of one tree of arrays, put end to end leaf by leaf.

    Args:
        path: the file that they are for; temporary files are made (and unlinked at once, so that
            nothing survives a kill) in its folder.
        axis: along which the pieces are put end to end.
        bare: the name of the leaf of a bare array.
        label: what errors call the file.
    """

    def __init__(self, path: Path, axis: int, bare: str, label: str) -> None:
        self._path = path
        self._axis = axis
        self._label = label
        self._leaves = Leaves(bare=bare, target=label)
        self.spools: dict[str, ArraySpool] = {}

    def append(self, piece: Tree, *, stack: bool = False) -> None:
        """Take the next piece.

        Args:
            piece: a tree of arrays of the structure of the pieces before.
            stack: the piece is one index of a new axis 0.

        Raises:
            OutputError: structure, dtype or shape differ from those before.
        """
        for leaf, name in zip(self._leaves.take(piece), self._leaves.names, strict=True):
            spool = self.spools.get(name)
            if spool is None:
                file: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=str(self._path.parent))  # noqa: SIM115
                label = f"{self._label}: leaf {name!r}"
                spool = self.spools[name] = ArraySpool(file, axis=self._axis, label=label)
            spool.append(leaf[None] if stack else leaf)

    def tree(self) -> Tree:
        """Return the tree with a spool for each leaf; None where there were no pieces."""
        return self._leaves.template(list(self.spools.values()))

    def close(self) -> None:
        """Drop the temporary files."""
        for spool in self.spools.values():
            spool.close()
        self.spools.clear()
