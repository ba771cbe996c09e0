"""Files behind URLs, through fsspec: `s3://bucket/x.csv`, `gs://...`, `zip://x.csv::file:///data.zip`.

A URL may be a glob or name one file. Rows of text and row groups of parquet are read by byte ranges.
Other files (`npy`, `npz`, compressed ones), and text for its index, are copied once to an unnamed file
by each process that reads them. Credentials are configured as the file system requires, by its
configuration files and environment variables, on every host that reads.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
import weakref
from typing import IO, TYPE_CHECKING, Any

from msgspec import Struct

from pipedist.datasets.sources.base import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

_COPY_BYTES = 4 << 20
_ARCHIVES_MAX = 16
_STAMPS = (
    "ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "modified", "date_time", "created",
)  # fmt: skip


# The file system of each open stream: a collected archive file system would close its file.
_systems: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class RemoteFile(Struct, frozen=True):
    """A file behind a URL."""

    url: str
    size_bytes: int
    stamp: int  # an integer of its version, equal on every host


def find(pattern: str) -> list[RemoteFile]:
    """Return the file of a URL, or the files that it matches as a glob, sorted."""
    first, chain, rest = pattern.partition("::")
    system, root = _system(pattern)
    try:
        names = [root] if system.exists(root) else system.glob(root)
        details = {name: system.info(name) for name in names}
    except Exception as error:
        raise _read_error(pattern, error) from error
    protocol = first.partition("://")[0]
    return [
        RemoteFile(
            f"{protocol}://{name.lstrip('/')}{chain}{rest}", _size(details[name]), _stamp(details[name])
        )
        for name in sorted(names)
        if details[name].get("type") == "file" and details[name].get("size") is not None
    ]


def current_version(url: str) -> tuple[int, int]:
    """Return the current size, in bytes, and stamp of a file."""
    system, path = _system(url, fresh=True)
    try:
        system.invalidate_cache()
        details = system.info(path)
        return _size(details), _stamp(details)
    except Exception as error:
        raise _read_error(url, error) from error


def read_range(url: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a file."""
    system, path = _system(url)
    try:
        data = bytes(system.cat_file(path, start=start, end=stop))
    except Exception as error:
        raise _read_error(url, error) from error
    if len(data) != stop - start:
        raise SourceError(f"{url}: read {len(data)} bytes instead of {stop - start}", key="path")
    return data


def copy(url: str) -> IO[bytes]:
    """Copy a file to an unnamed temporary file, which the caller closes."""
    held = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with open_stream(url) as stream:
            while piece := stream.read(_COPY_BYTES):
                held.write(piece)
        held.flush()
        held.seek(0)
    except BaseException as error:
        held.close()
        if isinstance(error, SourceError) or not isinstance(error, Exception):
            raise
        raise _read_error(url, error) from error
    return held


def open_stream(url: str) -> Any:
    """Return a seekable stream of a file, which reads by byte ranges."""
    system, path = _system(url)
    try:
        stream = system.open(path, "rb")
    except Exception as error:
        raise _read_error(url, error) from error
    _systems[stream] = system
    return stream


def _system(url: str, *, fresh: bool = False) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # an extra, and only for URLs
    except ImportError as error:
        raise SourceError(
            f"{url}: URLs need fsspec", key="path", expected="a path, or: pip install 'pipedist[fsspec]'"
        ) from error
    try:
        if "::" not in url:
            system, path = url_to_fs(url)  # caches file systems
            return system, str(path)
        first, _, rest = url.partition("::")
        protocol = first.partition("://")[0]
        system = _archive_system.__wrapped__(protocol, rest) if fresh else _archive_system(protocol, rest)
        return system, str(system._strip_protocol(first))
    except Exception as error:  # the file system's package may raise anything
        raise _read_error(url, error) from error


@functools.lru_cache(maxsize=_ARCHIVES_MAX)
def _archive_system(protocol: str, rest: str) -> Any:
    """Return the file system of an archive, which closes the archive when it is collected."""
    from fsspec.core import url_to_fs

    return url_to_fs(f"{protocol}://::{rest}")[0]


def _size(details: Mapping[str, Any]) -> int:
    return int(details["size"])


def _stamp(details: Mapping[str, Any]) -> int:
    text = "|".join(f"{key}={details[key]}" for key in _STAMPS if details.get(key) is not None)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _read_error(url: str, error: Exception) -> SourceError:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return SourceError(f"{url}: can't be read: {text}", key="path")
