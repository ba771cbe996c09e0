"""Commits the progress of passes to the journal, and restores it.

A pass is committed as a snapshot between two steps: the folds, files and states after steps [0, n). All later
results depend on the snapshot alone, so a run that continues from it gets the same bits. With it, results of calls
of later steps may be kept (`FinishedCallLog`), so that a run whose steps take long does not lose them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import anyio
import anyio.to_thread
from msgspec import Struct, convert, to_builtins

from pipedist.coordinator.measurements import Recorder
from pipedist.coordinator.results import CALL_BYTES, Chunk, FailedElement, QuarantinedCall
from pipedist.coordinator.spans import DriverWork
from pipedist.core.types import Tree
from pipedist.errors import JournalError
from pipedist.journal.history import CALLS, DurableProgress, History, PassHistory
from pipedist.journal.log_format import LogEntry, RecordLog, packed, read_log, unpacked
from pipedist.journal.writer import Journal, PassSnapshot, file_name, log_file
from pipedist.plan import PassPlan
from pipedist.protocol.codec import decode, encode
from pipedist.scheduler.commands import CallsQuarantined

COMMIT_S = 0.4
COST_SHARE = 0.05
"""Time between two commits of a pass: COMMIT_S, or more if they would take more than this share of the time."""

CALLS_S = 0.1  # time without a complete step after which finished calls are committed, seconds

CALLS_BYTES_MAX = 4 * 2**20  # length of a log of finished calls after which the next log begins

Versioned = tuple[int, Tree]  # a version number, and the value of that version


class RunJournal:
    """The journal of a run, by pass.

    Args:
        history: the committed progress of earlier processes; None: the run begins.
        stamp: equal for all processes of a run as long as its code does not change.
    """

    def __init__(self, journal: Journal, history: History | None, stamp: str) -> None:
        self._journal = journal
        self._history = history
        self._stamp = stamp
        self.is_resumed = history is not None
        self.holds_steps = history is not None and (
            bool(history.header.spares)
            or any(each.progress != DurableProgress(0) for each in history.passes.values())
        )
        """Whether steps, or finished calls of an interrupted run, are committed, so that a later run can skip them."""
        self.recorder: Recorder | None = None  # of the process that executes the run
        self.committing_since: float | None = None  # start of the commit in progress

    def of(self, pass_: PassPlan, replicas: int) -> PassJournal:
        key = pass_.key
        before = self._history.passes.get(key) if self._history is not None else None
        stamp = f"{self._stamp} {key}"
        return PassJournal(self._journal, key, replicas, before or PassHistory(), stamp)

    async def commit(
        self, taken: Sequence[PendingSnapshot], *, phase: int | None = None, unwritten: Mapping[str, str] = {}
    ) -> None:
        """Write snapshots, and return when they are durable.

        `phase` is the phase that they complete. `unwritten` has the reasons why its output files could not be
        written, by stage.
        """
        snapshots = [one.snapshot for one in taken]  # immutable: the thread gets nothing else of a pass
        write = partial(self._journal.commit, snapshots, phase=phase, unwritten=unwritten)
        self.committing_since = time.monotonic()
        began = 0 if self.recorder is None else self.recorder.now()
        try:
            await anyio.to_thread.run_sync(write)
        finally:
            self.committing_since = None
            if self.recorder is not None:
                self.recorder.driver_span(DriverWork.COMMIT, began, ", ".join(each.key for each in snapshots))
        for one in taken:
            one.pass_.committed(one)
            one.pass_.on_committed(one.pass_.steps_committed)
            self.holds_steps |= one.pass_.steps_committed > 0 or CALLS in one.versions

    async def commit_periodically(
        self, take: Callable[[], Awaitable[PendingSnapshot]], every_s: float | None
    ) -> None:
        """Commit periodically what `take` returns, until cancelled; `every_s` None: COMMIT_S."""
        # the first commit logs all finished calls of an earlier process again, so its cost is not that of later ones
        for is_first in chain([True], repeat(False)):
            taken = await take()
            begin = time.monotonic()
            await self.commit([taken])
            cost_s = 0.0 if is_first else time.monotonic() - begin
            await anyio.sleep(max(COMMIT_S if every_s is None else every_s, cost_s / COST_SHARE))

    def close(self) -> None:
        self._journal.close()

    async def end(self, ledger: Mapping[str, int], kept: set[str]) -> None:
        """Record the end of the run, and delete all files except `kept`."""

        def write() -> None:
            self._journal.end(ledger)
            self._journal.keep(kept)

        await anyio.to_thread.run_sync(write)


class PassJournal:
    """One pass's part of the journal; only the event loop's thread uses it.

    Its methods raise JournalError if it is damaged.

    Args:
        before: the progress committed by earlier processes.
        stamp: equal for all processes of a run as long as its code does not change.
    """

    def __init__(
        self, journal: Journal, key: str, replicas: int, before: PassHistory, stamp: str = ""
    ) -> None:
        self.stamp = stamp
        self.on_committed: Callable[[int], None] = lambda _: None
        """Called on the event loop after each commit, with the number of durable steps."""
        self._journal = journal
        self._key = key
        self._replicas = replicas
        self.before = before
        self._logs: dict[str, RecordLog] = {}
        self.steps_committed = before.steps  # number of steps that are durable now
        self._elements_committed = before.elements
        self._versions: dict[str, int] = {}
        self._committed = anyio.Event()

    def part(self, name: str) -> Tree:
        """Return a part of the latest snapshot, None if it has none of that name."""
        part = self.before.parts.get(name)
        if part is None:
            return None
        if part.inline is not None:
            return unpacked(part.inline)
        assert part.end is not None  # because the value is in a file
        ((_, frames),) = read_log(self._path(part.file), part.end)
        return decode(frames)

    def finished_calls(
        self, quarantined_max: int | None = None
    ) -> tuple[list[Chunk], dict[int, QuarantinedCall], dict[tuple[int, int, int], Tree]]:
        """Return the durable results of calls of later steps that the code of this process made.

        Of these calls, return those that have quarantined elements; and return elements of other calls by (call,
        stage, element). If more than `quarantined_max` elements are quarantined, the run could only fail again: their
        calls, and elements that failed, are not returned.
        """
        calls: dict[int, Chunk] = {}
        quarantined: dict[int, QuarantinedCall] = {}
        elements: dict[tuple[int, int, int], Tree] = {}
        for name in self.logs(CALLS):
            entries = self.entries(name)
            if next(entries)[1] != self.stamp:
                continue
            for entry, result in entries:
                call, *rest = entry.meta if isinstance(entry.meta, list) else [entry.meta]
                if call < self.before.steps * self._replicas:
                    continue
                if len(rest) > 1:
                    stage, element, *failure = rest
                    elements[call, stage, element] = FailedElement(*failure) if failure else result
                    continue
                calls[call] = Chunk(call, call + 1, [result], CALL_BYTES + sum(entry.sizes))
                if rest:
                    count, command = rest[0]
                    quarantined[call] = QuarantinedCall({}, convert(command, CallsQuarantined), count)
        failed = [each for each, result in elements.items() if isinstance(result, FailedElement)]
        count = sum(each.elements for each in quarantined.values())
        count += sum(1 for each in failed if each[0] not in quarantined)
        if quarantined_max is not None and count > quarantined_max:
            for call in quarantined:
                del calls[call]
            for each in failed:
                del elements[each]
            quarantined = {}
        return list(calls.values()), quarantined, elements

    def parts(self, prefix: str) -> dict[str, Tree]:
        """Return the parts with a prefix, by the rest of their names."""
        names = [name for name in self.before.parts if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.part(name) for name in names}

    def states(self) -> dict[str, dict[int, Tree]]:
        """Return the kept versions of each state, by version, the latest one last."""
        found: dict[str, list[Versioned]] = {}
        for place, (value, version) in self.parts(STATE).items():
            found.setdefault(place.partition(".")[2], []).append((version, value))
        return {name: dict(sorted(each, key=lambda one: one[0])) for name, each in found.items()}

    def logs(self, prefix: str) -> list[str]:
        """Return the names of durable logs that begin with a prefix."""
        begin = file_name(self._key, prefix)
        own = file_name(self._key, "")
        return [f.removeprefix(own).removesuffix(".log") for f in self.before.logs if f.startswith(begin)]

    def entries(self, name: str) -> Iterator[tuple[LogEntry, Tree]]:
        for entry, frames in self._raw(name):
            yield entry, decode(frames)

    def places(self, name: str) -> Iterator[LogEntry]:
        """Yield the durable entries of a log, checked, but without their values."""
        for entry, _ in self._raw(name):
            yield entry

    def _raw(self, name: str) -> Iterator[tuple[LogEntry, list[bytes]]]:
        file = log_file(self._key, name)
        if file in self.before.logs:
            yield from read_log(self._path(file), self.before.logs[file])
        elif self.before.steps:
            raise JournalError(
                f"the journal in {self._journal.folder} has {self.before.steps:,} steps of pass "
                f"{self._key}, but no record of {file}, which holds their results. Use --restart to discard it"
            )

    def _path(self, file: str) -> Path:
        return self._journal.folder / file

    def log(self, name: str) -> RecordLog:
        """Open a log to append to it, after its durable entries."""
        file = log_file(self._key, name)
        log = self._logs[file] = self._journal.log(file, self.before.logs.get(file))
        return log

    def flush(self) -> None:
        """Write the buffered entries of all logs; nothing is appended meanwhile."""
        for log in [*self._logs.values()]:
            log.flush()

    def has_log(self, name: str) -> bool:
        """Return whether a log is durable."""
        return log_file(self._key, name) in self.before.logs

    def log_bytes(self, name: str) -> int:
        """Return the length of an open log."""
        return self._logs[log_file(self._key, name)].end().bytes

    def is_open(self, name: str) -> bool:
        """Return whether a log is open, and not dropped."""
        return log_file(self._key, name) in self._logs

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
        """Return a snapshot with the changes since the latest commit.

        Args:
            steps, elements: steps [0, steps) are taken, and have this number of elements.
            parts: values that replace earlier ones.
            quarantined: the step of each quarantined element.
            dropped: logs that are no longer needed.
        """
        versions = {name: version for name, (version, _) in parts.items()}
        changed = {
            name: packed(None, encode(tree))
            for name, (version, tree) in parts.items()
            if self._versions.get(name) != version
        }
        first = self.steps_committed
        gone = tuple(log_file(self._key, name) for name in dropped)
        snapshot = PassSnapshot(
            self._key,
            self._replicas,
            first,
            steps,
            elements - self._elements_committed,
            changed,
            {file: log.end() for file, log in self._logs.items() if file not in gone},
            complete=complete,
            dropped=gone,
            quarantined={element: step for element, step in quarantined.items() if first <= step < steps},
        )
        return PendingSnapshot(self, snapshot, versions)

    def has_committed(self, name: str, part: Versioned) -> bool:
        """Return whether this process has committed this version of a part."""
        return self._versions.get(name) == part[0]

    def committed(self, taken: PendingSnapshot) -> None:
        """Record that the latest snapshot is durable."""
        self.steps_committed = taken.snapshot.last
        self._elements_committed += taken.snapshot.elements
        self._versions.update(taken.versions)
        for file in taken.snapshot.dropped:
            self._logs.pop(file, None)
        self._committed.set()
        self._committed = anyio.Event()

    async def reached(self, steps: int) -> None:
        """Wait until steps [0, steps) are durable."""
        while self.steps_committed < steps:
            await self._committed.wait()


class FinishedCallLog:
    """Logs results of calls, and of elements of calls, whose step is not taken yet: each once.

    A log has the stamp of its process, then the results. It is dropped when the steps of all its calls are taken.
    Those of an earlier process are dropped when what is still needed of them is logged again.
    """

    def __init__(self, durable: PassJournal) -> None:
        self._durable = durable
        self._ends = dict.fromkeys(durable.logs(CALLS), -1)
        """The highest call of each log; -1 if an earlier process made the log."""
        self._number = max((int(name.removeprefix(CALLS)) for name in self._ends), default=-1)
        self._log: RecordLog | None = None
        self._logged: set[Finished] = set()
        self._changes = 0

    @property
    def _name(self) -> str:
        return f"{CALLS}{self._number}"

    @property
    def is_used(self) -> bool:
        """Whether there is or was a log."""
        return self._number >= 0

    @property
    def count(self) -> Versioned:
        """The number of calls in the logs, and of elements of other calls, as a part of a snapshot."""
        calls = {each for each in self._logged if isinstance(each, int)}
        return self._changes, [len(calls), sum(1 for each in self._logged if call_of(each) not in calls)]

    def lacks(self, results: Mapping[Finished, Tree]) -> bool:
        return not self._logged.issuperset(results)

    def add(self, before: int, results: Mapping[Finished, Tree]) -> None:
        """Log the results that the logs lack; the steps of all calls below `before` are taken."""
        self._changes += 1
        self._logged = {each for each in self._logged if call_of(each) >= before}
        if self._log is not None and (
            self._ends[self._name] < before or self._log.end().bytes > CALLS_BYTES_MAX
        ):
            self._log = None
        new = sorted(results.keys() - self._logged, key=call_of)
        if new and self._log is None:
            self._number += 1
            self._log = self._durable.log(self._name)
            self._log.append(self._durable.stamp)
        for each in new:
            assert self._log is not None
            result = results[each]
            if isinstance(result, QuarantinedCall):
                self._log.append(result.result, [each, [result.elements, to_builtins(result.command)]])
            elif isinstance(result, FailedElement) and not isinstance(each, int):
                self._log.append(None, [*each, result.text])
            else:
                self._log.append(result, each)
            self._ends[self._name] = max(self._ends.get(self._name, 0), call_of(each))
        self._logged.update(new)

    def dropped(self, before: int) -> list[str]:
        """Return the logs that the next snapshot does not need."""
        gone = [name for name, last in self._ends.items() if last < before]
        for name in gone:
            del self._ends[name]
        return gone


Finished = int | tuple[int, int, int]
"""A finished call; or (call, stage, element), the place of a stage in its program and the id of an element."""


def call_of(finished: Finished) -> int:
    return finished if isinstance(finished, int) else finished[0]


class PendingSnapshot(Struct, frozen=True):
    """A snapshot that is not durable yet.

    Args:
        versions: version of each part of the pass.
    """

    pass_: PassJournal
    snapshot: PassSnapshot
    versions: Mapping[str, int]


PASS_STATE = "reading"  # snapshot key: fold state, training position, quarantined elements, slot of states

STATE = "state."
"""Prefix of the snapshot keys of states, before "SLOT.NAME"; the slots have the kept snapshots, in turn."""
