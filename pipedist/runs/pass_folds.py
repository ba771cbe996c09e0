"""The folds of one pass, up to finished values and their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import anyio.abc
import anyio.to_thread

from pipedist.coordinator import Coordinator, Slots
from pipedist.core.types import Tree
from pipedist.errors import CallError, FoldError, OutputError
from pipedist.plan import PassPlan, Plan
from pipedist.reduction.batched import step_partial
from pipedist.runs.folds import CombineFold, Fold, FoldCall, ReduceFold, ValueFold
from pipedist.runs.gather_fold import GatherFold
from pipedist.runs.pass_feeds import Spool
from pipedist.runs.pass_journal import PASS_STATE, STATE
from pipedist.runs.programs import COMBINED, combine_program, parts_of, reduction_of, slot_of
from pipedist.scheduler import PassSettings
from pipedist.spec import GatherSpec, ReduceSpec, RunSpec, StageRef, UpdateSpec, references
from pipedist.values import PerReplica, gather

if TYPE_CHECKING:
    from pipedist.journal.log_format import RecordLog
    from pipedist.outputs import RunFolder, Sink
    from pipedist.outputs.tables import Table
    from pipedist.runs.pass_journal import PassJournal

FOLD_CALLS_MAX = 16
"""Maximum number of concurrent fold calls of one stage."""

_MISFITS = (TypeError, ValueError, OverflowError, OutputError)
"""Errors of a fold whose components do not fit together, or do not fit into its file."""


class PassFolds:
    """The folds of the reduce and gather stages of one pass.

    Args:
        plan: the run's plan.
        pass_: the pass.
        coordinator: coordinator of the cluster that executes `combine` functions.
        folder: the output folder, None for a run without outputs.
        read_later: stages whose values a later phase or an update reads.
        unwritten: why an output file could not be written, by stage; the folds add their own.
        durable: the pass's part of the journal, None if there is none.
    """

    def __init__(
        self,
        plan: Plan,
        pass_: PassPlan,
        coordinator: Coordinator,
        folder: RunFolder | None,
        *,
        read_later: frozenset[str],
        unwritten: MutableMapping[str, OutputError],
        durable: PassJournal | None,
    ) -> None:
        self._plan = plan
        self._pass = pass_
        self._coordinator = coordinator
        self._folder = folder
        self._read_later = read_later
        self._unwritten = unwritten
        self._durable = durable
        self._slots = {name: slot_of(name, plan.spec.stages[name]) for name in (*pass_.runs, *pass_.folds)}
        self._folds: dict[str, Fold] = {}
        self._sinks: dict[str, Sink] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The stages whose folds are open."""
        return tuple(self._folds)

    # -- the beginning -----------------------------------------------------------------------------

    def open(self, stack: ExitStack) -> None:
        """Open every fold and its file.

        Args:
            stack: closes them; a file that is not finished by then is discarded.

        Raises:
            OutputError: a file can't be written.
        """
        for name in self._pass.folds:
            sink = sink_of(self._plan, self._folder, name)
            if sink is not None:
                self._sinks[name] = sink
                stack.callback(sink.abort)  # does nothing if the sink is finished
            self._folds[name] = self._fold(name, sink, stack)

    def _fold(self, name: str, sink: Sink | None, stack: ExitStack) -> Fold:
        stage = self._plan.spec.stages[name]
        keep = keeps(self._plan, self._folder, self._read_later, name)
        log: RecordLog | None = None
        if self._durable is not None and grows(self._plan, name):
            log = self._durable.log(name)
        if isinstance(stage, GatherSpec):
            return GatherFold(name, stage.per, stage.gather, sink, keep=keep, log=log)
        if not isinstance(stage, ReduceSpec):
            raise TypeError(f"stage {name} is neither a reduce nor a gather")
        if stage.op is not None:
            return ReduceFold(name, stage.per, reduction_of(stage), sink, keep=keep, log=log)
        call = self._fold_call(name, stack)
        return CombineFold(name, stage.per, call, sink, keep=keep, calls_max=FOLD_CALLS_MAX, log=log)

    def _fold_call(self, name: str, stack: ExitStack) -> FoldCall:
        handle = self._coordinator.open_pass(
            combine_program(self._plan, name),
            name=name,
            settings=PassSettings(1, ordered=False, fail_fast=False, pulled=False, priority=0),
        )
        stack.callback(handle.close)

        async def call(groups: list[list[Tree]]) -> Tree:
            try:
                slots = await handle.call_step([groups])
            except CallError as error:
                if all(part is None for group in groups for part in group):
                    raise FoldError(name, self._no_value(name)) from error
                raise
            return slots[0][COMBINED]

        return call

    async def begin(self, tasks: anyio.abc.TaskGroup, states: Mapping[str, Tree] | None) -> None:
        """Prepare for the first step, or restore a snapshot.

        Args:
            tasks: the task group in which fold calls run.
            states: the `state` in the snapshot from which the pass continues; None: the pass begins.

        Raises:
            JournalError: the journal is damaged.
        """
        for fold in self._folds.values():
            if isinstance(fold, CombineFold):
                fold.attach(tasks)
        if states is None or self._durable is None:
            return
        for name, fold in self._folds.items():
            found = self._durable.entries(name) if grows(self._plan, name) else ()
            await fold.restore(states[name], ((entry.meta, tree) for entry, tree in found))

    # -- step by step ------------------------------------------------------------------------------

    async def add(self, epoch: int, steps: Sequence[Sequence[Slots]]) -> None:
        """Take the results of the next steps, all of one epoch.

        Raises:
            FoldError: components do not fit together.
            CallError: a `combine` function failed.
            OutputError: a file can't be written.
        """
        for name, fold in self._folds.items():
            try:
                await fold.add(epoch, parts_of(self._slots[name], steps))
            except _MISFITS as error:
                self._raise(name, error)

    async def end_epoch(self, epoch: int) -> None:
        """End an epoch, to which all steps since the previous end belong.

        Raises:
            As `add`.
        """
        for name, fold in self._folds.items():
            try:
                await fold.end_epoch(epoch)
            except _MISFITS as error:
                self._raise(name, error)

    def watch(self, names: frozenset[str]) -> None:
        """Keep new values of some stages for `take_fresh` from now on."""
        for name in names:
            self._folds[name].watch()

    def take_fresh(self, names: frozenset[str]) -> dict[str, list[Tree]]:
        """Return the values of some stages since the previous call, in order."""
        return {name: self._folds[name].take_fresh() for name in names}

    async def step_value(self, name: str, slots: list[Slots]) -> Tree:
        """Return the value of a stage for a single step, for a subscriber.

        Raises:
            CallError: a `combine` function failed.
        """
        stage = self._plan.spec.stages[name]
        (parts,) = parts_of(self._slots[name], [slots])
        if isinstance(stage, RunSpec):
            made = [each.get(self._slots[name]) for each in slots]
            return PerReplica([*made, *[None] * (self._plan.spec.replicas - len(made))])
        if isinstance(stage, GatherSpec):
            return gather(PerReplica(parts), stage.gather, len(parts)) if parts else None
        fold = self._folds[name]
        if isinstance(fold, CombineFold):
            return await fold.step_value(parts)
        if not isinstance(stage, ReduceSpec):
            raise TypeError(f"stage {name} has no value for a step")
        reduction = reduction_of(stage)
        return reduction.finish(step_partial(reduction, parts))

    def _raise(self, name: str, error: Exception) -> NoReturn:
        """Raise an error of a fold as the error of its stage."""
        if self._folds[name].of_nothing:
            raise FoldError(name, self._no_value(name)) from error
        if isinstance(error, OutputError):
            raise error
        raise FoldError(name, str(error)) from error

    def _no_value(self, name: str) -> str:
        of = self._plan.spec.stages[name].of
        return f"stage {of} returned None on every call: is a `return` missing?"

    # -- snapshots --------------------------------------------------------------------------------

    def state(self) -> dict[str, Tree]:
        """Return the state of the folds, without the values in their logs."""
        return {name: fold.state() for name, fold in self._folds.items()}

    def logs_over(self) -> list[str]:
        """Return the logs of a complete pass whose values are in files."""
        return [name for name, fold in self._folds.items() if grows(self._plan, name) and not fold.kept]

    # -- the end -----------------------------------------------------------------------------------

    async def finish(self, epochs: int) -> None:
        """Complete all values after the last step.

        Args:
            epochs: number of epochs.

        Raises:
            FoldError: components do not fit together, or all of them were None.
            CallError: a `combine` function failed.
        """
        for name, fold in self._folds.items():
            with self._file_of(name):
                try:
                    await fold.finish(epochs)
                except _MISFITS as error:
                    self._raise(name, error)
            if fold.of_nothing:
                raise FoldError(name, self._no_value(name))

    async def write(self) -> None:
        """Complete the files."""
        for name, sink in self._sinks.items():
            if name not in self._unwritten:
                with self._file_of(name):
                    await anyio.to_thread.run_sync(sink.finish)

    @contextmanager
    def _file_of(self, name: str) -> Iterator[None]:
        """Record a file that can't be completed, and continue with the others."""
        try:
            yield
        except OutputError as error:
            self._unwritten[name] = error

    def deliver(self, values: MutableMapping[str, Tree]) -> None:
        """Add the finished values by stage, or the paths of their files."""
        for name, fold in self._folds.items():
            if fold.kept or self._folder is None:
                values[name] = fold.result
            elif name not in self._unwritten:
                values[name] = self._folder.final(self._plan.spec.outputs[name])


