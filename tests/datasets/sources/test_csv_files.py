from __future__ import annotations

import csv
import gzip
import io
import math
import os
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from pipedist.datasets.element import described
from pipedist.datasets.sources import Source, SourceError, csv_files, open_source, row_files
from pipedist.datasets.sources.csv_files import CsvReader
from tests.datasets.sources.reading import assert_same, read_elsewhere

FILES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

texts = st.text(
    st.one_of(st.sampled_from("\",;'\n\r aN5é"), st.characters(codec="utf-8", exclude_characters="\0")),
    max_size=8,
)


def _open(
    folder: Path, columns: dict[str, str], text: str | bytes, name: str = "t.csv", **dialect: str
) -> Source:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_source("csv", {"path": [name], "columns": columns, **dialect}, folder=folder)


def _read(folder: Path, columns: dict[str, str], text: str | bytes, **dialect: str) -> dict[str, Any]:
    source = _open(folder, columns, text, **dialect)
    try:
        return read_elsewhere(source, range(source.length or 0))
    finally:
        source.close()


def _missing_is_empty(text: str) -> str:
    return "" if text in ("NA", "NaN") else text


@FILES
@given(
    rows=st.lists(st.tuples(texts, texts, texts), max_size=12),
    ending=st.sampled_from(["\n", "\r\n"]),
    block_bytes=st.sampled_from([1, 2, 7, 64, 1 << 20]),
    bom=st.booleans(),
    last=st.booleans(),
    dialect=st.sampled_from([(",", '"'), (";", "'"), ("\t", '"')]),
    data=st.data(),
)
def test_quoted_text_is_read_as_the_csv_module_reads_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[tuple[str, str, str]],
    ending: str,
    block_bytes: int,
    bom: bool,
    last: bool,
    dialect: tuple[str, str],
    data: st.DataObject,
) -> None:
    monkeypatch.setattr(row_files, "BLOCK_BYTES", block_bytes)
    out = io.StringIO(newline="")
    # Python 3.11 writes a carriage return without quotes where the rows end with a line feed.
    quoting = csv.QUOTE_ALL if any("\r" in cell for row in rows for cell in row) else csv.QUOTE_MINIMAL
    delimiter, quote = dialect
    csv.writer(out, lineterminator=ending, quoting=quoting, delimiter=delimiter, quotechar=quote).writerows(
        [("a", "b,1", "c"), *rows]
    )
    text = out.getvalue()
    if last:
        text = text.removesuffix(ending)
    written = ("\ufeff" if bom else "") + text
    columns = {"c": "str", "a": "str", "b,1": "str"}
    source = _open(tmp_path, columns, written, delimiter=delimiter, quote=quote)
    expected = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quotechar=quote))[1:]
    assert source.length == len(expected)
    shard = read_elsewhere(source, range(len(expected)))
    for name, at in (("a", 0), ("b,1", 1), ("c", 2)):
        assert shard[name].dtype.kind == "U"
        assert shard[name].tolist() == [_missing_is_empty(row[at]) for row in expected]
    if expected:
        ids = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=9))
        scattered = read_elsewhere(source, np.array(ids, np.int64))
        assert scattered["a"].tolist() == [_missing_is_empty(expected[i][0]) for i in ids]
    source.close()


@FILES
@given(st.lists(st.lists(st.text('a1"', max_size=4), min_size=2, max_size=2), max_size=8), st.integers(1, 9))
@example([['5" pipe', "x"], ["y", '"a"b']], 3)
def test_quotes_in_unusual_places_are_read_as_the_csv_module_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[list[str]], block_bytes: int
) -> None:
    monkeypatch.setattr(row_files, "BLOCK_BYTES", block_bytes)
    text = "".join(",".join(row) + "\n" for row in [["a", "b"], *rows])
    expected = list(csv.reader(io.StringIO(text, newline="")))
    with_another = list(csv.reader(io.StringIO(text + "z,z\n", newline="")))
    assume(with_another == [*expected, ["z", "z"]])  # no quoted field is open at the end
    if any(len(row) != 2 for row in expected):
        with pytest.raises(SourceError, match=r"t\.csv:\d+: the row has"):
            _read(tmp_path, {"a": "str", "b": "str"}, text)
        return
    shard = _read(tmp_path, {"a": "str", "b": "str"}, text)
    assert list(zip(shard["a"].tolist(), shard["b"].tolist(), strict=True)) == [
        tuple(row) for row in expected[1:]
    ]


