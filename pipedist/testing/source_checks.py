"""Checks of a reader against the protocol of sources (`pipedist.SourceReader`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pipedist.core import ragged, trees
from pipedist.core.names import excerpt
from pipedist.datasets.element import ArraySpec, misfit
from pipedist.datasets.sources.base import SourceError, SourceReader
from pipedist.datasets.sources.memory import leading_arrays
from pipedist.protocol.codec import UnsendableError, encode

ELEMENTS_MAX = 64  # elements that are read one by one

Ids = npt.NDArray[np.int64]


def check_source(reader: SourceReader, *, make: Callable[[], SourceReader] | None = None) -> None:
    """Check that a reader keeps the rules on which runs rely: the same bits, however elements are read.

    It reads at most 64 elements one by one, and together, scattered, in reverse, twice and none. Then it closes the
    reader, if it has a `close`.

    Args:
        reader: an object of the reader class.
        make: makes another object for the same data, as another process would; that one must have the same length,
            fingerprint and elements.

    Raises:
        AssertionError: a rule is broken; the text has the rule, what was found, and the ids.

    Example:
        >>> import numpy as np
        >>> class Squares:
        ...     def __len__(self):
        ...         return 10
        ...     def read(self, ids):
        ...         return {"number": ids, "square": ids**2}
        >>> check_source(Squares(), make=Squares)
    """
    check = _Check(reader)
    check.elements()
    if make is not None:
        check.same_as(make())
    check.closed()


class _Check:
    """The checks of one reader, and what is known about its elements."""

    def __init__(self, reader: SourceReader) -> None:
        self._reader = reader
        self._name = type(reader).__name__
        missing = [name for name in ("__len__", "read") if not callable(getattr(reader, name, None))]
        if missing:
            self._fail(f"it has no method {' and no '.join(missing)}")
        self._length = len(reader)
        if len(reader) != self._length:
            self._fail("len() changes from call to call; the number of elements must stay the same")
        chosen = np.unique(np.linspace(0, max(0, self._length - 1), ELEMENTS_MAX).astype(np.int64))
        self._ids: Ids = chosen if self._length else np.empty(0, np.int64)
        self._treedef: trees.Treedef | None = None
        self._alone: dict[int, list[npt.NDArray[Any]]] = {}

    def elements(self) -> None:
        """Check that elements are the same however they are read."""
        self._check_texts(self._reader)
        for each in self._ids.tolist():
            self._alone[each] = self._read(np.array([each]))
        rng = np.random.default_rng(0)
        few = self._ids[: ELEMENTS_MAX // 2]
        first = self._read(self._ids)
        kept = [leaf.copy() for leaf in first]
        for what, ids in (
            ("all of them together", self._ids),
            ("in reverse", self._ids[::-1].copy()),
            ("in a random order", rng.permutation(self._ids)),
            ("consecutive ones", np.arange(min(self._length, ELEMENTS_MAX // 4))),
            ("the same ones twice", np.repeat(few, 2)),
        ):
            self._compare(what, ids, self._read(ids))
        if self._length:
            self._compare_empty(self._read(np.empty(0, np.int64)))
        if any(not _equal(a, b) for a, b in zip(first, kept, strict=True)):
            self._fail("a later read() changed arrays of an earlier one: return new arrays, or copies")

    def same_as(self, other: SourceReader) -> None:
        """Check that another object reads the same data."""
        again = _Check(other)
        if again._length != self._length:
            self._fail(f"another object has {again._length} elements, and this one has {self._length}")
        mine, there = _fingerprint(self._reader), _fingerprint(other)
        if mine != there:
            self._fail(f"another object has the fingerprint {there!r}, and this one has {mine!r}")
        for each in self._ids.tolist():
            self._compare("by another object", np.array([each]), again._read(np.array([each])))
        again.closed()

    def closed(self) -> None:
        """Check that a reader can be closed, and that its arrays stay valid."""
        before = self._read(self._ids[:1])
        kept = [leaf.copy() for leaf in before]
        close = getattr(self._reader, "close", None)
        if callable(close):
            close()
        if any(not _equal(a, b) for a, b in zip(before, kept, strict=True)):
            self._fail("close() changed arrays that read() has returned")

    def _check_texts(self, reader: SourceReader) -> None:
        found = _fingerprint(reader)
        if not isinstance(found, str):
            self._fail(f"fingerprint() returned a {type(found).__name__}, not a text")
        if _fingerprint(reader) != found:
            self._fail("fingerprint() changes from call to call, although the data is the same")
        leaves, _ = trees.flatten(getattr(reader, "element_spec", None))
        if any(leaf is not None and not isinstance(leaf, ArraySpec) for leaf in leaves):
            self._fail("element_spec must be a tree of pipedist.ArraySpec")

    def _read(self, ids: Ids) -> list[npt.NDArray[Any]]:
        """Return the leaves of some elements, which have the common structure."""
        ids.flags.writeable = False
        found = self._reader.read(ids)
        try:
            arrays, count = leading_arrays(found, "the result", key="class")
            encode(arrays)
        except (SourceError, UnsendableError) as error:
            self._fail(f"read({_listed(ids)}): {error}")
        if count != len(ids):
            self._fail(f"read({_listed(ids)}) returned arrays of {count} rows; expected one row for each id")
        leaves, treedef = trees.flatten(arrays)
        if self._treedef is None:
            self._treedef = treedef
        if treedef != self._treedef:
            was, now = trees.describe(self._treedef), trees.describe(treedef)
            self._fail(f"read({_listed(ids)}) returned {now}; elements that were read before are {was}")
        declared = getattr(self._reader, "element_spec", None)
        if declared is not None and (wrong := misfit(declared, arrays)):
            self._fail(f"read({_listed(ids)}) returned elements {wrong}")
        return leaves

    def _compare(self, what: str, ids: Ids, leaves: list[npt.NDArray[Any]]) -> None:
        """Compare elements with those that were read alone."""
        for row, each in enumerate(ids.tolist()):
            if each not in self._alone:
                self._alone[each] = self._read(np.array([each]))
            for there, alone in zip(leaves, self._alone[each], strict=True):
                if not ragged.fit(there.dtype, alone.dtype) or not _equal(there[row : row + 1], alone):
                    self._fail(
                        f"element {each}, read {what}, is {_short(there[row])}; read alone it is "
                        f"{_short(alone[0])}. An element must not depend on others, or on earlier reads"
                    )

    def _compare_empty(self, leaves: list[npt.NDArray[Any]]) -> None:
        first = self._alone[int(self._ids[0])]
        for there, alone in zip(leaves, first, strict=True):
            if not ragged.fit(there.dtype, alone.dtype) or there.ndim != alone.ndim:
                self._fail(
                    f"read([]) returned {there.dtype}{list(there.shape)}; expected the dtype and the axes of other "
                    f"elements: {alone.dtype}{[0, *alone.shape[1:]]}"
                )

    def _fail(self, why: str) -> NoReturn:
        raise AssertionError(f"{self._name} does not follow pipedist.SourceReader: {why}")


def _fingerprint(reader: SourceReader) -> Any:
    method = getattr(reader, "fingerprint", None)
    return method() if callable(method) else ""


def _equal(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Return whether two arrays have the same bits; texts, the same characters."""
    if a.shape != b.shape:
        return False
    if a.dtype.kind in "OTUS" or b.dtype.kind in "OTUS":
        pairs = zip(a.astype(object).ravel(), b.astype(object).ravel(), strict=True)
        return all(list(map(bytes, encode(x))) == list(map(bytes, encode(y))) for x, y in pairs)
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _listed(ids: Ids) -> str:
    return str(ids.tolist()) if len(ids) <= 4 else f"[{ids[0]}, ..., {ids[-1]}]"


def _short(value: Any) -> str:
    return excerpt(" ".join(repr(value).split()), 60)
