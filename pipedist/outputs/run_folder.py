"""The output folder of a run: its lock, its states, and the moment when its files appear.

    out/NAME/
        late.json, rows.npz, ...     the files of one finished run; a folder, such as rows.zarr, counts as one
        .pipedist/
            run.json                 the run that the folder belongs to, and its state
            results.json             the finished run's document; `pipedist run --json` prints a longer total time
            values/RUN/              its values that are too large for the document, see `document`
            lock                     locked by the run that writes
            new/                     the files of the run in progress
            journal/                 its durable progress, see pipedist.journal

A run writes to `.pipedist/new`. When it is complete, its files replace those of the finished run
before it. So a reader of the folder sees the files of one finished run, and a run that fails or is
killed changes none of them. The states of `run.json`:

    (no folder) --> running --> committing --> finished --> running (a later run) ...
                       |             '-------> failed ----> running
                       '---------------------> failed

- `running` without the lock: a run that was interrupted or killed.
- `committing`: all new files are durable. A process that is killed now loses nothing: the next one
  that opens the folder completes the move, each step of which can be repeated.
- `failed`: a run that ended with an error. Its journal stays, so that it can be resumed. A later run
  replaces it without `--restart` only if the journal has no steps. If single outputs could not be
  written, the folder has the others, all of one complete run, and a resumed run writes them again.

Files that pipedist did not write are neither removed nor replaced, and a folder that is not empty
and has no `.pipedist` is left as it is. Symbolic links below the folder are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Literal, Self

from msgspec import Struct
from msgspec.structs import replace

from pipedist.core.files import link_or_copy, move, remove, remove_tree, sync_folder, try_lock
from pipedist.errors import UsageError
from pipedist.outputs.encoding import Json
from pipedist.outputs.run_record import (
    LIVE,
    PRIVATE,
    RunRecord,
    is_there,
    path_problem,
    read_record,
    read_results,
    reading,
    write_json,
    write_record,
    writing,
)

VALUES = "values"  # the folder in `.pipedist` that has a folder of large values for each run
EXACT = ".values"  # the file among them that has values as they were returned; no stage has this name
TIMINGS = "timings"  # the folder in `.pipedist` of measurements

Found = Literal["", "unfinished", "other"]


class FinishedRun(Struct, frozen=True):
    """A finished run that `--resume` found: its results can be reported.

    Args:
        document: its document, as `pipedist run --json` printed it.
        files: its outputs, absolute paths by relative path.
        since: changes of inputs and modules since then, as lines, which were accepted.
        moved: changes of the platform since then, as lines.
        stored: the files of its large values, by stage.
        values: the file of values as they were returned, None if there is none.
    """

    path: Path
    run_id: str
    document: Json
    files: dict[str, Path]
    since: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    stored: Mapping[str, Path] = {}
    values: Path | None = None


class RunFolder:
    """An output folder that this process writes to, locked.

    Returned by `open_folder`. Leaving the context without `finish` leaves the run unfinished.

    Args:
        path: the folder, absolute.
        lock: file descriptor that holds the lock.
        notice: a message to the user about how the folder was opened, or "".
        found: "unfinished": the run in the folder can be resumed; "other": it is of another spec; `take_over`
            continues it or keeps parts of it. "": the folder is ready for a new run.
        options: the options of the outputs of stages, as JSON.
    """

    def __init__(
        self,
        path: Path,
        lock: int,
        record: RunRecord,
        notice: str = "",
        found: Found = "",
        options: Mapping[str, str] = {},
    ) -> None:
        self._options = options
        self.path = path
        self.notice = notice
        self.found = found
        self._lock = lock
        self._record = record
        self._new = path / PRIVATE / "new"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def journal(self) -> Path:
        return self.path / PRIVATE / "journal"

    @property
    def live(self) -> Path:
        """The folder of the run's status socket, which exists only while the run does."""
        return self.path / PRIVATE / LIVE

    @property
    def timings(self) -> Path:
        """The folder of the measurements of the run, one file for each process that executed it."""
        return self.path / PRIVATE / TIMINGS

    @property
    def values(self) -> Path:
        """The folder of the run's values: those that are too large for its document, and `EXACT`."""
        return self.path / PRIVATE / VALUES / self.run_id

    @property
    def run_id(self) -> str:
        return self._record.run

    def has(self, stage: str, output: str) -> bool:
        """Return whether the output of a stage, at this path, is complete."""
        place = self.path if self._record.complete else self._new
        is_same = self._record.outputs.get(stage) == output and (
            self._record.options.get(stage, "") == self._options.get(stage, "")
        )
        return is_same and (place / output).exists()

    def take_over(
        self,
        run_id: str,
        spec_hash: str,
        files: Sequence[str],
        outputs: Mapping[str, str],
        kept: Collection[str],
    ) -> None:
        """Begin a run that keeps the complete outputs of some stages, at the same paths.

        It can be repeated after a kill.
        """
        old, keep = self._record, {outputs[stage] for stage in kept if self.has(stage, outputs[stage])}
        with writing(self.path):
            self._new.mkdir(exist_ok=True)
            for name in keep if old.complete else ():
                target = self._new / name
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(self.path / name, target)
            _remove_others(self._new, keep, PurePath())  # of other stages, or of a killed process
        self._record = RunRecord(
            "running",
            run_id,
            spec_hash,
            tuple(files),
            _standing(old),
            outputs=dict(outputs),
            options=dict(self._options),
        )
        write_record(self.path, self._record)

    def staged(self, output: str) -> Path:
        """Return the path where an output is written until the run is complete."""
        self._known(output)
        path = self._new / output
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def final(self, output: str) -> Path:
        """Return the final path of an output, absolute."""
        self._known(output)
        return self.path / output

    def finish(self, document: Json, *, failed: bool = False) -> dict[str, Path]:
        """Replace the files of the run before with those of this one.

        If a file can't be moved, the folder is left `committing` or `running`.

        Args:
            document: plain JSON values, kept for `--resume` of the finished run.
            failed: the run is complete, but some of its files could not be written.
        """
        with writing(self.path):
            written = tuple(name for name in self._record.files if (self._new / name).exists())
        write_json(self.path / PRIVATE / "results.json.new", document)
        then: Literal["finished", "failed"] = "failed" if failed else "finished"
        self._record = replace(self._record, state="committing", files=written, then=then)
        write_record(self.path, self._record)
        self._record = _move_all(self.path, self._record)
        with writing(self.values.parent):
            for earlier in self.values.parent.glob("*"):
                if earlier != self.values:
                    remove_tree(earlier)
        return {name: self.path / name for name in written}

    def fail(self, *, resumable: bool) -> None:
        """Record that the run ended with an error; its journal and the earlier files stay.

        If it is `resumable`, its journal has committed steps, and replacing the run requires `--restart`.
        """
        record = self._record
        if record.state == "running":
            self._record = replace(record, state="failed", files=record.previous, resumable=resumable)
            write_record(self.path, self._record)

    def close(self) -> None:
        """Release the lock; harmless twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _known(self, output: str) -> None:
        if output not in self._record.files:
            raise ValueError(f"the folder was opened for {list(self._record.files)}, not for {output!r}")


def open_folder(
    path: Path,
    *,
    run_id: str,
    spec_hash: str,
    outputs: Sequence[str],
    stages: Mapping[str, str] = {},
    options: Mapping[str, str] = {},
    resume: bool | Literal["reuse"] = False,
    restart: bool = False,
    accept: bool = False,
    explain: Callable[[Path], str] | None = None,
    since: Callable[[Path], tuple[Sequence[str], Sequence[str]]] | None = None,
    command: str = "",
) -> RunFolder | FinishedRun:
    """Open and lock an output folder, or return the finished run in it.

    Args:
        spec_hash: digest of the spec, without its `cluster` and `outputs`.
        outputs: the files that the run will write, relative to the folder.
        stages: the stages whose values they have, with their files.
        options: the options of these, as JSON; an output with other options is another one.
        resume: resume the run in the folder, or return it if it is finished; "reuse": also keep the
            unchanged parts of a run of another spec, or of other inputs or modules.
        restart: discard an unfinished or failed run.
        accept: return a finished run although its inputs or modules have changed.
        explain: returns the differences from the spec of the run in the folder, given its journal.
        since: returns the changes since a finished run of the same spec, given its journal: of inputs and
            modules, and of the platform.
        command: the command line of the run without `resume`, for errors; "" if there is none.
    """
    for problem in filter(None, map(path_problem, outputs)):
        raise UsageError(problem)
    if resume and restart:
        raise UsageError("--resume and --restart exclude each other")
    label = path
    if path.parts[:1] == ("~",):
        raise UsageError(
            f"{label}: `~` is expanded only by a shell, at the start of a word. Write the whole path."
        )
    denied: OSError | None = None
    with reading(label):
        if path.exists() and not path.is_dir():
            raise UsageError(
                f"{label} is a file, not an output folder. Choose another one with --output DIR."
            )
        path.mkdir(parents=True, exist_ok=True)
        path = path.resolve()
        _claim(path, label)
        flags = os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            lock = os.open(path / PRIVATE / "lock", os.O_RDWR | os.O_CREAT | flags, 0o666)
        except OSError as error:
            if not resume or error.errno not in (errno.EACCES, errno.EROFS):
                raise
            denied = error  # a finished run can be returned, for which reading is enough
            lock = os.open(path / PRIVATE / "lock", os.O_RDONLY | flags)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock)
        if not try_lock(lock, shared=denied is not None):
            raise UsageError(
                f"another run is writing to {label}. Wait until it ends, or choose another folder with "
                "--output DIR."
            )
        old = read_record(path, label)
        if old is not None and old.state == "committing":
            old = _move_all(path, old)
        is_finished = old is not None and (old.state, old.spec, old.outputs, old.options) == (
            "finished",
            spec_hash,
            stages,
            options,
        )
        if resume and old is not None and is_finished:
            changes = since(path / PRIVATE / "journal") if since is not None else ((), ())
            found = _finished(path, label, old, changes, reuse=resume == "reuse", accept=accept)
            if found is not None:
                return found
        with reading(label):
            if denied is not None:
                raise denied
        previous = _standing(old)
        _check_free(path, label, outputs, previous)
        if resume and old is not None and is_there(path / PRIVATE / "journal" / "journal", label):
            is_same = old.spec == spec_hash and not is_finished
            if is_same or resume == "reuse":
                stack.pop_all()  # RunFolder closes the lock
                return RunFolder(path, lock, old, found="unfinished" if is_same else "other", options=options)
        notice = _decide(
            old, label, spec_hash=spec_hash, resume=resume, restart=restart, explain=explain, command=command
        )
        for name in ("new", "journal", TIMINGS):
            with writing(path / PRIVATE / name):
                remove_tree(path / PRIVATE / name)
                if name != TIMINGS:
                    (path / PRIVATE / name).mkdir()
        record = RunRecord(
            "running",
            run_id,
            spec_hash,
            tuple(outputs),
            previous,
            outputs=dict(stages),
            options=dict(options),
        )
        write_record(path, record)
        stack.pop_all()
        return RunFolder(path, lock, record, notice, options=options)


def _finished(
    path: Path,
    label: Path,
    old: RunRecord,
    changes: tuple[Sequence[str], Sequence[str]],
    *,
    reuse: bool,
    accept: bool,
) -> FinishedRun | None:
    """Return the finished run, None if parts of it are to be executed again, or raise UsageError; see `open_folder`."""
    changed, moved = map(tuple, changes)
    missing = [name for name in old.files if not is_there(path / name, label)]
    if reuse and (missing or changed or moved):
        return None
    if missing:
        raise UsageError(
            f"{label}/{missing[0]} of the finished run {old.run} is missing. --reuse writes it again; --restart runs "
            "everything again."
        )
    if changed and not accept:
        lines = "".join(f"\n    {line}" for line in changed)
        raise UsageError(
            f"the run {old.run} in {label} is finished, but its results are stale, because something has changed "
            f"since then:{lines}\n  To execute again what that affects, use --reuse; to print the results as they "
            "are, --resume --force-code; to execute everything again, omit --resume"
        )
    files = {name: path / name for name in old.files}
    stored = {file.name: file for file in (path / PRIVATE / VALUES / old.run).glob("*")}
    values = stored.pop(EXACT, None)
    by_stage = {file.stem: file for file in stored.values()}
    return FinishedRun(path, old.run, read_results(path, label), files, changed, moved, by_stage, values)


def _standing(old: RunRecord | None) -> tuple[str, ...]:
    return () if old is None else old.previous if old.state == "running" else old.files


def _decide(
    old: RunRecord | None,
    label: Path,
    *,
    spec_hash: str,
    resume: bool | Literal["reuse"],
    restart: bool,
    explain: Callable[[Path], str] | None,
    command: str,
) -> str:
    """Return a notice for the user, or raise UsageError."""
    if resume:
        if old is None:
            return f"nothing to resume in {label}: starting fresh"
        if old.spec == spec_hash:
            return f"run {old.run} in {label} has no journal: starting fresh"
        if resume == "reuse":
            return f"run {old.run} in {label} has no journal, so nothing can be reused: starting fresh"
        differs = explain(label / PRIVATE / "journal") if explain is not None else ""
        raise UsageError(
            f"{label} holds a run of another spec or other parameters (there {old.spec[:12]}, now "
            f"{spec_hash[:12]}), which can't be resumed{differs}\n  --reuse keeps its unchanged "
            "parts, --restart discards it, --output DIR writes to another folder"
        )
    if old is not None and not restart and (old.state == "running" or old.resumable):
        what = "unfinished run" if old.state == "running" else "failed run"
        if old.spec == spec_hash:
            option, does = "--resume", "continues it"
        else:
            option, does = "--reuse", "keeps its unchanged parts"
        line = f"\n  {command} {option}" if command else ""
        raise UsageError(
            f"{label} holds the {what} {old.run}: {option} {does}; --restart discards it and begins again; "
            f"--output DIR writes to another folder{line}"
        )
    return ""


def _claim(path: Path, label: Path) -> None:
    """Check that the folder is pipedist's, or mark an empty one."""
    names = set(os.listdir(path))
    private = path / PRIVATE
    if PRIVATE in names:
        if private.is_symlink() or not private.is_dir():
            raise UsageError(
                f"{label}/{PRIVATE} is not a folder that pipedist made. Choose another one with --output DIR."
            )
    elif names:
        raise UsageError(
            f"{label} is not empty and was not made by pipedist. Choose another folder with --output DIR."
        )
    private.mkdir(exist_ok=True)


