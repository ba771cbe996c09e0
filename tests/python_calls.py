"""The number of Python calls that a block makes in its thread: a cost that does not depend on the machine."""

from __future__ import annotations

import sys
from typing import Self


class PythonCalls:
    """Counts the calls of functions in Python, those in C not among them, inside `with PythonCalls() as counted`."""

    def __init__(self) -> None:
        self.made = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)

    def _count(self, _frame: object, event: str, _argument: object) -> None:
        self.made += event == "call"
