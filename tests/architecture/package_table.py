"""Print docs/dev/packages.md: `python -m tests.architecture.package_table > docs/dev/packages.md`."""

from __future__ import annotations

from pathlib import Path

import pipedist

PACKAGE = Path(pipedist.__file__).parent

RUNS_IN = {
    "(root)": "all",
    "cli": "driver",
    "cluster": "driver; fork server; supervisor",
    "collectives": "worker",
    "coordinator": "driver",
    "core": "all",
    "datasets": "driver; readers in workers too",
    "journal": "driver",
    "outputs": "driver",
    "plan": "driver",
    "protocol": "driver and worker",
    "reduction": "driver and worker",
    "runs": "driver",
    "scheduler": "driver",
    "spec": "driver",
    "strategy": "driver",
    "testing": "driver of a test",
    "report": "the process of a report or live page",
    "transport": "driver and worker",
    "worker": "worker; its supervisor",
}

BEFORE = {
    "(root)": (34, 6451),
    "cli": (19, 2689),
    "cluster_resolvers": (8, 991),
    "collectives": (18, 3307),
    "coordinator": (22, 2858),
    "datasets": (31, 5726),
    "harness": (27, 4687),
    "journal": (8, 1237),
    "launchers": (23, 3631),
    "outputs": (16, 2111),
    "pipeline": (32, 6650),
    "plan": (8, 1082),
    "scheduler": (22, 3853),
    "spec": (21, 4343),
    "strategy": (18, 3507),
    "templates": (4, 375),
    "transport": (40, 5191),
    "worker": (48, 7987),
}
"""Modules and lines of each package before the reorganisation into layers."""


def now() -> dict[str, tuple[int, int]]:
    """Return (modules, lines) of each package."""
    sizes = {}
    folders = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    for folder in (PACKAGE, *folders):
        files = folder.glob("*.py") if folder == PACKAGE else folder.rglob("*.py")
        lines = [len(file.read_text(encoding="utf-8").splitlines()) for file in files]
        sizes["(root)" if folder == PACKAGE else folder.name] = (len(lines), sum(lines))
    return sizes


def table(sizes: dict[str, tuple[int, int]]) -> list[str]:
    rows = []
    for name in sorted(sizes.keys() | BEFORE.keys()):
        cells = [f"{n:,}" for pair in (BEFORE.get(name), sizes.get(name)) for n in pair or ()]
        if name not in BEFORE:
            cells = ["", "", *cells]
        elif name not in sizes:
            cells += ["", ""]
        rows.append(f"| `{name}` | {' | '.join(cells)} | {RUNS_IN.get(name, '')} |")
    totals = [f"{sum(pair[at] for pair in each.values()):,}" for each in (BEFORE, sizes) for at in (0, 1)]
    rows.append(f"| total | {' | '.join(totals)} | |")
    return rows


def page() -> str:
    head = """\
# Packages

Modules and lines of `pipedist/`, before and after its reorganisation into layers, and the processes in
which each package runs. Printed by `python -m tests.architecture.package_table`.

| package | modules before | lines before | modules | lines | runs in |
|---|---:|---:|---:|---:|---|"""
    return "\n".join([head, *table(now())])


if __name__ == "__main__":
    print(page())
