"""The modules of a run's functions, which tell whether its code has changed since.

They are the modules that name and define a function, and all modules below the code folder that they import,
directly or not, as their source shows.
"""

from __future__ import annotations

import ast
import hashlib
import os
import pickletools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pipedist.core.functions import reference
from pipedist.core.types import FunctionRef
from pipedist.plan import Plan
from pipedist.runs.pickle_digest import OPCODES_MAX


def modules_of(plan: Plan) -> dict[str, dict[str, str]]:
    """Return the files of the modules of functions, by path in the spec and by name of the module."""
    folder = Path(plan.spec.code)
    imports: dict[str, tuple[str, ...]] = {}
    modules: dict[str, dict[str, str]] = {}
    for name, stage in plan.spec.stages.items():
        state = plan.states.get(name)
        refs = [plan.functions.get(name), plan.finishes.get(name)]
        refs += [state.init, state.until] if state is not None else []
        wrapped = getattr(getattr(stage, "run", None), "__wrapped__", None)
        if wrapped is not None and not plan.functions[name].name:
            # it is sent by value, but what it calls may have a name
            refs.append(reference(wrapped))
        modules[f"stages.{name}"] = _modules_below(folder, refs, imports)
    for name, dataset in plan.spec.datasets.items():
        call = dataset.config.get("call", dataset.config.get("class"))
        if isinstance(call, str) or callable(call):
            modules[f"datasets.{name}"] = _modules_below(folder, [reference(call)], imports)
    return modules


def _modules_below(
    folder: Path, refs: Sequence[FunctionRef | None], imports: dict[str, tuple[str, ...]]
) -> dict[str, str]:
    """Return the modules of functions, and those below a folder that they import; `imports` is a cache."""
    named = [name for ref in refs if ref is not None and ref.name for name in _defining(ref.name)]
    found: dict[str, str] = {}
    used = (
        name for ref in refs if ref is not None and ref.pickled for name in _named_in(ref.pickled, folder)
    )
    pending, seen = [*named, *used], {"pipedist", "__main__"}
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        file = _file_of(module, folder) or (_imported_file(module) if module in named else None)
        if file is None:
            continue
        found[module] = file
        if module not in imports:
            imports[module] = tuple(_imports(module, file))
        pending += [name for name in imports[module] if name.partition(".")[0] != "pipedist"]
        pending += [module.rpartition(".")[0]] if "." in module else []
    return found


def _defining(function: str) -> list[str]:
    """Return the module that names a function, and the one that defines it."""
    module, _, path = function.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return list(dict.fromkeys((module, getattr(found, "__module__", None) or module)))


def _named_in(pickled: bytes, folder: Path) -> set[str]:
    """Return what may be modules among the texts in a pickle of a function: its names, and those that it imports."""
    there = {entry.partition(".")[0] for entry in os.listdir(folder)} - {""}
    texts = {text for _, text, _ in islice(pickletools.genops(pickled), OPCODES_MAX) if isinstance(text, str)}
    return {each for each in texts if each in sys.modules or each.partition(".")[0] in there}


def _imported_file(module: str) -> str | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    return path if path is not None and os.path.isfile(path) else None


def _file_of(module: str, folder: Path) -> str | None:
    """Return the file of a module below a folder, None if it is not there."""
    loaded = _imported_file(module)
    if loaded is not None and Path(loaded).is_relative_to(folder) and "site-packages" not in loaded:
        return loaded
    base = os.path.join(folder, *module.split("."))
    return next((p for p in (os.path.join(base, "__init__.py"), f"{base}.py") if os.path.isfile(p)), None)


def _imports(module: str, file: str) -> Iterator[str]:
    """Yield the names of the modules that a module may import, as its source shows."""
    if not file.endswith(".py"):
        return
    package = module if os.path.basename(file) == "__init__.py" else module.rpartition(".")[0]
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError):  # it can't be imported, or only with an error that the run reports
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def changed_modules(
    there: Mapping[str, str], now: Mapping[str, str], modules: Iterable[str], folder: Path
) -> Iterator[str]:
    """Yield a line with the file of each module that has changed since an earlier run."""
    for module in modules:
        if there.get(module) != now.get(module):
            file = _file_of(module, folder) or _imported_file(module)
            yield f"module {module} has changed" + ("" if file is None else f": {file}")


def code_of(modules: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the SHA-256 of the files of modules."""
    files = {name: file for those in modules.values() for name, file in those.items()}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in sorted(files.items())}
