"""Executes a plan: its phases in order, the passes of a phase at once."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.abc
from msgspec import Struct
from msgspec.structs import astuple

from pipedist.coordinator import Coordinator, PassHandle
from pipedist.coordinator.pass_handle import PassCounts
from pipedist.core.types import Tree
from pipedist.datasets.feeds import SequentialFeed
from pipedist.errors import (
    CallError,
    JournalError,
    LocalProtocolError,
    OutputError,
    QuarantineError,
    RunDrained,
)
from pipedist.journal.history import DurableProgress
from pipedist.plan import PassPlan, Plan
from pipedist.runs.kept_values import Spool
from pipedist.runs.pass_execution import PassExecution
from pipedist.runs.pass_folds import is_streamed, paths_of, restore_pass, sink_of
from pipedist.runs.pass_journal import PASS_STATE
from pipedist.runs.quarantine import PassQuarantine, QuarantinedElement
from pipedist.runs.result import Ledger, Progress, StageCount
from pipedist.runs.run_log import RunLog
from pipedist.runs.subscription import Subscription
from pipedist.runs.timings import Measurements
from pipedist.runs.training import Trainer
from pipedist.scheduler.quarantine import CAUSES_MAX

if TYPE_CHECKING:
    from pipedist.coordinator.diagnostics import Stall, Waiting
    from pipedist.outputs import RunFolder
    from pipedist.runs.pass_journal import PassJournal, RunJournal

ORDER_S_MAX = 5.0
"""Longest time, in seconds, that the other passes of a phase get to reach the step in which one has failed."""

FLUSH_S_MAX = 5.0  # longest time, in seconds, that a failed run spends on its last commit


class Execution:
    """One run of a plan."""

    def __init__(
        self,
        plan: Plan,
        coordinator: Coordinator,
        folder: RunFolder | None,
        subscription: Subscription | None,
        journal: RunJournal | None,
        log: RunLog,
    ) -> None:
        self.timings: dict[str, float] = {}  # seconds, by phase
        self.measurements = Measurements()
        self._plan = plan
        self._coordinator = coordinator
        self._folder = folder
        self._subscription = subscription
        self.unwritten: dict[str, OutputError] = {}
        """Why an output file could not be written, by stage; its value is complete."""
        self._values: dict[str, Tree] = {}
        self._spools: dict[str, Spool] = {}
        self._journal = journal
        self._log = log
        if journal is not None:
            journal.recorder = self.measurements.recorder
        self._counts: dict[PassPlan, PassHandle | _Complete] = {}
        self._quarantines: dict[PassPlan, PassQuarantine] = {}
        self._executions: dict[PassPlan, PassExecution] = {}
        self._files_kept: set[str] = set()  # journal files that are kept after the run, for `--reuse`
        self._phase = 0
        self._began = time.monotonic()
        self._draining = False

    async def run(self) -> None:
        """Execute all phases; raise RunDrained if drained before the end."""
        with ExitStack() as stack:
            for number, phase in enumerate(self._plan.phases):
                title = f"phase {number + 1} of {len(self._plan.phases)}"
                if self._draining:
                    raise RunDrained(f"the run was stopped before {title}")
                self._phase = number
                start = time.monotonic()
                self._log.event(f"{title} begins: {', '.join(pass_.name for pass_ in phase)}")
                await self._run_phase(phase, stack)
                self.timings[f"phase {number + 1}"] = time.monotonic() - start
                self._log.event(f"{title} has ended after {time.monotonic() - start:.1f} s")
                self._check_quarantine()
            self._settle()
            if self._journal is not None:
                await self._journal.end(self.ledger().to_json(), self._files_kept)
            if self._subscription is not None:
                self._subscription.end()

    async def _run_phase(self, phase: tuple[PassPlan, ...], stack: ExitStack) -> None:
        journal = self._journal
        durables = {} if journal is None else {p: journal.of(p, self._plan.spec.replicas) for p in phase}
        for pass_ in [p for p in phase if p in durables and durables[p].before.complete]:
            await self._restore(pass_, durables[pass_])
        phase = tuple(p for p in phase if p not in self._counts)
        if not phase:
            return
        for pass_ in phase:
            for name in pass_.kept:
                log = durables[pass_].log(name) if pass_ in durables else None
                later = (p for p in self._plan.passes if p.phase > self._phase and p.root == name)
                if log is not None or any(later):
                    self._spools[name] = stack.enter_context(closing(Spool(name, log)))
        with ExitStack() as opened:
            training = await self._begin_training(phase, opened, durables)
            sequential: dict[str, SequentialFeed] = {}
            executions = [
                self._open(pass_, training, opened, durables.get(pass_), sequential) for pass_ in phase
            ]
            if training is not None:
                held_out = [r for p, r in zip(phase, executions, strict=True) if p.follows]
                self._executions[next(p for p in phase if p.updates)].evaluated_by = held_out
            for pass_, execution in zip(phase, executions, strict=True):
                maker = self._plan.maker(pass_)
                if maker in phase:  # an earlier process may have completed it
                    execution.read_from(self._executions[maker])
            for execution in executions:
                await execution.begin()
            try:
                failures = await _PhaseRun(executions, training is not None, journal is not None).run()
            finally:
                if not all(execution.is_complete for execution in executions):
                    await self._flush(executions)
            if failures:
                raise failures[0]
            if training is not None:
                self._values.update(await training.deliver(self.unwritten))
            if journal is not None:
                if self._subscription is not None:
                    await self._subscription.passed(self._subscription.mark)
                texts = {name: str(error) for name, error in self.unwritten.items()}
                taken = [execution.complete_snapshot() for execution in executions]
                await journal.commit(taken, phase=self._phase, unwritten=texts)

    async def _restore(self, pass_: PassPlan, durable: PassJournal) -> None:
        assert self._folder is not None  # it has the journal
        await restore_pass(
            self._plan,
            pass_,
            durable,
            self._folder.final,
            self._values,
            self._spools,
            self.unwritten,
            self._folder,
        )
        self._files_kept |= durable.before.files()
        quarantine = PassQuarantine("", None, self._plan.spec.replicas)
        quarantine.restore(durable.part(PASS_STATE)["quarantine"])
        self._quarantines[pass_] = quarantine
        steps, elements = durable.before.steps, durable.before.elements
        past = self._plan.calls(pass_, steps)
        self._counts[pass_] = _Complete(PassCounts(0, past, elements, elements, steps), steps)

    async def _flush(self, executions: Sequence[PassExecution]) -> None:
        """Commit the steps that were taken before the phase failed."""
        if self._journal is None:
            return
        # the error of the run is reported anyway
        with anyio.move_on_after(FLUSH_S_MAX, shield=True), suppress(JournalError):
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
                stack.callback(sink.abort)  # does nothing if the sink is finished
        training = Trainer(self._plan, feeding, self._coordinator, sinks, self.measurements.recorder)
        stack.callback(training.states.close)
        durable = durables[feeding].states() if feeding in durables else {}
        latest = {name: list(versions.items())[-1] for name, versions in durable.items()}
        await training.states.begin(self._values, latest)
        return training

    def _open(
        self,
        pass_: PassPlan,
        training: Trainer | None,
        stack: ExitStack,
        durable: PassJournal | None,
        sequential: dict[str, SequentialFeed],
    ) -> PassExecution:
        subscription = self._subscription
        feeding = self._plan.training
        steps_max = None
        if (
            feeding is not None
            and pass_.dataset == pass_.root == feeding.root
            and pass_.phase > feeding.phase
        ):
            steps_max = self._counts[feeding].counts.steps_visible  # the training may have ended early
        execution = self._executions[pass_] = PassExecution(
            self._plan,
            pass_,
            self._coordinator,
            self._folder,
            subscription if subscription is not None and subscription.pass_ == pass_ else None,
            values=self._values,
            unwritten=self.unwritten,
            spools=self._spools,
            sequential=sequential,
            training=training if pass_.updates or pass_.follows else None,
            steps_max=steps_max,
            journal=self._journal,
            durable=durable,
            recorder=self.measurements.recorder,
        )
        execution.quarantine.on_quarantined = partial(_log_quarantined, self._log)  # no reference to `self`
        stack.callback(execution.leave)
        self._counts[pass_] = execution.handle
        self._quarantines[pass_] = execution.quarantine
        if self._draining:
            execution.handle.hold()
        return execution

    def drain(self) -> None:
        """Stop issuing calls; `run` raises RunDrained after the running ones."""
        if not self._draining:
            self._draining = True
            for execution in self._executions.values():
                execution.handle.hold()

    def results(self) -> dict[str, Tree]:
        """Return the finished values of reduces and gathers, in the spec's order.

        A gather with an output file is returned as the file's path, even if a later phase kept its value in memory.
        """
        results = {}
        for name in self._plan.spec.stages:
            if name not in self._values:
                continue
            files = {} if name in self.unwritten else self._plan.spec.files_of(name)
            if files and self._folder is not None and is_streamed(self._plan, name):
                results[name] = paths_of(files, self._folder.final)
            else:
                results[name] = self._values[name]
        return results

    def quarantine(self) -> list[tuple[str, QuarantinedElement]]:
        """Return (dataset, element) of quarantined elements, in plan order."""
        return [(p.dataset, each) for p in self._plan.passes for each in self._quarantines.get(p, ())]

    def ledger(self) -> Ledger:
        """Return how many elements are committed, quarantined and lost so far."""
        found = [self._ledger_of(dataset) for dataset in self._plan.spec.datasets]
        return Ledger(*(sum(counts) for counts in zip(*map(astuple, found), strict=True)))

    def _ledger_of(self, dataset: str) -> Ledger:
        passes = [p for p in self._plan.passes if p.dataset == dataset]
        handles = [self._counts.get(pass_) for pass_ in passes]
        issued = max((h.counts.elements_offered for h in handles if h is not None), default=0)
        # a complete pass may have had fewer steps than another of its dataset, which then ended early
        seen = [issued if _is_complete(h) else h.counts.elements_visible if h else 0 for h in handles]
        places: dict[int, int] = {}  # by quarantined element, the number of elements before its step
        for pass_ in passes:
            if pass_ in self._quarantines:
                steps = self._quarantines[pass_].steps().items()
                places |= {element: self._plan.elements(pass_, step) for element, step in steps}
        committed = min(seen, default=0) - sum(1 for before in places.values() if before < min(seen))
        return Ledger(issued, committed, len(places), issued - committed - len(places))

    def _check_quarantine(self) -> None:
        """Fail a run that has set a whole dataset aside, which is no success: the function or the data is wrong."""
        if self._plan.spec.quarantine_max != "auto":
            return
        for dataset in self._plan.spec.datasets:
            ledger = self._ledger_of(dataset)
            if ledger.quarantined == ledger.elements > 0:
                found = [each for name, each in self.quarantine() if name == dataset]
                lines = [
                    f"\n    element {each.element}, stage {each.stage}: {each.cause}"
                    for each in found[:CAUSES_MAX]
                ]
                again = "Fix the function or the data, and run it again"
                if self._journal is not None:
                    again = (
                        "Fix the function or the data and rerun with --reuse; if the cause was elsewhere, rerun with "
                        "--restart"
                    )
                raise QuarantineError(
                    f"all elements of {dataset} failed ({ledger.elements:,}), so the run ends. The first "
                    f"failures:{''.join(lines)}\n  {again}. In a spec, `quarantine_max: {ledger.elements}` accepts it",
                    stage=found[0].stage,
                    step=found[0].step,
                    replica=found[0].replica,
                )

    def retries(self) -> dict[str, dict[str, int]]:
        """Return how many attempts of calls did not count, by stage and reason."""
        found: dict[str, dict[str, int]] = {}
        for handle in [each for x in self._executions.values() for each in (x.handle, *x.finishing)]:
            for (stage, reason), count in handle.failed.retries.items():
                of_stage = found.setdefault(stage, {})
                of_stage[reason] = of_stage.get(reason, 0) + count
        return found

    def resumed(self) -> dict[str, DurableProgress]:
        """Return what was taken from the journal, by name of the pass."""
        done = {
            p: DurableProgress(each.steps_total)
            for p, each in self._counts.items()
            if isinstance(each, _Complete)
        }
        done.update((pass_, execution.resumed) for pass_, execution in self._executions.items())
        return {pass_.name: found for pass_, found in done.items() if found != DurableProgress(0)}

    def _settle(self) -> None:
        """Check that two independent counts account for every element."""
        for pass_, execution in self._executions.items():
            counts = execution.handle.counts
            offered = (execution.handle.steps_total, counts.elements_offered)
            visible = (counts.steps_visible, counts.elements_visible)
            if not offered == visible == (execution.steps, execution.elements):
                raise LocalProtocolError(
                    f"internal error: the counts of pass {pass_.name} differ: (steps, elements) issued "
                    f"{offered}, returned {visible}, in its results {(execution.steps, execution.elements)}"
                )
        ledger = self.ledger()
        if ledger.lost or ledger.elements != ledger.committed + ledger.quarantined + ledger.lost:
            raise LocalProtocolError(
                f"internal error: the ledger of a finished run is inconsistent: {ledger}"
            )

    def waits(self) -> tuple[Stall, list[Waiting]]:
        """Return the scheduler's waits, and the same refined by the passes."""
        stall = self._coordinator.why()
        executions = {execution.handle.id: execution for execution in self._executions.values()}
        known = [executions[w.pass_id].refined(w) if w.pass_id in executions else w for w in stall.waits]
        return stall, known

    @property
    def committing_s(self) -> float | None:
        """Seconds since the start of the commit in progress, or None."""
        since = None if self._journal is None else self._journal.committing_since
        return None if since is None else time.monotonic() - since

    def progress(self) -> Progress:
        passes = []
        for pass_ in self._plan.phases[self._phase] if self._plan.phases else ():
            handle = self._counts.get(pass_)
            if handle is None:
                continue
            division = self._plan.division_of(pass_)
            total = calls = None
            if division is not None:
                total = self._plan.elements(pass_, division.steps_per_epoch * self._plan.epochs(pass_))
                calls = None if handle.steps_total is None else self._plan.calls(pass_, handle.steps_total)
            counts = handle.counts
            passes.append(
                StageCount(
                    name=pass_.name,
                    dataset=pass_.dataset,
                    elements_done=counts.elements_visible,
                    elements_total=total,
                    steps_done=counts.steps_visible,
                    steps_total=handle.steps_total,
                    calls_done=counts.calls_done + counts.calls_past,
                    calls_total=calls,
                    calls_past=counts.calls_past,
                    elements_ahead=handle.elements.count if isinstance(handle, PassHandle) else 0,
                )
            )
        return Progress(
            tuple(passes),
            self._phase,
            len(self._plan.phases),
            self._coordinator.workers_ready,
            time.monotonic() - self._began,
            self._activity(),
        )

    def _activity(self) -> str:
        """Return the work on the results of the phase's passes, if no other is left; else ""."""
        executions = [e for p in self._plan.phases[self._phase] if (e := self._executions.get(p)) is not None]
        left = [execution for execution in executions if not execution.is_complete]
        if not left and executions and self.committing_s is not None:
            return "committing the journal"
        activities = [execution.activity for execution in left]
        return "; ".join(activities) if all(activities) else ""


