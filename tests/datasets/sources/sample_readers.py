"""Reader classes, and the functions of runs that read with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipedist import ArraySpec

Ids = npt.NDArray[np.int64]


class Squares:
    """Reads numbers and their squares.

    Args:
        count: how many.
        broken: those that can't be read.
        version: a file with the version of the data.
    """

    def __init__(self, count: int, broken: list[int] | None = None, version: str = "") -> None:
        self.count, self.broken, self.version = count, broken or [], version

    def __len__(self) -> int:
        return self.count

    def read(self, ids: Ids) -> dict[str, Any]:
        if found := [each for each in ids.tolist() if each in self.broken]:
            raise ValueError(f"scan {found[0]} is damaged")
        return {"number": ids, "square": ids**2.0}

    def fingerprint(self) -> str:
        return Path(self.version).read_text() if self.version else "first"


class Counted(Squares):
    """Also reads how many objects this process has made."""

    made = 0

    def __init__(self, count: int, broken: list[int]) -> None:
        super().__init__(count, broken)
        Counted.made += 1

    def read(self, ids: Ids) -> dict[str, Any]:
        return {**super().read(ids), "made": np.full(len(ids), Counted.made)}


class Declared(Squares):
    element_spec = ArraySpec(np.int32, (2,))

    def read(self, ids: Ids) -> Any:  # type: ignore[override]
        return np.stack([ids, ids], 1)


class NoRead:
    def __len__(self) -> int:
        return 3


def numbers(shard: Any) -> Any:
    return dict(shard)
