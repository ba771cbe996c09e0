"""The files of a new project: a spec, functions, a test and a README, for data of each kind."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipedist.spec.scalars import as_yaml

SCHEMA_FILE = "pipedist.schema.json"
REPLICAS = 4
STEPS_MIN = 4
BATCH_MAX = 4096
TEST_ROWS = 6
LINE_MAX = 70


@dataclass(frozen=True, slots=True)
class Data:
    """The data of a new project."""

    kind: str  # the source that reads it
    path: str  # relative to the project
    length: int  # elements
    columns: Mapping[str, str] = field(default_factory=dict)  # name and type of the columns that are read
    omitted: int = 0  # columns that are not read
    delimiter: str = ""  # of csv files, if it is not a comma
    arrays: tuple[str, ...] = ()  # the arrays of an .npz archive
    numbers: tuple[str, ...] = ()  # those columns or arrays that hold numbers
    shape: tuple[int, ...] = ()  # of an element of an .npy file
    is_numeric: bool = False  # whether an .npy file holds numbers
    # by column of text: the type that all but a few cells have, and the first of those
    misfits: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    content: str = ""  # the text to write to `path`; "": the file exists

    @property
    def batch(self) -> int:
        """The largest power of two that makes a few steps, up to a limit."""
        return min(BATCH_MAX, 1 << max(0, (self.length // STEPS_MIN).bit_length() - 1))

    @property
    def replicas(self) -> int:
        """As many as have elements in each full step; one if the data is small."""
        return REPLICAS if self.batch >= REPLICAS else 1


def _weather() -> Data:
    """Return the data of a project that is given none."""
    rows = [
        f"{station},{day},{12 + 3 * place + day % 5 / 2},{(7 * day + place) % 4 / 2}"
        for day in range(1, 9)
        for place, station in enumerate(("coast", "hill", "town"))
    ]
    columns = {"station": "str", "day": "int64", "temperature": "float64", "rain": "float64"}
    text = "\n".join([",".join(columns), *rows, ""])
    return Data("csv", "weather.csv", len(rows), columns, numbers=("temperature", "rain"), content=text)


EXAMPLE = _weather()


def project_files(slug: str, data: Data) -> dict[str, str]:
    """Return the text of each file of a project, whose names begin with an identifier."""
    files = {
        f"{slug}.yaml": _spec(slug, data),
        f"{slug}_functions.py": _functions(data),
        f"test_{slug}.py": _test(slug, data),
        "README.md": _readme(slug, data),
    }
    return files | ({data.path: data.content} if data.content else {})


def _spec(slug: str, data: Data) -> str:
    more = f"  # {data.omitted} more are in the files" if data.omitted else ""
    dialect = f"    delimiter: {as_yaml(data.delimiter)}\n" if data.delimiter else ""
    notes = {
        name: f"  # {why}; {kind}, with on_error: quarantine in parts, sets such rows aside"
        for name, (kind, why) in data.misfits.items()
    }
    rows = [f"      {as_yaml(name)}: {kind}{notes.get(name, '')}\n" for name, kind in data.columns.items()]
    columns = "".join([f"    columns:{more}\n", *rows]) if rows else ""
    return f"""\
# yaml-language-server: $schema={SCHEMA_FILE}
# Run it in this folder: pipedist run {slug}.yaml
pipedist: 1
params:
  path: {as_yaml(data.path)}  # relative to this file; other data: -p path=FILE
replicas: {data.replicas}  # shards of a step; their number changes the results, unlike that of workers
dataset:
  {data.kind}:
    path: "${{params.path}}"
{dialect}{columns}  batch: {data.batch}  # elements of a step, divided among the replicas
stages:
  parts:  # called once for each shard
    run: {slug}_functions:summarize
  totals:  # the parts, added up in a fixed order: the same bits on any number of workers
    reduce: sum
    of: parts
    axis: null
outputs:
  totals: totals.json
