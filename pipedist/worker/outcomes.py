"""Outcomes of calls: the values that a program sends back, in memory that no other code can change.

They are whole values of stages and of the shard, partials of reductions, values that are stored for a
reuse, and values that the call has assigned to variables; each has a slot. `pipedist.worker.execution` calls the
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from pipedist.core import dlpack, functions, ragged, trees
from pipedist.core.types import Tree
from pipedist.protocol.codec import UnsendableError, encode
from pipedist.protocol.limits import ELEMENTS_MAX, RESULT_OBJECTS_MAX
from pipedist.protocol.program import Emit, Program
from pipedist.reduction.tree import Reduction
from pipedist.worker import failures
from pipedist.worker.array_isolation import check_objects, take_ownership, without_frames
from pipedist.worker.failures import CallFailure
from pipedist.worker.stages import Call

if TYPE_CHECKING:
    from pipedist.worker.variables.replica import ReplicaVariables

Outcome = dict[str, Tree]  # the values that one call sends back: {slot: tree}
Result = tuple[Outcome, int]  # an outcome, and its size in bytes

ABSENT = object()
"""Stands for the value of a stage that was not called."""

VALUES = frozenset(
    {bool, int, float, complex, type(None), str, dict, list, tuple}
    | {np.ndarray, np.float64, np.float32, np.int64}
)
"""Frequent types of results, which are no awaitables: `hasattr` takes longer to find that out."""

STORED_S_MIN = 0.001  # the value of a shorter call is not stored for a reuse

STORED_BYTES_PER_S = 4 * 2**20
"""The value of a call is stored if it has at most this many bytes per second of the call."""

_PLAIN = (bool, int, float, complex, type(None))


class OutcomeBuilder:
    """Makes the outcomes of a program's calls.

    New arrays need no copy if nothing else refers to them: so values come in lists, which are emptied.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        emits = [emit for emit in program.emits if emit.of >= -1]
        self._reduced = [(e, self._to_partial(e)) for e in emits if e.op or e.combine]
        self._whole = [e for e in emits if not (e.op or e.combine or e.stored)]
        self._stored = [e for e in emits if e.stored]
        self._slots = [emit.slot for emit in emits if not emit.stored]
        self._assigned = [emit.slot for emit in program.emits if emit.of < -1]  # slots of variables
        whole = self._whole
        self.sole = whole[0] if len(self._slots) == len(whole) == 1 and whole[0].of >= 0 else None
        """The emit of a program that sends back the whole value of one stage only."""

    @property
    def stores(self) -> bool:
        """Whether values are stored for a reuse."""
        return bool(self._stored)

    @property
    def sole_slot(self) -> str:
        """The slot of `sole`; "" without one."""
        return "" if self.sole is None else self.sole.slot

    def stage_of(self, slot: str) -> str:
        """Return the name of the stage whose value a slot has."""
        emit = next((e for e in self._program.emits if e.slot == slot), None)
        return self._program.first_stage if emit is None else self._stage_name(emit)

    def collect(self, call: Call, shard: Tree, values: list[Tree], *, empty: bool) -> Result:
        """Return the outcome of a call, from its shard and the values of its stages; `values` is emptied.

        With an `empty` shard, and of stages that were not called, the outcome has no values.
        """
        call.permanent = True
        try:
            return self._collected(call, shard, values, empty)
        except UnsendableError as error:
            emit = next((e for e in self._program.emits if call.stage in (e.slot, self._stage_name(e))), None)
            if emit is None or emit.of < 0:
                raise
            raise self._labelled(error, emit) from error

    def of_step(self, box: list[Tree], emit: Emit, variables: ReplicaVariables | None) -> Result:
        """Return the outcome of a step: the result of its function, see `own`, and what it assigned."""
        value, size = self.own(box, emit)
        outcome = {emit.slot: value}
        return outcome, size + (0 if variables is None else self._add_assigned(outcome, variables))

    def own(self, box: list[Tree], emit: Emit) -> tuple[Tree, int]:
        """Do what `take_ownership` does with the result of a function, whose name its error has."""
        try:
            return take_ownership(box, emit.objects_max)
        except UnsendableError as error:
            raise self._labelled(error, emit) from error

    def unsendable(self, number: int, outcome: Outcome) -> CallFailure | None:
        """Return the failure of a call whose outcome can't be sent; None: it can."""
        for slot, value in outcome.items():
            try:
                encode(value)
            except UnsendableError as error:
                stage = self.stage_of(slot)
                failure = UnsendableError(f"the result of stage {stage!r} cannot be sent: {error}")
                return failures.describe(
                    failure, call=number, stage=stage, retryable=False, in_user_code=False
                )
        return None

    def _to_partial(self, emit: Emit) -> Callable[[Tree], Tree]:
        """Return the function that makes the partial of a value for a reduction."""
        if emit.combine is None:
            return Reduction.of(emit.op, emit.axis).partial
        loaded = cache(partial(functions.load, emit.combine, self._program.code))
        # None: its combine function reports it, unless all values are None
        return lambda value: None if value is None else loaded().component(value)  # type: ignore[attr-defined]

    def _stage_name(self, emit: Emit) -> str:
        return self._program.stages[emit.of].name if emit.of >= 0 else self._program.first_stage

    def _labelled(self, error: UnsendableError, emit: Emit) -> UnsendableError:
        label = self._program.stages[emit.of].function.label
        return UnsendableError(f"the result of {label} cannot be sent: {error}")

    def _collected(self, call: Call, shard: Tree, values: list[Tree], empty: bool) -> Result:
        gang = call.gang
        stored = self._stored and [emit for emit in self._stored if call.seconds[emit.of] >= STORED_S_MIN]
        if self.sole is not None and not stored and not empty and (gang is None or gang.variables is None):
            call.stage = self._stage_name(self.sole)
            box = [values[self.sole.of]]
            values.clear()
            value, size = take_ownership(box, self.sole.objects_max)
            return {self.sole.slot: value}, size
        outcome: Outcome = dict.fromkeys(self._slots)
        size = self._add_reduced(outcome, call, shard, values, empty)
        owned: dict[int, Tree] = {}
        size += self._add_whole(outcome, owned, call, shard, values, empty)
        for emit in stored:
            of = emit.of
            if _is_worth_storing(owned.get(of, values[of]), call.seconds[of]):
                if of not in owned:
                    size += _take(owned, of, values)
                outcome[emit.slot] = [owned[of]]
        if gang is not None and gang.variables is not None:
            size += self._add_assigned(outcome, gang.variables)
        return outcome, size

    def _add_reduced(self, outcome: Outcome, call: Call, shard: Tree, values: list[Tree], empty: bool) -> int:
        """Add the partials of reductions to an outcome; return their size."""
        size = 0
        for emit, to_partial in self._reduced:
            call.stage = emit.slot if emit.op else self._stage_name(emit)
            value = values[emit.of] if emit.of >= 0 else ABSENT if empty else shard
            if value is ABSENT:
                del outcome[emit.slot]
                continue
            if emit.op and emit.of >= 0 and isinstance(value, (dict, list, tuple)):
                check_objects(trees.structure(value), RESULT_OBJECTS_MAX)
            if not emit.combine:  # which takes dicts of millions of keys
                value = dlpack.to_host(without_frames(value))
            try:
                partial_ = to_partial(value)
            except (TypeError, ValueError, OverflowError):
                if not emit.whole:
                    raise
                box = [values[emit.of]]  # the driver reduces it, and raises its own error
                values.clear()
                del value, outcome[emit.slot]
                outcome[emit.whole], bytes_ = take_ownership(box, emit.objects_max)
                size += bytes_
                continue
            outcome[emit.slot], bytes_ = take_ownership([partial_])
            del value, partial_
            size += bytes_
        return size

    def _add_whole(
        self,
        outcome: Outcome,
        owned: dict[int, Tree],
        call: Call,
        shard: Tree,
        values: list[Tree],
        empty: bool,
    ) -> int:
        """Add whole values to an outcome, those of stages to `owned` too, by number; return their size."""
        size = 0
        for emit in self._whole:
            of = emit.of
            call.stage = self._stage_name(emit)
            if (values[of] is ABSENT) if of >= 0 else empty:
                del outcome[emit.slot]
                continue
            if of < 0:
                outcome[emit.slot] = shard
                continue
            if of not in owned:
                size += _take(owned, of, values, emit.objects_max)
            outcome[emit.slot] = owned[of]
        return size

    def _add_assigned(self, outcome: Outcome, variables: ReplicaVariables) -> int:
        """Add what a call assigned to its outcome; return the size of that."""
        assigned = variables.assigned()
        if not assigned:
            return 0
        outcome |= dict.fromkeys(self._assigned, assigned)  # read-only, and not referenced elsewhere
        return sum(value.nbytes for value in assigned.values())


