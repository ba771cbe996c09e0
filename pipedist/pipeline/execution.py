"""Executes a plan: phase after phase, the passes of a phase side by side."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import anyio
import anyio.to_thread

from pipedist.coordinator import Arrival, Coordinator, PassHandle, Slots, StepResult
from pipedist.errors import FoldError, LocalProtocolError, RunDrained
from pipedist.feeds import Feed, IndexedFeed, SequentialFeed
from pipedist.outputs import RunFolder, Sink, open_sink
from pipedist.pipeline.folds import CombineFold, Fold, FoldCall, GatherFold, ReduceFold, step_partial
from pipedist.pipeline.result import Ledger, Progress, StageCount
from pipedist.pipeline.spool import Spool, SpoolFeed
from pipedist.pipeline.subscription import Part, Step, Subscription
from pipedist.plan import PassPlan, Plan
from pipedist.program import Emit, Program, StageProgram, Tree
from pipedist.reductions import Reduction
from pipedist.scheduler import PassSettings
from pipedist.spec import GatherSpec, ReduceSpec, RunSpec, StageRef, references, substitute
from pipedist.values import PerReplica, gather

FOLD_CALLS_MAX = 16
"""Fold calls of one stage that run at one time."""


class Execution:
    """One run of a plan.

    Args:
        plan: what to execute.
        coordinator: of the cluster that executes it.
        folder: where files go, None for a run without outputs.
        subscription: what the user streams, None for nothing.
    """

    def __init__(
        self,
        plan: Plan,
        coordinator: Coordinator,
        folder: RunFolder | None,
        subscription: Subscription | None,
    ) -> None:
        self.values: dict[str, Tree] = {}
        self.timings: dict[str, float] = {}
        self._plan = plan
        self._coordinator = coordinator
        self._folder = folder
        self._subscription = subscription
        self._spools: dict[str, Spool] = {}
        self._handles: dict[PassPlan, PassHandle] = {}
        self._phase = 0
        self._began = time.monotonic()
        self._draining = False
        self._stack = ExitStack()
        self._read_later = {
            ref.name
            for stage in plan.spec.stages.values()
            if isinstance(stage, RunSpec)
            for ref in references(stage.with_)
            if isinstance(ref, StageRef)
        }

    async def run(self) -> None:
        """Execute all phases; the values are in `values` then.

        Raises:
            CallError: a call failed for good.
            FoldError: components do not fit together.
            OutputError: a file can't be written.
            WorkersLost: no worker can be kept alive.
            RunDrained: the run was drained before its end.
        """
        with self._stack:
            for number, phase in enumerate(self._plan.phases):
                self._phase = number
                start = time.monotonic()
                await self._run_phase(phase)
                self.timings[f"phase {number}"] = time.monotonic() - start
            if self._subscription is not None:
                self._subscription.end()

    async def _run_phase(self, phase: tuple[PassPlan, ...]) -> None:
        failed: list[Exception] = []

        async def guarded(pass_: PassPlan) -> None:
            try:
                await self._run_pass(pass_)
            except Exception as error:
                failed.append(_unwrapped(error))
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for pass_ in phase:
                tasks.start_soon(guarded, pass_, name=f"pass {pass_.name}")
        if self._draining:
            raise RunDrained("the run was stopped; the calls that were running are finished")
        if failed:
            raise failed[0]

    async def _run_pass(self, pass_: PassPlan) -> None:
        feed = self._feed(pass_)
        subscription = self._subscribed(pass_)
        arrivals = subscription if subscription is not None and subscription.kind == "parts" else None
        handle = self._coordinator.open_pass(
            self._program(pass_, subscription),
            name=pass_.name,
            settings=PassSettings(self._plan.spec.replicas, retries=self._retries(pass_)),
            feed=feed,
            on_arrival=None if arrivals is None else _announcer(arrivals, self._plan.spec.replicas),
        )
        self._handles[pass_] = handle
        if self._draining:
            handle.hold()
        spools = {name: self._stack.enter_context(closing(Spool())) for name in pass_.kept}
        self._spools.update(spools)
        sinks: dict[str, Sink] = {}
        try:
            folds = {name: self._fold(name, sinks) for name in pass_.folds}
            async with anyio.create_task_group() as tasks:
                for fold in folds.values():
                    if isinstance(fold, CombineFold):
                        fold.attach(tasks)
                async for step in handle.steps():
                    await self._take(step, feed, folds, spools, subscription)
                for name, fold in folds.items():
                    await _folding(name, fold.finish())
            for name, fold in folds.items():
                self.values[name] = fold.result if fold.kept else self._final(name)
            for sink in sinks.values():
                await anyio.to_thread.run_sync(sink.finish)
            sinks.clear()
        finally:
            handle.close()
            for sink in sinks.values():
                sink.abort()

    async def _take(
        self,
        step: StepResult,
        feed: Feed,
        folds: Mapping[str, Fold],
        spools: Mapping[str, Spool],
        subscription: Subscription | None,
    ) -> None:
        epoch = feed.epoch(step.step)
        for name, fold in folds.items():
            await _folding(name, fold.add(epoch, self._parts(name, step)))
        for name, spool in spools.items():
            spool.append(
                self._parts(name, step),
                feed.ids(step.step),
                elements=feed.elements(step.step),
                epoch=epoch,
            )
        if subscription is None:
            return
        if subscription.kind == "steps":
            values = {name: await self._step_value(name, step, folds) for name in subscription.stages}
            subscription.put(Step(step.step, epoch, values))
        await subscription.room()

    async def _step_value(self, name: str, step: StepResult, folds: Mapping[str, Fold]) -> Tree:
        """Return what one step is worth by itself, for a subscriber."""
        stage = self._plan.spec.stages[name]
        parts = self._parts(name, step)
        if isinstance(stage, RunSpec):
            return PerReplica(parts)
        if isinstance(stage, GatherSpec):
            made = [p for p in parts if p is not None]
            return gather(PerReplica(made), stage.gather, len(made)) if made else None
        fold = folds[name]
        if isinstance(fold, CombineFold):
            return await fold.step_value(parts)
        if not isinstance(stage, ReduceSpec):
            raise TypeError(f"stage {name} has no value a step")
        reduction = _reduction(stage)
        return reduction.finish(step_partial(reduction, parts))

    # -- what a pass is made of ----------------------------------------------------------------

    def _feed(self, pass_: PassPlan) -> Feed:
        spec = self._plan.spec
        dataset = spec.datasets[pass_.dataset]
        if pass_.root in self._spools:
            return SpoolFeed(self._spools[pass_.root], spec.replicas, dataset.batch)
        source = self._plan.sources[pass_.dataset]
        division = self._plan.division(pass_.dataset)
        if division is None:
            return SequentialFeed(
                source,
                batch=dataset.batch,
                replicas=spec.replicas,
                drop_remainder=dataset.drop_remainder,
                epochs=dataset.epochs,
            )
        return IndexedFeed(
            source,
            pass_.dataset,
            division,
            epochs=dataset.epochs,
            shuffle_seed=spec.seed if dataset.shuffle else None,
        )

    def _retries(self, pass_: PassPlan) -> int:
        stages = [self._plan.spec.stages[name] for name in pass_.runs]
        return max((s.retries for s in stages if isinstance(s, RunSpec)), default=0)

    def _program(self, pass_: PassPlan, subscription: Subscription | None) -> Program:
        spec = self._plan.spec
        index = {name: place for place, name in enumerate(pass_.runs)}
        index[pass_.root] = -1
        stages = []
        for name in pass_.runs:
            stage = spec.stages[name]
            if isinstance(stage, RunSpec):
                kwargs = substitute(stage.with_, lambda ref: self.values[ref.name])
                stages.append(StageProgram(name, self._plan.functions[name], index[stage.of], kwargs))
        emits = []
        whole = {*pass_.kept, *(() if subscription is None else subscription.stages)} & {*pass_.runs}
        for name in pass_.folds:
            stage = spec.stages[name]
            if isinstance(stage, ReduceSpec) and stage.op is not None:
                reduction = _reduction(stage)
                emits.append(Emit(self._slot(name), index[stage.of], reduction.op.value, reduction.axis))
            else:
                whole.add(stage.of)
        emits += [Emit(_VALUE + name, index[name]) for name in sorted(whole)]
        return Program(
            seed=spec.seed,
            replicas=spec.replicas,
            reader=self._feed(pass_).reader,
            stages=tuple(stages),
            emits=tuple(emits),
            code=(str(spec.code),),
            threads=spec.threads_per_replica,
        )

    def _slot(self, name: str) -> str:
        """Return the slot in which a stage's parts come: partials have their own, values share one."""
        stage = self._plan.spec.stages[name]
        if isinstance(stage, RunSpec):
            return _VALUE + name
        if isinstance(stage, ReduceSpec) and stage.op is not None:
            return name
        return _VALUE + stage.of

    def _parts(self, name: str, step: StepResult) -> list[Tree | None]:
        slot = self._slot(name)
        return [None if part is None else part[slot] for part in step.parts]

    def _fold(self, name: str, sinks: dict[str, Sink]) -> Fold:
        spec = self._plan.spec
        stage = spec.stages[name]
        sink: Sink | None = None
        if name in spec.outputs and self._folder is not None:
            is_gather = isinstance(stage, GatherSpec)
            per = getattr(stage, "per", "run")
            sink = sinks[name] = open_sink(
                self._folder.staged(spec.outputs[name]),
                shape="run" if per == "run" else "per",
                gather=is_gather,
                axis=stage.gather if isinstance(stage, GatherSpec) else 0,
            )
        keep = sink is None or name in self._read_later
        if isinstance(stage, GatherSpec):
            return GatherFold(name, stage.per, stage.gather, sink, keep=keep)
        if not isinstance(stage, ReduceSpec):
            raise TypeError(f"stage {name} is neither a reduce nor a gather")
        if stage.op is not None:
            return ReduceFold(name, stage.per, _reduction(stage), sink, keep=keep or stage.per == "run")
        return CombineFold(name, stage.per, self._fold_call(name), sink, calls_max=FOLD_CALLS_MAX)

    def _fold_call(self, name: str) -> FoldCall:
        spec = self._plan.spec
        program = Program(
            seed=spec.seed,
            replicas=1,
            reader=None,
            stages=(StageProgram(name, self._plan.functions[name], -1, {}, "combine"),),
            emits=(Emit("value", 0),),
            code=(str(spec.code),),
            threads=spec.threads_per_replica,
        )
        handle = self._coordinator.open_pass(
            program,
            name=name,
            settings=PassSettings(1, ordered=False, fail_fast=False, pulled=False, priority=0),
        )
        self._stack.callback(handle.close)

        async def call(groups: list[list[Tree]]) -> Tree:
            slots: list[Slots] = await handle.call_step([groups])
            return slots[0]["value"]

        return call

    def _subscribed(self, pass_: PassPlan) -> Subscription | None:
        subscription = self._subscription
        return subscription if subscription is not None and subscription.pass_ == pass_ else None

    def _final(self, name: str) -> Path:
        if self._folder is None:
            raise LocalProtocolError(f"stage {name} was written to a file, but there is no folder")
        return self._folder.final(self._plan.spec.outputs[name])

    # -- from outside ----------------------------------------------------------------------------

    def drain(self) -> None:
        """Issue nothing more; `run` raises RunDrained when the running calls are finished."""
        if not self._draining:
            self._draining = True
            for handle in self._handles.values():
                handle.hold()

    def ledger(self) -> Ledger:
        """Return where every element went until now."""
        elements = committed = 0
        for dataset in self._plan.spec.datasets:
            passes = [p for p in self._plan.passes if p.dataset == dataset]
            counts = [self._handles[p].counts if p in self._handles else None for p in passes]
            elements += max((c.elements_offered for c in counts if c is not None), default=0)
            committed += min((0 if c is None else c.elements_visible for c in counts), default=0)
        return Ledger(elements, committed, 0, elements - committed)

    def progress(self) -> Progress:
        """Return how far the run is."""
        passes = []
        for pass_ in self._plan.phases[self._phase] if self._plan.phases else ():
            handle = self._handles.get(pass_)
            if handle is None:
                continue
            division = self._plan.division(pass_.dataset)
            total = None
            if division is not None:
                dataset = self._plan.spec.datasets[pass_.dataset]
                whole = division.steps_per_epoch * division.batch
                per_epoch = whole if dataset.drop_remainder else division.length
                total = per_epoch * dataset.epochs
            passes.append(
                StageCount(
                    name=pass_.name,
                    dataset=pass_.dataset,
                    elements_done=handle.counts.elements_visible,
                    elements_total=total,
                    steps_done=handle.counts.steps_visible,
                    steps_total=handle.steps_total,
                    calls_done=handle.counts.calls_done,
                )
            )
        return Progress(
            tuple(passes),
            self._phase,
            len(self._plan.phases),
            self._coordinator.workers_ready,
            time.monotonic() - self._began,
        )


_VALUE = "="
"""Marks the slot of a stage's whole value; no stage's name contains it."""


def _reduction(stage: ReduceSpec) -> Reduction:
    return Reduction.of(str(stage.op), stage.axis)


def _announcer(subscription: Subscription, replicas: int) -> Arrival:
    """Return what puts the results of calls into a subscription as they arrive."""

    def announce(lo: int, _hi: int, _worker: str, calls: Sequence[Slots]) -> None:
        for call, slots in enumerate(calls, lo):
            step, replica = divmod(call, replicas)
            for name in subscription.stages:
                subscription.put(Part(name, step, replica, slots[_VALUE + name]))

    return announce


async def _folding(name: str, work: Awaitable[None]) -> None:
    """Await a fold's work; what does not fit together is the stage's error."""
    try:
        await work
    except (TypeError, ValueError, OverflowError) as error:
        raise FoldError(name, str(error)) from error


def _unwrapped(error: Exception) -> Exception:
    """Return the one error inside a task group's."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
