"""No `assert` checks what a peer sent, or a rule of the protocol: `python -O` removes it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pipedist"


@pytest.mark.parametrize(
    "package", ["transport", "protocol", "coordinator", "scheduler", "worker", "collectives", "cluster"]
)
def test_an_assert_only_narrows_a_type(package: str) -> None:
    others = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: assert {ast.unparse(node.test)}"
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) and not _narrows(node.test)
    ]
    assert others == []


def _narrows(test: ast.expr) -> bool:
    """Return whether it is `NAME is not None` of a variable or attribute, or `isinstance`."""
    match test:
        case ast.Compare(
            left=ast.Name() | ast.Attribute(), ops=[ast.IsNot()], comparators=[ast.Constant(None)]
        ):
            return True
        case ast.Call(func=ast.Name("isinstance")):
            return True
    return False
