"""Rules between the sections of a spec: names, kinds, the graph of stages, states, and files.

The checks read SUMMARIES of the stages, not their models: a stage whose `timeout_s` is wrong still has a name,
a verb and an `of`, so that its own problem hides none of its neighbours'.
"""

from __future__ import annotations

import keyword
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

from msgspec import Struct

from pipedist.spec.diagnostics import Path, Problems
from pipedist.spec.interpolation import NAME, NAME_EXPECTED, StageRef, StateRef
from pipedist.spec.model import ENGINE_ADDRESS_EXPECTED, ENGINE_ADDRESS_PATTERN, LAUNCHERS_OF, fits_engine
from pipedist.spec.outputs import OUTPUT_ENDINGS, is_sink, split_template
from pipedist.spec.scalars import describe, listing
from pipedist.spec.stages import OPS
from pipedist.spec.training import (
    Links,
    TrainingStages,
    ancestry,
    granularity,
    root_of,
    training_of,
    why_together,
)

_READS = {
    "run": ("dataset", "run"),
    "reduce": ("dataset", "run"),
    "gather": ("dataset", "run"),
    "update": ("reduce", "gather"),
}
_RESERVED_FILES = ("quarantine.jsonl",)
_TABLES = (".csv", ".parquet", ".arrow", ".sqlite", ".duckdb", "files")  # formats with a row for each value
_FIELDS = re.compile(r"\{[^{}]+\}")


class StageSummary(Struct, frozen=True):
    """The keys of a stage that other stages depend on, and all its keys as written (`raw`).

    `verb` is None if the stage has none, `of` if it is missing or not a name.
    """

    verb: str | None
    of: str | None
    per: str
    after: tuple[str, ...]
    raw: Mapping[str, object]


def summarize(verb: str | None, raw: object) -> StageSummary:
    keys = raw if isinstance(raw, dict) else {}
    of, per, after = keys.get("of"), keys.get("per", "run"), keys.get("after", ())
    names = (after,) if isinstance(after, str) else after if isinstance(after, list | tuple) else ()
    return StageSummary(
        verb,
        of if isinstance(of, str) else None,
        per if isinstance(per, str) else "run",
        tuple(name for name in names if isinstance(name, str)),
        keys,
    )


