"""The folder that a run writes into: who may write there, and when its files appear.

    out/NAME/
        late.json, rows.npz, ...     the files of ONE finished run
        .pipedist/
            run.json                 which run the folder belongs to, and its state
            results.json             the finished run's document, as `pipedist run --json` prints it
            lock                     held (flock) by the run that is writing
            new/                     the files of the run that is being made
            journal/                 what of it is durable, see pipedist.journal

A run writes into `.pipedist/new`; when it is complete, the files of the finished run before it
are replaced by the new ones. So a reader of the folder sees the files of a finished run, and a
run that fails or is killed costs nothing that was there before. The states of `run.json`:

    (no folder) --> running --> committing --> finished --> running (a later run) ...
                       |             '-------> failed ----> running
                       '---------------------> failed

`failed` is a run that ended with an error. Its journal stays, so that it can be continued when the cause
is mended; where the journal has steps, a later run takes its place only if it is told to, and otherwise,
as there is nothing to lose, unasked. It may have left files: where one output could not be written, the
others are those of the same complete run. `running` without the lock is a run that was interrupted or
killed. Neither is finished.

A kill while `committing` loses nothing: all new files are on disk, and whoever opens the folder
next completes the move (`pipedist.outputs.placing`). Files that pipedist did not write are neither
removed nor replaced, and a folder that is not empty and has no `.pipedist` is not touched at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path, PurePath
from types import TracebackType
from typing import Literal, Self

from msgspec import Struct

from pipedist.errors import UsageError
from pipedist.outputs.encoding import Json
from pipedist.outputs.files import writing
from pipedist.outputs.formats import path_problem
from pipedist.outputs.placing import gone_is_fine, put_in_place
from pipedist.outputs.run_record import (
    LIVE,
    PRIVATE,
    RunRecord,
    is_there,
    read_record,
    read_results,
    reading,
    write_json,
    write_record,
)


class FinishedRun(Struct, frozen=True):
    """A run that `--resume` found finished: there is nothing to do but to show it.

    Args:
        path: its folder, absolute.
        run_id: its id.
        document: its document, as `pipedist run --json` printed it.
        files: its outputs, absolute paths by relative path.
        since: what has changed since then, as lines.
    """

    path: Path
    run_id: str
    document: Json
    files: dict[str, Path]
    since: tuple[str, ...] = ()


class RunFolder:
    """An output folder that this process is writing into; it holds the folder's lock.

    Made by `open_folder`. Leaving the context without `finish` leaves the run unfinished.

    Args:
        path: the folder, absolute.
        lock: file descriptor that holds the lock.
        record: what run.json says now.
        notice: what the user should know about how the folder was opened, or "".
        found: the run that is there is to be continued, or was of another spec, and parts of it are to
            be taken over by `take_over`; "": the folder is ready for a run that begins.
    """

    def __init__(
        self,
        path: Path,
        lock: int,
        record: RunRecord,
        notice: str,
        found: Literal["", "unfinished", "other"] = "",
    ) -> None:
        self.path = path
        self.notice = notice
        self.found = found
        self._lock = lock
        self._record = record

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def journal(self) -> Path:
        """The folder of the journal."""
        return self.path / PRIVATE / "journal"

    @property
    def live(self) -> Path:
        """A folder that exists only while the run does: where it can be asked what it waits for."""
        return self.path / PRIVATE / LIVE

    @property
    def run_id(self) -> str:
        """The id of the run that the folder belongs to."""
        return self._record.run

    def has(self, output: str) -> bool:
        """Return whether a file is there that the earlier run has completed."""
        if self._record.state == "finished":
            return output in self._record.files and (self.path / output).is_file()
        return (self.path / PRIVATE / "new" / output).is_file()

    def take_over(self, run_id: str, spec_hash: str, outputs: Sequence[str], kept: Collection[str]) -> None:
        """Begin a run which goes on with files of the run of another spec that is there.

        Args:
            run_id, spec_hash, outputs: as for `open_folder`.
            kept: those of the outputs that are as they were, complete.

        Raises:
            OutputError: the disk is full, or fails.
        """
        old, new = self._record, self.path / PRIVATE / "new"
        with writing(self.path):
            new.mkdir(exist_ok=True)
            if old.state == "finished":
                for name in kept:
                    _copy(self.path / name, new / name)
            for path in [path for path in new.rglob("*") if path.is_file()]:
                if str(path.relative_to(new)) not in kept:
                    path.unlink()
        self._record = RunRecord("running", run_id, spec_hash, tuple(outputs), _standing(old))
        write_record(self.path, self._record)
        self.found = "unfinished"

    def staged(self, output: str) -> Path:
        """Return where the file of an output is written until the run is complete.

        Args:
            output: one of the outputs that the folder was opened for.
        """
        self._known(output)
        path = self.path / PRIVATE / "new" / output
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def final(self, output: str) -> Path:
        """Return where the file of an output will be, absolute."""
        self._known(output)
        return self.path / output

    def finish(self, document: Json, *, failed: bool = False) -> dict[str, Path]:
        """Replace the files of the run before by those of this one.

        Args:
            document: plain JSON values, kept for `--resume` of the finished run.
            failed: the run is complete but for some of its files, which are not there.

        Returns:
            The outputs that were written, absolute paths by relative path.

        Raises:
            OutputError: a file can't be moved; the folder is left `committing` or `running`.
        """
        new = self.path / PRIVATE / "new"
        with writing(self.path):
            written = tuple(name for name in self._record.files if (new / name).is_file())
        write_json(self.path / PRIVATE / "results.json.new", document)
        record = self._record
        then: Literal["finished", "failed"] = "failed" if failed else "finished"
        self._record = RunRecord("committing", record.run, record.spec, written, record.previous, then)
        write_record(self.path, self._record)
        self._record = put_in_place(self.path, self._record)
        return {name: self.path / name for name in written}

    def fail(self, *, resumable: bool) -> None:
        """Say that the run ended with an error: what it has in its journal stays, and the files before it.

        Args:
            resumable: its journal has steps, which are not to be lost unasked.

        Raises:
            OutputError: the folder can't be written; its run counts as unfinished.
        """
        record = self._record
        if record.state == "running":
            self._record = RunRecord("failed", record.run, record.spec, record.previous, resumable=resumable)
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
    resume: bool | Literal["reuse"] = False,
    restart: bool = False,
    explain: Callable[[Path], str] | None = None,
    since: Callable[[Path], Sequence[str]] | None = None,
) -> RunFolder | FinishedRun:
    """Open an output folder for a run, and lock it.

    Args:
        path: the folder; it and its parents are made where they are missing.
        run_id: id of the run.
        spec_hash: digest of the spec, without its `cluster`.
        outputs: the files that the run will write, relative to the folder.
        resume: continue the run that is there; of a finished one, return it; with "reuse", go on with
            what a run of another spec, or one that something has changed since, can give.
        restart: discard the unfinished run that is there, or the one that failed.
        explain: says what differs where the run that is there is of another spec; it gets the folder of
            that run's journal.
        since: says what has changed since a finished run of the same spec; it gets the same folder.

    Returns:
        The folder to write into; or, with `resume`, the finished run of the same spec.

    Raises:
        UsageError: the folder can't be made or read, or is not pipedist's, another run is
            writing into it, it holds an unfinished run, or a failed one that can be continued, and
            neither `resume` nor `restart` says what to do, it holds a run of another spec and is
            to be resumed, a file of a finished run is gone, or a file of somebody else is in the way.
        OutputError: the disk is full, or fails.
    """
    for problem in filter(None, map(path_problem, outputs)):
        raise UsageError(problem)
    if resume and restart:
        raise UsageError("--resume and --restart exclude each other")
    shown = path
    if path.parts[:1] == ("~",):
        raise UsageError(
            f"{shown}: `~` is known to shells only, where nothing is before it: write the whole path"
        )
    with reading(shown):
        if path.exists() and not path.is_dir():
            raise UsageError(f"{shown} is a file, not an output folder: choose another --output DIR")
        path.mkdir(parents=True, exist_ok=True)
        path = path.resolve()
        _claim(path, shown)
        lock = os.open(path / PRIVATE / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another run is writing into {shown}: wait for its end, or choose another folder "
                "with --output DIR"
            ) from None
        old = read_record(path, shown)
        if old is not None and old.state == "committing":
            old = put_in_place(path, old)
        if resume and old is not None and old.state == "finished" and old.spec == spec_hash:
            gone = [name for name in old.files if not is_there(path / name, shown)]
            changed = tuple(since(path / PRIVATE / "journal")) if since is not None else ()
            if resume != "reuse" or not (gone or changed):
                return _finished(path, old, shown, gone, changed)
        previous = _standing(old)
        _check_free(path, shown, outputs, previous)
        if resume and old is not None and is_there(path / PRIVATE / "journal" / "journal", shown):
            if old.spec == spec_hash and old.state != "finished":
                record = RunRecord("running", old.run, spec_hash, tuple(outputs), previous)
                _clear_partial(path)
                write_record(path, record)
                stack.pop_all()  # the lock is the folder's now
                return RunFolder(path, lock, record, "", "unfinished")
            if resume == "reuse":
                stack.pop_all()
                return RunFolder(path, lock, old, "", "other")
        notice = _decide(old, shown, spec_hash=spec_hash, resume=resume, restart=restart, explain=explain)
        with writing(path):
            for name in ("new", "journal"):
                shutil.rmtree(path / PRIVATE / name, onerror=gone_is_fine)
                (path / PRIVATE / name).mkdir()
        record = RunRecord("running", run_id, spec_hash, tuple(outputs), previous)
        write_record(path, record)
        stack.pop_all()
        return RunFolder(path, lock, record, notice)


def _standing(old: RunRecord | None) -> tuple[str, ...]:
    """Return the outputs of an earlier run that are in the folder."""
    return () if old is None else old.previous if old.state == "running" else old.files


def _clear_partial(path: Path) -> None:
    """Remove what a killed process was writing: `AtomicFile`'s, of no use to anybody."""
    with writing(path):
        new = path / PRIVATE / "new"
        new.mkdir(exist_ok=True)
        for partial in list(new.rglob(".*.partial")):
            partial.unlink()


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)


