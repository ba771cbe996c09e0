"""From the lines of a run to its tables."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.goals import GOALS, best_peer
from benchmarks.limits import FOR_WORKLOAD, LIMITS
from benchmarks.systems import SUBJECT
from benchmarks.workloads import WORKLOADS

BEGIN = "<!-- measured: begin (written by `python -m benchmarks.run --write-docs`) -->"
END = "<!-- measured: end -->"

Record = Mapping[str, Any]
"""One line of a run: {"system" or "limit", "workload", "value", "outcome", "detail", ...}."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All values of one system in one workload.

    Args:
        values: one a round.
        outcomes: what was the matter in rounds without a value.
    """

    values: tuple[float, ...]
    outcomes: tuple[str, ...]
    details: tuple[Mapping[str, Any], ...]

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self.values)


Key = tuple[str, str]


def collect(records: Sequence[Record]) -> dict[Key, Figures]:
    """Return the figures by (system, workload), limits by ("limit NAME", "")."""
    values: dict[Key, list[float]] = defaultdict(list)
    outcomes: dict[Key, list[str]] = defaultdict(list)
    details: dict[Key, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if "environment" in record:
            continue
        key = (
            (f"limit {record['limit']}", "") if "limit" in record else (record["system"], record["workload"])
        )
        if record["value"] is None:
            outcomes[key].append(record["outcome"])
        else:
            values[key].append(record["value"])
            details[key].append(record.get("detail", {}))
    return {
        key: Figures(tuple(values[key]), tuple(outcomes[key]), tuple(details[key]))
        for key in {**values, **outcomes}
    }


def medians_of(figures: Mapping[Key, Figures]) -> dict[Key, float]:
    """Return the medians; a system that failed in any round has none."""
    return {key: f.median for key, f in figures.items() if f.values and not f.outcomes}


def read(path: Path) -> list[Record]:
    """Return the lines of a run."""
    with path.open() as lines:
        return [json.loads(line) for line in lines]


def markdown(records: Sequence[Record]) -> str:
    """Return the whole report."""
    figures = collect(records)
    medians = medians_of(figures)
    environment: Record = next((r["environment"] for r in records if "environment" in r), {})
    parts = [
        _environment(environment),
        "### Goals\n\n" + _goals(figures, medians),
        "### All systems\n\n" + _systems(figures, medians),
        "### Limits of the machine\n\n" + _limits(figures),
    ]
    growth = _growth(figures)
    if growth:
        parts.append("### W6 in detail\n\n" + growth)
    return "\n\n".join(parts) + "\n"


def _environment(environment: Mapping[str, Any]) -> str:
    lines = [f"- {name}: {value}" for name, value in environment.items() if name != "versions"]
    versions = environment.get("versions", {})
    lines.append("- versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    return "\n".join(lines)


def _goals(figures: Mapping[Key, Figures], medians: Mapping[Key, float]) -> str:
    rows = [("workload", "pipedist", "best peer", "ratio", "of the limit", "goal", "that is", "met")]
    seen: set[str] = set()
    measured = {workload for _, workload in figures}
    for goal in (g for g in GOALS if g.workload in measured):
        work = WORKLOADS[goal.workload]
        value = medians.get((SUBJECT, goal.workload))
        bound, met = goal.bound(medians), goal.is_met(medians)
        first = goal.workload not in seen
        seen.add(goal.workload)
        best = best_peer(medians, goal.at if goal.workload == "W1s" else goal.workload)
        limit = medians.get((f"limit {FOR_WORKLOAD.get(goal.workload, ('',))[-1]}", ""))
        rows.append(
            (
                f"{goal.workload} {work.title}" if first else "",
                _value(figures.get((SUBJECT, goal.workload)), work.unit) if first else "",
                f"{best[0]} {number(best[1])}" if first and best else "",
                _ratio(value, best[1] if best else None) if first else "",
                _ratio(value, limit) if first else "",
                goal.text,
                "" if bound is None else f"{goal.relation} {number(bound)}",
                {True: "yes", False: "**no**", None: "not measured"}[met],
            )
        )
    return table(rows)


def _systems(figures: Mapping[Key, Figures], medians: Mapping[Key, float]) -> str:
    rows = [("workload", "system", "median", "unit", "of the best peer", "min", "max", "rounds")]
    for workload, work in WORKLOADS.items():
        best = best_peer(medians, workload)
        present = [system for system, w in figures if w == workload]
        sign = -1.0 if work.higher else 1.0
        present.sort(key=lambda s: sign * medians.get((s, workload), -sign * float("inf")))
        for system in present:
            found = figures[system, workload]
            if not found.values or found.outcomes:
                outcome = found.outcomes[0].replace("\n", " ").replace("|", "/")[:90]
                rows.append((workload, system, "-", outcome, "", "", "", str(len(found.outcomes))))
                continue
            rows.append(
                (
                    workload,
                    system,
                    number(found.median),
                    work.unit,
                    _ratio(found.median, best[1] if best else None),
                    number(min(found.values)),
                    number(max(found.values)),
                    str(len(found.values)),
                )
            )
    return table(rows)


def _limits(figures: Mapping[Key, Figures]) -> str:
    rows = [("limit", "median", "unit", "min", "max", "rounds")]
    for name, limit in LIMITS.items():
        found = figures.get((f"limit {name}", ""))
        if found is not None and found.values:
            low, high = number(min(found.values)), number(max(found.values))
            rows.append((limit.title, number(found.median), limit.unit, low, high, str(len(found.values))))
    return table(rows)


def _growth(figures: Mapping[Key, Figures]) -> str:
    rows = [("system", "microseconds a call, by number of calls", "peak RSS MiB, by number of calls")]
    for (system, workload), found in figures.items():
        if workload == "W6" and found.details:
            detail = found.details[len(found.details) // 2]
            us = ", ".join(f"{int(n):,}: {number(v)}" for n, v in detail["us_per_call"].items())
            rss = ", ".join(f"{int(n):,}: {v}" for n, v in detail["rss_mib"].items())
            rows.append((system, us, f"{rss} (start {detail['rss_start_mib']})"))
    return table(rows) if len(rows) > 1 else ""


def _value(found: Figures | None, unit: str) -> str:
    if found is None or (not found.values and not found.outcomes):
        return "-"
    if found.outcomes:
        return found.outcomes[0].replace("\n", " ").replace("|", "/")[:90]
    return f"{number(found.median)} {unit}"


def _ratio(value: float | None, other: float | None) -> str:
    return "" if value is None or not other else f"{value / other:.2f}"


def number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    head, *body = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([head, rule, *body])


def write_section(path: Path, report: str) -> None:
    """Put a report between the marks in a page.

    Raises:
        ValueError: the page has no marks.
    """
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no section between {BEGIN!r} and {END!r}")
    path.write_text(f"{before}{BEGIN}\n\n{report}\n{END}{after}")
