"""Prepared steps in a worker: their failures, the versions of variables that they store, and their memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar
from unittest.mock import Mock
from weakref import ref

import numpy as np
import pytest
from msgspec.structs import replace

from pipedist.collectives.segment import SegmentOwner
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.code_archive import CodeStore
from pipedist.protocol.codec import encode
from pipedist.protocol.messages import AssignGang
from pipedist.protocol.program import Emit, StateValue, to_frames
from pipedist.worker.commands import Execute
from pipedist.worker.context import ReplicaContext, get_replica_context
from pipedist.worker.failures import CallFailure
from pipedist.worker.gangs import GangRun
from pipedist.worker.lease_run import FinishedCalls
from pipedist.worker.leases import Leases
from pipedist.worker.prepared_step import PreparedStep
from pipedist.worker.progress import StageClock
from pipedist.worker.relay_channel import RelayClient
from pipedist.worker.variables.replica import EMIT_OF, SLOT, ReplicaVariable, state_name, to_state
from pipedist.worker.variables.rules import VariableAggregation, declare, frozen
from tests.worker.fake_scheduler import program


def leases() -> Leases:
    client = Mock(spec=RelayClient)  # of gangs in one process, which send nothing
    return Leases(client, 1, StageClock(), CodeStore("", ""), lambda _retried: None)


def begin(_call: int) -> None:
    """Do nothing when a call begins."""


class Loop:
    """A training loop of one replica in this process: each step assigns a variable of its own."""

    def __init__(self, function: Callable[..., Any], space: int) -> None:
        self._leases = leases()
        emits = (Emit("y", of=0), Emit(SLOT, of=EMIT_OF))
        made = program(f"{__name__}:{function.__name__}", form="apply", gang=True, emits=emits)
        self._leases.open_pass(1, list(map(memoryview, to_frames(made))))
        self._space = space
        self._steps = 0
        self._version = 0
        value = frozen(np.array(0.0))
        traits = declare(
            value,
            name="w",
            trainable=None,
            synchronization="auto",
            aggregation=VariableAggregation.NONE,
            replicas=1,
            one_place=False,
        )
        self._leases.states.put(space, 0, to_state(traits, [value]))

    def step(self, *args: Any) -> tuple[type, CallFailure | None, FinishedCalls]:
        """Execute a step; return the kind of run, its failure, and its outcome."""
        states = {state_name(self._space): [self._space, self._version]}
        arguments = (StateValue(state_name(self._space)), *args)
        frames = list(map(memoryview, encode([None, None, [(arguments, {})], states])))
        number = self._steps
        self._steps += 1
        assigned = AssignGang(number + 1, 1, number, number + 1, 0, number + 1, 0, 1, "")
        run = self._leases.begin_step(assigned, frames, begin)
        assert isinstance(run, GangRun | PreparedStep)
        failure = run.advance(0.0, 0)
        self._version += failure is None
        return type(run), failure, run.take()

    def prepare(self, *args: Any) -> None:
        """Execute steps until they are prepared: the first one loads the function, and the second one is like it."""
        kinds = [self.step(*args)[0] for _ in range(3)]
        assert kinds == [GangRun, GangRun, PreparedStep]

    def value(self, version: int) -> float:
        """Return the value of a version of the variable that is stored."""
        (state,) = self._leases.states.values({"w": (self._space, version)}).values()
        return float(state["value"])

    @property
    def version(self) -> int:
        return self._version

    def at_end(self, do: Callable[[], None]) -> None:
        """Have something done at the end of each step, while its next version is stored."""
        store = self._leases.store_produced
        self._leases.store_produced = lambda bound: (do(), store(bound))[-1]  # type: ignore[method-assign]

    def close(self) -> None:
        self._leases.close()
        self._leases._loop.close()  # which a worker leaves to the end of its process


class _Unordered:
    """A key of a dict that can't be compared with others, so a tree with several has no order of leaves."""

    def __lt__(self, other: object) -> bool:
        raise ValueError("no order")


SLEEP_S = 0.02


async def later() -> Any:
    await asyncio.sleep(SLEEP_S)
    return large()


def large() -> Any:
    """Return an array that is sent without a copy."""
    array = np.zeros(10_000)
    Kept.result = ref(array)
    return array


class Kept:
    variables: ClassVar[list[ReplicaVariable]] = []
    result: ref[Any]
    context: ReplicaContext | None = None


def assign_and(w: Any, what: str) -> Any:
    Kept.context = get_replica_context()
    w.assign_add(1.0)
    if what == "keep":
        Kept.variables.append(w)
    if what == "raise":
        raise KeyError("on purpose")
    results: dict[str, Callable[[], Any]] = {
        "kept variable": lambda: Kept.variables[0],
        "no tree": lambda: {_Unordered(): 1, _Unordered(): 2},
        "date": lambda: datetime(2026, 1, 2, tzinfo=UTC),
        "later": later,
        "large": large,
    }
    return results.get(what, lambda: w)()


