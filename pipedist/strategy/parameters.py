"""The variables of a parameter server, and the versions of them that closures read.

Version j of all variables is what they are when the turns of the first j closures are over. A closure
that is number k, with a staleness of S, reads version k - S, or a later one that the program knew of
when it scheduled the closure: so what it reads never depends on how fast closures run. A variable
keeps as many versions as may still be read; they share the arrays that did not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pipedist.core.types import Tree
from pipedist.strategy.context import NotForReplicas, require_outside
from pipedist.worker.variables.access import AnyVariable, update_copies
from pipedist.worker.variables.closures import Change, ClosureVariable, SentVariable
from pipedist.worker.variables.rules import Array, AssignMethod, Traits, operand_of, updated


class CommitOrder:
    """Whose turn it is, and what the program knows of it."""

    def __init__(self) -> None:
        self.over = 0
        """The turns of closures before this number are over: the version of the variables."""
        self.known = 0
        """The version that the program has seen, or may have."""
        self.readable = 0
        """Closures that are not sent yet read this version or a later one."""

    def look(self) -> None:
        """The program sees what the variables are now."""
        self.known = self.over

    def see(self, number: int) -> None:
        """The program sees that the turn of this closure is over."""
        self.known = max(self.known, min(number + 1, self.over))


class ParameterVariable(AnyVariable):
    """A variable of a parameter server; made by `pipedist.Variable` in the strategy's scope.

    Outside of closures it reads as its value now, and is assigned at once, which returns None: `join`
    first, where the order matters. In a closure, that takes it as an argument or captures it, it is a
    `pipedist.worker.variables.closures.ClosureVariable`.

    Args:
        turns: the strategy's.
        number: of the variable, unique in its strategy.
        traits: what of it never changes.
        value: its first value, read-only.
        parameter_server: which one has it.
    """

    __slots__ = ("__weakref__", "_number", "_traits", "_turns", "_versions", "parameter_server")

    _traits: Traits

    def __init__(
        self, turns: CommitOrder, number: int, traits: Traits, value: Array, parameter_server: int
    ) -> None:
        self.parameter_server = parameter_server
        self._turns = turns
        self._number = number
        self._traits = traits
        self._versions: deque[tuple[int, Array]] = deque([(turns.over, value)])
        """(version, value) of every change; the first one is the oldest that may be read."""

    def value(self) -> Array:
        """Return the value now, read-only: all closures whose turn is over have changed it."""
        self._turns.look()
        return self._versions[-1][1]

    def __repr__(self) -> str:
        return f"<ParameterVariable {self._traits.label} on parameter server {self.parameter_server}>"

    def __reduce__(self) -> tuple[Any, ...]:
        captured = _captured.get()
        if captured is None:
            raise NotForReplicas(
                f"the {self._traits.label} is a parameter server's: only closures of "
                "ClusterCoordinator.schedule can use it"
            )
        captured[self._number] = self
        return ClosureVariable, (self._number,)

    @property
    def number(self) -> int:
        """Its number in its strategy."""
        return self._number

    def update(
        self, turns: CommitOrder, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tree:
        """Let a function change the value: see `BaseStrategy.update`.

        Args:
            turns: of the strategy that does it.

        Raises:
            ValueError: it is another strategy's variable.
        """
        if not self.is_of(turns):
            raise ValueError(f"the {self._traits.label} is of another strategy: use that one's update")
        before = self.value()
        [after], result = update_copies(self._traits, [before], fn, args, kwargs)
        if after is not before:
            self.assign(after)
        return result

    def is_of(self, turns: CommitOrder) -> bool:
        """Whether it is a variable of the strategy whose turns these are."""
        return self._turns is turns

    def as_of(self, version: int) -> SentVariable:
        """Return what a closure gets that reads a version."""
        value = next(value for since, value in reversed(self._versions) if since <= version)
        return SentVariable(self._traits.to_wire(), value)

    def after(self, value: Array, method: AssignMethod, operand: Array) -> Array:
        """Return what a value becomes by a closure's change.

        Raises:
            ValueError: dtype or shape don't fit.
            OverflowError: an integer result does not fit the dtype.
        """
        return updated(self._traits, value, method, operand_of(self._traits, operand, method))

    @property
    def latest(self) -> Array:
        """The value now, where the program does not see it."""
        return self._versions[-1][1]

    def put(self, version: int, value: Array) -> None:
        """Set the value that closures read from a version on, and forget what nobody can read."""
        while self._versions and self._versions[-1][0] >= version:
            self._versions.pop()
        self._versions.append((version, value))
        while len(self._versions) > 1 and self._versions[1][0] <= self._turns.readable:
            self._versions.popleft()

    def _change(self, method: AssignMethod, operand: object) -> None:
        require_outside("assigning to a parameter server's variable", "capture it in a closure instead")
        new = updated(self._traits, self.latest, method, operand_of(self._traits, operand, method))
        self._turns.look()
        self.put(self._turns.over, new)


def apply(variables: dict[int, ParameterVariable], changes: Sequence[Change], version: int) -> None:
    """Carry out what a closure has assigned, all of it or nothing.

    Args:
        variables: those that it had, by number.
        changes: in the order in which it made them.
        version: after its turn.

    Raises:
        ValueError: a change does not fit its variable.
        OverflowError: an integer result does not fit the dtype.
    """
    new: dict[int, Array] = {}
    for number, method, operand in changes:
        variable = variables[number]
        new[number] = variable.after(new.get(number, variable.latest), method, operand)
    for number, value in new.items():
        variables[number].put(version, value)


_captured: ContextVar[dict[int, ParameterVariable] | None] = ContextVar("pipedist_captured", default=None)
"""Set while a closure's function is made ready to travel."""


@contextmanager
def capturing() -> Iterator[dict[int, ParameterVariable]]:
    """Collect the variables that a function captures, by number, while it is pickled."""
    captured: dict[int, ParameterVariable] = {}
    token = _captured.set(captured)
    try:
        yield captured
    finally:
        _captured.reset(token)
