"""The strategy as replica functions see it: `ctx.strategy`, and the first argument of a merge_call function.

Both lack the methods of `Strategy` that need another context; calling one of these raises an error that names
the alternative. This module also declares the interfaces through which replica contexts and merge_call reach
the variables of a step, so that steps without variables do not import `pipedist.worker.variables`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol

from numpy.typing import NDArray

from pipedist import values
from pipedist.core.types import Tree

_NEEDS_CROSS_REPLICA = {  # methods of Strategy that need all replicas, and what a replica function does instead
    "run": "call the other function directly, or make it a stage of its own",
    "reduce": "return the value, and reduce what Strategy.run returns (in a spec: a `reduce` stage)",
    "gather": "return the value, and gather what Strategy.run returns (in a spec: a `gather` stage)",
    "local_results": "a replica function sees its own component only",
    "distribute_dataset": "make the dataset outside and pass its elements as arguments",
    "distribute_datasets_from_function": "make the dataset outside and pass its elements as arguments",
    "distribute_values_from_function": "make the values outside and pass them as arguments",
    "scope": "open the scope outside",
}

_NOT_IN_MERGE_CALL = {  # methods of Strategy that are undefined while the replicas wait, and what to do instead
    "run": "the replicas wait in merge_call; call the function before or after it",
    "scope": "the strategy is current already",
    "distribute_dataset": "make the dataset outside and pass its elements as arguments",
    "distribute_datasets_from_function": "make the dataset outside and pass its elements as arguments",
    "distribute_values_from_function": "make the values outside and pass them as arguments",
    "reduce_to": "use reduce: the returned value is given to every replica",
    "batch_reduce_to": "use reduce with a list of values: the returned value is given to every replica",
    "broadcast": "return the value: every replica gets it",
}


class ReplicaStrategy:
    """The strategy inside a replica function (tf.distribute: `ctx.strategy`).

    Methods that need all replicas raise RuntimeError.
    """

    __slots__ = ("num_replicas_in_sync",)

    def __init__(self, num_replicas_in_sync: int) -> None:
        self.num_replicas_in_sync = num_replicas_in_sync

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name not in _NEEDS_CROSS_REPLICA:
            raise AttributeError(f"the strategy has no attribute {name!r} inside a replica function")

        def reject(*_args: object, **_kwargs: object) -> NoReturn:
            # ValueError: in tf.distribute the dataset would be accepted; here the call has a wrong argument.
            error = ValueError if name.startswith("distribute_") else RuntimeError
            raise error(
                f"Strategy.{name} requires cross-replica context, but was called in a replica "
                f"function: {_NEEDS_CROSS_REPLICA[name]}"
            )

        return reject


class VariableValues(Protocol):
    """The current values of a step's variables, by space."""

    def value(self, space: int) -> NDArray[Any]: ...

    def change(self, variable: Any, how: Any, operand: object) -> Any:
        """Assign to a variable; return its new value, or an awaitable of it in an async function."""


class VariablesOfReplica(VariableValues, Protocol):
    """The variables of a step in one replica (`replica.ReplicaVariables`)."""

    def assigned(self) -> Tree: ...

    def merge(
        self, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[Callable[..., Tree], tuple[Any, ...], dict[str, Any]]: ...

    def merged(self, result: Tree) -> Tree: ...


class VariablesOfMerge(VariableValues, Protocol):
    """The variables of a step inside merge_call (`replica.MergedVariables`)."""

    def components(self, value: Tree, *, mirrored: bool) -> Tree:
        """Return a value with the replicas' values in place of its variables.

        `mirrored`: return a PerReplica also if all replicas have the same value.
        """

    def update(
        self, variable: Any, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tree: ...


merged_variables: ContextVar[VariablesOfMerge | None] = ContextVar("pipedist_merged_variables", default=None)
"""Set while the function of a merge_call runs in a step with variables."""


class MergeStrategy:
    """The strategy inside merge_call, the first argument of its function.

    It has the methods of Strategy, but none of them is awaited: the values are already here.
    """

    __slots__ = ("num_replicas_in_sync",)

    def __init__(self, num_replicas_in_sync: int) -> None:
        self.num_replicas_in_sync = num_replicas_in_sync

    def reduce(self, reduce_op: values.ReduceOp | str, value: Tree, axis: int | Sequence[int] | None) -> Tree:
        """Reduce the replicas' values to one; see `pipedist.values.reduce`."""
        given = _components(value, mirrored=False)
        return values.reduce(reduce_op, given, axis, self.num_replicas_in_sync)

    def gather(self, value: Tree, axis: int) -> Tree:
        """Concatenate the replicas' arrays; see `pipedist.values.gather`."""
        return values.gather(_components(value, mirrored=True), axis, self.num_replicas_in_sync)

    def local_results(self, value: Tree) -> tuple[Tree, ...]:
        """Return the component of each replica; see `pipedist.values.local_results`."""
        return values.local_results(_components(value, mirrored=True), self.num_replicas_in_sync)

    def update(
        self,
        variable: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tree:
        """Call a function for each copy of a variable (StrategyExtended.update).

        Args:
            variable: a `pipedist.Variable`.
            fn: called with a `VariableCopy`; each copy gets its own component of PerReplica arguments.
            args, kwargs: the other arguments.

        Returns:
            The results, PerReplica; None stays None.

        Raises:
            RuntimeError: the step has no variables.
            TypeError: `variable` is not a variable.
        """
        merged = merged_variables.get()
        if merged is None:
            raise RuntimeError(
                "update requires cross-replica context: in a replica function, call it in the function that "
                "ctx.merge_call runs; or assign directly, which aggregates"
            )
        return merged.update(variable, fn, args, kwargs or {})

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name not in _NOT_IN_MERGE_CALL:
            hint = ": its methods are on the strategy itself" if name == "extended" else ""
            raise AttributeError(f"the strategy has no attribute {name!r} inside merge_call{hint}")

        def reject(*_args: object, **_kwargs: object) -> NoReturn:
            raise RuntimeError(f"Strategy.{name} was called inside merge_call: {_NOT_IN_MERGE_CALL[name]}")

        return reject


def _components(value: Tree, *, mirrored: bool) -> Tree:
    merged = merged_variables.get()
    return value if merged is None else merged.components(value, mirrored=mirrored)


current_strategy: ContextVar[MergeStrategy | None] = ContextVar("pipedist_merge_strategy", default=None)
"""Set while the function of a merge_call runs."""
