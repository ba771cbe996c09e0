"""Updates states from results of a pass, and evaluates held-out passes.

The updates of a step are applied after that step of the feeding pass, the updates of an epoch after that epoch.
Then the held-out passes read their datasets once. Only then does the feeding pass begin the next steps. If
nothing in the feeding pass reads a state that changes that often, and no `until` may end it, its steps are
issued ahead, but their results are still taken in order.

Each pass of a training has a `TrainingParticipant`, which gates its feed and is notified of taken steps.

Update functions, `init` functions and `until` are user code, so they run on workers, with one call for each
change. The new value comes back with the call's result, so each change is committed exactly once, whichever
worker made it and however often it was retried. Each worker receives a version once, with the first lease that
reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import numpy as np

from pipedist.coordinator import Coordinator, PassHandle
from pipedist.coordinator.measurements import PassRecord, Recorder
from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed
from pipedist.errors import FoldError, OutputError, RunDrained
from pipedist.plan import PassPlan, Plan
from pipedist.protocol.program import Program
from pipedist.runs.pass_feeds import GatedFeed
from pipedist.runs.programs import ENDS, NEW, init_program, update_program
from pipedist.scheduler import PassSettings
from pipedist.spec import StateRef, UpdateSpec, references

if TYPE_CHECKING:
    from pipedist.outputs.parts import StageSink

Fresh = Mapping[str, Sequence[Tree]]  # new values of stages, by name, in order


class Trainer:
    """The training of one phase.

    Args:
        pass_: the pass whose steps feed the updates.
        sinks: sinks of the final values of states, by the update's name.
    """

    def __init__(
        self,
        plan: Plan,
        pass_: PassPlan,
        coordinator: Coordinator,
        sinks: Mapping[str, StageSink],
        recorder: Recorder,
    ) -> None:
        self._plan = plan
        self._pass = pass_
        self._sinks = dict(sinks)
        self._unchecked = set(sinks)
        """States whose values have not yet been checked against their file format."""
        self._held_out: list[HeldOutParticipant] = []
        self.states = TrainingStates(plan, pass_, coordinator, recorder)

    def participant(self, pass_: PassPlan, feed: Feed) -> TrainingParticipant:
        """Return the participant of a pass, before any of them runs."""
        names = self._plan.states_read(pass_)

        read = partial(self.states.read, names)
        if pass_.follows:
            participant = HeldOutParticipant(GatedFeed(feed, "epoch", read, first_epoch=-1))
            self._held_out.append(participant)
            return participant
        sources = frozenset(self._plan.spec.stages[name].of for name in pass_.updates)
        gated = GatedFeed(feed, self._plan.granularity(pass_), read if names else None)
        return FeedingParticipant(gated, sources, self, self._plan.epochs(pass_))

    def per_of(self, source: str) -> str:
        """Return the scope (step, epoch or run) of a stage that feeds updates."""
        return next(
            self._plan.states[name].per
            for name in self._pass.updates
            if self._plan.spec.stages[name].of == source
        )

    async def update(self, per: str, values: Mapping[str, Tree]) -> bool:
        """Apply updates of one scope; return whether an `until` holds.

        A value that is None, because there were no calls, changes nothing.
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
        """Read held-out datasets once; raise RunDrained if one was drained."""
        for participant in self._held_out:
            await participant.begin(epoch)
        for participant in self._held_out:
            await participant.wait()

    def end(self) -> None:
        for participant in self._held_out:
            participant.feed.end()

    async def deliver(self, unwritten: dict[str, OutputError]) -> dict[str, Tree]:
        """Write the states that have files, and return the values of all.

        `unwritten` receives the error of each file that could not be written, by the update's name.
        """
        for name, sink in self._sinks.items():
            try:
                await anyio.to_thread.run_sync(sink.append, self.states.value(name))
                await anyio.to_thread.run_sync(sink.finish)
            except OutputError as error:
                unwritten[name] = error
        return {name: self.states.value(name) for name in self._pass.updates}


