"""Executes one call of a run again, alone, in this process, with the inputs that it had.

Everything but the call itself comes from the run's folder: the spec by its path, which must mean the same
still; what earlier phases made, and states, from the journal, which is only read. What executes is what a
worker executes: the pass's program over the same road (`pipedist.worker`), of a gang all replicas of the
step, as the threads of one member. A stage's `timeout_s`, and deaths of the process, are nobody's here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
from msgspec import Struct
from msgspec.structs import replace

from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed
from pipedist.datasets.sources import SourceError
from pipedist.errors import JournalError, OutputError, UsageError
from pipedist.journal.history import Header, History, PassHistory, read_history
from pipedist.journal.log_format import DISK, FIRST, RecordLog
from pipedist.journal.writer import Journal, file_name
from pipedist.outputs.run_record import PRIVATE, read_record
from pipedist.plan import PassPlan, Plan, compile_plan
from pipedist.protocol.program import Shards
from pipedist.runs.call_replay import CallReplay, Replayed, execute, first_value
from pipedist.runs.identity import SpecSource, differences, listed
from pipedist.runs.pass_feeds import Spool, feed_of
from pipedist.runs.pass_folds import read_later, restore_pass
from pipedist.runs.pass_journal import PASS_STATE, PassJournal, key_of
from pipedist.runs.programs import CallKey, pass_of, pass_program, slot_of
from pipedist.runs.quarantine import QuarantinedElement
from pipedist.runs.resume import changes, header_of, platform_changes
from pipedist.runs.state_history import states_of


class Replay(Struct, frozen=True):
    """A call that can be executed again.

    Args:
        run: id of its run.
        key: which call.
        epoch: of its step.
        elements: ids of what it works on.
        left_out: ids of its elements that are set aside, and left out.
        states: version of each state that it reads.
        notes: what else there is to know, a line each.
        call: what is executed.
    """

    run: str
    key: CallKey
    epoch: int
    elements: tuple[int, ...]
    left_out: tuple[int, ...]
    states: Mapping[str, int]
    notes: tuple[str, ...]
    call: CallReplay

    def execute(self) -> Replayed:
        """Execute it, in this thread, which must not run an event loop."""
        return execute(self.call)


def threads_of(folder: Path) -> int:
    """Return the BLAS and OpenMP threads that a process needs to execute calls of a run.

    Raises:
        UsageError: there is no run in the folder, or it has no journal.
        JournalError: its journal is damaged.
    """
    return int(_history(folder).header.spec["threads_per_replica"])


@contextmanager
def open_replay(folder: Path, key: CallKey, elements: Sequence[int] = ()) -> Iterator[Replay]:
    """Find a call of a run, and all that it works on. Nothing in the folder is changed.

    Args:
        folder: the run's output folder.
        key: which call.
        elements: ids of elements of the call, to be executed without its others; empty: as it was committed.

    Raises:
        UsageError: there is no such run or call, it can't be had any more, or something has changed.
        SpecError: the spec has mistakes now.
        JournalError: the journal is damaged.
    """
    history = _history(folder)
    header = history.header
    with ExitStack() as stack:
        plan = compile_plan(SpecSource(header.source, tuple(header.sets), header.params).load(), workers=1)
        stack.callback(plan.close)
        now = header_of(plan, header.run)
        if changed := changes(header, now):
            raise UsageError(
                f"call {key} of the run {header.run} can't be executed again, because something has changed "
                f"(there {header.digest[:12]}, now {now.digest[:12]}):{listed(changed)}"
            )
        lookup = _Lookup(plan, folder, history, key, stack)
        yield anyio.run(lookup.find, tuple(elements), _code_changed(header, now))


def _history(folder: Path) -> History:
    if read_record(folder, folder) is None:
        raise UsageError(f"there is no run in {folder}: RUN is the output folder of one, as out/NAME")
    history = read_history(folder / PRIVATE / "journal")
    if history is None:
        raise UsageError(
            f"the journal in {folder} has no whole record: the run was killed before its first step"
        )
    if history.problems:
        raise JournalError(f"the journal in {folder} does not add up:\n  " + "\n  ".join(history.problems))
    return history


def _code_changed(there: Header, now: Header) -> list[str]:
    modules = [line.partition(":")[0] for line in differences(there.code, now.code)]
    return [
        *([f"changed since the run began: module {', '.join(modules)}"] if modules else []),
        *(f"the run began with {line}" for line in platform_changes(there)),
    ]


class _KeptPass(PassJournal):
    """What is durable of a pass, to be read: nothing is written, whatever else uses the folder."""

    def __init__(self, folder: Path, key: str, replicas: int, before: PassHistory) -> None:
        unopened = Journal(folder / PRIVATE / "journal", -1, 0, FIRST, DISK)
        super().__init__(unopened, key, replicas, before)

    def log(self, name: str) -> RecordLog:
        """Open a file that grew, as far as it is durable."""
        file = f"{file_name(self._key, name)}.log"
        end = self._before.logs.get(file)
        if end is None:
            raise JournalError(f"the journal has no values of {name}")
        try:
            fd = os.open(self._path(file), os.O_RDONLY)
        except OSError as error:
            raise _unreadable(error) from error
        return RecordLog(fd, end, _unreadable)


def _unreadable(error: OSError) -> JournalError:
    return JournalError(
        f"{error.filename or 'a file of the journal'} can't be read: {error.strerror or error}"
    )


class _Files(Struct, frozen=True):
    """The output files of a run."""

    folder: Path

    def final(self, output: str) -> Path:
        """Return where the file of an output is, absolute."""
        return (self.folder / output).absolute()


class _Lookup:
    """Finds a call, and all that it works on.

    Args:
        plan: of its run.
        folder: of the run.
        history: of the run.
        key: which call.
        stack: closes what is opened.
    """

    def __init__(self, plan: Plan, folder: Path, history: History, key: CallKey, stack: ExitStack) -> None:
        self._plan = plan
        self._folder = folder
        self._history = history
        self._key = key
        self._stack = stack
        self._pass = _pass(plan, key)

    def _kept(self, pass_: PassPlan) -> _KeptPass:
        before = self._history.passes.get(key_of(pass_), PassHistory())
        return _KeptPass(self._folder, key_of(pass_), self._plan.spec.replicas, before)

    async def find(self, elements: tuple[int, ...], notes: list[str]) -> Replay:
        """Return the call."""
        plan, key, pass_ = self._plan, self._key, self._pass
        kept = self._kept(pass_)
        if kept.is_complete and key.step >= kept.steps:
            raise _no_such_step(key, pass_, kept.steps)
        values, spools = await self._earlier()
        feed = feed_of(plan, pass_, spools)
        await self._go_to(feed)
        epoch = feed.epoch(key.step)
        shards, chosen, left_out = self._shards(feed, kept, elements, notes)
        states = self._states(epoch)
        if states:
            places = {name: [number, states[name][0]] for number, name in enumerate(states)}
            shards = replace(shards, states=places)
        shown = (key.stage,) if key.stage in pass_.runs else ()
        lo = key.step * plan.spec.replicas + (0 if pass_.gang else key.replica)
        call = CallReplay(
            stage=plan.spec.stages[key.stage],
            slot=slot_of(key.stage, plan.spec.stages[key.stage]),
            program=pass_program(plan, pass_, feed.reader, values, shown),
            emitted=frozenset(e.slot for e in pass_program(plan, pass_, feed.reader, values, ()).emits),
            lo=lo,
            hi=lo + (plan.spec.replicas if pass_.gang else 1),
            number=key.step * plan.spec.replicas + key.replica,
            shards=shards,
            states={name: value for name, (_, value) in states.items()},
        )
        versions = {name: version for name, (version, _) in states.items()}
        return Replay(self._history.header.run, key, epoch, chosen, left_out, versions, tuple(notes), call)

    async def _earlier(self) -> tuple[dict[str, Tree], dict[str, Spool]]:
        """Return what earlier phases made: finished values, and kept ones."""
        values: dict[str, Tree] = {}
        spools: dict[str, Spool] = {}
        unwritten = {name: OutputError(text) for name, text in self._history.unwritten.items()}
        for earlier in self._plan.passes:
            if earlier.phase >= self._pass.phase:
                continue
            kept = self._kept(earlier)
            if not kept.is_complete:
                raise UsageError(
                    f"the run did not come to call {self._key}: {earlier.name}, before it, is not complete"
                )
            made: dict[str, Spool] = {}
            later = read_later(self._plan)
            await restore_pass(
                self._plan, earlier, kept, _Files(self._folder), later, values, made, unwritten
            )
            for name, spool in made.items():
                spools[name] = spool
                self._stack.callback(spool.close_log)
        return values, spools

    async def _go_to(self, feed: Feed) -> None:
        """Read a feed as far as the call's step."""
        key, pass_ = self._key, self._pass
        try:
            await feed.begin_at(key.step)
            offers = await feed.pull(1)
        except SourceError as error:
            raise UsageError(f"there is no call {key}: {error}") from error
        if not offers:
            raise _no_such_step(key, pass_, feed.steps_total)
        if pass_.gang:
            return
        if key.replica >= offers[0].parts or key.replica in offers[0].skipped_replicas:
            raise UsageError(
                f"there is no call {key}: of step {key.step} the shard of replica {key.replica} is empty"
            )

    def _shards(
        self, feed: Feed, kept: PassJournal, elements: tuple[int, ...], notes: list[str]
    ) -> tuple[Shards, tuple[int, ...], tuple[int, ...]]:
        """Return what the call works on, the ids of that, and those that are left out."""
        key, replicas = self._key, self._plan.spec.replicas
        shards = feed.ids(key.step)
        ids = [int(i) for i in shards[key.replica]] if key.replica < len(shards) else []
        call = key.step * replicas + key.replica
        if self._pass.gang:
            if elements:
                raise UsageError(
                    "the replicas of a gang's step can't do without elements: leave out --element"
                )
            first = key.step * replicas
            return feed.shards(first, first + replicas, local=True), tuple(ids), ()
        found = kept.part(PASS_STATE) or {"quarantine": []}
        aside = [QuarantinedElement(*fields) for fields in found["quarantine"]]
        out = {each.element for each in aside if (each.step, each.replica) == (key.step, key.replica)}
        if elements:
            if missing := [e for e in elements if e not in ids]:
                raise UsageError(
                    f"element {missing[0]} is not of call {key}, whose elements are {_shown(ids)}"
                )
            out = {*ids}.difference(elements)
        elif out and out.issuperset(ids):
            notes.append(
                "the shard was set aside as a whole, so the call has no result: executed with all of it"
            )
            out = set()
        elif out:
            notes.append(
                f"without elements that were set aside: {_shown(sorted(out))}; --element ID has one alone"
            )
        if not out:
            return feed.shards(call, call + 1, local=True), tuple(ids), ()
        if not feed.separable(call):
            raise UsageError("values of an earlier phase can't be told apart: leave out --element")
        places = [(at, at + 1) for at, element in enumerate(ids) if element not in out]
        chosen = tuple(element for element in ids if element not in out)
        return feed.some(call, places, local=True), chosen, () if elements else tuple(sorted(out))

    def _states(self, epoch: int) -> dict[str, tuple[int, Tree]]:
        """Return version and value of each state that the call read."""
        training = self._plan.training
        if training is None or not self._plan.states_read(self._pass):
            return {}
        found = states_of(self._plan, self._pass, self._key, epoch, self._kept(training))
        return {name: at or (0, first_value(self._plan, name)) for name, at in found.items()}


