"""Finds a call of a run and its inputs, to execute it again, alone.

All inputs come from the run's folder: the journal has the path of the spec, which must not have changed, the results
of earlier phases, and the states. Nothing in the folder is written. The call is executed by the code of the workers
(`pipedist.worker`); for a gang, all replicas of the step run as threads of this process. A stage's `timeout_s` is
not enforced, and the death of the process is not handled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
from msgspec import Struct
from msgspec.structs import replace

from pipedist.core.names import few, listed, plural
from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed
from pipedist.datasets.sources import SourceError
from pipedist.errors import JournalError, OutputError, UsageError
from pipedist.journal.history import History, PassHistory, read_history
from pipedist.journal.log_format import DISK, FIRST, RecordLog
from pipedist.journal.writer import Journal, log_file
from pipedist.outputs.run_record import PRIVATE, existing_record
from pipedist.plan import PassPlan, Plan, compile_plan
from pipedist.protocol.program import Shards
from pipedist.runs.call_keys import CallKey, pass_of
from pipedist.runs.call_replay import CallReplay, Replayed, execute, first_value
from pipedist.runs.gather_fold import GatherFold
from pipedist.runs.identity import differences, meaning
from pipedist.runs.kept_values import Spool
from pipedist.runs.pass_feeds import SpoolFeed, feed_of
from pipedist.runs.pass_folds import restore_pass
from pipedist.runs.pass_journal import PASS_STATE, PassJournal
from pipedist.runs.programs import FINISH, FINISHED, finish_program, pass_program, slot_of
from pipedist.runs.quarantine import QuarantinedElement
from pipedist.runs.run_header import (
    changed_inputs,
    changes,
    ended_ns,
    header_of,
    platform_changes,
    with_passes,
)
from pipedist.runs.spec_source import SpecSource
from pipedist.runs.state_history import states_of
from pipedist.spec import GatherSpec


class Replay(Struct, frozen=True):
    """A call that can be executed again.

    Args:
        elements: ids of the elements to process; none for a `finish`, which gets a value.
        skipped: ids of its quarantined elements, which are skipped.
        states: version of each state that it reads.
        notes: messages for the user, one line each.
    """

    run: str
    key: CallKey
    epoch: int
    elements: tuple[int, ...]
    skipped: tuple[int, ...]
    states: Mapping[str, int]
    notes: tuple[str, ...]
    call: CallReplay

    def execute(self) -> Replayed:
        """Execute the call in this thread, which must not run an event loop."""
        return execute(self.call)


def threads_of(folder: Path) -> int:
    """Return the number of BLAS and OpenMP threads for calls of a run."""
    return int(_history(folder).header.spec["threads_per_replica"])


@contextmanager
def open_replay(folder: Path, key: CallKey, elements: Sequence[int] = ()) -> Iterator[Replay]:
    """Find a call of a run and its inputs, without changing the folder.

    `elements` are ids of the only elements of the call to process; empty: as it was committed.
    """
    history = _history(folder)
    header = history.header
    with ExitStack() as stack:
        spec = SpecSource(header.source, tuple(header.sets), header.params).load()
        plan = compile_plan(spec, workers=spec.replicas)  # a gang with GPUs needs as many
        stack.callback(plan.close)
        now = header_of(
            plan, meaning(plan.spec), header.run, SpecSource(), header, ended_ns(folder / PRIVATE / "journal")
        )
        if changed := changes(header, now):
            raise UsageError(
                f"call {key} of the run {header.run} can't be replayed, because something has changed:"
                f"{listed(changed)}"
            )
        modules = [line.partition(":")[0] for line in differences(header.code, now.code)]
        notes = [f"module {', '.join(modules)} has changed since the run"] if modules else []
        notes += changed_inputs(header, now, "stages.")
        notes += [f"the run used {line}" for line in platform_changes(header)]
        lookup = _Lookup(with_passes(plan, header), folder, history, key, stack)
        yield anyio.run(lookup.find, tuple(elements), notes)


def _history(folder: Path) -> History:
    existing_record(folder)
    history = read_history(folder / PRIVATE / "journal")
    if history is None:
        raise UsageError(
            f"the journal in {folder} has no complete record: the run was killed before its first step"
        )
    if history.problems:
        raise JournalError(f"the journal in {folder} is inconsistent:\n  " + "\n  ".join(history.problems))
    return history


class _ReadOnlyPassJournal(PassJournal):
    """A pass's part of a journal, for reading only: a run may use the folder."""

    def __init__(self, folder: Path, key: str, replicas: int, before: PassHistory) -> None:
        unopened = Journal(folder / PRIVATE / "journal", -1, 0, FIRST, DISK)
        super().__init__(unopened, key, replicas, before)

    def log(self, name: str) -> RecordLog:
        file = log_file(self._key, name)
        end = self.before.logs.get(file)
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


