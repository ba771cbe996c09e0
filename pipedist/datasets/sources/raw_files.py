"""Source `files`: one whole file an element."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipedist.datasets.sources.base import Config, Ids, Reader, Source, SourceError, rows_of
from pipedist.datasets.sources.paths import DataFile, expand
from pipedist.program import Tree

FILE_BYTES_MAX = 1 << 30
"""The largest file that can be an element."""


class RawFilesSource(Source):
    """Whole files; a location is the list of them, so that workers need not know all.

    Args:
        files: the files, one an element.
    """

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._files = tuple(files)
        self._reader = RawFilesReader()
        self.length: int = len(files)
        self.config = {"kind": "files"}

    def locate(self, ids: Ids) -> Tree:
        """Return the elements' files."""
        rows = rows_of(ids, self.length)
        numbers = rows if isinstance(rows, range) else rows.tolist()
        return [self._files[number].to_config() for number in numbers]

    def read(self, location: Tree) -> Tree:
        """Return {path: list[str], bytes: list[bytes]} of the files at `location`."""
        return self._reader.read(location)


class RawFilesReader(Reader):
    """Reads whole files."""

    def read(self, location: Tree) -> dict[str, list[str] | list[bytes]]:
        """Return {path: list[str], bytes: list[bytes]} of the files at `location`.

        A path is relative to the spec's folder if the source's was, so that it is the same on
        every host.

        Raises:
            SourceError: a file is gone, or has changed since the run began.
        """
        files = [DataFile.from_config(config) for config in location]
        return {"path": [file.shown for file in files], "bytes": [file.contents() for file in files]}


def open_files(config: Config, folder: Path) -> RawFilesSource:
    """Open files of any kind, one an element.

    Args:
        config: `path`.
        folder: what `path` is relative to.

    Raises:
        SourceError: no file matches, or one is larger than `FILE_BYTES_MAX`.
    """
    files = expand(config.get("path", ()), folder)
    for file in files:
        if file.size_bytes > FILE_BYTES_MAX:
            raise SourceError(
                f"{file.shown}: {file.size_bytes} bytes; an element can have {FILE_BYTES_MAX} at most",
                key="path",
            )
    return RawFilesSource(files)
