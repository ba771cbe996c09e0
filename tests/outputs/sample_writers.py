"""Classes of sinks, as a user or another package writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray


class Lines:
    """Writes each row as a line.

    Args:
        separator: between cells.
        fail_at: a number that can't be written.
    """

    def __init__(self, path: Path, separator: str = " ", fail_at: int = -1) -> None:
        self._file = path.open("w")
        self._separator = separator
        self._fail_at = fail_at

    def append(self, columns: dict[str, NDArray[Any]]) -> None:
        for row in zip(*(column.tolist() for column in columns.values()), strict=True):
            if row[0] == self._fail_at:
                raise ValueError(f"no {self._fail_at}")
            self._file.write(self._separator.join(map(str, row)) + "\n")

    def close(self) -> None:
        self._file.close()


class Nothing:
    """Writes nothing."""

    def __init__(self, path: Path) -> None:
        pass

    def append(self, columns: dict[str, NDArray[Any]]) -> None:
        pass

    def close(self) -> None:
        pass
