"""From a `path` to files, and what is unpacked on the way."""

from __future__ import annotations

import gzip
import io
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pipedist.datasets.sources import SourceError, file_kinds, open_source, paths
from pipedist.datasets.sources.file_kinds import UnpackStore, unpack_all
from pipedist.datasets.sources.paths import OpenFiles, expand


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "c.csv", "d/a.txt", "d/e/z.txt", ".hidden.txt", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("*.txt", ["a.txt", "b.txt", "odd[1].txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "d/a.txt", "d/e/z.txt", "odd[1].txt"]),
        ("d/**", ["d/a.txt", "d/e/z.txt"]),
        (["c.csv", "b.txt", "*.txt", "./b.txt"], ["a.txt", "b.txt", "c.csv", "odd[1].txt"]),
        ("odd[1].txt", ["odd[1].txt"]),
        ("d/../a.txt", ["d/../a.txt"]),
    ],
)
def test_matches_are_sorted_and_each_once(folder: Path, path: str | list[str], names: list[str]) -> None:
    files = expand(path, folder)
    assert [file.label for file in files] == names
    assert all(os.path.isabs(file.path) and Path(file.path).read_text() for file in files)


def test_a_link_to_a_folder_above_it_brings_no_file_twice(tmp_path: Path) -> None:
    for name in ("d/a.txt", "d/deep/b.txt", "other/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "d" / "again").symlink_to(".")
    (tmp_path / "d" / "deep" / "elsewhere").symlink_to("../../other")
    wanted = ["d/a.txt", "d/deep/b.txt", "d/deep/elsewhere/c.txt"]
    for path in ("d/**/*.txt", "d/../d/**/*.txt", "**/d/**/*.txt"):
        found = [file.label for file in expand(path, tmp_path)]
        assert [name.removeprefix("d/../") for name in found] == wanted
    found = [file.label for file in expand(f"{tmp_path}/d/**/*.txt", Path("/"))]
    assert found == [f"{tmp_path}/{name}" for name in wanted]
    assert [file.label for file in expand("d/again/*.txt", tmp_path)] == ["d/again/a.txt"]  # asked for


def test_absolute_patterns_stay_absolute(folder: Path) -> None:
    assert [file.label for file in expand(str(folder / "*.csv"), Path("/"))] == [str(folder / "c.csv")]


@pytest.mark.parametrize("path", ["*.parquet", "folder.txt", "none/x.txt", ["a.txt", "*.parquet"]])
def test_no_match_names_pattern_and_folder(folder: Path, path: str | list[str]) -> None:
    with pytest.raises(SourceError) as caught:
        expand(path, folder)
    pattern = path if isinstance(path, str) else path[1]
    assert str(caught.value) == f"no file matches {pattern!r} in {folder}"
    assert caught.value.key == "path"


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("~/x.csv", r"\$\{env\.HOME\}"),
        (".", r"a folder: '\./\*'"),
        ("none", "^$"),
        ("d/aa.txt", "such as 'd/a.txt'"),
    ],
)
def test_no_match_is_reported_with_a_hint(folder: Path, path: str, instead: str) -> None:
    with pytest.raises(SourceError, match="no file matches") as caught:
        expand(path, folder)
    assert re.search(instead, caught.value.expected)


@pytest.mark.parametrize("path", ["*.txt", "annexed.txt", ["a.txt", "**"]])
def test_a_dangling_link_is_an_error(folder: Path, path: str | list[str]) -> None:
    (folder / "annexed.txt").symlink_to(".git/annex/objects/x")
    with pytest.raises(SourceError, match=r"^annexed\.txt: a symbolic link to \.git/annex/objects/x, which"):
        expand(path, folder)
    (folder / ".git/annex/objects").mkdir(parents=True)
    (folder / ".git/annex/objects/x").write_text("fetched")
    assert "annexed.txt" in [file.label for file in expand(path, folder)]


