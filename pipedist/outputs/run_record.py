"""`run.json`: the run that an output folder belongs to, and its state.

Paths in it are relative, and checked when they are read: files that are listed there are removed
by a later run. Errors of the operating system are reported by the name that the user gave.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Literal

from msgspec import Struct, convert
from msgspec.structs import asdict

from pipedist.core.files import replace_file
from pipedist.errors import OutputError, UsageError
from pipedist.outputs.encoding import Json, text

PRIVATE = ".pipedist"  # the folder inside an output folder that belongs to pipedist

LIVE = "live"  # the folder in it that exists only while the run does

_FORMAT = 1
NEAR_MAX = 3  # runs that an error names
LOOKED_AT_MAX = 100
_EXCERPT = 20  # characters of a text around the one that an error is about
RunState = Literal["running", "committing", "finished", "failed"]


class RunRecord(Struct, frozen=True):
    """The content of run.json.

    Args:
        state: see `pipedist.outputs.run_folder`.
        spec: digest of its spec.
        files: the outputs of the run, relative paths.
        previous: the outputs of the run before it, which are still in the folder.
        then: the state after `committing`.
        resumable: the run failed, and its journal has committed steps.
        outputs: the output of each stage, a relative path.
        options: the options of these outputs, as JSON; missing: none.
        complete: the run has ended, and `files` are its own.
    """

    state: RunState
    run: str
    spec: str
    files: tuple[str, ...]
    previous: tuple[str, ...] = ()
    then: Literal["finished", "failed"] = "finished"
    resumable: bool = False
    outputs: Mapping[str, str] = {}
    options: Mapping[str, str] = {}
    complete: bool = False


def read_record(path: Path, label: Path) -> RunRecord | None:
    """Return the content of a folder's run.json; errors name it `label`."""
    with reading(label):
        try:
            data = (path / PRIVATE / "run.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        value: Mapping[str, Any] = json.loads(data)
        if value["format"] != _FORMAT:
            raise UsageError(
                f"{label} was written by another version of pipedist (format {value['format']}, here "
                f"{_FORMAT}). Choose another folder with --output DIR."
            )
        record = convert(value, RunRecord)
        for problem in filter(None, map(path_problem, record.files + record.previous)):
            raise ValueError(problem)
        return record
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{label}/{PRIVATE}/run.json can't be read ({error!r}). Choose another folder with --output DIR."
        ) from error


def existing_record(path: Path, note: str = "") -> RunRecord:
    """Return the content of a folder's run.json.

    Args:
        path: the output folder of a run, as given by the user.
        note: further sentences of the error if it holds no run.

    Raises:
        UsageError: there is no run in the folder; it names runs near by.
    """
    record = read_record(path, path)
    if record is None:
        runs = list(
            dict.fromkeys(str(found) for folder in (path, Path("out")) for found in _runs_below(folder))
        )
        such = ", ".join(runs[:NEAR_MAX]) or "out/NAME"
        place = path.resolve() if path.name in ("", "..") else path  # "in .." would end like a sentence
        raise UsageError(
            f"there is no run in {place}. RUN is the output folder of a run, such as {such}{note}"
        )
    return record


def _runs_below(folder: Path) -> Iterator[Path]:
    """Return the output folders of runs in a folder, by name."""
    found = islice(folder.glob(f"*/{PRIVATE}/run.json"), LOOKED_AT_MAX)
    return (file.parent.parent for file in sorted(found))


def read_results(path: Path, label: Path) -> Mapping[str, Any]:
    """Return the document of the finished run; errors name its folder `label`."""
    try:
        document: Mapping[str, Any] = json.loads((path / PRIVATE / "results.json").read_bytes())
        if not isinstance(document, dict) or "run" not in document:
            raise ValueError("it is not the document of a run")
    except (OSError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{label}/{PRIVATE}/results.json of the finished run can't be read ({why}). "
            "Use `pipedist run --restart` to run it again."
        ) from error
    return document


def write_record(path: Path, record: RunRecord) -> None:
    write_json(path / PRIVATE / "run.json", {"format": _FORMAT, **asdict(record)})


def write_json(path: Path, value: Json) -> None:
    """Replace a document, atomically and durably."""
    with writing(path):
        replace_file(path, text(value, sort_keys=False).encode() + b"\n")


def is_there(path: Path, label: Path) -> bool:
    with reading(label):
        return path.exists()


def path_problem(path: str) -> str | None:
    """Return why a path can't be that of an output, or None."""
    name = PurePath(path)
    if not name.parts or "\0" in path or path.endswith("/"):
        return f"an output must be the path of a file, got {path!r}"
    if name.is_absolute() or ".." in name.parts:
        return f"output {path!r} is not below the run's folder (--output DIR chooses the folder)"
    if name.parts[0] == PRIVATE:
        return f"the folder {PRIVATE} belongs to pipedist: choose another name"
    return None


@contextlib.contextmanager
def reading(label: Path) -> Iterator[None]:
    """Turn OSError into UsageError for an unusable folder, or OutputError for a failing disk."""
    try:
        yield
    except OSError as error:
        kind = OutputError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UsageError
        raise kind(f"can't use {label} as output folder: {error.strerror or error}") from error


@contextlib.contextmanager
def writing(label: object) -> Iterator[None]:
    """Turn an OSError, or a text that a library can't encode, into an OutputError that names the file."""
    try:
        yield
    except UnicodeEncodeError as error:
        text = error.object[max(0, error.start - _EXCERPT) : error.end + _EXCERPT]
        raise OutputError(
            f"can't write {label}: the text {text!r} has half of a surrogate pair, which UTF-8 lacks. Write .jsonl or "
            ".json, or replace it: text.encode(errors='replace').decode()."
        ) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = ". Free some, or give a folder on another disk with --output DIR" if full else ""
        raise OutputError(f"can't write {label}: {error.strerror or error}{advice}") from error