class Checks:
    """Checks one spec, of which `datasets`, `outputs` and `cluster` are as written, and adds every problem."""

    def __init__(
        self,
        datasets: Mapping[str, object],
        stages: Mapping[str, StageSummary],
        references: Sequence[tuple[Path, StageRef | StateRef]],
        problems: Problems,
    ) -> None:
        self._datasets = datasets
        self._stages = stages
        self._references = references
        self._note = problems.add
        self._note_key = partial(problems.add, at_key=True)
        self._acyclic = True
        self._waits: list[tuple[Path, str, str, str]] = [
            (path, str(path[1]), reference.name, str(reference))
            for path, reference in references
            if isinstance(reference, StageRef)
        ]
        """(place, waiting stage, awaited stage, the text at the place to point at or "")."""
        for name, stage in stages.items():
            self._waits += [(("stages", name, "after"), name, other, "") for other in stage.after]
        states = [(path[1], ref.name) for path, ref in references if isinstance(ref, StateRef)]
        self.links = {
            name: Links(
                stage.verb,
                stage.of,
                tuple(awaited for _, waiting, awaited, _ in self._waits if waiting == name),
                tuple(state for reading, state in states if reading == name),
                stage.per,
                stage.raw.get("until") is not None,
            )
            for name, stage in stages.items()
        }

    def check(self, *, outputs: Mapping[object, object], cluster: Mapping[object, object]) -> None:
        self._names()
        self._keys()
        self._edges()
        self._cycles()
        self._batches()
        self._states()
        self._outputs(outputs)
        self._cluster(cluster)

    def _names(self) -> None:
        """Names are well-formed, and no stage has the name of a dataset."""
        for section, names in (("datasets", self._datasets), ("stages", self._stages)):
            for name in names:
                if isinstance(name, str) and "${" in name:
                    continue  # a problem of the interpolation
                if not isinstance(name, str) or not NAME.fullmatch(name):
                    self._note_key((section, name), f"{name!r} is not a valid name", NAME_EXPECTED)
        for name in self._stages:
            if name in self._datasets:
                message = f"the stage `{name}` has the name of a dataset"
                self._note_key(("stages", name), message, "a name of its own")

    def _edges(self) -> None:
        """The inputs of a stage, and the stages it waits for, exist and are of the right kind."""
        for name, stage in self._stages.items():
            path: Path = ("stages", name)
            if stage.of is not None and stage.verb is not None:
                self._check_input((*path, "of"), stage.verb, stage.of)
            for index, other in enumerate(stage.after):
                if other not in self._stages:
                    at = () if isinstance(stage.raw["after"], str) else (index,)
                    self._unknown((*path, "after", *at), "stage", other, self._stages)
        for path, reference in self._references:
            if isinstance(reference, StageRef):
                self._check_value(path, reference)
            else:
                self._check_state(path, reference)

    def _cycles(self) -> None:
        """No stage waits for itself.

        A stage that reads a state does not wait: it gets the state before the step. But among the updates of
        one step, an update that reads the state of another one comes after it.
        """
        edges: dict[str, dict[str, Path]] = {name: {} for name in self._stages}
        for name, stage in self._stages.items():
            if stage.of in edges and stage.of not in self._datasets:
                edges[name].setdefault(stage.of, ("stages", name, "of"))
            for other in stage.after:
                if other in edges:
                    edges[name].setdefault(other, ("stages", name, "after"))
        for path, reference in self._references:
            target = self._stages.get(reference.name)
            waits = isinstance(reference, StageRef) and target is not None and target.verb != "update"
            if waits or self._is_chained(str(path[1]), reference.name):
                edges[str(path[1])].setdefault(reference.name, path)
        while cycle := _cycle(edges):
            self._acyclic = False
            chain = " -> ".join([*cycle, cycle[0]])
            place = edges[cycle[0]][cycle[1 % len(cycle)]]
            self._note(place, f"these stages wait for each other: {chain}", "stages without a cycle")
            for name in cycle:  # each stage is reported in one cycle
                del edges[name]

    def _keys(self) -> None:
        """Keys of one section that depend on each other."""
        for name, dataset in self._datasets.items():
            if isinstance(dataset, dict):
                for key in ("function", "source"):
                    self._arguments(dataset.get(key), ("datasets", name, key))
        for name, stage in self._stages.items():
            path = ("stages", name)
            if stage.verb == "reduce":
                self._axis(path, stage.raw)
            if stage.verb in ("reduce", "gather"):
                self._finish(path, stage.raw)
            if stage.verb == "update":
                self._arguments(stage.raw.get("until"), (*path, "until"))
            if stage.verb == "run":
                self._attempts(path, stage.raw)
            if stage.verb is not None:
                self._arguments(stage.raw, path)
            if stage.verb == "update" and "function" in (init := as_dict(stage.raw.get("init"))):
                self._arguments(init, (*path, "init"))

    def _arguments(self, section: object, path: Path) -> None:
        """The keys of a section's `with` can be keyword arguments."""
        path = (*path, "with")
        for name in as_dict(as_dict(section).get("with")):
            if name == "ctx":
                message = "`ctx` is reserved: a parameter of this name gets the ReplicaContext"
                self._note_key((*path, "ctx"), message, "another name")
            elif not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
                at = (*path, name) if isinstance(name, str | int) else path
                self._note_key(at, f"{name!r} is not the name of an argument", "a Python identifier")

    def _batches(self) -> None:
        """A run with a `batch` reads a run, and is executed in calls of its own."""
        training = training_of(tuple(self._datasets), self.links)
        for name, stage in self._stages.items():
            if stage.verb != "run" or stage.raw.get("batch") is None:
                continue
            path = ("stages", name, "batch")
            if stage.of in self._datasets:
                message = f"`batch` requires the input of `{name}` to be a run, and `{stage.of}` is a dataset"
                self._note_key(path, message, f"`batch` in `{stage.of}`, or no `batch`")
            elif why := why_together(name, tuple(self._datasets), self.links, training):
                message = f"`{name}` can't have a `batch`: {why}"
                self._note_key(path, message, "no `batch`")

    def _cluster(self, cluster: Mapping[object, object]) -> None:
        """A key of some launchers is present with them, and only with them."""
        launcher = cluster.get("launcher", "local")
        if not isinstance(launcher, str):
            return  # a problem of the key itself
        for key, example in (
            ("listen", '`listen: "tcp://ADDRESS:PORT"`'),
            ("key_file", "`key_file: FILE`, a file made by `pipedist keys new --output FILE`"),
        ):
            if launcher == "connect" and key not in cluster:
                message = f"`{key}` is missing, and `launcher: connect` requires it"
                self._note_key(("cluster",), message, example)
        for key, launchers in LAUNCHERS_OF.items():
            if key in cluster and launcher not in launchers:
                names = "`launcher: " + "` or `".join(launchers) + "`"
                self._note_key(("cluster", key), f"`{key}` requires {names}", f"no `{key}`, or {names}")
        address, expected = cluster.get("address"), ENGINE_ADDRESS_EXPECTED.get(launcher)
        is_read = isinstance(address, str) and re.match(ENGINE_ADDRESS_PATTERN, address)
        if is_read and expected and not fits_engine(str(address), launcher):
            message = f"`address` must be {expected}, got {describe(address)}"
            self._note(("cluster", "address"), message, expected)

    def _states(self) -> None:
        """States are fed and read as the language requires."""
        links = self.links
        training = training_of(tuple(self._datasets), links)
        if training is None:
            return
        self._one_feeder(training, links)
        self._until(links)
        self._held_out(training, links)
        if self._acyclic:  # else stages already wait for each other without the training
            self._waits_for_training(training, links)

    def _one_feeder(self, training: TrainingStages, links: Mapping[str, Links]) -> None:
        """One dataset feeds all updates."""
        updates = [name for name, link in links.items() if link.verb == "update"]
        roots = {name: root_of(name, self._datasets, links) for name in updates}
        first = next(name for name in updates if roots[name] == training.feeder)
        for name, root in roots.items():
            if root not in (training.feeder, None):
                message = f"`{name}` is fed by the dataset `{root}`, but `{first}` by `{training.feeder}`"
                self._note(("stages", name, "of"), message, "one dataset that feeds all updates")

    def _until(self, links: Mapping[str, Links]) -> None:
        """An `until` is called before the last epoch is over."""
        for name, link in links.items():
            source = links.get(link.of or "")
            if link.verb != "update" or source is None or source.verb not in ("reduce", "gather"):
                continue
            if self._stages[name].raw.get("until") is not None and granularity(name, links) == "run":
                self._note_key(
                    ("stages", name, "until"),
                    f"`until` has no effect: `{link.of}` has one value for the run, after all epochs",
                    f"`per: step` or `per: epoch` in `{link.of}`, or no `until`",
                )

    def _held_out(self, training: TrainingStages, links: Mapping[str, Links]) -> None:
        """A held-out dataset has no epochs of its own, and its folds have a value per epoch."""
        for dataset in training.held_out:
            feed = f"each epoch of `{training.feeder}`"
            reason = f"`{dataset}` is read once after {feed}, because its stages read a state"
            epochs = as_dict(self._datasets[dataset]).get("epochs", 1)
            if type(epochs) is int and epochs > 1:
                place = ("datasets", dataset, "epochs")
                self._note_key(place, f"`epochs` has no effect: {reason}", "no `epochs`")
            for name, link in links.items():
                needs_epochs = link.verb in ("reduce", "gather") and link.per != "epoch"
                if needs_epochs and root_of(name, self._datasets, links) == dataset:
                    is_written = "per" in self._stages[name].raw
                    self._note(
                        ("stages", name, "per") if is_written else ("stages", name),
                        f"`{name}` must have a value per epoch: {reason}",
                        "`per: epoch`, or `after: UPDATE` on the run, to read the last states",
                        at_key=not is_written,
                    )

    def _waits_for_training(self, training: TrainingStages, links: Mapping[str, Links]) -> None:
        """A stage that takes part in the training cannot wait for its end."""
        for path, name, awaited, token in self._waits:
            if name not in training.members | training.early or awaited not in links:
                continue
            if any(other in training.members for other in ancestry(awaited, links)):
                self._note(
                    path,
                    f"`{name}` cannot wait for `{awaited}`: `{name}` takes part in the training on "
                    f"`{training.feeder}`, and `{awaited}` is complete only when the training ends",
                    "a stage that depends on no state, or ${state.NAME}",
                    fragment=token,
                )

    def _outputs(self, outputs: Mapping[object, object]) -> None:
        """Outputs belong to stages that have a value, and are different files in the output folder."""
        files: dict[str, str] = {}
        for name, written in outputs.items():
            path: Path = ("outputs", str(name))
            stage = self._stages.get(str(name))
            valued = [other for other, s in self._stages.items() if s.verb in ("reduce", "gather", "update")]
            expected = _one_of(valued, "a reduce, gather or update")
            if stage is None:
                message = f"there is no stage `{name}`"
                if name in self._datasets:
                    message = f"`{name}` is a dataset, not a stage"
                self._note_key(path, message, expected, allowed=valued, given=str(name))
            elif stage.verb == "run":
                self._note_key(path, f"`{name}` is a run, which has no single value", expected)
            if isinstance(written, str) or is_sink(written):
                self._output(path, str(name), written, files)
                continue
            for part, file in as_dict(written).items():
                if not isinstance(part, str) or not all(part.split("/")):
                    message = f"{part!r} is not a path in the value of `{name}`"
                    self._note_key((*path, str(part)), message, "keys joined with `/`, as in `tables/left`")
                else:
                    self._output((*path, part), str(name), file, files)

    def _output(self, path: Path, name: str, written: object, files: dict[str, str]) -> None:
        if isinstance(written, str):
            self._file(path, name, written, files)
        elif isinstance(written, dict) and is_sink(written):
            ((kind, keys),) = written.items()
            place = keys.get("path")
            if not isinstance(place, str):
                return  # a problem of its section
            if posixpath.isabs(place) and kind in ("sqlite", "duckdb"):
                files[f"{name}.json"] = name
                return
            endings = () if kind == "sink" else (f".{kind}",)
            self._file((*path, kind, "path"), name, place, files, endings)

    def _file(
        self,
        path: Path,
        name: str,
        written: str,
        files: dict[str, str],
        endings: tuple[str, ...] = OUTPUT_ENDINGS,
    ) -> None:
        normal = posixpath.normpath(written)
        if posixpath.isabs(written) or ".." in written.split("/") or "\0" in written:
            self._note(path, f"{written!r} is outside the output folder", "a relative path without `..`")
            return
        base, ending = posixpath.splitext(posixpath.basename(normal))
        if "{" in written and endings is OUTPUT_ENDINGS:
            if _FIELDS.search(written) is None or written.endswith("/"):
                message = f"{written!r} has no name of a column in braces, or names no files"
                self._note(path, message, "a path such as `thumbs/{key}.png`")
                return
            ending = "files"
            normal = split_template(written)[0] or name
        elif endings and (ending not in endings or (written.endswith("/") and ending != ".parquet")):
            message = f"{written!r} does not end in {'a known format' if len(endings) > 1 else endings[0]}"
            self._note(path, message, listing(endings), allowed=endings, given=ending or base)
            return
        if normal in _RESERVED_FILES or normal.startswith("."):
            self._note(path, f"{normal!r} is reserved: pipedist writes it itself", "another name")
            return
        for other, owner in files.items():
            if normal == other or normal.startswith(f"{other}/") or other.startswith(f"{normal}/"):
                message = f"{written!r} is also the path of the output of `{owner}`"
                self._note(path, message, "a file of its own")
                return
        files[normal] = name
        stage = self._stages.get(name)
        if stage is not None and (misfit := _table_misfit(ending, stage)):
            self._note(path, *misfit)

    def _check_input(self, path: Path, verb: str, of: str) -> None:
        kinds = _READS[verb]
        readable = listing(map(_article, kinds))
        allowed = [name for name, stage in self._stages.items() if stage.verb in kinds and name != path[1]]
        if "dataset" in kinds:
            allowed = [*self._datasets, *allowed]
        stage = self._stages.get(of)
        if stage is None and not self._datasets:
            return  # a problem of the whole spec
        kind = "dataset" if of in self._datasets else stage.verb if stage is not None else "missing"
        if kind == "missing":
            self._unknown(path, "dataset or stage" if "dataset" in kinds else "stage", of, allowed)
        elif kind is not None and kind not in kinds:
            message = f"`of` must be {readable}, but `{of}` is {_article(kind)}"
            self._note(path, message, _one_of(allowed, f"the name of {readable}"))

    def _check_value(self, path: Path, reference: StageRef) -> None:
        allowed = [
            name for name, s in self._stages.items() if s.verb in ("reduce", "gather") and s.per == "run"
        ]
        name, token = reference.name, str(reference)
        stage = self._stages.get(name)
        expected = _one_of(allowed, "a reduce or gather with `per: run`")
        if stage is None:
            message = f"there is no stage `{name}`"
            self._note(path, message, expected, allowed=allowed, given=name, fragment=token)
        elif stage.verb == "update":
            expected = f"${{state.{name}}}; in a stage with `after: {name}` it is the last value"
            self._note(path, f"`{name}` is an update, whose value is a state", expected, fragment=token)
        elif stage.verb == "run":
            self._note(path, f"`{name}` is a run, which has no single value", expected, fragment=token)
        elif stage.verb is not None and stage.per != "run":
            message = f"`{name}` has a value per {stage.per}, not one for the run"
            self._note(path, message, expected, fragment=token)

    def _check_state(self, path: Path, reference: StateRef) -> None:
        name, stage = reference.name, self._stages.get(reference.name)
        reader = self._stages.get(str(path[1]))
        if reader is not None and reader.verb in ("reduce", "gather"):
            message = "a `finish` can't read a state, which may change while it runs"
            self._note(path, message, "${stages.NAME} of a reduce or gather", fragment=str(reference))
        if stage is None or stage.verb not in ("update", None):
            allowed = [other for other, each in self._stages.items() if each.verb == "update"]
            self._unknown(path, "update", name, allowed, fragment=str(reference))

    def _is_chained(self, name: str, other: str) -> bool:
        """Return whether both are updates that are applied at the same times."""
        pair = [self._stages.get(update) for update in (name, other)]
        if any(stage is None or stage.verb != "update" for stage in pair):
            return False
        sources = [self._stages.get(stage.of or "") for stage in pair if stage is not None]
        return len({source.per if source is not None else "" for source in sources}) == 1

    def _attempts(self, path: Path, raw: Mapping[str, object]) -> None:
        """Keys for calls that wait go together, and not with a gang."""
        retries, collectives = raw.get("retries"), raw.get("collectives")
        resources = raw.get("resources")
        devices = resources.get("devices") if isinstance(resources, dict) else None
        if isinstance(resources, dict) and not resources:
            self._note_key(
                (*path, "resources"), "`resources` names none", "`gpus` or `devices`, or no `resources`"
            )
        if raw.get("compile") is not None and (devices is None or collectives in (None, False)):
            message = "`compile` needs the devices of the replicas, which run at the same time"
            self._note_key(
                (*path, "compile"), message, "`resources: {devices: cpu}`, and `collectives: true`"
            )
        elif raw.get("compile") is None and devices is not None:
            self._note_key(
                (*path, "resources"), "`devices` are for a function with `compile`", "`compile: jax` too"
            )
        if raw.get("retry") is not None and type(retries) is int and retries:
            message = "`retry` and `retries` both say how often a call is attempted"
            self._note_key((*path, "retry"), message, "one of them")
        for key in (
            ("per", "concurrency", "rate", "retry")
            if isinstance(collectives, dict) or collectives is True
            else ()
        ):
            if raw.get(key) is not None:
                message = f"`{key}` is for calls that are executed by themselves, and `collectives` is set"
                self._note_key((*path, key), message, f"no `{key}`, or no `collectives`")

    def _finish(self, path: Path, raw: Mapping[str, object]) -> None:
        for key in ("with", "timeout_s", "retries") if raw.get("finish") is None else ():
            if raw.get(key):
                self._note_key(
                    (*path, key), f"`{key}` is for a `finish`, and there is none", f"`finish`, or no `{key}`"
                )

    def _axis(self, path: Path, raw: Mapping[str, object]) -> None:
        op = raw.get("reduce")
        if isinstance(op, str) and op in OPS and "axis" not in raw:
            self._note_key(
                path,
                f"`axis` is missing, and `reduce: {op}` requires it",
                "an integer or a list of integers (along these axes of the components, over all calls), or null "
                "(element by element, across calls)",
            )
        elif "axis" in raw and (callable(op) or (isinstance(op, str) and ":" in op)):
            message = f"`axis` requires a built-in op, and `reduce` is {describe(op)}"
            self._note_key((*path, "axis"), message, "no `axis`")

    def _unknown(
        self, path: Path, kind: str, given: str, allowed: Iterable[str], *, fragment: str = ""
    ) -> None:
        allowed = list(allowed)
        message, expected = f"there is no {kind} `{given}`", _one_of(allowed, f"the name of {_article(kind)}")
        self._note(path, message, expected, allowed=allowed, given=given, fragment=fragment)


