"""The page of figures for users: one table, one chart, and the figures of the last release.

Only ratios within one run are comparable, so a row has the ratio to the best peer and to the limit of the machine, and
the own figure relative to that of the last release (`benchmarks/release.json`), if that is from the same machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.goals import Medians, best_peer
from benchmarks.limits import FOR_WORKLOAD
from benchmarks.report import Record, collect, markdown, medians_of, number, table, write_section
from benchmarks.systems import HOME, SUBJECT
from benchmarks.workloads import WORKLOADS

RELEASE = HOME / "release.json"
_DOCS = HOME.parent / "docs"
USER_PAGE, METHOD_PAGE = _DOCS / "benchmarks.md", _DOCS / "contributing" / "benchmarks.md"
CHART = _DOCS / "pictures" / "benchmarks.svg"
NOT_SHOWN = ("W1j", "W1b", "W3c", "W6", "MEM")
"""Workloads that no other system has in the same form."""

_AT = {"W1s": "W1"}  # workload of the peers, if it is another one
_ROW, _BAR, _LEFT, _WIDTH, _RIGHT = 38, 13, 16, 346, 48  # pixels; narrow, so that a phone shows it
_LOW, _HIGH = 0.25, 64.0  # ratios at both ends of the chart, which is logarithmic


@dataclass(frozen=True)
class Release:
    """Medians of a release, by workload, and the machine that they are from."""

    name: str
    date: str
    commit: str
    machine: str
    medians: Mapping[str, float]

    @classmethod
    def read(cls, path: Path = RELEASE) -> Release:
        return cls(**json.loads(path.read_text()))

    def is_comparable(self, environment: Mapping[str, str]) -> bool:
        """Return whether a run is of another commit on the same machine."""
        return environment["machine"] == self.machine and environment["commit"] != self.commit

    def write(self, path: Path = RELEASE) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True)
class Row:
    """One workload on the page; ratios above 1 are better, None: unknown."""

    title: str
    value: float
    unit: str
    peer: str
    peer_value: float
    to_peer: float
    to_limit: float | None
    to_release: float | None


def publish(records: Sequence[Record], *, release: str = "") -> None:
    """Write the pages and the chart; with `release`, keep the own figures as those of this release.

    Args:
        records: the lines of a run.
        release: name of the release that the next runs are compared with; "": keep the last one.
    """
    medians = medians_of(collect(records))
    environment = next((record["environment"] for record in records if "environment" in record), {})
    last = Release.read()
    own = {name: value for (system, name), value in medians.items() if system == SUBJECT}
    if release:
        Release(release, environment["date"], environment["commit"], environment["machine"], own).write()
    write_section(METHOD_PAGE, markdown(records))
    write_user_page(medians, environment, last if last.is_comparable(environment) else None)


def write_user_page(medians: Medians, environment: Mapping[str, str], last: Release | None) -> None:
    """Write the table and the chart for users; `last`: the release that is compared with."""
    found = rows(medians, last)
    labels = {"date": "", "machine": "", "system": "", "python": "Python ", "commit": "commit ", "run": ""}
    about = "; ".join(label + str(environment[key]) for key, label in labels.items() if key in environment)
    write_section(USER_PAGE, f"{as_table(found, last)}\n\n{about}.\n")
    CHART.write_text(as_chart(found))


def rows(medians: Medians, release: Release | None) -> list[Row]:
    """Return the rows of the workloads that were measured beside peers."""
    found = []
    for name, work in WORKLOADS.items():
        value, best = medians.get((SUBJECT, name)), best_peer(medians, _AT.get(name, name))
        if name in NOT_SHOWN or value is None or best is None:
            continue

        def ratio(other: float | None, value: float = value, *, higher: bool = work.higher) -> float | None:
            return None if not other else value / other if higher else other / value

        limit = medians.get((f"limit {FOR_WORKLOAD.get(name, ('',))[-1]}", ""))
        before = None if release is None else release.medians.get(name)
        to_peer = ratio(best[1]) or 0.0
        title = f"{name}: {work.title}"
        found.append(Row(title, value, work.unit, *best, to_peer, ratio(limit), ratio(before)))
    return found


def as_table(found: Sequence[Row], release: Release | None) -> str:
    """Return the table of the page."""
    head = ["workload", "pipedist", "best peer", "times the peer", "of the limit"]
    lines = [head if release is None else [*head, f"times {release.name}"]]
    for row in found:
        cells = [
            row.title,
            f"{number(row.value)} {row.unit}",
            f"{row.peer}: {number(row.peer_value)}",
            f"{row.to_peer:.2f}",
            "" if row.to_limit is None else f"{row.to_limit:.2f}",
        ]
        if release is not None:
            cells.append("" if row.to_release is None else f"{row.to_release:.2f}")
        lines.append(cells)
    return table(lines)


def as_chart(found: Sequence[Row]) -> str:
    """Return the chart of the page, an SVG: how many times the best peer, on a logarithmic scale."""
    height = _ROW * len(found) + 46

    def place(ratio: float) -> float:
        share = math.log(min(max(ratio, _LOW), _HIGH) / _LOW) / math.log(_HIGH / _LOW)
        return _LEFT + share * _WIDTH

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + _RIGHT} {height}" role="img" '
        'font-family="sans-serif" font-size="12">',
        "<title>Speed of pipedist as a multiple of the best peer</title>",
        # The reader chooses a light or dark page, which a picture does not know: grey is readable on both.
        "<style>text{fill:#7a828c}.line{stroke:#8884}.one{stroke:#888}.better{fill:#5c6bc0}.slower{fill:#e08214}</style>",
    ]
    for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64):
        x, kind = place(tick), "one" if tick == 1 else "line"
        parts.append(
            f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{height - 36}"/>'
            f'<text x="{x:.1f}" y="{height - 22}" text-anchor="middle">{tick:g}</text>'
        )
    for at, row in enumerate(found):
        y, x = 10 + _ROW * at, place(row.to_peer)
        left, width = min(x, place(1)), abs(x - place(1))
        kind = "better" if row.to_peer >= 1 else "slower"
        parts.append(
            f'<text x="{_LEFT}" y="{y + 10}">{escape(row.title)}</text>'
            f'<rect class="{kind}" x="{left:.1f}" y="{y + 15}" width="{width:.1f}" height="{_BAR}"/>'
            f'<text x="{max(x, place(1)) + 6:.1f}" y="{y + 26}">{row.to_peer:.1f}</text>'
        )
    parts.append(f'<text x="{place(4):.1f}" y="{height - 5}" text-anchor="middle">times the best peer</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