@pytest.fixture
def kept() -> Iterator[None]:
    """Keep a variable of a step that is over."""
    other = Loop(assign_and, space=1)
    other.step("keep")
    other.close()
    yield
    Kept.variables.clear()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("what", "name", "retryable", "shows_code"),
    [
        ("raise", "KeyError", True, True),
        ("kept variable", "RuntimeError", True, True),
        ("no tree", "ValueError", True, False),
        ("date", "UnsendableError", False, False),
    ],
)
def test_a_failure_is_that_of_a_general_step(what: str, name: str, retryable: bool, shows_code: bool) -> None:
    """Whether it recurs, and whether the function raised it, does not depend on how a step is executed."""
    general, prepared = Loop(assign_and, space=2), Loop(assign_and, space=2)
    prepared.prepare("")
    kinds, failures = zip(*[loop.step(what)[:2] for loop in (general, prepared)], strict=True)
    assert kinds == (GangRun, PreparedStep)
    for failure in failures:
        assert (failure.name, failure.retryable, bool(failure.traceback)) == (name, retryable, shows_code)
    first, second = (replace(failure, call=0, traceback="") for failure in failures)
    assert first == second
    general.close()
    prepared.close()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("what", ["raise", "kept variable", "no tree", "date"])
def test_a_step_that_fails_stores_no_version_of_a_variable(what: str) -> None:
    """A worker has the next version of a variable only if the step that assigned it has succeeded here."""
    loop = Loop(assign_and, space=2)
    loop.prepare("")
    assert (loop.version, loop.value(loop.version)) == (3, 3.0)
    kind, failure, _ = loop.step(what)
    assert kind is PreparedStep
    assert failure is not None
    with pytest.raises(RemoteProtocolError, match="version 4 of 'w'"):
        loop.value(4)
    kind, failure, (_, (outcome,), _) = loop.step("")
    assert (kind, failure) == (PreparedStep, None)
    assert float(outcome["y"]) == float(outcome[SLOT][2]) == loop.value(4) == 4.0
    loop.close()


def test_a_thread_calls_no_collective_when_its_step_is_over() -> None:
    """The others may be in the next step by then, which has the same channel."""
    loop = Loop(assign_and, space=2)
    found = []

    def call() -> None:
        assert Kept.context is not None
        with pytest.raises(RuntimeError, match="outside its turn"):
            Kept.context.all_reduce("sum", 1)
        found.append(Kept.context.step)

    loop.at_end(call)
    assert [loop.step("")[:2] for _ in range(4)] == [(GangRun, None)] * 2 + [(PreparedStep, None)] * 2
    assert found == [0, 1, 2, 3]
    loop.close()


def test_the_time_of_a_step_includes_that_of_an_awaitable() -> None:
    """The scheduler sends steps in advance if they are short, and reports show the time."""
    loop = Loop(assign_and, space=2)
    loop.prepare("")
    for _ in range(2):
        kind, failure, finished = loop.step("later")
        assert (kind, failure) == (PreparedStep, None)
        assert finished.busy_ns >= SLEEP_S * 1e9
    loop.close()


@pytest.mark.parametrize("what", ["large", "later"])
def test_a_step_keeps_no_result_that_was_taken(what: str) -> None:
    """A worker may wait long for the next step, and a result may be most of its memory."""
    loop = Loop(assign_and, space=2)
    loop.prepare("")
    for _ in range(2):
        kind, _, finished = loop.step(what)
        assert kind is PreparedStep
        ((outcome,), owned) = finished.outcomes, Kept.result
        assert owned() is outcome["y"]
        del finished, outcome
        assert owned() is None
    loop.close()


def double(x: int) -> int:
    return 2 * x


def test_a_step_whose_memory_was_unmapped_for_other_gangs_maps_it_again() -> None:
    """A worker unmaps the memory of the gang that was used least lately; other gangs may run between two steps."""
    held = leases()
    emits = (Emit("y", of=0), Emit(SLOT, of=EMIT_OF))
    made = program(f"{__name__}:double", replicas=2, form="apply", gang=True, emits=emits)
    held.open_pass(1, list(map(memoryview, to_frames(made))))
    own, *others = [SegmentOwner(2) for _ in range(6)]
    kinds, steps = [], iter(range(20))

    def execute(owner: SegmentOwner, *, is_stored: bool) -> None:
        """Execute replica 0 of a step, of which the worker has seen other messages if `is_stored`."""
        step = next(steps)
        assigned = AssignGang(step + 1, 1, 2 * step, 2 * step + 1, 0, step + 1, 0, 2, owner.where)
        frames = list(map(memoryview, encode([None, None, [((step,), {})], None])))
        if is_stored:
            held.store(assigned.lease, frames, assigned)
            run = held.begin(Execute(assigned.lease, 1, assigned.lo, assigned.hi, 0.0, 0), begin)
        else:
            found = held.begin_step(assigned, frames, begin)
            assert found is not None
            run = found
        assert run.advance(0.0, 0) is None
        assert [outcome["y"] for outcome in run.take().outcomes] == [2 * step]
        held.drop(assigned.lease)
        kinds.append(type(run))

    for _ in range(3):
        execute(own, is_stored=False)
    for owner in others:
        execute(owner, is_stored=True)
    for _ in range(2):
        execute(own, is_stored=False)
    assert kinds == [GangRun, GangRun, PreparedStep, *[GangRun] * 5, GangRun, PreparedStep]
    held.close()
    for owner in (own, *others):
        owner.close()
