"""The tests in docs/how-to/testing.md run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "testing.md"


def test_the_page(pytester: pytest.Pytester) -> None:
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
        if "VirtualTime" in block
    ]
    pytester.makepyfile(code)
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