@FILES
@given(
    st.lists(
        st.one_of(
            st.floats(width=64),
            st.integers(-(10**20), 10**20),
            st.sampled_from(["", "NA", "NaN", " 1.5 ", "+3", ".5", "1e5", "-inf", "Infinity", "1" * 50]),
        ),
        max_size=20,
    ),
    st.sampled_from(["float32", "float64"]),
)
def test_floats_are_those_of_python(tmp_path: Path, values: list[Any], kind: str) -> None:
    cells = [repr(value) if isinstance(value, float) else str(value) for value in values]
    text = "x,y\n" + "".join(f"{cell},1\n" for cell in cells)
    with np.errstate(over="ignore"):
        expected = np.array(
            [math.nan if cell in ("", "NA", "NaN") else float(cell) for cell in cells], np.float64
        ).astype(kind)
    finite = np.array([cell in ("", "NA", "NaN") or "inf" in cell.lower() for cell in cells], bool)
    if (np.isinf(expected) & ~finite).any():
        with pytest.raises(SourceError, match=f"does not fit {kind}"):
            _read(tmp_path, {"x": kind}, text)
        return
    found = _read(tmp_path, {"x": kind}, text)["x"]
    assert found.dtype == np.dtype(kind)
    assert np.array_equal(found, expected, equal_nan=True)


