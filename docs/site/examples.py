"""An extension of griffe: the code of `Example:` sections in docstrings becomes a block of code."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

SECTION = re.compile(r"^Examples?:\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)


class Examples(griffe.Extension):
    """Rewrite each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    code = textwrap.dedent(match[1]).strip("\n")
    if "```" in code:
        return match[0]
    return "Examples:\n" + textwrap.indent(f"```python\n{code}\n```", "    ") + "\n"
