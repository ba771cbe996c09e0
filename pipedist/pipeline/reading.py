"""Executes one pass of a plan: its dataset is read once, and everything of it is folded, kept, streamed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from pipedist.coordinator import Arrival, Batch, Chunk, Coordinator, PassHandle, Slots
from pipedist.errors import CallError, FoldError, OutputError
from pipedist.feeds import Feed, IndexedFeed, SequentialFeed
from pipedist.partial_runs import step_partial
from pipedist.pipeline.folds import CombineFold, Fold, FoldCall, GatherFold, ReduceFold
from pipedist.pipeline.gating import GatedFeed
from pipedist.pipeline.programs import (
    COMBINED,
    combine_program,
    parts_of,
    pass_program,
    reduction_of,
    retries_of,
    slot_of,
)
from pipedist.pipeline.spool import Spool, SpoolFeed
from pipedist.pipeline.subscription import Part, Step, Subscription
from pipedist.pipeline.training import Lane, Training
from pipedist.plan import PassPlan, Plan
from pipedist.program import Tree
from pipedist.scheduler import PassSettings
from pipedist.spec import GatherSpec, ReduceSpec, RunSpec
from pipedist.values import PerReplica, gather

if TYPE_CHECKING:
    from pipedist.outputs import RunFolder, Sink

FOLD_CALLS_MAX = 16
"""Fold calls of one stage that run at one time."""


class Reading:
    """One pass while it is executed.

    Args:
        plan: what it belongs to.
        pass_: what to execute.
        coordinator: of the cluster that executes it.
        folder: where files go, None for a run without outputs.
        subscription: what the user streams of this pass, None for nothing.
        values: finished values by stage, of earlier phases; this pass adds its own. Of one that
            only its file holds, the path.
        unwritten: why an output has no file, though the run goes on; this pass adds its own.
        spools: the kept values of runs, of earlier phases; this pass adds its own, open.
        read_later: reduce and gather stages whose values a later phase reads, or an update.
        training: that the pass takes part in; None: it is read by itself.
        steps_max: the reading ends there; None: with its dataset.
    """

    def __init__(
        self,
        plan: Plan,
        pass_: PassPlan,
        coordinator: Coordinator,
        folder: RunFolder | None,
        subscription: Subscription | None,
        *,
        values: MutableMapping[str, Tree],
        unwritten: MutableMapping[str, OutputError],
        spools: Mapping[str, Spool],
        read_later: frozenset[str],
        training: Training | None,
        steps_max: int | None,
    ) -> None:
        self._plan = plan
        self._pass = pass_
        self._coordinator = coordinator
        self._folder = folder
        self._subscription = subscription
        self._values = values
        self._unwritten = unwritten
        self._read_later = read_later
        self._replicas = plan.spec.replicas
        self._feed = _feed_of(plan, pass_, spools)
        self._lane: Lane | None = None
        if training is not None:
            self._lane = training.lane(pass_, self._feed)
            self._feed = self._lane.feed
        elif steps_max is not None:
            self._feed = GatedFeed(self._feed, "run", steps_max=steps_max)
        self._spools = {name: spools[name] for name in pass_.kept}
        self._slots = {name: slot_of(name, plan.spec.stages[name]) for name in (*pass_.runs, *pass_.folds)}
        self._folds: dict[str, Fold] = {}
        self.handle = self._open()
        """The pass at the coordinator; whoever made the reading calls `leave`."""

    @property
    def name(self) -> str:
        """The pass, for people."""
        return self._pass.name

    def _open(self) -> PassHandle:
        streamed = () if self._subscription is None else self._subscription.stages
        return self._coordinator.open_pass(
            pass_program(self._plan, self._pass, self._feed.reader, self._values, streamed),
            name=self._pass.name,
            settings=PassSettings(self._replicas, gang=self._pass.gang),
            retries=retries_of(self._plan, self._pass),
            feed=self._feed,
            on_arrival=_announcer(self._subscription, self._replicas),
        )

    async def run(self) -> None:
        """Read to the end.

        Raises:
            CallError: a call failed for good.
            FoldError: components do not fit together.
            OutputError: a file can't be written.
            WorkersLost: no worker can be kept alive.
            RunDrained: the pass was held before its end.
            ExceptionGroup: of any of these.
        """
        with ExitStack() as stack:
            sinks: dict[str, Sink] = {}
            for name in self._pass.folds:
                sink = sink_of(self._plan, self._folder, name)
                if sink is not None:
                    sinks[name] = sink
                    stack.callback(sink.abort)  # which does nothing to a finished one
                self._folds[name] = self._fold(name, sink, stack)
                if self._lane is not None and name in self._lane.watched:
                    self._folds[name].watch()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.handle.run_feed, name=f"feed of {self._pass.name}")
                for fold in self._folds.values():
                    if isinstance(fold, CombineFold):
                        fold.attach(tasks)
                async for batch in self.handle.batches():
                    for first, epoch, steps in self._segments(batch):
                        await self._take(first, epoch, steps, batch.bytes // len(batch.steps))
                lane = self._lane
                epochs = self._plan.epochs(self._pass) if lane is None else lane.epochs
                for name, fold in self._folds.items():
                    with self._file_of(name):
                        await self._folding(name, fold.finish(epochs))
                    if fold.of_nothing:
                        raise FoldError(name, self._no_value(name))
                if lane is not None:
                    await lane.finished(self._fresh())
            for spool in self._spools.values():
                await anyio.to_thread.run_sync(spool.finish)
            for name, sink in sinks.items():
                if name not in self._unwritten:
                    with self._file_of(name):
                        await anyio.to_thread.run_sync(sink.finish)
        for name, fold in self._folds.items():
            if fold.kept or self._folder is None:
                self._values[name] = fold.result
            elif name not in self._unwritten:
                self._values[name] = self._folder.final(self._plan.spec.outputs[name])

    @contextmanager
    def _file_of(self, name: str) -> Iterator[None]:
        """At the end of a pass: one file that can't be completed costs no other value."""
        try:
            yield
        except OutputError as error:
            self._unwritten[name] = error

    def _no_value(self, name: str) -> str:
        of = self._plan.spec.stages[name].of
        return f"stage {of} returned None on every call: is a `return` missing?"

    async def _folding(self, name: str, work: Awaitable[None]) -> None:
        """Await a fold's work; what does not fit together is the stage's error."""
        try:
            await work
        except (TypeError, ValueError, OverflowError, OutputError) as error:
            if self._folds[name].of_nothing:  # so far, and it ends here
                raise FoldError(name, self._no_value(name)) from error
            if isinstance(error, OutputError):
                raise
            raise FoldError(name, str(error)) from error

    def _segments(self, batch: Batch) -> Iterator[tuple[int, int, list[list[Slots]]]]:
        """Yield (first step, epoch, steps): each of one epoch; for who streams steps, each of one step."""
        streams = self._subscription is not None and self._subscription.kind == "steps"
        first, last = batch.first, batch.first + len(batch.steps)
        while first < last:
            epoch = self._feed.epoch(first)
            fitting = 1 if streams else bisect_right(range(first, last), epoch, key=self._feed.epoch)
            at = first - batch.first
            yield first, epoch, batch.steps[at : at + fitting]
            first += fitting

    async def _take(self, first: int, epoch: int, steps: list[list[Slots]], step_bytes: int) -> None:
        for name, fold in self._folds.items():
            await self._folding(name, fold.add(epoch, parts_of(self._slots[name], steps)))
        for name, spool in self._spools.items():
            for step, parts in enumerate(parts_of(self._slots[name], steps), first):
                elements = self._feed.elements(step, step + 1)
                spool.append(parts, self._feed.ids(step), elements=elements, epoch=epoch)
        subscription = self._subscription
        if subscription is not None and subscription.kind == "steps":
            for step, slots in enumerate(steps, first):
                values = {name: await self._step_value(name, slots) for name in subscription.stages}
                subscription.put(Step(step, epoch, values), step_bytes)
        if self._lane is not None:
            await self._take_turns(self._lane, first + len(steps) - 1, epoch)
        if subscription is not None:
            await subscription.room()

    async def _take_turns(self, lane: Lane, last: int, epoch: int) -> None:
        """Say that steps up to `last` are taken; others take their turns meanwhile."""
        ends = await lane.feed.ends_epoch(last)
        if ends:
            for name, fold in self._folds.items():
                await self._folding(name, fold.end_epoch(epoch))
        await lane.took(last, epoch, self._fresh(), ends=ends)

    def _fresh(self) -> dict[str, list[Tree]]:
        watched = self._lane.watched if self._lane is not None else ()
        return {name: self._folds[name].take_fresh() for name in watched}

    def leave(self) -> None:
        """End the pass at the coordinator, and its part in a training."""
        self.handle.close()
        if self._lane is not None:
            self._lane.leave()

    async def _step_value(self, name: str, slots: list[Slots]) -> Tree:
        """Return what one step is worth by itself, for a subscriber."""
        stage = self._plan.spec.stages[name]
        (parts,) = parts_of(self._slots[name], [slots])
        if isinstance(stage, RunSpec):
            return PerReplica([*parts, *[None] * (self._replicas - len(parts))])
        if isinstance(stage, GatherSpec):
            return gather(PerReplica(parts), stage.gather, len(parts)) if parts else None
        fold = self._folds[name]
        if isinstance(fold, CombineFold):
            return await fold.step_value(parts)
        if not isinstance(stage, ReduceSpec):
            raise TypeError(f"stage {name} has no value a step")
        reduction = reduction_of(stage)
        return reduction.finish(step_partial(reduction, parts))

    # -- folds -----------------------------------------------------------------------------------

    def _fold(self, name: str, sink: Sink | None, stack: ExitStack) -> Fold:
        stage = self._plan.spec.stages[name]
        if isinstance(stage, GatherSpec):
            keep = sink is None or name in self._read_later
            return GatherFold(name, stage.per, stage.gather, sink, keep=keep)
        if not isinstance(stage, ReduceSpec):
            raise TypeError(f"stage {name} is neither a reduce nor a gather")
        keep = sink is None or stage.per == "run"
        if stage.op is not None:
            return ReduceFold(name, stage.per, reduction_of(stage), sink, keep=keep)
        call = self._fold_call(name, stack)
        return CombineFold(name, stage.per, call, sink, keep=keep, calls_max=FOLD_CALLS_MAX)

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


