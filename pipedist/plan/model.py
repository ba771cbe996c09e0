"""The plan: what will be executed, in which phases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from pipedist.core.gpus import Supply
from pipedist.core.types import FunctionRef, Tree
from pipedist.datasets.division import Division
from pipedist.datasets.sources import Source
from pipedist.spec import CollectivesSpec, RunSpec, Spec, StateRef, references

Granularity = Literal["step", "epoch", "run"]
"""How often something changes, or how much of a reading may begin at a time."""

DEFAULT_COLLECTIVES: Final = CollectivesSpec(implementation="auto", timeout_s=None, bytes_per_pack=0)
"""What `collectives: true` says of how they communicate."""


class PassPlan(Struct, frozen=True):
    """One reading of one dataset in one phase: every call executes all of `runs`.

    Args:
        phase: counts from 0; a phase begins when the one before it is complete.
        dataset: whose elements, steps and shards these are.
        root: what the calls are given: the dataset, or a run of an earlier phase, whose
            committed values are read again.
        runs: the run stages, in the order of execution.
        folds: the reduce and gather stages of the root and the runs.
        kept: runs whose values a later phase reads.
        updates: the updates that its steps feed, in the order in which they are applied.
        follows: the dataset after each of whose epochs this one is read once; "" for a reading of its own.
        gang: the calls of a step run at once.
        gpus: how many a call needs: as many as the run that needs most.
    """

    phase: int
    dataset: str
    root: str
    runs: tuple[str, ...]
    folds: tuple[str, ...]
    kept: tuple[str, ...]
    updates: tuple[str, ...] = ()
    follows: str = ""
    gang: bool = False
    gpus: float = 0.0

    def communication(self, spec: Spec) -> dict[str, CollectivesSpec]:
        """Return what its runs say of their collectives, by name; those that say nothing are left out."""
        said: dict[str, CollectivesSpec] = {}
        for name in self.runs:
            stage = spec.stages[name]
            if isinstance(stage, RunSpec) and stage.collectives and stage.collectives != DEFAULT_COLLECTIVES:
                said[name] = stage.collectives
        return said

    @property
    def name(self) -> str:
        """Return a name for people: the stages that its calls execute."""
        return " -> ".join(self.runs) if self.runs else self.root


class StatePlan(Struct, frozen=True):
    """How a state begins and ends; its update is in `Plan.functions`.

    Args:
        per: run, epoch or step: how often it changes.
        init: the function that makes its first value; None where that is known.
        arguments: of `init`.
        value: its first value, where `init` is None.
        until: the function that says when the epochs end; None where none does.
    """

    per: Granularity
    init: FunctionRef | None
    arguments: Mapping[str, Tree]
    value: Tree
    until: FunctionRef | None


class Plan(Struct, frozen=True):
    """A spec that can be carried out here.

    Args:
        spec: what was planned.
        workers: how many worker processes there will be; never part of the result.
        sources: the opened source of each dataset.
        functions: how each function of a run or an update, and each combine function, travels to workers.
        states: by the name of their update.
        phases: the passes of each phase; those of one phase run together.
        supply: the GPUs of the workers.
        verify: every call is executed twice, and its results are compared; never part of the result.
    """

    spec: Spec
    workers: int
    sources: Mapping[str, Source]
    functions: Mapping[str, FunctionRef]
    states: Mapping[str, StatePlan]
    phases: tuple[tuple[PassPlan, ...], ...]
    supply: Supply
    verify: bool = False

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

    def epochs(self, pass_: PassPlan) -> int:
        """Return how often a pass reads its dataset, at most."""
        return self.spec.datasets[pass_.follows or pass_.dataset].epochs

    def states_read(self, pass_: PassPlan) -> tuple[str, ...]:
        """Return the states that the calls of a pass read while they change."""
        if not (pass_.updates or pass_.follows):
            return ()
        found = [
            ref.name
            for name in pass_.runs
            if isinstance(stage := self.spec.stages[name], RunSpec)
            for ref in references(stage.with_)
            if isinstance(ref, StateRef)
        ]
        return tuple(dict.fromkeys(found))

    def granularity(self, pass_: PassPlan) -> Granularity:
        """Return how much of a pass may begin before the updates that it feeds are applied.

        A step or an epoch at a time, if a stage reads a state that changes so often, or an `until` is
        asked so often; everything ("run"), where nothing of it hangs on them.
        """
        asked = [name for name in pass_.updates if self.states[name].until is not None]
        pers = {self.states[name].per for name in (*self.states_read(pass_), *asked)}
        return "step" if "step" in pers else "epoch" if "epoch" in pers else "run"

    @property
    def gpus_needed(self) -> float:
        """How many GPUs a call needs, of the pass that needs most; 0 for none."""
        return max((p.gpus for p in self.passes), default=0.0)

    @property
    def training(self) -> PassPlan | None:
        """The pass whose steps feed the updates, None where the spec has none."""
        return next((p for p in self.passes if p.updates), None)

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
