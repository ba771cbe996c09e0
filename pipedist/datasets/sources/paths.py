"""The files of a source: finding them, opening them later, and detecting changes.

A file that changed since the source was opened is an error in every process that reads it. A process on
another host reads a source itself if it sees the same files: equal path, size and modification time.
"""

from __future__ import annotations

import glob
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from pipedist.core.names import nearest
from pipedist.datasets.sources.base import Config, Source, SourceError

FILES_OPEN_MAX = 64  # limit of one reader; the least recently used file is closed
READ_BYTES_MAX = 1 << 30  # limit of one system call; that of the kernel is just below 2 GiB
UNPACKED = -1  # `mtime_ns` of a file that pipedist unpacked, which no other process can change


_PRIVATE = ("memory",)  # protocols of file systems that exist in one process only


def is_remote(path: str) -> bool:
    """Return whether a path is a URL that is read through fsspec, which excludes `file://`."""
    return "://" in path and not path.startswith("file://")


def is_private(path: str) -> bool:
    """Return whether a path is a URL that only this process can read."""
    return any(part.partition("://")[0] in _PRIVATE for part in path.split("::")) and is_remote(path)


class DataFile(Struct, frozen=True, array_like=True):
    """A file of a source, or a part of one, and its version. Methods raise SourceError if it has changed."""

    label: str  # its name in errors and results: relative to the spec's folder if `path` was
    path: str  # absolute, or a URL (`pipedist.datasets.sources.remote`)
    offset: int  # position of its first byte
    size_bytes: int
    mtime_ns: int  # at the time the source was opened, or `UNPACKED`; for a URL, its stamp

    def open(self) -> int:
        """Return a new descriptor for reading; for a URL, of a copy."""
        if is_remote(self.path):
            self.check()
            from pipedist.datasets.sources.remote import copy

            with copy(self.path) as held:
                return os.dup(held.fileno())
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{self.label}: can't be opened: {error.strerror}", key="path") from error
        try:
            self.check_open(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def for_library(self) -> Any:
        """Return what other libraries open: the path of the file; for a URL, a stream, which reads by byte ranges."""
        if not is_remote(self.path):
            return self.path
        from pipedist.datasets.sources.remote import open_stream

        return open_stream(self.path)

    def check_open(self, descriptor: int) -> None:
        """Check that the open file has not changed; its path may have been replaced."""
        if self.mtime_ns == UNPACKED or is_remote(self.path):
            return
        now = os.fstat(descriptor)
        if (now.st_size, now.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise self._changed()

    def _changed(self) -> SourceError:
        return SourceError(f"{self.label}: the file has changed since the run began: start again", key="path")

    def check(self) -> None:
        """Check that the file exists and is unchanged."""
        if not is_remote(self.path):
            os.close(self.open())
            return
        from pipedist.datasets.sources.remote import current_version

        if current_version(self.path) != (self.size_bytes, self.mtime_ns):
            raise self._changed()

    def contents(self) -> bytes:
        descriptor = self.open()
        try:
            return self.read(descriptor, 0, self.size_bytes)
        finally:
            os.close(descriptor)

    def read(self, descriptor: int, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of the file."""
        pieces: list[bytes] = []
        while start < stop:
            data = os.pread(descriptor, min(stop - start, READ_BYTES_MAX), self.offset + start)
            if not data:
                raise SourceError(f"{self.label}: the file became shorter while it was read", key="path")
            pieces.append(data)
            start += len(data)
        self.check_open(descriptor)  # after the reads, which a change could precede
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class OpenFiles:
    """The descriptors of recently read files, at most `FILES_OPEN_MAX`; methods take files by their index."""

    def __init__(self, files: Sequence[DataFile]) -> None:
        self.files = tuple(files)
        self._descriptors: OrderedDict[int, int] = OrderedDict()
        self._checked: set[int] = set()  # the URLs among them

    def read(self, file: int, start: int, stop: int) -> bytes:
        data_file = self.files[file]
        if is_remote(data_file.path) and file not in self._descriptors:  # without a copy
            from pipedist.datasets.sources.remote import read_range

            if file not in self._checked:
                data_file.check()
                self._checked.add(file)
            return read_range(data_file.path, data_file.offset + start, data_file.offset + stop)
        return self.files[file].read(self.descriptor(file), start, stop)

    def check(self, file: int) -> None:
        """Check that a file has not changed; not for URLs, whose descriptor is that of a copy."""
        if not is_remote(self.files[file].path):
            self.files[file].check_open(self.descriptor(file))

    def descriptor(self, file: int) -> int:
        """Return an open descriptor of a file, which this object closes."""
        descriptor = self._descriptors.get(file)
        if descriptor is None:
            descriptor = self._descriptors[file] = self.files[file].open()
            if len(self._descriptors) > FILES_OPEN_MAX:
                os.close(self._descriptors.popitem(last=False)[1])
        else:
            self._descriptors.move_to_end(file)
        return descriptor

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        self.close()


def expand(path: str | Iterable[str], folder: Path) -> list[DataFile]:
    """Return the files that match `path`, sorted by name, each once.

    Args:
        path: a glob pattern (`**` is recursive) or a list of them; a file whose name looks like a
            pattern is found by its name. Names that begin with a dot need a pattern that does.
        folder: the folder that relative patterns start from.

    Raises:
        SourceError: a pattern matches no file, or a file can't be examined.
    """
    found: dict[str, DataFile] = {}
    for given in [path] if isinstance(path, str) else path:
        if is_remote(given):
            from pipedist.datasets.sources.remote import find

            urls = find(given)
            if not urls:
                raise SourceError(f"no file matches {given!r}", key="path")
            found.update((url, DataFile(url, url, 0, *version)) for url, version in urls.items())
            continue
        pattern = given.removeprefix("file://")
        names = [name for name in _matches(pattern, folder) if _is_file(name, folder)]
        if not names:
            place = "" if os.path.isabs(pattern) else f" in {os.path.abspath(folder)}"
            raise SourceError(
                f"no file matches {pattern!r}{place}", key="path", expected=_instead(pattern, folder)
            )
        for name in names:
            absolute = os.path.abspath(os.path.join(folder, name))
            if absolute not in found:
                found[absolute] = _examine(name, absolute)
    return sorted(found.values(), key=lambda file: (file.label, file.path))


def _instead(pattern: str, folder: Path) -> str:
    """Return the expected form of a pattern that matches no file, or ""."""
    if pattern.startswith("~"):
        return "a path without `~`, which only shells expand: ${env.HOME}/..."
    if os.path.isdir(os.path.join(folder, pattern)):
        direct, below = os.path.join(pattern, "*"), os.path.join(pattern, "**")
        if any(os.path.isfile(os.path.join(folder, name)) for name in glob.iglob(direct, root_dir=folder)):
            return f"files, not a folder: {direct!r} matches those in it"
        return f"files, not a folder: {below!r} matches those in its folders"
    if pattern.endswith("/*") and glob.glob(pattern, root_dir=folder):
        return f"files, not folders: {pattern + '*'!r} matches those in the folders too"
    if not glob.has_magic(pattern):
        within, name = os.path.split(pattern)
        place = os.path.join(folder, within)
        others = [
            each for each in glob.iglob("*", root_dir=place) if os.path.isfile(os.path.join(place, each))
        ]
        if near := nearest(name, others):
            return f"a file that exists, such as {os.path.join(within, near)!r}"
    return ""


def _matches(pattern: str, folder: Path) -> list[str]:
    if os.path.isfile(os.path.join(folder, pattern)):
        return [pattern]
    names = glob.glob(pattern, root_dir=folder, recursive=True)
    return _once_around(names, pattern, folder) if "**" in pattern else names


def _once_around(names: Sequence[str], pattern: str, folder: Path) -> list[str]:
    """Return the names without those behind a link to a parent folder, which `**` follows 40 times."""
    parts = pattern.split("/")
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    round_again: dict[str, bool] = {}
    for within in {os.path.dirname(name) for name in names}:
        places = within.split("/") if within else []
        above = ["/".join(places[:number]) for number in range(fixed, len(places) + 1)]
        top = "/" if within.startswith("/") else ""
        real = [os.path.realpath(os.path.join(folder, each or top)) for each in above]
        round_again[within] = len(set(real)) < len(real)
    return [name for name in names if not round_again[os.path.dirname(name)]]


def _is_file(name: str, folder: Path) -> bool:
    path = os.path.join(folder, name)
    if os.path.islink(path) and not os.path.exists(path):  # usually not fetched from a store
        raise SourceError(f"{name}: a symbolic link to {os.readlink(path)}, which does not exist", key="path")
    return os.path.isfile(path)


def _examine(name: str, absolute: str) -> DataFile:
    try:
        facts = os.stat(absolute)
    except OSError as error:
        raise SourceError(f"{name}: {error.strerror}", key="path") from error
    return DataFile(name, absolute, 0, facts.st_size, facts.st_mtime_ns)


FILES_CHECKED_MAX = 10_000  # the shards of a source with more files are sent


def is_visible(config: Config) -> bool:
    """Return whether this process sees all files of the config of a portable source, unchanged."""
    if config["kind"] == "range":
        return True
    files = list(_files(config))
    return 0 < len(files) <= FILES_CHECKED_MAX and all(map(_is_here, files))


def hindrance(source: Source) -> str:
    """Return the reason why processes on other hosts can't read a source; "" if they may."""
    if source.why_not_portable:
        return source.why_not_portable
    if source.config["kind"] == "range" or source.fingerprint:
        return ""
    if source.config["kind"] == "source":
        return "its class has no fingerprint(), which shows whether they see the same data"
    files = list(_files(source.config))
    if any(file.mtime_ns == UNPACKED for file in files):
        return "they are compressed, and were unpacked on this host"
    if not files:
        return "files that are elements are read one by one"
    if len(files) > FILES_CHECKED_MAX:
        return f"more than {FILES_CHECKED_MAX:,} files are not checked"
    return ""


def _files(config: Config) -> Iterator[DataFile]:
    """Yield the files of a config; it has none for kind `files`, whose locations name them."""
    yield from (DataFile(*file) for file in config.get("files", ()))
    for places in config.get("arrays", {}).values():
        yield from (DataFile(*place[0]) for place in places)


def _is_here(file: DataFile) -> bool:
    if file.mtime_ns == UNPACKED:  # on the driver's host
        return False
    try:
        file.check()
    except SourceError:
        return False
    return True
