"""Schedules closures on the workers of a parameter server (tf.distribute's ClusterCoordinator).

Theory of operation. A closure is a call of an ordinary pass: any free worker executes it, and another
one does if that worker dies. Closures are sent in order of scheduling, and run at the same time in
any order; but each has its TURN in order of scheduling, once, however often it was tried. In its turn
its changes to variables are carried out and its RemoteValue gets its result. So the values of variables
and results follow from the program alone, not from the number, speed or fate of workers.

A closure that fails ends the series: the closures before it have had their turns, and the ones after it
are cancelled, whether they were executed or not. The error surfaces once more, at `join` or at the next
`schedule`; then the coordinator can be used again.

Everything happens on the event loop, in `_advance`, which never waits: there are no tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Final

import anyio
import anyio.lowlevel

from pipedist.coordinator import Slots
from pipedist.core import trees
from pipedist.core.arguments import check_int
from pipedist.core.misuse_hints import AsyncOnly
from pipedist.core.types import Tree
from pipedist.datasets.logical import Dataset
from pipedist.errors import RunCancelled, UsageError
from pipedist.strategy.closures import ClosureBuilder, Scheduled
from pipedist.strategy.context import require_cross_replica
from pipedist.strategy.parameter_server import ParameterServerStrategy
from pipedist.strategy.parameters import apply
from pipedist.strategy.passes import SLOT, Passes
from pipedist.strategy.per_worker import PerWorkerDataset, per_worker_datasets
from pipedist.strategy.remote_value import ClosureCancelled, RemoteValue

CLOSURES_MAX: Final = 256
"""Closures that may be scheduled and not have had their turn; tf.distribute's queue has that length."""

STALENESS: Final = 8
"""Turns that a closure may miss, if nothing else is said."""


