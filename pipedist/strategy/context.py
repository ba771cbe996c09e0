"""Which strategy is current, and on which side of it the caller is (tf.distribute's contexts).

| caller | has_strategy | in_cross_replica_context | get_strategy |
|---|---|---|---|
| outside of any scope | False | False | the default strategy |
| inside `with strategy.scope():` | True | True | the strategy |
| in a replica function of a strategy | True | False | its side of the strategy: `ctx.strategy` |
| in a function that `ctx.merge_call` runs | True | True | the strategy, as far as it is there |
| in a function that the default strategy runs | False | False | the default strategy |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from pipedist.worker.context import get_replica_context
from pipedist.worker.strategy_views import MergeStrategy, ReplicaStrategy
from pipedist.worker.strategy_views import current_strategy as _merging

if TYPE_CHECKING:
    from pipedist.strategy.base import BaseStrategy

_current: ContextVar[BaseStrategy | None] = ContextVar("pipedist_strategy", default=None)
"""Set by `scope()`; a task that is started inside a scope inherits it."""

_default_runs: ContextVar[bool] = ContextVar("pipedist_default_runs", default=False)
"""Whether the replica context, if there is one, belongs to the default strategy."""


class NotForReplicas(ValueError):
    """Something that feeds all replicas was about to be used inside a replica function."""


def get_strategy() -> BaseStrategy | ReplicaStrategy | MergeStrategy:
    """Return the current strategy; outside of any scope, the default one."""
    context = get_replica_context()
    if context is not None and not _default_runs.get():
        return context.strategy
    return _merging.get() or current_strategy()


def current_strategy() -> BaseStrategy:
    """Return the strategy whose scope this is; outside of any scope, the default one."""
    current = _current.get()
    if current is not None:
        return current
    from pipedist.strategy.default import DEFAULT  # it is made of classes that import this module

    return DEFAULT


def has_strategy() -> bool:
    """Return whether another strategy than the default one is current."""
    if get_replica_context() is not None:
        return not _default_runs.get()
    return _merging.get() is not None or _current.get() is not None


def in_cross_replica_context() -> bool:
    """Return whether the caller is inside a scope, or a merge_call, and outside of replica functions."""
    if get_replica_context() is not None:
        return False
    return _merging.get() is not None or _current.get() is not None


def require_cross_replica(method: str) -> None:
    """Refuse a call from inside a replica function.

    Raises:
        RuntimeError: there is a replica context of another strategy than the default one.
    """
    if get_replica_context() is not None and not _default_runs.get():
        raise RuntimeError(
            f"{method} requires cross-replica context: it was called inside a replica function; "
            "return the value and call it outside"
        )


def require_outside(what: str, advice: str) -> None:
    """Refuse something that feeds all replicas inside a replica function.

    Raises:
        NotForReplicas: there is a replica context.
    """
    if get_replica_context() is not None or _merging.get() is not None:
        raise NotForReplicas(f"{what} inside a replica function: {advice}")


@contextmanager
def scope_of(strategy: BaseStrategy) -> Iterator[BaseStrategy]:
    """Make a strategy current.

    Raises:
        RuntimeError: another one is current, or the caller is in a replica function.
    """
    require_cross_replica("scope")
    current = _current.get()
    if current is not None and current is not strategy:
        raise RuntimeError(
            f"can't enter the scope of {strategy!r} inside the scope of another strategy, {current!r}: "
            "leave that one first"
        )
    token = _current.set(strategy)
    try:
        yield strategy
    finally:
        _current.reset(token)


@contextmanager
def default_running() -> Iterator[None]:
    """Mark that functions are run by the default strategy."""
    token = _default_runs.set(True)
    try:
        yield
    finally:
        _default_runs.reset(token)
