"""The interfaces of sources and readers, and the arrays of shards.

A source, in the driver, counts elements and turns element ids into a location: a small tree that
can be sent. A reader, in the process that reads the data, turns a location into the shard that a
replica function receives. The arrays of a shard are C-contiguous, in native byte order, read-only.

For most sources the ids themselves are the location. Their readers follow `SourceReader`, the protocol for
classes of users and other packages; sources of rows of text have locations, so that only the driver keeps an index.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from pipedist.core import ragged
from pipedist.core.misuse_hints import conversion_hint, is_masked
from pipedist.core.types import Tree
from pipedist.errors import PipedistError

Ids = range | npt.NDArray[np.int64]  # element ids: `epoch * N + index`; a range if they are consecutive
Config = dict[str, Any]  # the settings of a reader: values that can be sent, absolute paths
_AnyArray = TypeVar("_AnyArray", bound=np.generic)


class SourceError(PipedistError):
    """A source can't be opened, or its data is not as declared.

    Args:
        message: one line; for bad data it begins with `file:row:column`.
        key: the key of the wrong setting ("path", "columns", ...), or "".
        name: the wrong column, or "".
        nearest: the nearest valid name, or "".
        expected: the expected value, or "".
    """

    def __init__(
        self, message: str, *, key: str = "", name: str = "", nearest: str = "", expected: str = ""
    ) -> None:
        self.key = key
        self.name = name
        self.nearest = nearest
        self.expected = expected
        super().__init__(message)


class Reader(abc.ABC):
    """Reads shards of one source; its only state is open files and cached data."""

    @abc.abstractmethod
    def read(self, location: Tree) -> Tree:
        """Return the shard at `location`, as the spec language defines it.

        The location is from the source's `locate`; for sources `by_id`, it is the element ids. SourceError: a file
        has changed or is missing, or its data is not as declared.
        """

    def close(self) -> None:
        """Release the files; the shards that were read stay valid."""
        return


@runtime_checkable
class SourceReader(Protocol):
    """The protocol of a reader class, which a spec names as its `source`.

    With `source: {class: "module:Reader", with: {...}}`, the constructor is called with the arguments `with`: once in
    the driver, and once in each worker for each pass over the dataset. Then `read` is called by one thread at a time.
    A reader may also have:

    - `element_spec`: a tree of `pipedist.ArraySpec`, the structure of one element, without the axis of elements.
      Without it, the first element is read when the run is planned.
    - `fingerprint() -> str`: a text that changes when the data changes. `--resume` refuses data with another one, and
      workers on other hosts read for themselves only if theirs is equal. Without it, only `with`, the files that it
      names, and the source code of the class are compared.
    - `close()`: called once, at the end.

    `pipedist.testing.check_source` checks a reader against this protocol.

    Example:
        >>> class Squares:
        ...     def __init__(self, count: int) -> None:
        ...         self.count = count
        ...     def __len__(self) -> int:
        ...         return self.count
        ...     def read(self, ids):
        ...         return {"number": ids, "square": ids**2}
        >>> Squares(10).read(np.array([3, 4]))["square"]
        array([ 9, 16])
    """

    def __len__(self) -> int:
        """Return the number of elements, which never changes."""
        ...

    def read(self, ids: npt.NDArray[np.int64]) -> Tree:
        """Return the elements with some ids.

        Args:
            ids: int64[n], read-only, each from 0 to `len(self) - 1`, in any order; n may be 0.

        Returns:
            A tree of arrays [n, ...], which the reader never changes afterwards. An element has the same structure,
            dtype and value whichever others are read with it.
        """
        ...


class ElementReader(Reader):
    """A reader that finds elements by their ids, of any epoch: a `SourceReader`."""

    element_spec: Tree | None = None  # tree of ArraySpec of an element, None if it is unknown

    @abc.abstractmethod
    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """Return a text that changes with the data; "" if the files of the config show that."""
        return ""


class Source(abc.ABC):
    """A dataset's elements, before they are divided into steps."""

    length: int | None  # N, elements of one epoch; None if it is unknown before reading
    random_access: bool = True  # elements can be read in any order, so the dataset can be shuffled
    portable: bool = True  # another process on this host can read it, with `open_reader(config)`
    why_not_portable: str = ""
    in_memory: bool = False  # reading never blocks
    by_id: bool = False  # `locate` is the identity, so a reader that can compute ids needs no location
    config: Config  # settings of the reader; empty if not `portable`
    element_spec: Tree | None = None  # tree of ArraySpec of an element, None if it is unknown
    fingerprint: str = ""  # a text that changes with the data; "" if the files that `path` matches show that
    note: str = ""  # a line about the data, for the plan

    def locate(self, ids: Ids) -> Tree:
        """Return the location of elements, of any epoch: a tree that can be sent. Raise IndexError for a wrong id."""
        return ids

    @abc.abstractmethod
    def read(self, location: Tree) -> Tree: ...

    def blocks(self, batch: int) -> Iterator[Tree]:
        """Yield one epoch as consecutive blocks of `batch` elements, the last one shorter."""
        length = self.length or 0
        for start in range(0, length, batch):
            yield self.read(self.locate(range(start, min(start + batch, length))))

    def probe(self) -> None:
        """Read a little, if only reading can show that the data is as declared (else SourceError)."""
        return

    def close(self) -> None:
        """Release the files, and remove unpacked ones."""
        return


