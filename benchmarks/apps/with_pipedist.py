"""pipedist: each function returns a spec, whose stage `result` is the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.apps.functions import AT_ONCE, Network, ask, count_words, histogram


def onnx(data: Path) -> Any:
    return {
        "pipedist": 1,
        "dataset": {"npy": {"path": f"{data}/*.npy"}, "batch": 64},
        "stages": {"labels": {"run": Network}, "result": {"gather": 0, "of": "labels"}},
    }


def images(data: Path) -> Any:
    return {
        "pipedist": 1,
        "dataset": {"files": {"path": f"{data}/*.jpg"}, "batch": 32},
        "stages": {
            "sums": {"run": lambda files: sum(histogram(x) for x in files["bytes"])},
            "result": {"reduce": "sum", "of": "sums", "axis": None},
        },
    }


def words(data: Path) -> Any:
    return {
        "pipedist": 1,
        "dataset": {"text": {"path": f"{data}/*.txt"}, "batch": 20_000},
        "stages": {
            "counts": {"run": count_words},
            "result": {"reduce": "pipedist.combiners:counter", "of": "counts"},
        },
    }


def http(url: str, count: int) -> Any:
    async def answer(number: int) -> int:
        return await ask(url, number)

    return {
        "pipedist": 1,
        "dataset": {"range": count, "batch": 250},
        "stages": {
            "answers": {"run": answer, "per": "element", "concurrency": AT_ONCE},
            "result": {"gather": 0, "of": "answers"},
        },
    }
