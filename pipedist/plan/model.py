"""The plan: what will be executed, in which phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipedist.datasets.division import Division
from pipedist.datasets.sources import Source
from pipedist.program import FunctionRef
from pipedist.spec import Spec


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One reading of one dataset in one phase: every call executes all of `runs`.

    Args:
        phase: counts from 0; a phase begins when the one before it is complete.
        dataset: whose elements, steps and shards these are.
        root: what the calls are given: the dataset, or a run of an earlier phase, whose
            committed values are read again.
        runs: the run stages, in the order of execution.
        folds: the reduce and gather stages of the root and the runs.
        kept: runs whose values a later phase reads.
    """

    phase: int
    dataset: str
    root: str
    runs: tuple[str, ...]
    folds: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return a name for people: the stages that its calls execute."""
        return " -> ".join(self.runs) if self.runs else self.root


@dataclass(frozen=True, slots=True)
class Plan:
    """A spec that can be carried out here.

    Args:
        spec: what was planned.
        workers: how many worker processes there will be; never part of the result.
        sources: the opened source of each dataset.
        functions: how each function of a run, and each combine function, travels to workers.
        phases: the passes of each phase; those of one phase run together.
    """

    spec: Spec
    workers: int
    sources: Mapping[str, Source]
    functions: Mapping[str, FunctionRef]
    phases: tuple[tuple[PassPlan, ...], ...]

    @property
    def passes(self) -> tuple[PassPlan, ...]:
        """Every pass, in the order of phases."""
        return tuple(p for phase in self.phases for p in phase)

    def division(self, dataset: str) -> Division | None:
        """Return how a dataset is divided, None where its length is not known before it was read."""
        length = self.sources[dataset].length
        if length is None:
            return None
        d = self.spec.datasets[dataset]
        return Division(length, d.batch, self.spec.replicas, d.drop_remainder)

    def close(self) -> None:
        """Close the sources."""
        for source in self.sources.values():
            source.close()

    def text(self) -> str:
        """Return the plan for people."""
        from pipedist.plan.view import as_text

        return as_text(self)

    def mermaid(self) -> str:
        """Return the plan as a Mermaid flow chart."""
        from pipedist.plan.view import as_mermaid

        return as_mermaid(self)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON document."""
        from pipedist.plan.view import as_json

        return as_json(self)
