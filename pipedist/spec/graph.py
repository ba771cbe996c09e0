"""Cycles in a graph of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

EdgeT = TypeVar("EdgeT")


def cycles(edges: Mapping[str, Sequence[tuple[str, EdgeT]]]) -> list[tuple[list[str], EdgeT]]:
    """Return cycles that share no node: enough to show where each knot is.

    Args:
        edges: for each node, the nodes it leads to, each with what makes it do so.

    Returns:
        The nodes of each cycle in order, and the edge that leads from the first to the second.
    """
    state: dict[str, str] = {}
    found: list[tuple[list[str], EdgeT]] = []
    for start in edges:
        if start in state:
            continue
        # Depth first, without recursion: a chain of stages may be longer than Python's stack.
        trail = [start]
        open_edges = [iter(edges[start])]
        state[start] = "open"
        while trail:
            step = next(open_edges[-1], None)
            if step is None:
                state[trail.pop()] = "done"
                open_edges.pop()
                continue
            node, _ = step
            if node not in state:
                state[node] = "open"
                trail.append(node)
                open_edges.append(iter(edges[node]))
            elif state[node] == "open":
                knot = trail[trail.index(node) :]
                following = knot[1] if len(knot) > 1 else node
                edge = next(why for other, why in edges[node] if other == following)
                found.append((knot, edge))
                for inner in knot:
                    state[inner] = "knotted"
    return found
