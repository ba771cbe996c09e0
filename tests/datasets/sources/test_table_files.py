"""Arrow files, and columns in the paths of parquet and Arrow files."""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from pipedist.datasets.element import described
from pipedist.datasets.sources import Source, SourceError, open_source
from pipedist.testing import check_source
from tests.datasets.sources.reading import assert_same, read_elsewhere
from tests.datasets.sources.test_reader_classes import ByIds

TABLE = pa.table(
    {
        "n": pa.array(range(100), pa.int32()),
        "x": pa.array([None if n % 7 == 0 else n / 3 for n in range(100)]),
        "t": [f"text {n}" for n in range(100)],
        "d": pa.array(["a", "b"] * 50).dictionary_encode(),
        "l": [[n] * (n % 3) for n in range(100)],
    }
)


def write_arrow(path: Path, table: pa.Table = TABLE, rows: int = 30, **options: Any) -> None:
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in table.to_batches(rows):
            writer.write_batch(batch)


def opened(folder: Path, kind: str = "arrow", path: str = "*.arrow", **config: Any) -> Source:
    return open_source(kind, {"path": path, **config}, folder=folder)


def test_arrow_files_have_the_columns_of_parquet(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow")
    feather.write_feather(TABLE, tmp_path / "b.arrow", compression="zstd")
    pq.write_table(pa.concat_tables([TABLE, TABLE]), tmp_path / "both.parquet")
    source, same = opened(tmp_path), opened(tmp_path, "parquet", "both.parquet")
    assert source.length == 200
    for ids in (range(200), range(25, 130), np.array([199, 3, 3, 77]), range(0)):
        assert_same(read_elsewhere(source, ids), same.read(ids))
    assert described(source.element_spec) == "{d: str, l: object, n: int32, t: str, x: float64}"
    few = opened(tmp_path, columns={"x": "float32"})
    assert read_elsewhere(few, range(1, 3))["x"].tolist() == pytest.approx([1 / 3, 2 / 3])

    def make() -> ByIds:
        return ByIds(opened(tmp_path))

    check_source(make(), make=make)


def test_dates_are_read_as_dates_or_timestamps(tmp_path: Path) -> None:
    at = [datetime(2024, 2, 29), datetime(2024, 3, 1, 12), None]
    write_arrow(tmp_path / "a.arrow", pa.table({"at": pa.array(at, pa.timestamp("ms"))}))
    assert read_elsewhere(opened(tmp_path, columns={"at": "timestamp"}), range(3))["at"].tolist() == at
    days = opened(tmp_path, columns={"at": "date"})
    assert read_elsewhere(days, np.array([0, 2]))["at"].tolist() == [date(2024, 2, 29), None]
    with pytest.raises(SourceError, match=r"a\.arrow:2:1: column 'at': 2024-03-01T12:00:00.000 does not fit"):
        days.read(range(3))


def test_files_of_other_forms_are_named(tmp_path: Path) -> None:
    with pa.ipc.new_stream(tmp_path / "s.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE)
    with pytest.raises(SourceError, match=r"s\.arrow: it is in Arrow's streaming format, which has no index"):
        opened(tmp_path)
    (tmp_path / "s.arrow").write_bytes(b"n,t\n1,2\n")
    with pytest.raises(SourceError, match=r"s\.arrow: not a readable Arrow file: it seems to be csv text"):
        opened(tmp_path)
    write_arrow(tmp_path / "s.arrow", compression="lz4")
    data = bytearray((tmp_path / "s.arrow").read_bytes())
    (tmp_path / "s.arrow").write_bytes(data[:-40])
    with pytest.raises(SourceError, match=r"s\.arrow: not a readable Arrow file"):
        opened(tmp_path)
    at = data.rindex(b"\x04\x22\x4d\x18")  # a frame of LZ4
    data[at : at + 8] = bytes(8)
    (tmp_path / "s.arrow").write_bytes(data)
    source = opened(tmp_path)
    with pytest.raises(SourceError, match=r"s\.arrow: record batch \d can't be read: "):
        source.read(range(100))


@pytest.fixture
def hive(tmp_path: Path) -> Path:
    for year, month in ((2023, "1"), (2023, "2"), (2024, "__HIVE_DEFAULT_PARTITION__")):
        folder = tmp_path / "flights" / f"year={year}" / f"month={month}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"delay": [year + n for n in range(4)]}), folder / "part-0.parquet")
    return tmp_path


def test_folders_with_keys_are_columns(hive: Path) -> None:
    source = opened(hive, "parquet", "flights/**/*.parquet")
    shard = read_elsewhere(source, np.array([0, 5, 11]))
    import pyarrow.dataset as pads  # takes long, and few workers of the suite run this test

    own = pads.dataset(hive / "flights", partitioning="hive").to_table().sort_by("delay")
    assert shard["delay"].tolist() == [2023, 2024, 2027]
    assert shard["year"].tolist() == [2023, 2023, 2024]
    assert shard["month"].tolist() == ["1", "2", ""]
    order = np.argsort(source.read(range(12))["delay"], kind="stable")
    assert sorted(source.read(order)["year"].tolist()) == sorted(own["year"].to_pylist())
    assert described(source.element_spec) == "{delay: int64, month: str, year: int64}"
    typed = opened(
        hive, "parquet", "flights/**/*.parquet", columns={"month": "float32", "year": "str"}
    )  # no column of the files themselves
    found = read_elsewhere(typed, range(3, 9))
    np.testing.assert_equal(found["month"], np.array([1, 2, 2, 2, 2, np.nan], np.float32))
    assert found["year"].tolist() == ["2023"] * 5 + ["2024"]


def test_texts_of_folders_are_no_missing_values(tmp_path: Path) -> None:
    for country in ("NA", "NaN", "NZ"):
        (tmp_path / f"country={country}").mkdir()
        pq.write_table(pa.table({"n": [1]}), tmp_path / f"country={country}" / "part-0.parquet")
    source = opened(tmp_path, "parquet", "**/*.parquet")
    assert sorted(source.read(range(3))["country"].tolist()) == ["NA", "NZ", "NaN"]


def test_folders_that_do_not_fit_are_errors(hive: Path) -> None:
    with pytest.raises(
        SourceError, match=r"month=__HIVE.*: column 'month' of its path: a value of type int8"
    ):
        opened(hive, "parquet", "flights/**/*.parquet", columns={"month": "int8"})
    (hive / "flights" / "part-0.parquet").write_bytes(
        (hive / "flights/year=2023/month=1/part-0.parquet").read_bytes()
    )
    with pytest.raises(
        SourceError, match=r"part-0\.parquet is in folders of no keys, .* folders of `year=`, `month=`"
    ):
        opened(hive, "parquet", "flights/**/*.parquet")


def test_only_the_wanted_columns_are_read(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    place = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(2)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[place.data_page_offset : place.data_page_offset + place.total_compressed_size] = bytes(
        place.total_compressed_size
    )
    (tmp_path / "a.parquet").write_bytes(data)
    whole = opened(tmp_path, "parquet", "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet: row group 0 can't be read"):
        whole.read(range(2))
    assert opened(tmp_path, "parquet", "a.parquet", columns={"n": "own"}).read(range(2))["n"].tolist() == [
        0,
        1,
    ]