class ReaderSource(Source):
    """A source that is read by its reader, which finds elements by their ids."""

    by_id = True

    def __init__(
        self, length: int, config: Config, reader: Reader, on_close: Callable[[], None] = lambda: None
    ) -> None:
        self.length: int = length
        self.config = config
        if isinstance(reader, ElementReader):
            self.element_spec = reader.element_spec
        self.fingerprint = config.get("fingerprint", "")
        self._reader = reader
        self._on_close = on_close

    def read(self, location: Tree) -> Tree:
        return self._reader.read(location)

    def close(self) -> None:
        self._reader.close()
        self._on_close()


def imported(module: str, kind: str, extra: str) -> Any:
    """Return a module of another package, which a source needs, or raise SourceError with the command to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("PIL", "pillow")
        raise SourceError(f"`{kind}` needs {package}: pip install 'pipedist[{extra}]'") from error


def rows_of(ids: Ids, length: int) -> Ids:
    """Return the rows of `ids` within an epoch of `length` elements, a range if consecutive, or raise IndexError."""
    if len(ids) == 0:
        return range(0)
    if length == 0:
        raise IndexError("the source has no elements")
    if isinstance(ids, range) and ids.step == 1 and ids.start >= 0:
        first = ids.start % length
        if first + len(ids) <= length:
            return range(first, first + len(ids))
    rows = np.asarray(ids, dtype=np.int64)
    if int(rows.min()) < 0:
        raise IndexError(f"element id {int(rows.min())} is negative")
    return rows % length


def index_of(rows: Ids) -> Any:
    """Return what an array is indexed with to get some rows, as a view if they are consecutive."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows


def sealed(array: npt.NDArray[_AnyArray]) -> npt.NDArray[_AnyArray]:
    """Return `array` C-contiguous, aligned, native, not wasteful, read-only, with a copy only if necessary."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return ragged.frozen(ragged.narrowed(np.require(array, requirements=["C", "A"]).view(np.ndarray)))


def plain_array(leaf: Any, what: str, key: str) -> npt.NDArray[Any]:
    """Return an array-like value as an array, or raise SourceError, which names it `what`, and the setting `key`."""
    if is_masked(leaf):
        raise SourceError(
            f"{what}: a masked array can't be read", key=key, expected=f"plain ones: {conversion_hint(leaf)}"
        )
    try:
        array = np.asarray(leaf)
    except Exception as error:  # of another library
        hint = conversion_hint(leaf) or "numpy.asarray must convert it"
        raise SourceError(
            f"{what}: a {type(leaf).__name__} can't be converted to an array: {type(error).__name__}: {error}",
            key=key,
            expected=f"plain arrays: {hint}",
        ) from error
    if array.dtype.kind not in "OT":
        check_dtype(array.dtype, what, key)
        return array
    array = array.astype(object)
    try:
        ragged.split(array)
    except ragged.UnlikeCells as error:
        raise SourceError(f"{what}: arrays of {error}", key=key) from None
    return array


def check_dtype(dtype: np.dtype[Any], what: str, key: str) -> None:
    """Raise SourceError unless elements of a type can be sent to a worker without pickling."""
    if dtype.kind in "biufcUSMm" or dtype.name == "bfloat16":
        return
    hint = "no objects" if dtype.kind == "O" else "one array per field"
    raise SourceError(
        f"{what}: arrays of dtype {dtype} can't be read",
        key=key,
        expected=f"numbers, booleans, dates or text ({hint})",
    )


def check_rows(lengths: Mapping[str, int], label: str) -> None:
    """Raise SourceError unless the arrays of a file have one number of rows."""
    if len(set(lengths.values())) > 1:
        rows = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise SourceError(f"{label}: its arrays differ in rows: {rows}", key="path")


class RowLayout:
    """Finds rows that are numbered through pieces: files, or row groups of files."""

    __slots__ = ("_ends", "total")

    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends = np.cumsum(np.asarray(lengths, dtype=np.int64), dtype=np.int64)
        self.total = int(self._ends[-1]) if len(lengths) else 0

    def pieces(self, rows: Ids) -> tuple[list[tuple[int, Ids]], npt.NDArray[np.int64] | None]:
        """Return which rows to read of each piece, and where each of `rows` is among all that; None: in that order.

        Consecutive rows are consecutive in each piece: a range. Pieces without rows are not returned.
        """
        if isinstance(rows, range):
            return [(piece, range(lo, hi)) for piece, lo, hi in self.segments(rows)], None
        pieces, places = self.places(rows)
        chosen = [np.flatnonzero(pieces == piece) for piece in np.unique(pieces).tolist()]
        order = np.argsort(np.concatenate(chosen)) if len(chosen) > 1 else None
        return [(int(pieces[at[0]]), places[at]) for at in chosen], order

    def segments(self, rows: range) -> list[tuple[int, int, int]]:
        """Return the (piece, lo, hi) of consecutive `rows`, hi exclusive."""
        found = []
        row = rows.start
        while row < rows.stop:
            # side="right" skips pieces without rows
            piece = int(np.searchsorted(self._ends, row, side="right"))
            begin = int(self._ends[piece - 1]) if piece else 0
            stop = min(rows.stop, int(self._ends[piece]))
            found.append((piece, row - begin, stop - begin))
            row = stop
        return found

    def places(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the piece of each row, and the row within it: int64[n] each."""
        pieces = np.searchsorted(self._ends, rows, side="right").astype(np.int64, copy=False)
        begins = np.concatenate([np.zeros(1, np.int64), self._ends])
        return pieces, rows - begins[pieces]
