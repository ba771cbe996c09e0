"""Steps of a training loop, bound once: `Strategy.compile`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pipedist.core.misuse_hints import AsyncOnly
from pipedist.core.types import Tree
from pipedist.reduction.tree import ReduceOp, Reduction
from pipedist.strategy.passes import require_callable

Run = Callable[
    [Callable[..., Any], Sequence[Any], Mapping[str, Any], Reduction | None], Awaitable[Tree]
]  # calls a function with args and kwargs on every replica, and reduces the results


class CompiledStep(AsyncOnly):
    """A replica function, and the reduction of its results, as one call: `Strategy.compile`.

        step = strategy.compile(loss_fn, reduce="mean")
        loss = await step(x)

    Args:
        run: executes a step.
        fn, reduce, axis: as for `Strategy.compile`.

    Raises:
        TypeError: `fn` is not callable, or `axis` has another type.
        ValueError: the op is unknown, or an axis is given without an op.
    """

    def __init__(
        self,
        run: Run,
        fn: Callable[..., Any],
        reduce: ReduceOp | str | None,
        axis: int | Sequence[int] | None,
    ) -> None:
        require_callable(fn)
        if reduce is None and axis is not None:
            raise ValueError(f"axis is {axis!r}, but there is no reduction: add reduce='sum', or omit axis")
        self._run = run
        self._fn = fn
        self._reduction = None if reduce is None else Reduction.of(reduce, axis)

    async def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        """Call the function on every replica, and reduce the results.

        Args:
            args, kwargs: as for `Strategy.run`.

        Returns:
            The value of `Strategy.reduce`, with the same bits; without a reduction that of `Strategy.run`.

        Raises:
            TypeError, ValueError, OverflowError, CallError, RuntimeError: as `Strategy.run` and `Strategy.reduce`.
        """
        return await self._run(self._fn, args, kwargs, self._reduction)

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", type(self._fn).__qualname__)
        return f"<CompiledStep {name}>"
