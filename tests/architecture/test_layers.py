"""Imports go down only, through at most 12 layers, without a cycle between any two modules."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pipedist

PACKAGE = Path(pipedist.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("_version", "errors"),
    ("core",),
    ("reduction", "protocol"),
    ("values", "combiners", "transport"),
    ("collectives", "datasets"),
    ("spec", "outputs", "journal", "scheduler"),
    ("plan", "worker"),
    ("coordinator",),
    ("cluster",),
    ("strategy", "runs"),
    ("testing", "report"),
    ("cli", "__init__"),
)
"""The lowest layer first. Packages of one layer do not import each other."""

LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}

SANS_IO = (
    "scheduler",
    "worker/machine.py",
    "worker/lease_queue.py",
    "worker/events.py",
    "worker/commands.py",
)
"""Decisions: no I/O, no clock, no randomness, no arrays."""

FORBIDDEN_IN_SANS_IO = {
    "anyio", "asyncio", "zmq", "numpy", "time", "random", "secrets", "socket", "threading", "os",
    "selectors", "subprocess", "multiprocessing", "datetime", "uuid",
}  # fmt: skip

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "handler"}

ROOT_MODULES_MAX = 8
LAYERS_MAX = 12
MODULES_MAX = 360  # each format of data has a module


@cache
def modules() -> dict[str, Path]:
    """Return the file of each module of the package, by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def package_of(name: str) -> str:
    parts = name.split(".")
    package = parts[1] if len(parts) > 1 else "__init__"
    return "cli" if package == "__main__" else package


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Return (line, module) of each import in a file, wherever it stands: for types and in functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                found += [(node.lineno, alias.name) for alias in node.names]
            case ast.ImportFrom():
                assert node.level == 0, f"{path}:{node.lineno}: a relative import hides its layer"
                base = node.module or ""
                for alias in node.names:
                    submodule = f"{base}.{alias.name}"
                    found.append((node.lineno, submodule if submodule in modules() else base))
    return tuple(dict.fromkeys(found))


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_package_has_a_layer() -> None:
    unknown = {package_of(name) for name in modules()} - set(LEVEL)
    assert not unknown, f"add these to LAYERS: {sorted(unknown)}"
    assert len(LAYERS) <= LAYERS_MAX


def test_the_root_and_the_package_stay_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= ROOT_MODULES_MAX
    assert len(modules()) <= MODULES_MAX


def test_imports_go_down_only() -> None:
    upward = []
    for name, path in modules().items():
        package = package_of(name)
        for line, module in imports(path):
            if module.split(".")[0] != "pipedist":
                continue
            target = package_of(module) if module != "pipedist" else "_version"
            if target != package and LEVEL[target] >= LEVEL[package]:
                upward.append(f"{path.relative_to(PACKAGE.parent)}:{line}: {package} imports {target}")
    assert not upward, "\n".join(upward)


def test_there_is_no_import_cycle_between_any_two_modules() -> None:
    graph = {
        name: {module for _, module in imports(path) if module in modules() and module != "pipedist"}
        for name, path in modules().items()
        if name != "pipedist"  # it names every public object, for type checkers
    }
    found = cycle(graph)
    assert not found, " -> ".join(found)


def test_a_cycle_is_found_wherever_the_import_stands(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import os\nif TYPE_CHECKING:\n    from pipedist.cli import app\ndef f():\n    import zmq\n"
    )
    assert [module for _, module in imports(file)] == ["os", "pipedist.cli.app", "zmq"]
    assert cycle({"a": {"b"}, "b": {"a"}})
    assert not cycle({"a": {"b"}, "b": set()})
    assert LEVEL["cli"] > LEVEL["scheduler"] > LEVEL["errors"]


@pytest.mark.parametrize("package", sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py")))
def test_each_package_describes_itself(package: str) -> None:
    """What it is for, its entry points, and the process in which its code runs."""
    text = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text())) or ""
    assert len(text.split()) >= 25, f"{package}/__init__.py needs a paragraph"
    assert "process" in text.lower(), f"{package}/__init__.py: in which process does its code run?"
    assert "entry point" in text.lower(), f"{package}/__init__.py: what are its entry points?"


@pytest.mark.parametrize("place", SANS_IO)
def test_decisions_are_sans_io(place: str) -> None:
    root = PACKAGE / place
    paths = [root] if root.suffix else list(root.rglob("*.py"))
    assert paths
    for path in paths:
        own = path.relative_to(PACKAGE).parts[0]
        for line, module in imports(path):
            parts = module.split(".")
            assert parts[0] not in FORBIDDEN_IN_SANS_IO, f"{path.name}:{line} imports {module}"
            allowed = parts[0] != "pipedist" or parts[1] in ("errors", own) or module in SANS_IO_IMPORTS
            assert allowed, f"{path.name}:{line} imports {module}"


SANS_IO_IMPORTS = ("pipedist.protocol.messages",)


def test_names_say_what_lives_there() -> None:
    odd = [name for name in modules() if name.rpartition(".")[2] in FORBIDDEN_NAMES]
    assert not odd


def test_public_classes_have_one_name_each() -> None:
    """Two classes of one name are two different things only if each is private to its module."""
    homes: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(where)}" for name, where in sorted(twice.items()))


def test_only_functions_from_the_driver_are_unpickled() -> None:
    for name, path in modules().items():
        if name == "pipedist.core.functions":
            continue
        for line, module in imports(path):
            assert module.split(".")[0] not in ("pickle", "dill", "marshal", "shelve"), f"{path}:{line}"
