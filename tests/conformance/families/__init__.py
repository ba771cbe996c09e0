"""The families that can be replayed, one module each; `registry` finds them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from tests.conformance.cases import Case, Deviation, Outcome
from tests.conformance.session import Session


@dataclass(frozen=True, slots=True)
class Family:
    """One family module: how its cases are replayed, and where pipedist deviates."""

    name: str
    replay: Callable[[Case, Session], Awaitable[Outcome]]
    deviations: tuple[Deviation, ...]


def registry() -> Mapping[str, Family]:
    """Return the families by name, from every module of this package."""
    families = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        family = Family(module.FAMILY, module.replay, tuple(getattr(module, "DEVIATIONS", ())))
        families[family.name] = family
    return families
