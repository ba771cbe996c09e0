"""`run.json`: which run an output folder belongs to, and its state."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from pipedist.errors import OutputError, UsageError
from pipedist.outputs.encoding import Json, text
from pipedist.outputs.files import AtomicFile, writing
from pipedist.outputs.formats import path_problem

PRIVATE = ".pipedist"
"""The folder inside an output folder that belongs to pipedist."""

LIVE = "live"
"""The folder in it that is there only while the run is."""

_FORMAT = 1
State = Literal["running", "committing", "finished", "failed"]


class RunRecord(Struct, frozen=True):
    """What run.json says.

    Args:
        state: see the module.
        run: id of the run.
        spec: digest of its spec.
        files: the outputs of the run, relative paths.
        previous: the outputs of the run before it, which are still in the folder.
        then: the state after `committing`.
        resumable: of a run that failed: its journal has steps that need not be done again.
    """

    state: State
    run: str
    spec: str
    files: tuple[str, ...]
    previous: tuple[str, ...] = ()
    then: Literal["finished", "failed"] = "finished"
    resumable: bool = False


def read_record(path: Path, shown: Path) -> RunRecord | None:
    """Return what a folder's run.json says, None where there is none.

    Args:
        shown: the folder, as errors call it.

    Raises:
        UsageError: it can't be read, or is another version's.
        OutputError: the disk fails.
    """
    with reading(shown):
        try:
            data = (path / PRIVATE / "run.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        value: Mapping[str, Any] = json.loads(data)
        if value["format"] != _FORMAT:
            raise UsageError(
                f"{shown} was written by another version of pipedist (format {value['format']}, here "
                f"{_FORMAT}): choose another folder with --output DIR"
            )
        files, previous = tuple(value["files"]), tuple(value["previous"])
        for problem in filter(None, map(path_problem, files + previous)):
            raise ValueError(problem)  # what is listed there is removed one day
        then = value.get("then", "finished")
        resumable = value.get("resumable") is True
        return RunRecord(value["state"], value["run"], value["spec"], files, previous, then, resumable)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{shown}/{PRIVATE}/run.json can't be read ({error!r}): choose another folder with --output DIR"
        ) from error


def read_results(path: Path, shown: Path) -> Mapping[str, Any]:
    """Return the document of the finished run in a folder.

    Args:
        shown: the folder, as errors call it.

    Raises:
        UsageError: it is not there, or can't be read.
    """
    try:
        document: Mapping[str, Any] = json.loads((path / PRIVATE / "results.json").read_bytes())
        if not isinstance(document, dict) or "run" not in document:
            raise ValueError("it is no document of a run")
    except (OSError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{shown}/{PRIVATE}/results.json, of its finished run, can't be read ({why}): "
            "pipedist run --restart makes it again"
        ) from error
    return document


def write_record(path: Path, record: RunRecord) -> None:
    """Replace a folder's run.json.

    Raises:
        OutputError: it can't be written.
    """
    value = {
        "format": _FORMAT,
        "state": record.state,
        "run": record.run,
        "spec": record.spec,
        "files": list(record.files),
        "previous": list(record.previous),
        "then": record.then,
        "resumable": record.resumable,
    }
    write_json(path / PRIVATE / "run.json", value)


def write_json(path: Path, value: Json) -> None:
    """Write a document, durably, whole or not at all.

    Raises:
        OutputError: it can't be written.
    """
    out = AtomicFile(path)
    try:
        with writing(path):
            out.file.write(text(value, sort_keys=False).encode() + b"\n")
        out.commit()
    finally:
        out.abort()


def is_there(path: Path, shown: Path) -> bool:
    """Return whether a file is there.

    Args:
        shown: the folder, as errors call it.

    Raises:
        UsageError: a folder on the way can't be looked into.
        OutputError: the disk fails.
    """
    with reading(shown):
        return path.is_file()


@contextlib.contextmanager
def reading(shown: Path) -> Iterator[None]:
    """Turn the operating system's errors into those of a user's choice of folder, or of a disk that fails."""
    try:
        yield
    except OSError as error:
        # a place that can't be used is a mistake of the command line, a disk that fails is none
        kind = OutputError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UsageError
        raise kind(f"can't use {shown} as output folder: {error.strerror or error}") from error
