"""The folds of one pass, up to finished values and their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.abc
import anyio.to_thread

from pipedist.coordinator import Coordinator, PassHandle, Slots
from pipedist.coordinator.measurements import Recorder
from pipedist.core.types import Tree
from pipedist.errors import CallError, FoldError, OutputError
from pipedist.journal.writer import log_file
from pipedist.plan import PassPlan, Plan
from pipedist.reduction.tree import fold_all
from pipedist.runs.combine_fold import CombineFold, FoldCall
from pipedist.runs.folds import (
    THREAD_OBJECTS,
    FinishCall,
    Fold,
    FoldOptions,
    ValueFold,
    in_thread_if,
    is_large,
)
from pipedist.runs.gather_fold import GatherFold
from pipedist.runs.kept_values import Spool
from pipedist.runs.pass_journal import PASS_STATE
from pipedist.runs.programs import (
    COMBINED,
    FINISH,
    FINISHED,
    combine_program,
    finish_program,
    parts_of,
    reduction_of,
    slot_of,
)
from pipedist.runs.reduce_fold import ReduceFold
from pipedist.scheduler import PassSettings
from pipedist.spec import GatherSpec, ReduceSpec, StageRef, UpdateSpec, per_of, references
from pipedist.values import PerReplica, gather

if TYPE_CHECKING:
    from pipedist.journal.history import PassHistory
    from pipedist.outputs import RunFolder
    from pipedist.outputs.parts import StageSink
    from pipedist.outputs.tables import Table
    from pipedist.runs.pass_journal import PassJournal

LOG_BYTES_MAX = 2**30  # a longer log of values that have a file is removed when the pass is complete

FOLD_CALLS_MAX = 16  # maximum number of concurrent fold calls of one stage

_MISFITS = (TypeError, ValueError, OverflowError, OutputError)
"""Errors of a fold whose components do not fit together, or do not fit into its file."""


class PassFolds:
    """The folds of the reduce and gather stages of one pass.

    If components do not fit together, its methods raise FoldError.

    Args:
        unwritten: why an output file could not be written, by stage; the folds add their own.
        values: finished values of earlier phases, by stage.
    """

    def __init__(
        self,
        plan: Plan,
        pass_: PassPlan,
        coordinator: Coordinator,
        folder: RunFolder | None,
        *,
        unwritten: MutableMapping[str, OutputError],
        durable: PassJournal | None,
        recorder: Recorder,
        values: Mapping[str, Tree],
    ) -> None:
        self._plan = plan
        self._values = values
        self._finishes: dict[str, FinishCall] = {}
        self.finishing: list[PassHandle] = []  # the passes of the calls of functions that finish values
        self._pass = pass_
        self._coordinator = coordinator
        self._folder = folder
        self._unwritten = unwritten
        self._durable = durable
        self._recorder = recorder
        self._slots = {name: slot_of(plan, name) for name in (*pass_.runs, *pass_.folds)}
        self._folds: dict[str, Fold] = {}
        self._sinks: dict[str, StageSink] = {}

    def open(self, stack: ExitStack) -> None:
        """Open every fold and its file.

        `stack` closes them; a file that is not finished by then is discarded.
        """
        for name in self._pass.folds:
            sink = sink_of(self._plan, self._folder, name)
            if sink is not None:
                self._sinks[name] = sink
                stack.callback(sink.abort)  # does nothing if the sink is finished
            self._folds[name] = self._fold(name, sink, stack)

    def _fold(self, name: str, sink: StageSink | None, stack: ExitStack) -> Fold:
        stage = self._plan.spec.stages[name]
        keep = keeps(self._plan, name)
        log = self._durable.log(name) if self._durable is not None and self._is_logged(name) else None
        finish = self._finish_call(name, stack) if name in self._plan.finishes else None
        if finish is not None:
            self._finishes[name] = finish
        options: FoldOptions = {"keep": keep, "log": log, "finish": finish}
        if isinstance(stage, GatherSpec):
            return GatherFold(name, stage.per, stage.gather, sink, **options)
        assert isinstance(stage, ReduceSpec)
        if stage.op is not None:
            return ReduceFold(name, stage.per, reduction_of(stage), sink, **options)
        call = self._fold_call(name, stack)
        fold: type[CombineFold] = CombineFold
        if name in self._plan.keyed:
            from pipedist.runs.keyed_fold import KeyedFold  # rarely needed

            fold = KeyedFold
        return fold(name, stage.per, call, sink, calls_max=FOLD_CALLS_MAX, **options)

    def _is_logged(self, name: str) -> bool:
        """Return whether a fold has a log; one of an earlier process is continued."""
        return grows(self._plan, name) or (self._durable is not None and self._durable.has_log(name))

    def _fold_call(self, name: str, stack: ExitStack) -> FoldCall:
        handle = self._coordinator.open_pass(
            combine_program(self._plan, name),
            name=name,
            settings=PassSettings(1, ordered=False, pulled=False, priority=0),
            record=self._recorder.begin_pass(name, (), 1, self._pass.phase),
        )
        stack.callback(handle.close)
        no_value = self._no_value(name)  # `call` does not refer to `self`, which has the fold that calls it

        async def call(groups: list[list[Tree]]) -> Tree:
            try:
                slots = await handle.call_step([groups])
            except CallError as error:
                if all(part is None for group in groups for part in group):
                    raise FoldError(name, no_value) from error
                raise
            return slots[0][COMBINED]

        return call

    def _finish_call(self, name: str, stack: ExitStack) -> FinishCall:
        stage = self._plan.spec.stages[name]
        assert isinstance(stage, ReduceSpec | GatherSpec)
        program = finish_program(self._plan, name, self._values)
        settings = PassSettings(1, ordered=False, pulled=False, priority=0, call_s_max=program.call_s_max)
        handle = self._coordinator.open_pass(
            program,
            name=name + FINISH,
            settings=settings,
            retries={name + FINISH: stage.retries},
            record=self._recorder.begin_pass(name + FINISH, (name + FINISH,), 1, self._pass.phase),
        )
        stack.callback(handle.close)
        self.finishing.append(handle)

        async def call(value: Tree, number: int) -> Tree:
            try:
                slots = await handle.call_step([((value,), {})])
            except CallError as error:
                raise error.of_step(number) from error.__cause__
            if slots[0][FINISHED] is None:
                raise FoldError(name, "the function of `finish` returned None: is a `return` missing?")
            return slots[0][FINISHED]

        return call

    async def begin(self, tasks: anyio.abc.TaskGroup, states: Mapping[str, Tree] | None) -> None:
        """Prepare for the first step, or restore the `state` in a snapshot.

        Fold calls run in `tasks`.
        """
        for fold in self._folds.values():
            if isinstance(fold, CombineFold):
                fold.attach(tasks)
        if states is None or self._durable is None:
            return
        for name, fold in self._folds.items():
            found = self._durable.entries(name) if self._is_logged(name) else ()
            await fold.restore(states[name], ((entry.meta, tree) for entry, tree in found))

    async def add(self, epoch: int, steps: Sequence[Sequence[Slots]]) -> None:
        """Take the results of the next steps, all of one epoch."""
        for name, fold in self._folds.items():
            with self._errors_of(name):
                await fold.add(epoch, parts_of(self._slots[name], steps))

    async def end_epoch(self, epoch: int) -> None:
        """End an epoch, to which all steps since the previous end belong."""
        for name, fold in self._folds.items():
            with self._errors_of(name):
                await fold.end_epoch(epoch)

    def watch(self, names: frozenset[str]) -> None:
        """Keep new values of some stages for `take_fresh` from now on."""
        for name in names:
            self._folds[name].watch()

    def take_fresh(self, names: frozenset[str]) -> dict[str, list[Tree]]:
        """Return the values of some stages since the previous call, in order."""
        return {name: self._folds[name].take_fresh() for name in names}

    def components(self, name: str, slots: list[Slots]) -> PerReplica:
        """Return the value of a run stage for a single step, for a subscriber."""
        slot, replicas = self._slots[name], self._plan.spec.replicas
        if replicas == 1 and slots:  # the common case of many steps, cheaper
            return PerReplica((slots[0].get(slot),))
        made = [each.get(slot) for each in slots]
        return PerReplica(made + [None] * (replicas - len(made)))

    async def step_value(self, name: str, step: int, slots: list[Slots]) -> Tree:
        """Return the value of a reduce or gather stage for a single step, for a subscriber."""
        value = await self._unfinished(name, slots)
        finish = self._finishes.get(name)
        return value if finish is None or value is None else await finish(value, step)

    async def _unfinished(self, name: str, slots: list[Slots]) -> Tree:
        stage = self._plan.spec.stages[name]
        (parts,) = parts_of(self._slots[name], [slots])
        if isinstance(stage, GatherSpec):
            if not parts:
                return None
            return await in_thread_if(is_large(parts), gather, PerReplica(parts), stage.gather, len(parts))
        fold = self._folds[name]
        if isinstance(fold, CombineFold):
            return await fold.step_value(parts)
        assert isinstance(stage, ReduceSpec)
        reduction = reduction_of(stage)
        large = sum(len(part[1]) for part in parts) > THREAD_OBJECTS
        return await in_thread_if(large, lambda: reduction.finish(fold_all(reduction.combine, parts)))

    @contextmanager
    def _errors_of(self, name: str) -> Iterator[None]:
        """Raise an error of a fold as the error of its stage."""
        try:
            yield
        except _MISFITS as error:
            if self._folds[name].of_nothing:
                raise FoldError(name, self._no_value(name)) from error
            if isinstance(error, OutputError):
                raise
            from pipedist.runs.call_keys import origin_of  # errors are rare

            of, misfit = self._plan.spec.stages[name].of, self._folds[name].misfit_at
            call = None if misfit is None or of not in self._pass.runs else (of, *misfit)
            raise FoldError(name, str(error), origin=origin_of(self._plan, name), call=call) from error

    def _no_value(self, name: str) -> str:
        of = self._plan.spec.stages[name].of
        return f"stage {of} returned None on every call: is a `return` missing?"

    def state(self) -> dict[str, Tree]:
        return {name: fold.state() for name, fold in self._folds.items()}

    def logs_over(self) -> list[str]:
        """Return the logs of a complete pass whose values are in files, and too large to keep."""
        return [
            name
            for name, fold in self._folds.items()
            if self._is_logged(name) and not fold.kept and name not in self._unwritten
            if self._durable is not None and self._durable.log_bytes(name) > LOG_BYTES_MAX
        ]

    @property
    def has_last_call(self) -> bool:
        """Whether functions are called with values of the run, after the last step."""
        return any(per_of(self._plan.spec.stages[name]) == "run" for name in self._finishes)

    async def prepare(self) -> None:
        """Make the values of the run that are finished by functions, after the last step."""
        for name, fold in self._folds.items():
            with self._errors_of(name):
                await fold.prepare()

    async def finish(self, epochs: int) -> None:
        """Complete all values; raise FoldError if all components were None."""
        for name, fold in self._folds.items():
            with self._file_of(name), self._errors_of(name):
                await fold.finish(epochs)
            if fold.of_nothing:
                raise FoldError(name, self._no_value(name))

    async def write(self) -> None:
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
            if fold.kept:
                values[name] = fold.result
            elif self._folder is not None and name in self._sinks and name not in self._unwritten:
                values[name] = paths_of(self._plan.spec.files_of(name), self._folder.final)


def paths_of(files: Mapping[str, str], final: Callable[[str], Path]) -> Path | dict[str, Path]:
    """Return the final path of the file of a value, or those of its parts."""
    return final(files[""]) if "" in files else {part: final(file) for part, file in files.items()}


def sink_of(plan: Plan, folder: RunFolder | None, name: str) -> StageSink | None:
    files = plan.spec.files_of(name)
    if not files or folder is None:
        return None
    from pipedist.outputs import open_sink  # only runs with files need it
    from pipedist.outputs.parts import PartSinks

    stage = plan.spec.stages[name]
    gathers = is_streamed(plan, name)
    with ExitStack() as stack:
        sinks = {}
        for part, file in files.items():
            key = f"{name}/{part}" if part else name
            sinks[part] = open_sink(
                folder.staged(file),
                shape="run" if per_of(plan.spec.stages[name]) == "run" else "per",
                gather=gathers,
                axis=stage.gather if isinstance(stage, GatherSpec) and gathers else 0,
                label=f"outputs.{name}{part and f'.{part}'} ({file})",
                table=None if part else table_of_stage(plan, name),
                kind=plan.spec.sinks[key].kind,
                name=part.rpartition("/")[2] or name,
                run=folder.run_id,
                options=plan.spec.sinks[key].options,
            )
            stack.callback(sinks[part].abort)
        stack.pop_all()
    return sinks[""] if "" in sinks else PartSinks(sinks, f"outputs.{name}")


def tables_of(plan: Plan, names: Iterable[str]) -> dict[str, Table]:
    """Return the conversions of values to tables, of stages that have their own."""
    return {name: table for name in names if (table := table_of_stage(plan, name)) is not None}


def table_of_stage(plan: Plan, name: str) -> Table | None:
    """Return the conversion of a stage's value to a table, None if it has none of its own."""
    stage = plan.spec.stages[name]
    if not isinstance(stage, ReduceSpec) or stage.combine is None or stage.per != "run" or stage.finish:
        return None
    from pipedist.core.functions import load  # only runs with files need it
    from pipedist.outputs.tables import table_of

    ref = plan.functions[name]
    return table_of(load(ref, [str(plan.spec.code)]) if ref.name else stage.combine)


