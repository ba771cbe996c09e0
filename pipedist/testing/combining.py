"""Makes one test of each combination of values: `@combinations(replicas=[1, 2], workers=[1, 3])`."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from pipedist.errors import UsageError

if TYPE_CHECKING:
    import pytest

Unless = Callable[..., str | None]
"""Takes a combination by keyword; returns why it can't be tested, "" or None if it can."""


def combinations(*, unless: Unless | None = None, **values: Iterable[object]) -> pytest.MarkDecorator:
    """Return a decorator that makes one test of each combination.

    A test's name has the values: `test_x[mirrored-2_replicas-3_workers]`. What this machine can't
    do is skipped, with the reason: accelerators that are not there, packages that are not installed.

    Args:
        unless: says of a combination why it is skipped, beside that.
        values: of each of the test's arguments.

    Raises:
        UsageError: an argument has no values, or there is none.
    """
    import pytest

    listed = {name: list(each) for name, each in values.items()}
    if not listed or not all(listed.values()):
        empty = [name for name, each in listed.items() if not each]
        raise UsageError(f"combinations of nothing: {', '.join(empty) or 'no arguments'}")
    cases = []
    for chosen in itertools.product(*listed.values()):
        case = dict(zip(listed, chosen, strict=True))
        reason = (unless(**case) if unless is not None else None) or missing_here(case)
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        cases.append(pytest.param(*chosen, id="-".join(map(_shown, case.items())), marks=marks))
    return pytest.mark.parametrize(list(listed), cases)


def missing_here(case: Mapping[str, object]) -> str:
    """Return what a combination needs and this machine has not, "" if it has everything.

    Looked at are the arguments `accelerators` (a number), `implementation` and `backend` (of
    collectives), and `strategy` where it is a name.
    """
    wanted = case.get("accelerators", 0)
    if isinstance(wanted, int) and wanted > accelerators():
        return f"needs {wanted} accelerators, there are {accelerators()}"
    ways = {str(case.get(name, "")).lower() for name in ("implementation", "backend")}
    if ways & {"gloo", "nccl"} and importlib.util.find_spec("torch") is None:
        return "needs torch, which is not installed"
    if "nccl" in ways and not accelerators():
        return "nccl needs an accelerator, there is none"
    return ""


def accelerators() -> int:
    """Return how many GPUs this process may use, as far as the driver says."""
    from pipedist.core.gpus import found  # most tests ask for none

    return len(found().gpus)


def _shown(argument: tuple[str, object]) -> str:
    """Return one argument as a part of a test's name."""
    name, value = argument
    if isinstance(value, bool):
        return name if value else f"not_{name}"
    if isinstance(value, int | float):
        return f"{value}_{name}"
    if isinstance(value, str):
        return value or f"no_{name}"
    return str(getattr(value, "__name__", None) or type(value).__name__)
