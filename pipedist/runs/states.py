"""The states of a run: their values, version by version, and the calls that change them.

Update functions, what makes the first values, and `until` are user code: they run on workers, one
call a change. The new value comes back with the call's result, so it is committed exactly once,
whichever worker made it and however often it was tried; and it travels to each worker once, with the
first lease that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio
import numpy as np

from pipedist.coordinator import Coordinator, PassHandle
from pipedist.core.types import Tree
from pipedist.errors import FoldError
from pipedist.plan import Plan
from pipedist.protocol.program import Program
from pipedist.runs.programs import ENDS, NEW, init_program, update_program
from pipedist.scheduler import PassSettings
from pipedist.spec import StateRef, UpdateSpec, references

Version = tuple[int, Tree]
"""A state's version and its value."""


class States:
    """The states of one training.

    Args:
        plan: what it belongs to.
        coordinator: of the cluster that executes it.
        names: the updates, in the order in which they are applied.
    """

    def __init__(self, plan: Plan, coordinator: Coordinator, names: Sequence[str]) -> None:
        self._plan = plan
        self._coordinator = coordinator
        self._names = tuple(names)
        self._values: dict[str, Tree] = {}
        self._versions: dict[str, int] = {}
        self._spaces: dict[str, int] = {}
        self._handles: dict[str, PassHandle] = {}
        self._reads: dict[str, tuple[str, ...]] = {}
        """The states that an update's call gets."""

    async def begin(self, values: Mapping[str, Tree], durable: Mapping[str, Version]) -> None:
        """Make the first version of every state, or take up the latest durable ones.

        Args:
            values: the finished values of earlier phases.
            durable: by name; empty where the training has not begun.

        Raises:
            CallError: a function that makes one failed.
            WorkersLost: no worker can be kept alive.
            UnsendableError: an argument can't be sent.
        """
        for name in self._names:
            stage = self._plan.spec.stages[name]
            with_ = stage.with_ if isinstance(stage, UpdateSpec) else {}
            others = [ref.name for ref in references(with_) if isinstance(ref, StateRef)]
            self._reads[name] = tuple(dict.fromkeys([name, *others]))
            self._spaces[name] = self._coordinator.open_space()
            self._handles[name] = self._open(update_program(self._plan, name, values), name)
        for name in self._names:
            version, value = durable[name] if name in durable else (0, await self._first(name))
            self._put(name, value, version)

    def _open(self, program: Program, name: str) -> PassHandle:
        settings = PassSettings(1, ordered=False, fail_fast=False, pulled=False, priority=0, gang=True)
        return self._coordinator.open_pass(program, name=name, settings=settings)

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
        self._coordinator.put_state(self._spaces[name], version, value)
        self._values[name], self._versions[name] = value, version

    def value(self, name: str) -> Tree:
        """Return the latest value of a state."""
        return self._values[name]

    def latest(self) -> dict[str, Version]:
        """Return the latest version of every state."""
        return {name: (self._versions[name], self._values[name]) for name in self._names}

    def read(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Return where workers find the latest values of states: name -> [space, version]."""
        return {name: [self._spaces[name], self._versions[name]] for name in names}

    async def update(self, values: Mapping[str, Tree]) -> bool:
        """Apply updates that take place at the same time.

        One that reads another's state comes after it; others are applied side by side.

        Args:
            values: what each update gets, by its name.

        Returns:
            Whether an `until` holds.

        Raises:
            CallError: a function failed; where several did, that of the first update in order.
            FoldError: an update returned None, or an `until` something else than True or False.
            WorkersLost: no worker can be kept alive.
        """
        ends = False
        waiting = [name for name in self._names if name in values]
        while waiting:
            ready = [n for n in waiting if not {*self._reads[n]} & {*waiting} - {n}]
            ends = any(await self._side_by_side(ready, values)) or ends
            waiting = [name for name in waiting if name not in ready]
        return ends

    async def _side_by_side(self, names: Sequence[str], values: Mapping[str, Tree]) -> list[bool]:
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
        for name in names:
            if name in failed:
                raise failed[name]
        return [done[name] for name in names]

    async def _apply(self, name: str, value: Tree) -> bool:
        (slots,) = await self._handles[name].call_step([value], self.read(self._reads[name]))
        if slots[NEW] is None and self._values[name] is not None:
            raise FoldError(name, "the update returned None: is a `return` missing?")
        ends = _truth(slots[ENDS], name) if ENDS in slots else False
        self._put(name, slots[NEW], self._versions[name] + 1)
        return ends

    def close(self) -> None:
        """Forget the states, here and in the workers; the values stay."""
        for handle in self._handles.values():
            handle.close()
        for space in self._spaces.values():
            self._coordinator.drop_space(space)


def _truth(found: Tree, name: str) -> bool:
    """Return what an `until` says; a number is refused, which is true wherever it isn't 0."""
    if isinstance(found, (bool, np.bool_)):
        return bool(found)
    if isinstance(found, np.ndarray) and found.dtype == bool and found.size == 1:
        return bool(found.item())
    kind = f"{found!r:.60} of type {type(found).__name__}"
    if isinstance(found, np.ndarray):
        kind = f"an array of {found.dtype}, shape {list(found.shape)}"
    hint = "is a `return` missing?" if found is None else "compare it, as in `return change < 1e-6`"
    raise FoldError(name, f"`until` returned {kind}, not True or False: {hint}")
