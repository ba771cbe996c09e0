"""What a scalar means: the core schema of YAML 1.2, for documents, `--set` and the environment.

YAML 1.2.2, section 10.3.2. So `no`, `on` and `1:20` are text, `0o17` is 15 and `017` is 17.
Two things are stricter than the standard: an integer has at most 64 bits, and a number that
float64 can't hold is refused rather than read as infinity.
"""

from __future__ import annotations

import math
import re

INTEGER_MIN = -(2**63)
INTEGER_MAX = 2**64 - 1

_DECIMAL_BITS_MAX = 1024
"""Longer integers are told in hexadecimal: Python refuses to write very long ones in decimal."""

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_NANS = frozenset({".nan", ".NaN", ".NAN"})
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(?:inf|Inf|INF)")


class ScalarError(ValueError):
    """A scalar looks like a number, but no number that a spec can hold."""

    def __init__(self, message: str, expected: str) -> None:
        self.message = message
        self.expected = expected
        super().__init__(message)


def resolve_plain(text: str) -> str | int | float | bool | None:
    """Return what a plain (unquoted) scalar means.

    Raises:
        ScalarError: an integer beyond 64 bits, or a number beyond float64.
    """
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
            f"an integer from {INTEGER_MIN} to {INTEGER_MAX}, or quotes around it, to make it text",
        )
    return number


def describe(value: object) -> str:
    """Return a short phrase for `value` that completes the sentence "the key is ...".

    >>> describe("abc"), describe(None), describe([1])
    ("the text 'abc'", 'null', 'a list')
    """
    if isinstance(value, str):
        return f"the text {_short(value)!r}" if value else "an empty text"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ("-.inf" if value < 0 else ".inf")
    if value is None or isinstance(value, bool | int | float):
        return _short(as_text(value))
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if callable(value):
        return f"the function {_short(getattr(value, '__qualname__', type(value).__name__))}"
    return f"a value of type {type(value).__name__}"


def as_text(value: str | int | float | bool | None) -> str:
    """Return a scalar as the text that a YAML 1.2 document would hold."""
    if isinstance(value, str):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > _DECIMAL_BITS_MAX:
        return hex(value)
    return repr(value)


def printable(text: str) -> str:
    """Return `text` without characters that a terminal would obey."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def _short(text: str, characters_max: int = 40) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 3] + "..."
