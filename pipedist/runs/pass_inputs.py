"""What a pass is made of: the feed that it reads, its folds, their files and logs."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed, IndexedFeed, SequentialFeed
from pipedist.errors import OutputError
from pipedist.plan import PassPlan, Plan
from pipedist.runs.folds import Fold, ValueFold
from pipedist.runs.gather_fold import GatherFold
from pipedist.runs.spool import Spool, SpoolFeed
from pipedist.spec import GatherSpec, ReduceSpec, RunSpec, StageRef, UpdateSpec, references

if TYPE_CHECKING:
    from pipedist.outputs import RunFolder, Sink
    from pipedist.outputs.tables import Table
    from pipedist.runs.pass_journal import PassJournal

READING = "reading"
"""The part of a pass's snapshot that has its folds and its place in a training."""

STATE = "state."
"""Parts that are states begin so."""


def sink_of(plan: Plan, folder: RunFolder | None, name: str) -> Sink | None:
    """Return the file of a stage's value, None where it has none."""
    output = plan.spec.outputs.get(name)
    if output is None or folder is None:
        return None
    from pipedist.outputs import open_sink  # only runs with files need the formats

    stage = plan.spec.stages[name]
    return open_sink(
        folder.staged(output),
        shape="run" if getattr(stage, "per", "run") == "run" else "per",
        gather=isinstance(stage, GatherSpec),
        axis=stage.gather if isinstance(stage, GatherSpec) else 0,
        label=f"outputs.{name} ({output})",
        table=_table(plan, name),
    )


def _table(plan: Plan, name: str) -> Table | None:
    """Return how the value of a stage becomes rows, where that is not by its leaves."""
    stage = plan.spec.stages[name]
    if not isinstance(stage, ReduceSpec) or stage.combine is None or stage.per != "run":
        return None
    from pipedist.core.functions import load  # as the formats
    from pipedist.outputs.tables import table_of

    ref = plan.functions[name]
    return table_of(load(ref, [str(plan.spec.code)]) if ref.name else stage.combine)


def feed_of(plan: Plan, pass_: PassPlan, spools: Mapping[str, Spool]) -> Feed:
    """Return what a pass reads."""
    spec = plan.spec
    dataset = spec.datasets[pass_.dataset]
    if pass_.root != pass_.dataset:
        return SpoolFeed(spools[pass_.root], spec.replicas, dataset.batch)
    source = plan.sources[pass_.dataset]
    division = plan.division(pass_.dataset)
    if division is None:
        return SequentialFeed(
            source,
            batch=dataset.batch,
            replicas=spec.replicas,
            drop_remainder=dataset.drop_remainder,
            epochs=plan.epochs(pass_),
        )
    return IndexedFeed(
        source,
        pass_.dataset,
        division,
        epochs=plan.epochs(pass_),
        shuffle_seed=spec.seed if dataset.shuffle else None,
    )


class Files(Protocol):
    """Where the files of outputs are."""

    def final(self, output: str) -> Path:
        """Return where the file of an output is, absolute."""


def read_later(plan: Plan) -> frozenset[str]:
    """Return the stages whose values a later phase reads, or an update."""
    return frozenset(
        ref.name
        for stage in plan.spec.stages.values()
        if isinstance(stage, RunSpec | UpdateSpec)
        for ref in references(stage.with_)
        if isinstance(ref, StageRef)
    ) | {stage.of for stage in plan.spec.stages.values() if isinstance(stage, UpdateSpec)}


def keeps(plan: Plan, folder: Files | None, read_later: frozenset[str], name: str) -> bool:
    """Return whether a reduce or gather stage keeps its values, though it may write them to a file."""
    if folder is None or name not in plan.spec.outputs:
        return True
    stage = plan.spec.stages[name]
    return name in read_later if isinstance(stage, GatherSpec) else getattr(stage, "per", "run") == "run"


def grows(plan: Plan, name: str) -> bool:
    """Return whether what a fold needs to go on grows with the run: then it is in a log."""
    stage = plan.spec.stages[name]
    return isinstance(stage, GatherSpec) or getattr(stage, "per", "run") != "run"


def speculation_of(plan: Plan) -> float:
    """Return how many times as long as others a call must take to get a second attempt; 0: none does."""
    times = plan.spec.cluster.speculation
    return 0.0 if isinstance(times, str) else float(times)


async def restore_pass(
    plan: Plan,
    pass_: PassPlan,
    durable: PassJournal,
    folder: Files,
    read_later: frozenset[str],
    values: MutableMapping[str, Tree],
    spools: MutableMapping[str, Spool],
    unwritten: Mapping[str, OutputError],
) -> None:
    """Bring back what a complete pass has made.

    Args:
        values, spools: where it goes.
        unwritten: stages whose files are not there.

    Raises:
        JournalError: it is damaged.
    """
    found = durable.part(READING)
    for name in pass_.folds:
        if keeps(plan, folder, read_later, name):
            fold = _finished_fold(plan, name)
            entries = durable.entries(name) if grows(plan, name) else ()
            await fold.restore(found["folds"][name], ((entry.meta, tree) for entry, tree in entries))
            values[name] = fold.result
        elif name not in unwritten:
            values[name] = folder.final(plan.spec.outputs[name])
    for name in pass_.kept:
        spools[name] = spool = Spool(name, durable.log(name))
        spool.restore(durable.places(name))
    values.update((name, value[0]) for name, value in durable.parts(STATE).items())


def _finished_fold(plan: Plan, name: str) -> Fold:
    stage = plan.spec.stages[name]
    if isinstance(stage, GatherSpec):
        return GatherFold(name, stage.per, stage.gather, None)
    if not isinstance(stage, ReduceSpec):
        raise TypeError(f"stage {name} is neither a reduce nor a gather")
    return ValueFold(name, stage.per, None)