def sink_of(plan: Plan, folder: RunFolder | None, name: str) -> Sink | None:
    """Return the sink of a stage's value, None if it has no file."""
    output = plan.spec.outputs.get(name)
    if output is None or folder is None:
        return None
    from pipedist.outputs import open_sink  # only runs with files need it

    stage = plan.spec.stages[name]
    return open_sink(
        folder.staged(output),
        shape="run" if getattr(stage, "per", "run") == "run" else "per",
        gather=isinstance(stage, GatherSpec),
        axis=stage.gather if isinstance(stage, GatherSpec) else 0,
        label=f"outputs.{name} ({output})",
        table=_table(plan, name),
    )


def _table(plan: Plan, name: str) -> Table | None:
    """Return the table of a stage's value, if its `combine` function has one."""
    stage = plan.spec.stages[name]
    if not isinstance(stage, ReduceSpec) or stage.combine is None or stage.per != "run":
        return None
    from pipedist.core.functions import load  # only runs with files need it
    from pipedist.outputs.tables import table_of

    ref = plan.functions[name]
    return table_of(load(ref, [str(plan.spec.code)]) if ref.name else stage.combine)


class Files(Protocol):
    """Locates the files of outputs."""

    def final(self, output: str) -> Path:
        """Return the absolute path of an output."""