"""


def _functions(data: Data) -> str:
    if data.numbers:
        first = _text(next(iter(data.columns or data.arrays)))
        return f'''\
"""Replica functions: plain NumPy on one shard, a dict of arrays. Missing numbers are NaN."""

import numpy as np

NUMBERS = {_tuple(data.numbers)}


def summarize(rows):
    """Return the number of rows of a shard; for each array of numbers, how many are known, and their sum."""
    result = {{"rows": len(rows[{first}])}}
    for name in NUMBERS:
        known = ~np.isnan(rows[name])
        result[name] = {{
            "known": np.count_nonzero(known, axis=0),
            "sum": np.sum(rows[name], axis=0, where=known, dtype=np.float64),
        }}
    return result
'''
    if data.kind == "npy" and data.is_numeric:
        return '''\
"""Replica functions: plain NumPy on one shard, an array of rows."""

import numpy as np


def summarize(rows):
    """Return the number of rows of a shard, and their sum."""
    return {"rows": len(rows), "sum": np.sum(rows, axis=0, dtype=np.float64)}
'''
    if data.kind == "text":
        return '''\
"""Replica functions: plain Python on one shard, a list of lines."""


def summarize(lines):
    """Return the numbers of lines, words and characters of a shard."""
    return {
        "lines": len(lines),
        "words": sum(len(line.split()) for line in lines),
        "characters": sum(map(len, lines)),
    }
'''
    if data.kind == "files":
        return '''\
"""Replica functions: plain Python on one shard, the paths and the bytes of files."""


def summarize(files):
    """Return the numbers of files and bytes of a shard."""
    return {"files": len(files["path"]), "bytes": sum(map(len, files["bytes"]))}
'''
    inner = data.columns or data.arrays
    rows = f"rows[{_text(next(iter(inner)))}]" if inner else "rows"
    return f'''\
"""Replica functions: plain Python on one shard."""


def summarize(rows):
    """Return the number of rows of a shard."""
    return {{"rows": len({rows})}}
'''


def _test(slug: str, data: Data) -> str:
    imports, write, expected = _test_data(data)
    compare = 'assert result["totals"] == expected'
    if data.kind in ("npy", "npz"):
        compare = 'np.testing.assert_equal(result["totals"], expected)'
    return f'''\
"""The pipeline on data whose totals are known: python -m pytest"""

from pathlib import Path

{imports}import pipedist

SPEC = Path(__file__).with_name("{slug}.yaml")


def test_totals_are_the_same_on_one_and_on_two_workers(tmp_path):
    path = tmp_path / "{"*" if data.kind == "files" else f"rows.{data.kind}"}"
{write}
    expected = {expected}
    for workers in (1, 2):
        result = pipedist.run(
            SPEC,
            workers=workers,
            params={{"path": str(path)}},
            output=tmp_path / f"out-{{workers}}",
        )
        {compare}
'''


def _test_data(data: Data) -> tuple[str, str, str]:
    """Return the imports of a test, its statements that write data, and the expected totals, as source text."""
    cells = {name: [_cell(kind, row) for row in range(TEST_ROWS)] for name, kind in data.columns.items()}
    totals = "".join(
        f'        {_text(name)}: {{"known": {TEST_ROWS}, "sum": {_sum(cells.get(name))}}},\n'
        for name in data.numbers
    )
    expected = f'{{\n        "rows": {TEST_ROWS},\n{totals}    }}' if totals else f'{{"rows": {TEST_ROWS}}}'
    match data.kind:
        case "csv":
            rows = io.StringIO()
            writer = csv.writer(rows, delimiter=data.delimiter or ",", lineterminator="\n")
            writer.writerow(cells)
            writer.writerows(zip(*cells.values(), strict=True))
            return "", _write_lines(rows.getvalue().splitlines()), expected
        case "jsonl":
            lines = [
                json.dumps(dict(zip(cells, row, strict=True))) for row in zip(*cells.values(), strict=True)
            ]
            return "", _write_lines(lines or ["{}"] * TEST_ROWS), expected
        case "parquet":
            table = "".join(f"        {_text(name)}: {values!r},\n" for name, values in cells.items())
            write = f"    pq.write_table(pa.table({{\n{table}    }}), path)"
            return "import pyarrow as pa\nimport pyarrow.parquet as pq\n", write, expected
        case "npy":
            array, totals = f'np.array(["text"] * {TEST_ROWS})', ""
            if data.is_numeric:
                array = f"np.arange({TEST_ROWS * math.prod(data.shape)}).reshape({(TEST_ROWS, *data.shape)})"
                totals = ', "sum": rows.sum(axis=0, dtype=np.float64)'
            write = f"    rows = {array}\n    np.save(path, rows)"
            return "import numpy as np\n", write, f'{{"rows": {TEST_ROWS}{totals}}}'
        case "npz":
            made = [f"np.arange({TEST_ROWS})", f'["text"] * {TEST_ROWS}']
            arrays = ", ".join(f"{_text(name)}: {made[name not in data.numbers]}" for name in data.arrays)
            return "import numpy as np\n", f"    np.savez(path, **{{{arrays}}})", expected
        case "text":
            write = f'    path.write_text("two words\\n" * {TEST_ROWS})'
            return (
                "",
                write,
                f'{{"lines": {TEST_ROWS}, "words": {2 * TEST_ROWS}, "characters": {9 * TEST_ROWS}}}',
            )
    write = f'    for number in range({TEST_ROWS}):\n        path.with_name(f"{{number}}.bin").write_bytes(b"1234")'
    return "", write, f'{{"files": {TEST_ROWS}, "bytes": {4 * TEST_ROWS}}}'


def _cell(kind: str, row: int) -> object:
    """Return a value of a column of the test's data."""
    if kind == "str":
        return "ab"[row % 2]
    if kind == "bool":
        return row % 2 == 0
    if kind in ("date", "timestamp"):
        return f"2026-01-{row + 1:02}" + "T12:00:00" * (kind == "timestamp")
    return row + 0.5 if kind.startswith("float") else row


