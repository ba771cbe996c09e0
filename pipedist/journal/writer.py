"""Writes a journal.

The data that a record refers to is made durable before the record; files that it makes obsolete are
removed after it. After the first failed system call nothing more is written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgpack
from msgspec import Struct, to_builtins
from msgspec.structs import asdict

from pipedist.core.record_format import Buffer, frame_bytes
from pipedist.errors import JournalError
from pipedist.journal.history import NAME, Header, History, PassHistory, StoredValue
from pipedist.journal.log_format import (
    DISK,
    EMPTY,
    FIRST,
    Disk,
    LogEnd,
    RecordLog,
    digest_of,
    end_of,
    pack_record,
)

INLINE_BYTES_MAX: Final = 4096  # a larger value has a file of its own


class PassSnapshot(Struct, frozen=True):
    """The state of a pass between two steps.

    Args:
        replicas: call number = step * replicas + replica.
        first, last: steps [first, last) are committed since the snapshot before.
        elements: of these steps.
        parts: values that changed since, as the buffers of a record of a log.
        logs: where each log ends.
        complete: there are no more steps, and its values are complete.
        dropped: logs that are not needed any more.
        quarantined: the step of each quarantined element of these steps.
    """

    key: str
    replicas: int
    first: int
    last: int
    elements: int
    parts: Mapping[str, Sequence[Buffer]]
    logs: Mapping[str, LogEnd]
    complete: bool = False
    dropped: tuple[str, ...] = ()
    quarantined: Mapping[int, int] = {}


class Journal:
    """A journal that is being written, from any thread.

    It is made by `create` or `reopen`. If it can't be written, its methods raise JournalError.

    Args:
        fd: descriptor of its file.
        size, digest: its length in bytes, and the digest of its last record.
    """

    def __init__(self, folder: Path, fd: int, size: int, digest: bytes, disk: Disk) -> None:
        self.folder = folder
        self._fd = fd
        self._size = size
        self._digest = digest
        self._disk = disk
        self._lock = threading.Lock()  # held by one writer at a time, also while the disk works
        self._broken: str | None = None
        self._names = threading.Lock()
        """Guards the three below, never while the disk works: `log` may be called on an event loop."""
        self._logs: dict[str, RecordLog] = {}
        self._synced: dict[str, int] = {}
        self._fresh_names = False
        self._files: dict[tuple[str, str], str] = {}  # the file that holds a part, by pass and name
        self._number = 0

    @classmethod
    def create(cls, folder: Path, header: Header, disk: Disk = DISK) -> Journal:
        """Create a journal in an empty folder."""
        return cls._open(folder, NAME, 0, FIRST, {"kind": "header", **asdict(header)}, disk)

    @classmethod
    def reopen(
        cls, folder: Path, history: History, disk: Disk = DISK, *, code: Mapping[str, str] = {}
    ) -> Journal:
        """Open a journal for writing behind its last good record; `code` has the modules now."""
        resumed = {"kind": "resumed", "epoch": history.epoch + 1, "code": dict(code)}
        journal = cls._open(folder, NAME, history.size, history.digest, resumed, disk)
        for key, pass_ in history.passes.items():
            journal._files.update(((key, name), part.file) for name, part in pass_.parts.items() if part.file)
        journal._number = history.count
        return journal

    @classmethod
    def replace(
        cls, folder: Path, header: Header, passes: Mapping[str, PassHistory], disk: Disk = DISK
    ) -> None:
        """Replace a journal by that of another spec, with some of its passes."""
        first = {"kind": "header", **asdict(header)}
        journal = cls._open(folder, f"{NAME}.new", 0, FIRST, first, disk)
        try:
            entries = [
                {"pass": key, "calls": (0, header.replicas * of.steps), "dropped": [], **asdict(of)}
                for key, of in passes.items()
            ]
            if entries:
                journal._write({"kind": "steps", "passes": entries})
            with journal._writing():
                disk.rename(folder / f"{NAME}.new", folder / NAME)
                disk.sync_folder(folder)
        finally:
            journal.close()

    @classmethod
    def _open(
        cls, folder: Path, name: str, size: int, digest: bytes, first: Mapping[str, Any], disk: Disk
    ) -> Journal:
        journal = cls(folder, -1, size, digest, disk)
        try:
            with journal._writing():
                folder.mkdir(parents=True, exist_ok=True)
                journal._fd = disk.open(folder / name)
                disk.truncate(journal._fd, size)
                disk.sync_folder(folder)
            journal._write(first)
        except BaseException:
            journal.close()
            raise
        return journal

    def log(self, name: str, end: LogEnd | None = None) -> RecordLog:
        """Open a log, durable up to `end`; it is closed with the journal."""
        durable = end or EMPTY
        with self._writing():
            fd = self._disk.open(self.folder / name)
            log = RecordLog(fd, durable, self.broke, self._disk)
            with self._names:  # before a failure, so that `close` closes it
                self._logs[name] = log
                self._synced[name] = durable.bytes
                self._fresh_names = self._fresh_names or end is None
            self._disk.truncate(fd, durable.bytes)
        return log

    def commit(
        self,
        snapshots: Sequence[PassSnapshot],
        *,
        phase: int | None = None,
        unwritten: Mapping[str, str] = {},
    ) -> None:
        """Make snapshots durable: the calls that they cover need no re-execution.

        If that fails, the record does not count, and nothing more is written.

        Args:
            phase: the phase that is complete with them.
            unwritten: the reason why an output of it has no file, by stage.
        """
        with self._lock, self._writing():
            stale: list[str] = []
            entries = [
                {
                    "pass": snapshot.key,
                    "calls": (snapshot.first * snapshot.replicas, snapshot.last * snapshot.replicas),
                    "elements": snapshot.elements,
                    "complete": snapshot.complete,
                    "parts": self._store(snapshot, stale),
                    "logs": snapshot.logs,
                    "dropped": snapshot.dropped,
                    "quarantined": snapshot.quarantined,
                }
                for snapshot in snapshots
            ]
            ends = [(name, end.bytes) for snapshot in snapshots for name, end in snapshot.logs.items()]
            with self._names:
                unsynced = [(name, at, self._logs[name]) for name, at in ends if at > self._synced[name]]
                has_fresh_names, self._fresh_names = self._fresh_names, False
            for name, at, log in unsynced:
                self._disk.sync(log.fd)
                self._synced[name] = at
            if has_fresh_names:
                self._disk.sync_folder(self.folder)
            payload: dict[str, Any] = {"kind": "steps" if phase is None else "phase", "passes": entries}
            if phase is not None:
                payload |= {"phase": phase, "unwritten": dict(unwritten)}
            self._append(payload)
            for name in [*stale, *(name for snapshot in snapshots for name in snapshot.dropped)]:
                self._forget(name)

    def _store(self, snapshot: PassSnapshot, stale: list[str]) -> dict[str, StoredValue]:
        """Write large parts to files; add the files they replace to `stale`."""
        parts = {}
        for name, buffers in snapshot.parts.items():
            size = frame_bytes(buffers)
            if size <= INLINE_BYTES_MAX:
                part = StoredValue(b"".join(buffers))
            else:
                part = self._file(snapshot.key, name, buffers)
            before = self._files.pop((snapshot.key, name), None)
            if before is not None:
                stale.append(before)
            if part.file:
                self._files[snapshot.key, name] = part.file
            parts[name] = part
        return parts

    def _file(self, key: str, name: str, buffers: Sequence[Buffer]) -> StoredValue:
        """Write a value to a file of its own; the file's name becomes durable with those of the logs."""
        self._number += 1
        file = f"{file_name(key, name)}.{self._number}"
        fd = self._disk.open(self.folder / file)
        try:
            self._disk.truncate(fd, 0)
            self._disk.write(fd, buffers, 0)
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)
        with self._names:
            self._fresh_names = True
        return StoredValue(None, file, end_of(buffers))

    def end(self, ledger: Mapping[str, int]) -> None:
        self._write({"kind": "end", "ledger": dict(ledger)})

    def _write(self, payload: Mapping[str, Any]) -> None:
        with self._lock, self._writing():
            self._append(payload)

    def _append(self, payload: Mapping[str, Any]) -> None:
        plain = to_builtins(payload, builtin_types=(bytes,))
        packed = pack_record(msgpack.packb(plain, unicode_errors="surrogatepass"), self._digest)
        written = self._disk.write(self._fd, [packed], self._size)
        self._disk.sync(self._fd)
        self._size += written
        self._digest = digest_of(packed)

    def keep(self, names: Iterable[str]) -> None:
        """Remove every file of the folder but the journal, its open files, and these."""
        with self._lock, self._writing():
            with self._names:
                kept = {NAME, *names, *self._logs, *self._files.values()}
            for path in [path for path in self.folder.iterdir() if path.name not in kept]:
                self._forget(path.name)

    def _forget(self, name: str) -> None:
        with self._names:
            log = self._logs.pop(name, None)
        if log is not None:
            log.close()
        self._disk.remove(self.folder / name)

    def close(self) -> None:
        """Close all files; harmless twice."""
        with self._lock:
            with self._names:
                logs, self._logs = list(self._logs.values()), {}
            for log in logs:
                log.close()
            if self._fd >= 0:
                self._disk.close(self._fd)
                self._fd = -1

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn the first OSError into the error that all later writes raise."""
        if self._broken is not None:
            raise _unwritable(self._broken)
        try:
            yield
        except OSError as error:
            raise self.broke(error) from error

    def broke(self, error: OSError) -> JournalError:
        """Return the error of a failed system call, which every later write raises too."""
        if isinstance(error, FileNotFoundError) and not os.path.exists(self.folder):
            cause, outlook = "was removed", "its steps are lost. Start it again."
        else:
            cause = f"can't be written: {error.strerror or error}"
            outlook = "all committed steps are safe. Fix the problem, then rerun with --resume."
        self._broken = f"the journal in {self.folder} {cause}. The run has stopped; {outlook}"
        return _unwritable(self._broken)


def _unwritable(text: str) -> JournalError:
    error = JournalError(text)
    error.has_advice = True
    return error


def file_name(key: str, name: str) -> str:
    return f"{key.replace('/', '-')}.{name}"


def log_file(key: str, name: str) -> str:
    """Return the name of the file of a pass's log."""
    return f"{file_name(key, name)}.log"
