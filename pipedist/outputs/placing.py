"""The files of a complete run take the place of those of the run before it.

Every move may have been made already, before a kill: so it can be done again until it is complete. Names
below the folder are resolved without following symbolic links: outputs stay inside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from pipedist.outputs.files import sync_folder, writing
from pipedist.outputs.run_record import PRIVATE, RunRecord, write_record

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def put_in_place(path: Path, record: RunRecord) -> RunRecord:
    """Move the new files into place; may be called again after a kill in the middle."""
    with writing(path):
        for name in record.previous:
            if name not in record.files:
                _remove(path, PurePath(name))
        for name in record.files:
            _move(path, PurePath(name))
        private = path / PRIVATE
        with contextlib.suppress(FileNotFoundError):  # moved before the kill
            os.replace(private / "results.json.new", private / "results.json")
        shutil.rmtree(private / "new", onerror=gone_is_fine)
        if record.then == "failed":  # what it could give is in its place: there is nothing to continue
            shutil.rmtree(private / "journal", onerror=gone_is_fine)
        sync_folder(path)
    done = RunRecord(record.then, record.run, record.spec, record.files)
    write_record(path, done)
    return done


def _move(path: Path, name: PurePath) -> None:
    source = path / PRIVATE / "new" / name
    with _parent(path, name, make=True) as target:
        with contextlib.suppress(FileNotFoundError):  # moved before the kill
            os.replace(source, name.name, dst_dir_fd=target)
        os.fsync(target)


def _remove(path: Path, name: PurePath) -> None:
    with contextlib.suppress(FileNotFoundError), _parent(path, name, make=False) as target:
        os.unlink(name.name, dir_fd=target)


@contextlib.contextmanager
def _parent(path: Path, name: PurePath, *, make: bool) -> Iterator[int]:
    """Open the folder that holds `path/name`, following no symbolic link below `path`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in name.parts[:-1]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
            below = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def gone_is_fine(_function: Any, _path: str, info: Any) -> None:
    """Raise what `shutil.rmtree` met, unless it is that a file is gone already; its `onerror`."""
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]