def _decide(
    old: RunRecord | None,
    shown: Path,
    *,
    spec_hash: str,
    resume: bool | Literal["reuse"],
    restart: bool,
    explain: Callable[[Path], str] | None,
) -> str:
    """Return the notice for the user, or refuse."""
    if resume:
        if old is None:
            return f"nothing to resume in {shown}: starting fresh"
        if old.spec == spec_hash:
            return f"the run {old.run} in {shown} left no journal: starting fresh"
        if resume == "reuse":
            return f"the run {old.run} in {shown} left no journal, so nothing can be reused: starting fresh"
        differs = explain(shown / PRIVATE / "journal") if explain is not None else ""
        raise UsageError(
            f"{shown} holds a run of another spec or other parameters (there {old.spec[:12]}, now "
            f"{spec_hash[:12]}), which can't be resumed{differs}\n  --resume=reuse goes on with what did not "
            "change, --restart discards it, --output DIR writes elsewhere"
        )
    if old is not None and not restart and (old.state == "running" or old.resumable):
        what = "unfinished run" if old.state == "running" else "failed run"
        same = old.spec == spec_hash
        on = "--resume continues it" if same else "--resume=reuse goes on with what did not change in it"
        raise UsageError(
            f"{shown} holds the {what} {old.run}: {on}; --restart discards it and begins again; "
            "--output DIR writes elsewhere"
        )
    return ""


