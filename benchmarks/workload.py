"""What a workload is: how it is measured, and its number."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.adapter import Adapter
from benchmarks.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Measured:
    """One number, and what belongs to it."""

    value: float
    detail: Mapping[str, Any] = field(default_factory=dict)


class WrongResult(Exception):
    """The system gave something else than the right answer."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    Args:
        title: what is measured.
        unit: of the number.
        higher: whether a higher number is better.
        measure: does it, with a system that has been started (or not, see `starts`).
        starts: False: the measurement starts the system itself.
        once: repeating it would take too long for what it tells about a peer.
        timeout_s: after this time the system counts as hanging.
    """

    title: str
    unit: str
    higher: bool
    measure: Callable[[Adapter, Sizes, Path], Measured]
    starts: bool = True
    once: bool = False
    timeout_s: float = 300.0


def check(is_right: bool, what: str) -> None:
    """Raise WrongResult unless `is_right`."""
    if not is_right:
        raise WrongResult(what)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that `work` took, and what it returned."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result
