"""Variables as the caller has them: the values that steps begin with, and what steps have made of them.

The driver holds each variable's value and counts its versions. A run that uses a variable, because its
function has captured it or got it as an argument, begins with the version of that moment; when the
whole step has succeeded, and only then, what its replicas assigned becomes the next one. So a step
that fails or is tried again on other workers begins with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import finalize

import numpy as np

from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.program import StateValue
from pipedist.strategy.context import NotForReplicas, current_strategy, require_outside
from pipedist.worker.variables.access import AnyVariable, update_copies
from pipedist.worker.variables.replica import SLOT, ReplicaVariable, state_name, to_state
from pipedist.worker.variables.rules import (
    Array,
    AssignMethod,
    Traits,
    VariableAggregation,
    VariableSynchronization,
    assign_copies,
    declare,
    first_value,
    frozen,
    operand_of,
    read_copies,
    updated,
)

if TYPE_CHECKING:
    from pipedist.coordinator import Coordinator
    from pipedist.strategy.base import BaseStrategy

_COPIED_BYTES_MAX: Final = 2**16
"""A new value up to this size is copied out of the message that brought it, so as not to keep that."""


class Variable(AnyVariable):
    """A value that replica functions read and assign, kept from step to step (tf.Variable).

        with strategy.scope():
            w = pipedist.Variable(np.zeros(3), aggregation="sum")
        await strategy.run(lambda x: w.assign_add(x), args=(x,))

    Make it in the scope of the strategy whose functions use it. A function uses it by capturing it, or
    as an argument; there it is the replica's side of it, a `ReplicaVariable`. NumPy takes a variable
    for its value: `w + 1`. A variable that was made outside of every scope stays in this process.

    Assigning it here, outside of replica functions, returns None; while a run that uses it is not done,
    that is a RuntimeError. Of an on_read variable each replica gets the value; with sum the replicas'
    parts add up to it instead (floats are divided evenly, of integers replica 0 also has the remainder),
    and only a replica adds to it: `assign_add` and `assign_sub` here are a ValueError.

    Args:
        initial_value: an array, a number, nested lists of them, or a function that returns one.
        trainable: for optimizers; None: unless it is on_read.
        name: for people and errors.
        dtype: None: that of the initial value, as NumPy makes it.
        synchronization: on_write (auto): one value, the same on every replica, which they assign all
            together; on_read: each replica has its own, and they are aggregated where it is read
            outside of replica functions.
        aggregation: sum, mean, only_first_replica or none (None): how the replicas' values become one.

    Raises:
        ValueError: synchronization none; mean of a dtype that is not floating; on_read and trainable; no
            initial value; an unknown name; or made inside a replica function.
        TypeError: the value is neither numeric nor bool.
    """

    pickled_alike: ClassVar = True
    """In a function it is pickled to the same bytes, whatever its value is."""

    __slots__ = ("__weakref__", "_copies", "_sent", "_space", "_strategy", "_traits", "_users", "_version")

    _traits: Traits

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """In the scope of a strategy that keeps variables in its own way, one of these."""
        made = current_strategy()._make_variable(*args, **options)
        return object.__new__(cls) if made is None else made

    def __init__(
        self,
        initial_value: object,
        *,
        trainable: bool | None = None,
        name: str = "variable",
        dtype: object = None,
        synchronization: VariableSynchronization | str | None = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
    ) -> None:
        require_outside("creating a variable", "create it outside, in strategy.scope(), and use it inside")
        self._strategy: BaseStrategy = current_strategy()
        value = first_value(initial_value, dtype, name)
        self._traits = declare(
            value,
            name=name,
            trainable=trainable,
            synchronization=synchronization,
            aggregation=aggregation,
            replicas=self._strategy.num_replicas_in_sync,
            one_place=self._strategy._variables_in_one_place,
        )
        self._copies: list[Array] = [value] * (self._traits.replicas if self._traits.copies else 1)
        self._version = 0
        self._space: int | None = None
        """Number of its state at the coordinator, from the first run that uses it."""
        self._sent = -1
        """The latest version that the coordinator knows."""
        self._users = 0
        """Runs that use it and are not done."""

    # -- what it is ----------------------------------------------------------------------------

    @property
    def has_copies(self) -> bool:
        """Whether each replica has a value of its own."""
        return self._traits.copies

    # -- its value, outside of replica functions -----------------------------------------------

    def value(self) -> Array:
        """Return the value now, read-only: an array, of shape () for a number.

        Of an on_read variable the aggregate of the replicas' values.

        Raises:
            ValueError: it is on_read, and has no aggregation.
        """
        return read_copies(self._traits, self._copies) if self._traits.copies else self._copies[0]

    @property
    def local_values(self) -> tuple[Array, ...]:
        """What each replica has, in order of replica id; read-only."""
        return tuple(self._copies if self._traits.copies else self._copies * self._traits.replicas)

    def _change(self, method: AssignMethod, operand: object) -> None:
        if self._traits.copies:
            self._become(assign_copies(self._traits, self._copies, operand, method))
        else:
            own = operand_of(self._traits, operand, method)
            self._become([updated(self._traits, self._copies[0], method, own)])

    def _become(self, copies: list[Array]) -> None:
        if self._users:
            raise RuntimeError(
                f"the {self._traits.label} can't be changed now: a run that uses it is not done, and "
                "would lose or miss the change. Await the run first"
            )
        self._copies = copies
        self._version += 1

    # -- in a run --------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """A variable that a replica function has captured arrives there as its replica's side of it."""
        noted = _noted.get()
        if noted is None:
            raise NotForReplicas(
                f"the {self._traits.label} can't be pickled: only a function that a strategy runs may "
                "capture it. Send its value: variable.numpy()"
            )
        return ReplicaVariable, (noted.space_of(self), self._traits)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._traits.label}, version {self._version}>"


