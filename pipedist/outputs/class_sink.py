"""Sinks of other packages, and of the user: a class that writes rows to a path."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pipedist.core.files import AtomicPath
from pipedist.core.functions import FunctionNotFound, load, reference
from pipedist.errors import OutputError, UsageError
from pipedist.outputs.row_files import RowSink
from pipedist.outputs.sink import Target
from pipedist.outputs.spool import Array


@runtime_checkable
class SinkWriter(Protocol):
    """Writes rows to a file or folder; the protocol of `sink: {class: ...}` and of `pipedist.sinks`.

    An object is made in the driver process as `Class(path, **with)`. Nothing is at `path` yet, and its folder exists.
    pipedist calls `append` with the rows in their order, then `close`. Then it makes the file or folder at `path`
    durable, and renames it to the output's own path; after an error it removes what was written.

    The pieces in which rows come depend on the order of arrival. So that the bytes do not, a writer must cut blocks
    by the rows themselves, and write neither times nor random values.

    Example:
        >>> class Lines:
        ...     def __init__(self, path, separator=" "):
        ...         self.file, self.separator = open(path, "w"), separator
        ...     def append(self, columns):
        ...         for row in zip(*(column.tolist() for column in columns.values())):
        ...             print(*row, sep=self.separator, file=self.file)
        ...     def close(self):
        ...         self.file.close()
    """

    def append(self, columns: dict[str, Array]) -> None:
        """Write the next rows.

        Args:
            columns: an array [rows, ...] for each column, by name; the same names and dtypes in each call, apart
                from the width of text.
        """

    def close(self) -> None:
        """Complete the file, or release it after an error."""


class ClassSink(RowSink):
    """`sink: {class: ...}`: rows, written by the class of the options."""

    flat = False
    plain = False
    _writes = AtomicPath
    _out: AtomicPath

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._name = str(target.options["class"])
        self._writer: Any = None
        with self._errors():
            cls = load(reference(target.options["class"]), [])
            self._writer = cls(self._out.written, **target.options.get("with", {}))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise an exception of the user's class as an OutputError that names it."""
        try:
            yield
        except OutputError:
            raise
        except Exception as error:
            kind = type(error).__name__
            raise OutputError(f"{self.label}: {self._name} raised {kind}: {error}") from error

    def _rows(self, columns: dict[str, Array]) -> None:
        with self._errors():
            self._writer.append(columns)

    def _complete(self) -> None:
        with self._errors():
            self._writer.close()
        self._writer = None
        if not self._out.written.exists():
            raise OutputError(f"{self.label}: {self._name} wrote nothing to the path that it was given")

    def _release(self) -> None:
        super()._release()
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._errors():
                writer.close()


def class_problem(cls: object, with_: dict[str, Any], code: str) -> str:
    """Return why a class can't be the one of a sink, or "".

    Args:
        cls: the class, or "module:Class".
        code: the folder of the spec's modules.
    """
    try:
        found: Any = load(reference(cls), [code])  # type: ignore[arg-type]
    except (FunctionNotFound, UsageError, TypeError) as error:
        return str(error)
    missing = [name for name in ("append", "close") if not callable(getattr(found, name, None))]
    if missing:
        return f"{cls} has no method {' and no '.join(missing)}"
    try:
        inspect.signature(found).bind(Path("path"), **with_)
    except (TypeError, ValueError) as error:
        return f"{cls} can't be called as {getattr(found, '__name__', cls)}(path, **with): {error}"
    return ""
