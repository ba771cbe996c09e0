"""Ray Data: the streams and the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import ray
import ray.data

from benchmarks.adapter import Adapter, Function, Take
from benchmarks.peers.ray_core import _init
from benchmarks.sizes import FILE_BLOCK_ROWS, FILE_COLUMNS


class RayData(Adapter):
    """Ray Data with its blocks in the object store."""

    settings: ClassVar[Mapping[str, str]] = {
        "W2": "from_numpy (one block a batch), map_batches(batch_size=None, zero_copy_batch=True), "
        "iter_batches(batch_size=None), preserve_order=True",
        "FN": "read_numpy, map_batches to partial sums (65,536 rows), summed here",
        "FP": "read_parquet, map_batches to partial sums (65,536 rows), summed here",
    }

    def start(self) -> None:
        _init()
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True

    def stop(self) -> None:
        ray.shutdown()

    def stream(self, fn: Function, batches: np.ndarray, *, ordered: bool, take: Take) -> None:
        def work(block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"v": np.stack([np.asarray(fn(x)) for x in block["data"]])}

        made = ray.data.from_numpy([batch[None] for batch in batches])
        made = made.map_batches(work, batch_size=None, zero_copy_batch=True)
        index = 0
        for block in made.iter_batches(batch_size=None, batch_format="numpy"):
            for value in block["v"]:
                take(index, value)
                index += 1

    def column_sums(self, form: str, folder: Path) -> np.ndarray:
        def partial(block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            if form == "npy":
                return {"sums": np.asarray(block["data"]).sum(axis=0)[None]}
            return {"sums": np.array([[block[f"c{k}"].sum() for k in range(FILE_COLUMNS)]])}

        read: Any = ray.data.read_numpy if form == "npy" else ray.data.read_parquet
        rows = read([str(path) for path in sorted(folder.glob(f"*.{form}"))])
        partials = rows.map_batches(partial, batch_size=FILE_BLOCK_ROWS, zero_copy_batch=True)
        total = np.zeros(FILE_COLUMNS)
        for block in partials.iter_batches(batch_size=None, batch_format="numpy"):
            total += np.asarray(block["sums"]).reshape(-1, FILE_COLUMNS).sum(axis=0)
        return total
