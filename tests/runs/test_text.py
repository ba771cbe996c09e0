"""Text, bytes and lists of any length, from the source to the file."""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from tests.runs.text_functions import LONG_CHARS

F = "tests.runs.text_functions"

TEXTS = ["a cat", "", "é\0ü", "ends\0", "x" * 3000, "a,b\n\"c\" 'd'", "日本 𝄞", "NA "]


def document(source: dict[str, Any], run: str, output: str, **more: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "text",
        "replicas": 2,
        "dataset": {**source, "batch": 4, **more},
        "stages": {"made": {"run": f"{F}:{run}"}, "rows": {"gather": 0, "of": "made"}},
        "outputs": {"rows": output},
    }


def written(folder: Path, texts: list[str], suffix: str) -> dict[str, Any]:
    """Write a file of ids and texts, and return a source of it."""
    path = folder / f"in{suffix}"
    columns = {"id": "int64", "text": "str"}
    if suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())})
        pq.write_table(table, path, row_group_size=3)
        return {"parquet": {"path": str(path)}}
    with path.open("w", newline="") as file:
        if suffix == ".csv":
            csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
        else:
            file.writelines(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts))
    return {suffix[1:]: {"path": str(path), "columns": columns}}


def rows_of(path: Path) -> dict[str, list[Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        found: dict[str, list[Any]] = pq.read_table(path).to_pydict()
        return found
    with path.open(newline="") as file:
        if path.suffix == ".csv":
            rows = list(csv.DictReader(file))
        else:
            rows = [json.loads(line) for line in file]
    return {name: [row[name] for row in rows] for name in rows[0]}


MEASURE = """
import json, resource, sys, pipedist
pipedist.run(json.loads(sys.argv[1]), workers=1, output=sys.argv[2])
print([resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)])
"""


@pytest.mark.parametrize(
    ("suffix", "run"), [(".csv", "identity"), (".jsonl", "identity"), (".parquet", "identity")]
)
def test_one_long_text_costs_driver_and_worker_no_more_than_its_bytes(
    tmp_path: Path, suffix: str, run: str
) -> None:
    peaks = []
    for name, first in (("short", "y"), ("long", "y" * LONG_CHARS)):
        folder = tmp_path / name
        folder.mkdir()
        texts = [*["short text"] * 300, first, *["short text"] * 500]
        spec = document(written(folder, texts, suffix), run, f"rows{suffix}")
        spec["dataset"]["batch"] = 600
        spec["replicas"] = 1
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, json.dumps(spec), str(folder / "out")],
            check=True,
            capture_output=True,
            text=True,
        )
        assert rows_of(folder / "out" / f"rows{suffix}")["text"] == texts
        peaks.append(json.loads(done.stdout))
    (driver, worker), (driver_long, worker_long) = peaks
    assert driver_long - driver < 100, peaks
    assert worker_long - worker < 100, peaks
