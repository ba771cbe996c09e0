"""Import the functions of a spec, check their signatures, and read the first values of its states."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from pipedist.core.functions import BrokenLine, FunctionNotFound, load, reference, uncallable
from pipedist.core.names import nearest, printable
from pipedist.core.types import FunctionRef, Tree
from pipedist.errors import Problem, UsageError
from pipedist.plan.model import StatePlan
from pipedist.spec import InitFile, InitFunction, InitLiteral, Spec, UpdateSpec, per_of
from pipedist.spec.diagnostics import EXCERPT_CHARACTERS_MAX


class CallSignature(Struct, frozen=True):
    """The arguments with which a stage calls its function."""

    args: tuple[str, ...]  # names of the positional arguments, for error messages
    names: tuple[str, ...] = ()  # names of the keyword arguments
    name: str = ""  # name of the function in error messages; "": its own name
    serves_calls: bool = False  # it is the function of a run: may have a parameter `ctx`, and may be a class


def find(
    spec: Spec,
    problems: list[Problem],
    fn: str | Callable[..., Any],
    form: CallSignature,
    place: tuple[str, ...],
    arguments: tuple[str, ...],
) -> FunctionRef | None:
    """Return a reference to a checked function; None, and a problem, if it can't be imported.

    `place` and `arguments` are the paths of the function's name and of its keyword arguments in the spec.
    """

    def report(path: tuple[str, ...], message: str) -> None:
        problems.append(spec.document.problem(path, message))

    try:
        ref = reference(fn)
        found = load(ref, [str(spec.code)]) if ref.name else fn
    except FunctionNotFound as error:
        if error.broken is None:
            report(place, str(error))
        else:
            _add_once(problems, error.broken, spec.document.problem(place, "").where, ref.name)
        return None
    except UsageError as error:
        report(place, str(error))
        return None
    if not callable(found):
        return ref
    if form.serves_calls and (wrong := uncallable(found, ref.label)):
        report(place, wrong)
    elif complaint := _unfit(found, form):
        report(arguments if form.names else place, complaint)
    return ref


def _add_once(problems: list[Problem], broken: BrokenLine, place: str, function: str) -> None:
    """Add a line of a module that can't be imported, unless another stage has added it."""
    near = os.path.relpath(broken.file)
    where = f"{broken.file if near.startswith(os.pardir) else near}:{broken.line}"
    where += f":{broken.column}" if broken.column else ""
    if all(problem.where != where for problem in problems):
        expected = f"a module that can be imported, for `{function}` at {place}"
        line = printable(broken.text.replace("\t", " "))[:EXCERPT_CHARACTERS_MAX]
        column = broken.column if broken.column <= len(line) + 1 else 0
        problems.append(Problem(broken.cause, where, line, column, expected))


def _unfit(fn: Callable[..., Any], form: CallSignature) -> str | None:
    """Return why a function can't be called with these arguments; None if it can."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return None
    constructs = form.serves_calls and inspect.isclass(fn)
    args = () if constructs else form.args
    kwargs: dict[str, object] = dict.fromkeys(form.names)
    if form.serves_calls and not constructs and "ctx" in signature.parameters:
        kwargs.setdefault("ctx", None)
    try:
        signature.bind(*(None for _ in args), **kwargs)
    except TypeError as error:
        label = getattr(fn, "__name__", str(fn))
        given = ", ".join((*args, *(f"{name}=..." for name in form.names)))
        meant = _meant(signature, form)
        return f"{label}{signature} can't be called as {form.name or label}({given}): {error}{meant}"
    return None


def _meant(signature: inspect.Signature, form: CallSignature) -> str:
    """Return a hint if a given name is similar to the name of a parameter that is not given."""
    free = [name for name in signature.parameters if name not in form.names]
    for given in form.names:
        if given not in signature.parameters and (near := nearest(given, free)):
            return f"; did you mean {near!r}?"
    return ""


class UnknownException(LookupError):
    """No exception class has this name; `known` are those that have similar ones."""

    def __init__(self, name: str, message: str, known: Sequence[str]) -> None:
        super().__init__(message)
        self.name = name
        self.known = known


def exception_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of exceptions as a worker compares them, or raise UnknownException.

    A bare name is that of any class that is loaded, as the functions of the spec are. A dotted name may be imported,
    and is added as the one under which its class is defined: `aiohttp.ClientError` is of `aiohttp.client_exceptions`.
    """
    classes: list[type[BaseException]] = [BaseException]
    for cls in classes:
        classes += type.__subclasses__(cls)
    known = {f"{cls.__module__}.{cls.__qualname__}" for cls in classes}
    bare = {cls.__name__ for cls in classes}
    found = list(names)
    for name in names:
        module, _, attribute = name.rpartition(".")
        if name in known or name in bare:
            continue
        if not module:
            message = f"no exception {name!r} is known to Python or to the modules that the stage's function imports"
            raise UnknownException(name, message, sorted(bare))
        try:
            value: object = getattr(import_module(module), attribute, None)
        except Exception as error:  # a user's module may raise anything
            raise UnknownException(name, f"{module} can't be imported: {error}", sorted(known)) from error
        if not (isinstance(value, type) and issubclass(value, BaseException)):
            others = [f"{module}.{each}" for each in vars(import_module(module))]
            raise UnknownException(name, f"{module} has no exception {attribute!r}", others)
        found.append(f"{value.__module__}.{value.__qualname__}")
    return tuple(dict.fromkeys(found))


def plan_states(
    spec: Spec, functions: dict[str, FunctionRef], problems: list[Problem]
) -> dict[str, StatePlan]:
    """Return the plan of each state; `functions` and `problems` receive the update functions and the problems."""
    states = {}
    for name, stage in spec.stages.items():
        if not isinstance(stage, UpdateSpec):
            continue
        place = ("stages", name)
        with_ = CallSignature(("state", "value"), tuple(stage.with_))
        update = find(spec, problems, stage.update, with_, (*place, "update"), (*place, "with"))
        if update is not None:
            functions[name] = update
        until, until_with = None, stage.until.with_ if stage.until is not None else {}
        if stage.until is not None:
            at = (*place, "until")
            form = CallSignature(("old", "new"), tuple(until_with))
            until = find(spec, problems, stage.until.function, form, at, (*at, "with"))
        init: FunctionRef | None = None
        arguments: dict[str, Tree] = {}
        value: Tree = None
        match stage.init:
            case InitLiteral():
                value = stage.init.value
            case InitFunction(function, arguments):
                form = CallSignature((), tuple(arguments))
                at = (*place, "init")
                init = find(spec, problems, function, form, (*at, "function"), (*at, "with"))
            case InitFile(path):
                try:
                    value = read_value(Path(spec.folder) / path)
                except (OSError, ValueError) as error:
                    reason = getattr(error, "strerror", None) or str(error)
                    message = f"the first value of the state can't be read from {path}: {reason}"
                    expected = f"a {Path(path).suffix} file, relative to the spec's folder"
                    key = (*place, "init", "file")
                    problems.append(spec.document.problem(key, message, expected=expected))
        states[name] = StatePlan(per_of(spec.stages[stage.of]), init, arguments, value, until, until_with)
    return states


def read_value(path: Path) -> Tree:
    """Return the content of a .npy, .npz or .json file: an array, a dict of arrays, or any tree."""
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        return dict(loaded)