def _one_of(names: Sequence[str], otherwise: str) -> str:
    return listing(names) if names else f"{otherwise}; the spec has none"


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "update" else f"a {kind}"


def _table_misfit(ending: str, stage: StageSummary) -> tuple[str, str] | None:
    """Return why a gather's value does not fit a table of single cells, and the formats that it fits."""
    if ending not in _TABLES or stage.verb != "gather" or stage.raw.get("finish") is not None:
        return None
    what = f"a `{ending}` file holds" if ending.startswith(".") else "files that columns name hold"
    if stage.per in ("step", "epoch"):
        return (
            f"{what} one row for each {stage.per}, but a gather has many",
            ".jsonl or .npz, or a gather with `per: run`",
        )
    axis = stage.raw.get("gather")
    if type(axis) is int and axis > 0:
        dimensions = f"{axis + 1} or more dimensions"
        return (
            f"{what} one-dimensional columns, but a gather along axis {axis} has {dimensions}",
            "a .npz or .json file",
        )
    return None


def _cycle(edges: Mapping[str, Mapping[str, Path]]) -> list[str]:
    """Return the stages of one cycle, each of which waits for the next one; an empty list if there is none."""
    known = {name: [other for other in others if other in edges] for name, others in edges.items()}
    try:
        TopologicalSorter(known).prepare()
    except CycleError as error:
        # graphlib lists what is waited for first, and one stage twice
        cycle: list[str] = error.args[1][:0:-1]
        first = cycle.index(next(name for name in edges if name in cycle))
        return cycle[first:] + cycle[:first]
    return []


def as_dict(value: object) -> dict[Any, object]:
    return value if isinstance(value, dict) else {}
