"""Group the stages of a spec into passes, and the passes into phases.

A new phase is needed for a value that must be complete before it is read (`${stages.NAME}` in a `with`, or
`after`). A run stage is in the phase of its input, or in a later one because of its `with` or `after`; then the
values of its input are kept and read again, not computed twice: every reader sees the values that were committed
first.

A run whose `resources` differ from those of its input, or that has a `batch`, begins a pass of its own in the same
phase: workers with and without the resources execute both at once, and the values stream from one pass to the
other. Runs that read the same dataset with different `resources` are passes of their own too, each of which reads
the dataset. In a training, the stages that feed updates or read a changing state are one pass (`why_together`).

All passes of a training (`pipedist.spec.training`) are in ONE phase: the pass whose steps feed the updates, and
a pass for each held-out dataset, which follows its epochs. Other stages of the feeding dataset share its pass if
possible, because its epochs may end early.
"""

from __future__ import annotations

from graphlib import TopologicalSorter

from pipedist.plan.model import PassPlan
from pipedist.spec import RunSpec, Spec, UpdateSpec
from pipedist.spec.training import TrainingStages, why_together


class ConflictingTrainingInputs(Exception):
    """The updates of a spec have two inputs that are not read in one pass; that of `stage` differs."""

    def __init__(self, stage: str, of: str, other: str) -> None:
        self.stage = stage
        super().__init__(
            f"the updates are fed by {of!r} here and by {other!r} elsewhere, and one of these is kept "
            "from an earlier phase: they can't be read in one pass"
        )


def dataset_of(spec: Spec, name: str) -> str:
    """Return the dataset that a stage or pass reads, directly or through other stages."""
    while name in spec.stages:
        name = spec.stages[name].of
    return name


def phases(spec: Spec, training: TrainingStages | None) -> tuple[tuple[PassPlan, ...], ...]:
    """Return the passes of each phase, or raise ConflictingTrainingInputs."""
    places = _Places(spec, training)
    groups: dict[tuple[int, int, bool, str, float, int], list[str]] = {}
    held_out = training.held_out if training is not None else ()
    for name in places.order:
        if not isinstance(spec.stages[name], UpdateSpec):
            root = places.root[name]
            place = (places.phase[name], places.depth[name], root in held_out, root, *places.kind[name])
            groups.setdefault(place, []).append(name)
    roots = {group[3] for group in groups}
    passes = []
    for (number, _, _, root, gpus, batch), names in sorted(groups.items()):
        runs = [name for name in names if isinstance(spec.stages[name], RunSpec)]
        dataset = dataset_of(spec, root)
        trains = training is not None and (number, root, gpus, batch) == places.training_pass
        passes.append(
            PassPlan(
                number,
                dataset,
                root,
                tuple(runs),
                tuple(name for name in spec.stages if name in names and name not in runs),
                tuple(name for name in runs if name in roots),
                updates=training.updates if trains and training is not None else (),
                follows=training.feeder if training is not None and dataset in held_out else "",
                gang=any(getattr(spec.stages[name], "collectives", False) for name in runs),
                gpus=max((getattr(spec.stages[name], "gpus", 0.0) for name in runs), default=0.0),
                batch=batch or spec.datasets[dataset].batch,
                key=f"{number}/{root}" + (f"+{gpus:g}+{batch}" if (gpus, batch) != (0.0, 0) else ""),
            )
        )
    count = max((p.phase for p in passes), default=-1) + 1
    return tuple(tuple(p for p in passes if p.phase == number) for number in range(count))


