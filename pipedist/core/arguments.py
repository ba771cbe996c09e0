"""Checks of arguments."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def check_int(name: str, value: object, *, at_least: int = 1) -> int:
    """Return `value` as a plain int; raise TypeError (for a bool too) or ValueError if it is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} is {value!r}; expected an int")
    number = operator.index(value)
    if number < at_least:
        raise ValueError(f"{name} is {number}; expected an int >= {at_least}")
    return number
