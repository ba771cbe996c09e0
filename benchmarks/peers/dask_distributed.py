"""dask.distributed with a local cluster of 2 single-threaded worker processes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import distributed
import numpy as np

from benchmarks.adapter import WINDOW, WORKERS, Function, Peer
from benchmarks.sizes import FILE_BLOCK_ROWS, FILE_COLUMNS


class Dask(Peer):
    """Client(n_workers=2, threads_per_worker=1), the scheduler in the driver's process."""

    settings: ClassVar[Mapping[str, str]] = {
        "W1": "client.map(pure=False), one scheduler task an item, then gather",
        "W1b": "dask.bag, 100 partitions (the default)",
        "W2": "client.scatter(direct, hash=False) and submit, 8 in flight",
        "W8": "scatter one part to each worker, submit(workers=), gather",
        "FN": "dask.array.from_array of memory-mapped files, blocks of 65,536 rows",
        "FP": "dask.dataframe.read_parquet, its own blocks",
    }
    cold = """\
from dask.distributed import Client
def f(x): return x * x
if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        print(sum(client.gather(client.map(f, range(100)))))
"""

    def start(self) -> None:
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        self._client = distributed.Client(
            n_workers=WORKERS, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
        )
        self._client.wait_for_workers(WORKERS)
        self._workers = list(self._client.scheduler_info(n_workers=-1)["workers"])

    def stop(self) -> None:
        self._client.shutdown()
        self._client.close()

    def each(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        return list(self._client.gather(self._client.map(fn, args, pure=False)))

    def bundled(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        import dask.bag

        return list(dask.bag.from_sequence(args).map(fn).compute(scheduler=self._client))

    def _send(self, fn: Function, batch: np.ndarray) -> Any:
        data = self._client.scatter(batch, direct=True, hash=False)
        return self._client.submit(fn, data, pure=False)

    def windowed(
        self, fn: Function, batches: Iterable[np.ndarray], ordered: bool
    ) -> Iterator[tuple[int, Any]]:
        return self._in_order(fn, batches) if ordered else self._as_completed(fn, batches)

    def _in_order(self, fn: Function, batches: Iterable[np.ndarray]) -> Iterator[tuple[int, Any]]:
        queue: deque[tuple[int, Any]] = deque()
        for index, batch in enumerate(batches):
            queue.append((index, self._send(fn, batch)))
            if len(queue) >= WINDOW:
                first, future = queue.popleft()
                yield first, future.result()
        while queue:
            first, future = queue.popleft()
            yield first, future.result()

    def _as_completed(self, fn: Function, batches: Iterable[np.ndarray]) -> Iterator[tuple[int, Any]]:
        items = enumerate(batches)
        index: dict[Any, int] = {}
        completed = distributed.as_completed(with_results=True)

        def send_next() -> None:
            item = next(items, None)
            if item is not None:
                future = self._send(fn, item[1])
                index[future.key] = item[0]
                completed.add(future)

        for _ in range(WINDOW):
            send_next()
        for future, value in completed:
            yield index.pop(future.key), value
            send_next()

    def step(self, fn: Function, parts: Sequence[np.ndarray]) -> list[Any]:
        futures = []
        for worker, part in zip(self._workers, parts, strict=True):
            data = self._client.scatter(part, workers=[worker], direct=True, hash=False)
            futures.append(self._client.submit(fn, data, workers=[worker], pure=False))
        return list(self._client.gather(futures))

    def column_sums(self, form: str, folder: Path) -> np.ndarray:
        if form == "npy":
            import dask.array as da

            parts = [
                da.from_array(np.load(path, mmap_mode="r"), chunks=(FILE_BLOCK_ROWS, FILE_COLUMNS))
                for path in sorted(folder.glob("*.npy"))
            ]
            return np.asarray(da.concatenate(parts).sum(axis=0).compute())
        import dask.dataframe as dd

        sums = dd.read_parquet(str(folder / "*.parquet")).sum().compute()
        return np.asarray([sums[f"c{k}"] for k in range(FILE_COLUMNS)])
