"""Stamps of the files that a run reads, which tell whether they have changed since.

Files of datasets are compared by size and modification time. Other files are compared by content: the
`inputs` of a stage, and existing files whose paths are in its `with`. A file above DIGEST_BYTES_MAX, and all
files after the first DIGESTS_BYTES_MAX, are compared by size, modification time and both ends only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from msgspec import convert

from pipedist.datasets.sources.paths import DataFile, expand, is_remote
from pipedist.errors import UsageError
from pipedist.plan import Plan
from pipedist.spec import GatherSpec, InitFile, InitFunction, UpdateSpec

DIGEST_BYTES_MAX: Final = 64 * 2**20  # a larger file is compared by its size, modification time and both ends

DIGESTS_BYTES_MAX: Final = 256 * 2**20
"""Bytes of all files that are read whole; of later ones only the ends are read."""

END_BYTES: Final = 2**20  # bytes that are read at each end of a file that is not read whole

FINGERPRINT: Final = "the fingerprint of its data"  # in place of the path of a file

Stamp = list[Any]
"""[bytes, mtime in ns] of a file; with its ctime in ns and the SHA-256 of its content if that is compared.

[text] of a fingerprint.
"""


def stamps(
    plan: Plan,
    before: Mapping[str, Mapping[str, Stamp]] = {},
    spec_before: Mapping[str, Any] = {},
    ended_ns: int = 0,
) -> dict[str, dict[str, Stamp]]:
    """Return the stamps of the input files of a plan, by path in the spec and by path.

    Functions may write to files that `with` names, such as logs. These are no inputs: a file that an earlier
    run named and that did not exist when it began, and what was appended to a file before that run ended.

    Args:
        before, spec_before: the stamps and the spec of an earlier run; a file whose size and times have not
            changed is not read again.
        ended_ns: when it ended or was killed.
    """
    spec, folder = plan.spec, Path(plan.spec.folder)
    known = {path: stamp for files in before.values() for path, stamp in files.items()}
    written = {os.path.abspath(path) for path in _texts_in(spec_before, folder)} - known.keys()
    found: dict[str, dict[str, Stamp]] = {}
    read: dict[str, Stamp] = {}
    read_bytes = 0
    declared: set[str] = set()
    for name, dataset in spec.datasets.items():
        fingerprint = plan.sources[name].fingerprint
        by_files = "path" in dataset.config and not fingerprint
        files = expand(dataset.config["path"], folder) if by_files else _database(plan, name)
        plain: dict[str, Stamp] = {file.path: [file.size_bytes, file.mtime_ns] for file in files}
        plain |= {FINGERPRINT: [fingerprint]} if fingerprint else {}
        with_ = None if by_files or fingerprint else dataset.config.get("with")
        found[f"datasets.{name}"] = plain | {path: [] for path in _paths_in(with_, folder)}
    for name, stage in spec.stages.items():
        paths = list(_paths_in(getattr(stage, "with_", None), folder))
        if not isinstance(stage, GatherSpec) and stage.inputs:
            inputs = [file.path for file in expand(stage.inputs, folder)]
            declared.update(inputs)
            paths += inputs
        found[f"stages.{name}"] = {path: [] for path in paths}
        if isinstance(stage, UpdateSpec) and isinstance(stage.init, InitFile):
            file = expand(stage.init.path, folder)[0]
            found[f"stages.{name}"][file.path] = [file.size_bytes, file.mtime_ns]
        elif isinstance(stage, UpdateSpec) and isinstance(stage.init, InitFunction):
            found[f"stages.{name}"] |= {path: [] for path in _paths_in(stage.init.with_, folder)}
    for files_there in found.values():
        for path in [path for path, stamp in files_there.items() if not stamp]:
            if path in written - declared:
                del files_there[path]
                continue
            if path not in read:
                until_ns = 0 if path in declared else ended_ns
                read[path] = _stamp(path, read_bytes, known.get(path), until_ns)
                read_bytes += read[path][0]
            files_there[path] = read[path]
    return {place: files for place, files in found.items() if files}


def _database(plan: Plan, name: str) -> list[DataFile]:
    """Return the file that a query reads, of a dataset without a `path`."""
    config = plan.sources[name].config
    return convert(config["files"], list[DataFile]) if config.get("kind") == "sql" else []


def _paths_in(value: object, folder: Path) -> Iterator[str]:
    """Yield the absolute paths of the existing files that a value names, relative to a folder."""
    for path in _texts_in(value, folder):
        try:
            is_file = os.path.isfile(path)
        except ValueError:  # a text with NUL
            continue
        if is_file:
            yield os.path.abspath(path)


def _texts_in(value: object, folder: Path) -> Iterator[str]:
    """Yield the texts in a value as paths relative to a folder."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item, folder)
    elif isinstance(value, str | os.PathLike) and isinstance(text := os.fspath(value), str) and text:
        yield os.path.join(folder, text)


