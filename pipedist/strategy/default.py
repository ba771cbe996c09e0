"""The strategy outside of every scope: one replica, in this process."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

from pipedist.collectives.gang import LocalGang
from pipedist.collectives.requests import CollectiveRequest, UnawaitedCollectives
from pipedist.core import functions
from pipedist.core.types import Tree
from pipedist.errors import CallError
from pipedist.strategy.base import BaseStrategy
from pipedist.strategy.context import default_running
from pipedist.strategy.references import require_callable
from pipedist.worker.array_isolation import as_readonly
from pipedist.worker.context import ReplicaContext, current


class DefaultStrategy(BaseStrategy):
    """No strategy: one replica in this process, whose values stay plain; what `get_strategy` returns.

    The same code runs with it and with a strategy. It is one object for all, and needs no cluster.
    """

    _is_default: ClassVar = True

    def __init__(self) -> None:
        super().__init__(1)

    @property
    def _identity(self) -> bool:
        return True

    async def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tree:
        """Call `fn` here and now; as `Strategy.run`, but what it returns stays as it is."""
        require_callable(fn)
        [(own_args, own_kwargs)] = as_readonly(self._arguments(args, kwargs))
        label = getattr(fn, "__qualname__", type(fn).__qualname__)
        alone = _Alone(inspect.iscoroutinefunction(fn))
        context = ReplicaContext(
            replica_id_in_sync_group=0,
            num_replicas_in_sync=1,
            step=0,
            epoch=0,
            stage=label,
            elements=None,
            seed=0,
            collectives=alone,
        )
        if functions.wants_ctx(fn):
            own_kwargs.setdefault("ctx", context)
        token = current.set(context)
        try:
            with default_running():
                result = fn(*own_args, **own_kwargs)
                if inspect.isawaitable(result):
                    result = await result
                    alone.unawaited.check()
        except Exception as error:
            raise CallError(
                stage=label,
                step=0,
                replica=0,
                worker="this process",
                attempts=1,
                cause=f"{type(error).__name__}: {error}",
                remote_traceback="".join(traceback.format_exception(error)),
            ) from error
        finally:
            current.reset(token)
            alone.unawaited.drop()
        return result

    def __repr__(self) -> str:
        return "<DefaultStrategy>"


DEFAULT: Final = DefaultStrategy()
"""The one default strategy."""


class _Alone:
    """Collectives of the only replica: each meets nobody, and folds one value."""

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async
        self.unawaited = UnawaitedCollectives()
        """Collectives that its async function has requested, but not awaited."""

    def call(self, request: CollectiveRequest) -> Any:
        """Make a collective: its result, or what awaits it."""
        return self.unawaited.add(request, self._later(request)) if self.is_async else self._result(request)

    def _result(self, request: CollectiveRequest) -> Tree:
        gang = LocalGang(replicas=1, local=range(1))
        [outcome] = gang.run([lambda: gang.call(0, request)])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def _later(self, request: CollectiveRequest) -> Tree:
        return self._result(request)
