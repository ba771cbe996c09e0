"""The interface through which values are written to a file or folder, and the `.json` format.

A sink receives values in order, keeps little of them in memory, and ends in one of two ways:
`finish` makes the file durable at its path, `abort` leaves the earlier file there. The bytes of a
file depend on the values alone (and on the version of the library that writes the format), not on the
pieces in which they came: those depend on the order of arrival.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy.typing as npt
from msgspec import Struct

from pipedist.core import ragged
from pipedist.core.files import AtomicFile, AtomicPath
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.outputs import encoding
from pipedist.outputs.run_record import writing
from pipedist.outputs.spool import ArraySpool, JsonSpool, Leaves, Piecewise

Mode = Literal["one", "pieces", "each"]
"""The appended values: one value; the pieces of one value; or a value per step or epoch."""


class Target(Struct, frozen=True):
    """A file or folder to be written, and the form of the values.

    Args:
        path: where it will be; its folder exists.
        axis: the axis along which pieces are concatenated.
        label: the file as errors name it.
        name: the stage, or the part of its value.
        run: the id of the run.
        table: returns the columns of a value, arrays [rows, ...] by name, for a format with rows; None: the
            columns are the value's leaves.
        options: the keys of the output beside its path.
    """

    path: Path
    mode: Mode
    axis: int = 0
    label: str = ""
    name: str = "value"
    run: str = ""
    table: Callable[[Tree], dict[str, npt.NDArray[Any]]] | None = None
    options: Mapping[str, Any] = {}


def imported(module: str, label: str, what: str, extra: str) -> Any:
    """Import a module of another package, which a format needs; raise OutputError if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0].replace("PIL", "Pillow")
        raise OutputError(f"{label}: {what} needs {package}: pip install 'pipedist[{extra}]'") from None


class Sink(ABC):
    """A file or folder that is being written."""

    _bare = "value"  # the name of the leaf of a value that is not a container
    _fixed_width = False  # whether the file holds texts of one width only
    _has_empty = False  # whether a piece was an empty list, of records that a call did not make

    _writes: ClassVar[type[AtomicFile | AtomicPath]] = AtomicFile  # or a library writes, by path
    _out: AtomicFile | AtomicPath

    def __init__(self, target: Target) -> None:
        self.path, self.label, self._mode = target.path, target.label, target.mode
        self._axis = 0 if self._mode == "each" else target.axis  # values of steps get a new axis 0
        self._count = 0
        self._leaves = self._new_leaves()
        self._pieces = Piecewise(self.path, self._axis, self._leaves, self.label)
        with writing(self.label):
            self._out = self._writes(self.path)

    def append(self, value: Tree) -> None:
        """Append the value, its next piece, or that of the next step or epoch.

        If it does not fit the format or the values before, or can't be written, raise OutputError.
        """
        if self._mode == "one" and self._count:
            raise OutputError(f"{self.label} holds one value, and a second one was appended")
        self._count += 1
        if self._mode == "pieces" and type(value) is list and not value:
            self._has_empty = True
            return
        with writing(self.label):
            self._append(value)

    def _new_leaves(self) -> Leaves:
        return Leaves(bare=self._bare, target=self.label, fixed_width=self._fixed_width)

    def check(self, value: Tree) -> None:  # noqa: B027  (.json holds any tree)
        """Check that a value of this structure, dtype and shape fits the format.

        A value that does not fit, an OutputError, is thus reported at the first step, not after the last one.
        """

    def finish(self) -> Path:
        """Complete the file and make it durable at its path, or leave no file."""
        try:
            with writing(self.label):
                self._complete()
                self._out.commit()
        finally:
            self.abort()
        return self.path

    def abort(self) -> None:
        """Discard the file; harmless after `finish`, and twice."""
        with contextlib.suppress(OSError):  # closing may flush to a full disk
            self._release()
        self._out.abort()

    @abstractmethod
    def _append(self, value: Tree) -> None: ...

    @abstractmethod
    def _complete(self) -> None: ...

    def _release(self) -> None:
        """Close temporary files."""
        self._pieces.close()


class JsonSink(Sink):
    """`.json`: any tree; or a list of the values of all steps or epochs, one per line.

    The encoding is that of `pipedist.outputs.encoding`, with sorted keys.
    """

    _out: AtomicFile
    _has_records = False

    def _append(self, value: Tree) -> None:
        if self._mode == "pieces":
            if ragged.are_records(value):
                self._text((", " if self._has_records else "[") + encoding.dumps(value)[1:-1])
                self._has_records = True
            else:
                self._pieces.append(value, as_json=True)
            return
        if self._mode == "each":
            self._text("[" if self._count == 1 else ",\n")
        self._text(encoding.dumps(value))

    def _complete(self) -> None:
        if self._has_records:
            self._text("]")
        elif self._mode == "pieces":
            self._write([] if self._has_empty and not self._pieces.spools else self._pieces.tree())
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
        if isinstance(tree, JsonSpool):
            self._text("[")
            for chunk in tree.chunks():
                self._out.file.write(chunk)
            self._text("]")
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
            brackets = "{}"
            named = sorted(encoding.key_texts(node[1], ()))
            children = [(encoding.text(name) + ": ", value) for name, value in named]
        else:
            brackets = "[]"
            children = [("", value) for value in node[1]]
        self._text(brackets[0])
        for index, (name, value) in enumerate(children):
            self._text((", " if index else "") + name)
            self._write(value)
        self._text(brackets[1])

    def _text(self, text: str) -> None:
        self._out.file.write(text.encode())