class _Lookup:
    def __init__(self, plan: Plan, folder: Path, history: History, key: CallKey, stack: ExitStack) -> None:
        self._plan = plan
        self._folder = folder
        self._history = history
        self._key = key
        self._stack = stack
        self._pass = _pass(plan, key)
        self._is_cut_off = False  # the pass that makes the values which the call reads is incomplete

    def _journal(self, pass_: PassPlan) -> _ReadOnlyPassJournal:
        before = self._history.passes.get(pass_.key, PassHistory())
        return _ReadOnlyPassJournal(self._folder, pass_.key, self._plan.spec.replicas, before)

    async def find(self, elements: tuple[int, ...], notes: list[str]) -> Replay:
        plan, key, pass_ = self._plan, self._key, self._pass
        journal = self._journal(pass_)
        if key.stage.endswith(FINISH):
            return await self._find_finish(journal, elements, notes)
        if journal.before.complete and key.step >= journal.before.steps:
            raise _no_such_step(key, pass_, journal.before.steps)
        values, spools = await self._restore_earlier_phases()
        feed = feed_of(plan, pass_, spools, {})
        await self._go_to_step(feed)
        epoch = feed.epoch(key.step)
        shards, chosen, skipped = self._shards(feed, journal, elements, notes)
        states = self._states(epoch)
        if states:
            places = {name: [number, states[name][0]] for number, name in enumerate(states)}
            shards = replace(shards, states=places)
        shown = (key.stage,) if key.stage in pass_.runs else ()
        lo = key.step * plan.spec.replicas + (0 if pass_.gang else key.replica)
        call = CallReplay(
            stage=plan.spec.stages[key.stage],
            slot=slot_of(plan, key.stage),
            program=pass_program(plan, pass_, feed.reader, values, shown),
            emitted=frozenset(e.slot for e in pass_program(plan, pass_, feed.reader, values, ()).emits),
            lo=lo,
            hi=lo + (plan.spec.replicas if pass_.gang else 1),
            number=key.step * plan.spec.replicas + key.replica,
            shards=shards,
            states={name: value for name, (_, value) in states.items()},
        )
        versions = {name: version for name, (version, _) in states.items()}
        return Replay(self._history.header.run, key, epoch, chosen, skipped, versions, tuple(notes), call)

    async def _find_finish(self, journal: PassJournal, elements: tuple[int, ...], notes: list[str]) -> Replay:
        """Return the call that finishes the value of a stage, of which the journal has the value."""
        plan, key = self._plan, self._key
        name = key.stage.removesuffix(FINISH)
        stage = plan.spec.stages[name]
        if elements:
            raise UsageError(f"call {key} gets a whole value, not elements: remove --element")
        state = (journal.part(PASS_STATE) or {"folds": {}})["folds"].get(name, {})
        if "unfinished" in state:
            value = state["unfinished"]
        elif "is_whole" in state and isinstance(stage, GatherSpec):
            fold = GatherFold(name, "run", stage.gather, None)
            entries = ((entry.meta, tree) for entry, tree in journal.entries(name))
            await fold.restore({"epoch": 0, "nothing": -1, "finished": True}, entries)
            value = fold.result
        else:
            raise UsageError(f"the run did not reach call {key}: its pass is incomplete")
        values, _ = await self._restore_earlier_phases()
        program = finish_program(plan, name, values)
        shards = Shards(values=[((value,), {})])
        call = CallReplay(stage, FINISHED, program, frozenset([FINISHED]), 0, 1, 0, shards, {})
        return Replay(self._history.header.run, key, 0, (), (), {}, tuple(notes), call)

    async def _restore_earlier_phases(self) -> tuple[dict[str, Tree], dict[str, Spool]]:
        """Return the finished values and the kept values of earlier phases."""
        values: dict[str, Tree] = {}
        spools: dict[str, Spool] = {}
        unwritten = {name: OutputError(text) for name, text in self._history.unwritten.items()}
        for earlier in self._plan.passes:
            if earlier.phase >= self._pass.phase:
                continue
            journal = self._journal(earlier)
            if not journal.before.complete:
                raise UsageError(
                    f"the run did not reach call {self._key}: the earlier pass {earlier.name} is incomplete"
                )
            made: dict[str, Spool] = {}
            final = self._folder.absolute().joinpath
            await restore_pass(self._plan, earlier, journal, final, values, made, unwritten)
            for name, spool in made.items():
                spools[name] = spool
                self._stack.callback(spool.close_log)
        maker = self._plan.maker(self._pass)
        if maker is not None:
            root, journal = self._pass.root, self._journal(maker)
            if not journal.has_log(root):
                raise UsageError(
                    f"the run did not reach call {self._key}: no values of {root} were committed"
                )
            spools[root] = spool = Spool(root, journal.log(root))
            self._stack.callback(spool.close_log)
            await spool.restore(journal.places(root))
            self._is_cut_off = not journal.before.complete
        return values, spools

    async def _go_to_step(self, feed: Feed) -> None:
        key, pass_ = self._key, self._pass
        try:
            await feed.begin_at(key.step)
            if isinstance(feed, SpoolFeed) and self._is_cut_off:
                feed.end(complete=False)
            batches = await feed.pull(1)
        except SourceError as error:
            raise UsageError(f"there is no call {key}: {error}") from error
        if not batches:
            raise _no_such_step(key, pass_, feed.steps_total)
        if pass_.gang:
            return
        if key.replica >= batches[0].parts or key.replica in batches[0].skipped_replicas:
            raise UsageError(
                f"there is no call {key}: the shard of replica {key.replica} in step {key.step} is empty"
            )

    def _shards(
        self, feed: Feed, journal: PassJournal, elements: tuple[int, ...], notes: list[str]
    ) -> tuple[Shards, tuple[int, ...], tuple[int, ...]]:
        """Return the call's shards, the ids of their elements, and skipped ids."""
        key, replicas = self._key, self._plan.spec.replicas
        shards = feed.ids(key.step)
        ids = [int(i) for i in shards[key.replica]] if key.replica < len(shards) else []
        call = key.step * replicas + key.replica
        if self._pass.gang:
            if elements:
                raise UsageError(
                    "a call of a gang can't be executed with some of its elements only: remove --element"
                )
            first = key.step * replicas
            return feed.shards(first, first + replicas, local=True), tuple(ids), ()
        found = journal.part(PASS_STATE) or {"quarantine": []}
        quarantined = [QuarantinedElement(*fields) for fields in found["quarantine"]]
        skipped = {x.element for x in quarantined if (x.step, x.replica) == (key.step, key.replica)}
        if elements:
            if missing := [e for e in elements if e not in ids]:
                raise UsageError(
                    f"element {missing[0]} does not belong to call {key}, whose elements are {_ranges(ids)}"
                )
            skipped = {*ids}.difference(elements)
        elif skipped and skipped.issuperset(ids):
            notes.append(
                "the whole shard was quarantined, so the call has no result in the run; it is executed with "
                "all of its elements"
            )
            skipped = set()
        elif skipped:
            notes.append(
                f"quarantined elements are skipped: {_ranges(sorted(skipped))}. To execute one of them "
                "alone, use --element ID"
            )
        if not skipped:
            return feed.shards(call, call + 1, local=True), tuple(ids), ()
        if not feed.separable(call):
            raise UsageError(
                "the call reads values of an earlier stage that are not arrays with a row for each element, so they "
                "can't be split into elements: remove --element"
            )
        places = [(at, at + 1) for at, element in enumerate(ids) if element not in skipped]
        chosen = tuple(element for element in ids if element not in skipped)
        shown = feed.shards(call, call + 1, local=True, elements=places)
        return shown, chosen, () if elements else tuple(sorted(skipped))

    def _states(self, epoch: int) -> dict[str, tuple[int, Tree]]:
        training = self._plan.training
        if training is None or not self._plan.states_read(self._pass):
            return {}
        found = states_of(self._plan, self._pass, self._key, epoch, self._journal(training))
        return {name: at or (0, first_value(self._plan, name)) for name, at in found.items()}


