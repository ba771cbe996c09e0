"""A training: the readings of one phase that take turns through the states that they change and read.

The feeding pass is read step by step. After each of its steps the updates of that step are applied,
after each epoch those of the epoch, then the held-out passes read their datasets once; and only then
is let in what comes next. Where nothing in the feeding pass reads a state that changes so often, and
no `until` may end it, its steps are let in ahead: what they give is still taken in order.

Each reading that takes part has a LANE: it gates its feed, and is told what the reading has taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from pipedist.coordinator import Coordinator
from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed
from pipedist.errors import OutputError, RunDrained
from pipedist.plan import PassPlan, Plan
from pipedist.runs.gated_feed import GatedFeed
from pipedist.runs.states import States

if TYPE_CHECKING:
    from pipedist.outputs import Sink

Fresh = Mapping[str, Sequence[Tree]]
"""New values of stages, by name, in order."""


class Lane(ABC):
    """How one reading takes part in a training.

    Args:
        feed: its own, gated.
        watched: the reduce and gather stages whose values it is told.
    """

    def __init__(self, feed: GatedFeed, watched: frozenset[str]) -> None:
        self.feed = feed
        self.watched = watched

    @property
    @abstractmethod
    def epochs(self) -> int:
        """How many epochs there were, when no more steps come."""

    @abstractmethod
    async def took(self, step: int, epoch: int, fresh: Fresh, *, ends: bool) -> None:
        """Take note that the reading has taken the steps up to `step`.

        Args:
            epoch: that the step belongs to.
            fresh: the new values of `watched` stages.
            ends: it was the last step of the epoch.
        """

    @abstractmethod
    def state(self) -> Tree:
        """Return where the reading is, between two steps."""

    @abstractmethod
    def restore(self, state: Tree) -> None:
        """Go on where a lane of the same pass was when it gave its state."""

    @abstractmethod
    async def finished(self, fresh: Fresh) -> None:
        """Take note that there are no more steps, and these are the last values."""

    @abstractmethod
    def leave(self) -> None:
        """Take note that the reading is over, whatever the reason: nobody waits for it any more."""


class Training:
    """The training of one phase.

    Args:
        plan: what it belongs to.
        pass_: the pass whose steps feed the updates.
        coordinator: of the cluster that executes it.
        sinks: where the last values of states go, by the update's name.
    """

    def __init__(
        self, plan: Plan, pass_: PassPlan, coordinator: Coordinator, sinks: Mapping[str, Sink]
    ) -> None:
        self._plan = plan
        self._pass = pass_
        self._sinks = dict(sinks)
        self._unchecked = set(sinks)
        """Of these it is not known whether their values fit their files."""
        self._held_out: list[HeldOutLane] = []
        self.states = States(plan, coordinator, pass_.updates)

    def lane(self, pass_: PassPlan, feed: Feed) -> Lane:
        """Return how a pass takes part; to be called for every pass, before any is read.

        Args:
            feed: the pass's own.
        """
        names = self._plan.states_read(pass_)

        def read() -> dict[str, list[int]]:
            return self.states.read(names)

        if pass_.follows:
            lane = HeldOutLane(GatedFeed(feed, "epoch", read, first_epoch=-1), frozenset())
            self._held_out.append(lane)
            return lane
        sources = frozenset(self._plan.spec.stages[name].of for name in pass_.updates)
        gated = GatedFeed(feed, self._plan.granularity(pass_), read if names else None)
        return FeedingLane(gated, sources, self, self._plan.epochs(pass_))

    def per_of(self, source: str) -> str:
        """Return how often a stage that feeds updates has a value."""
        return next(
            self._plan.states[name].per
            for name in self._pass.updates
            if self._plan.spec.stages[name].of == source
        )

    async def update(self, per: str, values: Mapping[str, Tree]) -> bool:
        """Apply the updates of one step, epoch or run.

        Args:
            values: of the stages that feed them; None, of no calls, changes nothing.

        Returns:
            Whether an `until` holds.
        """
        fed = {
            name: value
            for name in self._pass.updates
            if self._plan.states[name].per == per
            and (value := values.get(self._plan.spec.stages[name].of)) is not None
        }
        if not fed:
            return False
        ends = await self.states.update(fed)
        for name in [name for name in fed if name in self._unchecked]:
            self._sinks[name].check(self.states.value(name))
            self._unchecked.remove(name)
        return ends

    async def evaluate(self, epoch: int) -> None:
        """Let the held-out passes read their datasets once.

        Raises:
            RunDrained: one of them is over already: the run was drained.
        """
        for lane in self._held_out:
            await lane.begin(epoch)
        for lane in self._held_out:
            await lane.wait()

    def end(self) -> None:
        """Let the held-out passes end: there are no more epochs."""
        for lane in self._held_out:
            lane.feed.end()

    async def deliver(self, unwritten: dict[str, OutputError]) -> dict[str, Tree]:
        """Write the states that have files, and return the values of all.

        Args:
            unwritten: why an output has no file is noted here, by the update's name.
        """
        for name, sink in self._sinks.items():
            try:
                await anyio.to_thread.run_sync(sink.append, self.states.value(name))
                await anyio.to_thread.run_sync(sink.finish)
            except OutputError as error:
                unwritten[name] = error
        return {name: self.states.value(name) for name in self._pass.updates}


class FeedingLane(Lane):
    """The reading whose steps feed the updates.

    Args:
        training: that it is part of.
        epochs_max: how often its dataset is read, if no `until` ends it.
    """

    def __init__(self, feed: GatedFeed, watched: frozenset[str], training: Training, epochs_max: int) -> None:
        super().__init__(feed, watched)
        self._training = training
        self._epochs = epochs_max
        self._evaluated = 0
        """Epochs before this one have been evaluated."""
        self._let = (0, 0)
        """The step and the epoch up to which steps are let in, as the rhythm is."""
        self._over = False
        """An `until` holds."""

    @property
    def epochs(self) -> int:
        """How many epochs there were, when no more steps come."""
        return self._epochs

    async def took(self, step: int, epoch: int, fresh: Fresh, *, ends: bool) -> None:
        """Apply the updates of the steps, and of the epoch if it is over; let in what comes next."""
        over = await self._updated(fresh, "step")
        if ends:
            over = await self._updated(fresh, "epoch") or over
        if over:
            self._end(epoch + 1)
            return
        if ends and epoch + 1 < self._epochs and await self.feed.next_epoch() is not None:
            await self._evaluate_before(epoch + 1)
        self._let = (step + 1, epoch + 1 if ends else epoch)
        self.feed.let(step=self._let[0], epoch=self._let[1])

    def _end(self, epochs: int) -> None:
        self._epochs, self._over = epochs, True
        self.feed.end()

    def state(self) -> Tree:
        """As `Lane`."""
        return {
            "epochs": self._epochs,
            "evaluated": self._evaluated,
            "let": list(self._let),
            "over": self._over,
        }

    def restore(self, state: Tree) -> None:
        """As `Lane`."""
        self._evaluated = state["evaluated"]
        if state["over"]:
            self._end(state["epochs"])
        else:
            self._let = (state["let"][0], state["let"][1])
            self.feed.let(step=self._let[0], epoch=self._let[1])

    async def _updated(self, fresh: Fresh, per: str) -> bool:
        """Apply the updates of some steps or epochs, one after the other; return whether an `until` holds."""
        series = {name: fresh[name] for name in fresh if self._training.per_of(name) == per}
        over = False
        for place in range(max(map(len, series.values()), default=0)):
            over = await self._training.update(per, {name: v[place] for name, v in series.items()}) or over
        return over

    async def _evaluate_before(self, epoch: int) -> None:
        while self._evaluated < epoch:
            await self._training.evaluate(self._evaluated)
            self._evaluated += 1

    async def finished(self, fresh: Fresh) -> None:
        """Apply the last updates, and evaluate the last epoch."""
        for per in ("epoch", "run"):
            await self._updated(fresh, per)
        await self._evaluate_before(self._epochs)
        self._training.end()

    def leave(self) -> None:
        """Let the held-out passes end."""
        self._training.end()


class HeldOutLane(Lane):
    """A reading that follows the epochs of the feeding one."""

    def __init__(self, feed: GatedFeed, watched: frozenset[str]) -> None:
        super().__init__(feed, watched)
        self._epochs = 0
        self._done = anyio.Event()
        self._left = False

    @property
    def epochs(self) -> int:
        """How many epochs there were, when no more steps come."""
        return self._epochs

    def state(self) -> Tree:
        """As `Lane`."""
        return {"epochs": self._epochs}

    def restore(self, state: Tree) -> None:
        """As `Lane`; its epoch is let in by the feeding reading, which comes to it again."""
        self._epochs = state["epochs"]

    async def begin(self, epoch: int) -> None:
        """Let in the steps of an epoch."""
        self._epochs = epoch + 1
        self._done = anyio.Event()
        if self._left or await self.feed.next_epoch() != epoch:
            self._done.set()  # there are none
        self.feed.let(step=0, epoch=epoch)

    async def wait(self) -> None:
        """Return as soon as the steps of the epoch are taken.

        Raises:
            RunDrained: the reading ended before.
        """
        await self._done.wait()
        if self._left:
            raise RunDrained("the run was stopped while held-out data was read")

    async def took(self, step: int, epoch: int, fresh: Fresh, *, ends: bool) -> None:
        """Take note of the end of an epoch."""
        if ends:
            self._done.set()

    async def finished(self, fresh: Fresh) -> None:
        """Nothing hangs on it: the training has ended before."""

    def leave(self) -> None:
        """Whoever waits need not."""
        self._left = True
        self._done.set()
