"""Executes a plan: phase after phase, the passes of a phase side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Protocol

import anyio
from msgspec import Struct

from pipedist.coordinator import Coordinator
from pipedist.coordinator.pass_handle import PassCounts
from pipedist.core.types import Tree
from pipedist.errors import JournalError, LocalProtocolError, OutputError, RunDrained
from pipedist.plan import PassPlan, Plan
from pipedist.runs.pass_execution import PassExecution
from pipedist.runs.pass_feeds import Spool
from pipedist.runs.pass_folds import read_later, restore_pass, sink_of
from pipedist.runs.pass_journal import PASS_STATE, STATE
from pipedist.runs.quarantine import PassQuarantine, RunQuarantine
from pipedist.runs.result import Ledger, Progress, StageCount
from pipedist.runs.subscription import Subscription
from pipedist.runs.training import Trainer
from pipedist.spec import GatherSpec

if TYPE_CHECKING:
    from pipedist.coordinator.diagnostics import Stall, Waiting
    from pipedist.outputs import RunFolder
    from pipedist.runs.pass_journal import PassJournal, RunJournal

FLUSH_S_MAX = 5.0
"""How long the end of a run that failed may take to make durable what it has."""


class Execution:
    """One run of a plan.

    Args:
        plan: what to execute.
        coordinator: of the cluster that executes it.
        folder: where files go, None for a run without outputs.
        subscription: what the user streams, None for nothing.
        journal: what is durable of the run, and where more of it goes; None for a run without a folder.
    """

    def __init__(
        self,
        plan: Plan,
        coordinator: Coordinator,
        folder: RunFolder | None,
        subscription: Subscription | None,
        journal: RunJournal | None = None,
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
        self._journal = journal
        self._counts: dict[PassPlan, _Counted] = {}
        self._quarantines: dict[PassPlan, PassQuarantine] = {}
        self._executions: dict[PassPlan, PassExecution] = {}
        self._files_kept: set[str] = set()
        """Of the journal: what a run of another spec may take over."""
        self._phase = 0
        self._began = time.monotonic()
        self._draining = False
        self._read_later = read_later(plan)

    async def run(self) -> None:
        """Execute all phases.

        Raises:
            CallError: a call failed for good.
            FoldError: components do not fit together.
            OutputError: a file can't be written.
            WorkersLost: no worker can be kept alive.
            RunDrained: the run was drained before its end.
            JournalError: what is durable can't be read, or more of it can't be written.
        """
        if self._journal is not None:
            texts = self._journal.unwritten
            self.unwritten.update({name: OutputError(text) for name, text in texts.items()})
        with ExitStack() as stack:
            for number, phase in enumerate(self._plan.phases):
                if self._draining:
                    raise RunDrained("the run was stopped between two phases")
                self._phase = number
                start = time.monotonic()
                await self._run_phase(phase, stack)
                self.timings[f"phase {number + 1}"] = time.monotonic() - start
            self._settle()
            if self._journal is not None:
                await self._journal.end(self.ledger().to_json(), self._files_kept)
            if self._subscription is not None:
                self._subscription.end()

    async def _run_phase(self, phase: tuple[PassPlan, ...], stack: ExitStack) -> None:
        failed: list[Exception] = []

        async def guarded(execution: PassExecution) -> None:
            try:
                await execution.run()
            except Exception as error:
                failed.append(_unwrapped(error))
                if not isinstance(failed[-1], RunDrained):  # else the others may finish what runs of them
                    tasks.cancel_scope.cancel()
            finally:
                if execution.is_complete and self._journal is not None:
                    execution.let_others_end()  # workers keep its results until the phase is durable
                else:
                    execution.leave()

        journal = self._journal
        durables = {} if journal is None else {p: journal.of(p, self._plan.spec.replicas) for p in phase}
        for pass_ in [p for p in phase if p in durables and durables[p].is_complete]:
            await self._restore(pass_, durables[pass_])
        phase = tuple(p for p in phase if p not in self._counts)
        if not phase:
            return
        for pass_ in phase:
            for name in pass_.kept:
                log = durables[pass_].log(name) if pass_ in durables else None
                self._spools[name] = stack.enter_context(closing(Spool(name, log)))
        with ExitStack() as opened:
            training = await self._begin_training(phase, opened, durables)
            executions = [self._open(pass_, training, opened, durables.get(pass_)) for pass_ in phase]
            if training is not None:
                held_out = [r for p, r in zip(phase, executions, strict=True) if p.follows]
                self._executions[next(p for p in phase if p.updates)].evaluated_by = held_out
            for execution in executions:
                await execution.begin()
            try:
                async with anyio.create_task_group() as tasks:
                    for execution in executions:
                        tasks.start_soon(guarded, execution, name=f"pass {execution.name}")
            finally:
                if not all(execution.is_complete for execution in executions):
                    await self._flush(executions)
            if failed:
                raise min(failed, key=lambda error: isinstance(error, RunDrained))
            if training is not None:
                self._values.update(await training.deliver(self.unwritten))
            if journal is not None:
                if self._subscription is not None:
                    await self._subscription.passed(self._subscription.mark)
                texts = {name: str(error) for name, error in self.unwritten.items()}
                taken = [execution.complete_snapshot() for execution in executions]
                await journal.commit(taken, phase=self._phase, unwritten=texts)

    async def _restore(self, pass_: PassPlan, durable: PassJournal) -> None:
        """Bring back a pass that was complete before."""
        if self._folder is None:
            raise LocalProtocolError("a run without a folder has no journal")
        await restore_pass(
            self._plan,
            pass_,
            durable,
            self._folder,
            self._read_later,
            self._values,
            self._spools,
            self.unwritten,
        )
        self._files_kept |= durable.files
        quarantine = PassQuarantine(pass_.dataset, "", None, self._plan.spec.replicas)
        quarantine.restore(durable.part(PASS_STATE)["quarantine"])
        self._quarantines[pass_] = quarantine
        counts = PassCounts(0, durable.elements, durable.elements, durable.steps)
        self._counts[pass_] = _Complete(counts, durable.steps)

    async def _flush(self, executions: Sequence[PassExecution]) -> None:
        """The phase ends with an error: what was taken until then need not be done again."""
        if self._journal is None:
            return
        with (
            anyio.move_on_after(FLUSH_S_MAX, shield=True),
            suppress(JournalError),
        ):  # the error is told anyway
            taken = [last for execution in executions if (last := execution.last_snapshot()) is not None]
            if taken:
                await self._journal.commit(taken)

    async def _begin_training(
        self, phase: tuple[PassPlan, ...], stack: ExitStack, durables: Mapping[PassPlan, PassJournal]
    ) -> Trainer | None:
        feeding = next((pass_ for pass_ in phase if pass_.updates), None)
        if feeding is None:
            return None
        sinks = {}
        for name in feeding.updates:
            sink = sink_of(self._plan, self._folder, name)
            if sink is not None:
                sinks[name] = sink
                stack.callback(sink.abort)  # which does nothing to a finished one
        training = Trainer(self._plan, feeding, self._coordinator, sinks)
        stack.callback(training.states.close)
        durable = durables[feeding].parts(STATE) if feeding in durables else {}
        latest = {name: (version, value) for name, (value, version) in durable.items()}
        await training.states.begin(self._values, latest)
        return training

    def _open(
        self,
        pass_: PassPlan,
        training: Trainer | None,
        stack: ExitStack,
        durable: PassJournal | None,
    ) -> PassExecution:
        subscription = self._subscription
        feeding = self._plan.training
        ended = feeding is not None and pass_.dataset == feeding.dataset and pass_.phase > feeding.phase
        execution = self._executions[pass_] = PassExecution(
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
            steps_max=self._trained_steps() if ended and pass_.root == pass_.dataset else None,
            journal=self._journal,
            durable=durable,
        )
        stack.callback(execution.leave)
        self._counts[pass_] = execution.handle
        self._quarantines[pass_] = execution.quarantine
        if self._draining:
            execution.handle.hold()
        return execution

    def drain(self) -> None:
        """Issue nothing more; `run` raises RunDrained when the running calls are finished."""
        if not self._draining:
            self._draining = True
            for execution in self._executions.values():
                execution.handle.hold()

    def _trained_steps(self) -> int | None:
        """Return how many steps the dataset that feeds updates had; it has ended."""
        feeding = self._plan.training
        return None if feeding is None else self._counts[feeding].counts.steps_visible

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

    def quarantine(self) -> RunQuarantine:
        """Return what was set aside until now, in the plan's order."""
        return RunQuarantine([self._quarantines[p] for p in self._plan.passes if p in self._quarantines])

    def ledger(self) -> Ledger:
        """Return where every element went until now."""
        elements = committed = quarantined = 0
        for dataset in self._plan.spec.datasets:
            passes = [p for p in self._plan.passes if p.dataset == dataset]
            handles = [self._counts.get(pass_) for pass_ in passes]
            issued = max((h.counts.elements_offered for h in handles if h is not None), default=0)
            elements += issued
            # an execution that is complete may have had fewer steps than another: its dataset ended early
            committed += (
                min(
                    (issued if _is_complete(h) else h.counts.elements_visible if h is not None else 0)
                    for h in handles
                )
                if handles
                else 0
            )
            aside: dict[int, int] = {}
            for pass_ in passes:
                if pass_ in self._quarantines:
                    aside |= self._quarantines[pass_].steps()
            if aside:
                shown = min(
                    math.inf if _is_complete(h) else h.counts.steps_visible if h is not None else 0
                    for h in handles
                )
                committed -= sum(1 for step in aside.values() if step < shown)
                quarantined += len(aside)
        return Ledger(elements, committed, quarantined, elements - committed - quarantined)

    def _settle(self) -> None:
        """Check at the end of a run that every element is accounted for, counted twice.

        Raises:
            LocalProtocolError: one is not: a defect, which must not pass as a result.
        """
        for pass_, execution in self._executions.items():
            counts = execution.handle.counts
            offered = (execution.handle.steps_total, counts.elements_offered)
            shown = (counts.steps_visible, counts.elements_visible)
            if not offered == shown == (execution.steps, execution.elements):
                raise LocalProtocolError(
                    f"pass {pass_.name} does not add up: of (steps, elements) {offered} were issued, {shown} "
                    f"came back, {(execution.steps, execution.elements)} are in its results"
                )
        ledger = self.ledger()
        if ledger.lost or ledger.elements != ledger.committed + ledger.quarantined + ledger.lost:
            raise LocalProtocolError(f"the ledger of a run that came to its end does not add up: {ledger}")

    def waits(self) -> tuple[Stall, list[Waiting]]:
        """Return what everything waits for: as the scheduler sees it, and as the executions know it better."""
        stall = self._coordinator.why()
        executions = {execution.handle.id: execution for execution in self._executions.values()}
        known = [executions[w.pass_id].refined(w) if w.pass_id in executions else w for w in stall.waits]
        return stall, known

    @property
    def committing_s(self) -> float | None:
        """For how long the journal has been waiting for the disk, seconds; None: it is not."""
        since = None if self._journal is None else self._journal.committing_since
        return None if since is None else time.monotonic() - since

    def progress(self) -> Progress:
        """Return how far the run is."""
        passes = []
        for pass_ in self._plan.phases[self._phase] if self._plan.phases else ():
            handle = self._counts.get(pass_)
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


class _Counted(Protocol):
    """A pass, as far as it is counted."""

    @property
    def counts(self) -> PassCounts:
        """How far it is."""

    @property
    def steps_total(self) -> int | None:
        """Number of steps, None where it is not known yet."""


class _Complete(Struct, frozen=True):
    """A pass that was complete before the run was taken up."""

    counts: PassCounts
    steps_total: int


def _is_complete(handle: _Counted | None) -> bool:
    return handle is not None and handle.steps_total == handle.counts.steps_visible


def _unwrapped(error: Exception) -> Exception:
    """Return the one error inside a task group's."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
