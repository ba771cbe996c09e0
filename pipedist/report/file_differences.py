"""Differences between the values of two runs, read block by block.

Arrays are compared in blocks of rows, which are the indices of axis 0; other formats by row. NaN equals NaN. The
largest relative difference is relative to the larger magnitude.
"""

from __future__ import annotations

import csv
import json
import math
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import compress, zip_longest
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from msgspec import Struct
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from pipedist.core.names import excerpt
from pipedist.datasets.sources.row_files import csv_of_long_fields

BLOCK_BYTES = 4 * 2**20  # of an array that is compared at a time
COMPARED_BYTES = 2**20  # of a file that is read at a time
JSON_BYTES_MAX = 256 * 2**20  # a longer .json is compared by its bytes only
CELL_CHARS_MAX = 40
_CELL_BYTES_MAX = 2**30  # of a .csv

_ABSENT: Final = object()
_NUMBERS: Final = "biufc"  # kinds of dtypes
_WITH_NAN: Final = "fcmM"

Rows = NDArray[np.int64]  # row numbers, ascending
Chosen = tuple[Rows, Rows]  # the rows of A and of B to compare, the first ones with each other, and so on


class Differences(Struct):
    """The differences of two values or files.

    Args:
        problem: why the values could not be compared, or only in part; "" if there is none.
        rows: the numbers of rows of both.
        differing: the number of rows that differ, of those that both have.
        row: the first of them; -1: there is none.
        path: where in the row it is: the column, leaf path or indices, "" for the whole row.
        first: the two values there.
        nan: how many numbers are NaN in one of the two only.
        max_abs, max_rel: the largest differences of the other numbers; infinite if one of a pair is.
    """

    problem: str = ""
    rows: tuple[int, int] = (0, 0)
    differing: int = 0
    row: int = -1
    path: str = ""
    first: tuple[str, str] = ("", "")
    nan: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    @property
    def is_empty(self) -> bool:
        return not self.problem and not self.differing and self.rows[0] == self.rows[1]

    def found(self, row: int, path: str, there: object, here: object) -> None:
        """Keep the first difference."""
        if self.row < 0 or row < self.row:
            self.row, self.path, self.first = row, path, (_shown(there), _shown(here))

    def numbers(self, max_abs: float, max_rel: float) -> None:
        self.max_abs, self.max_rel = max(self.max_abs, max_abs), max(self.max_rel, max_rel)


def _shown(value: object) -> str:
    if value is _ABSENT:
        return "nothing"
    plain = value.item() if isinstance(value, np.generic) else value
    return excerpt(repr(plain), CELL_CHARS_MAX)


def same_bytes(a: Path, b: Path) -> bool:
    """Return whether two files have the same content."""
    if a.is_dir() or b.is_dir():
        before, after = ([each.relative_to(path) for each in files_in(path)] for path in (a, b))
        return a.is_dir() and b.is_dir() and before == after and all(same_bytes(a / n, b / n) for n in after)
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as there, b.open("rb") as here:
        while block := there.read(COMPARED_BYTES):
            if block != here.read(COMPARED_BYTES):
                return False
    return True


def files_in(folder: Path) -> list[Path]:
    """Return all files in a folder and its folders, sorted."""
    return sorted(each for each in folder.rglob("*") if not each.is_dir())


def compare_files(a: Path, b: Path, chosen: Chosen | None = None) -> Differences:
    """Return the differences of two files; their endings are their formats.

    `chosen`: the rows to compare, which both must have; None: row 0 with row 0, and so on.
    """
    try:
        if same_bytes(a, b):
            return Differences()
        if a.suffix != b.suffix:
            return Differences(f"{a.suffix} in A, {b.suffix} in B, which are not compared")
        comparison = None if a.is_dir() else _COMPARISONS.get(a.suffix)
        found = Differences("their bytes differ") if comparison is None else comparison(a, b, chosen)
    except (OSError, ValueError, ImportError, zipfile.BadZipFile, csv.Error) as error:
        return Differences(f"can't be compared: {error}")
    if found.is_empty and chosen is None:
        found.problem = "the values are equal, but not the bytes, such as the signs of zeros"
    return found


# -- trees --------------------------------------------------------------------------------------------


def compare_trees(a: object, b: object, chosen: Chosen | None = None) -> Differences:
    """Return the differences of two JSON values; rows are the items of a list, or of the lists of an object."""
    return _compare_rows(_rows_of(a), _rows_of(b), chosen)


def _rows_of(value: object) -> Iterator[object]:
    if isinstance(value, list):
        return iter(value)
    if isinstance(value, Mapping) and value:
        columns = [each for each in value.values() if isinstance(each, list)]
        if len(columns) == len(value) and len({*map(len, columns)}) == 1:
            return (dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True))
    return iter([value])