@FILES
@given(st.sampled_from(["int8", "uint8", "int32", "int64", "uint64"]), st.data())
def test_integers_are_exact_or_refused(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    limits = np.iinfo(kind)
    low, high = int(limits.min), int(limits.max)
    values = data.draw(st.lists(st.integers(low - 2, high + 2), min_size=1, max_size=9))
    text = "n\n" + "".join(f"{value}\n" for value in values)
    wrong = [row for row, value in enumerate(values) if not low <= value <= high]
    if wrong:
        with pytest.raises(SourceError, match=rf"^t\.csv:{wrong[0] + 2}:1: .*does not fit {kind}"):
            _read(tmp_path, {"n": kind}, text)
    else:
        found = _read(tmp_path, {"n": kind}, text)["n"]
        assert found.dtype == np.dtype(kind)
        assert found.tolist() == values


def test_missing_values(tmp_path: Path) -> None:
    shard = _read(tmp_path, {"s": "str", "f": "float32"}, 's,f\n,\nNA,NA\nNaN,NaN\n"NA",""\nnan, NA \nx,1\n')
    assert shard["s"].tolist() == ["", "", "", "", "nan", "x"]
    assert np.isnan(shard["f"][:5]).all()
    assert shard["f"][5] == 1


@pytest.mark.parametrize(
    ("kind", "cell", "text"),
    [
        ("int32", "", "a value of type int32 is missing"),
        ("int32", "NA", "a value of type int32 is missing"),
        ("bool", "", "a value of type bool is missing"),
        ("int32", "1.0", "'1.0' is not of type int32"),
        ("int32", "1_000", "'1_000' is not of type int32"),
        ("float32", "1_000", "'1_000' is not of type float32"),
        ("float32", "abc", "'abc' is not of type float32"),
        ("float16", "70000", "70000 does not fit float16"),
        ("float64", "1e999", "1e999 does not fit float64"),
        ("bool", "maybe", "'maybe' is not of type bool"),
        ("float64", "1" * 40 + "x", "is not of type float64"),
        ("float64", "é", "'é' is not of type float64"),
    ],
)
@pytest.mark.parametrize("scattered", [False, True])
def test_a_bad_cell_is_named_by_file_row_and_column(
    tmp_path: Path, kind: str, cell: str, text: str, scattered: bool
) -> None:
    # The row of a cell is its line: a quoted line feed and a blank line are counted.
    table = f'id,note,x\n1,"two\nlines",1\n\n2,b,0\n3,c,{cell}\n4,d,1\n'
    source = _open(tmp_path, {"x": kind}, table)
    ids = np.array([3, 2, 0]) if scattered else range(4)
    with pytest.raises(SourceError) as caught:
        source.read(source.locate(ids))
    assert str(caught.value).startswith("t.csv:6:3: column 'x': ")
    assert text in str(caught.value)
    assert (caught.value.key, caught.value.name) == ("columns", "x")
    assert source.read(source.locate(range(2)))["x"].tolist() == [1, 0]
    source.close()


def test_zero_bytes_are_part_of_their_cells_whatever_stands_beside_them(tmp_path: Path) -> None:
    for beside in ("", "x" * 40):
        source = _open(tmp_path, {"n": "int32", "s": "str"}, f"n,s\n1,{beside}\n2\0,NA\0\n")
        with pytest.raises(SourceError, match=r"^t\.csv:3:1: column 'n': '2\\x00' is not of type int32"):
            source.read(source.locate(range(2)))
        source.close()
        text = "NA\0x"
        assert _read(tmp_path, {"s": "str"}, f"n,s\n1,{beside}\n2\0,{text}\n")["s"].tolist() == [beside, text]


def test_a_text_that_ends_with_a_zero_byte_is_not_cut(tmp_path: Path) -> None:
    for beside in ("", "x" * 40):
        found = _read(tmp_path, {"s": "str"}, f"n,s\n1,{beside}\n2,NA\0\n")["s"]
        assert (found.dtype, found.tolist()) == (np.dtype(object), [beside, "NA\0"])


def test_a_file_that_is_written_to_while_it_is_open_is_noticed(tmp_path: Path) -> None:
    source = _open(tmp_path, {"n": "int32"}, "n\n1\n2\n3\n")
    assert source.read(source.locate(range(2)))["n"].tolist() == [1, 2]
    (tmp_path / "t.csv").write_text("n\n4\n5\n6\n")  # the same inode
    os.utime(tmp_path / "t.csv", ns=(1, 1))  # where the clock of the files is coarse
    for ids in (range(2, 3), np.array([2, 0])):
        with pytest.raises(SourceError, match=r"^t\.csv: the file has changed since the run began"):
            source.read(source.locate(ids))
    source.close()


def test_a_carriage_return_at_the_end_is_no_row(tmp_path: Path) -> None:
    for note in ("x", '6" pipe'):
        assert _read(tmp_path, {"s": "str"}, f"s\n{note}\n\r")["s"].tolist() == [note]
    source = _open(tmp_path, {"s": "str"}, "s\nx\n\r")
    assert source.length == 1
    source.close()


def test_truth_values(tmp_path: Path) -> None:
    shard = _read(tmp_path, {"b": "bool"}, "b\ntrue\nFALSE\n1\n0\n True \n")
    assert shard["b"].dtype == np.bool_
    assert shard["b"].tolist() == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("a,b\n1,2\n3\n4,5\n", "t.csv:3: the row has 1 field, the header has 2"),
        ("a,b\n1,2\n3,4,5\n", "t.csv:3: the row has 3 fields, the header has 2"),
        ("a,b\n1\n2,3,4\n", "t.csv:2: the row has 1 field"),
        ("a,b\n1,2\n\n3\n", "t.csv:4: the row has 1 field, the header has 2"),
        ("a,b\n1,x\ry\n", "t.csv:2: a carriage return without a line feed"),
        ('a,b\n1,2\n3,"4"5\n6\n', "t.csv:4: the row has 1 field"),
    ],
)
@pytest.mark.parametrize("scattered", [False, True])
def test_rows_that_are_not_rows(tmp_path: Path, table: str, text: str, scattered: bool) -> None:
    source = _open(tmp_path, {"a": "str"}, table)
    ids = np.arange(source.length or 0)[::-1] if scattered else range(source.length or 0)
    with pytest.raises(SourceError) as caught:
        source.read(source.locate(ids))
    if not (scattered and "2,3,4" in table):  # read backwards, another row is the first bad one
        assert str(caught.value).startswith(text)
    source.close()


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("", "the file is empty"),
        ("\n\r\n", "the file is empty"),
        ('a,b\n1,2\n3,"4\n5\n', "t.csv:3: a quoted field of this row is never closed"),
        ('a,b\n1,6" pipe\n3,"4\n5,6\n', "t.csv:3: a quoted field of this row is never closed"),
        ('a,b\n1,2"\n3\r4,5\n', "t.csv:3: a carriage return without a line feed"),
        ("a,b\r1,2\r3,4\r", "t.csv:1: a carriage return without a line feed"),
        (b"\xff\xfea\0,\0b\0\n\0", "UTF-16"),
        (b"a,b\xff\n1,2\n", "the header is not UTF-8"),
    ],
)
def test_files_that_are_no_csv(tmp_path: Path, table: str | bytes, text: str) -> None:
    with pytest.raises(SourceError, match=text) as caught:
        _open(tmp_path, {"a": "str"}, table)
    assert caught.value.key == "path"


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    source = _open(tmp_path, {"a": "str", "b": "str"}, b"a,b\n\xc3\xa9,1\n2,\xff\n")
    with pytest.raises(SourceError, match=r"^t\.csv:3:2: column 'b': .*not UTF-8"):
        source.read(source.locate(range(2)))
    assert source.read(source.locate(range(1)))["a"].tolist() == ["é"]
    source.close()


