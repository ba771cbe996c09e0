"""Steps of a training loop in a worker: only their values change.

In a loop, a worker executes the same replica of the same function again and again, as the same member of a gang. So the
program and the gang need not be looked at again: the values of a step are decoded, the function is called, and its
result is sent. Collectives, such as assignments to variables, go through a gang that is kept from step to step. A step
whose function raises, or returns an awaitable, gets a `GangRun`, and is like any other from then on.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from pipedist.collectives.gang import outside_turn
from pipedist.core.types import Tree
from pipedist.errors import PipedistError
from pipedist.protocol.program import load_tree
from pipedist.worker import process_setup
from pipedist.worker.context import ReplicaContext, current
from pipedist.worker.execution import PassExecutor
from pipedist.worker.gangs import GangRun, ReplicaCollectives
from pipedist.worker.lease_run import FinishedCalls
from pipedist.worker.outcomes import VALUES, Outcome, Result

if TYPE_CHECKING:
    from pipedist.collectives.gang import LocalGang
    from pipedist.collectives.requests import CollectiveRequest
    from pipedist.collectives.shared import SharedChannel
    from pipedist.protocol.messages import AssignGang
    from pipedist.worker.failures import CallFailure
    from pipedist.worker.inputs import States
    from pipedist.worker.variables.replica import BoundVariables

Begin = Callable[[int], None]  # called with the number of a call before it runs


class StepOwner(Protocol):
    """The part of `Leases` that a step needs."""

    def use_states(self, executor: PassExecutor, states: States | None) -> BoundVariables | None: ...
    def store_produced(self, bound: BoundVariables) -> None: ...
    def general_step(self, assigned: AssignGang, frames: Sequence[memoryview], begin: Begin) -> GangRun: ...


_NO_ARGUMENTS: tuple[tuple[Any, ...], dict[str, Any]] = (), {}


class PreparedStep:
    """Executes steps like that of a `GangRun`, one after the other; used like one.

    `leases` has the states that they read, and makes the `GangRun` of a step.
    """

    def __init__(self, like: GangRun, leases: StepOwner) -> None:
        self.executor = executor = like.executor
        self._leases = leases
        self._factory, self._local = like.factory, like.local
        plain = executor.plain_step
        assert plain is not None  # it fits
        self._stage, self._emit = plain
        self._replica, self._replicas = like.local.start, executor.program.replicas
        self._seed = executor.program.seed
        self._device = like.factory.device_of(executor, self._replica) or self._stage.device
        self._channel = cast("SharedChannel | None", like.channel)  # relayed ones have a general run
        self._same = _same_in_steps(like.assigned)
        self._lock = threading.Lock()  # guards gang and general run of a step: user code may have threads
        self._kept_gang: LocalGang | None = None  # ran earlier steps, and begins again in the next one
        self._gang: LocalGang | None = None  # runs this step, once it has called a collective
        self.assigned = like.assigned
        self._frames: Sequence[memoryview] = ()  # until it was executed
        self._begin: Begin = like.begin
        self._arguments = _NO_ARGUMENTS
        self._bound: BoundVariables | None = None
        self._run: GangRun | None = None  # the general run of this step, once there is one
        self._collectives: ReplicaCollectives | None = None  # of the general run
        self._outcomes: list[Outcome] = []
        self._busy_ns = 0
        self._in_user_code = False
        self._is_permanent = False  # whether an error now would recur on every attempt

    @staticmethod
    def fits(run: GangRun) -> bool:
        """Return whether steps like that of a run may be prepared."""
        is_plain = type(run) is GangRun and len(run.local) == 1
        return is_plain and run.executor.plain_step is not None

    def begin(self, assigned: AssignGang, frames: Sequence[memoryview], begin: Begin) -> bool:
        """Begin another step; return False if it must have a general run."""
        lo, executor, channel = assigned.lo, self.executor, self._channel
        if (
            _same_in_steps(assigned) != self._same
            or (channel is not None and channel is not self._factory.shared)
            or assigned.hi - lo != 1
            or lo % self._replicas != self._replica
        ):
            return False
        begin(lo)  # decoding may import a user's module, which may end the process
        try:
            ids, locations, (arguments,), states = load_tree(frames, "the arguments of this call")
            if type(arguments) is not tuple or ids is not None or locations is not None:
                return False
            reads = states or executor.reads_states
            self._bound = self._leases.use_states(executor, states) if reads else None
        except (PipedistError, TypeError, ValueError):  # the general run raises its own error
            return False
        if channel is not None:
            channel.begin(assigned.serial)
        self.assigned, self._frames, self._begin, self._arguments = assigned, frames, begin, arguments
        self._run = self._collectives = self._gang = None
        self._outcomes = []
        return True

    # -- as a `GangRun` --------------------------------------------------------------------

    @property
    def outcomes(self) -> Sequence[Outcome]:
        return self._outcomes if self._run is None else self._run.outcomes

    def advance(self, slice_s: float, slice_bytes: int) -> CallFailure | None:
        if self._frames:
            start = time.perf_counter_ns()
            self._execute()
            self._busy_ns = time.perf_counter_ns() - start
        return None if self._run is None else self._run.advance(slice_s, slice_bytes)

    def take(self) -> FinishedCalls:
        if self._run is not None:
            return self._run.take()._replace(busy_ns=self._busy_ns)
        outcomes, self._outcomes = self._outcomes, []
        return FinishedCalls(self.assigned.lo, outcomes, self._busy_ns)

    def skip(self) -> None:
        if self._run is not None:
            self._run.skip()

    def abandon(self) -> None:
        if self._run is not None:
            self._run.abandon()
        elif self._gang is not None:
            self._gang.abort("the scheduler has cancelled the step")

    # -- execution -------------------------------------------------------------------------

    def _execute(self) -> None:
        assigned, emit = self.assigned, self._emit
        step = assigned.step if assigned.step >= 0 else assigned.lo // self._replicas
        collectives = _Collectives(self, assigned)
        stage, bound = self._stage, self._bound
        ctx = ReplicaContext(
            self._replica, self._replicas, step, 0, stage.name, None, self._seed, collectives, self._device
        )
        variables = ctx.variables = None if bound is None else bound.of(self._replica)
        self._in_user_code, self._is_permanent = True, False
        try:
            box = [contextvars.copy_context().run(self._call, ctx, self._arguments)]
            self._is_permanent = True
            outcome, size = self.executor.outcomes.of_step(box, emit, variables)
        except BaseException as error:  # an outcome; its caller decides
            self._conclude(error)
        else:
            if self._run is None:
                self._outcomes = [outcome]
                self._end()
            else:
                self._conclude((outcome, size))
            if bound is not None:
                self._leases.store_produced(bound)
        finally:
            self._frames, self._arguments, self._bound = (), _NO_ARGUMENTS, None

    def _call(self, ctx: ReplicaContext, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Tree:
        """Call the function, in a context of its own."""
        stage = self._stage
        current.set(ctx)
        try:
            result = stage.call(arguments, ctx)
            if (kind := type(result)) not in VALUES and hasattr(kind, "__await__"):
                result = self._general_run().wait(result)
            self._in_user_code = False
            if ctx.variables is None:
                return result
            from pipedist.worker.variables.access import plain  # loaded already: there are variables

            return plain(result)
        finally:
            if process_setup.is_copy:
                process_setup.end_copy(stage.name)

    def _end(self) -> None:
        """End a step whose function returned, and that needs no general run."""
        with self._lock:
            self._frames = ()  # its threads, if it has left some, call no collective from now on
            if self._gang is not None:
                self._gang.end_alone(failed=False)
            elif self._channel is not None:
                self._channel.ended(returned=True)

    def _conclude(self, found: Result | BaseException) -> None:
        """Have the general run report the step."""
        collectives = self._general_run()
        collectives.close()
        assert self._run is not None  # it has these collectives
        call = self.executor.call(self.assigned.lo)
        call.in_user_code, call.permanent = self._in_user_code, self._is_permanent
        self._run.conclude(call, found)

    def _general_run(self) -> ReplicaCollectives:
        """Return the collectives of the general run of this step, which is made now if there is none."""
        with self._lock:
            if self._collectives is None:
                self._run = run = self._leases.general_step(self.assigned, self._frames, self._begin)
                if self._gang is not None:
                    run.gang = self._gang
                else:
                    run.gang.begin_alone()
                self._gang = self._kept_gang = None
                self._collectives = ReplicaCollectives(
                    run, self._replica, self.assigned.lo, run.factory.loops[0]
                )
            return self._collectives

    def collective(self, assigned: AssignGang, request: CollectiveRequest) -> Tree:
        """Call a collective in a step, in whose thread this may not be called any more."""
        with self._lock:
            if assigned is not self.assigned or not self._frames:
                raise outside_turn(self._replica)
            gang = self._gang_of_step() if self._collectives is None else None
        if gang is None:
            return self._general_run().call(request)
        return gang.call(self._replica, request)

    def _gang_of_step(self) -> LocalGang:
        """Return the gang of this step; the caller holds the lock."""
        if self._gang is None:
            gang, lease = self._kept_gang, self.assigned.lease
            if gang is None:
                gang = self._factory.new_gang(self.executor, self._local, self._channel, lease)
                gang.begin_alone()
            else:
                gang.begin_another(self._factory.on_stalled(lease))
            self._kept_gang = self._gang = gang
        return self._gang


class _Collectives:
    """The collectives of one step, which few steps call."""

    is_async = False
    __slots__ = ("_assigned", "_step")

    def __init__(self, step: PreparedStep, assigned: AssignGang) -> None:
        self._step = step
        self._assigned = assigned

    def call(self, request: CollectiveRequest) -> Tree:
        return self._step.collective(self._assigned, request)


def _same_in_steps(assigned: AssignGang) -> tuple[int, str, int, int]:
    return assigned.pass_id, assigned.segment, assigned.member, assigned.members
