"""The interface through which values are written to a file, and the `.json` format.

A sink receives values in order, keeps little of them in memory, and ends in one of two ways:
`finish` makes the file durable at its path, `abort` leaves the earlier file there. The bytes of a
file depend on the values alone (for .parquet also on pyarrow's version).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

from pipedist.core.files import AtomicFile
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.outputs import encoding
from pipedist.outputs.run_record import writing
from pipedist.outputs.spool import ArraySpool, Piecewise

Mode = Literal["one", "pieces", "each"]
"""The appended values: one value; the pieces of one value; or a value per step or epoch."""


class Sink(ABC):
    """A file that is being written.

    Args:
        path: where the file will be; its folder exists.
        mode: the values that are appended.
        axis: the axis along which pieces are concatenated.
        label: the file as errors name it.
    """

    def __init__(self, path: Path, mode: Mode, axis: int, label: str) -> None:
        self.path = path
        self.label = label
        self._mode = mode
        self._axis = axis
        self._count = 0
        with writing(label):
            self._out = AtomicFile(path)

    def append(self, value: Tree) -> None:
        """Append the next value.

        Args:
            value: the value itself, the next step's piece of it, or the value of the next step
                or epoch: see `open_sink`.

        Raises:
            OutputError: the value does not fit the format or the values before, or can't be written.
        """
        if self._mode == "one" and self._count:
            raise OutputError(f"{self.label} holds one value, and a second one was appended")
        self._count += 1
        with writing(self.label):
            self._append(value)

    def check(self, value: Tree) -> None:
        """Check that a value of this structure, dtype and shape fits the format.

        A value that does not fit is thus reported at the first step, not after the last one.

        Raises:
            OutputError: the value does not fit the format.
        """
        self._fits(value)

    def finish(self) -> Path:
        """Complete the file and make it durable at its path.

        Returns:
            Its path.

        Raises:
            OutputError: the format can't hold the values, or the file can't be written; then no
                file is left.
        """
        try:
            with writing(self.label):
                self._complete()
                self._out.commit()
            return self.path
        except BaseException:
            self.abort()
            raise
        finally:
            self._release_quietly()

    def abort(self) -> None:
        """Discard the file; harmless after `finish`, and twice."""
        self._release_quietly()
        self._out.abort()

    def _release_quietly(self) -> None:
        with contextlib.suppress(OSError):  # closing may flush to a full disk
            self._release()

    @abstractmethod
    def _append(self, value: Tree) -> None: ...

    @abstractmethod
    def _complete(self) -> None: ...

    def _fits(self, value: Tree) -> None:  # noqa: B027  (.json holds any tree)
        """Raise OutputError if the format can't hold such a value."""

    def _release(self) -> None:  # noqa: B027  (most formats have nothing to release)
        """Close temporary files."""


class JsonSink(Sink):
    """`.json`: any tree; or a list of the values of all steps or epochs, one per line.

    The encoding is that of `pipedist.outputs.encoding`, with sorted keys.
    """

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
        """Write a tree of spools, a block of rows at a time."""
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
