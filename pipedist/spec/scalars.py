"""Scalars of YAML 1.2 to values, and values to text for messages and examples.

Scalars follow the core schema of YAML 1.2.2, section 10.3.2: `no`, `on` and `1:20` are text, `0o17` is 15 and
`017` is 17. Two rules are stricter: an integer has at most 64 bits, and a number beyond float64 is an error,
not infinity. Documents, `--set` and environment variables are read by these rules.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable

from pipedist.core.names import excerpt

INTEGER_MIN = -(2**63)
INTEGER_MAX = 2**64 - 1

_DECIMAL_BITS_MAX = 1024  # longer integers are written in hexadecimal: Python limits decimal texts

LIST_ITEMS_SHOWN = 4

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NANS = frozenset({".nan", ".NaN", ".NAN"})
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_PLAIN = re.compile(r"[\w./-]+(:[\w./-]+)*")  # text that needs no quotes, also inside `{...}` and `[...]`
_INFINITY = re.compile(r"[-+]?\.(?:inf|Inf|INF)")


class ScalarError(ValueError):
    """A scalar looks like a number, but a spec cannot hold that number."""

    def __init__(self, message: str, expected: str) -> None:
        self.message = message
        self.expected = expected
        super().__init__(message)


def resolve_plain(text: str) -> str | int | float | bool | None:
    """Return the value of a plain (unquoted) scalar; raise ScalarError beyond 64 bits and beyond float64."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _DECIMAL.fullmatch(text):
        return _integer(text, 10)
    if _BASED.fullmatch(text):
        return _integer(text, 0)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if math.isinf(number):
            raise ScalarError(f"the number {_short(text)} is beyond float64", "`.inf`, or a smaller number")
        return number
    if _INFINITY.fullmatch(text):
        return -math.inf if text[0] == "-" else math.inf
    if text in _NANS:
        return math.nan
    return text


def _integer(text: str, base: int) -> int:
    # 24 characters hold every 64-bit integer in base 8; int() of a long text takes quadratic time.
    digits = text.lstrip("+-").removeprefix("0x").removeprefix("0o").lstrip("0")
    number = int(text, base) if len(digits) <= 24 else None
    if number is None or not INTEGER_MIN <= number <= INTEGER_MAX:
        raise ScalarError(
            f"the integer {_short(text)} is beyond 64 bits",
            f"an integer from {INTEGER_MIN} to {INTEGER_MAX}, or quotes around it if it is text",
        )
    return number


def describe(value: object) -> str:
    """Return a short text for a value, after the word "got".

    >>> describe("abc"), describe(None), describe([0, 0]), describe({})
    ("'abc'", 'null', '[0, 0]', 'an empty mapping')
    """
    if isinstance(value, str):
        return repr(_short(value))
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ("-.inf" if value < 0 else ".inf")
    if value is None or isinstance(value, bool | int | float):
        return _short(as_text(value))
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        numbers = len(value) <= LIST_ITEMS_SHOWN and all(type(item) in (int, bool) for item in value)
        if value and numbers:
            return f"[{_short(', '.join(map(describe, value)))}]"
        return "a list" if value else "an empty list"
    if callable(value):
        return f"the function {_short(getattr(value, '__qualname__', type(value).__name__))}"
    return f"a value of type {type(value).__name__}"


def as_text(value: str | int | float | bool | None) -> str:
    """Return a scalar as text, as it would stand in a YAML 1.2 document."""
    if isinstance(value, str):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > _DECIMAL_BITS_MAX:
        return hex(value)
    return repr(value)


def as_yaml(value: object) -> str:
    """Return a tree of plain values as flow YAML.

    >>> as_yaml({"path": "data/*.csv", "columns": {"carrier": "str"}, "axes": [0, 1]})
    '{path: "data/*.csv", columns: {carrier: str}, axes: [0, 1]}'
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_yaml(key)}: {as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and resolve_plain(value) == value
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    return as_text(value)  # type: ignore[arg-type]


def listing(names: Iterable[str]) -> str:
    """Return "a, b or c" for a sentence.

    >>> listing(["a", "b", "c"])
    'a, b or c'
    """
    *head, last = [name or "''" for name in names]
    return f"{', '.join(head)} or {last}" if head else last


def _short(text: str) -> str:
    return excerpt(text, 40)
