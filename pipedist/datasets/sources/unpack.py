"""Compressed files: unpacked once, so that workers can read any part of them.

All of a source's unpacked files lie in ONE temporary file without a name, which workers open as
`/proc/PID/fd/N` of the driver: it goes away with the driver, also if that is killed. Where there
is no /proc, the file has a name, and is removed on close.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import zipfile
from collections.abc import Sequence
from typing import IO

from pipedist.datasets.sources.base import SourceError
from pipedist.datasets.sources.paths import UNPACKED, DataFile, is_remote

UNPACKED_BYTES_MAX = 1 << 40
"""How much one source may unpack: a limit for decompression bombs."""

_COPY_BYTES = 1 << 20
_ALIGN_BYTES = 64


class Spool:
    """The private temporary file of one source."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._path = ""
        self._size_bytes = 0

    def add(self, shown: str, stream: IO[bytes] | gzip.GzipFile) -> DataFile:
        """Append all of `stream`, and return where it lies.

        Args:
            shown: the name under which people know the data.
            stream: readable, at its beginning.

        Raises:
            SourceError: the disk is full, or `UNPACKED_BYTES_MAX` is passed.
        """
        file = self._open()
        offset = -(-self._size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        end = offset
        try:
            file.seek(offset)
            while piece := stream.read(_COPY_BYTES):
                end += len(piece)
                if end > UNPACKED_BYTES_MAX:
                    raise SourceError(f"{shown}: unpacks to more than {UNPACKED_BYTES_MAX} bytes", key="path")
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError as error:
            if error.errno is None:  # the data are damaged, says the module that unpacks them
                raise
            raise SourceError(
                f"{shown}: can't be unpacked into {tempfile.gettempdir()}: {error.strerror}"
                " (TMPDIR names another folder)",
                key="path",
            ) from error
        self._size_bytes = end
        return DataFile(shown, self._path, offset, end - offset, UNPACKED)

    def close(self) -> None:
        """Remove the file; readers that have it open can go on."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        if self._file is None:
            # Without a buffer: what a full disk refused would be written once more on close.
            if os.path.isdir("/proc/self/fd"):
                self._file = tempfile.TemporaryFile(buffering=0, prefix="pipedist-")  # noqa: SIM115 - see close()
                self._path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
            else:
                self._file = tempfile.NamedTemporaryFile(buffering=0, prefix="pipedist-")  # noqa: SIM115
                self._path = self._file.name
        return self._file


def unpacked(files: Sequence[DataFile], spool: Spool) -> list[DataFile]:
    """Return `files` with each `.gz` and one-member `.zip` replaced by its contents.

    Args:
        files: from `expand`.
        spool: where the contents go.

    Raises:
        SourceError: a file is damaged, or a `.zip` has not exactly one member.
    """
    return [_unpack(file, spool) for file in files]


def _unpack(file: DataFile, spool: Spool) -> DataFile:
    name = file.path.partition("::")[0] if is_remote(file.path) else file.path
    ending = os.path.splitext(name)[1].lower()
    try:
        if ending == ".gz":
            with os.fdopen(file.open(), "rb") as packed, gzip.open(packed) as stream:
                return spool.add(file.shown, stream)
        if ending == ".zip":
            with (
                os.fdopen(file.open(), "rb") as packed,
                zipfile.ZipFile(packed) as archive,
                archive.open(_only_member(file, archive)) as stream,
            ):
                return spool.add(file.shown, stream)
    except SourceError:
        raise
    except Exception as error:  # of a damaged archive these modules raise anything: IndexError, LZMAError
        raise SourceError(f"{file.shown}: can't be unpacked: {error}", key="path") from error
    return file


def _only_member(file: DataFile, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    # macOS's own archiver adds a __MACOSX folder of metadata to every archive.
    members = [
        info for info in archive.infolist() if not info.is_dir() and not info.filename.startswith("__MACOSX/")
    ]
    if len(members) != 1:
        names = ", ".join(info.filename for info in members[:5]) or "none"
        raise SourceError(
            f"{file.shown}: the archive has {len(members)} members ({names})",
            key="path",
            expected="a .zip with exactly one file",
        )
    return members[0]