class FeedingParticipant:
    """The pass whose steps feed the updates, for at most `epochs_max` epochs.

    Args:
        feed: the feed of the pass, gated.
        watched: the reduce and gather stages whose values are needed here.
    """

    def __init__(self, feed: GatedFeed, watched: frozenset[str], training: Trainer, epochs_max: int) -> None:
        self.feed = feed
        self.watched = watched
        self.epochs = epochs_max  # number of epochs, valid after the last step
        self._training = training
        self._evaluated = 0
        self._admitted = (0, 0)  # the step and the epoch up to which steps are admitted
        self._over = False

    async def on_taken(self, step: int, epoch: int, fresh: Fresh, *, ends: bool) -> None:
        """Handle taken steps up to `step`, perhaps the last of its epoch."""
        over = await self._updated(fresh, "step")
        if ends:
            over = await self._updated(fresh, "epoch") or over
        if over:
            self._end(epoch + 1)
            return
        if ends and epoch + 1 < self.epochs and await self.feed.next_epoch() is not None:
            await self._evaluate_before(epoch + 1)
        self._admit(step + 1, epoch + 1 if ends else epoch)

    def _admit(self, step: int, epoch: int) -> None:
        self._admitted = (step, epoch)
        self.feed.admit(step=step, epoch=epoch)

    def _end(self, epochs: int) -> None:
        self.epochs, self._over = epochs, True
        self.feed.end()

    def state(self) -> Tree:
        """Return the position, between two steps, for `restore`."""
        position = {"epochs": self.epochs, "evaluated": self._evaluated}
        return {**position, "admitted": list(self._admitted), "over": self._over}

    def restore(self, state: Tree) -> None:
        self._evaluated = state["evaluated"]
        if state["over"]:
            self._end(state["epochs"])
        else:
            self._admit(*state["admitted"])

    async def _updated(self, fresh: Fresh, per: str) -> bool:
        """Apply updates of steps or epochs in order; return whether `until` holds."""
        series = {name: fresh[name] for name in fresh if self._training.per_of(name) == per}
        over = False
        for place in range(max(map(len, series.values()), default=0)):
            over = await self._training.update(per, {name: v[place] for name, v in series.items()}) or over
        return over

    async def _evaluate_before(self, epoch: int) -> None:
        while self._evaluated < epoch:
            await self._training.evaluate(self._evaluated)
            self._evaluated += 1

    async def on_finished(self, fresh: Fresh) -> None:
        for per in ("epoch", "run"):
            await self._updated(fresh, per)
        await self._evaluate_before(self.epochs)
        self._training.end()

    def leave(self) -> None:
        """Leave the training, so that no other pass waits for this one."""
        self._training.end()


class HeldOutParticipant:
    """A pass that reads its dataset once after each epoch of the feeding pass."""

    def __init__(self, feed: GatedFeed) -> None:
        self.feed = feed
        self.watched: frozenset[str] = frozenset()
        self.epochs = 0
        self._done = anyio.Event()
        self._left = False

    def state(self) -> Tree:
        return {"epochs": self.epochs}

    def restore(self, state: Tree) -> None:
        """Restore the position; the feeding pass admits its epoch again."""
        self.epochs = state["epochs"]

    async def begin(self, epoch: int) -> None:
        self.epochs = epoch + 1
        self._done = anyio.Event()
        if self._left or await self.feed.next_epoch() != epoch:
            self._done.set()  # it has no steps
        self.feed.admit(step=0, epoch=epoch)

    async def wait(self) -> None:
        await self._done.wait()
        if self._left:
            raise RunDrained("the run was stopped while it read held-out data")

    async def on_taken(self, step: int, epoch: int, fresh: Fresh, *, ends: bool) -> None:
        if ends:
            self._done.set()

    async def on_finished(self, fresh: Fresh) -> None:
        """Do nothing: the training has already ended."""

    def leave(self) -> None:
        self._left = True
        self._done.set()


TrainingParticipant = FeedingParticipant | HeldOutParticipant  # a pass's part in a training

Version = tuple[int, Tree]


