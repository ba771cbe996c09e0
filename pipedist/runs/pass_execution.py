"""Executes one pass of a plan, which reads its dataset once.

Every step goes, in order, to the pass's folds (`pipedist.runs.pass_folds`), its kept runs (`pipedist.runs.kept_runs`)
and its subscriber.
Snapshots are taken between two steps; so are the updates of a training.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import anyio.to_thread

from pipedist.coordinator import Arrival, Batch, Chunk, Coordinator, PassHandle, Slots
from pipedist.coordinator.spans import DriverWork
from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed, SequentialFeed
from pipedist.errors import OutputError
from pipedist.journal.history import CALLS, DurableProgress
from pipedist.plan import PassPlan, Plan
from pipedist.runs.kept_runs import KeptRuns
from pipedist.runs.kept_values import Spool
from pipedist.runs.pass_feeds import GatedFeed, SpoolFeed, feed_of
from pipedist.runs.pass_folds import PassFolds
from pipedist.runs.pass_journal import CALLS_S, PASS_STATE, STATE, Finished, FinishedCallLog
from pipedist.runs.programs import (
    pass_program,
    quarantine_of,
    retries_of,
    slot_of,
)
from pipedist.runs.quarantine import PassQuarantine
from pipedist.runs.subscription import ITEMS_MAX, Part, Step, Subscription
from pipedist.runs.training import Trainer, TrainingParticipant
from pipedist.scheduler import PassSettings

if TYPE_CHECKING:
    from pipedist.coordinator.diagnostics import Waiting
    from pipedist.coordinator.measurements import Recorder
    from pipedist.outputs import RunFolder
    from pipedist.runs.pass_journal import PassJournal, PendingSnapshot, RunJournal, Versioned
    from pipedist.runs.state_history import StateHistory


LATE_S_MAX = 2.0  # longest time, in seconds, that an ending pass waits for workers to drop its calls


class PassExecution:
    """The execution of one pass.

    Args:
        subscription: the stream of this pass that the user reads.
        values: finished values of earlier phases, by stage; this pass adds its own. A value that is only in
            its file is the file's path.
        unwritten: why an output file could not be written, by stage; this pass adds its own.
        spools: the kept values of run stages, of earlier phases and (open) of this pass.
        sequential: see `feed_of`.
        training: the training that the pass is part of, None if it is independent.
        steps_max: number of steps to read; None: the whole dataset.
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
        sequential: MutableMapping[str, SequentialFeed],
        training: Trainer | None,
        steps_max: int | None,
        journal: RunJournal | None,
        durable: PassJournal | None,
        recorder: Recorder,
    ) -> None:
        self._plan = plan
        waits = not plan.asynchronous.isdisjoint(pass_.runs)
        self._record = recorder.begin_pass(
            pass_.name, pass_.runs, plan.spec.replicas, pass_.phase, waits=waits
        )
        self._pass = pass_
        self.name = pass_.name
        self._coordinator = coordinator
        self._subscription = subscription
        self._values = values
        self._replicas = plan.spec.replicas
        self._feed: Feed = feed_of(plan, pass_, spools, sequential)
        self._kept_feed = self._feed if isinstance(self._feed, SpoolFeed) else None
        self._training = training if pass_.updates else None
        self._state_history: StateHistory | None = None
        self._snapshot_versions: dict[str, int] = {}
        """The versions of states in the latest snapshot, which is in slot `_slot`, also of an earlier process."""
        self._slot = -1
        self._journal = journal
        self._durable = durable
        self.steps = 0 if durable is None else durable.before.steps
        """Steps [0, steps) have been taken: folded, kept and streamed."""
        self.elements = 0 if durable is None else durable.before.elements
        self.resumed = DurableProgress(self.steps)  # the results that it took from the journal
        self._taking = anyio.Lock(fast_acquire=True)
        self._between = False  # no step is partly taken, so a snapshot is consistent
        self.is_complete = False  # whether all steps are taken and all values complete
        self._ending = ""  # the work after the last step, for `activity`
        self._took = anyio.Event()  # set if steps were taken since the latest snapshot
        self.on_taken: Callable[[], None] = lambda: None  # called after steps were taken
        self.evaluated_by: list[PassExecution] = []
        """Passes over held-out data, and the one that makes the values which this pass reads: their steps are
        committed before later steps of this pass."""
        self._participant: TrainingParticipant | None = None
        if training is not None:
            self._participant = training.participant(pass_, self._feed)
            self._feed = self._participant.feed
        elif steps_max is not None:
            self._feed = GatedFeed(self._feed, "run", steps_max=steps_max)
        self._fold_names = ", ".join(pass_.folds)
        self._folds = PassFolds(
            plan,
            pass_,
            coordinator,
            folder,
            unwritten=unwritten,
            durable=durable,
            recorder=recorder,
            values=values,
        )
        self._prepared = False  # whether the values that functions finish are made
        self.quarantine = PassQuarantine(next(iter(pass_.runs), ""), self._feed, self._replicas)
        is_divisible = not (training is not None or pass_.gang or quarantine_of(plan, pass_))
        self._kept = KeptRuns(
            plan, pass_, self._feed, self.quarantine, spools, durable, is_divisible=is_divisible
        )
        self._calls: FinishedCallLog | None = None  # the log of finished calls; None if they are not kept
        self._unread: dict[Finished, Tree] | None = None
        """Finished calls whose step was not taken when the pass ended early."""
        self._reported = 0
        """Number of results of calls and elements when finished calls were logged for the last time."""
        self.handle = self._open()
        """The pass at the coordinator; the owner of this object closes it with `leave`."""

    @property
    def finishing(self) -> list[PassHandle]:
        """The passes of the calls that finish values of the pass."""
        return self._folds.finishing

    def refined(self, wait: Waiting) -> Waiting:
        """Return a more precise description of a wait, if the pass knows one."""
        subscription = self._subscription
        if wait.reason == "data" and isinstance(self._feed, GatedFeed) and self._feed.held_back:
            return wait.refined("state", self._feed.held_back)
        if wait.reason == "data" and self._kept_feed is not None and self._kept_feed.is_live:
            return wait.refined("stream", f"not all values of {self._pass.root} for the next step are made")
        if wait.reason != "reader":
            return wait
        if subscription is not None and subscription.is_full:
            streamed = ", ".join(subscription.stages)
            text = f"the reader of the stream of {streamed} has not taken {subscription.waiting} items"
            return wait.refined("subscriber", text)
        if self._participant is not None and not self._between:
            return wait.refined("state", f"{wait.text}: states are being updated with the steps before them")
        if full := self._kept.full:
            return wait.refined("stream", f"{wait.text}: stages that read {', '.join(full)} are slower")
        stages = ", ".join(self._pass.folds)
        by = f" by the stages {stages}" if stages else ""
        return wait.refined("fold", f"{wait.text}{by}")

    @property
    def activity(self) -> str:
        """The work on its results, if all calls have returned; else ""."""
        total = self.handle.steps_total
        if self._ending or total is None or self.handle.counts.steps_visible < total:
            return self._ending
        return f"{self._reducing()}, {self.steps:,} of {total:,} steps"

    def _reducing(self) -> str:
        return f"reducing {', '.join(self._pass.folds)}" if self._pass.folds else "taking results"

    def _open(self) -> PassHandle:
        streamed = () if self._subscription is None else self._subscription.stages
        quarantine = quarantine_of(self._plan, self._pass)
        found = self._durable.part(PASS_STATE) if self._durable is not None and self.steps else None
        speculation = self._plan.spec.cluster.speculation
        at_once, concurrency = self._plan.waiting(self._pass)
        once = self._pass.gang or concurrency > 0 or self._plan.is_paid(self._pass)
        # no results are kept in a training, because a resumed run may have other states
        keep = not self._pass.gang and self._participant is None
        stamp = self._durable.stamp if self._durable is not None and keep else ""
        if self._durable is not None and keep:
            self._calls = FinishedCallLog(self._durable)
        program = pass_program(
            self._plan, self._pass, self._feed.reader, self._values, streamed, self._kept.storable
        )
        handle = self._coordinator.open_pass(
            program,
            name=self.name,
            settings=PassSettings(
                self._replicas,
                gang=self._pass.gang,
                first_step=self.steps,
                speculation=0.0 if once or isinstance(speculation, str) else float(speculation),
                call_s_max=program.call_s_max,
                at_once=at_once,
                concurrency=concurrency,
                limits=program.limits,
                quarantine=bool(quarantine) and quarantine.issuperset(self._pass.runs),
                quarantine_max=self._plan.quarantine_max(self._pass.dataset),
                quarantined=0 if found is None else len(found["quarantine"]),
                gpus=self._pass.gpus,
                members=self._plan.hosts if self._pass.devices(self._plan.spec) else 0,
                # values that were made are used before more are made
                priority=1 if self._plan.maker(self._pass) is None else 0,
            ),
            retries=retries_of(self._plan, self._pass),
            quarantine=quarantine,
            on_quarantine=self.quarantine.add,
            feed=self._feed,
            on_arrival=_announcer(self._plan, self._subscription),
            stamp=stamp,
            record=self._record,
        )
        handle.keeps_results = self._calls is not None
        if self._durable is not None:
            self._durable.on_committed = handle.settle
        handle.counts.elements_offered = handle.counts.elements_visible = self.elements
        handle.counts.steps_visible = self.steps
        handle.counts.calls_past = self._plan.calls(self._pass, self.steps)
        return handle

    def read_from(self, maker: PassExecution) -> None:
        """Get the values of a run from the pass of the phase that makes them."""
        assert self._kept_feed is not None  # its root is a run
        self.evaluated_by.append(maker)
        self._kept_feed.follow()
        maker._kept.readers.setdefault(self._pass.root, []).append(self._kept_feed)

    @property
    def is_starved(self) -> bool:
        """Whether the pass that makes its values has failed, and all of these are processed."""
        return self._kept_feed is not None and self._kept_feed.is_starved(self.steps)

    async def begin(self) -> None:
        """Go to the first uncommitted step, before any pass of the phase runs."""
        if self._durable is None:
            return
        if self._training is not None:
            from pipedist.runs.state_history import StateHistory  # only trainings with a folder need it

            self._state_history = StateHistory(self._durable)
        await self._kept.restore()
        await self._feed.begin_at(self.steps)
        if self.steps:
            found = self._durable.part(PASS_STATE)
            self.quarantine.restore(found["quarantine"])
            if self._participant is not None:
                self._participant.restore(found["training"])
            if self._training is not None:
                self._slot, self._snapshot_versions = found["slot"], self._training.states.versions
        if self._calls is not None:
            limit = self._plan.quarantine_max(self._pass.dataset)
            rest = None if limit is None else limit - self.handle.settings.quarantined
            calls, quarantined, elements = self._durable.finished_calls(rest)
            self.handle.restore(calls, quarantined, elements)
            over = {chunk.lo for chunk in calls}
            others = sum(1 for call, _, _ in elements if call not in over)
            self.resumed = DurableProgress(self.steps, len(calls), others)

    async def run(self) -> None:
        """Execute the pass to its end; errors may be in an ExceptionGroup."""
        try:
            await self._run()
        finally:
            await self._feed.aclose()
        self._folds.deliver(self._values)
        self._between = self.is_complete = True

    async def _run(self) -> None:
        participant = self._participant
        with ExitStack() as stack:
            self._folds.open(stack)
            async with anyio.create_task_group() as tasks:
                saved = None if self._durable is None or not self.steps else self._durable.part(PASS_STATE)
                await self._folds.begin(tasks, None if saved is None else saved["folds"])
                if participant is not None:
                    self._folds.watch(participant.watched)
                tasks.start_soon(self.handle.run_feed, name=f"feed of {self.name}")
                await self._read(tasks)
                self._between = False
                self._ending = self._reducing()
                epochs = self._plan.epochs(self._pass) if participant is None else participant.epochs
                began = self._record.recorder.now()
                await self._folds.finish(epochs)
                self._folded(began)
                if participant is not None:
                    await participant.on_finished(self._folds.take_fresh(participant.watched))
            self._ending = "writing results"
            await self._kept.finish()
            await self._folds.write()

    async def _read(self, tasks: anyio.abc.TaskGroup) -> None:
        """Take all steps, and commit them periodically."""
        committing, done, read = anyio.CancelScope(), anyio.Event(), anyio.Event()

        async def commit_periodically(journal: RunJournal, durable: PassJournal) -> None:
            with committing:
                every_s = self._plan.spec.checkpoint.every_s if self._training is not None else None
                await journal.commit_periodically(lambda: self._next_snapshot(durable), every_s)
            # the passes of the readers wait for these steps; and what follows them may fail
            await read.wait()
            if (self._kept.readers and self.steps > durable.steps_committed) or self._prepared:
                if self._subscription is not None:
                    await self._subscription.passed(self._subscription.mark)
                for maker in self.evaluated_by:
                    if maker._durable is not None:
                        await maker._durable.reached(maker.steps)
                await anyio.to_thread.run_sync(durable.flush)
                await journal.commit([self._snapshot(durable)])
            done.set()

        self._between = True
        if self._journal is not None and self._durable is not None:
            name = f"journal of {self.name}"
            tasks.start_soon(commit_periodically, self._journal, self._durable, name=name)
        else:
            done.set()
        async for batch in self.handle.batches():
            async with self._taking:
                self._between = False
                for first, epoch, steps in self._segments(batch):
                    await self._take(first, epoch, steps, batch.bytes // len(batch.steps))
                self._between = True
            self._took.set()
            self.on_taken()
            for feed in self._kept.feeds:
                await feed.room()
        for feed in self._kept.feeds:
            feed.end()
        committing.cancel()
        if self._folds.has_last_call:
            self._between = False
            await self._folds.prepare()
            self._prepared = True
        read.set()
        if self._kept.readers or self._prepared:
            await done.wait()

    async def _next_snapshot(self, durable: PassJournal) -> PendingSnapshot:
        """Wait for new results, and snapshot them; steps when the subscriber has seen them."""
        while True:
            if self._calls is None or self._reported == self.handle.reported:
                with anyio.move_on_after(CALLS_S):
                    await self._took.wait()
            async with self._taking:
                if not self._took.is_set() and (
                    self._calls is None or self._reported == self.handle.reported
                ):
                    continue
                self._reported = self.handle.reported
                finished = {} if self._calls is None else self.handle.finished_calls()
                if not self._took.is_set() and self._calls is not None and not self._calls.lacks(finished):
                    continue
                if self._calls is not None:
                    await anyio.to_thread.run_sync(self._calls.add, self.steps * self._replicas, finished)
                await anyio.to_thread.run_sync(durable.flush)  # a snapshot then writes nothing
                taken = self._snapshot(durable, finished)
                if not self._took.is_set():
                    return taken
                self._took = anyio.Event()
                others = [(held_out, held_out.steps) for held_out in self.evaluated_by]
                mark = 0 if self._subscription is None else self._subscription.mark
                break
        if self._subscription is not None:
            await self._subscription.passed(mark)
        for held_out, steps in others:
            if held_out._durable is not None:
                await held_out._durable.reached(steps)
        return taken

    def last_snapshot(self) -> PendingSnapshot | None:
        """Return a snapshot of uncommitted whole steps and finished calls, None if there are none."""
        if self._durable is None or not self._between:
            return None
        finished = self._unread or {}
        # those that were logged, but whose commit was cancelled, are lacking too
        has_calls = self._calls is not None and (
            self._calls.lacks(finished)
            or (self._calls.is_used and not self._durable.has_committed(CALLS, self._calls.count))
        )
        if self.steps == self._durable.steps_committed and not has_calls:
            return None
        if not all(held_out._between for held_out in self.evaluated_by):
            return None
        if self._subscription is not None and not self._subscription.has_passed(self._subscription.mark):
            return None
        return self._snapshot(self._durable, finished)

    def complete_snapshot(self) -> PendingSnapshot:
        assert self._durable is not None
        assert self.is_complete
        return self._snapshot(self._durable)

    def _snapshot(self, durable: PassJournal, finished: Mapping[Finished, Tree] = {}) -> PendingSnapshot:
        version = 3 * self.steps + self._prepared + self.is_complete
        if (
            self._training is not None
            and (versions := self._training.states.versions) != self._snapshot_versions
        ):
            self._snapshot_versions = versions
            self._slot = (self._slot + 1) % self._plan.spec.checkpoint.keep
        state = {
            "folds": self._folds.state(),
            "training": None if self._participant is None else self._participant.state(),
            "quarantine": self.quarantine.state(self.steps),
            "slot": self._slot,
        }
        parts: dict[str, Versioned] = {PASS_STATE: (version, state)}
        if self._training is not None:
            for name, (number, value) in self._training.states.latest.items():
                parts[f"{STATE}{self._slot}.{name}"] = (number, [value, number])
        dropped = self._kept.dropped()
        if self._state_history is not None:
            dropped += self._state_history.dropped()
        if self.is_complete:
            dropped += self._folds.logs_over()
        if self._calls is not None:
            before = self.steps * self._replicas
            self._calls.add(before, finished)
            dropped += self._calls.dropped(before)
            if self._calls.is_used:
                parts[CALLS] = self._calls.count
        return durable.snapshot(
            self.steps,
            self.elements,
            parts,
            quarantined=self.quarantine.steps(),
            complete=self.is_complete,
            dropped=dropped,
        )

    def _segments(self, batch: Batch) -> Iterator[tuple[int, int, Sequence[list[Slots]]]]:
        """Yield (first step, epoch, steps) by epoch; less at once if streamed, so that few steps are ahead."""
        steps_max = len(batch.steps)
        if self._subscription is not None and self._subscription.kind == "steps":
            # a fold or update that fails must not hold back the steps before it
            steps_max = 1 if self._pass.folds or self._participant is not None else ITEMS_MAX
        first, last = batch.first, batch.first + len(batch.steps)
        while first < last:
            epoch = self._feed.epoch(first)
            ahead = range(first, min(last, first + steps_max))
            fitting = bisect_right(ahead, epoch, key=self._feed.epoch)
            at = first - batch.first
            yield first, epoch, batch.steps[at : at + fitting]
            first += fitting

    async def _take(self, first: int, epoch: int, steps: Sequence[list[Slots]], step_bytes: int) -> None:
        began = self._record.recorder.now()
        await self._folds.add(epoch, steps)
        self._folded(began)
        if self.quarantine.has_unread_inputs:
            await self.quarantine.read_inputs(first + len(steps))
        await self._kept.add(first, epoch, steps, step_bytes)
        self.elements += self._feed.elements(first, first + len(steps))
        self.steps = first + len(steps)
        subscription = self._subscription
        if subscription is not None and subscription.kind == "steps":
            for step, slots in enumerate(steps, first):
                if subscription.is_full:
                    await subscription.room()
                values: dict[str, Tree] = {}
                for name in subscription.stages:
                    if name in self._pass.runs:
                        values[name] = self._folds.components(name, slots)
                    else:
                        values[name] = await self._folds.step_value(name, step, slots)
                subscription.put(Step(step, epoch, values), step_bytes)
        if self._participant is not None:
            self.on_taken()  # the training may wait for a step that never comes
            await self._notify_training(self._participant, first + len(steps) - 1, epoch)
        if subscription is not None:
            await subscription.room()

    def _folded(self, began: int) -> None:
        if self._pass.folds:
            self._record.recorder.driver_span(DriverWork.FOLD, began, self._fold_names)

    async def _notify_training(self, participant: TrainingParticipant, last: int, epoch: int) -> None:
        ends = await participant.feed.ends_epoch(last)
        if ends:
            await self._folds.end_epoch(epoch)
        await participant.on_taken(last, epoch, self._folds.take_fresh(participant.watched), ends=ends)
        if self._training is not None and self._state_history is not None:
            self._state_history.add(self._training.states.latest, steps=self.steps, epochs=epoch + ends)

    async def stop(self) -> None:
        """End the pass early; results that workers have finished are kept for `last_snapshot`."""
        if self._calls is not None and self._unread is None and not self.is_complete:
            await self.handle.stop(LATE_S_MAX)
            self._unread = self.handle.finished_calls()
        self.leave()

    def leave(self) -> None:
        """End the pass at the coordinator, and its part in a training."""
        self.handle.close()
        self.handle.release()
        self.leave_training()
        # The callback refers to this pass: its values would stay in memory until a garbage collection.
        self.on_taken = lambda: None

    def leave_training(self) -> None:
        """Leave the training and the readers, so that other passes need not wait for this one."""
        for feed in self._kept.feeds:
            feed.cut_off()
        if self._participant is not None:
            self._participant.leave()


def _announcer(plan: Plan, subscription: Subscription | None) -> Arrival | None:
    """Return a callback that streams results of calls as they arrive."""
    if subscription is None or subscription.kind != "parts":
        return None
    slots = [(name, slot_of(plan, name)) for name in subscription.streamed]

    def announce(chunk: Chunk) -> None:
        size = chunk.size // (len(chunk.calls) * len(slots))
        for call, values in enumerate(chunk.calls, chunk.lo):
            step, replica = divmod(call, plan.spec.replicas)
            for name, slot in slots:
                if slot in values:  # not the case for an empty shard
                    subscription.put(Part(name, step, replica, values[slot]), size)

    return announce
