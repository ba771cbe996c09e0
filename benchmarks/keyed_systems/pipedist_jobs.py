"""pipedist: functions of arrays or lists, and a keyed reduction."""

from __future__ import annotations

import asyncio
from typing import Any

import pipedist

LINES = 400_000  # of a step
ROWS = 1_000_000


class Jobs:
    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._runner = asyncio.Runner()
        self._cluster: Any = None

    def __enter__(self) -> Jobs:
        self._cluster = pipedist.LocalCluster(workers=self._workers)
        self._runner.run(self._cluster.__aenter__())
        self._reduced({"range": self._workers, "batch": self._workers}, "warm", "counter")
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._cluster.__aexit__(None, None, None))
        self._runner.close()

    def _reduced(self, dataset: dict[str, Any], function: str, combine: str) -> tuple[int, float, float]:
        spec = {
            "pipedist": 1,
            "replicas": self._workers,
            "dataset": dataset,
            "stages": {
                "parts": {"run": f"benchmarks.keyed_systems.functions:{function}"},
                "result": {"reduce": f"pipedist.combiners:{combine}", "of": "parts"},
            },
        }

        async def run() -> Any:
            async with pipedist.open(spec, cluster=self._cluster) as opened:
                return (await opened.results())["result"]

        table = self._runner.run(run())
        values = table.value_columns["value"]
        return len(table), values.sum(), values.max()

    def words(self, path: str) -> tuple[int, float, float]:
        return self._reduced({"text": {"path": path}, "batch": LINES}, "words", "counter")

    def bigrams(self, path: str) -> tuple[int, float, float]:
        return self._reduced({"text": {"path": path}, "batch": LINES}, "bigrams", "counter")

    def group(self, path: str) -> tuple[int, float, float]:
        return self._reduced({"parquet": {"path": path}, "batch": ROWS}, "sums", "by_key_sum")
