"""Schedules closures on the workers of a parameter server (tf.distribute's ClusterCoordinator).

Theory of operation. A closure is a call of an ordinary pass: any free worker executes it, and another
worker executes it again if that one dies. Closures are sent in the order in which they were scheduled, and
run concurrently; but they COMMIT in that order, each once, however often it was retried. When a closure
commits, its changes to variables are applied and its RemoteValue gets its result. Thus the values of
variables and results follow from the program alone, not from the number, speed or failures of workers.

If a closure fails, the closures before it have committed, and the later ones are cancelled, executed or not.
The error is raised once more, by `join` or by the next `schedule`; then the coordinator can be used again.

All of it happens in the event loop, in `_advance`, which never waits: there are no tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import anyio
import anyio.lowlevel

from pipedist.coordinator import Slots
from pipedist.core import trees
from pipedist.core.arguments import check_int
from pipedist.core.misuse_hints import AsyncOnly
from pipedist.core.remote_errors import exception_text
from pipedist.core.types import Tree
from pipedist.datasets.logical import Dataset
from pipedist.errors import RunCancelled, UsageError
from pipedist.strategy.closures import ClosureBuilder, ClosureCancelled, RemoteValue, ScheduledClosure
from pipedist.strategy.context import require_cross_replica
from pipedist.strategy.parameter_server import ParameterServerStrategy, apply
from pipedist.strategy.passes import SLOT, FunctionPasses
from pipedist.strategy.per_worker import PerWorkerDataset, per_worker_datasets

CLOSURES_MAX: Final = 256  # the length of tf.distribute's queue

STALENESS: Final = 8


class ClusterCoordinator(AsyncOnly):
    """Schedules functions on the workers (tf: ClusterCoordinator).

    Leaving the `async with` block joins. Without the block, call `join` at the end: otherwise errors are
    not raised.

    Args:
        strategy: a ParameterServerStrategy without another coordinator.
        staleness: number of commits that a closure with variables may miss, at least 0. Closure number k
            reads the variables as they are after closure k - staleness - 1 has committed, or a later
            version that the program has joined or fetched before. It is sent after that commit, so at most
            staleness + 1 closures run at a time: choose at least the number of workers. A variable keeps at
            most staleness + 2 values.
        closures_max: limit of scheduled closures that have not committed; `schedule` waits at the limit.

    Raises:
        TypeError: `strategy` is not a ParameterServerStrategy, or a number is not an int.
        ValueError: a number is out of range.
        UsageError: the strategy has another coordinator.

    Example:
        async with pipedist.ClusterCoordinator(strategy) as coordinator:
            values = [await coordinator.schedule(step, args=(number,)) for number in range(100)]
            await coordinator.join()
            print(await values[0])
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
        strategy._attach_coordinator()
        self._strategy = strategy
        self._order = strategy._order
        self._passes: FunctionPasses | None = None
        self._scheduling = anyio.Lock()
        self._changed = anyio.Event()
        self._number = 0  # number of the next closure
        self._dataset_reads = 0  # number of closures that have read per-worker datasets
        self._uncommitted: deque[ScheduledClosure] = deque()  # in order; `_unsent` are the last of them
        self._unsent: deque[ScheduledClosure] = deque()
        self._error: Exception | None = None  # error of the closure that failed, until it is raised
        self._advancing = False
        self._closed = False

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy whose workers execute the closures."""
        return self._strategy

    async def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Schedule a call of `fn` on a worker, and return the future of its result.

        It waits only while `closures_max` closures have not committed, and for the elements of per-worker
        datasets.

        Args:
            fn: a function, sync or async. It can read and assign variables that it captures.
            args, kwargs: its arguments, as they are now. A RemoteValue is replaced by its result, the
                iterator of a per-worker dataset by the next element; variables can be read and assigned.

        Raises:
            TypeError: `fn` is not callable, or `kwargs` is not a mapping.
            ValueError: `args` is neither tuple nor list, or an argument is a variable or a RemoteValue of
                another strategy.
            UsageError: `fn` can't be sent; or the coordinator is closed.
            RuntimeError: called inside a replica function.
            Exception: the error of an earlier closure, once; then this one is not scheduled.
        """
        require_cross_replica("ClusterCoordinator.schedule")
        if not callable(fn):
            raise TypeError(
                f"schedule needs a function, but {fn!r} of type {type(fn).__name__} can't be called"
            )
        async with self._scheduling:
            await anyio.lowlevel.checkpoint()
            while len(self._uncommitted) >= self._closures_max:
                await self._changed.wait()
            self._check_open()
            [arguments] = self._strategy._arguments(args, kwargs)
            parts = ClosureBuilder(fn, arguments, self._order)
            if parts.iterators:
                worker = self._dataset_reads % self._strategy.workers
                await parts.until_ready(worker)
                self._check_open()  # it may have failed, or been closed, meanwhile
                parts.take(worker)
                self._dataset_reads += 1
            reads = self._number - self._staleness if parts.variables else 0
            closure = parts.scheduled(self._number, max(self._order.observed, reads))
            self._number += 1
            self._uncommitted.append(closure)
            self._unsent.append(closure)
            self._advance()
        return closure.value

    async def join(self) -> None:
        """Wait until all closures have committed.

        Raises:
            Exception: the error of the first closure that failed, once; a CallError if its function raised,
                ClosureCancelled if the coordinator is closed meanwhile.
        """
        await anyio.lowlevel.checkpoint()
        last = self._uncommitted[-1].value if self._uncommitted else None
        while self._uncommitted:
            await self._changed.wait()
        self._order.observe_latest()
        self._raise_failure()
        if last is not None and self._closed:
            last._outcome()  # raises ClosureCancelled unless it has committed

    def done(self) -> bool:
        """Return whether all closures have committed, failed or were cancelled; raises no error."""
        return not self._uncommitted

    async def fetch(self, value: Tree) -> Tree:
        """Wait for the RemoteValues of a tree, and return the tree with their results.

        Args:
            value: any tree; other leaves are returned unchanged.

        Raises:
            Exception: as `RemoteValue.fetch` raises it, for the closure that was scheduled first.
        """
        remote = [leaf for leaf in trees.flatten(value)[0] if isinstance(leaf, RemoteValue)]
        for each in sorted(remote, key=lambda each: each.number):
            await each.fetch()
        return trees.tree_map(lambda leaf: leaf._outcome() if isinstance(leaf, RemoteValue) else leaf, value)

    def create_per_worker_dataset(
        self, dataset_or_dataset_fn: Dataset | Callable[..., Any]
    ) -> PerWorkerDataset:
        """Return a dataset for closures, with an iterator for each logical worker.

            batches = iter(coordinator.create_per_worker_dataset(dataset_fn))
            await coordinator.schedule(step, args=(batches,))  # step gets an element

        Args:
            dataset_or_dataset_fn: a Dataset or a distributed dataset of the strategy, which every worker
                reads as a whole: with W workers each element is read W times. Or a function that returns
                either, called once per worker: without arguments, or with `InputContext(W, worker, 1)` if
                it has a parameter, to read only a part of the elements.

        Raises:
            ValueError: it is none of these. Exceptions of the function are passed on.
        """
        return PerWorkerDataset(per_worker_datasets(dataset_or_dataset_fn, self._strategy.workers))

    async def aclose(self) -> None:
        """Cancel the closures that have not committed, and unload the functions from the workers."""
        self._closed = True
        self._cancel("the coordinator was closed", None)
        if self._passes is not None:
            self._passes.close()
            self._passes = None
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> ClusterCoordinator:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                await self.join()
        finally:
            await self.aclose()

    # -- order of commits -------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self._advancing:  # called from `_send_next`: the loop below sees the result
            return
        self._advancing = True
        try:
            while self._commit_next() or self._send_next():
                pass
        finally:
            self._advancing = False

    def _send_next(self) -> bool:
        """Send the next closure, if there is one and its inputs are available."""
        if not self._unsent:
            return False
        closure = self._unsent[0]
        if closure.reads > self._order.committed or not all(value.done for value in closure.needs()):
            return False
        self._unsent.popleft()
        if closure.outcome is not None:
            return True
        self._order.oldest_readable = max(self._order.oldest_readable, closure.value.number - self._staleness)
        using = ExitStack()
        try:
            arguments = closure.filled()
            if self._passes is None:
                self._passes = FunctionPasses(self._strategy.cluster.coordinator, 1, self._strategy._seed)
            handle = using.enter_context(self._passes.using(closure.function))
            handle.begin_step([arguments], partial(self._on_result, closure, using))
        except Exception as error:  # another closure whose result it needs, or the cluster, has failed
            self._on_result(closure, using, [], error)
        return True

    def _on_result(
        self, closure: ScheduledClosure, using: ExitStack, parts: list[Slots], error: BaseException | None
    ) -> None:
        using.__exit__(type(error) if error is not None else None, error, None)
        if error is not None and not isinstance(error, Exception):
            error = RunCancelled(f"closure {closure.value.label} was abandoned: {error!r}")
        closure.outcome = (parts[0][SLOT], None) if error is None else (None, error)
        self._advance()

    def _commit_next(self) -> bool:
        """Commit the next closure, if its outcome is known."""
        if not self._uncommitted or self._uncommitted[0].outcome is None:
            return False
        closure = self._uncommitted.popleft()
        assert closure.outcome is not None  # for mypy: it was checked above
        result, error = closure.outcome
        number = closure.value.number
        if error is None and closure.variables:
            try:
                result, changes = result
                apply(closure.variables, changes, number + 1)
            except (ValueError, OverflowError, TypeError) as unfit:
                error = unfit
        if error is not None:
            closure.value._set(None, error)
            self._error = error
            self._cancel(f"an earlier one failed: {type(error).__name__}: {exception_text(error)}", error)
        else:
            self._order.committed = number + 1
            closure.value._set(result)
        self._wake()
        return True

    def _cancel(self, reason: str, cause: Exception | None) -> None:
        for closure in self._uncommitted:
            cancelled = ClosureCancelled(f"closure {closure.value.label} was cancelled: {reason}")
            cancelled.__cause__ = cause
            closure.value._set(None, cancelled)
        self._uncommitted.clear()
        self._unsent.clear()
        self._order.committed = self._number
        self._wake()

    def _check_open(self) -> None:
        """Raise the error of a closure that failed, or UsageError if the coordinator is closed."""
        self._raise_failure()
        if self._closed:
            raise UsageError("this coordinator is closed. Create another one, for another strategy")

    def _raise_failure(self) -> None:
        """Raise the error of the closure that failed, unless it was raised already."""
        if self._error is not None:
            error, self._error = self._error, None
            self._order.observe_latest()
            raise error

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
