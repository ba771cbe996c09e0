"""Converts the text of cells to typed columns.

A cell that is empty, `NA` or `NaN` is a missing value: NaN in a float column, "" in a str column, an
error in all others. Numbers are written as Python writes them (`1`, `-2.5`, `1e-3`, `inf`), with
blanks around them but without underscores; a number that does not fit its type is an error. A
float32 is the float64 of the text, rounded. Dates and timestamps are written as in ISO 8601, a timestamp also with a
blank for `T`; one with `Z` or an offset is read in UTC; a missing one, also written `NaT`, is NaT.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from pipedist.core import ragged
from pipedist.core.names import excerpt, nearest
from pipedist.datasets.sources.base import SourceError, sealed

Column = npt.NDArray[Any]

MISSING = (b"", b"NA", b"NaN")  # the texts of a missing value
_MISSING_TIMES = (*MISSING, b"NaT")
_MATRIX_BYTES_MAX = 32  # longer cells are converted one by one, which is faster

_TRUTH = {b"true": True, b"false": False, b"1": True, b"0": False}


class CellError(Exception):
    """Cell `row` does not have its column's type; internal to this package.

    Args:
        row: of the cell.
        fact: the mismatch.
    """

    def __init__(self, row: int, fact: str) -> None:
        self.row = row
        self.fact = fact
        self.message = fact  # with advice for a spec
        super().__init__(fact)


class MissingCellError(CellError):
    """Cell `row` has no value, and its column's type has none that stands for it."""

    def __init__(self, row: int, kind: object) -> None:
        super().__init__(row, f"a value of type {kind} is missing")
        self.message = f"{self.fact}: declare the column float64, which reads it as NaN"


@dataclass(frozen=True, slots=True)
class Cells:
    """The text of one column: the text of all cells, and the offsets of their first bytes and ends."""

    data: bytes
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> Cells:
        stops = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), dtype=np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])[: len(texts)]
        return cls(b"".join(texts), starts, stops)

    def __len__(self) -> int:
        return len(self.starts)

    def width(self) -> int:
        """Return the length of the longest cell, in bytes."""
        return int((self.stops - self.starts).max(initial=0))

    def texts(self) -> list[bytes]:
        data = self.data
        return [data[a:b] for a, b in zip(self.starts.tolist(), self.stops.tolist(), strict=True)]

    def matrix(self, width: int) -> npt.NDArray[np.uint8]:
        """Return the cells' bytes as uint8[n, width], zero behind each cell's end."""
        data = np.frombuffer(self.data, np.uint8)
        result = np.zeros((len(self), width), np.uint8)
        lengths = self.stops - self.starts
        for position in range(self.width()):
            byte = data.take(self.starts + position, mode="clip")
            result[:, position] = np.where(position < lengths, byte, 0)
        return result


def joined(parts: Sequence[dict[str, Column]], order: npt.NDArray[np.int64] | None) -> dict[str, Column]:
    """Return a shard of the rows of all parts; `order`: the row at each of its positions; None: unchanged."""
    shard = {}
    for name, first in parts[0].items():
        column = first if len(parts) == 1 else ragged.concatenate([part[name] for part in parts])
        shard[name] = sealed(column if order is None else column[order])
    return shard


def no_such_column(name: str, there: Sequence[str], file: str) -> SourceError:
    """Return the error for a column that is not among the columns of a file."""
    if there and there[0].lstrip()[:1] in ("{", "["):
        return SourceError(
            f"{file} has no column {name!r}: its first line is JSON, not a header",
            key="columns",
            name=name,
            expected="`jsonl: {path: ...}`, which reads one object a line",
        )
    for separator, word in ((";", "semicolons"), ("\t", "tabs")):
        if any(separator in other and name in other.split(separator) for other in there):
            return SourceError(
                f"{file} has no column {name!r}: its header is separated by {word}, not by commas",
                key="columns",
                name=name,
                expected="`delimiter: " + ("'\\t'`" if separator == "\t" else f"'{separator}'`"),
            )
    return SourceError(
        f"{file} has no column {name!r}",
        key="columns",
        name=name,
        nearest=nearest(name, there),
        expected="one of " + ", ".join(there),
    )


