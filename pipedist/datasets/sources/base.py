"""What every source of data offers: find elements (in the driver), read them (anywhere).

A SOURCE lives in the driver: it knows how many elements there are, and turns element ids into a
LOCATION, a small tree that can be sent. A READER lives wherever the data is read, and turns a
location into the shard that a replica function receives. Whatever the road, the arrays of a
shard are C-contiguous, in native byte order, and read-only.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipedist.errors import PipedistError
from pipedist.program import Tree
from pipedist.stand_ins import is_masked, stand_in

Ids = range | npt.NDArray[np.int64]
"""Element ids: `epoch * N + index`, a range where they follow each other."""

Config = dict[str, Any]
"""What another process needs to open a reader: plain msgpack types, paths absolute."""

_AnyArray = TypeVar("_AnyArray", bound=np.generic)


class SourceError(PipedistError):
    """A source can't be opened, or its data is not what was declared.

    Args:
        message: one line; for bad data it begins with `file:row:column`.
        key: the key of the source's settings that is at fault ("path", "columns", ...), or "".
        name: the column at fault, or "".
        nearest: the nearest name that would have been right, or "".
        expected: what would have been right, or "".
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
    """Reads shards of one source; its only state is open files and what it has cached of them."""

    @abc.abstractmethod
    def read(self, location: Tree) -> Tree:
        """Return the shard at `location`, as the table of sources in the spec language says.

        Args:
            location: from the source's `locate`; for sources `by_id`, the element ids.

        Raises:
            SourceError: a file has changed or is gone, or its data is not as declared.
        """

    def close(self) -> None:
        """Release the files; the shards that were read stay valid."""
        return


class Source(abc.ABC):
    """A dataset's elements, before they are divided into steps.

    Attributes:
        length: N, elements of one epoch; None where only reading tells.
        random_access: elements can be read in any order, so the dataset can be shuffled.
        portable: another process on this host can read it, with `open_reader(config)`.
        why_not_portable: where that is False, why, for people; "" elsewhere.
        by_id: `locate` is the identity, so a reader that can compute ids needs no location.
        config: see `portable`; empty where that is False.
    """

    length: int | None
    random_access: bool = True
    portable: bool = True
    why_not_portable: str = ""
    by_id: bool = False
    config: Config

    @abc.abstractmethod
    def locate(self, ids: Ids) -> Tree:
        """Return where elements are, as a tree that can be sent to a reader.

        Args:
            ids: element ids, of any epoch.

        Raises:
            IndexError: an id is negative, or the source is empty.
        """

    @abc.abstractmethod
    def read(self, location: Tree) -> Tree:
        """Return the shard at `location`, the same as a reader elsewhere would."""

    def blocks(self, batch: int) -> Iterator[Tree]:
        """Yield one epoch as consecutive blocks of `batch` elements, the last one shorter."""
        length = self.length or 0
        for start in range(0, length, batch):
            yield self.read(self.locate(range(start, min(start + batch, length))))

    def probe(self) -> None:
        """Read a little of the data, where its type is known from reading it alone; elsewhere do nothing.

        Raises:
            SourceError: it is not as declared.
        """
        return

    def close(self) -> None:
        """Release files, and remove what was unpacked; reading is over."""
        return


def rows_of(ids: Ids, length: int) -> Ids:
    """Return the rows within an epoch of `ids`, a contiguous range wherever they allow it.

    Args:
        ids: element ids, of any epoch.
        length: N, elements of one epoch.

    Raises:
        IndexError: an id is negative, or `length` is 0 and `ids` is not empty.
    """
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


def sealed(array: npt.NDArray[_AnyArray]) -> npt.NDArray[_AnyArray]:
    """Return `array` as replica functions see it: C-contiguous, aligned, native, read-only.

    Without a copy where it is so already.
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    array = np.require(array, requirements=["C", "A"])
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view


def plain_array(leaf: Any, what: str, key: str) -> npt.NDArray[Any]:
    """Return a value that NumPy takes for an array as one, with all that it says.

    Args:
        leaf: has `__array__`.
        what: which value, for the error.
        key: the setting at fault.

    Raises:
        SourceError: it is masked, or of a dtype that can't be sent.
    """
    if is_masked(leaf):
        raise SourceError(
            f"{what}: a masked array can't be read", key=key, expected=f"plain ones: {stand_in(leaf)}"
        )
    array = np.asarray(leaf)
    check_dtype(array.dtype, what, key)
    return array


def check_dtype(dtype: np.dtype[Any], what: str, key: str) -> None:
    """Refuse element types that can't be sent to a worker without pickling them.

    Args:
        dtype: the array's type.
        what: which array, for the error.
        key: the setting at fault.

    Raises:
        SourceError: `dtype` is object, structured or void.
    """
    if dtype.kind in "biufcUSMm" or dtype.name == "bfloat16":
        return
    hint = "strings: use .astype(str)" if dtype.kind == "O" else "one array per field"
    raise SourceError(
        f"{what}: arrays of dtype {dtype} can't be read",
        key=key,
        expected=f"numbers, booleans, dates or text ({hint})",
    )


class RowLayout:
    """Finds rows that are numbered through consecutive pieces.

    Args:
        lengths: rows of each piece, in order; 0 is allowed.
    """

    __slots__ = ("_ends", "total")

    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends = np.cumsum(np.asarray(lengths, dtype=np.int64), dtype=np.int64)
        self.total = int(self._ends[-1]) if len(lengths) else 0

    def segments(self, rows: range) -> list[tuple[int, int, int]]:
        """Return the (piece, lo, hi) that make up contiguous `rows`, hi exclusive."""
        found = []
        row = rows.start
        while row < rows.stop:
            # "right": a piece without rows ends where its predecessor does, and is passed over.
            piece = int(np.searchsorted(self._ends, row, side="right"))
            begin = int(self._ends[piece - 1]) if piece else 0
            stop = min(rows.stop, int(self._ends[piece]))
            found.append((piece, row - begin, stop - begin))
            row = stop
        return found

    def places(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return, for each of `rows`, its piece and its row within it: int64[n] each."""
        pieces = np.searchsorted(self._ends, rows, side="right").astype(np.int64, copy=False)
        begins = np.concatenate([np.zeros(1, np.int64), self._ends])
        return pieces, rows - begins[pieces]
