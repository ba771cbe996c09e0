"""The data set of the file workloads: the same rows as npy and as parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.sizes import FILE_BLOCK_ROWS, FILE_COLUMNS, Sizes


def make_data(folder: Path, sizes: Sizes) -> Path:
    """Return a folder with `npy/`, `parquet/` and `column_sums.npy`; made if it is not there.

    Values are integers, so that sums are exact in any order. Parquet is neither compressed nor
    dictionary-encoded: both forms have the same bytes to read.
    """
    home = folder / f"{sizes.file_bytes >> 20}mib"
    sums = home / "column_sums.npy"
    if sums.exists():
        return home
    for form in ("npy", "parquet"):
        (home / form).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    rows = sizes.file_bytes // (8 * FILE_COLUMNS * sizes.file_parts)
    total = np.zeros(FILE_COLUMNS)
    for part in range(sizes.file_parts):
        block = rng.integers(-128, 128, (rows, FILE_COLUMNS), dtype=np.int8).astype(np.float64)
        total += block.sum(axis=0)
        np.save(home / "npy" / f"{part:03}.npy", block)
        _write_parquet(home / "parquet" / f"{part:03}.parquet", block)
    np.save(sums, total)
    return home


def _write_parquet(path: Path, block: np.ndarray) -> None:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:  # the parquet workload is left out then
        return
    table = pa.table({f"c{k}": np.ascontiguousarray(block[:, k]) for k in range(FILE_COLUMNS)})
    parquet.write_table(table, path, compression="none", use_dictionary=False, row_group_size=FILE_BLOCK_ROWS)
