"""Extracts the fenced blocks and the comments of a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^`\n]*)$")
_TITLE = re.compile(r'title="([^"]*)"')
_LINE_BEFORE = re.compile(r"^ *`([\w./-]+\.\w+)`:\s*\Z", re.MULTILINE)
_COMMENT = re.compile(r"<!--\s*(?P<key>[a-z ]+?)(?::\s*(?P<value>.*?))?\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: of its first line of text, from 1.
        comments: those in the lines right before it, by their first words.
    """

    line: int
    language: str
    title: str
    text: str
    comments: dict[str, str]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, also those in lists and tabs."""
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        at += 1
        if opening is None:
            continue
        indent, fence, info = len(opening["indent"]), opening["fence"], opening["info"].strip()
        begin = at
        while lines[at].strip() != fence:
            at += 1
        text = "".join(f"{line[indent:]}\n" for line in lines[begin:at])
        at += 1
        title = _TITLE.search(info) or _LINE_BEFORE.search("\n".join(lines[: begin - 1]))
        language = info.partition(" ")[0].strip("{}.")
        yield Block(begin + 1, language, title[1] if title else "", text, _before(lines[: begin - 1]))


def comments(page: Path) -> dict[str, str]:
    """Return the comments of a page by their first words."""
    return _parsed(page.read_text(encoding="utf-8"))


def _before(lines: list[str]) -> dict[str, str]:
    begin = len(lines)
    while begin and (not lines[begin - 1].strip() or lines[begin - 1].strip().startswith("<!--")):
        begin -= 1
    return _parsed("\n".join(lines[begin:]))


def _parsed(text: str) -> dict[str, str]:
    return {match["key"]: " ".join((match["value"] or "").split()) for match in _COMMENT.finditer(text)}
