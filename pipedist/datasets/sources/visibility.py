"""Whether a process on another host can read a source itself: it sees the very same files there."""

from __future__ import annotations

from collections.abc import Iterator

from pipedist.datasets.sources.base import Config, Source, SourceError
from pipedist.datasets.sources.paths import UNPACKED, DataFile

FILES_LOOKED_AT_MAX = 10_000
"""A source of more files is not looked at: its shards travel."""


def is_visible(config: Config) -> bool:
    """Return whether everything that a reader needs is here.

    Files count as the same that have the same path, size and time of change.

    Args:
        config: of a portable source.
    """
    if config["kind"] == "range":
        return True
    files = list(_files(config))
    return 0 < len(files) <= FILES_LOOKED_AT_MAX and all(map(_is_here, files))


def hindrance(source: Source) -> str:
    """Return why no process on another host can read a source, for people; "" if one may be able to."""
    if source.travels:
        return source.travels
    if source.config["kind"] == "range":
        return ""
    files = list(_files(source.config))
    if any(file.mtime_ns == UNPACKED for file in files):
        return "they are packed, and were unpacked on this host"
    if not files:
        return "files that are elements are read one by one"
    if len(files) > FILES_LOOKED_AT_MAX:
        return f"more than {FILES_LOOKED_AT_MAX:,} files are not looked at"
    return ""


def _files(config: Config) -> Iterator[DataFile]:
    """Yield the files that a configuration names; of `files`, which come one by one, none."""
    yield from map(DataFile.from_config, config.get("files", ()))
    for places in config.get("arrays", {}).values():
        yield from (DataFile.from_config(place[0]) for place in places)


def _is_here(file: DataFile) -> bool:
    if file.mtime_ns == UNPACKED:  # in a folder of the scheduler's own
        return False
    try:
        file.check()
    except SourceError:
        return False
    return True
