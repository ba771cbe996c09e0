"""A parameter server's closure in the worker that executes it, and the variables that it sees.

A closure gets the values of its variables with its arguments. What it assigns changes its own copy,
which it reads from then on, and is written down; the list goes back with its result, and the
parameter server applies it when the closure's turn has come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pipedist.core import functions, trees
from pipedist.core.types import FunctionRef, Tree
from pipedist.worker.context import ReplicaContext
from pipedist.worker.variables.access import AnyVariable, ShardedVariable, plain
from pipedist.worker.variables.rules import Array, How, Traits, operand_of, updated

Change = tuple[int, How, Array]
"""One assignment: the variable's number, how, and what was assigned, added or subtracted."""


@dataclass(frozen=True, slots=True)
class SentVariable:
    """A variable as it is sent with a closure.

    Args:
        traits: `Traits.to_wire`.
        value: its value, as of the version that the closure reads.
    """

    traits: list[Any]
    value: Array


@dataclass(frozen=True, slots=True)
class VariablePlaceholder:
    """Stands in a closure's arguments for a variable, or for one that is cut into shards.

    Args:
        numbers: of the variables: one, or one a shard.
        name: of the sharded variable; "" where there is but one.
    """

    numbers: list[int]
    name: str = ""


@dataclass(slots=True)
class _Held:
    """A variable's traits and the closure's own copy of its value."""

    traits: Traits
    value: Array


class _Execution:
    """The variables of one closure while it runs."""

    def __init__(self, sent: Mapping[int, SentVariable]) -> None:
        self.held = {
            number: _Held(Traits.from_wire(each.traits, each.value), each.value)
            for number, each in sent.items()
        }
        self.changes: list[Change] = []


_running: ContextVar[_Execution | None] = ContextVar("pipedist_closure", default=None)
"""Set around every closure that has variables."""


class ClosureVariable(AnyVariable):
    """A parameter server's variable inside a closure.

    Assigning changes the closure's own copy at once, and returns its new value, read-only; the parameter
    server does the same when the closure's turn has come, to whatever the value is then.

    Args:
        number: of the variable.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def value(self) -> Array:
        """Return the value that the closure was sent with, changed by what it has assigned since."""
        return self._held.value

    def __repr__(self) -> str:
        return f"<ClosureVariable {self.name!r} {self.dtype}{list(self.shape)}>"

    @property
    def _execution(self) -> _Execution:
        execution = _running.get()
        if execution is None or self._number not in execution.held:
            raise RuntimeError(
                "a parameter server's variable is used outside of the closure that it was sent with: "
                "closures get the variables that they capture or take as arguments, for one execution"
            )
        return execution

    @property
    def _held(self) -> _Held:
        return self._execution.held[self._number]

    @property
    def _traits(self) -> Traits:
        return self._held.traits

    def _change(self, how: How, operand: object) -> Array:
        execution = self._execution
        held = execution.held[self._number]
        own = operand_of(held.traits, operand, how)
        held.value = updated(held.traits, held.value, how, own)
        execution.changes.append((self._number, how, own))
        return held.value

    def __reduce__(self) -> tuple[Any, ...]:
        return ClosureVariable, (self._number,)


class Closure:
    """A user's function that reads or assigns variables, as a worker calls it.

    Args:
        function: the user's.
    """

    def __init__(self, function: FunctionRef) -> None:
        self._function = function
        self._fn: Callable[..., Any] | None = None

    def __call__(
        self, sent: Mapping[int, SentVariable], args: Tree, kwargs: dict[str, Tree], ctx: ReplicaContext
    ) -> Tree:
        """Return what the function returned, and its changes."""
        token = _running.set(execution := _Execution(sent))
        try:
            return plain(self._called(args, kwargs, ctx)), execution.changes
        finally:
            _running.reset(token)

    def _called(self, args: Tree, kwargs: dict[str, Tree], ctx: ReplicaContext) -> Any:
        if self._fn is None:
            self._fn = functions.load(self._function, ())
        args, kwargs = trees.replace((args, kwargs), VariablePlaceholder, _variable)
        if "ctx" not in kwargs and functions.wants_ctx(self._fn):
            kwargs["ctx"] = ctx
        return self._fn(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._function,)


class AsyncClosure(Closure):
    """A `Closure` of an async function."""

    async def __call__(
        self, sent: Mapping[int, SentVariable], args: Tree, kwargs: dict[str, Tree], ctx: ReplicaContext
    ) -> Tree:
        """Return what the function returned, and its changes."""
        token = _running.set(execution := _Execution(sent))
        try:
            return plain(await self._called(args, kwargs, ctx)), execution.changes
        finally:
            _running.reset(token)


def closure_of(fn: Callable[..., Any], function: FunctionRef) -> Closure:
    """Return a function as a worker calls it that gives it variables.

    Args:
        fn: the function.
        function: how it travels.
    """
    return AsyncClosure(function) if functions.is_async(fn) else Closure(function)


def _variable(placeholder: VariablePlaceholder) -> ClosureVariable | ShardedVariable:
    variables = [ClosureVariable(number) for number in placeholder.numbers]
    return ShardedVariable(placeholder.name, variables) if placeholder.name else variables[0]