@pytest.mark.parametrize(
    ("columns", "name", "nearest", "text"),
    [
        ({"dep_dely": "str"}, "dep_dely", "dep_delay", "t.csv has no column 'dep_dely'"),
        ({"x": "str"}, "x", "", "2 columns named 'x'"),
    ],
)
def test_columns_that_are_not_there(
    tmp_path: Path, columns: dict[str, str], name: str, nearest: str, text: str
) -> None:
    with pytest.raises(SourceError, match=text) as caught:
        _open(tmp_path, columns, "dep_delay,x,x\n1,2,3\n")
    assert (caught.value.key, caught.value.name, caught.value.nearest) == ("columns", name, nearest)


@pytest.mark.parametrize(("separator", "word"), [(";", "semicolons"), ("\t", "tabs")])
def test_another_separator_is_guessed(tmp_path: Path, separator: str, word: str) -> None:
    text = separator.join(["a", "b", "c"]) + "\n" + separator.join("123") + "\n"
    with pytest.raises(SourceError, match=f"separated by {word}, not by commas") as caught:
        _open(tmp_path, {"b": "int8"}, text)
    assert caught.value.expected == f"`delimiter: {separator!r}`"
    found = _read(tmp_path, {"b": "int8", "c": "str"}, text, delimiter=separator)
    assert (found["b"].tolist(), found["c"].tolist()) == ([2], ["3"])


def test_quotes_may_be_text(tmp_path: Path) -> None:
    shard = _read(tmp_path, {"a": "str", "b": "int8"}, 'a,b\n"x,1\n5" pipe",2\n', quote="none")
    assert (shard["a"].tolist(), shard["b"].tolist()) == (['"x', '5" pipe"'], [1, 2])