class CapturedVariables:
    """The variables that a run turns out to use.

    Args:
        strategy: the run's.
        coordinator: of the strategy's cluster.
    """

    def __init__(self, strategy: BaseStrategy, coordinator: Coordinator) -> None:
        self._strategy = strategy
        self.coordinator = coordinator
        self.variables: dict[int, Variable] = {}
        """By space."""

    def space_of(self, variable: Variable) -> int:
        """Note a variable, and return the number of its state.

        Raises:
            NotForReplicas: it was made outside of every scope, or in another strategy's.
        """
        _require_own(variable, self._strategy)
        if variable._space is None:
            variable._space = self.coordinator.open_space()
            # The garbage collector may run in any thread: the next run tells the coordinator.
            finalize(variable, self._strategy._forgotten.append, variable._space)
        self.variables[variable._space] = variable
        return variable._space

    def argument(self, variable: Variable) -> StateValue:
        """Note a variable that is an argument, and return what travels in its place."""
        return StateValue(state_name(self.space_of(variable)))

    @contextmanager
    def here(self) -> Iterator[None]:
        """Note the variables that are pickled inside the `with` block."""
        token = _noted.set(self)
        try:
            yield
        finally:
            _noted.reset(token)


def _require_own(variable: Variable, strategy: BaseStrategy) -> None:
    """Refuse a variable that was made outside of every scope, or in another strategy's.

    Raises:
        NotForReplicas: it was.
    """
    if variable._strategy is not strategy:
        where = (
            "outside of strategy.scope(), so it stays in this process"
            if variable._strategy._is_default
            else f"in the scope of another strategy, {variable._strategy!r}"
        )
        raise NotForReplicas(
            f"the {variable._traits.label} was made {where}: its replicas can't share it. Create it in "
            f"the scope of the strategy that uses it, {strategy!r}"
        )


_noted: ContextVar[CapturedVariables | None] = ContextVar("pipedist_noted_variables", default=None)
"""Set while a replica function is pickled."""


@contextmanager
def used(variables: Mapping[int, Variable]) -> Iterator[None]:
    """Hold variables for a run: nobody else changes them inside the `with` block."""
    for variable in variables.values():
        variable._users += 1
    try:
        yield
    finally:
        for variable in variables.values():
            variable._users -= 1


class Transaction:
    """What one run does to its variables: all of it, or nothing.

    Args:
        noted: the run's variables; the coordinator is told the versions that it begins with.
    """

    def __init__(self, noted: CapturedVariables) -> None:
        coordinator = noted.coordinator
        self._variables = variables = noted.variables
        self.states: dict[str, tuple[int, int]] = {}
        """Of each variable's state, by name: (space, version)."""
        for space, variable in variables.items():
            if variable._sent != variable._version:
                coordinator.put_state(space, variable._version, to_state(variable._traits, variable._copies))
                variable._sent = variable._version
            self.states[state_name(space)] = (space, variable._version)

    def commit(self, results: Sequence[Mapping[str, Tree]]) -> dict[int, int]:
        """Make what the replicas assigned the variables' next versions.

        Args:
            results: what each replica's call sent back.

        Returns:
            Space -> version of those that the workers of the step have whole.

        Raises:
            RemoteProtocolError: what came back is no value of the variable.
        """
        assigned = [result.get(SLOT) or {} for result in results]
        fresh: dict[int, list[Array]] = {}
        for space, variable in self._variables.items():
            traits = variable._traits
            if traits.copies:
                if any(space in told for told in assigned):
                    fresh[space] = [
                        _received(traits, told[space]) if space in told else old
                        for told, old in zip(assigned, variable._copies, strict=True)
                    ]
            elif space in assigned[0]:
                fresh[space] = [_received(traits, assigned[0][space])]
        for space, copies in fresh.items():
            self._variables[space]._copies = copies
            self._variables[space]._version += 1
        return {
            space: self._variables[space]._version
            for space in fresh
            if not self._variables[space]._traits.copies
        }


def _received(traits: Traits, value: object) -> Array:
    if not isinstance(value, np.ndarray) or value.shape != traits.shape or value.dtype != traits.dtype:
        raise RemoteProtocolError(
            f"a worker sent back no value of the {traits.label}: {type(value).__name__}"
        )
    return frozen(value.copy() if value.nbytes <= _COPIED_BYTES_MAX else value)


def update(
    strategy: BaseStrategy,
    variable: Variable,
    fn: Callable[..., Tree],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Tree:
    """Let a function change a variable, copy by copy: see `BaseStrategy.update`."""
    if not isinstance(variable, Variable):
        raise TypeError(
            f"update needs a pipedist.Variable, not {variable!r} of type {type(variable).__name__}"
        )
    _require_own(variable, strategy)
    before = variable._copies
    after, results = update_copies(variable._traits, before, fn, args, kwargs)
    if any(new is not old for new, old in zip(after, before, strict=True)):
        variable._become(after)
    return results