def _pass(plan: Plan, key: CallKey) -> PassPlan:
    found = pass_of(plan, key.stage)
    if found is None:
        if key.stage in plan.spec.stages:
            raise UsageError(
                f"stage {key.stage} can't be executed again: calls of updates and combine functions are not "
                "on shards; their inputs are the results of others, which can be"
            )
        names = ", ".join(name for pass_ in plan.passes for name in (*pass_.runs, *pass_.folds))
        raise UsageError(f"there is no call {key}: the spec has no stage {key.stage}; it has {names}")
    if key.replica >= plan.spec.replicas:
        raise UsageError(f"there is no call {key}: replicas are counted from 0 to {plan.spec.replicas - 1}")
    return found


def _no_such_step(key: CallKey, pass_: PassPlan, steps: int | None) -> UsageError:
    has = "has ended before" if steps is None else f"has {steps} step{'s' * (steps != 1)}, counted from 0"
    return UsageError(f"there is no call {key}: {pass_.root} {has}")


def _shown(ids: Sequence[int]) -> str:
    if len(ids) > 1 and ids[-1] - ids[0] == len(ids) - 1:
        return f"{ids[0]} to {ids[-1]}"
    return ", ".join(map(str, ids[:10])) + (", ..." if len(ids) > 10 else "")
