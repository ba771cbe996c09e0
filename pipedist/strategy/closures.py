"""Closures before they are sent: a function and its arguments, as they are when it is scheduled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pipedist.core import trees
from pipedist.core.functions import reference
from pipedist.core.types import FunctionRef, Tree
from pipedist.errors import UsageError
from pipedist.strategy.context import NotForReplicas
from pipedist.strategy.parameters import CommitOrder, ParameterVariable, capturing
from pipedist.strategy.per_worker import AS_ARGUMENT, PerWorkerDataset, PerWorkerIterator
from pipedist.strategy.remote_value import RemoteValue
from pipedist.worker.variables.access import ShardedVariable
from pipedist.worker.variables.closures import VariablePlaceholder, closure_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs)"""


@dataclass(slots=True, eq=False)
class Scheduled:
    """A closure that has not had its turn.

    Args:
        function: what the worker calls.
        arguments: (args, kwargs); with RemoteValues, and VariablePlaceholders for variables.
        variables: those that it has, by number.
        reads: version of them that it reads at least.
        value: its future.
        outcome: what it sent back, or the error; None until it is known.
    """

    function: FunctionRef
    arguments: Arguments
    variables: dict[int, ParameterVariable]
    reads: int
    value: RemoteValue
    outcome: tuple[Tree, Exception | None] | None = None

    def needs(self) -> list[RemoteValue]:
        """Return the results that it has among its arguments."""
        return [leaf for leaf in trees.flatten(self.arguments)[0] if isinstance(leaf, RemoteValue)]

    def filled(self) -> Tree:
        """Return what is sent, when the results that it needs are known and its version is there.

        Raises:
            Exception: a closure whose result it needs has failed.
        """
        arguments = trees.tree_map(
            lambda leaf: leaf._outcome() if isinstance(leaf, RemoteValue) else leaf, self.arguments
        )
        if not self.variables:
            return arguments
        sent = {number: variable.as_of(self.reads) for number, variable in self.variables.items()}
        return (sent, *arguments), {}


class ClosureBuilder:
    """What a closure is made of, taken from the caller's hands.

    Args:
        fn: the function.
        arguments: checked; arrays that can be written are copied.
        turns: of the strategy.

    Raises:
        TypeError: a per-worker dataset in place of its iterator.
        ValueError: a variable or a RemoteValue of another strategy.
        UsageError: `fn` can't be sent.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, turns: CommitOrder) -> None:
        self._fn = fn
        self._turns = turns
        with capturing() as self.variables:
            self._function = _reference(fn)
        for variable in self.variables.values():
            _require_own(variable, turns)
        self._leaves, self._treedef = trees.flatten(arguments)
        self.iterators: dict[PerWorkerIterator, Tree] = {}
        """The per-worker iterators among the arguments, with the elements that they stand for."""
        self._error: Exception | None = None
        for place, leaf in enumerate(self._leaves):
            match leaf:
                case ParameterVariable():
                    self._leaves[place] = self._placeholder([leaf], "")
                case ShardedVariable():
                    self._leaves[place] = self._placeholder(leaf.variables, leaf.name)
                case RemoteValue() if leaf._turns is not turns:
                    raise ValueError(f"{leaf!r} is another coordinator's: fetch it, and give its result")
                case np.ndarray() if leaf.flags.writeable:
                    self._leaves[place] = leaf.copy()  # the caller may use the memory again too early
                case PerWorkerIterator():
                    self.iterators[leaf] = None
                case PerWorkerDataset():
                    raise TypeError(AS_ARGUMENT)

    def _placeholder(self, variables: Sequence[object], name: str) -> VariablePlaceholder:
        """Return what is sent in place of a variable, which becomes one of the closure's."""
        numbers = []
        for variable in variables:
            own = _require_own(variable, self._turns)
            self.variables[own.number] = own
            numbers.append(own.number)
        return VariablePlaceholder(numbers, name)

    async def take(self, worker: int) -> None:
        """Take the next element of each iterator; what goes wrong is the closure's error.

        Args:
            worker: the logical worker whose turn it is.
        """
        for iterator in self.iterators:
            try:
                self.iterators[iterator] = await iterator.take(worker)
            except Exception as error:  # reading the user's data may raise anything
                self._error = self._error or error
        self._leaves = [
            self.iterators[leaf] if isinstance(leaf, PerWorkerIterator) else leaf for leaf in self._leaves
        ]

    def scheduled(self, number: int, reads: int) -> Scheduled:
        """Return the closure.

        Args:
            number: of the closure.
            reads: version of the variables that it reads.
        """
        function = self._function
        if self.variables:
            function = msgspec.structs.replace(
                reference(closure_of(self._fn, function)), label=function.label
            )
        return Scheduled(
            function,
            trees.unflatten(self._treedef, self._leaves),
            self.variables,
            reads,
            RemoteValue(number, function.label, self._turns),
            None if self._error is None else (None, self._error),
        )


def _require_own(variable: object, turns: CommitOrder) -> ParameterVariable:
    if not isinstance(variable, ParameterVariable) or not variable.is_of(turns):
        raise ValueError(f"{variable!r} is another strategy's: only closures of its own coordinator use it")
    return variable


def _reference(fn: Callable[..., Any]) -> FunctionRef:
    try:
        return reference(fn)
    except UsageError as error:
        if isinstance(error.__cause__, NotForReplicas):
            raise error.__cause__ from None
        raise
