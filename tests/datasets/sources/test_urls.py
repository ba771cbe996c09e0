"""Files behind URLs, through fsspec: members of an archive, which every process of this host can read."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import pipedist
from pipedist.datasets.sources import SourceError, open_reader, open_source, paths, remote
from pipedist.datasets.sources.paths import hindrance, is_visible

fsspec = pytest.importorskip("fsspec", reason="URLs need fsspec: pip install 'pipedist[fsspec]'")

ROWS = [f"{k},{k * k}" for k in range(40)]


def npy(array: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("part-0.csv", "\n".join(["n,square", *ROWS[:17]]) + "\n")
        file.writestr("part-1.csv", "\n".join(["n,square", *ROWS[17:]]) + "\n")
        file.writestr("deep/x.npy", npy(np.arange(40)))
        file.writestr("words.txt", "\n".join(f"word {k}" for k in range(40)))
        file.writestr("rows.jsonl", "\n".join(f'{{"n": {k}}}' for k in range(40)))
    return path


def totals(source: dict[str, Any], function: Any, **cluster: Any) -> Any:
    spec = {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {**source, "batch": 4},
        "stages": {"n": {"run": function}, "total": {"reduce": "sum", "of": "n", "axis": 0}},
    }
    return pipedist.run(spec, workers=2)["total"]


@pytest.mark.parametrize("road", ["workers", "scheduler"])
def test_workers_read_urls_and_get_the_same(
    archive: Path, road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if road == "scheduler":
        monkeypatch.setattr(paths, "_PRIVATE", ("zip",))
    tail = f"::file://{archive}"
    columns = {"n": "int64", "square": "int64"}
    csv = {"csv": {"path": f"zip://part-*.csv{tail}", "columns": columns}}
    assert totals(csv, lambda shard: shard["square"]) == sum(k * k for k in range(40))
    assert totals({"npy": {"path": f"zip://deep/x.npy{tail}"}}, lambda shard: shard) == sum(range(40))
    text = totals({"text": {"path": f"zip://words.txt{tail}"}}, lambda s: np.array([int(w[5:]) for w in s]))
    assert text == sum(range(40))
    jsonl = totals({"jsonl": {"path": f"zip://rows.jsonl{tail}"}}, lambda s: np.array([r["n"] for r in s]))
    assert jsonl == sum(range(40))


def test_rows_of_text_are_read_by_ranges(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker copies nothing: it asks for the bytes of its rows."""
    config = {"path": f"zip://part-*.csv::file://{archive}", "columns": {"square": "int64"}}
    source = open_source("csv", config, folder=archive.parent)
    ranges: list[tuple[int, int]] = []
    original = remote.read_range

    def read_range(url: str, start: int, stop: int) -> bytes:
        ranges.append((start, stop))
        return original(url, start, stop)

    def refused(url: str) -> None:
        raise AssertionError(f"{url} was copied")

    monkeypatch.setattr(remote, "read_range", read_range)
    monkeypatch.setattr(remote, "copy", refused)
    reader = open_reader(source.config)
    shard = reader.read(source.locate(range(10, 20)))
    assert shard["square"].tolist() == [k * k for k in range(10, 20)]
    assert len(ranges) == 2, "one for each file"
    assert sum(stop - start for start, stop in ranges) < 100
    assert is_visible(source.config)


def test_parquet_behind_a_url(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow: pip install 'pipedist[parquet]'")
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(arrow.table({"n": list(range(40))}), buffer, row_group_size=7)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as file:
        file.writestr("t.parquet", buffer.getvalue())
    source = {"parquet": {"path": f"zip://t.parquet::file://{tmp_path}/data.zip", "columns": {"n": "int64"}}}
    assert totals(source, lambda shard: shard["n"]) == sum(range(40))


def test_memory_is_this_process_own(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/pipedist-test/x.npy", npy(np.arange(40)))
    try:
        config = {"path": "memory://pipedist-test/x.npy"}
        source = open_source("npy", config, folder=tmp_path)
        assert not source.portable
        assert hindrance(source) == "memory:// URLs can be read in this process only"
        source.close()
        assert totals({"npy": config}, lambda shard: shard) == sum(range(40))
    finally:
        fs.rm("/pipedist-test", recursive=True)


def test_file_urls_are_paths(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40))
    source = open_source("npy", {"path": f"file://{tmp_path}/*.npy"}, folder=Path("/"))
    assert source.length == 40
    source.close()


@pytest.mark.parametrize("keeps_urls", [False, True])
def test_urls_keep_their_hosts(keeps_urls: bool) -> None:
    """The paths of SFTP and FTP have no host; those of HTTP are whole URLs."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Hosted(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
        protocol = "hosted"
        store: ClassVar[dict[str, Any]] = {}

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            if keeps_urls:
                return path
            return "/" + path.removeprefix("hosted://user@host/").lstrip("/")

        def glob(self, path: str, **kwargs: Any) -> list[str]:
            return sorted(self.store)

        def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
            return {"name": path, "size": len(self.store[path]), "type": "file"}

        def exists(self, path: str, **kwargs: Any) -> bool:
            return path in self.store

        def cat_file(self, path: str, start: int = 0, end: int = 0, **kwargs: Any) -> bytes:
            content: bytes = self.store[path][start:end]
            return content

    fsspec.register_implementation("hosted", Hosted, clobber=True)
    urls = [f"hosted://user@host/deep/{name}.csv" for name in "ab"]
    Hosted.store.update({Hosted._strip_protocol(url): url.encode() for url in urls})
    assert list(remote.find(urls[0])) == urls[:1]
    assert list(remote.find("hosted://user@host/deep/*.csv")) == urls
    assert remote.read_range(urls[1], 0, 8) == b"hosted:/"
    assert remote.current_version(urls[1])[0] == len(urls[1])


def test_changed_and_missing_files_are_reported(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"path": f"zip://deep/x.npy::file://{archive}"}
    source = open_source("npy", config, folder=archive.parent)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(zipfile.ZipInfo("deep/x.npy", (1999, 1, 1, 0, 0, 0)), npy(np.arange(40) * 2))
    fsspec.filesystem("file").clear_instance_cache()
    from fsspec.implementations.zip import ZipFileSystem

    ZipFileSystem.clear_instance_cache()
    assert not is_visible(source.config), "the same size, of another time"
    with pytest.raises(SourceError, match="has changed since the run began"):
        open_reader(source.config).read(range(3))
    source.close()
    with pytest.raises(SourceError, match="no file matches"):
        open_source("npy", {"path": f"zip://none-*.npy::file://{archive}"}, folder=archive.parent)
    with pytest.raises(SourceError, match="nosuchprotocol"):
        open_source("npy", {"path": "nosuchprotocol://x"}, folder=archive.parent)
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(SourceError, match="URLs need fsspec"):
        open_source("npy", config, folder=archive.parent)


def test_no_copy_is_left(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    source = open_source("npy", {"path": f"zip://deep/x.npy::file://{archive}"}, folder=tmp_path)
    shard = source.read(source.locate(range(5)))
    assert shard.tolist() == [0, 1, 2, 3, 4]
    assert not list(folder.iterdir())
    del shard
    source.close()
    if before:
        from fsspec.implementations.zip import ZipFileSystem

        ZipFileSystem.clear_instance_cache()
        assert len(os.listdir("/proc/self/fd")) <= before + 1
