"""The body of a merge_call: cross-replica context, in the worker of replica 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from pipedist import values
from pipedist.core.types import Tree
from pipedist.worker import forks
from pipedist.worker.context import current

_REFUSED = {
    "run": "the replicas wait in merge_call; call the function before or after it",
    "scope": "the strategy is current already",
    "distribute_dataset": "make the dataset outside and pass its elements as arguments",
    "distribute_datasets_from_function": "make the dataset outside and pass its elements as arguments",
    "distribute_values_from_function": "make the values outside and pass them as arguments",
    "reduce_to": "use reduce: what is returned is given to every replica",
    "batch_reduce_to": "use reduce with a list of values: what is returned is given to every replica",
    "broadcast": "return the value: every replica gets it",
}
"""Methods of Strategy that make no sense while the replicas wait, and what to do instead."""


class MergeStrategy:
    """The strategy inside a merge_call (tf.distribute: the first argument of `merge_fn`).

    Its methods are those of Strategy, but nothing is awaited: the values are here.

    Args:
        num_replicas_in_sync: R.
    """

    __slots__ = ("num_replicas_in_sync",)

    def __init__(self, num_replicas_in_sync: int) -> None:
        self.num_replicas_in_sync = num_replicas_in_sync

    def reduce(self, reduce_op: values.ReduceOp | str, value: Tree, axis: int | Sequence[int] | None) -> Tree:
        """Combine the replicas' values to one: see `pipedist.values.reduce`."""
        given = _components(value, mirrored=False)
        return values.reduce(reduce_op, given, axis, self.num_replicas_in_sync)

    def gather(self, value: Tree, axis: int) -> Tree:
        """Put the replicas' arrays end to end: see `pipedist.values.gather`."""
        return values.gather(_components(value, mirrored=True), axis, self.num_replicas_in_sync)

    def local_results(self, value: Tree) -> tuple[Tree, ...]:
        """Return what each replica has, in order of replica id: see `pipedist.values.local_results`."""
        return values.local_results(_components(value, mirrored=True), self.num_replicas_in_sync)

    def update(
        self,
        variable: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tree:
        """Update a variable: `fn(variable, *args, **kwargs)` for each of its components.

        PerReplica arguments give each component its own (tf.distribute.StrategyExtended.update).
        """
        from pipedist.worker import variables  # most functions have none

        return variables.update(variable, fn, args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name not in _REFUSED:
            hint = ": its methods stand on the strategy itself" if name == "extended" else ""
            raise AttributeError(f"the strategy has no attribute {name!r} inside merge_call{hint}")

        def refuse(*_args: object, **_kwargs: object) -> NoReturn:
            raise RuntimeError(f"Strategy.{name} was called inside merge_call: {_REFUSED[name]}")

        return refuse


def _components(value: Tree, *, mirrored: bool) -> Tree:
    from pipedist.worker import variables  # most functions have none

    return variables.components(value, mirrored=mirrored)


current_strategy: ContextVar[MergeStrategy | None] = ContextVar("pipedist_merge_strategy", default=None)
"""Set while the body of a merge_call runs."""


def merging(fn: Callable[..., Tree], replicas: int) -> Callable[..., Tree]:
    """Return `fn` as it is called once for all replicas: in cross-replica context, the strategy first."""

    def body(*args: Any, **kwargs: Any) -> Tree:
        strategy, ctx = MergeStrategy(replicas), current.get()
        try:
            with _cross_replica(strategy):
                return fn(strategy, *args, **kwargs)
        finally:
            if forks.is_copy:
                forks.end_copy("" if ctx is None else ctx.stage)

    body.__qualname__ = str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)  # its label in errors
    return body


@contextmanager
def _cross_replica(strategy: MergeStrategy) -> Iterator[None]:
    context, own = current.set(None), current_strategy.set(strategy)
    try:
        yield
    finally:
        current_strategy.reset(own)
        current.reset(context)
