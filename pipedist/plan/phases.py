"""Group the stages of a spec into passes, and the passes into phases.

A new phase is needed for a value that must be complete before it is read (`${stages.NAME}` in a `with`, or
`after`). A run stage is in the phase of its input, or in a later one because of its `with` or `after`; then the
values of its input are kept and read again, not computed twice: every reader sees the values that were committed
first.

All passes of a training (`pipedist.spec.training`) are in ONE phase: the pass whose steps feed the updates, and
a pass for each held-out dataset, which follows its epochs. Other stages of the feeding dataset share its pass if
possible, because its epochs may end early.
"""

from __future__ import annotations

from graphlib import TopologicalSorter

from pipedist.plan.model import PassPlan
from pipedist.spec import RunSpec, Spec, UpdateSpec
from pipedist.spec.training import TrainingStages


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
    groups: dict[tuple[int, str], list[str]] = {}
    for name in places.order:
        if not isinstance(spec.stages[name], UpdateSpec):
            groups.setdefault((places.phase[name], places.root[name]), []).append(name)
    roots = {root for _, root in groups}
    passes = []
    held_out = training.held_out if training is not None else ()
    order = sorted(groups.items(), key=lambda group: (group[0][0], group[0][1] in held_out, group[0][1]))
    for (number, root), names in order:
        runs = [name for name in names if isinstance(spec.stages[name], RunSpec)]
        dataset = dataset_of(spec, root)
        trains = training is not None and (number, root) == places.training_pass
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
                key=f"{number}/{root}",
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
        self.training_pass: tuple[int, str] | None = None
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
        if isinstance(stage, RunSpec):
            waited = [1 + self.phase[other] for other in self._links[name].waits]
            self.phase[name] = max([least, before, *waited])
            if self.phase[name] > before and stage.of in self._spec.stages:
                self.root[name] = stage.of

    def _put_training(self, training: TrainingStages) -> None:
        members = [name for name in self.order if name in training.members]
        number = max(
            (1 + self.phase[o] for name in members for o in self._links[name].waits if o in self.phase),
            default=0,
        )
        for name in members:
            self._put(name, number)
        fed = [name for name in members if dataset_of(self._spec, name) == training.feeder]
        root = self.root[fed[0]]
        for name in fed:
            if self.root[name] != root:
                raise ConflictingTrainingInputs(name, self.root[name], root)
        self.training_pass = (number, root)

    def _least(self, name: str) -> int:
        """Return the earliest phase of a stage; it is after a training that may end the stage's epochs early."""
        if self._training is None or self.training_pass is None:
            return 0
        number, root = self.training_pass
        if self._spec.stages[name].of != self._training.feeder:
            return 0
        return number if root == self._training.feeder else number + 1
