"""Closures of a parameter server strategy in the worker, and their variables.

A closure is sent with the values of its variables. An assignment changes the closure's own copy, and is recorded;
the recorded assignments are returned with the result, and the parameter server applies them in the order of the
closures.
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
from pipedist.worker.variables.rules import Array, AssignMethod, Traits, operand_of, updated

Change = tuple[int, AssignMethod, Array]  # one assignment: the variable's number, the method, and the operand


@dataclass(frozen=True, slots=True)
class SentVariable:
    """A variable as it is sent with a closure: `Traits.to_wire`, and the value that the closure reads."""

    traits: list[Any]
    value: Array


@dataclass(frozen=True, slots=True)
class VariablePlaceholder:
    """Replaces a variable, or a sharded variable, in a closure's arguments.

    `numbers` has the number of the variable, or of each shard; `name` is "" for a plain variable.
    """

    numbers: list[int]
    name: str = ""


@dataclass(slots=True)
class _Held:
    traits: Traits
    value: Array


class _Execution:
    def __init__(self, sent: Mapping[int, SentVariable]) -> None:
        self.held = {
            number: _Held(Traits.from_wire(each.traits, each.value), each.value)
            for number, each in sent.items()
        }
        self.changes: list[Change] = []


_running: ContextVar[_Execution | None] = ContextVar("pipedist_closure", default=None)  # set while one runs


class ClosureVariable(AnyVariable):
    """A parameter server's variable inside a closure.

    Assignments change the closure's own copy at once, and return its new value, read-only. The parameter server
    later repeats them, in the order of the closures, on the value at that time.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def value(self) -> Array:
        """Return the value sent with the closure, changed by its assignments."""
        return self._held.value

    def __repr__(self) -> str:
        return f"<ClosureVariable {self.name!r} {self.dtype}{list(self.shape)}>"

    @property
    def _execution(self) -> _Execution:
        execution = _running.get()
        if execution is None or self._number not in execution.held:
            raise RuntimeError(
                "a parameter server's variable was used outside of its closure: closures get the variables "
                "that they capture or take as arguments, for one execution"
            )
        return execution

    @property
    def _held(self) -> _Held:
        return self._execution.held[self._number]

    @property
    def _traits(self) -> Traits:
        return self._held.traits

    def _change(self, method: AssignMethod, operand: object) -> Array:
        execution = self._execution
        held = execution.held[self._number]
        own = operand_of(held.traits, operand, method)
        held.value = updated(held.traits, held.value, method, own)
        execution.changes.append((self._number, method, own))
        return held.value

    def __reduce__(self) -> tuple[Any, ...]:
        return ClosureVariable, (self._number,)


class Closure:
    """Calls a user's function that reads or assigns variables; returns its result and its changes."""

    def __init__(self, function: FunctionRef) -> None:
        self._function = function
        self._fn: Callable[..., Any] | None = None

    def __call__(
        self, sent: Mapping[int, SentVariable], args: Tree, kwargs: dict[str, Tree], ctx: ReplicaContext
    ) -> Tree:
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
        token = _running.set(execution := _Execution(sent))
        try:
            return plain(await self._called(args, kwargs, ctx)), execution.changes
        finally:
            _running.reset(token)


def closure_of(fn: Callable[..., Any], function: FunctionRef) -> Closure:
    return AsyncClosure(function) if functions.is_async(fn) else Closure(function)


def _variable(placeholder: VariablePlaceholder) -> ClosureVariable | ShardedVariable:
    variables = [ClosureVariable(number) for number in placeholder.numbers]
    return ShardedVariable(placeholder.name, variables) if placeholder.name else variables[0]