_TIMES = {"date": np.dtype("datetime64[D]"), "timestamp": np.dtype("datetime64[us]")}
_INFERRED = ("int64", "float64", "bool", "date", "timestamp")  # the first that fits all cells; else "str"
_NEARLY = 0.9  # the part of a column's cells that must fit a type for the others to be called exceptions
_WHOLE = re.compile(rb"\s*[+-]?\d{16,400}\s*")
_LEADING_ZERO = re.compile(rb"\s*[+-]?0\d")


def dtype_of(kind: str) -> np.dtype[Any]:
    """Return the dtype of a column of a type."""
    return _TIMES.get(kind) or np.dtype(kind)


def inferred_type(cells: Cells) -> str:
    """Return the type that fits cells of text: numbers, then dates, else "str".

    Numbers with leading zeros are text, and so are whole numbers that neither int64 nor float64 has.
    """
    texts = [text for text in cells.texts() if text.strip() not in _MISSING_TIMES]
    if not texts or any(map(_LEADING_ZERO.match, texts)):
        return "str"
    is_exact = all(float(text) == int(text) for text in texts if _WHOLE.fullmatch(text))
    for kind in _INFERRED:
        if kind == "float64" and not is_exact:  # long numbers of accounts, of which one is missing
            continue
        try:
            column_of_cells(cells, kind)
        except CellError:
            continue
        return kind
    return "str"


def nearly_fitting_type(texts: Sequence[str]) -> str:
    """Return the type of numbers or times that fits most cells of a column of text, but not all; else ""."""
    known = [text.encode() for text in texts if text.strip()]
    for kind in ("float64", "timestamp"):
        fitting = [text for text in known if _fits(text, kind)]
        if len(known) > len(fitting) >= _NEARLY * len(known):
            missing = [b""] * (len(texts) > len(known))
            found = inferred_type(Cells.of(fitting + missing))
            return "" if found == "str" else found  # numbers with leading zeros are text
    return ""


def _fits(text: bytes, kind: str) -> bool:
    try:
        column_of_cells(Cells.of([text]), kind)
    except CellError:
        return False
    return True


def column_of_cells(cells: Cells, kind: str) -> Column:
    """Return cells of UTF-8 text as an array of their type, or raise CellError; "str" as `ragged.of_texts`."""
    if kind == "str":
        return _strings(cells)
    dtype = dtype_of(kind)
    if dtype.kind == "M":
        return _times(cells, kind)
    if dtype.kind == "f":
        return _numbers(*_number_texts(cells, fill=b"nan"), float, dtype)
    return _numbers(*_number_texts(cells, fill=None), _truth if dtype.kind == "b" else int, dtype)


def column_of_values(values: Sequence[object], kind: str) -> Column:
    """Return values of JSON objects as an array of their type, or raise CellError; None is missing, text as in csv."""
    plain = {"s": str, "b": bool, "f": float, "d": str, "t": str}.get(kind[0], int)
    texts = []
    for row, value in enumerate(values):
        if value is None:
            texts.append(b"")
        elif isinstance(value, str):
            texts.append(value.encode("utf-8", "surrogatepass"))
        elif type(value) is plain or (plain is float and type(value) is int):
            texts.append(repr(value).encode())
        else:
            raise CellError(row, f"{_short(repr(value))} is not of type {kind}")
    return column_of_cells(Cells.of(texts), kind)


_DATE = re.compile(rb"\d{4}-\d\d-\d\d")
_TIMESTAMP = re.compile(rb"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(Z|[+-]\d\d(?::?\d\d)?)?)?")


def _times(cells: Cells, kind: str) -> Column:
    pattern = _DATE if kind == "date" else _TIMESTAMP
    texts = [text.strip() for text in cells.texts()]
    values: list[str | datetime] = []
    for row, text in enumerate(texts):
        found = pattern.fullmatch(text)
        if found is None and text not in _MISSING_TIMES:
            raise CellError(row, f"{_short(repr(text.decode('utf-8', 'replace')))} is not of type {kind}")
        if found is not None and kind == "timestamp" and found[1]:
            values.append(_in_utc(row, text.decode()))
        else:
            values.append("NaT" if found is None else text.decode())
    try:
        return np.array(values, dtype_of(kind))
    except ValueError:  # a month 13, or a day 31 of a month with 30
        for row, value in enumerate(values):
            try:
                np.array(value, dtype_of(kind))
            except ValueError as error:
                raise CellError(row, f"{value!r} is not of type {kind}") from error
        raise


