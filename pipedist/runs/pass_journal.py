"""What of a run is durable, pass by pass: what is given to the journal, and when; what it brings back.

A pass is committed as a SNAPSHOT between two steps: steps [0, n) are taken, and this is what they left
behind in its folds, files and states. Everything that follows depends on it alone, so that whoever goes
on from a snapshot gets the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from pipedist.core.types import Tree
from pipedist.errors import JournalError
from pipedist.journal.history import History, PassHistory
from pipedist.journal.log_format import LogEntry, RecordLog, packed, read_log, unpacked
from pipedist.journal.writer import Journal, PassSnapshot, file_name
from pipedist.plan import PassPlan
from pipedist.protocol.codec import decode, encode

if TYPE_CHECKING:
    pass

COMMIT_S = 0.5
"""A pass is committed at most so often..."""

COST_SHARE = 0.05
"""... and less often where that takes more than this share of the time."""

Versioned = tuple[int, Tree]
"""A value, and a number that changes whenever it does."""


def key_of(pass_: PassPlan) -> str:
    """Return what a pass is called in the journal."""
    return f"{pass_.phase}/{pass_.root}"


class RunJournal:
    """The journal of a run.

    Args:
        journal: where it is written.
        history: what was there; None: the run begins.
        stamp: the same for all processes of a run, as long as its code does not change.
    """

    def __init__(self, journal: Journal, history: History | None, stamp: str) -> None:
        self._journal = journal
        self._history = history
        self._stamp = stamp
        self._changed = anyio.Event()
        """Something was committed."""
        self.holds_steps = history is not None and any(each.steps for each in history.passes.values())
        """Steps are durable: a run that goes on has less to do than one that begins."""
        self.committing_since: float | None = None
        """When the disk was last asked for something that is not durable yet."""

    @property
    def is_resumed(self) -> bool:
        """Whether another process has begun the run."""
        return self._history is not None

    @property
    def unwritten(self) -> Mapping[str, str]:
        """Why an output of a phase that is complete has no file, by stage."""
        return self._history.unwritten if self._history is not None else {}

    def of(self, pass_: PassPlan, replicas: int) -> PassJournal:
        """Return what is durable of a pass, and where more of it goes."""
        key = key_of(pass_)
        before = self._history.passes.get(key) if self._history is not None else None
        stamp = f"{self._stamp} {key}"
        return PassJournal(self._journal, key, replicas, before or PassHistory(), stamp)

    async def commit(
        self,
        taken: Sequence[PendingSnapshot],
        *,
        phase: int | None = None,
        unwritten: Mapping[str, str] | None = None,
    ) -> None:
        """Return when snapshots are durable.

        Args:
            phase: the phase that is complete with them; None: none is.
            unwritten: why an output of it has no file, by stage.

        Raises:
            JournalError: they can't be made so.
        """

        def write() -> None:
            self._journal.commit([one.snapshot for one in taken], phase=phase, unwritten=unwritten or {})
            for one in taken:
                one.pass_.committed(one)

        self.committing_since = time.monotonic()
        try:
            await anyio.to_thread.run_sync(write)
        finally:
            self.committing_since = None
        for one in taken:
            one.pass_.on_committed(one.pass_.steps_committed)
            self.holds_steps = self.holds_steps or one.pass_.steps_committed > 0
        self._changed.set()
        self._changed = anyio.Event()

    async def reached(self, pass_: PassJournal, steps: int) -> None:
        """Return as soon as steps [0, steps) of a pass are durable."""
        while pass_.steps_committed < steps:
            await self._changed.wait()

    async def keep_up(self, take: Callable[[], Awaitable[PendingSnapshot]]) -> None:
        """Commit a pass again and again, until it is cancelled.

        Args:
            take: returns the next snapshot, as soon as there is one.

        Raises:
            JournalError: it can't be committed.
        """
        while True:
            taken = await take()
            begin = time.monotonic()
            await self.commit([taken])
            took = time.monotonic() - begin
            await anyio.sleep(max(COMMIT_S, took / COST_SHARE))

    async def end(self, ledger: Mapping[str, int], kept: set[str]) -> None:
        """Say that the run is over, and let go of what no other run can use.

        Args:
            kept: files that one can.
        """

        def write() -> None:
            self._journal.end(ledger)
            self._journal.keep(kept)

        await anyio.to_thread.run_sync(write)


class PassJournal:
    """What is durable of one pass.

    Args:
        journal: where it is written.
        key: what the pass is called there.
        replicas: call number = step * replicas + replica.
        before: what an earlier process has left.
        stamp: of the run, the pass and its code.
    """

    def __init__(
        self, journal: Journal, key: str, replicas: int, before: PassHistory, stamp: str = ""
    ) -> None:
        self.stamp = stamp
        """The same for all processes of a run, as long as its code does not change."""
        self.on_committed: Callable[[int], None] = _tell_nobody
        """Told, on the event loop, before which step everything is durable."""
        self._journal = journal
        self._key = key
        self._replicas = replicas
        self._before = before
        self._logs: dict[str, RecordLog] = {}
        self._committed = (before.steps, before.elements)
        """What is durable: steps, and their elements."""
        self._versions: dict[str, int] = {}

    @property
    def steps(self) -> int:
        """Steps before this one are done."""
        return self._before.steps

    @property
    def elements(self) -> int:
        """How many elements they have."""
        return self._before.elements

    @property
    def is_complete(self) -> bool:
        """Whether there are no more steps."""
        return self._before.complete

    @property
    def files(self) -> set[str]:
        """The files that hold what was left."""
        return self._before.files()

    @property
    def steps_committed(self) -> int:
        """Steps before this one are durable."""
        return self._committed[0]

    # -- what is there ---------------------------------------------------------------------------

    def part(self, name: str) -> Tree:
        """Return a value that was replaced as a whole; None: there is none.

        Raises:
            JournalError: it is damaged.
        """
        part = self._before.parts.get(name)
        if part is None:
            return None
        if part.inline is not None:
            return unpacked(part.inline)
        if part.end is None:
            raise JournalError(f"part {name} of pass {self._key} is nowhere")
        entries = list(read_log(self._path(part.file), part.end))
        return decode(entries[0][1])

    def parts(self, prefix: str) -> dict[str, Tree]:
        """Return the parts whose names begin so, by the rest of their names."""
        names = [name for name in self._before.parts if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.part(name) for name in names}

    def logs(self, prefix: str) -> list[str]:
        """Return the logs that are durable and whose names begin so."""
        begin = file_name(self._key, prefix)
        ours = file_name(self._key, "")
        return [f.removeprefix(ours).removesuffix(".log") for f in self._before.logs if f.startswith(begin)]

    def entries(self, name: str) -> Iterator[tuple[LogEntry, Tree]]:
        """Yield the entries of a log that are durable, and what is in them.

        Raises:
            JournalError: it is damaged, or is not there though steps are committed.
        """
        for entry, frames in self._raw(name):
            yield entry, decode(frames)

    def places(self, name: str) -> Iterator[LogEntry]:
        """Yield the same without what is in them; it is checked all the same."""
        for entry, _ in self._raw(name):
            yield entry

    def _raw(self, name: str) -> Iterator[tuple[LogEntry, list[bytes]]]:
        file = f"{file_name(self._key, name)}.log"
        if file in self._before.logs:
            yield from read_log(self._path(file), self._before.logs[file])
        elif self._before.steps:
            raise JournalError(
                f"the journal in {self._journal.folder} has {self._before.steps:,} steps of pass "
                f"{self._key}, and says nothing of {file}, which holds what they gave"
            )

    def _path(self, file: str) -> Path:
        return self._journal.folder / file

    # -- what comes ------------------------------------------------------------------------------

    def log(self, name: str) -> RecordLog:
        """Open a file that grows, behind what is durable of it.

        Raises:
            JournalError: it can't be opened.
        """
        file = f"{file_name(self._key, name)}.log"
        log = self._logs[file] = self._journal.log(file, self._before.logs.get(file))
        return log

    def is_open(self, name: str) -> bool:
        """Whether a log was opened, and is not dropped for good."""
        return f"{file_name(self._key, name)}.log" in self._logs

    def snapshot(
        self,
        steps: int,
        elements: int,
        parts: Mapping[str, Versioned],
        *,
        quarantined: Mapping[int, int],
        complete: bool = False,
        dropped: Sequence[str] = (),
    ) -> PendingSnapshot:
        """Return what the pass has come to since what was committed of it last.

        Args:
            steps: steps [0, steps) are taken.
            elements: of them all.
            parts: values that are replaced as a whole.
            quarantined: the step of each element that is set aside.
            complete: there are no more steps, and its values are complete.
            dropped: logs that nobody needs any more.

        Raises:
            JournalError: a log can't be written.
        """
        versions = {name: version for name, (version, _) in parts.items()}
        changed = {
            name: packed(None, encode(tree))
            for name, (version, tree) in parts.items()
            if self._versions.get(name) != version
        }
        first, elements_before = self._committed
        gone = tuple(f"{file_name(self._key, name)}.log" for name in dropped)
        snapshot = PassSnapshot(
            self._key,
            self._replicas,
            first,
            steps,
            elements - elements_before,
            changed,
            {file: log.end() for file, log in self._logs.items() if file not in gone},
            complete=complete,
            dropped=gone,
            quarantined=tuple(each for each in quarantined.items() if first <= each[1] < steps),
        )
        return PendingSnapshot(self, snapshot, (steps, elements), versions)

    def committed(self, taken: PendingSnapshot) -> None:
        """Take note that a snapshot is durable; only the latest one may be."""
        self._committed = taken.until
        self._versions.update(taken.versions)
        self._logs = {file: log for file, log in self._logs.items() if file not in taken.snapshot.dropped}


def _tell_nobody(_steps: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class PendingSnapshot:
    """A snapshot on its way to the disk.

    Args:
        pass_: whose it is.
        snapshot: what is written.
        until: the steps taken, and their elements.
        versions: of all parts that the pass has then.
    """

    pass_: PassJournal
    snapshot: PassSnapshot
    until: tuple[int, int]
    versions: Mapping[str, int]


PASS_STATE = "reading"
"""The part of a pass's snapshot that has its folds and its place in a training."""

STATE = "state."
"""Parts that are states begin so."""
