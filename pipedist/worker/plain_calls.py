"""Calls of a plain program: one function of the shard, whose whole value is sent.

Most programs are plain, and their calls are often short. So these calls run in one loop, which makes few Python calls:
without it, a worker makes half as many short calls per second.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np

from pipedist.core.types import Tree
from pipedist.protocol.program import Program
from pipedist.worker import process_setup
from pipedist.worker.array_isolation import COPIED_BYTES
from pipedist.worker.context import ContextOnDemand, ReplicaContext, current
from pipedist.worker.inputs import LeaseShards, ShardBlock
from pipedist.worker.outcomes import VALUES, Outcome, OutcomeBuilder
from pipedist.worker.stages import Call, Stage


class Tally:
    """The calls of a lease that returned: their outcomes until they are reported, and what they cost.

    Calls of a plain program have one value each, without its slot.
    """

    __slots__ = ("bytes", "outcomes", "worked_until_ns")

    def __init__(self) -> None:
        self.outcomes: list[Outcome] | list[Tree] = []
        self.bytes = 0  # of the outcomes since the slice began
        self.worked_until_ns = time.perf_counter_ns()  # when the last one had returned


class PlainCalls:
    """Executes the calls of a plain program; its function is loaded."""

    def __init__(self, program: Program, stage: Stage, outcomes: OutcomeBuilder) -> None:
        self._program = program
        self._stage = stage
        self._outcomes = outcomes

    def run(
        self,
        call: Call,
        shards: LeaseShards,
        numbers: range,
        begin: Callable[[int], None],
        wait: Callable[[Awaitable[Any]], Any],
        tally: Tally,
        until_ns: int,
        bytes_max: int,
    ) -> None:
        """Execute calls one after the other, as `PassExecutor.run` does, until a time, or this size of results.

        `call` is the running call, and the last one at the end. Its shard is read with those of the next calls, and
        what is the same for all of them is found once. The outcomes in the tally are bare values, see `Tally`.
        """
        name, fn, own, sole = self._stage.name, self._stage.fn, self._outcomes.own, self._outcomes.sole
        assert sole is not None  # the program is plain
        enter, add, clock = current.set, tally.outcomes.append, time.perf_counter_ns
        mark = getattr(begin, "next", begin)
        first = number = numbers.start
        outside = enter(None)
        try:
            while first < numbers.stop:
                begin(first)
                call.number = number = first
                call.reading = True
                block, index = shards.from_call(first)
                call.reading = False
                values = block.values[index:] if index else block.values
                context = partial(self._context, block, first - index)
                call.in_user_code = True
                for number, value in enumerate(values, first):
                    if number != first:
                        mark(number)
                    enter(ContextOnDemand(context, number))
                    try:
                        result = fn(value)
                        if (kind := type(result)) not in VALUES and hasattr(kind, "__await__"):
                            result = wait(result)
                            kind = type(result)
                    finally:
                        if process_setup.is_copy:
                            process_setup.end_copy(name)
                    if (
                        kind is np.ndarray
                        and (size := result.nbytes) <= COPIED_BYTES
                        and result.dtype.kind != "O"
                    ):
                        add(result.copy())  # as `take_ownership` does, without its Python call
                    else:
                        box = [result]
                        del result
                        call.in_user_code, call.permanent = False, True
                        owned, size = own(box, sole)
                        call.in_user_code, call.permanent = True, False
                        add(owned)
                    tally.bytes += size
                    tally.worked_until_ns = now_ns = clock()
                    if now_ns >= until_ns or tally.bytes >= bytes_max:
                        return
                call.in_user_code = False
                first += len(values)
        finally:
            call.number = number
            current.reset(outside)

    def _context(self, block: ShardBlock, first: int, number: int) -> ReplicaContext:
        """Return the context of a call whose shard is in a block that begins with the shard of call `first`."""
        replicas = self._program.replicas
        step, replica = divmod(number, replicas)
        shard = block.shard(number - first)
        stage = self._stage
        return ReplicaContext(
            replica,
            replicas,
            step,
            shard.epoch,
            stage.name,
            shard.elements,
            self._program.seed,
            device=stage.device,
        )
