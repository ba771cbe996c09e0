from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipedist.datasets.sources import SourceError, arrow_files, open_source, table_files
from pipedist.datasets.sources.arrow_columns import OWN_TYPE, numpy_column
from tests.datasets.sources.reading import read_elsewhere

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

MAPS = pa.array([{1: 2}, None], pa.map_(pa.int8(), pa.int8()))


def _write(path: Path, rows: int, first: int = 0, group: int = 7) -> None:
    numbers = range(first, first + rows)
    columns = {
        "i": pa.array(numbers, pa.int64()),
        "f": pa.array([None if n % 5 == 0 else n / 2 for n in numbers], pa.float64()),
        "s": pa.array([None if n % 3 == 0 else f"é{n}" for n in numbers], pa.string()),
        "d": pa.array([("x", "yy")[n % 2] for n in numbers], pa.string()).dictionary_encode(),
        "t": pa.array([None if n == 1 else datetime.date(2013, 1, 1 + n % 28) for n in numbers], pa.date32()),
        "b": pa.array([n % 2 == 0 for n in numbers], pa.bool_()),
    }
    pq.write_table(pa.table(columns), path, row_group_size=group)


TYPES = [
    *(pa.int8(), pa.uint64(), pa.float32(), pa.float64(), pa.date32(), pa.date64(), pa.duration("ms")),
    *(pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("us", "Europe/Berlin")),
]


@pytest.mark.parametrize("own", TYPES, ids=str)
def test_numbers_and_dates_are_those_of_pyarrow(own: pa.DataType) -> None:
    days = np.array([3, 1, 2, 5]) * (86_400_000 if own == pa.date64() else 1)
    plain = pa.array(days, pa.int32() if own == pa.date32() else pa.int64()).cast(own)
    with_null = pa.concat_arrays([plain.slice(0, 2), pa.nulls(1, own), plain.slice(2)])
    kind = "float64" if pa.types.is_integer(own) else OWN_TYPE
    for array in (plain, with_null):
        for chunks in ([array], [array.slice(1, 3)], [array, array.slice(2)], []):
            column = pa.chunked_array(chunks, type=own)
            found = numpy_column(pa, column, kind if column.null_count else OWN_TYPE)
            expected = column.to_numpy()
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected, equal_nan=True)
            if len(chunks) == 1 and not column.null_count and own != pa.date32():
                assert not found.flags.writeable  # other readers share the memory


