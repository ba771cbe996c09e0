"""Recognizes kinds of files by their first bytes, and unpacks compressed files.

A source that reads another kind of file names the kind in its error. Compressed files are unpacked
once, so that workers can read any part of them. All unpacked files of a source are in one temporary
file without a name, which workers open as `/proc/PID/fd/N` of the driver: it disappears with the
driver, also after SIGKILL. Without /proc the file has a name, and is removed on close.
"""

from __future__ import annotations

import codecs
import gzip
import logging
import os
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from pipedist.datasets.sources.base import SourceError
from pipedist.datasets.sources.paths import UNPACKED, DataFile, is_remote

_HEAD_BYTES = 512
_ZIP_NAME_AT = 30  # offset of the name of a zip archive's first member
_TEXT_CONTROLS = frozenset("\t\n\v\f\r")


@dataclass(frozen=True, slots=True)
class FileKind:
    """The kind that a file seems to have."""

    what: str  # as errors name it: "a parquet file"
    reads: str  # the source or the file to use instead, as errors name it
    text: bool = False  # its first bytes are text


_GZIP = FileKind("compressed by gzip", "a file that is unpacked, or a name that ends in .gz")
_PACKERS = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_IMAGE = FileKind("an image", "`images: {path: ...}`, which reads it")
_NPY = FileKind("an array in NumPy's .npy format", "`npy: {path: ...}`, which reads it")
_NPZ = FileKind("an .npz archive of NumPy arrays", "`npz: {path: ...}`, which reads it")
_PARQUET = FileKind("a parquet file", "`parquet: {path: ...}`, which reads it")
_MAGICS = {
    b"PAR1": _PARQUET,
    b"\x93NUMPY": _NPY,
    b"\x1f\x8b": _GZIP,
    b"ARROW1": FileKind("an Arrow file", "`arrow: {path: ...}`, which reads it"),
    b"\x89HDF\r\n\x1a\n": FileKind("an HDF5 file", "`hdf5: {path: ..., dataset: ...}`, which reads it"),
    b"SQLite format 3\0": FileKind("a database of SQLite", "`sql: {url: ..., query: ...}`, which reads it"),
    b"\x89PNG\r\n\x1a\n": _IMAGE,
    b"\xff\xd8\xff": _IMAGE,
}
_TAR = FileKind("a tar archive", "`tar: {path: ...}`, which reads it")
_TAR_NAME_AT = 257  # offset of `ustar`
_ZIP = FileKind("a zip archive, as spreadsheets are too", "the file in it; as text, its name may end in .zip")

_CSV = FileKind("csv text", "`csv: {path: ..., columns: ...}`, which reads it", text=True)
_JSONL = FileKind("JSON text", "`jsonl: {path: ...}`, which reads one object a line", text=True)
_LINES = FileKind("text", "`text: {path: ...}`, which reads one line an element", text=True)


def refuse_binary(file: DataFile, descriptor: int) -> None:
    """Raise SourceError for a binary file; its text names the kind, and the source that reads it."""
    head = file.read(descriptor, 0, min(_HEAD_BYTES, file.size_bytes))
    kind = kind_of(head)
    if kind is not None and not kind.text:
        raise SourceError(f"{file.label}: it is {kind.what}, not text", key="path", expected=kind.reads)


def unreadable(file: DataFile, wanted: str, why: object) -> SourceError:
    """Return the error for a file that its source can't read as `wanted` (".npy"); `why` is the reader's error."""
    descriptor = file.open()
    try:
        kind = kind_of(file.read(descriptor, 0, min(_HEAD_BYTES, file.size_bytes)))
    finally:
        os.close(descriptor)
    message = f"{file.label}: not a readable {wanted} file"
    if not file.size_bytes:
        return SourceError(f"{message}: it is empty", key="path")
    if kind is None or wanted in kind.what:  # unknown, or damaged
        return SourceError(f"{message}: {why}", key="path")
    return SourceError(f"{message}: it seems to be {kind.what}", key="path", expected=kind.reads)


def kind_of(head: bytes) -> FileKind | None:
    """Return the kind of a file by its first bytes; None if it is unknown."""
    if _is_text(head):
        first = head.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")[0]
        return _JSONL if first[:1] in (b"{", b"[") else _CSV if b"," in first else _LINES
    for magic, kind in _MAGICS.items():
        if head.startswith(magic):
            return kind
    if head[_TAR_NAME_AT:].startswith(b"ustar"):
        return _TAR
    for magic, packer in _PACKERS.items():
        if head.startswith(magic):
            return FileKind(f"compressed by {packer}", "a file that is unpacked, or compressed by gzip")
    if head.startswith(b"PK\x03\x04"):
        name = head[_ZIP_NAME_AT : _ZIP_NAME_AT + int.from_bytes(head[26:28], "little")]
        return _NPZ if name.endswith(b".npy") else _ZIP
    return None


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be incomplete
    except UnicodeDecodeError:
        return False
    return bool(text) and all(each >= " " or each in _TEXT_CONTROLS for each in text)


UNPACKED_RATIO_MAX = 100
UNPACKED_BYTES_MIN = 1 << 30  # default limit of a compressed file: this, or UNPACKED_RATIO_MAX times its size
STORE_BYTES_MAX = 1 << 40  # limit of one source
_COPY_BYTES = 1 << 20
_ALIGN_BYTES = 64

