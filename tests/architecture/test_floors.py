"""Imports go down only: the floors of the house, checked on every module of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import pipedist

PACKAGE = Path(pipedist.__file__).parent

FLOORS: tuple[tuple[str, ...], ...] = (
    ("version", "records", "arguments", "misuse_hints"),
    ("accelerators", "platform_id"),
    ("version", "records", "counts", "files", "async_only", "stand_ins", "tf_names"),
    ("accelerators", "platforms", "record_format"),
    ("errors",),
    ("import_guard",),
    ("messages", "program", "remote_errors"),
    ("trees",),
    ("exact_integers",),
    ("partials",),
    ("reductions",),
    ("batched",),
    (
        "values",
        "combiners",
        "functions",
        "dlpack",
        "partitioners",
        "cluster_resolvers",
        "code_archive",
        "temp_dirs",
    ),
    ("tables",),
    ("transport",),
    ("collectives",),
    ("datasets",),
    ("spec", "outputs", "journal"),
    ("worker",),
    ("launchers", "plan", "feeds"),
    ("scheduler",),
    ("coordinator",),
    ("local_cluster",),
    ("strategy", "connect_cluster", "engine_clusters"),
    ("task_cluster",),
    ("pipeline", "templates"),
    ("harness",),
    ("cli",),
    ("__init__", "__main__"),
)
"""The lowest floor first. Rooms of one floor do not import each other."""

LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}

SANS_IO = ("scheduler", "worker/machine.py", "worker/agenda.py", "worker/limits.py", "worker/states.py")
"""Decisions: no I/O, no clock, no randomness, no arrays."""

FORBIDDEN_IN_SANS_IO = {
    "anyio", "asyncio", "zmq", "numpy", "time", "random", "secrets", "socket", "threading", "os",
    "selectors", "subprocess", "multiprocessing", "datetime", "uuid",
}  # fmt: skip

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "handler"}


def modules() -> Iterator[Path]:
    return PACKAGE.rglob("*.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, *, lazy: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import; with `lazy` also of those that loading does not execute."""
    for line, module, is_lazy in _imports(path):
        if lazy or not is_lazy:
            yield line, module


@cache
def _imports(path: Path) -> tuple[tuple[int, str, bool], ...]:
    found = []
    todo: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), False)]
    for node, is_lazy in todo:
        match node:
            case ast.Import():
                found += [(node.lineno, alias.name, is_lazy) for alias in node.names]
            case ast.ImportFrom():
                assert node.level == 0, f"{path}:{node.lineno}: a relative import hides its floor"
                found.append((node.lineno, node.module or "", is_lazy))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                is_lazy = True
        if not isinstance(node, ast.expr):
            todo += [(child, is_lazy) for child in ast.iter_child_nodes(node)]
    return tuple(found)


def test_every_room_has_a_floor() -> None:
    unknown = {room_of(path) for path in modules()} - set(LEVEL)
    assert not unknown, f"say in FLOORS where these belong: {sorted(unknown)}"


def test_imports_go_down_only() -> None:
    upward = []
    for path in modules():
        room = room_of(path)
        for line, module in imports(path, lazy=True):
            parts = module.split(".")
            if parts[0] != "pipedist":
                continue
            target = parts[1] if len(parts) > 1 else "version"
            if target != room and LEVEL[target] >= LEVEL[room]:
                upward.append(f"{path.relative_to(PACKAGE.parent)}:{line}: {room} imports {target}")
    assert not upward, "\n".join(upward)


def test_there_is_no_cycle_between_modules() -> None:
    names = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in modules()}
    graph = {
        name.removesuffix(".__init__"): {
            m for _, m in imports(path, lazy=False) if m in names or f"{m}.__init__" in names
        }
        for name, path in names.items()
        if name != "pipedist.__init__"  # it names everything, for type checkers
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        # a package's front door may name its own rooms, and the rooms each other
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for target in graph.get(name, ()):
                if not name.startswith(f"{target}."):
                    visit(target, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("place", SANS_IO)
def test_decisions_are_sans_io(place: str) -> None:
    root = PACKAGE / place
    paths = [root] if root.suffix else list(root.rglob("*.py"))
    assert paths
    for path in paths:
        if path.name == "diagram.py":  # draws the tables for the docs
            continue
        for line, module in imports(path, lazy=True):
            top = module.split(".")[0]
            assert top not in FORBIDDEN_IN_SANS_IO, f"{path.name}:{line} imports {module}"
            below = ("errors", "messages", room_of(path))
            assert top != "pipedist" or module.split(".")[1] in below, f"{path.name}:{line} imports {module}"


def test_names_say_what_lives_there() -> None:
    odd = [str(p.relative_to(PACKAGE)) for p in modules() if p.stem in FORBIDDEN_NAMES]
    assert not odd


def test_nothing_received_is_unpickled() -> None:
    """Only a worker unpickles, and only functions from its scheduler."""
    for path in modules():
        if room_of(path) == "functions":
            continue
        for line, module in imports(path, lazy=True):
            assert module.split(".")[0] not in ("pickle", "dill", "marshal", "shelve"), f"{path}:{line}"


def test_the_checks_can_fail(tmp_path: Path) -> None:
    """The reader of imports sees lazy ones, and floors are compared as they stand."""
    file = tmp_path / "room.py"
    file.write_text("import os\ndef f():\n    from pipedist.cli import app\n")
    assert [m for _, m in imports(file, lazy=True)] == ["os", "pipedist.cli"]
    assert [m for _, m in imports(file, lazy=False)] == ["os"]
    assert LEVEL["cli"] > LEVEL["scheduler"] > LEVEL["errors"]