def test_lists_are_read_in_a_process_that_has_imported_nothing_else(tmp_path: Path) -> None:
    pq.write_table(pa.table({"v": [[1.0, 2.0], [3.0], []]}), tmp_path / "t.parquet")
    program = (
        "from pathlib import Path\n"
        "from pipedist.datasets.sources import open_source\n"
        "source = open_source('parquet', {'path': 't.parquet'}, folder=Path())\n"
        "print([each.tolist() for each in source.read(source.locate(range(3)))['v']])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "[[1.0, 2.0], [3.0], []]\n", done.stderr


def test_numbers_are_read_and_written_without_pandas(tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", 20)
    code = (
        "import sys, pipedist\n"
        "columns = {'i': 'int64', 'f': 'float64', 't': 'date'}\n"
        "spec = {'pipedist': 1, 'dataset': {'parquet': {'path': 'a.parquet', 'columns': columns}, 'batch': 9},\n"
        "        'stages': {'same': {'run': 'same:same'}, 'all': {'gather': 0, 'of': 'same'}},\n"
        "        'outputs': {'all': 'all.parquet'}}\n"
        "pipedist.run(spec, workers=1, output='out')\n"
        "print('pandas' in sys.modules)"
    )
    same = "import sys\ndef same(x):\n    assert 'pandas' not in sys.modules\n    return {'i': x['i'], 'f': x['f']}\n"
    (tmp_path / "same.py").write_text(same)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


@pytest.mark.parametrize("cached", [True, False])
def test_rows_are_read_across_row_groups_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    if not cached:
        monkeypatch.setattr(table_files, "PARTS_BYTES_MAX", 0)
    _write(tmp_path / "a.parquet", 20)
    _write(tmp_path / "b.parquet", 0, 20)
    _write(tmp_path / "c.parquet", 11, 20)
    source = open_source("parquet", {"path": "*.parquet"}, folder=tmp_path)
    assert (source.length, source.by_id) == (31, True)
    for ids in (range(31), range(5, 9), range(18, 25), range(33, 40), np.array([30, 0, 7, 6, 21, 0])):
        rows = np.asarray(ids) % 31
        shard = read_elsewhere(source, ids)
        assert shard["i"].tolist() == rows.tolist()
        expected = np.array([np.nan if n % 5 == 0 else n / 2 for n in rows])
        assert np.array_equal(shard["f"], expected, equal_nan=True)
        assert shard["s"].tolist() == ["" if n % 3 == 0 else f"é{n}" for n in rows]
        assert shard["d"].tolist() == [("x", "yy")[n % 2] for n in rows]
        assert shard["t"].dtype == np.dtype("<M8[D]")
        assert np.isnat(shard["t"]).tolist() == [n == 1 for n in rows]
        assert shard["b"].tolist() == [n % 2 == 0 for n in rows]
    empty = read_elsewhere(source, range(0))
    assert {name: (len(column), column.dtype.kind) for name, column in empty.items()} == {
        "i": (0, "i"),
        "f": (0, "f"),
        "s": (0, "U"),
        "d": (0, "U"),
        "t": (0, "M"),
        "b": (0, "b"),
    }
    source.close()


def test_columns_choose_and_convert(tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", 10)
    columns = {"s": "str", "f": "float32", "i": "float64", "b": "bool"}
    source = open_source("parquet", {"path": "a.parquet", "columns": columns}, folder=tmp_path)
    shard = read_elsewhere(source, range(1, 4))
    assert {name: column.dtype.str for name, column in shard.items()} == {
        "s": "<U2",
        "f": "<f4",
        "i": "<f8",
        "b": "|b1",
    }
    assert shard["i"].tolist() == [1, 2, 3]
    source.close()


def _one(folder: Path, values: list[Any], own: Any, kind: str) -> Any:
    pq.write_table(pa.table({"n": [0] * len(values), "x": pa.array(values, own)}), folder / "a.parquet", 2)
    config = {"path": "a.parquet", **({"columns": {"x": kind}} if kind else {})}
    source = open_source("parquet", config, folder=folder)
    try:
        return read_elsewhere(source, range(len(values)))["x"]
    finally:
        source.close()


@pytest.mark.parametrize(
    ("values", "own", "kind", "text"),
    [
        ([1, 2, 3, None], "int32", "int32", "a.parquet:4:1: column 'x': a value of type int32 is missing"),
        ([1, 2, None], "int32", "", "a.parquet:3:2: column 'x': a value of type int32 is missing"),
        ([True, None], "bool_", "bool", "a.parquet:2:1: column 'x': a value of type bool is missing"),
        ([1, 2, 300], "int32", "int8", "a.parquet:3:1: column 'x': 300 does not fit int8"),
        ([1, -1], "int32", "uint64", "a.parquet:2:1: column 'x': -1 does not fit uint64"),
        ([1.0, 1e300], "float64", "float32", "a.parquet:2:1: column 'x': 1e+300 does not fit float32"),
        (["a"], "string", "float32", "a.parquet: column 'x' is string, which can't be read as float32"),
        ([1.0], "float64", "int32", "a.parquet: column 'x' is double, which can't be read as int32"),
        ([1], "int32", "str", "a.parquet: column 'x' is int32, which can't be read as str"),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, values: list[Any], own: str, kind: str, text: str) -> None:
    with pytest.raises(SourceError) as caught:
        _one(tmp_path, values, getattr(pa, own)(), kind)
    # With `columns`, the column's number is still its number in the file.
    assert str(caught.value).startswith(text.replace(":1: ", ":2: "))
    assert (caught.value.key, caught.value.name) == ("columns", "x")


@pytest.mark.parametrize(
    ("values", "own", "kind", "expected"),
    [
        ([1, None], "int8", "float32", [1.0, np.nan]),
        ([0, 2**64 - 1], "uint64", "uint64", [0, 2**64 - 1]),
        ([2**63 - 1, 0], "int64", "int64", [2**63 - 1, 0]),
        ([255, 0], "int64", "uint8", [255, 0]),
        ([None, None, None], "null", "float32", [np.nan] * 3),
        ([None, None, None], "null", "str", [""] * 3),
        ([float("inf"), 1.0], "float64", "float32", [float("inf"), 1.0]),
    ],
)
def test_values_that_fit(tmp_path: Path, values: list[Any], own: str, kind: str, expected: list[Any]) -> None:
    found = _one(tmp_path, values, getattr(pa, own)(), kind)
    assert found.dtype.kind == np.dtype(kind).kind
    assert kind == "str" or found.dtype == np.dtype(kind)
    assert np.array_equal(found, np.array(expected, kind), equal_nan=kind.startswith("float"))


def test_dates_beside_unreadable_columns_are_read_by_name(tmp_path: Path) -> None:
    day = datetime.date(2024, 2, 29)
    table = {
        "day": pa.array([day, None]),
        "tags": MAPS,
        "n": pa.array([1, 2]),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    columns = {"day": "own", "n": "int8"}
    source = open_source("parquet", {"path": "a.parquet", "columns": columns}, folder=tmp_path)
    shard = read_elsewhere(source, range(2))
    assert {name: column.dtype.str for name, column in shard.items()} == {"day": "<M8[D]", "n": "|i1"}
    assert shard["day"].tolist() == [day, None]
    source.close()
    with pytest.raises(SourceError, match=r"column 'tags' is map<.*>, which can't be read: name"):
        open_source("parquet", {"path": "a.parquet", "columns": {"tags": "own"}}, folder=tmp_path)


LISTS = {
    "fixed": (pa.list_(pa.float32(), 2), [[1, 2], None, [3, None]], [[1, 2], [np.nan, np.nan], [3, np.nan]]),
    "fixed of fixed": (pa.list_(pa.list_(pa.int8(), 2), 1), [[[1, 2]], [[3, 4]]], [[[1, 2]], [[3, 4]]]),
    "of numbers": (pa.list_(pa.float32()), [[1, None], None, [], [2]], [[1, np.nan], [], [], [2]]),
    "of texts": (pa.large_list(pa.string()), [["a", None], ["b\0"]], [["a", ""], ["b\0"]]),
    "of lists": (pa.list_(pa.list_(pa.int8())), [[[1], []], [[2, 3]]], [[[1], []], [[2, 3]]]),
    "binary": (pa.binary(), [b"a\0", None, b""], [b"a\0", b"", b""]),
    "struct": (pa.struct([("x", pa.int8()), ("y", pa.list_(pa.string()))]),)
    + ([{"x": None, "y": ["a"]}, None],) * 2,
    "of structs": (pa.list_(pa.struct([("x", pa.int8())])),) + ([[{"x": 1}, None], [], None],) * 2,
}


@pytest.mark.parametrize(("own", "values", "expected"), LISTS.values(), ids=LISTS)
def test_lists_structs_and_binary_are_read(tmp_path: Path, own: Any, values: Any, expected: Any) -> None:
    """Row groups have two rows, so these are parts of several ones."""
    found = _one(tmp_path, values * 3, own, "")
    assert (found.dtype.kind == "O") == (not str(own).startswith("fixed"))
    assert _plain(found) == _plain(expected * 3)
    assert len(_one(tmp_path, [], own, "own")) == 0


def _plain(found: Any) -> Any:
    """Return nested lists in which NaNs are equal."""
    if isinstance(found, np.ndarray | list):
        return [_plain(each) for each in found]
    return "nan" if found != found else found


def test_a_null_in_a_list_of_integers_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"a\.parquet:4:2: column 'x': a value of type int8 is missing"):
        _one(tmp_path, [[1], [], [2], [3, None], [4]], pa.list_(pa.int8()), "")


def test_string_views_are_text(tmp_path: Path) -> None:
    for kind in ("str", ""):
        assert _one(tmp_path, ["a", None], pa.string_view(), kind).tolist() == ["a", ""]


def test_a_column_that_only_a_later_file_has_is_reported(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [2], "y": [3]}), tmp_path / "b.parquet")
    with pytest.raises(SourceError, match=r"^b\.parquet has a column 'y', and a\.parquet has none$"):
        open_source("parquet", {"path": "*.parquet"}, folder=tmp_path)
    source = open_source("parquet", {"path": "*.parquet", "columns": {"x": "own"}}, folder=tmp_path)
    assert read_elsewhere(source, range(2))["x"].tolist() == [1, 2]
    source.close()


def test_a_file_that_is_written_to_while_it_is_open_is_noticed(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 1)):
        table = pa.table({"x": np.arange(first, first + 20)})
        pq.write_table(table, tmp_path / f"{name}.parquet", 5, compression="none", use_dictionary=False)
    source = open_source("parquet", {"path": "a.parquet"}, folder=tmp_path)
    assert source.read(range(2))["x"].tolist() == [0, 1]
    (tmp_path / "a.parquet").write_bytes((tmp_path / "b.parquet").read_bytes())
    os.utime(tmp_path / "a.parquet", ns=(1, 1))  # where the clock of the files is coarse
    with pytest.raises(SourceError, match=r"^a\.parquet: the file has changed since the run began"):
        source.read(range(8, 12))
    source.close()


def test_damage_behind_the_footer_names_the_file(tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", 5)
    good = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(good[:4] + b"\xff" * 40 + good[44:])
    source = open_source("parquet", {"path": "a.parquet"}, folder=tmp_path)
    with pytest.raises(SourceError, match=r"^a\.parquet: row group 0 can't be read: ."):
        source.read(range(1))
    source.close()


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    ends = pa.py_buffer(np.array([0, 1, 2, 4], np.int32))
    bad = pa.StringArray.from_buffers(3, ends, pa.py_buffer(b"ab\xff!"))
    pq.write_table(pa.table({"n": [0, 1, 2], "x": bad}), tmp_path / "a.parquet")
    source = open_source("parquet", {"path": "a.parquet"}, folder=tmp_path)
    with pytest.raises(SourceError, match=r"^a\.parquet:3:2: column 'x': b'\\xff!' is not UTF-8 text"):
        source.read(range(3))
    source.close()


def test_files_and_columns_that_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", 3)
    with pytest.raises(SourceError, match="has no column 'ii'") as caught:
        open_source("parquet", {"path": "a.parquet", "columns": {"ii": "int8"}}, folder=tmp_path)
    assert caught.value.nearest == "i"
    pq.write_table(pa.table({"i": pa.array([1])}), tmp_path / "b.parquet")
    with pytest.raises(SourceError, match=r"b\.parquet has no column 'f'"):
        open_source("parquet", {"path": "*.parquet"}, folder=tmp_path)
    pq.write_table(pa.table({"i": pa.array([1.5])}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"i": pa.array([1])}), tmp_path / "c.parquet")
    with pytest.raises(SourceError, match=r"'i' is double in b\.parquet and int64 in c\.parquet"):
        open_source("parquet", {"path": ["b.parquet", "c.parquet"]}, folder=tmp_path)
    pq.write_table(pa.table({"m": MAPS}), tmp_path / "d.parquet")
    with pytest.raises(SourceError, match=r"'m' is map.*name the columns to be read"):
        open_source("parquet", {"path": "d.parquet"}, folder=tmp_path)
    (tmp_path / "e.parquet").write_bytes(b"nothing")
    with pytest.raises(SourceError, match=r"e\.parquet: not a readable parquet file"):
        open_source("parquet", {"path": "e.parquet"}, folder=tmp_path)


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "a.parquet", 3)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SourceError, match=r"pip install 'pipedist\[parquet\]'"):
        open_source("parquet", {"path": "a.parquet"}, folder=tmp_path)


@pytest.mark.parametrize(("limit_bytes", "kept"), [(1 << 20, 3), (100, 0)])
def test_a_row_group_that_was_read_to_its_end_is_kept_if_all_of_them_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int, kept: int
) -> None:
    monkeypatch.setattr(table_files, "PARTS_BYTES_MAX", limit_bytes)
    _write(tmp_path / "a.parquet", 21)
    source = open_source("parquet", {"path": "a.parquet", "columns": {"i": "int64"}}, folder=tmp_path)
    reader = arrow_files.ParquetReader(source.config)
    reader.read(range(3))
    assert len(reader._tables) == 1  # more of it is to come
    reader.read(range(3, 21))
    assert len(reader._tables) == kept
    reader.close()
    source.close()
