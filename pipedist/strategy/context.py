"""The current strategy, and the side of it that the caller is on (tf.distribute's contexts).

| caller | has_strategy | in_cross_replica_context | get_strategy |
|---|---|---|---|
| outside of any scope | False | False | the default strategy |
| inside `with strategy.scope():` | True | True | the strategy |
| in a replica function of a strategy | True | False | the replica's view of it: `ctx.strategy` |
| in a function that `ctx.merge_call` runs | True | True | the worker's view of the strategy |
| in a function that the default strategy runs | False | False | the default strategy |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

from pipedist.worker.context import current as _replica_context
from pipedist.worker.context import get_replica_context
from pipedist.worker.strategy_views import current_strategy as _merging


class VariableOwner(ABC):
    """The part of a strategy that scopes and variables use."""

    is_default: ClassVar[bool] = False  # it is outside of every scope: its variables stay in this process

    # Its variables that are still referenced, by id, in order of creation
    made: WeakValueDictionary[int, Any]
    unused_spaces: deque[int]  # spaces of variables that were garbage collected; the next run drops them

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """R, the number of replicas."""

    _variables_in_one_place: ClassVar[bool] = False  # every variable has one copy, also an on_read one

    def _make_variable(self, *_args: Any, **_options: Any) -> object | None:
        """Return a variable of the strategy's own kind; None if it uses `pipedist.Variable`."""
        return None


_Owner = TypeVar("_Owner", bound=VariableOwner)

_current: ContextVar[VariableOwner | None] = ContextVar("pipedist_strategy", default=None)
"""Set by `scope()`; a task that is started inside a scope inherits it."""

_default_runs: ContextVar[bool] = ContextVar("pipedist_default_runs", default=False)
"""Whether the replica context, if there is one, belongs to the default strategy."""

_default: list[VariableOwner] = []  # the default strategy, once its module is imported


class NotForReplicas(ValueError):
    """An object that serves all replicas was about to be used inside a replica function."""


def set_default_strategy(strategy: VariableOwner) -> None:
    _default[:] = [strategy]


def current_strategy() -> VariableOwner:
    """Return the strategy of the current scope; outside of any scope, the default one."""
    return _current.get() or _default[0]


def in_replica_function() -> bool:
    """Return whether the caller is in a replica function of a strategy other than the default one."""
    return get_replica_context() is not None and not _default_runs.get()


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is current.

    Example:
        with strategy.scope():
            assert pipedist.has_strategy()
    """
    if get_replica_context() is not None:
        return not _default_runs.get()
    return _merging.get() is not None or _current.get() is not None


def in_cross_replica_context() -> bool:
    """Return whether the caller is in a scope or merge_call, not in a replica.

    Example:
        with strategy.scope():
            assert pipedist.in_cross_replica_context()  # False inside a replica function
    """
    if get_replica_context() is not None:
        return False
    return _merging.get() is not None or _current.get() is not None


def require_cross_replica(method: str) -> None:
    """Raise RuntimeError in a replica function of a strategy other than the default one."""
    if _replica_context.get() is not None and in_replica_function():
        raise RuntimeError(
            f"{method} requires cross-replica context: it was called inside a replica function; "
            "return the value and call it outside"
        )


def require_outside(what: str, advice: str) -> None:
    """Raise NotForReplicas in a replica function or a merge_call."""
    if get_replica_context() is not None or _merging.get() is not None:
        raise NotForReplicas(f"{what} inside a replica function: {advice}")


@contextmanager
def scope_of(strategy: _Owner) -> Iterator[_Owner]:
    """Make a strategy current while the context is open; raise RuntimeError if another one is current."""
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
    """Mark the functions called in this context as run by the default strategy."""
    token = _default_runs.set(True)
    try:
        yield
    finally:
        _default_runs.reset(token)