def _compare_rows(
    there: Iterator[object], here: Iterator[object], chosen: Chosen | None = None
) -> Differences:
    counts = [0, 0]
    whole = [_counted(rows, counts, side) for side, rows in enumerate((there, here))]
    compared = whole
    if chosen is not None:
        compared = [compress(rows, _mask(each)) for rows, each in zip(whole, chosen, strict=True)]
    found = Differences()
    for row, (a, b) in enumerate(zip_longest(*compared, fillvalue=_ABSENT)):
        if a is _ABSENT or b is _ABSENT or (a == b and type(a) is type(b)):
            continue
        before = found.differing
        for path, x, y in _leaves(a, b, ""):
            found.differing = before + 1
            found.found(row, path, x, y)
            _measure(found, x, y)
    for rest in whole:  # behind the last chosen row
        deque(rest, maxlen=0)
    found.rows = (counts[0], counts[1])
    return found


def _counted(rows: Iterator[object], counts: list[int], side: int) -> Iterator[object]:
    for row in rows:
        counts[side] += 1
        yield row


def _mask(rows: Rows) -> NDArray[np.bool_]:
    mask = np.zeros(int(rows[-1]) + 1 if len(rows) else 0, np.bool_)
    mask[rows] = True
    return mask


def _leaves(a: object, b: object, path: str) -> Iterator[tuple[str, object, object]]:
    """Yield path and both values of each leaf that differs."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in dict.fromkeys((*a, *b)):
            yield from _leaves(
                a.get(name, _ABSENT), b.get(name, _ABSENT), f"{path}/{name}" if path else str(name)
            )
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _leaves(x, y, f"{path}[{index}]")
    elif (a != b and not (a != a and b != b)) or type(a) is not type(b):
        yield path, a, b


def _measure(found: Differences, a: object, b: object) -> None:
    x, y = _number(a), _number(b)
    if x is None or y is None or x == y:
        return
    if x != x or y != y:
        found.nan += (x != x) != (y != y)
        return
    difference = abs(x - y)
    if not math.isfinite(difference):
        found.numbers(math.inf, math.inf)
    else:
        found.numbers(float(difference), float(difference / max(abs(x), abs(y))))


def _number(value: object) -> float | int | None:
    """Return a cell as a number; texts of a .csv and of NaN in JSON are numbers too."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None


# -- formats with rows --------------------------------------------------------------------------------


def _csv(a: Path, b: Path, chosen: Chosen | None) -> Differences:
    reader = csv_of_long_fields(_CELL_BYTES_MAX).reader
    with (
        a.open(encoding="utf-8", newline="", errors="surrogatepass") as there,
        b.open(encoding="utf-8", newline="", errors="surrogatepass") as here,
    ):
        rows_a, rows_b = reader(there), reader(here)
        names_a: list[str] = next(rows_a, [])
        names_b: list[str] = next(rows_b, [])
        found = _compare_rows(
            (dict(zip(names_a, row, strict=False)) for row in rows_a),
            (dict(zip(names_b, row, strict=False)) for row in rows_b),
            chosen,
        )
    return _with_schemas(found, "columns", names_a, names_b)


def _with_schemas(found: Differences, what: str, a: object, b: object) -> Differences:
    if a != b:
        found.problem = f"{what} differ: {_shown(a)} in A, {_shown(b)} in B"
    return found


def _jsonl(a: Path, b: Path, chosen: Chosen | None) -> Differences:
    with a.open(encoding="utf-8") as there, b.open(encoding="utf-8") as here:
        return _compare_rows(map(json.loads, there), map(json.loads, here), chosen)


def _json(a: Path, b: Path, chosen: Chosen | None) -> Differences:
    if max(a.stat().st_size, b.stat().st_size) > JSON_BYTES_MAX:
        return Differences("their bytes differ; files of this size are compared by their bytes only")
    return compare_trees(json.loads(a.read_bytes()), json.loads(b.read_bytes()), chosen)


def _parquet(a: Path, b: Path, chosen: Chosen | None) -> Differences:
    import pyarrow.parquet as pq

    with pq.ParquetFile(a) as there, pq.ParquetFile(b) as here:

        def rows(file: Any) -> Iterator[object]:
            for batch in file.iter_batches(4096):
                yield from batch.to_pylist()

        found = _compare_rows(rows(there), rows(here), chosen)
        types = [{field.name: str(field.type) for field in file.schema_arrow} for file in (there, here)]
    return _with_schemas(found, "columns", types[0], types[1])


# -- arrays -------------------------------------------------------------------------------------------


def _npy(a: Path, b: Path, chosen: Chosen | None) -> Differences:
    found = Differences()
    with a.open("rb") as there, b.open("rb") as here:
        _compare_arrays(found, "", there, here, chosen)
    return found


def _npz(a: Path, b: Path, chosen: Chosen | None) -> Differences:
    found = Differences()
    with zipfile.ZipFile(a) as there, zipfile.ZipFile(b) as here:
        names, others = there.namelist(), here.namelist()
        for name in sorted({*names} & {*others}):
            with ExitStack() as stack:
                files = [stack.enter_context(each.open(name)) for each in (there, here)]
                _compare_arrays(found, name.removesuffix(".npy"), files[0], files[1], chosen)
    return found if found.problem else _with_schemas(found, "members", sorted(names), sorted(others))


