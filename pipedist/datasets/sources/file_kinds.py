"""What a file seems to be, by its first bytes: for the error of a source that was given another kind."""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass

from pipedist.datasets.sources.base import SourceError
from pipedist.datasets.sources.paths import DataFile

_HEAD_BYTES = 512
_ZIP_NAME_AT = 30
"""Where the name of a zip archive's first member begins."""

_TEXT_CONTROLS = frozenset("\t\n\v\f\r")


@dataclass(frozen=True, slots=True)
class FileKind:
    """What a file seems to be.

    Args:
        what: it is, for people: "a parquet file".
        reads: what to do with it, for people.
        text: it is text, as far as its first bytes tell.
    """

    what: str
    reads: str
    text: bool = False


_GZIP = FileKind("compressed by gzip", "a file that is unpacked, or a name that ends in .gz")
_PACKERS = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""Others that compress files, by their first bytes."""
_NPY = FileKind("an array in NumPy's .npy format", "`npy: {path: ...}`, which reads it")
_NPZ = FileKind("an .npz archive of NumPy arrays", "`npz: {path: ...}`, which reads it")
_PARQUET = FileKind("a parquet file", "`parquet: {path: ...}`, which reads it")
_ZIP = FileKind("a zip archive, as spreadsheets are too", "the file in it; as text, its name may end in .zip")

_CSV = FileKind("csv text", "`csv: {path: ..., columns: ...}`, which reads it", text=True)
_JSONL = FileKind("JSON text", "`jsonl: {path: ...}`, which reads one object a line", text=True)
_LINES = FileKind("text", "`text: {path: ...}`, which reads one line an element", text=True)


def refuse_binary(file: DataFile, descriptor: int) -> None:
    """Refuse a file that is of a binary kind, for a source that reads text.

    Raises:
        SourceError: it is; the text says what it is, and which source reads it.
    """
    head = file.read(descriptor, 0, min(_HEAD_BYTES, file.size_bytes))
    kind = kind_of(head)
    if kind is not None and not kind.text:
        raise SourceError(f"{file.shown}: it is {kind.what}, not text", key="path", expected=kind.reads)


def unreadable(file: DataFile, wanted: str, why: object) -> SourceError:
    """Return the error of a file that is not what its source reads.

    Args:
        file: that could not be read.
        wanted: what the source reads: ".npy".
        why: what its reader says, told where the file is of no kind that is known.
    """
    descriptor = file.open()
    try:
        kind = kind_of(file.read(descriptor, 0, min(_HEAD_BYTES, file.size_bytes)))
    finally:
        os.close(descriptor)
    message = f"{file.shown}: not a readable {wanted} file"
    if not file.size_bytes:
        return SourceError(f"{message}: it is empty", key="path")
    if kind is None or wanted in kind.what:  # of the right kind, but damaged
        return SourceError(f"{message}: {why}", key="path")
    return SourceError(f"{message}: it seems to be {kind.what}", key="path", expected=kind.reads)


def kind_of(head: bytes) -> FileKind | None:
    """Return what a file seems to be that begins so; None: nothing that is known."""
    if _is_text(head):
        first = head.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")[0]
        return _JSONL if first[:1] in (b"{", b"[") else _CSV if b"," in first else _LINES
    if head.startswith(b"PAR1"):
        return _PARQUET
    if head.startswith(b"\x93NUMPY"):
        return _NPY
    if head.startswith(b"\x1f\x8b"):
        return _GZIP
    for magic, packer in _PACKERS.items():
        if head.startswith(magic):
            return FileKind(f"compressed by {packer}", "a file that is unpacked, or compressed by gzip")
    if head.startswith(b"PK\x03\x04"):
        name = head[_ZIP_NAME_AT : _ZIP_NAME_AT + int.from_bytes(head[26:28], "little")]
        return _NPZ if name.endswith(b".npy") else _ZIP
    return None


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # a character may be cut at the end
    except UnicodeDecodeError:
        return False
    return bool(text) and all(each >= " " or each in _TEXT_CONTROLS for each in text)
