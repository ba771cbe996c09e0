"""Executes one pass of a plan, which reads its dataset once.

Every step goes, in order, to the pass's folds (`pipedist.runs.pass_folds`), its spools and its subscriber.
Snapshots are taken between two steps; so are the updates of a training.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import anyio.to_thread

from pipedist.coordinator import Arrival, Batch, Chunk, Coordinator, PassHandle, Slots
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.plan import PassPlan, Plan
from pipedist.runs.pass_feeds import GatedFeed, Spool, feed_of
from pipedist.runs.pass_folds import PassFolds
from pipedist.runs.pass_journal import PASS_STATE, STATE
from pipedist.runs.programs import parts_of, pass_program, quarantine_of, retries_of, slot_of
from pipedist.runs.quarantine import PassQuarantine
from pipedist.runs.state_history import StateHistory
from pipedist.runs.subscription import Part, Step, Subscription
from pipedist.runs.training import Trainer, TrainingParticipant
from pipedist.scheduler import PassSettings

if TYPE_CHECKING:
    from pipedist.coordinator.diagnostics import Waiting
    from pipedist.outputs import RunFolder
    from pipedist.runs.pass_journal import PassJournal, PendingSnapshot, RunJournal, Versioned


class PassExecution:
    """The execution of one pass.

    Args:
        plan: the run's plan.
        pass_: the pass to execute.
        coordinator: coordinator of the cluster that executes it.
        folder: the output folder, None for a run without outputs.
        subscription: the stream of this pass that the user reads, None if there is none.
        values: finished values of earlier phases, by stage; this pass adds its own. A value that is only in
            its file is the file's path.
        unwritten: why an output file could not be written, by stage; this pass adds its own.
        spools: the kept values of run stages, of earlier phases and (open) of this pass.
        read_later: reduce and gather stages whose values a later phase or an update reads.
        training: the training that the pass is part of, None if it is independent.
        steps_max: number of steps to read; None: the whole dataset.
        journal: the journal of the run, None if it has none.
        durable: the pass's part of the journal, None if there is none.
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
        training: Trainer | None,
        steps_max: int | None,
        journal: RunJournal | None,
        durable: PassJournal | None,
    ) -> None:
        self._plan = plan
        self._pass = pass_
        self._coordinator = coordinator
        self._subscription = subscription
        self._values = values
        self._replicas = plan.spec.replicas
        self._feed = feed_of(plan, pass_, spools)
        self._training = training if pass_.updates else None
        self._state_history: StateHistory | None = None
        """Versions of the states, for replays of calls."""
        self._journal = journal
        self._durable = durable
        self.steps = 0 if durable is None else durable.steps
        """Steps [0, steps) have been taken: folded, kept and streamed."""
        self.elements = 0 if durable is None else durable.elements
        """Elements of these steps."""
        self._taking = anyio.Lock(fast_acquire=True)
        """Held while steps are taken."""
        self._between = False
        """No step is partly taken, so a snapshot is consistent."""
        self._is_complete = False
        self._took = anyio.Event()
        """Set if steps were taken since the latest snapshot."""
        self.evaluated_by: list[PassExecution] = []
        """Passes over held-out data: their steps are committed before later steps of this pass."""
        self._participant: TrainingParticipant | None = None
        if training is not None:
            self._participant = training.participant(pass_, self._feed)
            self._feed = self._participant.feed
        elif steps_max is not None:
            self._feed = GatedFeed(self._feed, "run", steps_max=steps_max)
        self._spools = {name: spools[name] for name in pass_.kept}
        self._kept_slots = {name: slot_of(name, plan.spec.stages[name]) for name in pass_.kept}
        self._folds = PassFolds(
            plan, pass_, coordinator, folder, read_later=read_later, unwritten=unwritten, durable=durable
        )
        self.quarantine = PassQuarantine(
            pass_.dataset, next(iter(pass_.runs), ""), self._feed, self._replicas
        )
        """The quarantined elements of the pass."""
        self.handle = self._open()
        """The pass at the coordinator; the owner of this object closes it with `leave`."""

    @property
    def is_complete(self) -> bool:
        """Whether all steps are taken and all values complete."""
        return self._is_complete

    @property
    def name(self) -> str:
        """The name of the pass in messages."""
        return self._pass.name

    def refined(self, wait: Waiting) -> Waiting:
        """Return a more precise description of a wait, if the pass knows one."""
        subscription = self._subscription
        if wait.reason == "data" and isinstance(self._feed, GatedFeed) and self._feed.held_back:
            return wait.refined("state", self._feed.held_back)
        if wait.reason != "reader":
            return wait
        if subscription is not None and subscription.is_full:
            streamed = ", ".join(subscription.stages)
            text = f"the reader of the stream of {streamed} has not taken {subscription.waiting} items"
            return wait.refined("subscriber", text)
        if self._participant is not None and not self._between:
            return wait.refined("state", f"{wait.text}: states are being updated with the steps before them")
        stages = ", ".join(self._folds.names)
        by = f" by the stages {stages}" if stages else ""
        return wait.refined("fold", f"{wait.text}{by}")

    def _open(self) -> PassHandle:
        streamed = () if self._subscription is None else self._subscription.stages
        quarantine = quarantine_of(self._plan, self._pass)
        handle = self._coordinator.open_pass(
            pass_program(self._plan, self._pass, self._feed.reader, self._values, streamed),
            name=self._pass.name,
            settings=PassSettings(
                self._replicas,
                gang=self._pass.gang,
                first_step=self.steps,
                speculation=0.0 if self._pass.gang else speculation_of(self._plan),
                quarantine=bool(quarantine) and quarantine.issuperset(self._pass.runs),
                gpus=self._pass.gpus,
            ),
            retries=retries_of(self._plan, self._pass),
            quarantine=quarantine,
            on_quarantine=self.quarantine.add,
            feed=self._feed,
            on_arrival=_announcer(self._subscription, self._replicas),
            stamp=self._stamp(),
        )
        if self._durable is not None:
            self._durable.on_committed = handle.settle
        handle.counts.elements_offered = handle.counts.elements_visible = self.elements
        handle.counts.steps_visible = self.steps
        return handle

    def _stamp(self) -> str:
        """Return the stamp under which workers keep results, or "" for none.

        They keep none in a training, because a resumed run may have other states.
        """
        if self._durable is None or self._pass.gang or self._participant is not None:
            return ""
        return self._durable.stamp

    async def begin(self) -> None:
        """Go to the first step that is not committed.

        Call it before any pass of the phase runs.

        Raises:
            JournalError: the journal is damaged.
            Exception: an error of reading the data.
        """
        if self._durable is None:
            return
        if self._training is not None:
            self._state_history = StateHistory(self._durable)
        for name, spool in self._spools.items():
            spool.restore(self._durable.places(name))
        if self.steps:
            self.quarantine.restore(self._durable.part(PASS_STATE)["quarantine"])
            await self._feed.begin_at(self.steps)
            if self._participant is not None:
                self._participant.restore(self._durable.part(PASS_STATE)["training"])

    async def run(self) -> None:
        """Execute the pass to its end.

        Raises:
            CallError: a call failed for good.
            FoldError: components do not fit together.
            OutputError: a file can't be written.
            WorkersLost: no worker can be kept alive.
            RunDrained: the pass was drained before its end.
            ExceptionGroup: a group of these.
        """
        participant = self._participant
        with ExitStack() as stack:
            self._folds.open(stack)
            async with anyio.create_task_group() as tasks:
                saved = None if self._durable is None or not self.steps else self._durable.part(PASS_STATE)
                await self._folds.begin(tasks, None if saved is None else saved["folds"])
                if participant is not None:
                    self._folds.watch(participant.watched)
                tasks.start_soon(self.handle.run_feed, name=f"feed of {self._pass.name}")
                await self._read(tasks)
                self._between = False
                await self._folds.finish(
                    self._plan.epochs(self._pass) if participant is None else participant.epochs
                )
                if participant is not None:
                    await participant.on_finished(self._folds.take_fresh(participant.watched))
            for spool in self._spools.values():
                await anyio.to_thread.run_sync(spool.finish)
            await self._folds.write()
        self._folds.deliver(self._values)
        self._between = self._is_complete = True

    async def _read(self, tasks: anyio.abc.TaskGroup) -> None:
        """Take all steps, and commit them periodically."""
        committing = anyio.CancelScope()

        async def commit_periodically(journal: RunJournal, durable: PassJournal) -> None:
            with committing:
                await journal.commit_periodically(lambda: self._next_snapshot(durable))

        self._between = True
        if self._journal is not None and self._durable is not None:
            tasks.start_soon(
                commit_periodically, self._journal, self._durable, name=f"journal of {self._pass.name}"
            )
        async for batch in self.handle.batches():
            async with self._taking:
                self._between = False
                for first, epoch, steps in self._segments(batch):
                    await self._take(first, epoch, steps, batch.bytes // len(batch.steps))
                self._between = True
            self._took.set()
        committing.cancel()

    # -- snapshots --------------------------------------------------------------------------------

    async def _next_snapshot(self, durable: PassJournal) -> PendingSnapshot:
        """Wait until the subscriber has seen new steps, and snapshot them."""
        await self._took.wait()
        async with self._taking:
            self._took = anyio.Event()
            taken = self._snapshot(durable)
            others = [(held_out, held_out.steps) for held_out in self.evaluated_by]
            mark = 0 if self._subscription is None else self._subscription.mark
        if self._subscription is not None:
            await self._subscription.passed(mark)
        for held_out, steps in others:
            if self._journal is not None and held_out._durable is not None:
                await self._journal.reached(held_out._durable, steps)
        return taken

    def last_snapshot(self) -> PendingSnapshot | None:
        """Return a snapshot of the uncommitted steps.

        None if there are none, or if a step is partly taken.
        """
        if self._durable is None or not self._between or self.steps == self._durable.steps_committed:
            return None
        if not all(held_out._between for held_out in self.evaluated_by):
            return None
        if self._subscription is not None and not self._subscription.has_passed(self._subscription.mark):
            return None
        return self._snapshot(self._durable)

    def complete_snapshot(self) -> PendingSnapshot:
        """Return the snapshot of the complete pass."""
        if self._durable is None or not self._is_complete:
            raise RuntimeError(f"pass {self._pass.name} is incomplete or has no journal")
        return self._snapshot(self._durable)

    def _snapshot(self, durable: PassJournal) -> PendingSnapshot:
        version = 2 * self.steps + self._is_complete
        parts: dict[str, Versioned] = {
            PASS_STATE: (
                version,
                {
                    "folds": self._folds.state(),
                    "training": None if self._participant is None else self._participant.state(),
                    "quarantine": self.quarantine.state(self.steps),
                },
            )
        }
        if self._training is not None:
            for name, (number, value) in self._training.states.latest().items():
                parts[STATE + name] = (number, [value, number])
        dropped: list[str] = []
        if self._state_history is not None:
            dropped += self._state_history.dropped()
        if self._is_complete:
            dropped += self._folds.logs_over()
        return durable.snapshot(
            self.steps,
            self.elements,
            parts,
            quarantined=self.quarantine.steps(),
            complete=self._is_complete,
            dropped=dropped,
        )

    # -- step by step --------------------------------------------------------------------------------

    def _segments(self, batch: Batch) -> Iterator[tuple[int, int, list[list[Slots]]]]:
        """Yield (first step, epoch, steps), each of one epoch.

        If steps are streamed, each has one step only.
        """
        streams = self._subscription is not None and self._subscription.kind == "steps"
        first, last = batch.first, batch.first + len(batch.steps)
        while first < last:
            epoch = self._feed.epoch(first)
            fitting = 1 if streams else bisect_right(range(first, last), epoch, key=self._feed.epoch)
            at = first - batch.first
            yield first, epoch, batch.steps[at : at + fitting]
            first += fitting

    async def _take(self, first: int, epoch: int, steps: list[list[Slots]], step_bytes: int) -> None:
        await self._folds.add(epoch, steps)
        if self._spools:
            self._keep(first, epoch, steps)
        self.elements += self._feed.elements(first, first + len(steps))
        self.steps = first + len(steps)
        subscription = self._subscription
        if subscription is not None and subscription.kind == "steps":
            for step, slots in enumerate(steps, first):
                values = {name: await self._folds.step_value(name, slots) for name in subscription.stages}
                subscription.put(Step(step, epoch, values), step_bytes)
        if self._participant is not None:
            await self._notify_training(self._participant, first + len(steps) - 1, epoch)
        if subscription is not None:
            await subscription.room()

    def _keep(self, first: int, epoch: int, steps: list[list[Slots]]) -> None:
        """Append steps to the spools."""
        places = [self.quarantine.ids(step) for step in range(first, first + len(steps))]
        for name, spool in self._spools.items():
            for step, parts in enumerate(parts_of(self._kept_slots[name], steps), first):
                ids, skipped = places[step - first]
                elements = self._feed.elements(step, step + 1)
                spool.append(parts, ids, elements=elements, epoch=epoch, skipped=skipped)

    async def _notify_training(self, participant: TrainingParticipant, last: int, epoch: int) -> None:
        """Notify the training, which then updates states and evaluates."""
        ends = await participant.feed.ends_epoch(last)
        if ends:
            await self._folds.end_epoch(epoch)
        await participant.on_taken(last, epoch, self._folds.take_fresh(participant.watched), ends=ends)
        if self._training is not None and self._state_history is not None:
            self._state_history.add(self._training.states.latest(), steps=self.steps, epochs=epoch + ends)

    def leave(self) -> None:
        """End the pass at the coordinator, and its part in a training."""
        self.handle.close()
        self.leave_training()

    def leave_training(self) -> None:
        """Leave the training, so that other passes need not wait for this one."""
        if self._participant is not None:
            self._participant.leave()


def _announcer(subscription: Subscription | None, replicas: int) -> Arrival | None:
    """Return a callback that streams results of calls as they arrive."""
    if subscription is None or subscription.kind != "parts":
        return None
    slots = [(name, slot_of(name, stage)) for name, stage in subscription.streamed.items()]

    def announce(chunk: Chunk) -> None:
        size = chunk.size // (len(chunk.calls) * len(slots))
        for call, values in enumerate(chunk.calls, chunk.lo):
            step, replica = divmod(call, replicas)
            for name, slot in slots:
                if slot in values:  # not the case for an empty shard
                    subscription.put(Part(name, step, replica, values[slot]), size)

    return announce


def speculation_of(plan: Plan) -> float:
    """Return the multiple of the usual duration that starts a second attempt.

    0: calls get no second attempt.
    """
    times = plan.spec.cluster.speculation
    return 0.0 if isinstance(times, str) else float(times)
