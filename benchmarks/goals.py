"""What pipedist is to reach, as data: a ratio to a peer or a limit of the SAME run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.apps.jobs import APPS
from benchmarks.systems import SUBJECT, SYSTEMS
from benchmarks.workloads import WORKLOADS

BEST_PEER = "best peer"
NOTHING = ""

Medians = Mapping[tuple[str, str], float]
"""(system, or limit with a leading "limit ", workload) -> median; a limit has no workload."""


@dataclass(frozen=True, slots=True)
class Goal:
    """`pipedist's value` is at least (or at most) `factor * the other's + plus`.

    Args:
        workload: whose value.
        relation: ">=" or "<=".
        of: a system, "limit NAME", BEST_PEER, or NOTHING: then `plus` alone is the bound.
        at: the workload of the other's value, where it is another one.
    """

    workload: str
    relation: Literal[">=", "<="]
    factor: float = 1.0
    of: str = NOTHING
    plus: float = 0.0
    at: str = ""
    note: str = ""

    @property
    def text(self) -> str:
        """What is wanted, in words."""
        where = f" in {self.at}" if self.at else ""
        factor = "" if self.factor == 1.0 else f"{self.factor:g} x "
        other = f"{factor}{self.of}{where}" if self.of else ""
        plus = f"{self.plus:g}" if not other else (f" + {self.plus:g}" if self.plus else "")
        note = f" ({self.note})" if self.note else ""
        return f"{self.relation} {other}{plus}{note}"

    def bound(self, medians: Medians) -> float | None:
        """Return the bound, None where the other was not measured."""
        if self.of == NOTHING:
            return self.plus
        if self.of == BEST_PEER:
            best = best_peer(medians, self.at or self.workload)
            other = None if best is None else best[1]
        elif self.of.startswith("limit "):
            other = medians.get((self.of, ""))
        else:
            other = medians.get((self.of, self.at or self.workload))
        return None if other is None else self.factor * other + self.plus

    def is_met(self, medians: Medians) -> bool | None:
        """Return whether it is met, None where one of both was not measured."""
        value, bound = medians.get((SUBJECT, self.workload)), self.bound(medians)
        if value is None or bound is None:
            return None
        return value >= bound if self.relation == ">=" else value <= bound


def best_peer(medians: Medians, workload: str) -> tuple[str, float] | None:
    """Return the best peer in a workload and its median; hand-written loops are no peers."""
    values = {
        key: medians[key, workload]
        for key, system in SYSTEMS.items()
        if system.kind == "peer" and (key, workload) in medians
    }
    if not values:
        return None
    choose = max if WORKLOADS[workload].higher else min
    best = choose(values, key=values.__getitem__)
    return best, values[best]


GOALS: tuple[Goal, ...] = (
    Goal("W1", ">=", 5.0, BEST_PEER),
    Goal("W1", ">=", 0.5, "pool", at="W1b", note="stretch"),
    Goal("W1s", ">=", 5.0, BEST_PEER, at="W1"),
    Goal("W1j", ">=", 0.8, SUBJECT, at="W1"),
    Goal("W2", ">=", 0.7, "limit handover"),
    Goal("W2", ">=", 4.0, BEST_PEER),
    Goal("W3", ">=", 1.5, "zmq"),
    Goal("W3", ">=", 3.0, BEST_PEER),
    Goal("W5", "<=", 1.0, "loky"),
    Goal("W5", "<=", 1.0, "limit imports", plus=0.15),
    Goal("W5c", "<=", 1.0, "limit imports-cli", plus=0.15),
    Goal("W6", "<=", plus=1.1),
    Goal("W7", ">=", plus=1.9),
    Goal("W7", ">=", 1.0, BEST_PEER),
    Goal("W8", ">=", 1.0, BEST_PEER),
    Goal("W8", ">=", 0.8, "zmq"),
    Goal("W9", "<=", plus=1.1),
    Goal("FN", ">=", 1.7, "single"),
    Goal("FN", ">=", 1.0, BEST_PEER),
    Goal("FP", ">=", 1.7, "single"),
    Goal("FP", ">=", 1.0, BEST_PEER),
    *(Goal(name, ">=", 0.9, BEST_PEER) for name in APPS),
    Goal("MEM", "<=", plus=456.0, note="200 MiB and the 256 MiB that may be in flight"),
)
