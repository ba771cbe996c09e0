"""Files behind URLs, through fsspec: `s3://bucket/x.csv`, `gs://...`, `zip://x.csv::file:///data.zip`.

A URL is a path like any other: a glob, or one file. Rows of text, and row groups of parquet, are read by
byte ranges. Other files (`npy`, `npz`, packed ones), and text when it is indexed, are copied once to a
file without a name, by each process that reads them. Credentials are the file system's own matter: its
configuration files and environment variables, on every host that is to read for itself.
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
_INSIDE_MAX = 16
_STAMPS = (
    "ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "modified", "date_time", "created",
)  # fmt: skip
"""What tells two versions of a file apart, by the names that file systems give it."""


_systems: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The file system of each open stream: one inside a file would close that with itself."""


class Found(Struct, frozen=True):
    """A file behind a URL.

    Args:
        url: its own.
        size_bytes: how large it is.
        stamp: of its version, an integer that is the same on every host.
    """

    url: str
    size_bytes: int
    stamp: int


def find(pattern: str) -> list[Found]:
    """Return the files that a URL means: itself, or what it matches as a glob; sorted.

    Raises:
        SourceError: fsspec, or what it needs for this kind of URL, is not installed; the URL can't be
            read.
    """
    first, chain, rest = pattern.partition("::")
    system, root = _system(pattern)
    try:
        names = [root] if system.exists(root) else system.glob(root)
        details = {name: system.info(name) for name in names}
    except Exception as error:
        raise _told(pattern, error) from error
    protocol = first.partition("://")[0]
    return [
        Found(f"{protocol}://{name.lstrip('/')}{chain}{rest}", _size(details[name]), _stamp(details[name]))
        for name in sorted(names)
        if details[name].get("type") == "file" and details[name].get("size") is not None
    ]


def look(url: str) -> tuple[int, int]:
    """Return size, in bytes, and stamp of a file as it is now.

    Raises:
        SourceError: it can't be read from here.
    """
    system, path = _system(url, fresh=True)
    try:
        system.invalidate_cache()
        details = system.info(path)
        return _size(details), _stamp(details)
    except Exception as error:
        raise _told(url, error) from error


def read_range(url: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a file.

    Raises:
        SourceError: it can't be read, or is too short.
    """
    system, path = _system(url)
    try:
        data = bytes(system.cat_file(path, start=start, end=stop))
    except Exception as error:
        raise _told(url, error) from error
    if len(data) != stop - start:
        raise SourceError(f"{url}: {stop - start} bytes were to be read, and {len(data)} came", key="path")
    return data


def copy(url: str) -> IO[bytes]:
    """Return a file of this process's own, without a name, with a file's bytes.

    Raises:
        SourceError: it can't be read, or the disk is full.
    """
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
        raise _told(url, error) from error
    return held


def open_stream(url: str) -> Any:
    """Return a seekable stream of a file, which reads by byte ranges.

    Raises:
        SourceError: it can't be opened.
    """
    system, path = _system(url)
    try:
        stream = system.open(path, "rb")
    except Exception as error:
        raise _told(url, error) from error
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
            system, path = url_to_fs(url)  # which keeps file systems itself
            return system, str(path)
        first, _, rest = url.partition("::")
        protocol = first.partition("://")[0]
        system = _inside.__wrapped__(protocol, rest) if fresh else _inside(protocol, rest)
        return system, str(system._strip_protocol(first))
    except Exception as error:  # whatever the file system's own package raises
        raise _told(url, error) from error


@functools.lru_cache(maxsize=_INSIDE_MAX)
def _inside(protocol: str, rest: str) -> Any:
    """Return the file system inside a file: an archive's. It closes that file when nobody has it any more."""
    from fsspec.core import url_to_fs

    return url_to_fs(f"{protocol}://::{rest}")[0]


def _size(details: Mapping[str, Any]) -> int:
    return int(details["size"])


def _stamp(details: Mapping[str, Any]) -> int:
    told = "|".join(f"{key}={details[key]}" for key in _STAMPS if details.get(key) is not None)
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:7], "big")


def _told(url: str, error: Exception) -> SourceError:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return SourceError(f"{url}: can't be read: {text}", key="path")