class _Places:
    """The phase of each stage, and the root of its pass."""

    def __init__(self, spec: Spec, training: TrainingStages | None) -> None:
        self._spec = spec
        self._training = training
        self._links = spec.links
        self.phase: dict[str, int] = {}
        self.root: dict[str, str] = {}
        self.depth: dict[str, int] = {}
        """The number of passes of the same chain and phase before that of a stage."""
        self.kind: dict[str, tuple[float, int]] = {}
        """What passes with the same root differ in: GPUs of a pass that begins within a phase, and the batch size
        that differs from the dataset's, or 0."""
        self._least_gpus: dict[str, float] = {}  # of the runs that read a dataset
        for stage in spec.stages.values():
            if isinstance(stage, RunSpec) and stage.of in spec.datasets:
                self._least_gpus[stage.of] = min(stage.gpus, self._least_gpus.get(stage.of, stage.gpus))
        self.training_pass: tuple[int, str, float, int] | None = None
        graph = {
            name: [other for other in (spec.stages[name].of, *links.waits) if other in spec.stages]
            for name, links in spec.links.items()
        }
        self.order = list(TopologicalSorter(graph).static_order())  # independent stages as in the spec
        if training is not None:
            for name in (n for n in self.order if n in training.early - training.members):
                self._put(name, 0)
            self._put_training(training)
        for name in (n for n in self.order if n not in self.phase):
            self._put(name, self._least(name))

    def _put(self, name: str, least: int) -> None:
        stage = self._spec.stages[name]
        before = self.phase.get(stage.of, least)
        self.phase[name] = before
        self.root[name] = self.root.get(stage.of, stage.of)
        self.depth[name] = self.depth.get(stage.of, 0)
        self.kind[name] = self.kind.get(stage.of, (0.0, 0))
        if not isinstance(stage, UpdateSpec):
            waited = [1 + self.phase[other] for other in self._links[name].waits]
            self.phase[name] = max([least, before, *waited])
            if self.phase[name] > before and stage.of in self._spec.stages:
                self.root[name], self.depth[name] = stage.of, 0
                gpus = 0.0 if not isinstance(stage, RunSpec) or self._why_together(name) else stage.gpus
                batch = stage.batch if isinstance(stage, RunSpec) else None
                self.kind[name] = (gpus, batch or self.kind[name][1])
            elif not isinstance(stage, RunSpec) or not self._begins_a_pass(name, stage):
                return
            elif stage.of in self._spec.datasets:
                self.kind[name] = (stage.gpus, 0)
            else:
                self.root[name], self.depth[name] = stage.of, self.depth[name] + 1
                self.kind[name] = (stage.gpus, stage.batch or self.kind[name][1])

    def _begins_a_pass(self, name: str, stage: RunSpec) -> bool:
        """Return whether a run is executed in calls of its own, although its input is in the same phase."""
        source = self._spec.stages.get(stage.of)
        gpus = source.gpus if isinstance(source, RunSpec) else self._least_gpus[stage.of]
        if stage.batch is None and stage.gpus == gpus:
            return False
        return not self._why_together(name)

    def _why_together(self, name: str) -> str:
        return why_together(name, tuple(self._spec.datasets), self._links, self._training)

    def _put_training(self, training: TrainingStages) -> None:
        members = [name for name in self.order if name in training.members]
        number = max(
            (1 + self.phase[o] for name in members for o in self._links[name].waits if o in self.phase),
            default=0,
        )
        for name in members:
            self._put(name, number)
        fed = [name for name in members if dataset_of(self._spec, name) == training.feeder]
        core = [name for name in fed if name in training.core]
        root = self.root[core[0]]
        for other in (self.root[name] for name in core if self.root[name] != root):
            first = next(name for name in fed if self.root[name] == other)
            raise ConflictingTrainingInputs(first, other, root)
        self.training_pass = (number, root, *self.kind[core[0]])

    def _least(self, name: str) -> int:
        """Return the earliest phase of a stage; it is after a training that may end the stage's epochs early."""
        if self._training is None or self.training_pass is None:
            return 0
        number, root, *_ = self.training_pass
        if self._spec.stages[name].of != self._training.feeder:
            return 0
        return number if self.phase.get(root, number) == number else number + 1
