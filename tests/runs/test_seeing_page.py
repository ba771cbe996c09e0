"""The section about Python and notebooks in docs/how-to/seeing.md runs, and the pictures of the page exist."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import pytest

import pipedist

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "how-to" / "seeing.md").read_text()
SPEC = {
    "pipedist": 1,
    "name": "job",
    "dataset": {"range": 6, "batch": 2},
    "stages": {"y": {"run": abs}, "all": {"gather": 0, "of": "y"}},
}


@pytest.mark.asyncio
async def test_the_examples_in_python_run() -> None:
    section = TEXT.partition("\n## In Python and notebooks\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```\n", section, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        names = {"pipedist": pipedist, "asyncio": asyncio, "spec": SPEC}
        code = compile(block, "seeing.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(code, names)
        if running is not None:
            await running
        assert names["result"]["all"].tolist() == [0, 1, 2, 3, 4, 5]


def test_every_picture_is_shown_and_small() -> None:
    shown = set(re.findall(r"pictures/([\w.-]+)", TEXT))
    there = {path.name: path.stat().st_size for path in (DOCS / "pictures").iterdir()}
    assert shown == set(there)
    assert max(there.values()) <= 200 * 1024