NOTICE_AFTER_S = 5.0
_LOGGER = "pipedist.datasets"


class OpeningNotice:
    """Logs one line if opening a source takes longer than NOTICE_AFTER_S."""

    def __init__(self) -> None:
        self._due: float | None = time.monotonic() + NOTICE_AFTER_S

    def check(self, doing: str) -> None:
        """Log what is being done, if it is time."""
        if self._due is not None and time.monotonic() >= self._due:
            self._due = None
            logging.getLogger(_LOGGER).warning("pipedist: planning takes long: %s", doing)


class UnpackStore:
    """The temporary file with all unpacked files of one source.

    `bytes_max` limits what one compressed file unpacks to; None: by default, see UNPACKED_BYTES_MIN.
    """

    def __init__(self, bytes_max: int | None = None) -> None:
        self.notice = OpeningNotice()
        self._bytes_max = bytes_max
        self._file: IO[bytes] | None = None
        self._path = ""
        self._size_bytes = 0

    def add(
        self, label: str, stream: IO[bytes] | gzip.GzipFile, *, packed_bytes: int, announced_bytes: int = 0
    ) -> DataFile:
        """Append all of `stream`, and return the file that it makes up.

        Args:
            label: names the data in errors.
            packed_bytes: its size before it is unpacked.
            announced_bytes: its size afterwards, as its archive has it; 0: unknown.

        Raises:
            SourceError: it unpacks to more than is allowed, or does not fit on the disk.
        """
        limit = self._bytes_max or max(UNPACKED_BYTES_MIN, UNPACKED_RATIO_MAX * packed_bytes)
        if announced_bytes > limit:
            raise _too_large(label, packed_bytes, f"{announced_bytes:,} bytes", limit)
        file = self._open()
        offset = -(-self._size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        end = offset
        try:
            file.seek(offset)
            while piece := stream.read(_COPY_BYTES):
                end += len(piece)
                if end - offset > limit:
                    raise _too_large(label, packed_bytes, f"more than {limit:,} bytes", limit)
                if end > STORE_BYTES_MAX:
                    raise SourceError(
                        f"{label}: all files unpack to more than {STORE_BYTES_MAX:,} bytes", key="path"
                    )
                self.notice.check(f"{label} is being unpacked, {end - offset:,} bytes so far")
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError as error:
            if error.errno is None:  # raised by the unpacking module: damaged data
                raise
            raise SourceError(
                f"{label}: can't be unpacked into {tempfile.gettempdir()} (TMPDIR): {error.strerror}",
                key="path",
            ) from error
        self._size_bytes = end
        return DataFile(label, self._path, offset, end - offset, UNPACKED)

    def close(self) -> None:
        """Remove the file; readers that have it open can continue."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        if self._file is None:
            # unbuffered: else closing would write again what a full disk rejected
            if os.path.isdir("/proc/self/fd"):
                self._file = tempfile.TemporaryFile(buffering=0, prefix="pipedist-")  # noqa: SIM115 - see close()
                self._path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
            else:
                self._file = tempfile.NamedTemporaryFile(buffering=0, prefix="pipedist-")  # noqa: SIM115
                self._path = self._file.name
        return self._file


def _too_large(label: str, packed_bytes: int, size: str, limit: int) -> SourceError:
    return SourceError(
        f"{label}: its {packed_bytes:,} bytes unpack to {size}, {limit:,} are allowed",
        key="path",
        expected="a file that is not made to fill the disk; if this one is right, set `unpacked_bytes_max`",
    )


def unpack_all(files: Sequence[DataFile], store: UnpackStore) -> list[DataFile]:
    """Return `files` with each `.gz` and one-member `.zip` replaced by its contents in the store."""
    return [_unpack(file, store) for file in files]


def _unpack(file: DataFile, store: UnpackStore) -> DataFile:
    name = file.path.partition("::")[0] if is_remote(file.path) else file.path
    ending = os.path.splitext(name)[1].lower()
    try:
        if ending in (".gz", ".tgz"):
            with os.fdopen(file.open(), "rb") as packed, gzip.open(packed) as stream:
                return store.add(file.label, stream, packed_bytes=file.size_bytes)
        if ending == ".zip":
            with (
                os.fdopen(file.open(), "rb") as packed,
                zipfile.ZipFile(packed) as archive,
                archive.open(member := _only_member(file, archive)) as stream,
            ):
                size, announced = file.size_bytes, member.file_size
                return store.add(file.label, stream, packed_bytes=size, announced_bytes=announced)
    except SourceError:
        raise
    except Exception as error:  # damaged archives raise anything: IndexError, LZMAError, ...
        raise SourceError(f"{file.label}: can't be unpacked: {error}", key="path") from error
    return file


def _only_member(file: DataFile, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    # macOS adds a folder of metadata to every archive
    members = [
        info for info in archive.infolist() if not info.is_dir() and not info.filename.startswith("__MACOSX/")
    ]
    if len(members) != 1:
        names = ", ".join(info.filename for info in members[:5]) or "none"
        raise SourceError(
            f"{file.label}: the archive has {len(members)} members ({names})",
            key="path",
            expected="a .zip with exactly one file",
        )
    return members[0]