def read_later(plan: Plan) -> frozenset[str]:
    """Return the stages whose values a later phase or an update reads."""
    return frozenset(
        ref.name
        for stage in plan.spec.stages.values()
        for ref in references(stage.with_)
        if isinstance(ref, StageRef)
    ) | {stage.of for stage in plan.spec.stages.values() if isinstance(stage, UpdateSpec)}


def is_transient(plan: Plan, name: str) -> bool:
    """Return whether the values of a stage are dropped when the updates that they feed are applied."""
    stages = plan.spec.stages.values()
    feeds = any(isinstance(stage, UpdateSpec) and stage.of == name for stage in stages)
    return feeds and per_of(plan.spec.stages[name]) != "run" and not plan.spec.files_of(name)


def keeps(plan: Plan, name: str) -> bool:
    """Return whether a stage keeps its values until the end of the run."""
    if not plan.spec.files_of(name):
        return not is_transient(plan, name)
    return name in read_later(plan) if is_streamed(plan, name) else per_of(plan.spec.stages[name]) == "run"


def is_streamed(plan: Plan, name: str) -> bool:
    """Return whether the value of a stage is written to its file, if it has one, piece by piece."""
    return isinstance(plan.spec.stages[name], GatherSpec) and name not in plan.finishes


def grows(plan: Plan, name: str) -> bool:
    """Return whether the state of a fold grows with the run, or an epoch, and needs a log."""
    is_gather = isinstance(plan.spec.stages[name], GatherSpec)
    if is_transient(plan, name):
        return is_gather and per_of(plan.spec.stages[name]) == "epoch"
    return is_gather or per_of(plan.spec.stages[name]) != "run"


