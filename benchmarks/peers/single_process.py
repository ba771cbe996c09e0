"""NumPy and pyarrow in one process: what the file workloads are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmarks.adapter import Adapter
from benchmarks.sizes import FILE_BLOCK_ROWS, FILE_COLUMNS


class SingleProcess(Adapter):
    """Block by block, with one thread."""

    settings: ClassVar[Mapping[str, str]] = {
        "FN": "numpy.load(mmap_mode='r'), sum of blocks of 65,536 rows",
        "FP": "pyarrow.parquet.ParquetFile.iter_batches of 65,536 rows, use_threads=False, NumPy sums",
    }

    def column_sums(self, form: str, folder: Path) -> np.ndarray:
        total = np.zeros(FILE_COLUMNS)
        for path in sorted(folder.glob(f"*.{form}")):
            total += _npy_sums(path) if form == "npy" else _parquet_sums(path)
        return total


def _npy_sums(path: Path) -> np.ndarray:
    rows = np.load(path, mmap_mode="r")
    total = np.zeros(FILE_COLUMNS)
    for first in range(0, len(rows), FILE_BLOCK_ROWS):
        total += rows[first : first + FILE_BLOCK_ROWS].sum(axis=0)
    return total


def _parquet_sums(path: Path) -> np.ndarray:
    from pyarrow import parquet

    total = np.zeros(FILE_COLUMNS)
    file = parquet.ParquetFile(path)
    for block in file.iter_batches(batch_size=FILE_BLOCK_ROWS, use_threads=False):
        total += [column.to_numpy(zero_copy_only=True).sum() for column in block.columns]
    return total
