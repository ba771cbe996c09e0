"""The one interface through which values reach a file.

A sink gets values in order, keeps little of them in memory, and ends in one of two ways:
`finish` makes the file durable and puts it in its place, `abort` leaves what was there before.
The bytes of a file depend on the values alone (and, for .parquet, on pyarrow's version).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from pipedist.errors import OutputError
from pipedist.outputs.files import AtomicFile, writing
from pipedist.program import Tree

Mode = Literal["one", "pieces", "each"]
"""What is appended: the one value; the pieces of one value, end to end; one value a step or epoch."""


class Sink(ABC):
    """A file that is being written.

    Args:
        path: where the file will be; its folder exists.
        mode: what is appended.
        axis: along which pieces are put end to end.
        label: what errors call the file.
    """

    def __init__(self, path: Path, mode: Mode, axis: int, label: str) -> None:
        self.path = path
        self.label = label
        self._mode = mode
        self._axis = axis
        self._count = 0
        self._out = AtomicFile(path, label)

    def append(self, value: Tree) -> None:
        """Take the next value.

        Args:
            value: the value itself, the next step's piece of it, or the value of the next step
                or epoch: see `open_sink`.

        Raises:
            OutputError: it does not fit the format or the values before, or can't be written.
        """
        if self._mode == "one" and self._count:
            raise OutputError(f"{self.label} holds one value, and was given a second one")
        self._count += 1
        with writing(self.label):
            self._append(value)

    def check(self, value: Tree) -> None:
        """Raise what `append` would raise of a value of this structure, dtype and shape; write nothing.

        So what can't be in its file is told with the first step, not after the last one.

        Raises:
            OutputError: it does not fit the format.
        """
        self._fits(value)

    def finish(self) -> Path:
        """Complete the file, make it durable and put it in its place.

        Returns:
            Its path.

        Raises:
            OutputError: there is no value that the format can hold, or it can't be written; then
                nothing is left behind.
        """
        try:
            with writing(self.label):
                self._complete()
            return self._out.commit()
        except BaseException:
            self.abort()
            raise
        finally:
            self._let_go()

    def abort(self) -> None:
        """Throw away what was written; harmless after `finish`, and twice."""
        self._let_go()
        self._out.abort()

    def _let_go(self) -> None:
        with contextlib.suppress(OSError):  # closing may flush to a full disk; the files have no name
            self._release()

    @abstractmethod
    def _append(self, value: Tree) -> None: ...

    @abstractmethod
    def _complete(self) -> None: ...

    def _fits(self, value: Tree) -> None:  # noqa: B027  (.json holds any tree)
        """Raise if the format can't hold such a value."""

    def _release(self) -> None:  # noqa: B027  (most formats have nothing to release)
        """Close temporary files."""


def open_sink(
    path: Path,
    *,
    shape: Literal["run", "per"],
    gather: bool,
    axis: int = 0,
    label: str = "",
    table: Callable[[Tree], dict[str, npt.NDArray[Any]]] | None = None,
) -> Sink:
    """Open a file for the values of one stage; its ending chooses the format.

    Args:
        path: where the file will be; its folder exists.
        shape: "run": one value; "per": one value for each step or epoch, each a call of `append`.
        gather: with shape "run": `append` gets the pieces of the value, step by step; without,
            it gets the value.
        axis: of the gather: the pieces are put end to end along it. Axis 0 goes straight into
            the file; another axis goes through a temporary file beside it, and is put in order
            at the end.
        label: what errors call the file: "outputs.rows (rows.npy)"; "": its path.
        table: with shape "run": returns the columns of the value, arrays [rows, ...] by name, for a format
            that has rows; None: they are the value's leaves.

    Raises:
        OutputError: the ending is unknown, pyarrow is missing, or the folder can't be written.
    """
    # each format is imported when used: a run that writes one .json needs no zipfile, no csv
    mode: Mode = "each" if shape == "per" else "pieces" if gather else "one"
    suffix, label = path.suffix, label or str(path)
    if suffix == ".json":
        from pipedist.outputs.json_file import JsonSink

        return JsonSink(path, mode, axis, label)
    if suffix == ".npy":
        from pipedist.outputs.array_files import NpySink

        return NpySink(path, mode, axis, label)
    if suffix == ".npz":
        from pipedist.outputs.array_files import NpzSink

        return NpzSink(path, mode, axis, label)
    if suffix == ".csv":
        from pipedist.outputs.row_files import CsvSink

        return CsvSink(path, mode, axis, label, table)
    if suffix == ".jsonl":
        from pipedist.outputs.row_files import JsonLinesSink

        return JsonLinesSink(path, mode, axis, label, table)
    if suffix == ".parquet":
        from pipedist.outputs.parquet_file import ParquetSink

        return ParquetSink(path, mode, axis, label, table)
    from pipedist.outputs.formats import SUFFIXES

    raise OutputError(f"{label}: an output ends in one of {', '.join(SUFFIXES)}")
