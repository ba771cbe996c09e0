"""Executes a plan: phase after phase, the passes of a phase side by side."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import anyio

from pipedist.coordinator import Coordinator, PassHandle
from pipedist.errors import OutputError, RunDrained
from pipedist.pipeline.reading import Reading, sink_of
from pipedist.pipeline.result import Ledger, Progress, StageCount
from pipedist.pipeline.spool import Spool
from pipedist.pipeline.subscription import Subscription
from pipedist.pipeline.training import Training
from pipedist.plan import PassPlan, Plan
from pipedist.program import Tree
from pipedist.spec import GatherSpec, RunSpec, StageRef, UpdateSpec, references

if TYPE_CHECKING:
    from pipedist.outputs import RunFolder


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
        self.timings: dict[str, float] = {}
        """Seconds that each phase took."""
        self._plan = plan
        self._coordinator = coordinator
        self._folder = folder
        self._subscription = subscription
        self.unwritten: dict[str, OutputError] = {}
        """Why an output has no file, of values that were finished but for their files."""
        self._values: dict[str, Tree] = {}
        self._spools: dict[str, Spool] = {}
        self._handles: dict[PassPlan, PassHandle] = {}
        self._phase = 0
        self._began = time.monotonic()
        self._draining = False
        self._trained_steps: int | None = None
        """How many steps the dataset that feeds updates had, once it has ended."""
        self._read_later = frozenset(
            ref.name
            for stage in plan.spec.stages.values()
            if isinstance(stage, RunSpec | UpdateSpec)
            for ref in references(stage.with_)
            if isinstance(ref, StageRef)
        ) | {stage.of for stage in plan.spec.stages.values() if isinstance(stage, UpdateSpec)}

    async def run(self) -> None:
        """Execute all phases.

        Raises:
            CallError: a call failed for good.
            FoldError: components do not fit together.
            OutputError: a file can't be written.
            WorkersLost: no worker can be kept alive.
            RunDrained: the run was drained before its end.
        """
        with ExitStack() as stack:
            for number, phase in enumerate(self._plan.phases):
                if self._draining:
                    raise RunDrained("the run was stopped between two phases")
                self._phase = number
                start = time.monotonic()
                await self._run_phase(phase, stack)
                self.timings[f"phase {number + 1}"] = time.monotonic() - start
            if self._subscription is not None:
                self._subscription.end()

    async def _run_phase(self, phase: tuple[PassPlan, ...], stack: ExitStack) -> None:
        failed: list[Exception] = []

        async def guarded(reading: Reading) -> None:
            try:
                await reading.run()
            except Exception as error:
                failed.append(_unwrapped(error))
                if not isinstance(failed[-1], RunDrained):  # else the others may finish what runs of them
                    tasks.cancel_scope.cancel()
            finally:
                reading.leave()

        for name in (name for pass_ in phase for name in pass_.kept):
            self._spools[name] = stack.enter_context(closing(Spool(name)))
        with ExitStack() as opened:
            training = await self._begin_training(phase, opened)
            readings = [self._open(pass_, training, opened) for pass_ in phase]
            async with anyio.create_task_group() as tasks:
                for reading in readings:
                    tasks.start_soon(guarded, reading, name=f"pass {reading.name}")
            if failed:
                raise min(failed, key=lambda error: isinstance(error, RunDrained))
            if training is not None:
                self._values.update(await training.deliver(self.unwritten))
                feeding = self._handles[next(pass_ for pass_ in phase if pass_.updates)]
                self._trained_steps = feeding.counts.steps_visible

    async def _begin_training(self, phase: tuple[PassPlan, ...], stack: ExitStack) -> Training | None:
        feeding = next((pass_ for pass_ in phase if pass_.updates), None)
        if feeding is None:
            return None
        sinks = {}
        for name in feeding.updates:
            sink = sink_of(self._plan, self._folder, name)
            if sink is not None:
                sinks[name] = sink
                stack.callback(sink.abort)  # which does nothing to a finished one
        training = Training(self._plan, feeding, self._coordinator, sinks)
        stack.callback(training.states.close)
        await training.states.begin(self._values)
        return training

    def _open(self, pass_: PassPlan, training: Training | None, stack: ExitStack) -> Reading:
        subscription = self._subscription
        feeding = self._plan.training
        ended = feeding is not None and pass_.dataset == feeding.dataset and pass_.phase > feeding.phase
        reading = Reading(
            self._plan,
            pass_,
            self._coordinator,
            self._folder,
            subscription if subscription is not None and subscription.pass_ == pass_ else None,
            values=self._values,
            unwritten=self.unwritten,
            spools=self._spools,
            read_later=self._read_later,
            training=training if pass_.updates or pass_.follows else None,
            steps_max=self._trained_steps if ended and pass_.root == pass_.dataset else None,
        )
        stack.callback(reading.leave)
        self._handles[pass_] = reading.handle
        if self._draining:
            reading.handle.hold()
        return reading

    def drain(self) -> None:
        """Issue nothing more; `run` raises RunDrained when the running calls are finished."""
        if not self._draining:
            self._draining = True
            for handle in self._handles.values():
                handle.hold()

    # -- what came of it -------------------------------------------------------------------------

    def results(self) -> dict[str, Tree]:
        """Return the finished value of each reduce and gather, in the spec's order.

        Of one that is in its file, value by value or piece by piece, it is the path, also where a
        later phase had it in memory.
        """
        results = {}
        for name, stage in self._plan.spec.stages.items():
            if name not in self._values:
                continue
            output = None if name in self.unwritten else self._plan.spec.outputs.get(name)
            if output is not None and self._folder is not None and isinstance(stage, GatherSpec):
                results[name] = self._folder.final(output)
            else:
                results[name] = self._values[name]
        return results

    def ledger(self) -> Ledger:
        """Return where every element went until now."""
        elements = committed = 0
        for dataset in self._plan.spec.datasets:
            passes = [p for p in self._plan.passes if p.dataset == dataset]
            handles = [self._handles.get(pass_) for pass_ in passes]
            issued = max((h.counts.elements_offered for h in handles if h is not None), default=0)
            elements += issued
            # a reading that is complete may have had fewer steps than another: its dataset ended early
            committed += (
                min(
                    (issued if _is_complete(h) else h.counts.elements_visible if h is not None else 0)
                    for h in handles
                )
                if handles
                else 0
            )
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
                whole = division.steps_per_epoch * division.batch
                per_epoch = whole if division.drop_remainder else division.length
                total = per_epoch * self._plan.epochs(pass_)
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


def _is_complete(handle: PassHandle | None) -> bool:
    return handle is not None and handle.steps_total == handle.counts.steps_visible


def _unwrapped(error: Exception) -> Exception:
    """Return the one error inside a task group's."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