def read_later(plan: Plan) -> frozenset[str]:
    """Return the stages whose values a later phase or an update reads."""
    return frozenset(
        ref.name
        for stage in plan.spec.stages.values()
        if isinstance(stage, RunSpec | UpdateSpec)
        for ref in references(stage.with_)
        if isinstance(ref, StageRef)
    ) | {stage.of for stage in plan.spec.stages.values() if isinstance(stage, UpdateSpec)}


def keeps(plan: Plan, folder: Files | None, read_later: frozenset[str], name: str) -> bool:
    """Return whether a stage keeps its values besides writing them to a file."""
    if folder is None or name not in plan.spec.outputs:
        return True
    stage = plan.spec.stages[name]
    return name in read_later if isinstance(stage, GatherSpec) else getattr(stage, "per", "run") == "run"


def grows(plan: Plan, name: str) -> bool:
    """Return whether the state of a fold grows with the run, and needs a log."""
    stage = plan.spec.stages[name]
    return isinstance(stage, GatherSpec) or getattr(stage, "per", "run") != "run"


async def restore_pass(
    plan: Plan,
    pass_: PassPlan,
    durable: PassJournal,
    folder: Files,
    read_later: frozenset[str],
    values: MutableMapping[str, Tree],
    spools: MutableMapping[str, Spool],
    unwritten: Mapping[str, OutputError],
) -> None:
    """Restore the values of a complete pass.

    Args:
        values, spools: receive the values.
        unwritten: stages whose output files could not be written.

    Raises:
        JournalError: the journal is damaged.
    """
    found = durable.part(PASS_STATE)
    for name in pass_.folds:
        if keeps(plan, folder, read_later, name):
            fold = _finished_fold(plan, name)
            entries = durable.entries(name) if grows(plan, name) else ()
            await fold.restore(found["folds"][name], ((entry.meta, tree) for entry, tree in entries))
            values[name] = fold.result
        elif name not in unwritten:
            values[name] = folder.final(plan.spec.outputs[name])
    for name in pass_.kept:
        spools[name] = spool = Spool(name, durable.log(name))
        spool.restore(durable.places(name))
    values.update((name, value[0]) for name, value in durable.parts(STATE).items())


def _finished_fold(plan: Plan, name: str) -> Fold:
    stage = plan.spec.stages[name]
    if isinstance(stage, GatherSpec):
        return GatherFold(name, stage.per, stage.gather, None)
    if not isinstance(stage, ReduceSpec):
        raise TypeError(f"stage {name} is neither a reduce nor a gather")
    return ValueFold(name, stage.per, None)
