"""The sources `text`, `jsonl` and `files`."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipedist.datasets.sources import SourceError, open_source, row_files
from tests.datasets.sources.reading import read_elsewhere

FILES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
lines = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0\ufeff"), max_size=8), max_size=8
)


@FILES
@given(st.lists(lines, min_size=1, max_size=3), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.data())
def test_text_is_one_line_an_element(
    tmp_path: Path, files: list[list[str]], ending: str, last: bool, data: st.DataObject
) -> None:
    folder = tmp_path / str(len(os.listdir(tmp_path)))
    folder.mkdir()
    expected = []
    for number, file in enumerate(files):
        text = "".join(line + ending for line in file)
        if last and file and file[-1]:
            text = text.removesuffix(ending)
        (folder / f"{number}.txt").write_bytes(text.encode())
        expected += file
    source = open_source("text", {"path": ["*.txt"]}, folder=folder)
    assert source.length == len(expected)
    assert read_elsewhere(source, range(len(expected))) == expected
    for start in range(len(expected)):
        assert read_elsewhere(source, range(start, len(expected))) == expected[start:]
    if expected:
        ids = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=9))
        assert read_elsewhere(source, np.array(ids, np.int64)) == [expected[i] for i in ids]
    source.close()


def test_text_keeps_blank_lines_and_odd_separators(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\n\n\x0c\u2028two\r\n \nlast".encode())
    source = open_source("text", {"path": "a.txt"}, folder=tmp_path)
    assert read_elsewhere(source, range(5)) == ["one", "", "\x0c\u2028two", " ", "last"]
    assert read_elsewhere(source, range(0)) == []
    source.close()


def test_a_carriage_return_at_the_end_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"x": 1}\r\n\r')
    source = open_source("jsonl", {"path": "a.jsonl"}, folder=tmp_path)
    assert source.length == 1
    assert read_elsewhere(source, range(1)) == [{"x": 1}]
    source.close()


def test_a_number_beyond_float64_is_not_infinity(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": Infinity}\n{"x": 1.5}\n{"x": -1e400}\n')
    for columns in ({}, {"columns": {"x": "float64"}}):
        source = open_source("jsonl", {"path": "a.jsonl", **columns}, folder=tmp_path)
        source.read(source.locate(range(2)))
        with pytest.raises(SourceError, match=r"^a\.jsonl:3: the number -1e400 does not fit float64"):
            source.read(source.locate(range(3)))
        source.close()


def test_a_column_that_no_object_has_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("")
    (tmp_path / "1.jsonl").write_text('{"user": {"id": "a"}, "prize": "id"}\n\n{"n": 1}')

    def opened(name: str, path: str = "*.jsonl") -> None:
        open_source("jsonl", {"path": path, "columns": {name: "str"}}, folder=tmp_path).close()

    for name in ("price", "id"):  # mistyped; of an object within
        with pytest.raises(SourceError) as caught:
            opened(name)
        assert str(caught.value) == f"no object of 0.jsonl and 1 more has the key {name!r}"
        assert (caught.value.key, caught.value.name) == ("columns", name)
        assert caught.value.nearest == ("prize" if name == "price" else "")
    opened("n")  # one object has it
    opened("n", "0.jsonl")  # there is none that lacks it


@pytest.mark.parametrize("key", ['"na\\u00efve\\/\\uD83d\\ude00\\""', '"na\u00efve/\U0001f600\\u0022"'])
def test_a_column_is_found_however_its_key_is_written(tmp_path: Path, key: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{{key}: "q"}}\n', encoding="utf-8")
    name = json.loads(key)
    source = open_source("jsonl", {"path": "a.jsonl", "columns": {name: "str"}}, folder=tmp_path)
    assert read_elsewhere(source, range(1))[name].tolist() == ["q"]
    source.close()


def test_an_empty_text_file_has_no_elements(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    source = open_source("text", {"path": "a.txt"}, folder=tmp_path)
    assert source.length == 0
    source.close()


def test_the_index_of_rows_takes_little_more_memory_than_its_offsets() -> None:
    block = b"a line\n" * 4096
    tracemalloc.start()
    try:
        starts = row_files.row_starts(lambda: iter([block] * 200), 3, row_files.RowRules(False, True))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(starts, np.arange(4096 * 200 + 1) * 7 + 3)
    assert peak_bytes < 1.5 * starts.nbytes


@pytest.mark.parametrize("ids", [range(3), np.array([2, 0])])
def test_text_that_is_not_utf8_is_named(tmp_path: Path, ids: Any) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\xff\n")
    source = open_source("text", {"path": "a.txt"}, folder=tmp_path)
    with pytest.raises(SourceError, match=r"^a\.txt:3: the line is not UTF-8"):
        source.read(source.locate(ids))
    source.close()


@FILES
@given(
    st.lists(
        st.dictionaries(st.text(max_size=3), st.one_of(st.integers(), st.text(), st.none())), max_size=8
    ),
    st.sampled_from([1, 5, 1 << 20]),
    st.data(),
)
def test_objects_are_those_of_the_json_module(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    objects: list[dict[str, Any]],
    block_bytes: int,
    data: st.DataObject,
) -> None:
    monkeypatch.setattr(row_files, "BLOCK_BYTES", block_bytes)
    blank = data.draw(st.sampled_from(["", "\n", "\r\n"]))
    text = "".join(json.dumps(each) + "\n" + blank for each in objects)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    ids = data.draw(st.lists(st.integers(0, len(objects) - 1), max_size=9)) if objects else []
    source = open_source("jsonl", {"path": "a.jsonl.gz"}, folder=tmp_path)
    assert source.length == len(objects)
    assert read_elsewhere(source, range(len(objects))) == objects
    if ids:
        assert read_elsewhere(source, np.array(ids, np.int64)) == [objects[i] for i in ids]
    source.close()


def test_objects_with_columns_are_like_csv(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"f": 1.5, "i": 3, "s": "x", "b": true}\n{"f": null, "i": -4, "s": null, "b": false}\n'
        '{"f": "NA", "i": 5, "s": "NA", "b": true, "more": []}\n{"f": NaN, "i": 6, "b": false}\n'
        '{"f": 7, "i": 9007199254740993, "s": "é", "b": true}\n'
    )
    columns = {"f": "float32", "i": "int64", "s": "str", "b": "bool"}
    source = open_source("jsonl", {"path": "a.jsonl", "columns": columns}, folder=tmp_path)
    shard = read_elsewhere(source, range(5))
    assert np.array_equal(shard["f"], np.array([1.5, np.nan, np.nan, np.nan, 7], np.float32), equal_nan=True)
    assert shard["i"].tolist() == [3, -4, 5, 6, 9007199254740993]
    assert shard["s"].tolist() == ["x", "", "", "", "é"]
    assert shard["b"].tolist() == [True, False, True, False, True]
    assert read_elsewhere(source, range(0))["f"].dtype == np.float32
    source.close()


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        ('{"x": 1.5}', "int32", "1.5 is not of type int32"),
        ('{"x": true}', "int32", "True is not of type int32"),
        ('{"x": null}', "int32", "a value of type int32 is missing"),
        ("{}", "int32", "a value of type int32 is missing"),
        ('{"x": 300}', "int8", "300 does not fit int8"),
        ('{"x": [1]}', "float32", "[1] is not of type float32"),
        ('{"x": 1}', "str", "1 is not of type str"),
    ],
)
@pytest.mark.parametrize("ids", [range(3), np.array([2, 1])])
def test_a_bad_value_is_named_by_file_line_and_column(
    tmp_path: Path, line: str, kind: str, text: str, ids: Any
) -> None:
    good = '{"x": "1"}'
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    source = open_source("jsonl", {"path": "a.jsonl", "columns": {"x": kind}}, folder=tmp_path)
    with pytest.raises(SourceError) as caught:
        source.read(source.locate(ids))
    assert str(caught.value) == f"a.jsonl:3: column 'x': {text}" or text in str(caught.value)
    assert str(caught.value).startswith("a.jsonl:3: column 'x': ")
    assert (caught.value.key, caught.value.name) == ("columns", "x")
    source.close()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("[1]", "a.jsonl:2: a list, not an object"),
        ('{"a": }', "a.jsonl:2:7: not valid JSON"),
        ('{"a": 1}, {"a": 2}', "a.jsonl:2:9: not valid JSON"),
        ("[" * 100_000, "a.jsonl:2: not valid JSON"),
    ],
)
def test_lines_that_are_no_objects(tmp_path: Path, line: str, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"{{}}\n{line}\n")
    source = open_source("jsonl", {"path": "a.jsonl"}, folder=tmp_path)
    with pytest.raises(SourceError) as caught:
        source.read(source.locate(range(2)))
    assert str(caught.value).startswith(text)
    source.close()


def test_files_are_whole_elements(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    contents = {"d/a.bin": b"\x00\x01", "d/e/b.bin": b"", "d/e/c.bin": b"\xff" * 10}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    source = open_source("files", {"path": "**/*.bin"}, folder=tmp_path)
    assert (source.length, source.by_id) == (3, False)
    shard = read_elsewhere(source, range(3))
    assert (shard["path"].dtype.kind, shard["bytes"].dtype) == ("U", object)
    assert shard["path"].tolist() == list(contents)
    assert shard["bytes"].tolist() == list(contents.values())
    shard = read_elsewhere(source, np.array([2, 3]))
    assert shard["path"].tolist() == ["d/e/c.bin", "d/a.bin"]
    assert shard["bytes"].tolist() == [b"\xff" * 10, b"\x00\x01"]
    assert [len(column) for column in read_elsewhere(source, range(0)).values()] == [0, 0]
    (tmp_path / "d/a.bin").write_bytes(b"longer than before")
    with pytest.raises(SourceError, match=r"d/a\.bin: the file has changed"):
        source.read(source.locate(range(1)))
    source.close()
