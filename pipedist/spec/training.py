"""The training of a spec: the stages that change states, or read states while they change.

The dataset that feeds the updates is read step by step, and the updates are applied between the steps.
Datasets whose stages read a state but feed no update are held out: they are read once after each epoch of the
feeding dataset. A stage that waits for the end of the training reads the final states, and is not part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct


class Links(Struct, frozen=True):
    """The dependencies of a stage; its verb and its input may be unknown (None)."""

    verb: str | None
    of: str | None
    waits: tuple[str, ...]  # stages that must be complete before it begins (`${stages.NAME}`, `after`)
    reads: tuple[str, ...]  # the updates whose states it reads (`${state.NAME}`)
    per: str = "run"  # run, epoch or step: how often a reduce or gather has a value
    ends: bool = False  # an update that may end the epochs early (`until`)


class TrainingStages(Struct, frozen=True):
    """The training of a spec."""

    feeder: str  # the dataset that feeds the updates
    updates: tuple[str, ...]  # the updates, each after those of the same granularity whose states it reads
    held_out: tuple[str, ...]  # the datasets that are read once after each epoch of the feeder
    members: frozenset[str]  # updates, their inputs, readers of a changing state, stages of held-out datasets
    core: frozenset[str]  # the inputs of updates, and the readers of a changing state
    early: frozenset[str]  # the stages that members wait for, and the dependencies of these


def ancestry(name: str, links: Mapping[str, Links]) -> list[str]:
    """Return a stage, its input, the input of that, and so on; a cycle is followed once."""
    chain = {name: None}  # a set in order
    while name in links:
        of = links[name].of
        if of is None or of in chain:
            break
        chain[of] = None
        name = of
    return list(chain)


def root_of(name: str, datasets: Collection[str], links: Mapping[str, Links]) -> str | None:
    """Return the dataset that a stage descends from, or None."""
    root = ancestry(name, links)[-1]
    return root if root in datasets else None


def granularity(update: str, links: Mapping[str, Links]) -> str:
    """Return how often a state changes, as often as its input has values: per run, epoch or step."""
    source = links.get(links[update].of or "")
    return "run" if source is None else source.per


def why_together(
    name: str, datasets: Sequence[str], links: Mapping[str, Links], training: TrainingStages | None
) -> str:
    """Return why a run is executed in one call with the runs beside and before it, whatever their resources; or "".

    In a training, the stages that feed updates or read a changing state stay together: all of them are in the calls
    that the run begins or after these, or none.
    """
    root = root_of(name, datasets, links)
    if training is None or root not in (training.feeder, *training.held_out):
        return ""
    if root != training.feeder:
        return f"`{root}` is held out of a training"
    if ends := [update for update in training.updates if links[update].ends]:
        return f"`until` of `{ends[0]}` may end the epochs of `{root}` early"
    core = {each: name in ancestry(each, links) for each in sorted(training.core)}
    core = {each: after for each, after in core.items() if root_of(each, datasets, links) == root}
    if len({*core.values()}) <= 1:
        return ""
    other = next(each for each, after in core.items() if not after)
    return f"`{other}`, which does not read `{name}`, is part of the training too"


def training_of(datasets: Sequence[str], links: Mapping[str, Links]) -> TrainingStages | None:
    """Return the training of a spec, which may have problems, or None if no dataset feeds an update."""
    updates = [name for name, link in links.items() if link.verb == "update"]
    if not updates:
        return None
    roots = {name: root_of(name, datasets, links) for name in links}
    feeder = next((root for name in updates if (root := roots[name]) is not None), None)
    if feeder is None:
        return None
    sources = {of for name in updates if (of := links[name].of) in links and of is not None}
    core = {*updates, *sources}
    core |= (readers := _readers(core, links))
    evaluated = {roots[name] for name in readers} - {feeder, None}
    held_out = tuple(name for name in datasets if name in evaluated)
    core |= {name for name, root in roots.items() if root in held_out}
    together = frozenset(sources | readers)
    core_chain = {other for name in core for other in ancestry(name, links) if other in links}
    early = _awaited(core_chain, links, core)
    return TrainingStages(
        feeder, _ordered(updates, links), held_out, frozenset(core_chain - early), together, frozenset(early)
    )


def _readers(core: set[str], links: Mapping[str, Links]) -> set[str]:
    """Return the stages that read a state while it changes, without waiting for the end of its changes."""
    found = {name for name, link in links.items() if link.reads and link.verb != "update"}
    for ends in (core, found.copy()):
        found -= {name for name in found if not ends.isdisjoint(_awaited(ancestry(name, links)[:-1], links))}
    return found


def _awaited(names: Iterable[str], links: Mapping[str, Links], ends: Collection[str] = ()) -> set[str]:
    """Return all stages that some stages wait for, with their dependencies, up to the stages `ends`."""
    found: set[str] = set()
    open_ends = [other for name in names for other in links[name].waits if other in links]
    while open_ends:
        name = open_ends.pop()
        if name in found or name in ends:
            continue
        found.add(name)
        link = links[name]
        open_ends += [other for other in (*link.waits, link.of) if other is not None and other in links]
    return found


def _ordered(updates: Sequence[str], links: Mapping[str, Links]) -> tuple[str, ...]:
    """Return the updates, each after those whose states it reads, otherwise as written."""
    done: list[str] = []
    waiting = list(updates)
    while waiting:
        needs = {
            name: {other for other in waiting if granularity(other, links) == granularity(name, links)}
            for name in waiting
        }
        # the checks report a cycle; here its first update comes first
        free = (name for name in waiting if needs[name].isdisjoint(links[name].reads))
        ready = next(free, waiting[0])
        done.append(ready)
        waiting.remove(ready)
    return tuple(done)
