"""All sinks in one run: on three workers, and on one after a kill of the driver."""

from __future__ import annotations

import itertools
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipedist.errors import OutputError
from pipedist.outputs import open_sink
from pipedist.outputs.databases import Table
from pipedist.report.file_differences import files_in
from tests import preloaded

MISSING = [name for name in ("pyarrow", "zarr", "h5py", "duckdb", "PIL") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed: make install")

STEPS = 12
SPEC = """
pipedist: 1
name: sinks
replicas: 2
dataset: {range: 90, batch: 8}
stages:
  rows: {run: "tests.outputs.row_functions:rows"}
  arrays: {run: "tests.outputs.row_functions:arrays"}
  images: {run: "tests.outputs.row_functions:images"}
  file: {gather: 0, of: rows}
  parts: {gather: 0, of: rows}
  hive: {gather: 0, of: rows}
  feather: {gather: 0, of: rows}
  lite: {gather: 0, of: rows}
  duck: {gather: 0, of: rows}
  kept: {gather: 0, of: rows}
  kept_duck: {gather: 0, of: rows}
  zarr: {gather: 0, of: arrays}
  hdf: {gather: 0, of: arrays}
  pictures: {gather: 0, of: images}
outputs:
  file: file.parquet
  parts: {parquet: {path: parts.parquet/, rows_per_file: 20}}
  hive: {parquet: {path: hive.parquet, partition_by: group}}
  feather: feather.arrow
  lite: lite.sqlite
  duck: {duckdb: {path: duck.duckdb, table: flights}}
  kept: {sqlite: {path: "${spec.dir}/kept.sqlite", table: t}}
  kept_duck: {duckdb: {path: "${spec.dir}/kept.duckdb"}}
  zarr: arrays.zarr
  hdf: arrays.h5
  pictures: "pictures/{name}.png"
"""


def table_of(path: Path, name: str) -> list[tuple[Any, ...]]:
    if path.suffix == ".sqlite":
        connection: Any = sqlite3.connect(path)
    else:
        import duckdb

        connection = duckdb.connect(str(path), read_only=True)
    try:
        found = connection.execute(f"SELECT * FROM {name}").fetchall()
        return [tuple(None if cell != cell else cell for cell in row) for row in found]  # NaN is not NaN
    finally:
        connection.close()


def run(folder: Path, *arguments: str, module: str = "pipedist") -> int:
    words = [sys.executable, "-m", *module.split(), "run", "spec.yaml", *arguments]
    done = preloaded.run(
        words, cwd=folder, env={**os.environ, "PYTHONPATH": str(preloaded.ROOT)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -9), done.stdout
    return int(done.returncode)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "spec.yaml").write_text(SPEC)
    assert run(folder, "--workers", "3" if os.environ.get("PIPEDIST_TEST_SLOW") else "1") == 0
    return folder


@pytest.mark.slow
def test_every_sink_writes_the_same_after_a_kill_and_on_another_number_of_workers(
    tmp_path: Path, whole: Path
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    assert run(tmp_path, "--workers", "1", module="tests.journal.killed 9") == -9
    assert run(tmp_path, "--workers", "1", "--resume") == 0
    outs = [folder / "out/sinks" for folder in (whole, tmp_path)]
    names = [
        [str(file.relative_to(out)) for file in files_in(out) if ".pipedist" not in file.parts]
        for out in outs
    ]
    assert names[0] == names[1]
    databases = {"lite.sqlite": "lite", "duck.duckdb": "flights"}
    for name in set(names[0]) - {*databases, "kept.json", "kept_duck.json"}:
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes(), name
    for name, table in databases.items():
        assert table_of(outs[0] / name, table) == table_of(outs[1] / name, table)
    for name, table in {"kept.sqlite": "t", "kept.duckdb": "kept_duck"}.items():
        found = table_of(tmp_path / name, table)
        assert found == table_of(whole / name, table)
        assert [row[0] for row in found] == list(range(90))


FILL = """
import os, signal, sys
from pathlib import Path
import numpy as np
from pipedist.outputs import arrow_files, databases, open_sink

databases.COMMIT_ROWS = 10
arrow_files.GROUP_ROWS_MAX = 10
path, run, kill_after, *ends = sys.argv[1:]
sink = open_sink(
    Path(path).with_suffix(".receipt"), shape="run", gather=True, kind=Path(path).suffix[1:], name="t", run=run,
    options={"database": path},
)
start = 0
for end in map(int, ends):
    rows = np.arange(start, end)
    sink.append({"n": rows, "s": np.array([f"s{n}" for n in rows])})
    start = end
    if start >= int(kill_after):
        os.kill(os.getpid(), signal.SIGKILL)
sink.finish()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".sqlite", ".duckdb"])
def test_a_table_outside_of_the_folder_has_each_row_once_after_a_kill(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"kept{ending}"

    def fill(run: str, kill_after: int, *ends: int) -> int:
        words = [sys.executable, "-c", FILL, str(path), run, str(kill_after), *map(str, ends)]
        return subprocess.run(words, check=False, timeout=60).returncode

    expected = [(n, f"s{n}") for n in range(55)]
    assert fill("first", 45, 7, 26, 41, 45) == -9
    assert [row[2] for row in table_of(path, "_pipedist_progress")] == [40 if ending == ".duckdb" else 41]
    assert fill("first", 99, 3, 30, 55) == 0  # the same rows in other pieces
    assert table_of(path, "t") == expected
    assert fill("first", 99, 55) == 0  # it is complete
    assert table_of(path, "t") == expected
    assert fill("second", 20, 7, 26) == -9
    assert table_of(path, "t") == expected  # until the next run is complete
    assert fill("third", 99, 20) == 0
    assert table_of(path, "t") == expected[:20]


@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_a_table_that_pipedist_did_not_write_stays(tmp_path: Path, kind: str) -> None:
    database = tmp_path / f"kept.{kind}"
    if kind == "sqlite":
        connection: Any = sqlite3.connect(database)
    else:
        import duckdb

        connection = duckdb.connect(str(database))
    connection.execute("CREATE TABLE t (a INTEGER)")
    connection.close()
    options = {"database": str(database)}
    with pytest.raises(OutputError, match="has a table 't' that pipedist did not write"):
        open_sink(tmp_path / "r.json", shape="run", gather=True, kind=kind, name="t", options=options)


def append(path: Path, *pieces: Any, **how: Any) -> None:
    sink = open_sink(path, shape="run", gather=True, **how)
    try:
        for piece in pieces:
            sink.append(piece)
        sink.finish()
    finally:
        sink.abort()


@pytest.mark.parametrize(
    ("name", "how", "value", "message"),
    [
        (
            "a.parquet",
            {"kind": "parquet_parts", "options": {"partition_by": "b"}},
            {"a": np.arange(2)},
            "no column 'b'",
        ),
        (
            "a.parquet",
            {"kind": "parquet_parts", "options": {"partition_by": "x"}},
            {"x": np.ones(2), "a": np.ones(2)},
            "can't name folders",
        ),
        ("a.sqlite", {}, {"a": np.eye(2)}, "has axes"),
        ("a.sqlite", {}, {"a": np.array([2**63], np.uint64)}, "too large"),
        ("a.sqlite", {}, [{"a": [1]}], "'a' has a list"),
        ("a.sqlite", {}, {"a": np.array(["b\ud800c"])}, r"a.sqlite: the text 'b\\ud800c' has half"),
        ("a.sqlite", {}, {"k\ud800": np.arange(2)}, "half of a surrogate pair"),
        ("a.h5", {}, {"a": np.array(["b\ud800c"])}, "leaf 'a' can't be in a .h5: .*surrogates"),
        ("a.h5", {}, {"a": np.array(["b\0c"])}, "leaf 'a' can't be in a .h5: .*NULLs"),
        ("a.h5", {}, {"a\0b": np.ones(2)}, "can't be a name in a .h5"),
        ("a.zarr", {}, {"a": np.array(["b\ud800c"])}, "leaf 'a' can't be in a .zarr: .*surrogates"),
        ("a.parquet", {}, {"k\ud800": np.arange(2)}, "half of a surrogate pair"),
        ("a.h5", {}, {"a": np.array(["2024"], "M8[D]")}, ".h5 lacks"),
        ("a.zarr", {}, {"a": np.array([b"x"])}, ".zarr lacks"),
        (
            "f",
            {"kind": "files", "options": {"names": "{k}.png"}},
            {"k": np.arange(2), "p": np.ones((2, 3, 3))},
            "uint8 ",
        ),
        ("f", {"kind": "files", "options": {"names": "{k}.png"}}, {"k": np.arange(2)}, "and there is none"),
        (
            "f",
            {"kind": "files", "options": {"names": "{k}.txt"}},
            {"k": np.array(["a", "a"]), "t": np.array(["x", "y"])},
            "two rows",
        ),
        (
            "f",
            {"kind": "files", "options": {"names": "{k}.txt"}},
            {"k": np.array(["../a"]), "t": np.array(["x"])},
            "below the folder",
        ),
    ],
)
def test_values_that_do_not_fit_leave_nothing(
    tmp_path: Path, name: str, how: Any, value: Any, message: str
) -> None:
    with pytest.raises(OutputError, match=message):
        append(tmp_path / name, value, **how)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.duckdb"])
@pytest.mark.parametrize(
    ("first", "later"), [(True, 5), (5, True), ("a", 5), (None, 5), (1.5, True), (5, "12")]
)
def test_values_of_later_groups_are_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: Any, later: Any
) -> None:
    from pipedist.outputs import arrow_files

    monkeypatch.setattr(arrow_files, "GROUP_ROWS_MAX", 2)
    with pytest.raises(OutputError, match="the values of a column have several types"):
        append(tmp_path / name, [{"x": first}], [{"x": first}], [{"x": later}])
    append(tmp_path / name, [{"x": 1.5}], [{"x": None}], [{"x": 2}])


def test_row_groups_end_at_the_same_rows_whatever_the_pieces_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow

    from pipedist.outputs import arrow_files

    monkeypatch.setattr(arrow_files, "GROUP_BYTES_MAX", 100)
    columns = {
        "s": ["x" * (n % 23) for n in range(200)],
        "l": [[n] * (n % 4) if n % 7 else None for n in range(200)],
        "r": [{"a": n, "b": None if n % 2 else "bb"} for n in range(200)],
        "f": [[1.0, 2.0]] * 200,
    }
    table = pyarrow.table(columns, schema=pyarrow.schema([
        ("s", pyarrow.string()), ("l", pyarrow.list_(pyarrow.int64())),
        ("r", pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.string())])),
        ("f", pyarrow.list_(pyarrow.float64(), 2)),
    ]))  # fmt: skip

    def ends(cuts: list[int]) -> list[int]:
        groups = arrow_files.RowGroups(pyarrow, 20)
        found = [
            sum(each.num_rows for each in group)
            for a, b in itertools.pairwise([0, *cuts, 200])
            for group in groups.push(table.slice(a, b - a))
        ]
        return [*found, sum(each.num_rows for each in groups.rest())]

    expected = ends([])
    assert sum(expected) == 200
    assert len(set(expected)) > 2
    assert ends(list(range(1, 200))) == ends([3, 50, 51, 120]) == expected


def test_partitions_of_nulls_and_of_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    from pipedist.outputs import arrow_files

    options = {"partition_by": "k"}
    rows = {"k": np.array(["b", None, "", "a", "b"], object), "n": np.arange(5)}
    append(tmp_path / "a", rows, kind="parquet_parts", options=options)
    monkeypatch.setattr(arrow_files, "_PARTITIONS_BYTES_MAX", 0)  # each group is written at once
    append(tmp_path / "b", rows, kind="parquet_parts", options=options)
    names = [str(file.relative_to(tmp_path / "a")) for file in files_in(tmp_path / "a")]
    assert names == [f"k={key}/part-00000.parquet" for key in ("__HIVE_DEFAULT_PARTITION__", "a", "b")]
    for name, expected in zip(names, ([1, 2], [3], [0, 4]), strict=True):
        assert pyarrow.parquet.ParquetFile(tmp_path / "a" / name).read().column("n").to_pylist() == expected
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    append(tmp_path / "c", np.array([]), kind="parquet_parts", options=options)
    append(tmp_path / "d", np.array([]), kind="files", options={"names": "{k}.json"})
    assert files_in(tmp_path / "c") == files_in(tmp_path / "d") == []


def test_dates_of_arrays_and_of_records_are_texts_of_sqlite(tmp_path: Path) -> None:
    days = [np.datetime64("2024-03-01"), np.datetime64("NaT")]
    append(tmp_path / "a.sqlite", {"day": np.array(days)})
    append(tmp_path / "b.sqlite", [{"day": day} for day in days])
    for name in ("a", "b"):
        assert table_of(tmp_path / f"{name}.sqlite", "value") == [("2024-03-01",), (None,)]


def test_contents_of_files(tmp_path: Path) -> None:
    names = {"kind": "files", "options": {"names": "{k}.json"}}
    append(tmp_path / "j", [{"k": "a", "v": {"x": [1]}}, {"k": "b", "v": None}], **names)
    assert (tmp_path / "j/a.json").read_text() == '{"x": [1]}\n'
    append(tmp_path / "n", {"k": np.arange(2), "v": np.eye(2)}, kind="files", options={"names": "{k}/v.npy"})
    assert np.load(tmp_path / "n/1/v.npy").tolist() == [0, 1]
    rows = [{"k": "a", "v": b"\x00\x01"}]
    append(tmp_path / "b", rows, kind="files", options={"names": "{k}"})
    assert (tmp_path / "b/a").read_bytes() == b"\x00\x01"


def test_libraries_read_what_the_sinks_wrote(whole: Path) -> None:
    import h5py
    import pyarrow
    import pyarrow.dataset
    import pyarrow.parquet
    import zarr
    from PIL import Image

    out = whole / "out/sinks"
    table = pyarrow.parquet.read_table(out / "file.parquet")
    assert table.column("n").to_pylist() == list(range(90))
    assert table.column("s")[3].as_py() == "name 3"
    parts = pyarrow.parquet.read_table(out / "parts.parquet")
    assert repr(parts.to_pydict()) == repr(table.to_pydict())
    assert [pyarrow.parquet.read_metadata(file).num_rows for file in files_in(out / "parts.parquet")] == [
        20
    ] * 4 + [10]
    with pyarrow.memory_map(str(out / "feather.arrow")) as file:
        assert repr(pyarrow.ipc.open_file(file).read_all().to_pydict()) == repr(table.to_pydict())
    hive = pyarrow.dataset.dataset(out / "hive.parquet", partitioning="hive").to_table()
    assert sorted(hive.column("group").unique().to_pylist()) == ["g/0", "g/1", "g/2"]
    assert hive.filter(pyarrow.compute.field("group") == "g/1").column("n").to_pylist() == list(
        range(1, 90, 3)
    )
    lite = table_of(out / "lite.sqlite", "lite")
    assert lite[3] == (3, 1.5, "name 3", "2024-01-04", "g/0", 0)
    assert lite[5][1] is None
    duck = table_of(out / "duck.duckdb", "flights")
    assert [row[0] for row in duck] == list(range(90))
    assert str(duck[3][3]) == "2024-01-04"
    expected = np.outer(np.arange(90), [1.0, 2.0, 3.0])
    group: Any = zarr.open_group(str(out / "arrays.zarr"), mode="r")
    np.testing.assert_array_equal(group["a/m"][:], expected)
    assert group["a/s"][4] == "t4"
    with h5py.File(out / "arrays.h5") as file:
        np.testing.assert_array_equal(file["a/m"][:], expected)
        assert file["a/s"].asstr()[4] == "t4"
        assert file["k"].dtype == np.int64
    with Image.open(out / "pictures/1/i7.png") as image:
        assert (image.size, image.getpixel((0, 0))) == ((5, 4), (7, 7, 7))


def test_a_full_database_is_named_as_the_cause(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a.sqlite", isolation_level=None)
    table = Table(connection, "t", "run", "a.sqlite")
    table.create("(x)")
    connection.execute("PRAGMA max_page_count = 1")  # no more pages than it has
    with pytest.raises(sqlite3.OperationalError, match="is full"):
        table.commit(lambda: connection.execute(f"INSERT INTO {table.filling} VALUES (zeroblob(1000000))"), 1)
    connection.close()
