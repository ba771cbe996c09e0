"""Fills in outputs: `python -m tests.docs PAGE...` replaces each output `?` of a page by the real one."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import blocks, comments
from tests.docs.running import Page

_CLOSING = re.compile(r"^stages? +calls .*?^phase .*?\n", re.MULTILINE | re.DOTALL)
"""The table of times at the end of a run, which differs each time."""


def fill(path: Path) -> None:
    """Run a page until its first failure, and write the outputs that it has asked for."""
    printed: list[str] = []
    try:
        files = comments(path).get("files", "").split()
        with tempfile.TemporaryDirectory() as folder, Page(path, Path(folder), files, printed) as page:
            for block in blocks(path):
                if "not run" not in block.comments:
                    page.use(block)
    finally:
        for text in printed:
            filled = _CLOSING.sub("...\n", text).rstrip("\n")
            page_text = path.read_text(encoding="utf-8")
            path.write_text(re.sub(r"^\?$", lambda _, filled=filled: filled, page_text, count=1, flags=re.M))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        fill(Path(argument).resolve())