def test_dates_and_timestamps(tmp_path: Path) -> None:
    rows = [
        ("2024-02-29", "2024-02-29T12:30:00"),
        ("", "1969-12-31 23:59:59.000001"),
        ("0001-01-01", "2024-02-29T23:30:00-01:30"),
        ("NA", "2024-03-01"),
        (" 9999-12-31", "2024-03-01T00:00Z"),
        ("NaT", "NaT"),  # as a .csv output has it
    ]
    text = "d,t\n" + "".join(f"{d},{t}\n" for d, t in rows)
    shard = _read(tmp_path, {"d": "date", "t": "timestamp"}, text)
    assert shard["d"].dtype == "datetime64[D]"
    assert shard["t"].dtype == "datetime64[us]"
    assert shard["d"].astype(str).tolist() == ["2024-02-29", "NaT", "0001-01-01", "NaT", "9999-12-31", "NaT"]
    assert shard["t"].tolist() == [
        datetime(2024, 2, 29, 12, 30),
        datetime(1969, 12, 31, 23, 59, 59, 1),
        datetime(2024, 3, 1, 1, 0),
        datetime(2024, 3, 1),
        datetime(2024, 3, 1),
        None,
    ]
    for wrong, kind in (
        ("2024-02-30", "date"),
        ("2024", "date"),
        ("2024-01-01T25:00", "timestamp"),
        ("x", "date"),
    ):
        with pytest.raises(SourceError, match=rf"t\.csv:3:1: column 'd': .* is not of type {kind}"):
            _read(tmp_path, {"d": kind}, f"d\n2024-01-01\n{wrong}\n")


def test_types_are_inferred_from_the_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "n,x,zip,flag,day,at,name,none\n"
        "1,2.5,01067,true,2024-01-01,2024-01-01 10:00,a b,\n"
        '-3,NA,80331,False,2024-01-02,2024-01-01T11:00Z,"c,d",NA\n'
    )
    source = _open(tmp_path, {}, text)
    assert dict(source.config["columns"]) == {
        "n": "int64",
        "x": "float64",
        "zip": "str",
        "flag": "bool",
        "day": "date",
        "at": "timestamp",
        "name": "str",
        "none": "str",
    }
    assert source.note == "the types of columns were inferred from the first 2 rows of t.csv"
    assert described(source.element_spec).startswith("{at: datetime64[us], day: datetime64[D], flag: bool")
    assert read_elsewhere(source, range(2))["name"].tolist() == ["a b", "c,d"]
    long = f"a,b,c,d\n{2**53 + 1},{2**53},{2**64 - 1},{2**53 + 1}\n,,1,1\n"
    found = dict(_open(tmp_path, {}, long).config["columns"])
    assert found == {"a": "str", "b": "float64", "c": "str", "d": "int64"}, "no number is rounded"
    found = dict(_open(tmp_path, {}, "a,b\nNaT,NaT\n,2024-01-01 10:00\n").config["columns"])
    assert found == {"a": "str", "b": "timestamp"}
    monkeypatch.setattr(csv_files, "INFERRED_ROWS", 1)
    source = _open(tmp_path, {}, "n;m\n1;1\n1.5;2\n", delimiter=";")
    with pytest.raises(SourceError, match=r"t\.csv:3:1: column 'n': '1\.5' is not of type int64"):
        read_elsewhere(source, range(2))
    with pytest.raises(SourceError, match="2 columns named 'x'"):
        _open(tmp_path, {}, "x,x\n1,2\n")
    with pytest.raises(SourceError, match=r"t\.csv:2: the row has 1 field, the header has 2"):
        _open(tmp_path, {}, "x,y\n1\n")
    assert dict(_open(tmp_path, {}, "x,y\n").config["columns"]) == {"x": "str", "y": "str"}


def test_json_lines_are_recognized(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="its first line is JSON, not a header") as caught:
        _open(tmp_path, {"b": "int8"}, '{"a": 1, "b": 2}\n')
    assert "jsonl" in caught.value.expected


