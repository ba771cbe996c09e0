"""What `repr` and notebooks show of a result, a plan, per-replica values and a ledger: short, escaped, bounded."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from pipedist import Ledger, PerReplica, Result
from pipedist.plan.picture import picture
from pipedist.runs.timings import Timings
from tests.report.jobs import MARKUP

CHARS_MAX = 40_000  # of any of these pages


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.cells: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        style = dict(attrs).get("style") or ""
        assert "color" not in style, "notebooks are light or dark"
        assert "background" not in style

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def shown(value: Any) -> Page:
    page = value._repr_html_()
    assert len(page) < CHARS_MAX
    found = Page(page)
    assert found.elements <= {"table", "tr", "th", "td", "p"}
    return found


def result(by_stage: dict[str, Any], name: str = "job", **more: Any) -> Result:
    return Result(name, "0" * 16, by_stage, {}, Ledger(8, 7, 1, 0), Timings({"total": 1.5}), **more)


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = {"a": tree}
    return tree


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError


def test_a_result_is_short_as_text() -> None:
    assert repr(result({"s": 1.0, "t": 2})) == (
        "<Result of job: s, t; 8 elements, 7 committed, 1 quarantined, 0 lost>"
    )
    assert len(repr(result({f"s{number}": np.zeros(10**6) for number in range(100)}))) < 150
    assert "no values" in repr(result({}))


def test_a_result_is_shown_with_values_ledger_and_timings() -> None:
    cells = shown(result({"s": 1.0, "t": {"a": [{"x": 1}, {"x": 2}]}}, notice="a notice")).cells
    assert {"s", "1.0", "committed", "7", "a notice", "total 1.5 s"} <= set(cells)


@pytest.mark.parametrize(
    "value",
    [
        MARKUP,
        {MARKUP: MARKUP},
        [{MARKUP: MARKUP}, {MARKUP: MARKUP}],
        np.array([MARKUP] * 3),
        np.array([MARKUP, None], dtype=object),
        b"<script>",
    ],
    ids=str,
)
def test_markup_in_values_is_text(value: Any) -> None:
    assert "script" not in shown(result({MARKUP: value}, name=MARKUP, notice=MARKUP)).elements
    assert "script" not in shown(PerReplica([value, {MARKUP: value}])).elements


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((10**6, 3)),
        [{"x": number, "y": "a" * 100} for number in range(10**5)],
        {str(number): number for number in range(10**5)},
        list(range(10**6)),
        "a" * 10**7,
        10**10_000,
        nested(2_000),
        {"a": [[{"b": (1, 2, {"c": np.arange(10**5)})}] * 100] * 100},
        Path("values.npy"),
        {"k" * 10**6: np.array(["a" * 10**6])},
        Unprintable(),
        np.array([Unprintable()], dtype=object),
        None,
        {},
    ],
    ids=lambda value: type(value).__name__,
)
def test_large_and_odd_values_are_bounded(value: Any) -> None:
    shown(result({"s": value}))
    shown(PerReplica([value] * 3))


def test_only_the_first_leaves_are_visited() -> None:
    class Counted(list[Any]):
        visited = 0

        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                Counted.visited += 1
                yield item

    shown(PerReplica([{"a": Counted(range(10**4))}]))
    assert 0 < Counted.visited <= 21


def test_many_stages_and_replicas_are_bounded() -> None:
    assert "... 980 more" in shown(result({f"s{number}": number for number in range(1_000)})).cells
    assert "... 980 more replicas" in shown(PerReplica(range(1_000))).cells


def test_records_are_shown_as_a_table() -> None:
    cells = shown(result({"t": [{"x": number, "y": "b"} for number in range(50)]})).cells
    assert "50 records, below" in cells
    assert "... 30 more" in cells
    assert "19" in cells
    assert "20" not in cells


def test_per_replica_has_a_column_per_replica() -> None:
    cells = shown(PerReplica([{"a": 1, "b": np.arange(3)}, {"a": 2}])).cells
    assert cells == ["PerReplica", "replica 0", "replica 1", "a", "1", "2", "b", "[0 1 2]"]


def node(name: str, kind: str, *lines: str) -> dict[str, Any]:
    return {"name": name, "kind": kind, "phase": 0, "lines": [name, *lines]}


def edge(source: str, target: str, kind: str = "data") -> dict[str, Any]:
    return {"source": source, "target": target, "kind": kind}


def drawn(graph: dict[str, Any]) -> ElementTree.Element:
    text = picture(graph)
    assert len(text) < 400_000
    svg = ElementTree.fromstring(text)
    names = {each.tag.rpartition("}")[2] for each in svg.iter()}
    assert names <= {"svg", "rect", "path", "text"}
    assert not [each for each in svg.iter() if {"style", "id", "onload", "href"} & set(each.attrib)]
    return svg


def test_a_plan_is_drawn_from_left_to_right() -> None:
    svg = drawn(
        {
            "nodes": [
                node("d", "dataset"),
                node("y", "run", MARKUP, "a\x00b\x1b\ud800"),
                node("w", "update"),
            ],
            "edges": [edge("d", "y"), edge("y", "w"), edge("w", "y", "state"), edge("gone", "y")],
        }
    )
    boxes = {
        each.attrib["class"]: each
        for each in svg.iter()
        if float(each.get("height", 0)) > 20 and each is not svg
    }
    assert (
        float(boxes["plan-dataset"].attrib["x"])
        < float(boxes["plan-run"].attrib["x"])
        < float(boxes["plan-update"].attrib["x"])
    )
    texts = [each.text or "" for each in svg.iter() if each.tag.endswith("text")]
    assert MARKUP in texts, "markup is text"
    assert {"state", "replica function", "update"} <= set(texts)


def test_a_plan_with_a_cycle_and_a_large_one_are_drawn() -> None:
    names = [f"s{number}" for number in range(1_000)]
    circle = [edge(a, b) for a, b in zip(names, [*names[1:], names[0]], strict=True)]
    svg = drawn({"nodes": [node(name, "run") for name in names], "edges": circle})
    assert "... 800 more" in [each.text for each in svg.iter() if each.tag.endswith("text")]
    small = [edge("s0", "s1"), edge("s1", "s0"), edge("s1", "s1")]
    drawn({"nodes": [node("s0", "run"), node("s1", "fold")], "edges": small})
    drawn({"nodes": [], "edges": []})
