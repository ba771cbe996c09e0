"""The functions of a spec: found here, and checked to fit how they will be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from pipedist.core.functions import FunctionNotFound, load, reference, uncallable
from pipedist.core.types import FunctionRef
from pipedist.errors import Problem, UsageError
from pipedist.spec import Spec


class CallSignature(Struct, frozen=True):
    """How a stage calls its function.

    Args:
        args: what the positional arguments are, for people.
        names: of the keyword arguments.
        name: what the function is called in an error; "": its own name.
        serves_calls: it is a run's: it may take a `ctx`, and may be a class, which is constructed with
            the keyword arguments, and whose instances are called.
    """

    args: tuple[str, ...]
    names: tuple[str, ...] = ()
    name: str = ""
    serves_calls: bool = False


class Callables:
    """Finds the functions of one spec.

    Args:
        spec: whose they are.
        problems: where what is missing or does not fit is noted.
    """

    def __init__(self, spec: Spec, problems: list[Problem]) -> None:
        self._spec = spec
        self._problems = problems

    def find(
        self,
        fn: str | Callable[..., Any],
        form: CallSignature,
        place: tuple[str, ...],
        arguments: tuple[str, ...],
    ) -> FunctionRef | None:
        """Return how a function travels to workers; None, and a note, where it can't be had here.

        Args:
            place: of its name in the spec.
            arguments: place of its keyword arguments.
        """
        note = self._problems.append
        try:
            ref = reference(fn)
            found = load(ref, [str(self._spec.code)]) if ref.name else fn
        except (FunctionNotFound, UsageError) as error:
            note(self._spec.problem(place, str(error)))
            return None
        if not callable(found):
            return ref
        if form.serves_calls and (wrong := uncallable(found, ref.label)):
            note(self._spec.problem(place, wrong))
        elif complaint := _unfit(found, form):
            note(self._spec.problem(arguments if form.names else place, complaint))
        return ref


def _unfit(fn: Callable[..., Any], form: CallSignature) -> str | None:
    """Return why a function can't be called so, None if it can."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions do not tell
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
        given = _listed((*args, *(f"{name}=..." for name in form.names)))
        return f"{label}{signature} can't be called as {form.name or label}({given}): {error}"
    return None


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts)
