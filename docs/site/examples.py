"""An extension of griffe for the pages of the Python API.

- The code of `Example:` sections in docstrings becomes a block of code.
- A default that is a constant of a module, such as `REJOIN_S`, is shown as its number.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from typing import Any

import griffe

SECTION = re.compile(r"^Examples?:\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)


class Examples(griffe.Extension):
    """Rewrite docstrings and defaults before they are rendered."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub(_fenced, obj.docstring.value)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in func.parameters:
            parameter.default = _number(func, parameter.default)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.parent is not None and attr.parent.is_class:  # a field of a dataclass is a parameter
            attr.value = _number(attr, attr.value)


def _number(owner: griffe.Object, default: str | griffe.Expr | None) -> str | griffe.Expr | None:
    if isinstance(default, griffe.ExprName) and default.name.isupper():
        value = getattr(importlib.import_module(owner.module.path), default.name, None)
        if type(value) in (int, float):
            return repr(value)
    return default


def _fenced(match: re.Match[str]) -> str:
    code = textwrap.dedent(match[1]).strip("\n")
    if "```" in code:
        return match[0]
    return "Examples:\n" + textwrap.indent(f"```python\n{code}\n```", "    ") + "\n"