def _claim(path: Path, shown: Path) -> None:
    """Make sure that the folder is pipedist's, or make an empty one so."""
    names = set(os.listdir(path))
    private = path / PRIVATE
    if PRIVATE in names:
        if private.is_symlink() or not private.is_dir():
            raise UsageError(
                f"{shown}/{PRIVATE} is not a folder that pipedist made: choose another --output DIR"
            )
    elif names:
        raise UsageError(
            f"{shown} is not empty and was not made by pipedist, so nothing in it is touched: "
            "choose another folder with --output DIR"
        )
    private.mkdir(exist_ok=True)


def _check_free(path: Path, shown: Path, outputs: Sequence[str], previous: Sequence[str]) -> None:
    ours = set(map(PurePath, previous))
    for output in map(PurePath, outputs):
        for name in (output, *output.parents[:-1]):
            there = path / name
            is_folder = name != output and there.is_dir() and not there.is_symlink()
            if name not in ours and os.path.lexists(there) and not is_folder:
                raise UsageError(
                    f"{shown}/{name} is in the way of an output and was not written by pipedist: move it, or "
                    "choose another folder with --output DIR"
                )


def _finished(
    path: Path, record: RunRecord, shown: Path, gone: Sequence[str], since: tuple[str, ...]
) -> FinishedRun:
    if gone:
        raise UsageError(
            f"{shown}/{gone[0]} of the finished run {record.run} is not there any more: --resume=reuse "
            "makes it again, and --restart everything"
        )
    document = read_results(path, shown)
    return FinishedRun(path, record.run, document, {name: path / name for name in record.files}, since)