class ClusterCoordinator(AsyncOnly):
    """Executes functions on the workers, asynchronously (tf.distribute.coordinator.ClusterCoordinator).

        strategy = pipedist.ParameterServerStrategy(cluster)
        async with pipedist.ClusterCoordinator(strategy) as coordinator:
            value = await coordinator.schedule(fn, args=(1,))
            await coordinator.join()
            print(await value)

    Leaving `async with` joins. Without `async with` it works too; then `join` before the end, or errors
    stay unseen.

    Args:
        strategy: a ParameterServerStrategy without another coordinator.
        staleness: turns that a closure which has variables may miss, at least 0. A closure that is
            scheduled as number k reads the variables after the turn of closure k - staleness - 1, or later
            ones that the program has joined or fetched before. It is sent when that turn is over, so
            staleness + 1 closures run at a time: give at least the number of workers. A variable that
            changes keeps staleness + 2 values at most.
        closures_max: closures that may wait for their turns; `schedule` waits while there are more.

    Raises:
        TypeError: `strategy` is no ParameterServerStrategy, or a number is no int.
        ValueError: a number is out of range.
        UsageError: the strategy has a coordinator.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        *,
        staleness: int = STALENESS,
        closures_max: int = CLOSURES_MAX,
    ) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            raise TypeError(
                f"a ClusterCoordinator needs a pipedist.ParameterServerStrategy, not {strategy!r}"
            )
        self._staleness = check_int("staleness", staleness, at_least=0)
        self._closures_max = check_int("closures_max", closures_max, at_least=1)
        strategy._coordinated_by(self)
        self._strategy = strategy
        self._turns = strategy._turns
        self._passes: Passes | None = None
        self._scheduling = anyio.Lock()
        self._changed = anyio.Event()
        self._number = 0
        """Of the next closure."""
        self._deal = 0
        """Closures that have read per-worker datasets."""
        self._pending: deque[Scheduled] = deque()
        """Closures that have not had their turns."""
        self._waiting: deque[Scheduled] = deque()
        """Those of them that were not sent."""
        self._error: Exception | None = None
        """Of the closure that failed, until it has surfaced."""
        self._advancing = False
        self._closed = False

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy whose workers execute the closures."""
        return self._strategy

    # -- for programs ------------------------------------------------------------------------

    async def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Have a worker call `fn`, and return the future of its result without waiting for it.

        It waits only while `closures_max` closures wait for their turns, and for the elements of
        per-worker datasets.

        Args:
            fn: a function, sync or async. Variables that it captures can be read and assigned in it.
            args, kwargs: its arguments, as they are now. A RemoteValue stands for its result, the
                iterator of a per-worker dataset for the next element; variables can be read and
                assigned.

        Raises:
            TypeError: `fn` can't be called, or `kwargs` is no mapping.
            ValueError: `args` is neither tuple nor list, or there is a variable or RemoteValue of
                another strategy among the arguments.
            UsageError: `fn` can't be sent; or the coordinator is closed.
            RuntimeError: called inside a replica function.
            Exception: the error of a closure that failed, once; this one is not scheduled then.
        """
        require_cross_replica("ClusterCoordinator.schedule")
        if not callable(fn):
            raise TypeError(
                f"schedule needs a function, but {fn!r} of type {type(fn).__name__} can't be called"
            )
        async with self._scheduling:
            await anyio.lowlevel.checkpoint()
            while len(self._pending) >= self._closures_max:
                await self._changed.wait()
            self._check_open()
            closure = await self._prepared(fn, args, kwargs)
            self._check_open()  # reading an element takes time
            self._number += 1
            self._pending.append(closure)
            self._waiting.append(closure)
            self._advance()
        return closure.value

    async def join(self) -> None:
        """Wait until all closures have had their turns.

        Raises:
            Exception: the error of the closure that failed, once; of several, the one that was
                scheduled first. A CallError, where the function raised.
        """
        await anyio.lowlevel.checkpoint()
        while self._pending:
            await self._changed.wait()
        self._turns.look()
        self._surface()

    def done(self) -> bool:
        """Return whether all closures have had their turns. An error surfaces elsewhere."""
        return not self._pending

    async def fetch(self, value: Tree) -> Tree:
        """Return a tree with results in place of RemoteValues, waiting for them.

        Args:
            value: any tree; what is no RemoteValue stays as it is.

        Raises:
            Exception: as `RemoteValue.fetch`; of several, that of the closure that was scheduled first.
        """
        remote = [leaf for leaf in trees.flatten(value)[0] if isinstance(leaf, RemoteValue)]
        for each in sorted(remote, key=lambda each: each.number):
            await each.fetch()
        return trees.tree_map(lambda leaf: leaf._outcome() if isinstance(leaf, RemoteValue) else leaf, value)

    def create_per_worker_dataset(
        self, dataset_or_dataset_fn: Dataset | Callable[..., Any]
    ) -> PerWorkerDataset:
        """Return a dataset that closures read, through an iterator for each logical worker.

            batches = iter(coordinator.create_per_worker_dataset(dataset_fn))
            await coordinator.schedule(step, args=(batches,))  # step gets an element

        Args:
            dataset_or_dataset_fn: a Dataset, which every worker reads as a whole, so that with W
                workers each element comes W times; what the strategy distributes, alike; or a
                function that returns either, called once a worker: with nothing, or, where it has a
                parameter, with `InputContext(W, worker, 1)`, to divide the elements by.

        Raises:
            ValueError: it is none of these. What the function raises comes through.
        """
        return PerWorkerDataset(per_worker_datasets(dataset_or_dataset_fn, self._strategy.workers))

    async def aclose(self) -> None:
        """Cancel what has not had its turn, and let the workers forget the functions."""
        self._closed = True
        self._cancel("the coordinator was closed", None)
        if self._passes is not None:
            self._passes.close()
            self._passes = None
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> ClusterCoordinator:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.join()
        finally:
            await self.aclose()

    # -- turns -------------------------------------------------------------------------------

    async def _prepared(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Scheduled:
        """Return a closure with its arguments as they are now."""
        [arguments] = self._strategy._arguments(args, kwargs)
        parts = ClosureBuilder(fn, arguments, self._turns)
        if parts.iterators:
            await parts.take(self._deal % self._strategy.workers)
            self._deal += 1  # where nothing was taken, it is still that worker's turn
        reads = self._number - self._staleness if parts.variables else 0
        return parts.scheduled(self._number, max(self._turns.known, reads))

    def _advance(self) -> None:
        """Let closures have their turns, and send others, as far as that goes now."""
        if self._advancing:  # what comes back while something is sent is seen below
            return
        self._advancing = True
        try:
            while self._end_turn() or self._send():
                pass
        finally:
            self._advancing = False

    def _send(self) -> bool:
        """Send the next closure, if there is one that can go."""
        if not self._waiting:
            return False
        closure = self._waiting[0]
        if closure.reads > self._turns.over or not all(value.done for value in closure.needs()):
            return False
        self._waiting.popleft()
        if closure.outcome is not None:
            return True
        self._turns.readable = max(self._turns.readable, closure.value.number - self._staleness)
        using = ExitStack()
        try:
            arguments = closure.filled()
            if self._passes is None:
                self._passes = Passes(self._strategy.cluster.coordinator, 1, self._strategy._seed)
            handle = using.enter_context(self._passes.using(closure.function))
            handle.begin_step([arguments], partial(self._answered, closure, using))
        except Exception as error:  # a result that it needs, or the cluster, has failed
            self._answered(closure, using, [], error)
        return True

    def _answered(
        self, closure: Scheduled, using: ExitStack, parts: list[Slots], error: BaseException | None
    ) -> None:
        """A closure has returned, or has failed for good."""
        using.__exit__(type(error) if error is not None else None, error, None)
        if error is None:
            closure.outcome = (parts[0][SLOT], None)
        elif isinstance(error, Exception):
            closure.outcome = (None, error)
        else:
            closure.outcome = (None, RunCancelled(f"closure {closure.value.label} was given up: {error!r}"))
        self._advance()

    def _end_turn(self) -> bool:
        """Let the next closure have its turn, if its outcome is known."""
        if not self._pending or self._pending[0].outcome is None:
            return False
        closure = self._pending.popleft()
        assert closure.outcome is not None  # mypy can't know that it is the same one
        result, error = closure.outcome
        number = closure.value.number
        if error is None and closure.variables:
            try:
                result, changes = result
                apply(closure.variables, changes, number + 1)
            except (ValueError, OverflowError, TypeError) as unfit:
                error = unfit
        if error is not None:
            closure.value._fail(error)
            self._error = error
            self._cancel(f"one before it failed: {type(error).__name__}: {error}", error)
        else:
            self._turns.over = number + 1
            closure.value._resolve(result)
        self._wake()
        return True

    def _cancel(self, reason: str, cause: Exception | None) -> None:
        """Let no closure have its turn that waits for it."""
        for closure in self._pending:
            cancelled = ClosureCancelled(f"closure {closure.value.label} was cancelled: {reason}")
            cancelled.__cause__ = cause
            closure.value._fail(cancelled)
        self._pending.clear()
        self._waiting.clear()
        self._turns.over = self._number
        self._wake()

    def _check_open(self) -> None:
        """Raise the error of the closure that failed, or that there is no coordinator any more."""
        self._surface()
        if self._closed:
            raise UsageError("this coordinator is closed: make another one for another strategy")

    def _surface(self) -> None:
        """Raise the error of the closure that failed, if it has not been raised yet."""
        if self._error is not None:
            error, self._error = self._error, None
            self._turns.look()
            raise error

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
