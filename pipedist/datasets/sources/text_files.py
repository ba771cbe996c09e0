"""Source `text`: one line an element."""

from __future__ import annotations

from pathlib import Path

from pipedist.datasets.sources.base import Config, Reader, SourceError
from pipedist.datasets.sources.paths import DataFile
from pipedist.datasets.sources.row_files import Chunk, RowFiles, RowSource, in_order, open_rows
from pipedist.datasets.sources.row_scan import RowRules
from pipedist.datasets.sources.unpack import Spool
from pipedist.program import Tree

_RULES = RowRules(quoted=False, keep_blank=True)


def open_text(config: Config, folder: Path) -> RowSource:
    """Open text files: UTF-8, lines end with LF or CRLF, the last one may lack it.

    Args:
        config: `path`.
        folder: what `path` is relative to.

    Raises:
        SourceError: no file matches, or a file can't be read.
    """

    def open_files(files: list[DataFile], spool: Spool) -> RowSource:
        rows = RowFiles(files, _RULES)
        try:
            starts = [rows.index(number) for number in range(len(files))]
        finally:
            rows.close()
        reader_config = {"kind": "text", "files": [file.to_config() for file in files]}
        return RowSource(starts, reader_config, TextReader(reader_config), spool)

    return open_rows(config, folder, open_files)


class TextReader(Reader):
    """Reads lines of text files.

    Args:
        config: `files`.
    """

    def __init__(self, config: Config) -> None:
        self._rows = RowFiles([DataFile.from_config(file) for file in config["files"]], _RULES)

    def read(self, location: Tree) -> list[str]:
        """Return list[str], the lines at `location` without their ends.

        Raises:
            SourceError: a line is not UTF-8; the message begins with `file:line`.
        """
        chunks = list(self._rows.chunks(location))
        return in_order(chunks, [line for chunk in chunks for line in self._lines(chunk)])

    def _lines(self, chunk: Chunk) -> list[str]:
        # Not str.splitlines: that splits at form feeds and Unicode separators, too.
        lines = chunk.data.replace(b"\r\n", b"\n").split(b"\n")[:-1]
        try:
            return [line.decode() for line in lines]
        except UnicodeDecodeError:
            for row, line in enumerate(lines):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    raise SourceError(
                        f"{self._rows.row_place(chunk, row)}: the line is not UTF-8 text", key="path"
                    ) from error
            raise

    def close(self) -> None:
        """Close the files."""
        self._rows.close()