def _in_utc(row: int, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError) as error:
        raise CellError(row, f"{text!r} is not of type timestamp: {error}") from error


def _strings(cells: Cells) -> Column:
    width = cells.width()
    if _fit_matrix(cells, width):
        matrix = cells.matrix(max(width, 1))
        if (matrix < 128).all():
            packed = matrix.view(f"S{matrix.shape[1]}").reshape(-1)
            matrix[_missing(packed)] = 0
            return matrix.astype(np.uint32).view(f"<U{matrix.shape[1]}").reshape(-1)
    decoded = []
    for row, text in enumerate(cells.texts()):
        try:
            decoded.append("" if text in MISSING else text.decode())
        except UnicodeDecodeError as error:
            raise CellError(row, f"{_short(repr(text))} is not UTF-8 text") from error
    return ragged.of_texts(decoded)


def _fit_matrix(cells: Cells, width: int) -> bool:
    # NumPy's bytes drop zeros at their end
    return width <= _MATRIX_BYTES_MAX and b"\0" not in cells.data


def _missing(packed: npt.NDArray[np.bytes_]) -> npt.NDArray[np.bool_]:
    result: npt.NDArray[np.bool_] = packed == MISSING[0]
    for text in MISSING[1:]:
        result |= packed == text
    return result


def _number_texts(cells: Cells, fill: bytes | None) -> tuple[list[bytes], bool]:
    """Return the cells' texts, with `fill` for missing ones, and whether one has an underscore."""
    width = cells.width()
    if not _fit_matrix(cells, width):
        texts = cells.texts()
        if fill is not None:
            texts = [fill if text in MISSING else text for text in texts]
        return texts, any(b"_" in text for text in texts)
    matrix = cells.matrix(max(width, len(fill or b""), 1))
    packed = matrix.view(f"S{matrix.shape[1]}").reshape(-1)
    if fill is not None:
        packed[_missing(packed)] = fill
    return packed.tolist(), bool((matrix == ord("_")).any())


def _numbers(
    texts: list[bytes], has_underscore: bool, read: Callable[[bytes], Any], dtype: np.dtype[Any]
) -> Column:
    try:
        if has_underscore:
            raise ValueError
        values = list(map(read, texts))
    except ValueError:
        values = [_number(row, text, read, dtype) for row, text in enumerate(texts)]
    if dtype.kind == "f":
        return _floats(values, texts, dtype)
    if dtype.kind != "b" and values:
        limits = np.iinfo(dtype)
        if min(values) < limits.min or max(values) > limits.max:
            row = next(i for i, v in enumerate(values) if not limits.min <= v <= limits.max)
            raise CellError(row, f"{_short(str(values[row]))} does not fit {dtype}")
    return np.array(values, dtype)


def _floats(values: list[float], texts: list[bytes], dtype: np.dtype[Any]) -> Column:
    with np.errstate(over="ignore"):
        column: Column = np.array(values, np.float64).astype(dtype)
    for row in np.flatnonzero(np.isinf(column)).tolist():
        if b"inf" not in texts[row].lower():
            raise CellError(row, f"{_short(texts[row].decode())} does not fit {dtype}")
    return column


def _number(row: int, text: bytes, read: Callable[[bytes], Any], dtype: np.dtype[Any]) -> Any:
    bare = text.strip()
    if bare in MISSING:
        if dtype.kind == "f":
            return float("nan")
        raise MissingCellError(row, dtype)
    try:
        if b"_" in bare:
            raise ValueError
        return read(bare)
    except ValueError:
        shown = _short(repr(text.decode("utf-8", "replace")))
        raise CellError(row, f"{shown} is not of type {dtype}") from None


def _truth(text: bytes) -> bool:
    value = _TRUTH.get(text.strip().lower())
    if value is None:
        raise ValueError
    return value


def _short(text: str) -> str:
    return excerpt(text, 60)