def _sum(cells: list[Any] | None) -> float:
    """Return the sum of a column of the test's data, which an array without columns has too."""
    return float(sum(range(TEST_ROWS) if cells is None else cells))


def _write_lines(lines: list[str]) -> str:
    inner = "".join(f"        {_text(line)},\n" for line in lines)
    return f'    rows = [\n{inner}    ]\n    path.write_text("\\n".join(rows) + "\\n", encoding="utf-8")'


def _text(text: str) -> str:
    """Return a text as Python source, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _tuple(names: tuple[str, ...]) -> str:
    line = f"({', '.join(map(_text, names))}{',' * (len(names) == 1)})"
    return line if len(line) <= LINE_MAX else "(\n" + "".join(f"    {_text(name)},\n" for name in names) + ")"


def _readme(slug: str, data: Data) -> str:
    return f"""\
# {slug}

A [pipedist](https://github.com/pipedist/pipedist) pipeline over `{data.path}`.

| file | what it holds |
|---|---|
| `{slug}.yaml` | the pipeline: data, stages, outputs |
| `{slug}_functions.py` | the functions of its stages |
| `test_{slug}.py` | a test on data whose totals are known |
| `{SCHEMA_FILE}` | the schema of pipelines, for completion in editors (`pipedist schema` prints it) |

In this folder:

    pipedist run {slug}.yaml    # writes out/{slug}/totals.json
    pipedist plan {slug}.yaml   # shows what would run
    python -m pytest{" " * (len(f"pipedist run {slug}.yaml") - 16)}    # runs the test: pip install pytest

Outputs go to `out/{slug}` in the folder in which you are; `-o FOLDER` chooses another.

Change `summarize` in `{slug}_functions.py`, and run again. `pipedist run {slug}.yaml -w 4` uses four worker
processes, and gives the same bytes.
"""
