"""In which order things become durable, what is brought back, and what a failing disk does."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pipedist._version import __version__
from pipedist.errors import JournalError, UsageError
from pipedist.journal import history as history_module
from pipedist.journal.history import FORMAT, Header, History, PassHistory, read_history
from pipedist.journal.log_format import (
    FIRST,
    Disk,
    LogEnd,
    RecordLog,
    digest_of,
    pack_record,
    packed,
    read_log,
    read_records,
    unpacked,
)
from pipedist.journal.writer import INLINE_BYTES_MAX, Journal, PassSnapshot
from pipedist.protocol.codec import decode, encode
from pipedist.runs.pass_journal import PassJournal, RunJournal
from tests.journal.watched import WatchedDisk

HEADER = Header(
    FORMAT, __version__, "r1", "job", {"seed": 1}, "d1", {}, {}, 2, {}, {"0/d": {"dataset": "d", "name": "y"}}
)


def snapshot(first: int, last: int, parts: dict[str, Any] | None = None, **more: Any) -> PassSnapshot:
    made = {name: packed(None, encode(tree)) for name, tree in (parts or {}).items()}
    fields = {"elements": 4 * (last - first), "logs": {}, **more}
    return PassSnapshot("0/d", 2, first, last, parts=made, **fields)


def found(folder: Path) -> History:
    history = read_history(folder)
    assert history is not None
    return history


def test_a_record_is_written_when_all_that_it_names_is_durable(tmp_path: Path) -> None:
    disk = WatchedDisk()
    journal = Journal.create(tmp_path, HEADER, disk)
    log = journal.log("rows.log")
    log.append([np.arange(9)])
    end = log.end()
    log.append([np.arange(99)])  # behind the snapshot
    disk.done.clear()
    journal.commit([snapshot(0, 3, {"fold": np.zeros(10_000)}, logs={"rows.log": end})])
    assert disk.done == [
        ("write", "0-d.fold.1"),
        ("sync", "0-d.fold.1"),
        ("sync", "rows.log"),
        ("sync folder", tmp_path.name),
        ("write", "journal"),
        ("sync", "journal"),
    ]
    disk.done.clear()
    journal.commit([snapshot(3, 4, {"fold": np.zeros(20_000)}, logs={"rows.log": end})])
    assert disk.done[-3:] == [("write", "journal"), ("sync", "journal"), ("remove", "0-d.fold.1")]
    assert ("sync", "rows.log") not in disk.done  # nothing of it is new
    journal.close()


def test_only_committed_values_are_restored(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, HEADER)
    log = journal.log("0-d.rows.log")
    log.append(["first", np.arange(3)], [1, 2])
    end = log.end()
    small, large = {"a": 1.5}, np.arange(INLINE_BYTES_MAX)
    journal.commit([snapshot(0, 3, {"small": small, "large": large}, logs={"0-d.rows.log": end})])
    log.append("not committed")
    log.end()
    journal.close()

    history = found(tmp_path)
    pass_ = history.passes["0/d"]
    assert (pass_.steps, pass_.elements, pass_.complete) == (3, 12, False)
    assert history.ledger() == {"elements": 12, "committed": 12, "quarantined": 0, "lost": 0}
    inline = pass_.parts["small"].inline
    assert inline is not None
    assert unpacked(inline) == small
    part = pass_.parts["large"]
    assert part.end is not None
    ((_, frames),) = read_log(tmp_path / part.file, part.end)
    assert np.array_equal(decode(frames), large)
    assert end.bytes < (tmp_path / "0-d.rows.log").stat().st_size

    again = Journal.reopen(tmp_path, history)
    again.log("0-d.rows.log", pass_.logs["0-d.rows.log"])
    again.commit([snapshot(3, 5)])
    again.end({"elements": 20, "committed": 20, "quarantined": 0, "lost": 0})
    again.close()
    assert end.bytes == (tmp_path / "0-d.rows.log").stat().st_size
    history = found(tmp_path)
    assert (history.epoch, history.count, history.problems) == (1, 5, [])
    ((entry, frames),) = read_log(tmp_path / "0-d.rows.log", end)
    assert entry.meta == [1, 2]
    assert decode(frames)[0] == "first"


def test_a_journal_whose_folder_was_removed_is_not_called_safe(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    journal = Journal.create(folder, HEADER)
    shutil.rmtree(folder)
    with pytest.raises(JournalError, match=r"was removed.*Start it again"):
        journal.log("rows.log")
    journal.close()


@pytest.mark.parametrize("room", [0, 1, 20, 200, 5000, 30_000])
def test_a_journal_writes_nothing_after_a_full_disk(tmp_path: Path, room: int) -> None:
    disk = WatchedDisk()
    journal = Journal.create(tmp_path, HEADER, disk)
    journal.commit([snapshot(0, 1, {"fold": 1.0})])
    disk.room_bytes = room
    with pytest.raises(JournalError, match=r"No space left on device.*--resume"):  # noqa: PT012
        for step in range(1, 99):
            journal.commit([snapshot(step, step + 1, {"fold": np.full(1000, 1.0 + step)})])
            done = step + 1
    done = 1 if "done" not in locals() else done
    disk.room_bytes = None  # there is room again: what was not certain is not tried again all the same
    with pytest.raises(JournalError, match="No space left"):
        journal.commit([snapshot(done, done + 1)])
    journal.close()
    history = found(tmp_path)
    assert history.passes["0/d"].steps == done
    again = Journal.reopen(tmp_path, history)
    again.commit([snapshot(done, 99)])
    again.close()
    assert found(tmp_path).passes["0/d"].steps == 99


class CountedDisk(Disk):
    """A disk that knows what is open, and fails in one way."""

    def __init__(self) -> None:
        self.is_open: set[int] = set()
        self.fails = ""

    def open(self, path: Path) -> int:
        fd = super().open(path)
        self.is_open.add(fd)
        return fd

    def truncate(self, fd: int, size: int) -> None:
        self._fail("truncate")
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._fail("sync")
        super().sync(fd)

    def close(self, fd: int) -> None:
        self.is_open.remove(fd)
        super().close(fd)

    def _fail(self, how: str) -> None:
        if how == self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("how", ["truncate", "sync"])
def test_a_disk_that_fails_at_once_leaves_no_descriptor(tmp_path: Path, how: str) -> None:
    disk = CountedDisk()
    journal = Journal.create(tmp_path, HEADER, disk)
    disk.fails = how
    if how == "truncate":
        with pytest.raises(JournalError, match="Input/output error"):
            journal.log("rows.log")
    journal.close()
    assert not disk.is_open
    with pytest.raises(JournalError, match="Input/output error"):
        Journal.reopen(tmp_path, found(tmp_path), disk)
    with pytest.raises(JournalError, match="Input/output error"):
        Journal.replace(tmp_path, HEADER, {}, disk)
    with pytest.raises(JournalError, match="Input/output error"):
        Journal.create(tmp_path / "new", HEADER, disk)
    assert not disk.is_open


def test_steps_without_their_log_are_an_error(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, HEADER)
    assert list(PassJournal(journal, "0/d", 2, PassHistory()).entries("rows")) == []
    kept = PassJournal(journal, "0/d", 2, PassHistory(steps=3, elements=12))
    with pytest.raises(JournalError, match=r"has 3 steps of pass 0/d, but no record of 0-d.rows.log"):
        list(kept.entries("rows"))
    with pytest.raises(JournalError, match=r"no record of 0-d.rows.log"):
        list(kept.places("rows"))
    journal.close()


def test_a_log_that_differs_from_the_journal_is_an_error(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, HEADER)
    log = journal.log("rows.log")
    for number in range(50):
        log.append([number, np.arange(number)])
    end = log.end()
    journal.close()
    path = tmp_path / "rows.log"
    data = path.read_bytes()
    assert len(list(read_log(path, end))) == 50
    for at in range(0, len(data), 97):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(JournalError, match=r"rows.log is damaged"):
            next(read_log(path, end))
    for cut in range(0, len(data), 89):
        path.write_bytes(data[:cut])
        with pytest.raises(JournalError, match=r"rows.log is damaged"):
            list(read_log(path, end))
    path.unlink()
    with pytest.raises(JournalError, match="is missing"):
        list(read_log(path, end))


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def short(fd: int, buffers: list[Any], at: int) -> int:
        return real(fd, [bytes(buffers[0])[:7]], at)

    monkeypatch.setattr(os, "pwritev", short)
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    log = RecordLog(fd, LogEnd(0, 0), lambda error: JournalError(str(error)))
    log.append([np.arange(50), "text"], [1])
    end = log.end()
    log.close()
    ((_, frames),) = read_log(tmp_path / "log", end)
    assert decode(frames)[1] == "text"


# -- inconsistencies -----------------------------------------------------------------------------------


def rewritten(folder: Path, change: Any) -> History:
    """Change the content of records, with good checksums and a good chain."""
    import msgpack

    records = [msgpack.unpackb(placed.payload) for placed in read_records((folder / "journal").read_bytes())]
    change(records)
    before, out = FIRST, b""
    for payload in records:
        made = pack_record(msgpack.packb(payload), before)
        before, out = digest_of(made), out + made
    (folder / "journal").write_bytes(out)
    return found(folder)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda records: records[2]["passes"][0].update(calls=[4, 8]),
            r"calls \[4, 8\) .* overlap: .* end at 6",
        ),
        (lambda records: records[2]["passes"][0].update(calls=[8, 12]), r"calls \[8, 12\) .* leave a gap"),
        (lambda records: records[2]["passes"][0].update(calls=[6, 7]), r"not whole steps of 2"),
        (
            lambda records: records[2]["passes"][0].update(elements=7),
            r"ledger has 20 elements.* calls give 19 el",
        ),
        (lambda records: records[2]["passes"][0].update(elements=-8), r"-8 elements in calls"),
        (lambda records: records[2]["passes"][0].update({"pass": "9/z"}), r"the plan has no pass '9/z'"),
        (lambda records: records.pop(2), r"calls give 12 elements"),
        (lambda records: records.append(records[2]), r"follows the end"),
        (lambda records: records[1]["passes"][0].update(complete=True), r"continues after it was complete"),
        (lambda records: records[3]["ledger"].update(lost=1), r"the ledger is inconsistent"),
        (lambda records: records[2].update(kind="odd"), r"unknown kind of record 'odd'"),
        (lambda records: records.insert(2, {"kind": "resumed", "epoch": 2}), r"epoch of a resumed run is 2"),
    ],
)
def test_inconsistent_records_are_reported(tmp_path: Path, change: Any, text: str) -> None:
    journal = Journal.create(tmp_path, HEADER)
    journal.commit([snapshot(0, 3)])
    journal.commit([snapshot(3, 5, complete=True)], phase=0)
    journal.end({"elements": 20, "committed": 20, "quarantined": 0, "lost": 0})
    journal.close()
    assert found(tmp_path).problems == []
    import re

    problems = rewritten(tmp_path, change).problems
    assert any(re.search(text, problem) for problem in problems), problems
    assert all(re.match(r"record \d+ at offset \d+: ", problem) for problem in problems)


def test_a_file_name_need_not_be_utf8(tmp_path: Path) -> None:
    inputs = {"datasets.d": {os.fsdecode(b"/data/\xff.csv"): [1, 2]}}
    Journal.create(tmp_path, replace(HEADER, inputs=inputs)).close()
    assert found(tmp_path).header.inputs == inputs


def test_a_journal_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Journal.create(tmp_path, HEADER).close()
    monkeypatch.setattr(history_module, "FORMAT", FORMAT + 1)
    with pytest.raises(UsageError, match=rf"format {FORMAT}\).*format {FORMAT + 1}\)"):
        read_history(tmp_path)


def test_a_journal_without_a_whole_record_is_none(tmp_path: Path) -> None:
    Journal.create(tmp_path, HEADER).close()
    (tmp_path / "journal").write_bytes((tmp_path / "journal").read_bytes()[:-1])
    assert read_history(tmp_path) is None
    (tmp_path / "journal").unlink()
    with pytest.raises(UsageError, match="no journal"):
        read_history(tmp_path)


def pass_journal(journal: Journal) -> PassJournal:
    return PassJournal(journal, "0/d", 2, PassHistory())


@pytest.mark.asyncio
async def test_a_log_opened_during_a_commit_is_in_the_next_snapshot(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, HEADER)
    durable = pass_journal(journal)
    durable.log("old")
    opened, loop = threading.Event(), asyncio.get_running_loop()

    class OpensALog(tuple[str, ...]):
        """Names of dropped logs; has the event loop open another log when a thread looks a name up."""

        def __contains__(self, name: object) -> bool:
            if threading.current_thread() is not threading.main_thread() and not opened.is_set():
                loop.call_soon_threadsafe(lambda: (durable.log("new"), opened.set()))
                assert opened.wait(10)
            return super().__contains__(name)

    taken = durable.snapshot(1, 4, {}, quarantined={}, dropped=["old"])
    taken = replace(taken, snapshot=replace(taken.snapshot, dropped=OpensALog(taken.snapshot.dropped)))
    await RunJournal(journal, None, "stamp").commit([taken])
    if not opened.is_set():
        durable.log("new")
    assert list(durable.snapshot(2, 8, {}, quarantined={}).snapshot.logs) == ["0-d.new.log"]
    journal.close()


class SlowDisk(WatchedDisk):
    """Syncs its first file only after `release`; `syncing` is set meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.syncing, self.release = threading.Event(), threading.Event()
        self.release.set()

    def sync(self, fd: int) -> None:
        self.syncing.set()
        assert self.release.wait(10)
        super().sync(fd)


def test_a_log_is_opened_while_a_commit_waits_for_the_disk(tmp_path: Path) -> None:
    disk = SlowDisk()
    journal = Journal.create(tmp_path, HEADER, disk)
    disk.release.clear()
    disk.syncing.clear()
    commit = threading.Thread(target=journal.commit, args=([snapshot(0, 1)],))
    commit.start()
    assert disk.syncing.wait(10)
    log = journal.log("0-d.rows.log")  # it would wait for ever if it needed the writer's lock
    log.append(["value"])
    disk.release.set()
    commit.join(10)
    disk.done.clear()
    journal.commit([snapshot(1, 2, logs={"0-d.rows.log": log.end()})])
    assert disk.done[:2] == [("write", "0-d.rows.log"), ("sync", "0-d.rows.log")]
    assert ("sync folder", tmp_path.name) in disk.done
    journal.close()
