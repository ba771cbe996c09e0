"""Source `source`: elements that a class of the user, or of another package, reads.

The class follows `SourceReader`. Its object is made in each process that reads. The trees that it returns are checked,
and get the form of every shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipedist.core import trees
from pipedist.core.functions import FunctionNotFound, load, place_of
from pipedist.core.types import FunctionRef, Tree
from pipedist.datasets.element import ArraySpec, misfit
from pipedist.datasets.sources.base import (
    Config,
    ElementReader,
    Ids,
    ReaderSource,
    SourceError,
    SourceReader,
    rows_of,
    sealed,
)
from pipedist.datasets.sources.memory import leading_arrays
from pipedist.errors import UsageError

_RAISED = (Exception, SystemExit)  # errors of user code: their sys.exit() must not end the process


class ClassReader(ElementReader):
    """Reads with an object of a reader class.

    Args:
        config: `class`, a FunctionRef or its fields; `with`, the arguments; `code`, the folders of the spec's modules;
            once the source is open, also `length` and `fingerprint`.
    """

    def __init__(self, config: Config) -> None:
        given = config["class"]
        ref = given if isinstance(given, FunctionRef) else FunctionRef(*given)
        self._label = ref.label
        try:
            cls = load(ref, config["code"])
        except (FunctionNotFound, UsageError) as error:
            raise SourceError(str(error), key="class") from error
        made = self._call("", lambda: cls(**config["with"]))
        self._object = self._checked(made)
        self._length: int = self._call("__len__(): ", lambda: len(self._object))
        self.element_spec = self._call("element_spec: ", lambda: getattr(made, "element_spec", None))
        if self.element_spec is not None:
            self._check_spec(self.element_spec)
        self._changed(config)

    def _checked(self, made: Any) -> SourceReader:
        if not isinstance(made, SourceReader):
            missing = [name for name in ("__len__", "read") if not callable(getattr(made, name, None))]
            raise SourceError(
                f"{self._label} has no method {' and no '.join(f'`{name}`' for name in missing)}",
                key="class",
                expected="a class with `__len__(self)` and `read(self, ids)`",
            )
        return made

    def _check_spec(self, spec: Tree) -> None:
        leaves, _ = trees.flatten(spec)
        wrong = next((leaf for leaf in leaves if not isinstance(leaf, ArraySpec)), None)
        if wrong is not None or not leaves:
            raise SourceError(
                f"{self._label}: `element_spec` has {'no leaf' if wrong is None else repr(wrong)}",
                key="class",
                expected="a tree of pipedist.ArraySpec",
            )

    def _changed(self, config: Config) -> None:
        """Raise SourceError if this object does not have the data of the run's source."""
        for what, now, then in (
            ("elements", self._length, config.get("length", self._length)),
            ("fingerprint", found := self.fingerprint(), config.get("fingerprint", found)),
        ):
            if now != then:
                raise SourceError(
                    f"{self._label}: the data has changed since the run began: {what} {then} then, {now} now",
                    key="class",
                )

    def __len__(self) -> int:
        return self._length

    def fingerprint(self) -> str:
        method = getattr(self._object, "fingerprint", None)
        found = self._call("fingerprint(): ", method) if callable(method) else ""
        if not isinstance(found, str):
            raise SourceError(
                f"{self._label}.fingerprint() returned a {type(found).__name__}",
                key="class",
                expected="a text",
            )
        return found

    def read(self, location: Tree) -> Tree:
        """Return the elements with the ids `location`, of any epoch."""
        rows = rows_of(location, self._length)
        ids = np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows
        ids.flags.writeable = False
        if not len(ids) and (empty := self._empty()) is not None:
            return empty
        found = self._call(f"{_named(ids)}: ", lambda: self._object.read(ids))
        arrays, count = leading_arrays(found, f"{self._label}.read()", key="class")
        if count != len(ids):
            raise SourceError(
                f"{self._label}.read() of {len(ids)} ids returned arrays of {count} rows",
                key="class",
                expected="one row for each id, along axis 0",
            )
        if self.element_spec is not None and (wrong := misfit(self.element_spec, arrays)):
            raise SourceError(f"{self._label}.read() returned elements {wrong}", key="class")
        return trees.tree_map(sealed, arrays)

    def _empty(self) -> Tree | None:
        """Return a shard without elements, None if the spec of elements does not show it."""
        if self.element_spec is None:
            return None
        leaves, treedef = trees.flatten(self.element_spec)
        if any(None in leaf.shape for leaf in leaves):
            return None
        return trees.unflatten(treedef, [sealed(np.empty((0, *leaf.shape), leaf.dtype)) for leaf in leaves])

    def _call(self, doing: str, call: Any) -> Any:
        try:
            return call()
        except SourceError:
            raise
        except _RAISED as error:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise SourceError(f"{self._label}: {doing}{text}{place_of(error)}", key="class") from error

    def close(self) -> None:
        close = getattr(self._object, "close", None)
        if callable(close):
            self._call("close(): ", close)


def _named(ids: Ids) -> str:
    """Return ids as errors name them."""
    if len(ids) == 1:
        return f"element {ids[0]}"
    if len(ids) <= 4:
        return f"elements {', '.join(map(str, ids))}"
    return f"{len(ids)} elements from {ids[0]} to {ids[-1]}"


class ReaderClassSource(ReaderSource):
    """Elements that a reader class reads."""

    def __init__(self, config: Config, reader: ClassReader) -> None:
        super().__init__(len(reader), config, reader)

    def probe(self) -> None:
        """Read the first element, and take the spec of elements from it if the class declares none."""
        if not self.length:
            return
        first = self.read(range(1))
        if self.element_spec is None:
            self.element_spec = trees.tree_map(lambda leaf: ArraySpec(leaf.dtype, leaf.shape[1:]), first)


def open_class(config: Config, _folder: object) -> ReaderClassSource:
    """Make an object of a reader class, and count its elements."""
    ref: FunctionRef = config["class"]
    reader = ClassReader({"with": {}, **config})
    settings = {
        "kind": "source",
        "class": [ref.label, ref.name, ref.pickled],
        "with": dict(config.get("with", {})),
        "code": list(config["code"]),
        "length": len(reader),
        "fingerprint": reader.fingerprint(),
    }
    return ReaderClassSource(settings, reader)