def _compare_arrays(
    found: Differences, name: str, there: IO[bytes], here: IO[bytes], chosen: Chosen | None
) -> None:
    (shape, fortran, dtype), other = _header(there), _header(here)
    label = f"{name}: " if name else ""
    if dtype != other[2]:
        found.problem = f"{label}dtype {dtype} in A, {other[2]} in B"
    if shape[1:] != other[0][1:] or bool(shape) != bool(other[0]) or fortran or other[1]:
        found.problem = f"{label}shape {list(shape)} in A, {list(other[0])} in B, which are not compared"
        return
    counts = (shape[0] if shape else 1, other[0][0] if other[0] else 1)
    found.rows = (max(found.rows[0], counts[0]), max(found.rows[1], counts[1]))
    kinds = {_NUMBERS if each.kind in _NUMBERS else each.kind for each in (dtype, other[2])}
    if len(kinds) > 1 or kinds & {"O", "V"}:
        found.problem = f"{found.problem or f'{label}dtype {dtype}'}, which are not compared"
        return
    row = math.prod(shape[1:])
    step = max(1, BLOCK_BYTES // max(1, row * max(dtype.itemsize, other[2].itemsize)))
    differing = 0
    total, rows_a, rows_b = (min(counts), None, None) if chosen is None else (len(chosen[0]), *chosen)
    readers = [_RowReader(there, dtype, row, step, rows_a), _RowReader(here, other[2], row, step, rows_b)]
    for first in range(0, total, step):
        size = min(step, total - first)
        x, y = (reader.read(first, size) for reader in readers)
        differing += _compare_blocks(found, name, first, shape[1:], x, y)
    found.differing = max(found.differing, differing)


class _RowReader:
    """Reads blocks of rows of an array, or of those that are chosen, one after the other."""

    def __init__(
        self, file: IO[bytes], dtype: np.dtype[Any], row: int, rows_max: int, chosen: Rows | None
    ) -> None:
        self._file, self._dtype, self._row = file, dtype, row  # the elements of a row
        self._rows_max = rows_max  # that are read at a time
        self._chosen = chosen
        self._at = 0

    def read(self, first: int, size: int) -> NDArray[Any]:
        if self._chosen is None:
            return self._next(size)
        wanted = self._chosen[first : first + size]
        parts = []
        while self._at <= int(wanted[-1]):
            begin = self._at
            block = self._next(min(self._rows_max, int(wanted[-1]) + 1 - begin))
            parts.append(block[wanted[(wanted >= begin) & (wanted < self._at)] - begin])
        return np.concatenate(parts)

    def _next(self, size: int) -> NDArray[Any]:
        self._at += size
        data = self._file.read(size * self._row * self._dtype.itemsize)
        return np.frombuffer(data, self._dtype).reshape(size, self._row)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy_format.read_magic(file)
    read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    return shape, fortran and len(shape) > 1, dtype


def _compare_blocks(
    found: Differences, name: str, first: int, inner: tuple[int, ...], x: NDArray[Any], y: NDArray[Any]
) -> int:
    """Compare two blocks of rows, the first of which is row `first`, and return how many differ."""
    differs = x != y
    if x.dtype.kind in _WITH_NAN and y.dtype.kind in _WITH_NAN:
        differs &= ~(np.isnan(x) & np.isnan(y))
    rows = differs.any(axis=1)
    if not rows.any():
        return 0
    row = int(np.argmax(rows))
    place = int(np.argmax(differs[row]))
    indices = "".join(f"[{each}]" for each in np.unravel_index(place, inner)) if inner else ""
    found.found(first + row, name + indices, x[row, place], y[row, place])
    if x.dtype.kind in _NUMBERS:
        if x.dtype.kind in _WITH_NAN or y.dtype.kind in _WITH_NAN:
            in_one = differs & (np.isnan(x) | np.isnan(y))
            found.nan += int(in_one.sum())
            differs &= ~in_one
        if not differs.any():
            return int(rows.sum())
        u, v = x[differs], y[differs]
        with np.errstate(all="ignore"):
            if u.dtype.kind in "iu" and u.dtype == v.dtype:  # exact, also above 2**53
                apart = (np.maximum(u, v).astype(np.uint64) - np.minimum(u, v).astype(np.uint64)).astype(
                    np.float64
                )
            else:
                wide = np.complex128 if "c" in u.dtype.kind + v.dtype.kind else np.float64
                apart = np.abs(u.astype(wide) - v.astype(wide))
            size = np.maximum(np.abs(u.astype(apart.dtype)), np.abs(v.astype(apart.dtype)))
            apart = np.where(np.isfinite(apart), apart, np.inf)
            relative = np.where(np.isfinite(apart), apart / size, np.inf)
        found.numbers(float(apart.max()), float(relative.max()))
    return int(rows.sum())


_COMPARISONS: Final[Mapping[str, Callable[[Path, Path, Chosen | None], Differences]]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
}
