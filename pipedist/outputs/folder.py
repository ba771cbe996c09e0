"""The folder that a run writes into: who may write there, and when its files appear.

    out/NAME/
        late.json, rows.npz, ...     the files of ONE finished run
        .pipedist/
            run.json                 which run the folder belongs to, and its state
            results.json             the finished run's document, as `pipedist run --json` prints it
            lock                     held (flock) by the run that is writing
            new/                     the files of the run that is being made

A run writes into `.pipedist/new`; when it is complete, the files of the finished run before it
are replaced by the new ones. So a reader of the folder sees the files of a finished run, and a
run that fails or is killed costs nothing that was there before. The states of `run.json`:

    (no folder) --> running --> committing --> finished --> running (a later run) ...
                       |             '-------> failed ----> running
                       '---------------------> failed

`failed` is a run that ended with an error: it is over, and nothing of it is waiting to be
continued, so a later run takes its place without being told to. It may have left files: where
one output could not be written, the others are those of the same complete run. `running` without
the lock is a run that was interrupted or killed: unfinished.

A kill while `committing` loses nothing: all new files are on disk, and whoever opens the folder
next completes the move. Files that pipedist did not write are neither removed nor replaced, and
a folder that is not empty and has no `.pipedist` is not touched at all. Names below the folder
are resolved without following symbolic links: outputs stay inside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Literal, Self

from pipedist.errors import OutputError, UsageError
from pipedist.outputs.encoding import Json, text
from pipedist.outputs.files import AtomicFile, sync_folder, writing
from pipedist.outputs.formats import path_problem
from pipedist.records import record

PRIVATE = ".pipedist"
"""The folder inside an output folder that belongs to pipedist."""

_FORMAT = 1
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
State = Literal["running", "committing", "finished", "failed"]


@record
class _Record:
    """What run.json says.

    Args:
        state: see the module.
        run: id of the run.
        spec: digest of its spec.
        files: the outputs of the run, relative paths.
        previous: the outputs of the run before it, which are still in the folder.
        then: the state after `committing`.
    """

    state: State
    run: str
    spec: str
    files: tuple[str, ...]
    previous: tuple[str, ...] = ()
    then: Literal["finished", "failed"] = "finished"


@record
class FinishedRun:
    """A run that `--resume` found finished: there is nothing to do but to show it.

    Args:
        path: its folder, absolute.
        run_id: its id.
        document: its document, as `pipedist run --json` printed it.
        files: its outputs, absolute paths by relative path.
    """

    path: Path
    run_id: str
    document: Json
    files: dict[str, Path]


class RunFolder:
    """An output folder that this process is writing into; it holds the folder's lock.

    Made by `open_folder`. Leaving the context without `finish` leaves the run unfinished.

    Args:
        path: the folder, absolute.
        lock: file descriptor that holds the lock.
        record: what run.json says now.
        notice: what the user should know about how the folder was opened, or "".
    """

    def __init__(self, path: Path, lock: int, record: _Record, notice: str) -> None:
        self.path = path
        self.notice = notice
        self._lock = lock
        self._record = record

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        _write_json(self.path / PRIVATE / "results.json.new", document)
        record = self._record
        then: Literal["finished", "failed"] = "failed" if failed else "finished"
        self._record = _Record("committing", record.run, record.spec, written, record.previous, then)
        _write_record(self.path, self._record)
        self._record = _commit(self.path, self._record)
        return {name: self.path / name for name in written}

    def fail(self) -> None:
        """Say that the run ended with an error: nothing of it is left; the files before it stay.

        Raises:
            OutputError: the folder can't be written; its run counts as unfinished.
        """
        record = self._record
        if record.state == "running":
            with writing(self.path):
                shutil.rmtree(self.path / PRIVATE / "new", onerror=_gone_is_fine)
            self._record = _Record("failed", record.run, record.spec, record.previous)
            _write_record(self.path, self._record)

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
    resume: bool = False,
    restart: bool = False,
) -> RunFolder | FinishedRun:
    """Open an output folder for a run, and lock it.

    Args:
        path: the folder; it and its parents are made where they are missing.
        run_id: id of the run.
        spec_hash: digest of the spec, without its `cluster`.
        outputs: the files that the run will write, relative to the folder.
        resume: continue the run that is there; of a finished one, return it.
        restart: discard the unfinished run that is there.

    Returns:
        The folder to write into; or, with `resume`, the finished run of the same spec.

    Raises:
        UsageError: the folder can't be made or read, or is not pipedist's, another run is
            writing into it, it holds an unfinished run and neither `resume` nor `restart` says
            what to do, it holds a run of another spec and is to be resumed, or a file of
            somebody else is in the way.
        OutputError: the disk is full, or fails.
    """
    for problem in filter(None, map(path_problem, outputs)):
        raise UsageError(problem)
    if resume and restart:
        raise UsageError("--resume and --restart exclude each other")
    shown = path
    with _reading(shown):
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
        old = _read_record(path, shown)
        if old is not None and old.state == "committing":
            old = _commit(path, old)
        if resume and old is not None and old.state == "finished" and old.spec == spec_hash:
            return _finished(path, old, shown)
        notice = _decide(old, shown, spec_hash=spec_hash, resume=resume, restart=restart)
        previous = () if old is None else old.previous if old.state == "running" else old.files
        _check_free(path, shown, outputs, previous)
        with writing(path):
            shutil.rmtree(path / PRIVATE / "new", onerror=_gone_is_fine)
            (path / PRIVATE / "new").mkdir()
        record = _Record("running", run_id, spec_hash, tuple(outputs), previous)
        _write_record(path, record)
        stack.pop_all()  # the lock is the folder's now
        return RunFolder(path, lock, record, notice)


def _decide(old: _Record | None, shown: Path, *, spec_hash: str, resume: bool, restart: bool) -> str:
    """Return the notice for the user, or refuse."""
    if resume:
        if old is None:
            return f"nothing to resume in {shown}: starting fresh"
        if old.spec != spec_hash:
            raise UsageError(
                f"{shown} holds a run of another spec or other parameters (there {old.spec[:12]}, now "
                f"{spec_hash[:12]}), which can't be resumed: --restart discards it, --output DIR "
                "writes elsewhere"
            )
        if old.state == "failed":
            return f"the run {old.run} in {shown} failed, and left nothing to continue: starting fresh"
        return (
            f"the unfinished run {old.run} in {shown} left no journal (this version writes none): "
            "starting fresh"
        )
    if old is not None and old.state == "running" and not restart:
        raise UsageError(
            f"{shown} holds the unfinished run {old.run}: --restart discards it and begins again; --resume "
            "takes it up, which in this version begins again too, because no journal is written yet; "
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
    for name in outputs:
        if name not in previous and os.path.lexists(path / name):
            raise UsageError(
                f"{shown}/{name} is in the way of an output and was not written by pipedist: move it, or "
                "choose another folder with --output DIR"
            )


def _finished(path: Path, record: _Record, shown: Path) -> FinishedRun:
    with _reading(shown):
        document = json.loads((path / PRIVATE / "results.json").read_bytes())
    return FinishedRun(path, record.run, document, {name: path / name for name in record.files})


def _commit(path: Path, record: _Record) -> _Record:
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
        shutil.rmtree(private / "new", onerror=_gone_is_fine)
        sync_folder(path)
    done = _Record(record.then, record.run, record.spec, record.files)
    _write_record(path, done)
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


def _read_record(path: Path, shown: Path) -> _Record | None:
    with _reading(shown):
        try:
            data = (path / PRIVATE / "run.json").read_bytes()
        except FileNotFoundError:
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
        return _Record(value["state"], value["run"], value["spec"], files, previous, then)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{shown}/{PRIVATE}/run.json can't be read ({error!r}): choose another folder with --output DIR"
        ) from error


def _write_record(path: Path, record: _Record) -> None:
    value = {
        "format": _FORMAT,
        "state": record.state,
        "run": record.run,
        "spec": record.spec,
        "files": list(record.files),
        "previous": list(record.previous),
        "then": record.then,
    }
    _write_json(path / PRIVATE / "run.json", value)


def _write_json(path: Path, value: Json) -> None:
    out = AtomicFile(path)
    try:
        with writing(path):
            out.file.write(text(value, sort_keys=False).encode() + b"\n")
        out.commit()
    finally:
        out.abort()


@contextlib.contextmanager
def _reading(shown: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # a place that can't be used is a mistake of the command line, a disk that fails is none
        kind = OutputError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UsageError
        raise kind(f"can't use {shown} as output folder: {error.strerror or error}") from error


def _gone_is_fine(_function: Any, _path: str, info: Any) -> None:
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]
