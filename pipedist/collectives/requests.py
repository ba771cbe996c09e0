"""Requests: the collective that a replica calls, its arguments, and the place of the call.

A coroutine that is not awaited does nothing. A collective would be skipped, and an assignment lost, in all replicas
alike, and only a wrong result would show it. So an async function that returns without awaiting its collectives
fails (`UnawaitedCollectives`).
"""

from __future__ import annotations

import inspect
import os.path
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

from pipedist.collectives.options import CommunicationOptions
from pipedist.core.types import Tree
from pipedist.reduction.partials import ReduceOp

if TYPE_CHECKING:
    from pipedist.collectives.folding import FusedUpdate

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
BROADCAST = "broadcast"
BARRIER = "barrier"
MERGE_CALL = "merge_call"


@dataclass(slots=True, eq=False)
class CallSite:
    """A place in user code: an offset in the bytecode of a function, converted to text on demand."""

    _code: CodeType
    _instruction: int

    def __str__(self) -> str:
        line = next(
            (line for lo, hi, line in self._code.co_lines() if lo <= self._instruction < hi and line),
            self._code.co_firstlineno,
        )
        return f"{os.path.basename(self._code.co_filename)}:{line} in {self._code.co_qualname}"


@dataclass(slots=True)
class CollectiveRequest:
    """One replica's call of one collective; `LocalGang.call` checks it."""

    kind: str
    where: CallSite
    tree: Tree = None  # for merge_call `(args, kwargs)`
    op: ReduceOp | str = ReduceOp.SUM
    axis: int = 0
    source: int = 0  # for broadcast: the replica whose tree all replicas receive
    # For merge_call: replica 0 calls it on all replicas' arguments, in its thread and context.
    function: Callable[..., Tree] | None = None
    # For merge_call the function's name; else the operation it belongs to ("assign_add of variable 'w'"), or
    # "". Equal in all replicas.
    label: str = ""
    # The number of the variable that the result is for, else 0. Equal in all replicas, unlike its name it is unique.
    target: int = 0
    options: CommunicationOptions | None = None  # None: those of the gang
    update: FusedUpdate | None = None  # for all_reduce: an assignment of the result


class UnawaitedCollectives:
    """The collectives that one replica's async function has requested, but not begun to await."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: list[tuple[Coroutine[Any, Any, Any], CollectiveRequest]] = []

    def add(
        self, request: CollectiveRequest, collective: Coroutine[Any, Any, Any]
    ) -> Coroutine[Any, Any, Any]:
        self._open = [each for each in self._open if _is_new(each[0])]  # limits its length
        self._open.append((collective, request))
        return collective

    def check(self) -> None:
        """Raise RuntimeError if the function has returned without awaiting one of them."""
        for request in self.drop():
            raise RuntimeError(
                f"{request.label or request.kind}, at {request.where}, was not awaited, so it had no effect: "
                "write `await` before it"
            )

    def drop(self) -> list[CollectiveRequest]:
        """Forget all of them; return those that were not awaited."""
        skipped = []
        for collective, request in self._open:
            if _is_new(collective):
                collective.close()  # Python would warn about it, with an internal name
                skipped.append(request)
        self._open = []
        return skipped


def _is_new(collective: Coroutine[Any, Any, Any]) -> bool:
    return inspect.getcoroutinestate(collective) == inspect.CORO_CREATED