class TrainingStates:
    """The states of one training, and the calls that change them.

    Args:
        pass_: the pass whose steps feed the updates; it has them in the order in which they are applied.
    """

    def __init__(self, plan: Plan, pass_: PassPlan, coordinator: Coordinator, recorder: Recorder) -> None:
        self._plan = plan
        self._coordinator = coordinator
        self._names = tuple(pass_.updates)
        self._records = {name: recorder.begin_pass(name, (), 1, pass_.phase) for name in self._names}
        self.latest: dict[str, Version] = {}
        self._spaces: dict[str, int] = {}
        self._handles: dict[str, PassHandle] = {}
        self._reads: dict[str, tuple[str, ...]] = {}  # the states that the calls of an update read

    async def begin(self, values: Mapping[str, Tree], durable: Mapping[str, Version]) -> None:
        """Create the first version of every state, or restore the durable ones.

        Args:
            values: the finished values of earlier phases.
            durable: the durable versions by name; empty if the training has not begun.
        """
        for name in self._names:
            stage = self._plan.spec.stages[name]
            with_ = stage.with_ if isinstance(stage, UpdateSpec) else {}
            others = [ref.name for ref in references(with_) if isinstance(ref, StateRef)]
            self._reads[name] = tuple(dict.fromkeys([name, *others]))
            self._spaces[name] = self._coordinator.states.open_space()
            self._handles[name] = self._open(
                update_program(self._plan, name, values), name, self._records[name]
            )
        for name in self._names:
            version, value = durable[name] if name in durable else (0, await self._first(name))
            self._put(name, value, version)

    def _open(self, program: Program, name: str, record: PassRecord | None = None) -> PassHandle:
        settings = PassSettings(1, ordered=False, pulled=False, priority=0, gang=True)
        return self._coordinator.open_pass(program, name=name, settings=settings, record=record)

    async def _first(self, name: str) -> Tree:
        planned = self._plan.states[name]
        if planned.init is None:
            return planned.value
        handle = self._open(init_program(self._plan, name, planned.init), name)
        try:
            (slots,) = await handle.call_step([((), dict(planned.arguments))])
        finally:
            handle.close()
        return slots[NEW]

    def _put(self, name: str, value: Tree, version: int) -> None:
        self._coordinator.states.put(self._spaces[name], version, value)
        self.latest[name] = (version, value)

    def value(self, name: str) -> Tree:
        return self.latest[name][1]

    @property
    def versions(self) -> dict[str, int]:
        return {name: version for name, (version, _) in self.latest.items()}

    def read(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Return references to the latest states: name -> [space, version]."""
        return {name: [self._spaces[name], self.latest[name][0]] for name in names}

    async def update(self, values: Mapping[str, Tree]) -> bool:
        """Apply the updates of one moment, and return whether an `until` holds.

        An update that reads another's state is applied after it; independent updates run concurrently. If several
        functions fail, the error of the first update in order is raised.
        """
        ends = False
        waiting = [name for name in self._names if name in values]
        while waiting:
            ready = [n for n in waiting if not {*self._reads[n]} & {*waiting} - {n}]
            ends = any(await self._update_concurrently(ready, values)) or ends
            waiting = [name for name in waiting if name not in ready]
        return ends

    async def _update_concurrently(self, names: Sequence[str], values: Mapping[str, Tree]) -> list[bool]:
        if len(names) == 1:
            return [await self._apply(names[0], values[names[0]])]
        done: dict[str, bool] = {}
        failed: dict[str, Exception] = {}

        async def apply(name: str) -> None:
            try:
                done[name] = await self._apply(name, values[name])
            except Exception as error:
                failed[name] = error

        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(apply, name, name=f"update of {name}")
        for name in filter(failed.__contains__, names):
            raise failed[name]
        return [done[name] for name in names]

    async def _apply(self, name: str, value: Tree) -> bool:
        (slots,) = await self._handles[name].call_step([value], self.read(self._reads[name]))
        if slots[NEW] is None and self.value(name) is not None:
            raise FoldError(name, "the update returned None: is a `return` missing?")
        ends = _truth(slots[ENDS], name) if ENDS in slots else False
        self._put(name, slots[NEW], self.latest[name][0] + 1)
        return ends

    def close(self) -> None:
        """Drop the states in the coordinator and the workers, but keep the values."""
        for handle in self._handles.values():
            handle.close()
        for space in self._spaces.values():
            self._coordinator.states.drop(space)


def _truth(found: Tree, name: str) -> bool:
    """Return the result of an `until` as a bool; reject other types."""
    if isinstance(found, (bool, np.bool_)):
        return bool(found)
    if isinstance(found, np.ndarray) and found.dtype == bool and found.size == 1:
        return bool(found.item())
    kind = f"{found!r:.60} of type {type(found).__name__}"
    if isinstance(found, np.ndarray):
        kind = f"an array of {found.dtype}, shape {list(found.shape)}"
    hint = "is a `return` missing?" if found is None else "compare it, as in `return change < 1e-6`"
    raise FoldError(name, f"`until` returned {kind}, not True or False: {hint}")
