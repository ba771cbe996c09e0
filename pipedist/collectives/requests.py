"""What one replica asks for when it calls a collective, and where it does so."""

from __future__ import annotations

import os.path
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType

from pipedist.collectives.options import CommunicationOptions
from pipedist.partials import ReduceOp
from pipedist.program import Tree

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
BROADCAST = "broadcast"
BARRIER = "barrier"
MERGE_CALL = "merge_call"


class CallSite:
    """A place in user code; its text is made only where somebody reads it.

    Args:
        code: the function.
        instruction: offset of the call in its bytecode.
    """

    __slots__ = ("_code", "_instruction")

    def __init__(self, code: CodeType, instruction: int) -> None:
        self._code = code
        self._instruction = instruction

    def __str__(self) -> str:
        line = next(
            (line for lo, hi, line in self._code.co_lines() if lo <= self._instruction < hi and line),
            self._code.co_firstlineno,
        )
        return f"{os.path.basename(self._code.co_filename)}:{line} in {self._code.co_qualname}"


def caller(depth: int = 1) -> CallSite:
    """Return the place of a call that is going on.

    Args:
        depth: 0: the line that calls `caller`; 1: whoever called that function; and so on.
    """
    frame = sys._getframe(depth + 1)
    return CallSite(frame.f_code, frame.f_lasti)


@dataclass(slots=True)
class CollectiveRequest:
    """One replica's call of one collective.

    Make it with the function of that name below; it is not checked here, but by `LocalGang.call`.

    Args:
        kind: the collective's name.
        where: of the call.
        tree: what the replica brings: a tree; of merge_call: `(args, kwargs)`.
        op: of all_reduce.
        axis: of all_gather.
        source: of broadcast: the replica whose tree all get.
        function: of merge_call: called once, for replica 0, as `function(*args, **kwargs)` with
            trees of PerReplica leaves; its context is its own affair.
        label: of merge_call: the function's name; of others what it is made for ("assign_add of variable
            'w'"), or "". The same in all replicas.
        options: of this call; None: those of the gang.
    """

    kind: str
    where: CallSite
    tree: Tree = None
    op: ReduceOp | str = ReduceOp.SUM
    axis: int = 0
    source: int = 0
    function: Callable[..., Tree] | None = None
    label: str = ""
    options: CommunicationOptions | None = None


def all_reduce(
    op: ReduceOp | str, tree: Tree, options: CommunicationOptions | None, where: CallSite
) -> CollectiveRequest:
    """Ask for the fold of all replicas' trees, element by element, in every replica."""
    return CollectiveRequest(ALL_REDUCE, where, tree, op, options=options)


def all_gather(
    tree: Tree, axis: int, options: CommunicationOptions | None, where: CallSite
) -> CollectiveRequest:
    """Ask for all replicas' arrays, put end to end along `axis`, in every replica."""
    return CollectiveRequest(ALL_GATHER, where, tree, axis=axis, options=options)


def broadcast(
    tree: Tree, source: int, options: CommunicationOptions | None, where: CallSite
) -> CollectiveRequest:
    """Ask for the tree of replica `source`, in every replica."""
    return CollectiveRequest(BROADCAST, where, tree, source=source, options=options)


def barrier(options: CommunicationOptions | None, where: CallSite) -> CollectiveRequest:
    """Ask to go on when every replica has come here."""
    return CollectiveRequest(BARRIER, where, options=options)


def merge_call(
    function: Callable[..., Tree],
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    options: CommunicationOptions | None,
    where: CallSite,
) -> CollectiveRequest:
    """Ask for one call of `function` on all replicas' arguments; each gets its part of what it returns.

    Replica 0's `function` runs, in the thread and the context of replica 0.
    """
    label = str(getattr(function, "__qualname__", None) or type(function).__qualname__)
    return CollectiveRequest(
        MERGE_CALL, where, (args, kwargs), function=function, label=label, options=options
    )