def _take(owned: dict[int, Tree], of: int, values: list[Tree], objects_max: int = ELEMENTS_MAX) -> int:
    """Move the value of a stage to `owned`; return its size."""
    box = [values[of]]
    values[of] = None
    owned[of], size = take_ownership(box, objects_max)
    return size


def _is_worth_storing(value: Tree, seconds: float) -> bool:
    """Return whether storing a value costs less than to execute its call again.

    Only plain values are stored: a function that reads one later gets what it would have got from the call.
    """
    try:
        size = _plain_bytes(value)
        if size is None or size > seconds * STORED_BYTES_PER_S:
            return False
        encode(value)
    except (UnsendableError, RecursionError):
        return False
    return True


def _plain_bytes(value: Tree) -> int | None:
    """Return the size of a tree of plain values in bytes, None if it has another value."""
    kind = type(value)
    if kind is dict or kind is list or kind is tuple:
        sizes = [_plain_bytes(each) for each in (value.values() if kind is dict else value)]
        return None if None in sizes else sum(size or 0 for size in sizes) + 16
    if kind is np.ndarray or isinstance(value, np.generic):
        return ragged.size_bytes(value) if kind is np.ndarray else int(value.nbytes)
    if kind is str or kind is bytes:
        return len(value) + 16
    return 16 if kind in _PLAIN else None
