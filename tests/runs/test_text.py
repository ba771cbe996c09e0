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
from pipedist.runs.identity import digest
from pipedist.spec import load

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

LONG_CHARS = 500_000

F = "tests.runs.text_functions"

TEXTS = ["a cat", "", "é\0ü", "ends\0", "x" * 3000, "a,b\n\"c\" 'd'", "日本 𝄞", "NA "]


def document(source: dict[str, Any], run: str, output: str, batch: int = 4) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "text",
        "replicas": 2,
        "dataset": {**source, "batch": batch},
        "stages": {"made": {"run": f"{F}:{run}"}, "rows": {"gather": 0, "of": "made"}},
        "outputs": {"rows": output},
    }


def written(folder: Path, texts: list[str], suffix: str) -> dict[str, Any]:
    """Write a file of ids and texts, and return a source of it."""
    path = folder / f"in{suffix}"
    columns = {"id": "int64", "text": "str"}
    if suffix == ".parquet":
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
        found: dict[str, list[Any]] = pq.read_table(path).to_pydict()
        return found
    with path.open(newline="") as file:
        if path.suffix == ".csv":
            rows = list(csv.DictReader(file))
        else:
            rows = [json.loads(line) for line in file]
    return {name: [row[name] for row in rows] for name in rows[0]}


csv.field_size_limit(LONG_CHARS)

MEASURE = """
import json, resource, sys, pipedist
for spec, out in json.loads(sys.argv[1]):
    pipedist.run(spec, workers=1, output=out)
    print([resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)])
"""