def _stamp(path: str, read_bytes: int, before: Stamp | None, ended_ns: int) -> Stamp:
    """Return the stamp of a file whose content is compared; that of `before` if it was only appended to."""
    try:
        with open(path, "rb") as file:
            now = os.fstat(file.fileno())
            head = [now.st_size, now.st_mtime_ns, now.st_ctime_ns]
            if before and before[:3] == head:
                return before
            if before and len(before) == 4 and before[0] < now.st_size and now.st_mtime_ns <= ended_ns:
                start = hashlib.sha256(file.read(before[0]) if before[0] <= DIGEST_BYTES_MAX else b"")
                if start.hexdigest() == before[3]:
                    return before
                file.seek(0)
            if now.st_size <= DIGEST_BYTES_MAX and read_bytes + now.st_size <= DIGESTS_BYTES_MAX:
                return [*head, hashlib.file_digest(file, "sha256").hexdigest()]
            found = hashlib.sha256(str(head[:2]).encode() + file.read(END_BYTES))
            file.seek(max(0, now.st_size - END_BYTES))
            found.update(file.read(END_BYTES))
            return [*head, found.hexdigest()]
    except OSError as error:
        raise UsageError(f"the input {path} can't be read: {error.strerror or error}") from error


def changed_files(
    there: Mapping[str, Mapping[str, Stamp]],
    now: Mapping[str, Mapping[str, Stamp]],
    places: Iterable[str],
    *,
    called: tuple[str, str] | None = None,
) -> Iterator[str]:
    """Yield a line for each file that has changed since an earlier run, by path in the spec.

    `called` are the names of two runs, none of which is earlier.
    """
    new, gone, changed = ("is new", "is missing now", "has changed")
    if called is not None:
        new, gone, changed = f"is only in {called[1]}", f"is only in {called[0]}", "differs"
    for place in places:
        before, after = there.get(place, {}), now.get(place, {})
        for path in dict.fromkeys((*before, *after)):
            a, b = before.get(path), after.get(path)
            if a is None or a == b or (b is not None and len(a) == len(b) == 4 and a[3] == b[3]):
                if a is None:
                    yield f"{place}: {path} {new}"
            elif b is None:
                yield f"{place}: {path} {gone}"
            elif len(a) == 4 or path == FINGERPRINT:
                yield f"{place}: {path} {changed}"
            else:
                names = ("then", "now") if called is None else (f"in {called[0]}", f"in {called[1]}")
                if a[0] != b[0]:
                    what = f"size {a[0]:,} bytes {names[0]}, {b[0]:,} {names[1]}"
                elif is_remote(path):
                    what = "its server reports another version"
                else:
                    what = f"modification time {_time(a[1])} {names[0]}, {_time(b[1])} {names[1]}"
                yield f"{place}: {path} {changed}: {what}"


def _time(ns: int) -> str:
    seconds, rest = divmod(ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09}Z"
