"""The fold of a built-in op, in the driver, with NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Unpack

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.reduction.partials import ReduceOp, dtype_of, is_blank, look_of, shape_of, without_rows
from pipedist.reduction.tree import FoldTree, Partial, Reduction, fold_all
from pipedist.runs.folds import (
    THREAD_BYTES,
    THREAD_OBJECTS,
    Fold,
    FoldOptions,
    in_thread_if,
)
from pipedist.spec import Per

if TYPE_CHECKING:
    from pipedist.outputs.parts import StageSink


def _bytes_of(steps: Sequence[Sequence[Partial]]) -> int:
    """Return about how many bytes some partials have, as if all were like the first one."""
    first = next((part for parts in steps for part in parts), None)
    if first is None:
        return 0
    each = sum(getattr(leaf, "nbytes", 0) for leaf in trees.flatten(first)[0])
    return each * sum(map(len, steps))


def push_steps(
    reduction: Reduction, tree: FoldTree[Partial], first: int, steps: Sequence[Sequence[Partial]]
) -> None:
    """Push the partials of steps `first`, `first + 1`, ..., each folded over its replicas; some may have none."""
    for index, parts in enumerate(steps, first):
        if parts:
            tree.push(index, parts[0] if len(parts) == 1 else fold_all(reduction.combine, parts))


WAITING_MAX = 4096
"""Number of different values that wait for the dtype of a leaf; then it is float64."""


class ReduceFold(Fold):
    """The fold of a built-in op, over partials made by the workers.

    If a leaf had no rows but those of `np.array([])` in a step or epoch, it has the dtype and shape of the first one
    that had rows. The values before that one wait for it; at the end, or from WAITING_MAX on, they are float64. An
    update or a `finish` can't wait, and gets float64.
    """

    def __init__(
        self,
        name: str,
        per: Per,
        reduction: Reduction,
        sink: StageSink | None,
        **options: Unpack[FoldOptions],
    ) -> None:
        super().__init__(name, per, sink, **options)
        self._reduction = reduction
        self._fits = sink is None or self._finish is not None
        """Whether a value like the first one with rows has been checked against the file format."""
        self._looks: dict[str, list[Any]] = {}  # dtype and shape of each leaf since it had rows, by path
        self._assumed: set[str] = set()  # leaves that count as float64, because they had no rows for too long
        self._waiting: list[list[Any]] = []  # [partial, number of scopes in a row], in order
        self._last: Partial | None = None  # the partial of the scope that ends
        self._taken = 0  # number of steps of the run
        self._begin()

    def _is_none(self, part: Partial) -> bool:
        skeleton, leaves = part
        return skeleton is None and not leaves

    def _begin(self) -> None:
        self._steps: FoldTree[Partial] = FoldTree(self._reduction.combine)
        self._index = 0
        self._kinds: set[tuple[str, Any]] = set()  # the dtypes and shapes of the scope
        self._first: tuple[str, Tree] | None = None  # place, dtypes and shapes of a part of the scope
        self._misfits = ""  # its place and that of a part of another dtype or shape
        self.misfit_at = None

    async def _take(self, steps: Sequence[Sequence[Partial]]) -> None:
        if not self._fits:
            self._check_first(steps)
        leaves = sum(len(part[1]) for parts in steps for part in parts)
        is_large = leaves > THREAD_OBJECTS or _bytes_of(steps) > THREAD_BYTES
        self._compare(steps)
        with self._located():
            await in_thread_if(is_large, push_steps, self._reduction, self._steps, self._index, steps)
        self._index += len(steps)
        self._taken += len(steps)

    async def _scope_value(self) -> Tree:
        last = self._steps.state()[-1:]
        is_large = any(len(partial[1]) > THREAD_OBJECTS for _, partial in last)
        with self._located():
            partial = await in_thread_if(is_large, self._steps.result)
        if self._per != "run":
            self._learn(partial)
            self._last = partial = self._typed(partial)
        value = await in_thread_if(is_large, self._reduction.finish, partial)
        self._begin()
        return value

    def _compare(self, steps: Sequence[Sequence[Partial]]) -> None:
        """Note the first part of the scope, and the first one of other dtypes or shapes, for errors.

        A misfit raises an error only when its part is combined with others, which may be many steps later.
        """
        kinds = {
            (leaf[0], () if type(leaf[2]) is float else shape_of(leaf[2]))
            for parts in steps
            for _, leaves in parts
            for leaf in leaves
            if leaf[1]
        }
        if self._misfits or kinds <= self._kinds:
            return
        self._kinds |= kinds
        for (step, replica), look in self._places(steps):
            place = f"step {step}, replica {replica}"
            self._first = self._first or (place, look)
            if look != self._first[1]:
                self._misfits, self.misfit_at = f"{place} does not fit {self._first[0]}: ", (step, replica)
                return

    @contextmanager
    def _located(self) -> Iterator[None]:
        """Begin errors of parts of different dtypes or shapes with their places."""
        try:
            yield
        except (TypeError, ValueError) as error:
            if not self._misfits:
                raise
            raise type(error)(f"{self._misfits}{error}") from error

    def _places(self, steps: Sequence[Sequence[Partial]]) -> Iterator[tuple[tuple[int, int], Tree]]:
        """Yield step and replica, structure, dtypes and shapes of the parts that have rows."""
        for step, parts in enumerate(steps, self._taken):
            for replica, (skeleton, leaves) in enumerate(parts):
                if all(leaf[1] for leaf in leaves):
                    yield (step, replica), [skeleton, *map(look_of, leaves)]

    def _learn(self, partial: Partial | None) -> None:
        """Note the dtypes and shapes of leaves that have rows for the first time."""
        if partial is None or (len(self._looks) >= len(partial[1]) and not self._assumed):
            return
        for path, part in zip(trees.paths(partial[0]), partial[1], strict=True):
            if is_blank(part):
                continue
            found = look_of(part)
            if self._looks.setdefault(path, found) != found and path in self._assumed:
                raise ValueError(
                    f"leaf {path!r} had no rows in more than {WAITING_MAX:,} values, which are written as float64, and "
                    f"now has dtype {dtype_of(found)}, shape {found[1]}. For a shard without rows return an empty "
                    "array of that dtype and shape, such as np.empty((0, 2), np.int64), not np.array([])"
                )

    def _without_look(self, partial: Partial | None) -> list[str]:
        """Return the paths of leaves without rows whose dtype is not known."""
        if partial is None or not any(map(is_blank, partial[1])) or self._reduction.op in _EXTREMES:
            return []
        each = zip(trees.paths(partial[0]), partial[1], strict=True)
        return [path for path, part in each if is_blank(part) and path not in self._looks]

    def _typed(self, partial: Partial | None) -> Partial | None:
        """Return a partial in which leaves without rows have their dtype and shape, where these are known."""
        if partial is None or not any(map(is_blank, partial[1])) or self._reduction.op in _EXTREMES:
            return partial
        each = zip(trees.paths(partial[0]), partial[1], strict=True)
        parts = [
            without_rows(self._reduction.op, self._looks[path])
            if is_blank(part) and path in self._looks
            else part
            for path, part in each
        ]
        return [partial[0], parts]

    async def _complete(self, value: Tree) -> None:
        partial, self._last = self._last, None
        is_read = (self.kept or self._sink is not None) and self._finish is None
        if not is_read or not (self._waiting or self._without_look(partial)):
            await super()._complete(value)
            return
        last = self._waiting[-1] if self._waiting else None
        if last is not None and _is_bare(partial) and _is_bare(last[0]) and last[0] == partial:
            last[1] += 1
        else:
            self._waiting.append([partial, 1])
        if len(self._waiting) > WAITING_MAX:
            unknown = {path for each, _ in self._waiting for path in self._without_look(each)}
            self._assumed |= unknown
            self._looks |= {path: look_of(_BARE_PART) for path in unknown}
        await self._settle(is_last=False)

    async def _settle(self, *, is_last: bool = True) -> None:
        while self._waiting and (is_last or not self._without_look(self._waiting[0][0])):
            partial, scopes = self._waiting.pop(0)
            value = self._reduction.finish(self._typed(partial))
            for _ in range(scopes):
                await super()._complete(value)

    def _scope_state(self) -> dict[str, Tree]:
        dtypes = [self._looks, sorted(self._assumed), self._waiting, self._taken]
        return {"index": self._index, "nodes": self._steps.state(), "dtypes": dtypes}

    async def _restore_scope(self, state: dict[str, Tree]) -> None:
        self._index = state["index"]
        self._steps.restore(state["nodes"])
        looks, assumed, waiting, self._taken = state["dtypes"]
        self._looks, self._assumed, self._waiting = (
            dict(looks),
            set(assumed),
            [list(each) for each in waiting],
        )

    def _check_first(self, steps: Sequence[Sequence[Partial]]) -> None:
        """Check early, with the value of the first call that has rows, whether the file can hold it."""
        has_rows = (part for parts in steps for part in parts if all(leaf[1] for leaf in part[1]))
        first = next(has_rows, None)
        if first is None or self._sink is None:
            return
        self._fits = True
        with suppress(OverflowError):  # later components may bring a sum back into the range of its dtype
            self._sink.check(self._reduction.finish(first))


_EXTREMES = (ReduceOp.MIN, ReduceOp.MAX)  # without rows they are None, of whatever dtype

_BARE_PART = ["f8", 0, 0.0]


def _is_bare(partial: Partial | None) -> bool:
    """Return whether no leaf of a partial has rows, a dtype or a shape."""
    return partial is None or all(map(is_blank, partial[1]))