@pytest.mark.parametrize(
    "suffix", [".parquet", *(pytest.param(suffix, marks=pytest.mark.slow) for suffix in (".csv", ".jsonl"))]
)
def test_one_long_text_costs_driver_and_worker_no_more_than_its_bytes(tmp_path: Path, suffix: str) -> None:
    texts = [*["short text"] * 800, "y" * LONG_CHARS, *["short text"] * 800]
    runs = []
    for name, content in (("short", ["short text"] * 9), ("long", texts)):
        (tmp_path / name).mkdir()
        spec = document(written(tmp_path / name, content, suffix), "identity", f"rows{suffix}", batch=1200)
        runs.append((spec, str(tmp_path / name / "out")))
    command = [sys.executable, "-c", MEASURE, json.dumps(runs)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peaks = [json.loads(line) for line in done.stdout.splitlines()]
    for process in (0, 1):  # the driver, the largest worker
        assert peaks[1][process] - peaks[0][process] < 100, peaks
    assert rows_of(tmp_path / "long" / "out" / f"rows{suffix}")["text"] == texts


async def results_of(cluster: pipedist.LocalCluster, spec: dict[str, Any], out: Path) -> pipedist.Result:
    async with pipedist.open(spec, cluster=cluster, output=out) as run:
        return await run.results()


@pytest.mark.asyncio
async def test_texts_come_through_unchanged(tmp_path: Path) -> None:
    """Zeros within and at the end, empty texts, and any character, from each format to another one."""
    texts = TEXTS * 3
    async with pipedist.LocalCluster(workers=2) as cluster:
        for source, targets in (
            (".csv", (".jsonl",)),
            (".jsonl", (".parquet",)),
            (".parquet", (".csv", ".json")),
        ):
            given = written(tmp_path, texts, source)
            for target in targets:
                out = tmp_path / f"{source}{target}"
                await results_of(cluster, document(given, "identity", f"rows{target}"), out)
                if target == ".json":
                    found = json.loads((out / "rows.json").read_bytes())
                else:
                    found = rows_of(out / f"rows{target}")
                    assert list(found) == ["id", "text"]
                assert found["text"] == texts, (source, target)


@pytest.mark.asyncio
async def test_text_beside_an_embedding_and_a_list(tmp_path: Path) -> None:
    """Columns are in the order of the result; lists come back as they went, also through a second run."""
    texts = [text.replace("\0", "") for text in TEXTS]
    spec = document(written(tmp_path, texts, ".csv"), "embedded", "rows.parquet")
    again = document(
        {"parquet": {"path": str(tmp_path / "first" / "rows.parquet")}}, "identity", "rows.parquet"
    )
    lines = document(
        {"parquet": {"path": str(tmp_path / "first" / "rows.parquet")}}, "identity", "rows.jsonl"
    )
    async with pipedist.LocalCluster(workers=2) as cluster:
        for name, each in (("first", spec), ("second", again), ("lines", lines)):
            await results_of(cluster, each, tmp_path / name)
    first = pq.read_table(tmp_path / "first" / "rows.parquet")
    assert [(field.name, str(field.type).split("[")[0].split("<")[0]) for field in first.schema] == [
        ("text", "string"), ("id", "int64"), ("embedding", "fixed_size_list"), ("words", "list"),
    ]  # fmt: skip
    assert first["embedding"].to_pylist() == [[len(text), text.count("a")] for text in texts]
    assert first["words"].to_pylist() == [text.split() for text in texts]
    assert pq.read_table(tmp_path / "second" / "rows.parquet").equals(first)
    found = rows_of(tmp_path / "lines" / "rows.jsonl")
    assert {name: found[name] for name in found} == first.to_pydict()


@pytest.mark.asyncio
async def test_records_are_rows(tmp_path: Path) -> None:
    """A list of dicts is a row for each, gathered or merged; a call may return none of them."""
    source = written(tmp_path, TEXTS, ".csv")
    expected = [
        {"id": n, "text": text, "at": {"x": n / 2, "tags": [text[:1]]}}
        for n, text in enumerate(TEXTS)
        if text
    ]
    async with pipedist.LocalCluster(workers=2) as cluster:
        for suffix in (".jsonl", ".parquet", ".json"):
            spec = document(source, "records", f"rows{suffix}", batch=3)
            spec["stages"]["merged"] = {"reduce": f"{F}:merged", "of": "made"}
            spec["outputs"] |= {"merged": f"merged{suffix}"}
            if suffix == ".jsonl":
                spec["stages"]["steps"] = {"gather": 0, "of": "made", "per": "step"}
                spec["outputs"] |= {"steps": "steps.jsonl"}
            await results_of(cluster, spec, tmp_path / suffix)
            for path in [tmp_path / suffix / name for name in spec["outputs"].values()]:
                if suffix == ".parquet":
                    found = pq.read_table(path).to_pylist()
                elif suffix == ".jsonl":
                    found = [json.loads(line) for line in path.read_text().splitlines()]
                else:
                    found = json.loads(path.read_bytes())
                assert found == expected, path
        spec = document(source, "records", "rows.csv")
        with pytest.raises(pipedist.OutputError, match=r"'at' has lists or dicts.*Write .jsonl or .parquet"):
            await results_of(cluster, spec, tmp_path / "csv")
        del spec["outputs"]
        assert (await results_of(cluster, spec, tmp_path / "none"))["rows"] == expected


@pytest.mark.asyncio
async def test_bytes_keep_the_zeros_at_their_ends(tmp_path: Path) -> None:
    expected = [b"\0" * (n % 4) for n in range(9)]
    async with pipedist.LocalCluster(workers=1) as cluster:
        spec = document({"range": 9}, "binary", "rows.parquet")
        await results_of(cluster, spec, tmp_path / "first")
        first = tmp_path / "first" / "rows.parquet"
        spec = document({"parquet": {"path": str(first)}}, "identity", "rows.parquet")
        await results_of(cluster, spec, tmp_path / "second")
        del spec["outputs"]
        rows = (await results_of(cluster, spec, tmp_path / "none"))["rows"]
        with pytest.raises(pipedist.OutputError, match=r"ends with a zero byte.*Write .parquet"):
            await results_of(cluster, document({"range": 9}, "binary", "rows.npz"), tmp_path / "npz")
    assert pq.read_table(first).to_pydict() == {"b": expected, "n": [*range(9)]}
    assert pq.read_table(tmp_path / "second" / "rows.parquet").equals(pq.read_table(first))
    assert rows["b"].tolist() == expected


def test_long_texts_give_the_same_bits_on_any_number_of_workers_and_in_quarantine(tmp_path: Path) -> None:
    """Whether texts are `<U` or objects depends on their content alone."""
    texts = [f"{'z' * (4_000 if n == 301 else n % 7)}{n}" for n in range(600)]
    texts[7] = "bad"
    spec = document(written(tmp_path, texts, ".csv"), "one_fails", "rows.parquet", batch=100)
    spec["stages"]["made"]["on_error"] = "quarantine"
    spec["stages"]["kept"] = {"gather": 0, "of": "made", "per": "epoch"}
    spec["stages"]["counted"] = {"run": f"{F}:counted", "of": "made"}
    spec["stages"]["sum"] = {"reduce": "sum", "of": "counted", "axis": 0}
    found = set()
    for workers in (1, 2, 4):
        out = tmp_path / str(workers)
        result = pipedist.run(spec, workers=workers, output=out)
        assert result.ledger.to_json() == {"elements": 600, "committed": 599, "quarantined": 1, "lost": 0}
        kept = result["kept"][0]["text"]
        assert kept.tolist() == texts[:7] + texts[8:]
        digest = hashlib.sha256((out / "rows.parquet").read_bytes()).hexdigest()
        found.add((digest, kept.dtype.str, int(result["sum"])))
    assert len(found) == 1
    assert kept.dtype == object


def test_a_run_of_texts_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    texts = [f"{'z' * (4_000 if n == 301 else n % 7)}{n}" for n in range(600)]
    texts[500] = "bad"
    spec = document(written(tmp_path, texts, ".csv"), "fails_unless", "rows.parquet", batch=100)
    spec["stages"]["made"]["with"] = {"path": str(tmp_path / "fixed")}
    spec["stages"]["records"] = {"run": f"{F}:records", "of": "made"}
    spec["stages"]["lines"] = {"gather": 0, "of": "records"}
    spec["outputs"]["lines"] = "lines.jsonl"
    with pytest.raises(pipedist.CallError):
        pipedist.run(spec, workers=1, output=tmp_path / "resumed")
    (tmp_path / "fixed").touch()
    for name in ("resumed", "whole"):
        pipedist.run(spec, workers=1, output=tmp_path / name, resume=name == "resumed")
    for file in ("rows.parquet", "lines.jsonl"):
        assert (tmp_path / "resumed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert len(rows_of(tmp_path / "whole" / "lines.jsonl")["text"]) == 600


def test_a_run_is_known_by_the_content_of_its_texts() -> None:
    def digest_of(texts: list[str]) -> str:
        arrays = {"arrays": {"s": np.array(texts, object)}}
        return digest(load(document(arrays, "identity", "rows.parquet")))

    one, same, other = (["x" * (90 + n) for n in range(last)] for last in (4, 4, 5))  # at other addresses
    assert digest_of(one) == digest_of(same)
    assert digest_of(one) != digest_of(other[1:])