def can_write(plan: Plan, name: str, found: PassHistory, key: str) -> bool:
    """Return whether the file of a stage can be written from the journal's part of its complete pass."""
    return not grows(plan, name) or log_file(key, name) in found.logs


def has_files(plan: Plan, folder: RunFolder, name: str) -> bool:
    """Return whether all output files of a stage are complete in a folder."""
    keys = [key for key in plan.spec.outputs if key.partition("/")[0] == name]
    return all(folder.has(key, plan.spec.outputs[key]) for key in keys)


async def restore_pass(
    plan: Plan,
    pass_: PassPlan,
    durable: PassJournal,
    final: Callable[[str], Path],
    values: MutableMapping[str, Tree],
    spools: MutableMapping[str, Spool],
    unwritten: MutableMapping[str, OutputError],
    folder: RunFolder | None = None,
) -> None:
    """Restore the values of a complete pass into `values` and `spools`.

    `final` returns the path of an output. Outputs that a `folder` lacks are written again; `unwritten` receives
    the errors, by stage.
    """
    found = durable.part(PASS_STATE)
    restored = {name: list(versions.values())[-1] for name, versions in durable.states().items()}
    for name in (*pass_.folds, *pass_.updates):
        files = plan.spec.files_of(name)
        sink = None
        if folder is not None and not has_files(plan, folder, name):
            sink = sink_of(plan, folder, name)
        if name not in restored and (sink is not None or keeps(plan, name)):
            restored[name] = await _restored_fold(plan, name, durable, found["folds"][name], sink, unwritten)
        if sink is not None and name not in unwritten:
            try:
                if name in pass_.updates or (
                    per_of(plan.spec.stages[name]) == "run" and not is_streamed(plan, name)
                ):
                    await anyio.to_thread.run_sync(sink.append, restored[name])
                await anyio.to_thread.run_sync(sink.finish)
            except OutputError as error:
                unwritten[name] = error
        if sink is not None:
            sink.abort()
        if name in pass_.updates or keeps(plan, name):
            values[name] = restored[name]
        elif name not in unwritten and files:
            values[name] = paths_of(files, final)
    for name in pass_.kept:
        spools[name] = spool = Spool(name, durable.log(name))
        await spool.restore(durable.places(name))


async def _restored_fold(
    plan: Plan,
    name: str,
    durable: PassJournal,
    state: dict[str, Tree],
    sink: StageSink | None,
    unwritten: MutableMapping[str, OutputError],
) -> Tree:
    """Return the value of a complete fold, and append its parts to a sink."""
    stage, per, keep = plan.spec.stages[name], per_of(plan.spec.stages[name]), keeps(plan, name)
    axis = stage.gather if isinstance(stage, GatherSpec) else None
    fold: Fold = ValueFold(name, per, sink, keep=keep)
    if axis is not None and is_streamed(plan, name):
        fold = GatherFold(name, per, axis, sink, keep=keep)
    entries = durable.entries(name) if grows(plan, name) else ()
    try:
        await fold.restore(state, ((entry.meta, tree) for entry, tree in entries))
    except OutputError as error:
        if sink is None:
            raise
        unwritten[name] = error
        return await _restored_fold(plan, name, durable, state, None, unwritten) if keep else None
    return fold.result
