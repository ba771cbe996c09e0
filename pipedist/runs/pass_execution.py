"""Executes one pass of a plan: its dataset is read once, and everything of it is folded, kept, streamed.

Every step goes to the pass's folds (`pipedist.runs.pass_folds`), its spools and its subscriber, in
order; between two steps is when a snapshot of it may be taken, and when others take their turns.
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
        journal: of the run; None: it has none.
        durable: what is durable of the pass; None: there is no journal.
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
        self._versions: StateHistory | None = None
        """Of the states, for who looks at a call again."""
        self._journal = journal
        self._durable = durable
        self.steps = 0 if durable is None else durable.steps
        """Steps [0, steps) are taken."""
        self.elements = 0 if durable is None else durable.elements
        """Of these steps."""
        self._taking = anyio.Lock(fast_acquire=True)
        """Held while steps are taken."""
        self._between = False
        """What was taken is whole: nothing is being taken, and no error left it in the middle of a step."""
        self._is_complete = False
        self._took = anyio.Event()
        """Something was taken since the latest snapshot."""
        self.evaluated_by: list[PassExecution] = []
        """Readings of held-out data: what they have taken is durable before what comes after it is."""
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
        """What it sets aside."""
        self.handle = self._open()
        """The pass at the coordinator; whoever made the reading calls `leave`."""

    @property
    def is_complete(self) -> bool:
        """Whether it has come to its end."""
        return self._is_complete

    @property
    def name(self) -> str:
        """The pass, for people."""
        return self._pass.name

    def refined(self, wait: Waiting) -> Waiting:
        """Return what the pass waits for, where it knows better than the scheduler."""
        subscription = self._subscription
        if wait.reason == "data" and isinstance(self._feed, GatedFeed) and self._feed.held_back:
            return wait.refined("state", self._feed.held_back)
        if wait.reason != "reader":
            return wait
        if subscription is not None and subscription.is_full:
            streamed = ", ".join(subscription.stages)
            text = f"whoever streams {streamed} has {subscription.waiting} items to take"
            return wait.refined("subscriber", text)
        if self._participant is not None and not self._between:
            return wait.refined("state", f"{wait.text}: states are updated with what came back before them")
        stages = ", ".join(self._folds.names) or "after them"
        return wait.refined("fold", f"{wait.text} by the stages {stages}")

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
        """Return under what workers keep results of this pass for a run that is resumed, "": they do not.

        Not of what takes turns: a resumed run's states may be other ones, until they are durable.
        """
        if self._durable is None or self._pass.gang or self._participant is not None:
            return ""
        return self._durable.stamp

    async def begin(self) -> None:
        """Go to the first step that is not done; before any reading of the phase runs.

        Raises:
            JournalError: what was left is damaged.
            Exception: whatever reading the data raises.
        """
        if self._durable is None:
            return
        if self._training is not None:
            self._versions = StateHistory(self._durable)
        for name, spool in self._spools.items():
            spool.restore(self._durable.places(name))
        if self.steps:
            self.quarantine.restore(self._durable.part(PASS_STATE)["quarantine"])
            await self._feed.begin_at(self.steps)
            if self._participant is not None:
                self._participant.restore(self._durable.part(PASS_STATE)["training"])

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
        participant = self._participant
        with ExitStack() as stack:
            self._folds.open(stack)
            async with anyio.create_task_group() as tasks:
                left = None if self._durable is None or not self.steps else self._durable.part(PASS_STATE)
                await self._folds.begin(tasks, None if left is None else left["folds"])
                if participant is not None:
                    self._folds.watch(participant.watched)
                tasks.start_soon(self.handle.run_feed, name=f"feed of {self._pass.name}")
                await self._read(tasks)
                self._between = False
                await self._folds.finish(
                    self._plan.epochs(self._pass) if participant is None else participant.epochs
                )
                if participant is not None:
                    await participant.finished(self._folds.take_fresh(participant.watched))
            for spool in self._spools.values():
                await anyio.to_thread.run_sync(spool.finish)
            await self._folds.write()
        self._folds.deliver(self._values)
        self._between = self._is_complete = True

    async def _read(self, tasks: anyio.abc.TaskGroup) -> None:
        """Take all steps; commit them again and again, and at the end."""
        keeping = anyio.CancelScope()

        async def keep_up(journal: RunJournal, durable: PassJournal) -> None:
            with keeping:
                await journal.keep_up(lambda: self._next_snapshot(durable))

        self._between = True
        if self._journal is not None and self._durable is not None:
            tasks.start_soon(keep_up, self._journal, self._durable, name=f"journal of {self._pass.name}")
        async for batch in self.handle.batches():
            async with self._taking:
                self._between = False
                for first, epoch, steps in self._segments(batch):
                    await self._take(first, epoch, steps, batch.bytes // len(batch.steps))
                self._between = True
            self._took.set()
        keeping.cancel()

    # -- what is durable ---------------------------------------------------------------------------

    async def _next_snapshot(self, durable: PassJournal) -> PendingSnapshot:
        """Return a snapshot as soon as something was taken that whoever streams it has seen."""
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
        """Return what is not durable of what was taken; None: there is nothing, or it is not whole."""
        if self._durable is None or not self._between or self.steps == self._durable.steps_committed:
            return None
        if not all(held_out._between for held_out in self.evaluated_by):
            return None
        if self._subscription is not None and not self._subscription.has_passed(self._subscription.mark):
            return None
        return self._snapshot(self._durable)

    def complete_snapshot(self) -> PendingSnapshot:
        """Return what the pass has come to at its end."""
        if self._durable is None or not self._is_complete:
            raise RuntimeError(f"pass {self._pass.name} is not complete, or has no journal")
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
        if self._versions is not None:
            dropped += self._versions.dropped()
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
            await self._take_turns(self._participant, first + len(steps) - 1, epoch)
        if subscription is not None:
            await subscription.room()

    def _keep(self, first: int, epoch: int, steps: list[list[Slots]]) -> None:
        """Append to the spools."""
        places = [self.quarantine.ids(step) for step in range(first, first + len(steps))]
        for name, spool in self._spools.items():
            for step, parts in enumerate(parts_of(self._kept_slots[name], steps), first):
                ids, holes = places[step - first]
                elements = self._feed.elements(step, step + 1)
                spool.append(parts, ids, elements=elements, epoch=epoch, holes=holes)

    async def _take_turns(self, participant: TrainingParticipant, last: int, epoch: int) -> None:
        """Say that steps up to `last` are taken; others take their turns meanwhile."""
        ends = await participant.feed.ends_epoch(last)
        if ends:
            await self._folds.end_epoch(epoch)
        await participant.took(last, epoch, self._folds.take_fresh(participant.watched), ends=ends)
        if self._training is not None and self._versions is not None:
            self._versions.add(self._training.states.latest(), steps=self.steps, epochs=epoch + ends)

    def leave(self) -> None:
        """End the pass at the coordinator, and its part in a training."""
        self.handle.close()
        self.let_others_end()

    def let_others_end(self) -> None:
        """End its part in a training."""
        if self._participant is not None:
            self._participant.leave()


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


def speculation_of(plan: Plan) -> float:
    """Return how many times as long as others a call must take to get a second attempt; 0: none does."""
    times = plan.spec.cluster.speculation
    return 0.0 if isinstance(times, str) else float(times)