def sink_of(plan: Plan, folder: RunFolder | None, name: str) -> Sink | None:
    """Return the file of a stage's value, None where it has none."""
    output = plan.spec.outputs.get(name)
    if output is None or folder is None:
        return None
    from pipedist.outputs import open_sink  # only runs with files need the formats

    stage = plan.spec.stages[name]
    return open_sink(
        folder.staged(output),
        shape="run" if getattr(stage, "per", "run") == "run" else "per",
        gather=isinstance(stage, GatherSpec),
        axis=stage.gather if isinstance(stage, GatherSpec) else 0,
        label=f"outputs.{name} ({output})",
    )


def _feed_of(plan: Plan, pass_: PassPlan, spools: Mapping[str, Spool]) -> Feed:
    spec = plan.spec
    dataset = spec.datasets[pass_.dataset]
    if pass_.root != pass_.dataset:
        return SpoolFeed(spools[pass_.root], spec.replicas, dataset.batch)
    source = plan.sources[pass_.dataset]
    division = plan.division(pass_.dataset)
    if division is None:
        return SequentialFeed(
            source,
            batch=dataset.batch,
            replicas=spec.replicas,
            drop_remainder=dataset.drop_remainder,
            epochs=plan.epochs(pass_),
        )
    return IndexedFeed(
        source,
        pass_.dataset,
        division,
        epochs=plan.epochs(pass_),
        shuffle_seed=spec.seed if dataset.shuffle else None,
    )


def _announcer(subscription: Subscription | None, replicas: int) -> Arrival | None:
    """Return what puts the results of calls into a stream as they arrive."""
    if subscription is None or subscription.kind != "parts":
        return None
    slots = [(name, slot_of(name, stage)) for name, stage in subscription.streamed.items()]

    def announce(chunk: Chunk) -> None:
        size = chunk.size // (len(chunk.calls) * len(slots))
        for call, values in enumerate(chunk.calls, chunk.lo):
            step, replica = divmod(call, replicas)
            for name, slot in slots:
                if slot in values:  # else its shard is empty
                    subscription.put(Part(name, step, replica, values[slot]), size)

    return announce
