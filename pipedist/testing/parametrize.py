"""Parametrize a test with all combinations of values: `@combinations(replicas=[1, 2], workers=[1, 3])`."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from pipedist.errors import UsageError

if TYPE_CHECKING:
    import pytest

# Receives a combination by keyword; returns the reason to skip it, or "" or None.
Unless = Callable[..., str | None]


def combinations(*, unless: Unless | None = None, **values: Iterable[object]) -> pytest.MarkDecorator:
    """Return a decorator that generates one test for each combination.

    A test's name contains the values: `test_x[mirrored-2_replicas-3_workers]`. A combination that this machine
    cannot test (too few accelerators, a package that is not installed) is skipped, with the reason.

    Args:
        unless: returns the reason to skip a combination, for other reasons.
        values: the values of each of the test's arguments.

    Raises:
        UsageError: an argument has no values, or there are no arguments.

    Example:
        >>> @combinations(replicas=[1, 2], workers=[1, 3])
        ... def test_total(replicas, workers): ...
    """
    import pytest

    listed = {name: list(each) for name, each in values.items()}
    if not listed or not all(listed.values()):
        empty = [name for name, each in listed.items() if not each]
        raise UsageError(f"combinations() needs values for: {', '.join(empty) or 'at least one argument'}")
    cases = []
    for chosen in itertools.product(*listed.values()):
        case = dict(zip(listed, chosen, strict=True))
        reason = (unless(**case) if unless is not None else None) or unavailable(case)
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        cases.append(pytest.param(*chosen, id="-".join(map(_test_id, case.items())), marks=marks))
    return pytest.mark.parametrize(list(listed), cases)


def unavailable(case: Mapping[str, object]) -> str:
    """Return the reason why this machine cannot test a combination, or "".

    Only the arguments `accelerators` (a number), `implementation` and `backend` (of collectives) are checked.
    """
    wanted = case.get("accelerators", 0)
    if isinstance(wanted, int) and wanted > accelerators():
        return f"needs {wanted} accelerators, but {accelerators()} are available"
    ways = {str(case.get(name, "")).lower() for name in ("implementation", "backend")}
    if ways & {"gloo", "nccl"} and importlib.util.find_spec("torch") is None:
        return "needs torch, which is not installed"
    if "nccl" in ways and not accelerators():
        return "nccl needs an accelerator, but none is available"
    return ""


def accelerators() -> int:
    """Return the number of GPUs that this process may use, according to their driver."""
    from pipedist.core.gpus import found  # most tests need none

    return len(found().gpus)


def _test_id(argument: tuple[str, object]) -> str:
    name, value = argument
    if isinstance(value, bool):
        return name if value else f"not_{name}"
    if isinstance(value, int | float):
        return f"{value}_{name}"
    if isinstance(value, str):
        return value or f"no_{name}"
    return str(getattr(value, "__name__", None) or type(value).__name__)
