"""Word counts and group-by beside joblib, Dask, Polars and DuckDB: `make bench-keyed`.

The data is generated, the same in each run, below build/keyed: lines of words whose pairs are as unequal as those of
a text, and rows of a key and a value. Each job of a system runs in a process of its own, with 2 workers or threads,
which are started before the time is taken. The answers must agree.

A cell has the time, as a multiple of pipedist's and in seconds, the processor time of all processes, and the largest
memory of the process that has the result. On a busy machine compare processor times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
DATA = ROOT / "build" / "keyed"
PEERS = ROOT / "benchmarks" / ".venv" / "bin" / "python"
SYSTEMS = ("pipedist", "joblib", "dask", "polars", "duckdb")
WORKERS = 2
TIMEOUT_S = 900

WORDS = 100_000
SUCCESSORS = 300  # of each word
LINE_WORDS = 12
LINES = 50_000  # that are generated at a time

GROUP_ROWS = 500_000  # of a row group


def write_text(path: Path, size_bytes: int) -> None:
    """Write lines of words: the frequency of a word, and of its successors, falls with its rank."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, 10, WORDS)
    letters = rng.integers(97, 123, (WORDS, 10)).astype(np.uint8)
    words = [bytes(letters[place, :length]) + b" " for place, length in enumerate(lengths)]
    starts = _shares(WORDS)
    steps = _shares(SUCCESSORS)
    successors = np.searchsorted(starts, rng.random((WORDS, SUCCESSORS)))
    with path.open("wb") as file:
        while file.tell() < size_bytes:
            ids = np.empty((LINES, LINE_WORDS), np.int64)
            ids[:, 0] = np.searchsorted(starts, rng.random(LINES))
            for place in range(1, LINE_WORDS):
                ids[:, place] = successors[ids[:, place - 1], np.searchsorted(steps, rng.random(LINES))]
            file.write(b"\n".join(b"".join(map(words.__getitem__, row))[:-1] for row in ids.tolist()) + b"\n")


def _shares(count: int) -> Any:
    weights = 1 / np.arange(1, count + 1)
    shares = np.cumsum(weights / weights.sum())
    shares[-1] = 1
    return shares


def write_rows(path: Path, rows: int, keys: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(keys)
    table = pa.table({"key": rng.integers(0, keys, rows), "value": rng.random(rows)})
    pq.write_table(table, path, row_group_size=GROUP_ROWS)


def jobs_of(text_mb: int, rows: int) -> list[tuple[str, str, Path]]:
    """Return title, job and data of each job; make data that is not there."""
    DATA.mkdir(parents=True, exist_ok=True)
    text = DATA / f"text-{text_mb}.txt"
    if not text.exists():
        write_text(text, text_mb * 1_000_000)
    found = [(f"words of {text_mb} MB", "words", text), (f"bigrams of {text_mb} MB", "bigrams", text)]
    for keys in (10, 10_000, rows * 3 // 10):
        path = DATA / f"rows-{rows}-{keys}.parquet"
        if not path.exists():
            write_rows(path, rows, keys)
        found.append((f"group {rows:,} rows by {keys:,} keys", "group", path))
    return found


def measured(system: str, job: str, path: Path) -> dict[str, Any]:
    python = sys.executable if system == "pipedist" else str(PEERS)
    command = [python, "-m", "benchmarks.keyed_systems", system, job, str(path), str(WORKERS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise SystemExit(f"{system} {job}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def agree(one: dict[str, float], other: dict[str, float]) -> bool:
    return all(math.isclose(one[name], other[name], rel_tol=1e-6) for name in one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text-mb", type=int, default=330)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default=",".join(SYSTEMS), help="systems, with commas between")
    parser.add_argument("--jobs", default="words,bigrams,group", help="jobs, with commas between")
    options = parser.parse_args()
    systems = options.only.split(",")
    print("| job | keys | " + " | ".join(systems) + " |")
    print("|---|---" + "|---" * len(systems) + "|")
    for title, job, path in jobs_of(options.text_mb, options.rows):
        if job not in options.jobs.split(","):
            continue
        found: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
        for _ in range(options.rounds):
            for system in systems:
                found[system].append(measured(system, job, path))
        first = found[systems[0]][0]
        for system in systems:
            if not agree(first["answer"], found[system][0]["answer"]):
                raise SystemExit(
                    f"{title}: {systems[0]} {first['answer']}, {system} {found[system][0]['answer']}"
                )
        cells = []
        ours = statistics.median(each["seconds"] for each in found[systems[0]])
        for system in systems:
            seconds = statistics.median(each["seconds"] for each in found[system])
            memory = max(each["peak_mb"] for each in found[system])
            cpu_s = statistics.median(each["cpu_s"] for each in found[system])
            ratio = "" if system == systems[0] else f"{seconds / ours:.1f} x, "
            cells.append(f"{ratio}{seconds:.1f} s, CPU {cpu_s:.1f} s, {memory} MB")
        print(f"| {title} | {first['answer']['keys']:,} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
