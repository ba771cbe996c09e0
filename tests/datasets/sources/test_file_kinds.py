"""A source that was given another kind of file says what it seems to be, and which source reads it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipedist.datasets.sources import SourceError, open_source
from pipedist.datasets.sources.file_kinds import kind_of


def parquet() -> bytes:
    arrow = pytest.importorskip("pyarrow", reason="an extra: pip install 'pipedist[parquet]'")
    from pyarrow.parquet import write_table

    out = io.BytesIO()
    write_table(arrow.table({"a": [1, 2]}), out)
    return out.getvalue()


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return out.getvalue()


def saved(save: Callable[..., None], *args: Any, **kwargs: Any) -> bytes:
    out = io.BytesIO()
    save(out, *args, **kwargs)
    return out.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    "parquet": parquet,
    "npy": lambda: saved(np.save, np.arange(3)),
    "npz": lambda: saved(np.savez, a=np.arange(3)),
    "gzip": lambda: gzip.compress(b"a,b\n1,2\n"),
    "csv": lambda: b"\xef\xbb\xbfa,b\n1,2\n",
    "jsonl": lambda: b'{"a": 1}\n',
    "images": lambda: b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "tar": tar,
    "hdf5": lambda: b"\x89HDF\r\n\x1a\n\0\0",
    "text": lambda: "gr\u00fc\u00df".encode() + b"\n",
}

WRONG = [
    *((kind, file) for kind in ("csv", "jsonl", "text") for file in ("parquet", "npy", "npz", "gzip")),
    *(("csv", file) for file in ("images", "tar", "hdf5")),
    *(("npy", file) for file in ("csv", "jsonl", "text", "npz", "parquet", "gzip")),
    *(("npz", file) for file in ("csv", "npy", "parquet")),
    *(("parquet", file) for file in ("csv", "npy", "npz", "jsonl")),
]


@pytest.mark.parametrize(("kind", "file"), WRONG)
def test_a_file_of_another_kind_is_named(kind: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(FILES[file]())
    if kind == "parquet":
        pytest.importorskip("pyarrow", reason="an extra: pip install 'pipedist[parquet]'")
    config = {"path": "data", **({"columns": {"a": "int64"}} if kind == "csv" else {})}
    with pytest.raises(SourceError) as caught:
        open_source(kind, config, folder=tmp_path)
    seems = kind_of(FILES[file]())
    assert seems is not None
    assert str(caught.value).startswith("data: ")
    assert seems.what in str(caught.value)
    assert caught.value.expected == seems.reads
    assert file in seems.reads.replace(".gz", "gzip"), "the source that reads it is named"
    assert caught.value.key == "path"


@pytest.mark.parametrize(
    ("packer", "data"),
    [
        ("bzip2", bz2.compress(b"a,b\n1,2\n")),
        ("xz", lzma.compress(b"a,b\n1,2\n")),
        ("zstd", bytes.fromhex("28b52ffd2008210000612c620a312c320a")),
    ],
    ids=["bzip2", "xz", "zstd"],
)
def test_other_compressors_are_named(packer: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_bytes(data)
    for kind, config in (("csv", {"columns": {"a": "int64"}}), ("text", {})):
        with pytest.raises(
            SourceError, match=rf"^data\.csv: it is compressed by {packer}, not text"
        ) as caught:
            open_source(kind, {"path": "data.csv", **config}, folder=tmp_path)
        assert caught.value.expected == "a file that is unpacked, or compressed by gzip"


def test_a_damaged_file_of_the_right_kind_is_reported_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(FILES["npz"]()[:60])
    with pytest.raises(SourceError, match=r"not a readable \.npz file: File is not a zip file"):
        open_source("npz", {"path": "data"}, folder=tmp_path)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_an_empty_file_is_called_that(kind: str, tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(SourceError, match=rf"not a readable \.{kind} file: it is empty"):
        open_source(kind, {"path": "data"}, folder=tmp_path)


def test_text_that_begins_like_a_binary_file_is_text(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("PAR1,b\n1,2\n")
    source = open_source("csv", {"path": "data", "columns": {"PAR1": "int64"}}, folder=tmp_path)
    assert source.read(source.locate(range(1)))["PAR1"].tolist() == [1]
    source.close()


def test_an_unknown_kind_is_not_guessed() -> None:
    assert kind_of(b"") is None
    assert kind_of(bytes(range(32))) is None
    assert kind_of(b"PK\x03\x04" + bytes(40)) is not None
    assert kind_of(("x" * 511 + "\u00fc").encode()[:512]) is not None, "cut within a character"