def test_unpacked_data_has_no_name_and_disappears_with_the_source(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n", mtime=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(temporary))
        source = open_source("text", {"path": "*.gz"}, folder=tmp_path)
        assert os.listdir(temporary) == []
        assert source.config["files"][0][1].startswith(f"/proc/{os.getpid()}/fd/")
        assert source.read(source.locate(range(2))) == ["one", "two"]
        before = len(os.listdir("/proc/self/fd"))
        source.close()
        assert len(os.listdir("/proc/self/fd")) == before - 2  # the unpacked file, and its reader's


def test_without_proc_the_unpacked_file_has_a_name_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n", mtime=0))
    isdir = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/proc/self/fd" and isdir(path))
    source = open_source("text", {"path": "*.gz"}, folder=tmp_path)
    name = source.config["files"][0][1]
    assert os.path.exists(name)
    assert os.stat(name).st_mode & 0o077 == 0
    assert source.read(source.locate(range(1, 2))) == ["two"]
    source.close()
    assert not os.path.exists(name)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_archive_is_reported(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr("a.txt", b"0123456789" * 100)
    data = (tmp_path / "a.zip").read_bytes()
    at = 44  # where both formats have a mark
    (tmp_path / "a.zip").write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with pytest.raises(SourceError, match=r"^a\.zip: can't be unpacked: [A-Z]"):
        open_source("text", {"path": "a.zip"}, folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.gz", b"not gzip", "can't be unpacked"),
        ("a.gz", gzip.compress(b"x" * 1000, mtime=0)[:-9], "can't be unpacked"),
        ("a.gz", gzip.compress(b"x" * 100, mtime=0)[:12] + b"\xff\xff\xff\xff", "can't be unpacked"),
        ("a.zip", b"not zip", "can't be unpacked"),
    ],
)
def test_damaged_archives_leave_nothing_open(tmp_path: Path, name: str, data: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(data)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SourceError, match=rf"^{name}: {text}"):
        open_source("text", {"path": name}, folder=tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("members", [[], ["a.txt", "b.txt"]])
def test_a_zip_must_have_one_member(tmp_path: Path, members: list[str]) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for member in members:
            archive.writestr(member, "x")
    with pytest.raises(SourceError, match=rf"the archive has {len(members)} members"):
        open_source("text", {"path": "a.zip"}, folder=tmp_path)


def test_a_bomb_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_kinds, "UNPACKED_BYTES_MIN", 1000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x" * 100_000, mtime=0))
    with pytest.raises(
        SourceError, match=r"a\.gz: its [0-9]+ bytes unpack to more than [0-9,]+ bytes"
    ) as raised:
        open_source("text", {"path": "a.gz"}, folder=tmp_path)
    assert "`unpacked_bytes_max`" in raised.value.expected
    source = open_source("text", {"path": "a.gz", "unpacked_bytes_max": 100_000}, folder=tmp_path)
    assert source.length == 1
    source.close()
    with pytest.raises(SourceError, match="unpack to more than 99,999 bytes"):
        open_source("text", {"path": "a.gz", "unpacked_bytes_max": 99_999}, folder=tmp_path)


def test_an_archive_that_announces_too_much_is_not_unpacked() -> None:
    with pytest.raises(
        SourceError, match=r"a: its 10,000,000 bytes unpack to 10,000,000,000 bytes, 1,073,741,824"
    ):
        UnpackStore().add("a", io.BytesIO(), packed_bytes=10_000_000, announced_bytes=10_000_000_000)


def test_members_of_an_npz_have_the_same_limit(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(100_000, np.uint8))
    with pytest.raises(SourceError, match=r"array 'x': its [0-9]+ bytes unpack to 100,128 bytes, 5,000 are"):
        open_source("npz", {"path": "a.npz", "unpacked_bytes_max": 5000}, folder=tmp_path)


def test_opening_that_takes_long_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_kinds, "NOTICE_AFTER_S", 0.0)
    for name in "ab":
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"x" * 100_000, mtime=0))
    open_source("text", {"path": "*.gz"}, folder=tmp_path).close()
    assert [record.getMessage() for record in caplog.records] == [
        "pipedist: planning takes long: a.gz is being unpacked, 100,000 bytes so far"
    ]
    caplog.clear()
    (tmp_path / "c.txt").write_bytes(b"x\n" * 10)
    open_source("text", {"path": "c.txt"}, folder=tmp_path).close()
    assert [record.getMessage() for record in caplog.records] == [
        "pipedist: planning takes long: c.txt is being indexed, 20 bytes so far"
    ]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x" * 100_000, mtime=0))
    store = UnpackStore()
    store._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - the store closes it
    with pytest.raises(SourceError, match=r"a\.gz: can't be unpacked into .*TMPDIR.*No space left"):
        unpack_all(expand("a.gz", tmp_path), store)
    store.close()


def test_few_descriptors_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "FILES_OPEN_MAX", 3)
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(str(number))
    before = len(os.listdir("/proc/self/fd"))
    files = OpenFiles(expand("*.txt", tmp_path))
    for number in (*range(10), 9, 0, 5):
        assert files.read(number, 0, 1) == str(number).encode()
        assert len(os.listdir("/proc/self/fd")) <= before + 3
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_reads_larger_than_a_system_call_takes_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "READ_BYTES_MAX", 7)
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    files = OpenFiles(expand("a.txt", tmp_path))
    assert files.read(0, 3, 97) == bytes(range(3, 97))
    with pytest.raises(SourceError, match="became shorter"):
        files.read(0, 90, 120)
    files.close()


@pytest.mark.parametrize("given", ["hive", "hive/*"])
def test_the_suggested_pattern_for_folders_of_folders_matches(tmp_path: Path, given: str) -> None:
    nested = tmp_path / "hive" / "year=2026" / "month=1"
    nested.mkdir(parents=True)
    (nested / "a.parquet").touch()
    with pytest.raises(SourceError) as caught:
        expand(given, tmp_path)
    assert "'hive/**'" in caught.value.expected
    assert [file.label for file in expand("hive/**", tmp_path)] == ["hive/year=2026/month=1/a.parquet"]


def test_the_suggested_pattern_for_a_folder_of_files_matches(tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.csv").touch()
    with pytest.raises(SourceError) as caught:
        expand("flat", tmp_path)
    assert "'flat/*'" in caught.value.expected
    assert len(expand("flat/*", tmp_path)) == 1
