"""The files of the parts of one value: `outputs: {features: {hists: hists.npy, table: table.parquet}}`.

A part is named by its path in the value: keys, positions and names of fields, joined with "/", as the members of a
`.npz` are. Parts without a file are not written. A value without rows (`np.array([])`) is one in every part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipedist.core import ragged
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.outputs import encoding
from pipedist.outputs.sink import Sink


class PartSinks:
    """The sinks of the parts of a value, by path; used as one sink.

    Args:
        label: the output as errors name it: "outputs.features".
    """

    def __init__(self, sinks: Mapping[str, Sink], label: str) -> None:
        self._sinks = sinks
        self._label = label

    def append(self, value: Tree) -> None:
        """Append each part of the value to its file; see `Sink.append`."""
        for path, part in self._parts(value).items():
            self._sinks[path].append(part)

    def check(self, value: Tree) -> None:
        """Check that each part fits its format; see `Sink.check`."""
        for path, part in self._parts(value).items():
            self._sinks[path].check(part)

    def finish(self) -> list[Path]:
        """Complete all files."""
        return [sink.finish() for sink in self._sinks.values()]

    def abort(self) -> None:
        """Discard the files that are not finished; harmless twice."""
        for sink in self._sinks.values():
            sink.abort()

    def _parts(self, value: Tree) -> dict[str, Tree]:
        if value is None or (isinstance(value, np.ndarray) and value.size == 0):
            return dict.fromkeys(self._sinks, value)
        if ragged.are_records(value):
            raise OutputError(
                f"{self._label}: the value is a list of records, which has no parts: give it one file"
            )
        return {path: self._part(value, path) for path in self._sinks}

    def _part(self, value: Tree, path: str) -> Tree:
        part = value
        for name in path.split("/"):
            inner = encoding.node(part)
            entries = {} if inner is None else dict(inner[1] if inner[0] == "object" else enumerate(inner[1]))
            found = [child for key, child in entries.items() if str(key) == name]
            if not found:
                there = ", ".join(map(str, list(entries)[:20])) or "no parts"
                raise OutputError(
                    f"{self._label}: the value has no part {path!r} ({name!r} is not among: {there})"
                )
            part = found[0]
        return part


StageSink = Sink | PartSinks
"""The target of the values of one stage."""
