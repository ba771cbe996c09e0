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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from pipedist.datasets.sources.base import SourceError

_COPY_BYTES = 4 << 20
_ARCHIVES_MAX = 16
_STAMPS = (
    "ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "modified", "date_time", "created",
)  # fmt: skip


# The file system of each open stream: a collected archive file system would close its file.
_systems: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def find(pattern: str) -> dict[str, tuple[int, int]]:
    """Return the file of a URL, or the files that it matches as a glob: {URL: `current_version`}."""
    first, chain, rest = pattern.partition("::")
    system, root = _system(pattern)
    with _errors_of(pattern):
        names = [root] if system.exists(root) else system.glob(root)
        details = {name: system.info(name) for name in names}
    path = root.lstrip("/")
    # the part before a path may have a host or a user; the paths of HTTP are whole URLs
    start = first.removesuffix(path) if first.endswith(path) else first.partition("://")[0] + "://"
    return {
        f"{start}{name.lstrip('/')}{chain}{rest}": (int(each["size"]), _stamp(each))
        for name, each in details.items()
        if each.get("type") == "file" and each.get("size") is not None
    }


def current_version(url: str) -> tuple[int, int]:
    """Return a file's size, in bytes, and stamp: an integer of its version, equal on every host."""
    system, path = _system(url, fresh=True)
    with _errors_of(url):
        system.invalidate_cache()
        details = system.info(path)
        return int(details["size"]), _stamp(details)


def read_range(url: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a file."""
    system, path = _system(url)
    with _errors_of(url):
        data = bytes(system.cat_file(path, start=start, end=stop))
    if len(data) != stop - start:
        raise SourceError(f"{url}: read {len(data)} bytes instead of {stop - start}", key="path")
    return data


def copy(url: str) -> IO[bytes]:
    """Copy a file to an unnamed temporary file, which the caller closes."""
    held = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with _errors_of(url), open_stream(url) as stream:
            while piece := stream.read(_COPY_BYTES):
                held.write(piece)
        held.flush()
        held.seek(0)
    except BaseException:
        held.close()
        raise
    return held


def open_stream(url: str) -> Any:
    """Return a seekable stream of a file, which reads by byte ranges."""
    system, path = _system(url)
    with _errors_of(url):
        stream = system.open(path, "rb")
    _systems[stream] = system
    return stream


def _system(url: str, *, fresh: bool = False) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # an extra, and only for URLs
    except ImportError as error:
        raise SourceError(
            f"{url}: URLs need fsspec", key="path", expected="a path, or: pip install 'pipedist[fsspec]'"
        ) from error
    with _errors_of(url):
        if "::" not in url:
            system, path = url_to_fs(url)  # caches file systems
            return system, str(path)
        first, _, rest = url.partition("::")
        protocol = first.partition("://")[0]
        system = _archive_system.__wrapped__(protocol, rest) if fresh else _archive_system(protocol, rest)
        return system, str(system._strip_protocol(first))


@functools.lru_cache(maxsize=_ARCHIVES_MAX)
def _archive_system(protocol: str, rest: str) -> Any:
    """Return the file system of an archive, which closes the archive when it is collected."""
    from fsspec.core import url_to_fs

    return url_to_fs(f"{protocol}://::{rest}")[0]


def _stamp(details: Mapping[str, Any]) -> int:
    text = "|".join(f"{key}={details[key]}" for key in _STAMPS if details.get(key) is not None)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@contextmanager
def _errors_of(url: str) -> Iterator[None]:
    try:
        yield
    except SourceError:
        raise
    except Exception as error:  # the file system's package may raise anything
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise SourceError(f"{url}: can't be read: {text}", key="path") from error