def test_each_file_has_a_header_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,a\n2,bb\n")
    (tmp_path / "b.csv").write_text("y,z,x\nccc,0,3\n")
    (tmp_path / "c.csv").write_text("x,y\n")
    (tmp_path / "d.csv").write_text("y,x\n,4")
    source = open_source("csv", {"path": "*.csv", "columns": {"x": "int8", "y": "str"}}, folder=tmp_path)
    assert source.length == 4
    shard = read_elsewhere(source, range(4))
    assert shard["x"].tolist() == [1, 2, 3, 4]
    assert shard["y"].tolist() == ["a", "bb", "ccc", ""]
    shard = read_elsewhere(source, np.array([3, 0, 2, 1, 7]))
    assert shard["x"].tolist() == [4, 1, 3, 2, 4]
    assert shard["y"].tolist() == ["", "a", "ccc", "bb", ""]
    empty = read_elsewhere(source, range(0))
    assert {name: column.dtype for name, column in empty.items()} == {"x": np.int8, "y": np.dtype("<U1")}
    source.close()
    (tmp_path / "e.csv").write_text("x\n1\n")
    with pytest.raises(SourceError, match=r"e\.csv has no column 'y'"):
        open_source("csv", {"path": "*.csv", "columns": {"y": "str"}}, folder=tmp_path)


def test_packed_files_are_unpacked(tmp_path: Path) -> None:
    table = "n,s\n" + "".join(f"{i},é{i}\n" for i in range(1000))
    (tmp_path / "a.csv").write_text(table)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(table.encode()))
    with zipfile.ZipFile(tmp_path / "c.csv.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("t.csv", table)
        archive.writestr("__MACOSX/._t.csv", "x")
    source = open_source("csv", {"path": "*.csv*", "columns": {"n": "int64", "s": "str"}}, folder=tmp_path)
    assert source.length == 3000
    shard = read_elsewhere(source, range(3000))
    assert shard["n"].tolist() == list(range(1000)) * 3
    assert shard["s"][2999] == "é999"
    ids = np.random.default_rng(1).permutation(3000)[:200]
    assert_same(read_elsewhere(source, ids)["n"], np.ascontiguousarray(shard["n"][ids]))
    source.close()


def test_a_field_beyond_the_limit_of_the_csv_module_is_read(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    long = "x" * 200_000
    shard = _read(tmp_path, {"a": "str"}, f'a,b\n{long},5" pipe\n')
    assert shard["a"][0] == long
    assert csv.field_size_limit() == before


def test_the_limit_of_the_csv_module_is_never_changed() -> None:
    before = csv.field_size_limit()
    rows = row_files.lenient_rows(iter([b"a,b\n" + b"x" * 200_000 + b",2\n"]), 0, CsvReader.rules)
    assert next(rows) == (0, ["a", "b"])
    assert csv.field_size_limit() == before, "while rows are read, which user code may do in another thread"
    assert len(next(rows)[1][0]) == 200_000


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "ROW_BYTES_MAX", 1000)
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 64)
    with pytest.raises(SourceError, match=r"t\.csv: a line is longer than 1000 bytes"):
        _open(tmp_path, {"a": "str"}, "a\n" + "x" * 5000)


@pytest.mark.slow
def test_the_flights_of_2013() -> None:
    folder = Path(__file__).parents[3] / "examples" / "flights" / "data"
    if not folder.exists():
        pytest.skip("the flights are not here: make test-slow")
    columns = {"carrier": "str", "dep_delay": "float32", "arr_delay": "float32"}
    source = open_source("csv", {"path": "flights.csv.zip", "columns": columns}, folder=folder)
    assert source.length == 336_776
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive, archive.open("flights.csv") as stream:
        rows = list(csv.DictReader(io.TextIOWrapper(stream, newline="")))
    shard = source.read(source.locate(range(source.length)))
    assert shard["carrier"].tolist() == [row["carrier"] for row in rows]
    for name in ("dep_delay", "arr_delay"):
        expected = [math.nan if row[name] in ("", "NA") else float(row[name]) for row in rows]
        assert np.array_equal(shard[name], np.array(expected, np.float32), equal_nan=True)
    source.close()
