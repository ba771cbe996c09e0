"""Draw the graph of a plan as SVG, for reports and notebooks.

The picture has no script, style or id. Its colours are readable on light and on dark pages; a page with a style sheet
can replace them: the shapes have the class `plan-KIND`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final
from unicodedata import east_asian_width

from pipedist.core.names import printable

Graph = dict[str, list[dict[str, Any]]]  # `nodes` and `edges`, as `Plan.graph` describes them

NODES_MAX: Final = 200  # a larger graph is cut
LINE_CHARS_MAX: Final = 48  # of a line in a node
_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "dataset": ("dataset", "#4aa3b8"),
    "run": ("replica function", "#4a86cc"),
    "fold": ("reduce or gather", "#2e9e73"),
    "update": ("update", "#b065b5"),
    "output": ("output", "#a08365"),
}
_LETTER, _LINE, _GAP_X, _GAP_Y = 7.1, 16, 54, 22  # in pixels, of text of 12 px, of which some is bold


class _Node:
    """A node and its place."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        self.name: str = node["name"]
        self.kind: str = node["kind"]
        self.lines = [_line(line) for line in node["lines"]]
        self.width = max(map(_width, self.lines)) + 22
        self.height = 12 + len(self.lines) * _LINE
        self.column = 0
        self.row = 0.0
        self.x = self.y = 0.0


def _line(text: str) -> str:
    shown = printable(text[: LINE_CHARS_MAX + 1])
    return shown if len(text) <= LINE_CHARS_MAX else shown[:LINE_CHARS_MAX] + "\u2026"


def _width(text: str) -> float:
    return _LETTER * sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def picture(graph: Graph) -> str:
    """Return an SVG element: datasets on the left, and each stage right of the stages that it reads."""
    nodes = {node["name"]: _Node(node) for node in graph["nodes"][:NODES_MAX]}
    edges = [
        (nodes[edge["source"]], nodes[edge["target"]], str(edge["kind"]))
        for edge in graph["edges"]
        if edge["source"] in nodes and edge["target"] in nodes
    ]
    width, height = _place(list(nodes.values()), edges)
    parts = [part for edge in edges for part in _arrow(*edge)]
    parts += [part for node in nodes.values() for part in _box(node)]
    low = max([height, *(_lowest(*edge) for edge in edges)])
    legend_width, legend = _legend({node.kind for node in nodes.values()}, low + 24)
    cut = len(graph["nodes"]) - len(nodes)
    if cut:
        legend.append(_text(legend_width + 8, low + 24, f"... {cut:,} more", "start"))
    width, height = max(width, legend_width + 140 * bool(cut)), low + 34
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="the plan of the run" '
        f'font-family="system-ui, sans-serif" font-size="12">{"".join([*parts, *legend])}</svg>'
    )


_Edge = tuple[_Node, _Node, str]


def _place(nodes: Sequence[_Node], edges: Sequence[_Edge]) -> tuple[float, float]:
    """Give each node its place, and return the width and height of all."""
    forward = [(a, b) for a, b, kind in edges if kind != "state" and a is not b]
    for _ in nodes:  # the longest path to a node decides on its column; a cycle ends with the rounds
        late = [(a, b) for a, b in forward if b.column <= a.column < len(nodes)]
        for a, b in late:
            b.column = max(b.column, a.column + 1)
        if not late:
            break
    x, height = 8.0, 0.0
    columns = [list(found) for _, found in groupby(sorted(nodes, key=lambda n: n.column), lambda n: n.column)]
    for column in columns:  # in the order of what they follow, so that few arrows cross
        for node in column:
            before = [a.row for a, b in forward if b is node]
            node.row = sum(before) / len(before) if before else 0.0
        column.sort(key=lambda node: node.row)
        for index, node in enumerate(column):
            node.row = index - (len(column) - 1) / 2
        height = max(height, sum(node.height + _GAP_Y for node in column))
    for column in columns:
        widest = max(node.width for node in column)
        y = (height - sum(node.height + _GAP_Y for node in column) + _GAP_Y) / 2 + 4
        for node in column:
            node.width, node.x, node.y = widest, x, y
            y += node.height + _GAP_Y
        x += widest + _GAP_X
    return x - _GAP_X + 8, height


def _is_back(source: _Node, target: _Node) -> bool:
    return target.x <= source.x


def _lowest(source: _Node, target: _Node, _kind: str) -> float:
    return max(source.y + source.height, target.y + target.height) + 28 if _is_back(source, target) else 0.0


def _arrow(source: _Node, target: _Node, kind: str) -> list[str]:
    dashed = "" if kind in ("data", "stream") else ' stroke-dasharray="4 3"'
    if _is_back(source, target):  # below both
        x1, y1 = source.x + source.width / 2, source.y + source.height
        x2, y2 = target.x + target.width / 2, target.y + target.height
        low = _lowest(source, target, kind)
        path = f"M{x1:.1f} {y1:.1f} C{x1:.1f} {low:.1f} {x2:.1f} {low:.1f} {x2:.1f} {y2 + 7:.1f}"
        tip = f"M{x2:.1f} {y2 + 1:.1f} l4 7 h-8 z"
        label = _text((x1 + x2) / 2, low - 2, kind, "middle", dim=True)
    else:
        x1, y1 = source.x + source.width, source.y + source.height / 2
        x2, y2 = target.x, target.y + target.height / 2
        bend = max(28.0, (x2 - x1) / 2)
        path = f"M{x1:.1f} {y1:.1f} C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2 - 7:.1f} {y2:.1f}"
        tip = f"M{x2 - 1:.1f} {y2:.1f} l-7 -4 v8 z"
        label = _text((x1 + x2) / 2, (y1 + y2) / 2 - 6, kind, "middle", dim=True)
    line = f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity="0.6" stroke-width="1.3"{dashed}/>'
    return [
        line,
        f'<path d="{tip}" fill="currentColor" fill-opacity="0.6"/>',
        *([label] if kind != "data" else []),
    ]


def _box(node: _Node) -> list[str]:
    round_ = 14 if node.kind == "fold" else 5
    middle = node.x + node.width / 2
    return [
        f'<rect x="{node.x:.1f}" y="{node.y:.1f}" width="{node.width:.1f}" height="{node.height}" rx="{round_}" '
        f'fill="none" stroke="{_KINDS[node.kind][1]}" stroke-width="1.8" class="plan-{node.kind}"/>',
        *(
            _text(middle, node.y + 18 + index * _LINE, line, "middle", bold=not index, dim=bool(index))
            for index, line in enumerate(node.lines)
        ),
    ]


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False, dim: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    opacity = ' fill-opacity="0.7"' if dim else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    from html import escape  # its table of names takes long to load

    return f'<text {place} fill="currentColor"{weight}{opacity}>{escape(text)}</text>'


def _legend(kinds: set[str], y: float) -> tuple[float, list[str]]:
    """Return a line that names the kinds of boxes, and its width."""
    x, parts = 8.0, []
    for kind, (name, colour) in _KINDS.items():
        if kind in kinds:
            square = f'x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2"'
            parts.append(
                f'<rect {square} fill="none" stroke="{colour}" stroke-width="1.8" class="plan-{kind}"/>'
            )
            parts.append(_text(x + 16, y, name, "start", dim=True))
            x += 30 + 0.9 * _width(name)
    return x, parts