class _PhaseRun:
    """Runs the passes of a phase at once.

    If one fails, the others go on to the step in which it failed, because they may fail in an earlier one: which
    error a run raises does not depend on the speed of its workers.
    """

    def __init__(self, executions: Sequence[PassExecution], is_training: bool, is_durable: bool) -> None:
        self._executions = executions
        self._is_training = is_training
        self._is_durable = is_durable  # then workers keep complete results until the phase is durable
        self._scopes = [anyio.CancelScope() for _ in executions]
        self._failed: list[tuple[tuple[float, int], Exception]] = []  # (step, place of the pass), error

    async def run(self) -> list[Exception]:
        """Run the passes, and return their errors, the one that counts first."""
        async with anyio.create_task_group() as tasks:
            for place, execution in enumerate(self._executions):
                execution.on_taken = self._stop_later
                tasks.start_soon(self._guarded, place, execution, tasks, name=f"pass {execution.name}")
        return [error for _, error in sorted(self._failed, key=lambda one: one[0])]

    async def _guarded(self, place: int, execution: PassExecution, tasks: anyio.abc.TaskGroup) -> None:
        try:
            with self._scopes[place]:
                await execution.run()
        except Exception as group:
            error = _unwrapped(group)
            step: float = -1  # of an error that does not depend on the order of calls
            if isinstance(error, RunDrained):  # the others finish their running calls
                step = math.inf
            elif isinstance(error, CallError) and not self._is_training:
                step = error.step
            self._failed.append(((step, place), error))
            if step < math.inf:
                tasks.cancel_scope.deadline = anyio.current_time() + ORDER_S_MAX
            self._stop_later()
        finally:
            if execution.is_complete and self._is_durable:
                execution.leave_training()
            else:
                await execution.stop()
            if self._failed:
                self._stop_later()

    def _stop_later(self) -> None:
        """Cancel the passes that can't fail before the first failure any more."""
        first = min((place for place, _ in self._failed), default=(math.inf, 0))
        for place, execution in enumerate(self._executions):
            if (execution.steps, place) > first or execution.is_starved:
                self._scopes[place].cancel()


class _Complete(Struct, frozen=True):
    """A pass that an earlier process completed."""

    counts: PassCounts
    steps_total: int


def _log_quarantined(log: RunLog, found: QuarantinedElement) -> None:
    call = f"{found.stage}/{found.step}/{found.replica}"
    log.event(f"element {found.element} is quarantined, call {call}: {found.cause}", logging.WARNING)


def _is_complete(handle: PassHandle | _Complete | None) -> bool:
    return handle is not None and handle.steps_total == handle.counts.steps_visible


def _unwrapped(error: Exception) -> Exception:
    """Return the first error inside a task group's error."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
