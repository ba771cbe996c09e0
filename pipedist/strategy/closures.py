"""Closures: calls scheduled on a parameter server's workers, and their results.

A closure is prepared when it is scheduled: its function is serialized, its arguments are copied, and its
variables are noted. Its RemoteValue gets its result when it commits.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import anyio
import msgspec
import numpy as np

from pipedist.core import trees
from pipedist.core.functions import reference
from pipedist.core.types import FunctionRef, Tree
from pipedist.errors import PipedistError
from pipedist.strategy.context import NotForReplicas
from pipedist.strategy.distributed import until_ready
from pipedist.strategy.function_references import serialized
from pipedist.strategy.parameter_server import CommitOrder, ParameterVariable, capturing
from pipedist.strategy.per_worker import AS_ARGUMENT, PerWorkerDataset, PerWorkerIterator
from pipedist.worker.variables.access import ShardedVariable
from pipedist.worker.variables.closures import VariablePlaceholder, closure_of


class ClosureCancelled(PipedistError, concurrent.futures.CancelledError):
    """A closure was cancelled because an earlier one failed.

    `__cause__` is the error of the earlier one. The changes and the result of the cancelled closure are
    discarded, even if it was executed. (tf.distribute raises tf.errors.CancelledError.)
    """


class RemoteValue:
    """The future of a closure (tf: RemoteValue); made by `schedule`.

    `await value`, or `await value.fetch()`, returns the result of the closure. A RemoteValue can also be an
    argument of a closure that is scheduled later, which then gets the result.

    Example:
        value = await coordinator.schedule(step, args=(1,))
        print(await value.fetch())
    """

    __slots__ = ("_done", "_error", "_order", "_result", "label", "number")

    def __init__(self, number: int, label: str, order: CommitOrder) -> None:
        self.number = number  # the number of closures that were scheduled before
        self.label = label  # the function's name
        self._order = order
        self._done = anyio.Event()
        self._result: Tree = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the closure has committed, failed or was cancelled."""
        return self._done.is_set()

    async def fetch(self) -> Tree:
        """Wait until the closure has committed, and return its result, with read-only NumPy arrays.

        Raises:
            CallError: the closure raised; `__cause__` is its exception.
            ClosureCancelled: an earlier closure failed.
            OutOfRangeError: a per-worker dataset among its arguments has no more elements.
            RunCancelled, WorkersLost: the cluster was closed, or has failed.
        """
        await self._done.wait()
        self._order.observe(self.number)
        return self._outcome()

    def __await__(self) -> Generator[Any, Any, Tree]:
        return self.fetch().__await__()

    def _outcome(self) -> Tree:
        """Return the result, or raise the error, of a closure that is done."""
        if self._error is not None:
            raise self._error
        return self._result

    def _set(self, result: Tree, error: Exception | None = None) -> None:
        self._result, self._error = result, error
        self._done.set()

    def __reduce__(self) -> NoReturn:
        raise NotForReplicas("a RemoteValue can't be captured by a closure: pass it as an argument")

    def __repr__(self) -> str:
        state = "pending" if not self.done else "failed" if self._error is not None else "done"
        return f"<RemoteValue of closure {self.number}, {self.label}: {state}>"


Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # (args, kwargs)


@dataclass(slots=True, eq=False)
class ScheduledClosure:
    """A closure that has not committed."""

    function: FunctionRef
    arguments: Arguments  # (args, kwargs), with RemoteValues, and with VariablePlaceholders for variables
    variables: dict[int, ParameterVariable]  # by number
    reads: int  # the version of the variables that it reads
    value: RemoteValue
    outcome: tuple[Tree, Exception | None] | None = None  # (result, error); None until it is known

    def needs(self) -> list[RemoteValue]:
        return [leaf for leaf in trees.flatten(self.arguments)[0] if isinstance(leaf, RemoteValue)]

    def filled(self) -> Tree:
        """Return the arguments to send, or raise the error of a closure whose result it needs.

        The results it needs and its version must be available.
        """
        arguments = trees.tree_map(
            lambda leaf: leaf._outcome() if isinstance(leaf, RemoteValue) else leaf, self.arguments
        )
        if not self.variables:
            return arguments
        sent = {number: variable.as_of(self.reads) for number, variable in self.variables.items()}
        return (sent, *arguments), {}


class ClosureBuilder:
    """Prepares a closure, so that later changes by the caller do not affect it: writable arrays are copied."""

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, order: CommitOrder) -> None:
        self._fn = fn
        self._order = order
        with capturing() as self.variables:
            self._function = serialized(fn)
        for variable in self.variables.values():
            _require_own(variable, order)
        self._leaves, self._treedef = trees.flatten(arguments)
        self.iterators: dict[PerWorkerIterator, Tree] = {}  # those among the arguments, and their elements
        self._error: Exception | None = None
        for place, leaf in enumerate(self._leaves):
            match leaf:
                case ParameterVariable():
                    self._leaves[place] = self._placeholder([leaf], "")
                case ShardedVariable():
                    self._leaves[place] = self._placeholder(leaf.variables, leaf.name)
                case RemoteValue() if leaf._order is not order:
                    raise ValueError(
                        f"{leaf!r} belongs to another coordinator: fetch it, and pass its result"
                    )
                case np.ndarray() if leaf.flags.writeable:
                    self._leaves[place] = leaf.copy()  # the caller may write to it
                case PerWorkerIterator():
                    self.iterators[leaf] = None
                case PerWorkerDataset():
                    raise TypeError(AS_ARGUMENT)

    def _placeholder(self, variables: Sequence[object], name: str) -> VariablePlaceholder:
        """Add a variable to the closure, and return what is sent in its place."""
        numbers = []
        for variable in variables:
            own = _require_own(variable, self._order)
            self.variables[own.number] = own
            numbers.append(own.number)
        return VariablePlaceholder(numbers, name)

    async def until_ready(self, worker: int) -> None:
        """Wait until `take` need not wait; takes no element, so it is safe to cancel."""
        readers = [iterator.reader(worker) for iterator in self.iterators]
        while not all(reader.ready for reader in readers):  # others may take an element meanwhile
            for reader in readers:
                await until_ready(reader)

    def take(self, worker: int) -> None:
        """Take the next element of each iterator; an error of reading becomes the closure's error."""
        for iterator in self.iterators:
            try:
                self.iterators[iterator] = iterator.take(worker)
            except Exception as error:  # reading user data may raise any exception
                self._error = self._error or error
        self._leaves = [
            self.iterators[leaf] if isinstance(leaf, PerWorkerIterator) else leaf for leaf in self._leaves
        ]

    def scheduled(self, number: int, reads: int) -> ScheduledClosure:
        function = self._function
        if self.variables:
            function = msgspec.structs.replace(
                reference(closure_of(self._fn, function)), label=function.label
            )
        return ScheduledClosure(
            function,
            trees.unflatten(self._treedef, self._leaves),
            self.variables,
            reads,
            RemoteValue(number, function.label, self._order),
            None if self._error is None else (None, self._error),
        )


def _require_own(variable: object, order: CommitOrder) -> ParameterVariable:
    if not isinstance(variable, ParameterVariable) or not variable.is_of(order):
        raise ValueError(
            f"{variable!r} belongs to another strategy: only closures of that one's coordinator can use it"
        )
    return variable
