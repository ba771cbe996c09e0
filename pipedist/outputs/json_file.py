"""`.json`: any tree, in the encoding of `pipedist.outputs.encoding`, keys sorted."""

from __future__ import annotations

from pathlib import Path

from pipedist.outputs import encoding
from pipedist.outputs.piecewise import Piecewise
from pipedist.outputs.sink import Mode, Sink
from pipedist.outputs.spool import ArraySpool
from pipedist.program import Tree


class JsonSink(Sink):
    """One value; or a list of the values of all steps or epochs, one on a line."""

    def __init__(self, path: Path, mode: Mode, axis: int, label: str) -> None:
        super().__init__(path, mode, axis, label)
        self._pieces = Piecewise(path, axis, "value", label)

    def _append(self, value: Tree) -> None:
        if self._mode == "pieces":
            self._pieces.append(value)
            return
        if self._mode == "each":
            self._text("[" if self._count == 1 else ",\n")
        self._text(encoding.dumps(value))

    def _complete(self) -> None:
        if self._mode == "pieces":
            self._write(self._pieces.tree())
        elif self._mode == "each":
            self._text("]" if self._count else "[]")
        elif not self._count:
            self._text("null")
        self._text("\n")

    def _write(self, tree: Tree) -> None:
        """Write a tree whose leaves are spools, a block of rows at a time."""
        if tree is None:
            self._text("null")
            return
        if isinstance(tree, ArraySpool):
            self._text("[")
            for index, block in enumerate(tree.blocks()):
                self._text(", " if index else "")
                self._text(encoding.text(encoding.array_to_json(block))[1:-1])
            self._text("]")
            return
        node = encoding.node(tree)
        if node is None:
            raise TypeError(f"a tree of spools holds a {type(tree).__qualname__}")
        if node[0] == "object":
            self._text("{")
            for index, (name, value) in enumerate(sorted(encoding.key_texts(node[1], ()))):
                self._text(", " if index else "")
                self._text(encoding.text(name) + ": ")
                self._write(value)
            self._text("}")
        else:
            self._text("[")
            for index, value in enumerate(node[1]):
                self._text(", " if index else "")
                self._write(value)
            self._text("]")

    def _text(self, text: str) -> None:
        self._out.file.write(text.encode())

    def _release(self) -> None:
        self._pieces.close()
