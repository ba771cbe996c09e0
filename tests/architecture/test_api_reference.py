"""The API reference, which the site generates from docstrings, explains every public name."""

from __future__ import annotations

import ast
import enum
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipedist

NAMES = [name for name in (*pipedist.__all__, "open") if name != "__version__"]

MADE_BY_PIPEDIST = {"Dataset", "DistributedDataset", "RemoteValue", "Run", "TaskCluster"}
"""Classes that users do not construct: the arguments of their constructors are internal."""


def parameters(name: str) -> Iterator[str]:
    """Yield the parameters with which users call a public name."""
    thing = getattr(pipedist, name)
    if inspect.isclass(thing) and (name in MADE_BY_PIPEDIST or issubclass(thing, enum.Enum)):
        return
    if getattr(thing, "_is_protocol", False):  # of classes that users write
        return
    function = vars(thing).get("__init__") if inspect.isclass(thing) else thing
    if function is not None:
        for parameter in inspect.signature(function).parameters:
            if parameter != "self" and not parameter.startswith("_"):
                yield parameter


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_explained(name: str) -> None:
    text = inspect.getdoc(getattr(pipedist, name)) or ""
    first = text.partition("\n")[0]
    assert len(text.split()) > 5, f"{name} needs a docstring"
    assert first.endswith((".", ":")), f"{name}: the first line is not one sentence: {first!r}"
    assert len(first) <= 100, f"{name}: the first line is too long: {first!r}"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "run"])
def test_every_argument_is_explained(name: str) -> None:
    text = inspect.getdoc(getattr(pipedist, name)) or ""
    missing = [one for one in parameters(name) if not re.search(rf"\b{one}\b", text)]
    assert not missing, f"{name} does not explain {', '.join(missing)}"


def test_run_and_open_have_the_same_arguments() -> None:
    """`run` refers to `open` for them."""
    assert set(parameters("run")) <= set(parameters("open")) | {"spec"}
    assert "open" in (pipedist.run.__doc__ or "")


def test_every_public_name_is_on_a_page() -> None:
    path = Path(__file__).parents[2] / "docs" / "site" / "api.py"
    spec = importlib.util.spec_from_file_location("api_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(module.pages()) > 5  # it raises an error that names those that are missing


def examples(name: str) -> str:
    """Return the code of a docstring's example."""
    text = inspect.getdoc(getattr(pipedist, name)) or ""
    found = re.search(r"^Examples?:\n((?:    .*\n?|\n(?=    ))+)", text, re.MULTILINE)
    return re.sub(r"^(>>> |\.\.\. )", "", textwrap.dedent(found[1]), flags=re.MULTILINE) if found else ""


WITHOUT_EXAMPLE = {
    "AutoShardPolicy", "ClosureCancelled", "CollectiveMismatchError", "CollectiveTimeoutError", "DeviceAssignment",
    "FoldError", "InputReplicationMode", "JournalError", "OutOfRangeError", "PipedistError", "PlanError", "Problem",
    "QuarantineError", "RunCancelled", "RunDrained", "UsageError", "WorkerDied", "WorkersLost",
}  # fmt: skip
"""Exceptions that need none, and enumerations that the example of their user shows."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_EXAMPLE])
def test_every_public_name_has_an_example(name: str) -> None:
    code = examples(name)
    assert code, f"{name} needs an example"
    compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
