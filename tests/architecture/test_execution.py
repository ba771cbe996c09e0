"""Nothing that is received is executed: no pickle, eval, exec, unsafe YAML, or import by a peer's word."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_layers import PACKAGE, modules

BUILTINS = {"eval", "exec", "compile", "__import__"}
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}

ALLOWED = {
    (
        "core/functions.py",
        "pickle.loads",
    ): "in a worker: a function, or an element of map, that its authenticated driver sent",
    ("protocol/program.py", "may_import"): "in a worker: the program that its driver sent",
    ("worker/result_cache.py", "may_import"): "in a worker: results of this process, or of the one before it",
    ("testing/process_child.py", "may_import"): "a file that the parent process wrote for it",
}
"""What may be done where, and why."""


def executions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, what) of each call that executes, unpickles, or imports what it is given."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        root, _, last = name.rpartition(".")
        keywords = {k.arg: k.value for k in node.keywords}
        if (
            name in BUILTINS
            or name.removeprefix("builtins.") in BUILTINS
            or root in PICKLES
            or (root in ("yaml", "ruamel.yaml") and last.startswith(("load", "unsafe")))
        ):
            yield node.lineno, name
        elif last == "YAML":
            kind = keywords.get("typ")
            if not (isinstance(kind, ast.Constant) and kind.value == "safe"):
                yield node.lineno, "an unsafe YAML"
        elif name in ("np.load", "numpy.load"):
            allowed = keywords.get("allow_pickle")  # its default is False
            if allowed is not None and not (isinstance(allowed, ast.Constant) and allowed.value is False):
                yield node.lineno, "np.load with pickles"
        may_import = keywords.get("may_import")
        if isinstance(may_import, ast.Constant) and may_import.value is True:
            yield node.lineno, "may_import"


def test_nothing_received_is_executed() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), what)
        for path in modules().values()
        for _, what in executions(ast.parse(path.read_text()))
    }
    assert found - set(ALLOWED) == set()
    assert set(ALLOWED) - found == set(), "these are not needed any more"


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)",
        "exec(text)",
        "builtins.eval(text)",
        "__import__(name)",
        "pickle.loads(data)",
        "cloudpickle.load(file)",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "YAML(typ='unsafe')",
        "YAML()",
        "np.load(path, allow_pickle=True)",
        "decode(frames, may_import=True)",
    ],
)
def test_the_check_can_fail(line: str) -> None:
    assert list(executions(ast.parse(line)))


def test_what_is_harmless_passes() -> None:
    harmless = "re.compile(x)\nYAML(typ='safe', pure=True)\nnp.load(p, allow_pickle=False)\nrun.eval()"
    assert list(executions(ast.parse(harmless))) == []


def test_the_scheduler_side_never_asks_for_imports() -> None:
    """A class in a result is looked up among the modules that are imported already."""
    for place in ("coordinator", "scheduler", "runs", "strategy", "transport"):
        for path in Path(PACKAGE, place).rglob("*.py"):
            assert "may_import=True" not in path.read_text(), path
