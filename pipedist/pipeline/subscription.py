"""Streams of a run: what `steps` and `as_completed` hand to the user, holding the valve."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import anyio

from pipedist.errors import UsageError
from pipedist.plan import PassPlan, Plan
from pipedist.program import Tree

ITEMS_MAX = 64
"""Items that wait for a slow subscriber; then the pass waits too."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run, in step order.

    `step[NAME]` is a PerReplica for a run stage (None in the place of an empty shard), and this
    step's own value for a reduce or gather.

    Args:
        index: the step's number, over all epochs.
        epoch: its epoch.
    """

    index: int
    epoch: int
    values: Mapping[str, Tree]

    def __getitem__(self, stage: str) -> Tree:
        return self.values[stage]


@dataclass(frozen=True, slots=True)
class Part:
    """One replica's value of one step, in order of arrival."""

    stage: str
    step: int
    replica: int
    value: Tree


class Subscription:
    """A bounded queue between the run and its subscriber.

    Args:
        kind: whole steps in order, or parts as they arrive.
        stages: what is subscribed.
    """

    def __init__(self, kind: Literal["steps", "parts"], stages: Sequence[str], plan: Plan) -> None:
        self.kind = kind
        self.stages = tuple(stages)
        self.pass_ = _pass_of(plan, self.stages)
        self._items: deque[Step | Part] = deque()
        self._changed = anyio.Event()
        self._ended = False
        self._left = False

    def put(self, item: Step | Part) -> None:
        """Add an item; dropped if nobody reads any more."""
        if self._left:
            return
        self._items.append(item)
        self._wake()

    async def room(self) -> None:
        """Return as soon as fewer than `ITEMS_MAX` items wait."""
        while len(self._items) >= ITEMS_MAX:
            await self._changed.wait()

    def leave(self) -> None:
        """Nobody reads any more: the run need not wait."""
        self._left = True
        self._items.clear()
        self._wake()

    def end(self) -> None:
        """There is no more to come."""
        self._ended = True
        self._wake()

    async def take(self) -> Step | Part | None:
        """Return the next item, None at the end."""
        while not self._items:
            if self._ended:
                return None
            await self._changed.wait()
        item = self._items.popleft()
        self._wake()
        return item

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _pass_of(plan: Plan, stages: Sequence[str]) -> PassPlan:
    """Return the pass in which all of `stages` get their values."""
    if not stages:
        raise UsageError("name at least one stage to stream")
    found: PassPlan | None = None
    for name in stages:
        home = next((p for p in plan.passes if name in p.runs or name in p.folds), None)
        if home is None:
            known = [*(s for p in plan.passes for s in (*p.runs, *p.folds))]
            raise UsageError(f"there is no stage {name!r} to stream; there are: {', '.join(known)}")
        if found is not None and home is not found:
            raise UsageError(
                f"stages {stages[0]!r} and {name!r} are not made in one reading of one dataset: "
                "a stream follows one; open a second run for the other"
            )
        found = home
    if found is None:
        raise UsageError("name at least one stage to stream")
    return found
