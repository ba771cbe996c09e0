"""The plan: the passes of a run, in phases."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct, field

from pipedist.core.gpus import Supply
from pipedist.core.types import FunctionRef, Tree
from pipedist.datasets.division import Division
from pipedist.datasets.sources import Source
from pipedist.spec import QUARANTINE_DEFAULT, CollectivesSpec, GatherSpec, RunSpec, Spec, StageRef, references

if TYPE_CHECKING:
    from pipedist.plan.picture import Graph

Granularity = Literal["step", "epoch", "run"]  # how often a state changes, or what may start at a time

DEFAULT_COLLECTIVES: Final = CollectivesSpec.model_construct(  # a validator takes milliseconds to build
    implementation="auto", timeout_s=None, bytes_per_pack=0
)
"""The communication options of `collectives: true`."""


WHEN: Final[Mapping[str, str]] = {
    "step": "after each step",
    "epoch": "after each epoch",
    "run": "once, at the end",
}

CALLS_AT_ONCE: Final = 32
"""Calls of an async function that wait at the same time in one worker, if the spec has no `concurrency`."""


class PassPlan(Struct, frozen=True):
    """One read of one input in one phase; every call executes all of `runs`, in order."""

    phase: int
    dataset: str
    # The dataset, or a run whose committed values are read: of an earlier phase, or of this one while it is executed
    root: str
    runs: tuple[str, ...]
    folds: tuple[str, ...]  # the reduce and gather stages of the root and the runs
    kept: tuple[str, ...]  # runs whose values another pass reads
    updates: tuple[str, ...] = ()  # the updates that its steps feed, in the order in which they are applied
    follows: str = ""  # the dataset after each of whose epochs this pass reads its own once, or ""
    gang: bool = False  # the calls of a step run at the same time
    gpus: float = 0.0
    batch: int = 0  # the number of elements of a step
    key: str = ""  # the name of the pass in the journal

    def devices(self, spec: Spec) -> str:
        """Return the kind of JAX devices for which its runs are compiled; "": they are not."""
        found = [s for name in self.runs if isinstance(s := spec.stages[name], RunSpec) and s.compile]
        return (found[0].resources.devices or "") if found and found[0].resources else ""

    def communication(self, spec: Spec) -> dict[str, CollectivesSpec]:
        """Return the communication options of its runs, by name; runs with the default are skipped."""
        found: dict[str, CollectivesSpec] = {}
        for name in self.runs:
            stage = spec.stages[name]
            if isinstance(stage, RunSpec) and stage.collectives and stage.collectives != DEFAULT_COLLECTIVES:
                found[name] = stage.collectives
        return found

    @property
    def name(self) -> str:
        """A readable name: the stages that its calls execute."""
        return " -> ".join(self.runs) if self.runs else self.root


class StatePlan(Struct, frozen=True):
    """The first value of a state, and the end of its epochs; its update is in `Plan.functions`.

    `init` returns the first value, with `arguments`; if it is None, that is `value`.
    """

    per: Granularity
    init: FunctionRef | None
    arguments: Mapping[str, Tree]
    value: Tree
    until: FunctionRef | None
    until_arguments: Mapping[str, Tree] = {}


class Plan(Struct, frozen=True):
    """A spec that can be executed here. `workers` and `verify` are never part of the result.

    The passes of one phase run together, after those of the phase before it. `functions` are those of runs,
    updates and combines, by stage.
    """

    spec: Spec
    workers: int
    sources: Mapping[str, Source]
    functions: Mapping[str, FunctionRef]
    states: Mapping[str, StatePlan]
    phases: tuple[tuple[PassPlan, ...], ...]
    supply: Supply
    verify: bool = False
    asynchronous: frozenset[str] = frozenset()
    """The runs whose function, or whose class's `__call__`, is async."""
    classes: frozenset[str] = frozenset()  # the runs whose function is a class
    finishes: Mapping[str, FunctionRef] = {}
    """The functions that finish the values of reduces and gathers, by stage."""
    keyed: frozenset[str] = frozenset()  # the reduces whose combine function merges tables by key
    opened: ExitStack = field(default_factory=ExitStack)
    """Closed with the plan: its sources, and its modules' folder on `sys.path`."""

    @property
    def passes(self) -> tuple[PassPlan, ...]:
        return tuple(p for phase in self.phases for p in phase)

    def division(self, dataset: str) -> Division | None:
        """Return how a dataset is divided; None if its length is unknown before it is read."""
        length = self.sources[dataset].length
        if length is None:
            return None
        d = self.spec.datasets[dataset]
        return Division(length, d.batch, self.spec.replicas, d.drop_remainder)

    def division_of(self, pass_: PassPlan) -> Division | None:
        """Return how the elements of a pass are divided; None if their number is unknown."""
        division = self.division(pass_.dataset)
        if division is None or pass_.batch == division.batch:
            return division
        length = division.length
        if division.drop_remainder:
            length = division.steps_per_epoch * division.batch
        return Division(length, pass_.batch, division.replicas)

    def maker(self, pass_: PassPlan) -> PassPlan | None:
        """Return the pass of the same phase whose values a pass reads; None if there is none."""
        return next((p for p in self.phases[pass_.phase] if pass_.root in p.runs), None)

    def source(self, pass_: PassPlan) -> PassPlan | None:
        """Return the pass of any phase whose values a pass reads; None: it reads a dataset."""
        return next((p for p in self.passes if pass_.root in p.runs), None)

    def rebatched(self, pass_: PassPlan) -> int:
        """Return the batch size of a pass that divides the values that it reads into other steps; 0: it does not."""
        source = self.source(pass_)
        return 0 if source is None or source.batch == pass_.batch else pass_.batch

    def quarantine_max(self, dataset: str) -> int:
        """Return how many elements a pass over a dataset may quarantine."""
        limit = self.spec.quarantine_max
        if limit != "auto":
            return limit
        length = self.sources[dataset].length or 0
        return max(QUARANTINE_DEFAULT, length * self.spec.datasets[dataset].epochs // 100)

    def epochs(self, pass_: PassPlan) -> int:
        """Return how often a pass reads its dataset at most."""
        return self.spec.datasets[pass_.follows or pass_.dataset].epochs

    def calls(self, pass_: PassPlan, steps: int) -> int:
        """Return the number of calls of a pass in steps [0, steps); 0 if unknown."""
        division = self.division_of(pass_)
        if division is None:
            return 0
        return steps * division.replicas if pass_.gang else division.calls(steps)

    def elements(self, pass_: PassPlan, steps: int) -> int:
        """Return the number of elements of a pass in steps [0, steps), of whole steps if it is unknown."""
        division = self.division_of(pass_)
        if division is None or not division.steps_per_epoch:
            return steps * pass_.batch
        epochs, rest = divmod(steps, division.steps_per_epoch)
        whole = division.steps_per_epoch * division.batch
        return epochs * (whole if division.drop_remainder else division.length) + rest * division.batch

    def states_read(self, pass_: PassPlan) -> tuple[str, ...]:
        """Return the states that the calls of a pass read while they change."""
        if not (pass_.updates or pass_.follows):
            return ()
        return tuple(dict.fromkeys(state for name in pass_.runs for state in self.spec.links[name].reads))

    def granularity(self, pass_: PassPlan) -> Granularity:
        """Return how much of a pass may start before the updates that it feeds are applied.

        One step or epoch at a time, if a stage reads a state that changes that often, or an `until` is
        called that often; everything ("run") if no stage depends on the updates.
        """
        ending = [name for name in pass_.updates if self.states[name].until is not None]
        pers = {self.states[name].per for name in (*self.states_read(pass_), *ending)}
        return "step" if "step" in pers else "epoch" if "epoch" in pers else "run"

    def waiting(self, pass_: PassPlan) -> tuple[int, int]:
        """Return how many calls of a pass wait at the same time: per worker, and over all workers (0: no limit).

        (0, 0): calls are executed one after the other.
        """
        runs = {name: stage for name in pass_.runs if isinstance(stage := self.spec.stages[name], RunSpec)}
        if pass_.gang or self.states_read(pass_):
            return 0, 0
        limits = []
        for name, stage in runs.items():
            if limit := self.calls_at_once(name):
                size = -(-self.spec.datasets[pass_.dataset].batch // self.spec.replicas)
                if stage.per:  # a worker begins the next call while the last elements of one wait
                    limit = min(limit, 2 * -(-limit // size) + 2 * self.workers)
                if stage.per or stage.concurrency:
                    limits.append(limit)
        if limits and (self.overlapping(runs) or not self.asynchronous.intersection(runs)):
            return min(limits), min(limits)
        if any(stage.per or stage.rate or stage.retry for stage in runs.values()):
            return (CALLS_AT_ONCE if self.overlapping(runs) and not pass_.gpus else 1), 0
        return (CALLS_AT_ONCE, 0) if self.overlapping(runs) and not pass_.gpus else (0, 0)

    def is_paid(self, pass_: PassPlan) -> bool:
        """Return whether calls of a pass are limited, so that none is executed a second time because it is slow."""
        stages = [self.spec.stages[name] for name in pass_.runs]
        return any(isinstance(s, RunSpec) and (s.concurrency or s.per or s.rate or s.retry) for s in stages)

    def overlapping(self, runs: Mapping[str, RunSpec]) -> bool:
        """Return whether calls of all these stages may wait at the same time."""
        found = [name for name in runs if name in self.asynchronous]
        return bool(found) and not any(name in self.classes and not runs[name].concurrency for name in found)

    def calls_at_once(self, name: str) -> int:
        """Return how many calls of a run, or elements, wait at the same time over all workers; 0: none."""
        stage = self.spec.stages[name]
        assert isinstance(stage, RunSpec)
        if stage.concurrency or stage.gpus or name not in self.asynchronous or name in self.classes:
            return stage.concurrency or (self.workers if stage.per else 0)
        return CALLS_AT_ONCE * self.workers

    @property
    def hosts(self) -> int:
        """The number of workers that execute a step of compiled functions."""
        return min(self.workers, self.spec.replicas)

    @property
    def gpus_needed(self) -> float:
        return max((p.gpus for p in self.passes), default=0.0)

    @property
    def training(self) -> PassPlan | None:
        """The pass whose steps feed the updates; None if the spec has no updates."""
        return next((p for p in self.passes if p.updates), None)

    def gpu_owners(self, pass_: PassPlan) -> int:
        """Return the number of workers that own the GPUs which a call of a pass needs."""
        return sum(gpus >= pass_.gpus for gpus in self.supply.owned or ())

    def awaited(self, name: str) -> list[str]:
        """Return the stages whose values are arguments of a stage."""
        found = references(getattr(self.spec.stages[name], "with_", {}))
        return [ref.name for ref in found if isinstance(ref, StageRef)]

    def after(self, name: str) -> tuple[str, ...]:
        """Return the stages after whose end a stage begins."""
        return getattr(self.spec.stages[name], "after", ())

    def graph(self) -> Graph:
        """Return the graph of the plan, for pictures.

        Returns:
            `nodes`: name, kind (dataset, run, fold, update or output), phase (from 0; None for datasets and
            outputs) and lines of text; `edges`: source and target by name, and kind (data, stream, with, state or
            after). The name of an output is its path, after ">".
        """
        spec = self.spec
        nodes: list[dict[str, Any]] = []

        def add(name: str, kind: str, phase: int | None, *lines: str) -> None:
            nodes.append(
                {"name": name, "kind": kind, "phase": phase, "lines": [name.removeprefix(">"), *lines]}
            )

        for name, dataset in spec.datasets.items():
            add(name, "dataset", None, f"{dataset.kind}, batch {dataset.batch:,}")
        for number, phase in enumerate(self.phases):
            for pass_ in phase:
                for name in pass_.runs:
                    at_once = " at once" if pass_.gang else ""
                    add(name, "run", number, self.functions[name].label, f"x {spec.replicas}{at_once}")
                for name in pass_.folds:
                    verb = "gather" if isinstance(spec.stages[name], GatherSpec) else "reduce"
                    finish = [f"finish {self.finishes[name].label}"] if name in self.finishes else []
                    add(name, "fold", number, verb, *finish)
                for name in pass_.updates:
                    add(name, "update", number, self.functions[name].label, WHEN[self.states[name].per])
        streamed = {name for p in self.passes if self.maker(p) is not None for name in p.runs}
        streamed -= {name for p in self.passes for name in p.runs if spec.stages[name].of in p.runs}
        edges: list[dict[str, str]] = []

        def link(source: str, target: str, kind: str) -> None:
            edges.append({"source": source, "target": target, "kind": kind})

        for name, stage in spec.stages.items():
            link(stage.of, name, "stream" if name in streamed else "data")
            for kind, others in (
                ("with", self.awaited(name)),
                ("state", spec.links[name].reads),
                ("after", self.after(name)),
            ):
                for other in others:
                    link(other, name, kind)
        for key, path in spec.outputs.items():
            add(f">{path}", "output", None)
            link(key.partition("/")[0], f">{path}", "data")
        return {"nodes": nodes, "edges": edges}

    def __repr__(self) -> str:
        return f"<Plan of {self.spec.name}: {len(self.passes)} passes in {len(self.phases)} phases>"

    def _repr_html_(self) -> str:
        """Return the picture of the plan, for notebooks."""
        from pipedist.plan.picture import picture  # a run draws none

        return f'<div style="overflow-x:auto">{picture(self.graph())}</div>'

    def close(self) -> None:
        self.opened.close()
