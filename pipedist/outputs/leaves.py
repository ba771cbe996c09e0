"""The leaves of a value as named arrays: what npz members, columns and spools are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipedist import trees
from pipedist.errors import OutputError
from pipedist.program import Tree

Array = npt.NDArray[Any]


class Leaves:
    """Takes values of ONE structure apart into named arrays.

    The structure is that of the first value; a later value with another one is an error that
    shows both.

    Args:
        bare: the name of the leaf of a value that is not a container.
        target: the file, for errors.
    """

    def __init__(self, *, bare: str, target: str) -> None:
        self._bare = bare
        self._target = target
        self._structure: trees.Treedef | None = None
        self.names: list[str] = []

    def take(self, tree: Tree) -> list[Array]:
        """Return the leaves of `tree` as arrays, in the order of `names`.

        Raises:
            OutputError: the structure is not that of the values before; two leaves have the
                same path; a leaf has no dtype that a file can hold.
        """
        leaves, structure = trees.flatten(tree)
        if self._structure is None:
            names = [path or self._bare for path in trees.treedef_paths(structure)]
            twice = (
                {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
            )
            if twice:
                raise OutputError(f"{self._target}: two leaves have the same path {min(twice)!r}")
            self._structure, self.names = structure, names
        elif structure != self._structure:
            raise OutputError(
                f"{self._target}: all values must have one structure: so far "
                f"{trees.describe(self._structure)}, now {trees.describe(structure)}"
            )
        return [self._array(leaf, name) for leaf, name in zip(leaves, self.names, strict=True)]

    def template(self, leaves: list[Any]) -> Tree:
        """Return the common structure with `leaves` in place of the values' own."""
        return None if self._structure is None else trees.unflatten(self._structure, leaves)

    def _array(self, leaf: Any, name: str) -> Array:
        if isinstance(leaf, bytes | bytearray | memoryview):
            leaf = bytes(leaf)
        if isinstance(leaf, bytes | str) and leaf[-1:] in (b"\0", "\0"):
            kind = "text" if isinstance(leaf, str) else "bytes"
            instead = "write .json" if kind == "text" else "return numpy.frombuffer(value, numpy.uint8)"
            raise OutputError(
                f"{self._target}: leaf {name!r} ends with a zero byte, which NumPy's {kind} can't hold: "
                f"{instead}"
            )
        array = np.asarray(leaf)
        kind = array.dtype.kind
        if kind == "O":
            what = f"a {type(leaf).__qualname__}"
            if isinstance(leaf, int):
                what = f"the integer {leaf}, which has more than 64 bits"
            raise OutputError(f"{self._target}: leaf {name!r} is {what}, not an array of numbers or text")
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return array