def _check_free(path: Path, label: Path, outputs: Sequence[str], previous: Sequence[str]) -> None:
    ours = set(map(PurePath, previous))
    for output in map(PurePath, outputs):
        for name in (output, *output.parents[:-1]):
            there = path / name
            is_folder = name != output and there.is_dir() and not there.is_symlink()
            if name not in ours and os.path.lexists(there) and not is_folder:
                raise UsageError(
                    f"{label}/{name} has the name of an output and was not written by pipedist. Move it, or "
                    "choose another folder with --output DIR."
                )


def _move_all(path: Path, record: RunRecord) -> RunRecord:
    """Replace the previous files with the new ones; can be repeated after a kill."""
    with writing(path):
        for name in record.previous:
            if name not in record.files:
                remove(path, PurePath(name))
        for name in record.files:
            move(path / PRIVATE / "new" / name, path, PurePath(name))
        private = path / PRIVATE
        with contextlib.suppress(FileNotFoundError):  # moved before the kill
            os.replace(private / "results.json.new", private / "results.json")
        remove_tree(private / "new")
        sync_folder(path)
    done = replace(record, state=record.then, previous=(), resumable=record.then == "failed", complete=True)
    write_record(path, done)
    return done


def _remove_others(folder: Path, keep: Collection[str], below: PurePath) -> None:
    """Remove everything in a folder that is not among the outputs to keep."""
    for child in folder.iterdir():
        name = below / child.name
        if str(name) in keep:
            continue
        if child.is_dir() and not child.is_symlink():
            _remove_others(child, keep, name)
            with contextlib.suppress(OSError):  # it has files to keep
                child.rmdir()
        else:
            child.unlink()
