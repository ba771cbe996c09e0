"""The tests that docs/harness.md shows for schedulers and protocols are run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "harness.md"


def test_the_page(pytester: pytest.Pytester) -> None:
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "Playbook" in block
    ]
    pytester.makepyfile(code)
    pytester.runpytest_subprocess().assert_outcomes(passed=3)