def _pass(plan: Plan, key: CallKey) -> PassPlan:
    found = pass_of(plan, key.stage)
    if (name := key.stage.removesuffix(FINISH)) in plan.finishes and name != key.stage:
        if getattr(plan.spec.stages[name], "per", "") != "run":
            raise UsageError(
                f"call {key} can't be replayed: only the value of a stage with `per: run` is kept for its `finish`. "
                "Replay the calls that make its parts instead"
            )
        if (key.step, key.replica) != (0, 0):
            raise UsageError(f"there is no call {key}: the only one is {key.stage}/0/0")
        return next(pass_ for pass_ in plan.passes if name in pass_.folds)
    if found is None:
        if key.stage in plan.spec.stages:
            raise UsageError(
                f"calls of stage {key.stage} can't be replayed: updates and combine functions don't work on "
                "shards. Replay the calls that make their inputs instead"
            )
        names = ", ".join(name for pass_ in plan.passes for name in (*pass_.runs, *pass_.folds))
        raise UsageError(f"there is no call {key}: the spec has no stage {key.stage}; its stages are {names}")
    if key.replica >= plan.spec.replicas:
        raise UsageError(f"there is no call {key}: replicas are numbered from 0 to {plan.spec.replicas - 1}")
    return found


def _no_such_step(key: CallKey, pass_: PassPlan, steps: int | None) -> UsageError:
    has = "ends earlier" if steps is None else f"has {plural(steps, 'step')}, numbered from 0"
    return UsageError(f"there is no call {key}: {pass_.root} {has}")


def _ranges(ids: Sequence[int]) -> str:
    if len(ids) > 1 and ids[-1] - ids[0] == len(ids) - 1:
        return f"{ids[0]} to {ids[-1]}"
    return few(ids, 10)
