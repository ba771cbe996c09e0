"""What the sections of a spec say about each other: names, kinds, places in the graph, files.

The checks read OUTLINES of the stages, not their models: a stage whose `timeout_s` is wrong
still has a name, a verb and an `of`, so that its own mistake hides none of its neighbours'.
"""

from __future__ import annotations

import keyword
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from pipedist.spec.document import Path
from pipedist.spec.graph import cycles
from pipedist.spec.interpolation import NAME, NAME_EXPECTED, StageRef, StateRef
from pipedist.spec.keys import ENGINE_ADDRESS_EXPECTED, ENGINE_ADDRESS_PATTERN, fits_engine
from pipedist.spec.model import LAUNCHERS_OF
from pipedist.spec.problems import Problems, listing
from pipedist.spec.scalars import describe
from pipedist.spec.stages import OPS, OUTPUT_ENDINGS
from pipedist.spec.state_checks import StateChecks
from pipedist.spec.training import Links

_READS = {
    "run": ("dataset", "run"),
    "reduce": ("dataset", "run"),
    "gather": ("dataset", "run"),
    "update": ("reduce", "gather"),
}
_RESERVED_FILES = ("quarantine.jsonl",)
_TABLES = (".csv", ".parquet")
"""Formats whose cells hold one number or text each."""


class Outline(Struct, frozen=True):
    """What other stages have to know of a stage.

    Args:
        verb: run, reduce, gather or update; None where it has none.
        of: what it reads; None where that is missing or no name.
        per: run, epoch or step.
        after: the stages it waits for.
        raw: all its keys.
    """

    verb: str | None
    of: str | None
    per: str
    after: tuple[str, ...]
    raw: Mapping[str, object]


def outline(verb: str | None, raw: object) -> Outline:
    """Return the outline of a stage, of which nothing is known to be right."""
    keys = raw if isinstance(raw, dict) else {}
    of, per, after = keys.get("of"), keys.get("per", "run"), keys.get("after", ())
    names = (after,) if isinstance(after, str) else after if isinstance(after, list | tuple) else ()
    return Outline(
        verb,
        of if isinstance(of, str) else None,
        per if isinstance(per, str) else "run",
        tuple(name for name in names if isinstance(name, str)),
        keys,
    )


class Checks:
    """Checks one spec; every mistake is noted.

    Args:
        datasets: the names of the datasets.
        stages: the outlines of the stages.
        references: the references in the stages' `with`, with their places.
        problems: where mistakes are noted.
    """

    def __init__(
        self,
        datasets: Sequence[str],
        stages: Mapping[str, Outline],
        references: Sequence[tuple[Path, StageRef | StateRef]],
        problems: Problems,
    ) -> None:
        self._datasets = datasets
        self._stages = stages
        self._references = references
        self._problems = problems
        self._acyclic = True

    def names(self) -> None:
        """Names are names, and no stage is called like a dataset."""
        for section, names in (("datasets", self._datasets), ("stages", self._stages)):
            for name in names:
                if isinstance(name, str) and "${" in name:
                    continue  # said by the interpolation
                if not isinstance(name, str) or not NAME.fullmatch(name):
                    self._note((section, name), f"{name!r} can't be a name", NAME_EXPECTED, at_key=True)
        for name in self._stages:
            if name in self._datasets:
                self._note(
                    ("stages", name),
                    f"the stage `{name}` has the name of a dataset",
                    "another name",
                    at_key=True,
                )

    def edges(self) -> None:
        """What a stage reads or waits for exists and is of the right kind."""
        for name, stage in self._stages.items():
            path: Path = ("stages", name)
            if stage.of is not None and stage.verb is not None:
                self._reads((*path, "of"), stage.verb, stage.of)
            for index, other in enumerate(stage.after):
                at: Path = (
                    (*path, "after", index) if not isinstance(stage.raw["after"], str) else (*path, "after")
                )
                if other not in self._stages:
                    self._unknown(at, "stage", other, self._stages)
        for path, reference in self._references:
            if isinstance(reference, StageRef):
                self._reads_value(path, reference)
            else:
                self._reads_state(path, reference)

    def cycles(self) -> None:
        """No stage waits for itself.

        Reading a state is no waiting, it is that of the step before; but of the updates of one step,
        one that reads another's state comes after it.
        """
        edges: dict[str, list[tuple[str, Path]]] = {name: [] for name in self._stages}
        for name, stage in self._stages.items():
            if stage.of in edges and stage.of not in self._datasets:
                edges[name].append((stage.of, ("stages", name, "of")))
            edges[name] += [(other, ("stages", name, "after")) for other in stage.after if other in edges]
        for path, reference in self._references:
            target = self._stages.get(reference.name)
            waits = isinstance(reference, StageRef) and target is not None and target.verb != "update"
            if waits or self._is_chained(str(path[1]), reference.name):
                edges[str(path[1])].append((reference.name, path))
        for cycle, path in cycles(edges):
            self._acyclic = False
            chain = " -> ".join([*cycle, cycle[0]])
            self._note(path, f"these stages wait for each other: {chain}", "stages without a cycle")

    def keys(self) -> None:
        """Keys of one stage which depend on each other."""
        for name, stage in self._stages.items():
            path = ("stages", name)
            if stage.verb == "reduce":
                self._axis(path, stage.raw)
            with_ = stage.raw.get("with")
            if stage.verb in ("run", "update") and isinstance(with_, dict):
                self.arguments(with_, (*path, "with"))

    def arguments(self, with_: Mapping[Any, object], path: Path) -> None:
        """The keys of a `with` can be keyword arguments."""
        for name in with_:
            if name == "ctx":
                self._note(
                    (*path, "ctx"),
                    "`ctx` is given by pipedist",
                    "another name: a parameter `ctx` gets the ReplicaContext",
                    at_key=True,
                )
            elif not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
                at = (*path, name) if isinstance(name, str | int) else path
                self._note(
                    at, f"{name!r} can't be the name of an argument", "a Python identifier", at_key=True
                )

    def cluster(self, cluster: Mapping[object, object]) -> None:
        """Keys that belong to some launchers are there with them, and only with them."""
        launcher = cluster.get("launcher", "local")
        if not isinstance(launcher, str):
            return  # that it is none has been said
        for key, example in (
            ("listen", '"tcp://ADDRESS:PORT"'),
            ("key_file", "the file with the cluster's keys"),
        ):
            if launcher == "connect" and key not in cluster:
                self._note(
                    ("cluster",), f"`{key}` is missing: `launcher: connect` needs it", example, at_key=True
                )
        for key, launchers in LAUNCHERS_OF.items():
            if key in cluster and launcher not in launchers:
                names = "`launcher: " + "` or `".join(launchers) + "`"
                self._note(
                    ("cluster", key),
                    f"`{key}` goes with {names} only",
                    f"no `{key}`, or {names}",
                    at_key=True,
                )
        address = cluster.get("address")
        expected = ENGINE_ADDRESS_EXPECTED.get(str(launcher))
        is_read = isinstance(address, str) and re.match(ENGINE_ADDRESS_PATTERN, address)
        if is_read and expected and not fits_engine(str(address), str(launcher)):
            self._note(("cluster", "address"), f"`address` is no address of {launcher}", expected)

    def states(self, datasets: Mapping[str, object]) -> None:
        """States are fed and read as the language says.

        Args:
            datasets: as they are written, by name.
        """
        waits: list[tuple[Path, str, str, str]] = [
            (path, str(path[1]), reference.name, str(reference))
            for path, reference in self._references
            if isinstance(reference, StageRef)
        ]
        for name, stage in self._stages.items():
            waits += [(("stages", name, "after"), name, other, "") for other in stage.after]
        links = {
            name: Links(
                stage.verb,
                stage.of,
                tuple(other for _, waiting, other, _ in waits if waiting == name),
                tuple(
                    reference.name
                    for path, reference in self._references
                    if isinstance(reference, StateRef) and path[1] == name
                ),
                stage.per,
            )
            for name, stage in self._stages.items()
        }
        written = {name: stage.raw for name, stage in self._stages.items()}
        StateChecks(datasets, links, waits, written, self._problems).check(acyclic=self._acyclic)

    def outputs(self, outputs: Mapping[object, object]) -> None:
        """Outputs are of stages that have a value, and are different files below the output folder."""
        files: dict[str, str] = {}
        for name, written in outputs.items():
            path: Path = ("outputs", str(name))
            stage = self._stages.get(str(name))
            valued = [other for other, s in self._stages.items() if s.verb in ("reduce", "gather", "update")]
            if stage is None:
                kind = "a dataset" if name in self._datasets else "no stage"
                self._note(
                    path,
                    f"`{name}` is {kind}",
                    _one_of(valued, "a reduce, gather or update"),
                    allowed=valued,
                    given=str(name),
                    at_key=True,
                )
            elif stage.verb == "run":
                self._note(
                    path,
                    f"`{name}` is a run, which has no single value",
                    _one_of(valued, "a reduce, gather or update"),
                    at_key=True,
                )
            if isinstance(written, str):
                self._file(path, str(name), written, files)

    def _file(self, path: Path, name: str, written: str, files: dict[str, str]) -> None:
        normal = posixpath.normpath(written)
        if posixpath.isabs(written) or ".." in written.split("/") or "\0" in written:
            self._note(path, f"{written!r} leads out of the output folder", "a relative path without `..`")
            return
        base, ending = posixpath.splitext(posixpath.basename(normal))
        if ending not in OUTPUT_ENDINGS or written.endswith("/"):
            self._note(
                path,
                f"{written!r} has no known ending",
                listing(OUTPUT_ENDINGS),
                allowed=OUTPUT_ENDINGS,
                given=ending or base,
            )
            return
        if normal in _RESERVED_FILES or normal.startswith("."):
            self._note(path, f"pipedist itself may write {normal!r}", "another name")
            return
        for other, owner in files.items():
            if normal == other or normal.startswith(f"{other}/") or other.startswith(f"{normal}/"):
                self._note(path, f"{written!r} is in the way of the output of `{owner}`", "a file of its own")
                return
        files[normal] = name
        stage = self._stages.get(name)
        if stage is not None and (complaint := _unfit(ending, stage)):
            self._note(path, *complaint)

    def _reads(self, path: Path, verb: str, of: str) -> None:
        kinds = _READS[verb]
        readable = listing(map(_article, kinds))
        allowed = [name for name, stage in self._stages.items() if stage.verb in kinds]
        if "dataset" in kinds:
            allowed = [*self._datasets, *allowed]
        stage = self._stages.get(of)
        if stage is None and not self._datasets:
            return  # that there is no dataset has been said
        if stage is None and of not in self._datasets:
            self._unknown(path, "dataset or stage" if "dataset" in kinds else "stage", of, allowed)
        elif of in self._datasets and "dataset" in kinds:
            return
        elif of in self._datasets or (
            stage is not None and stage.verb is not None and stage.verb not in kinds
        ):
            kind = "dataset" if stage is None or of in self._datasets else stage.verb
            self._note(
                path,
                f"`{of}` is {_article(str(kind))}, and {_article(verb)} reads {readable}",
                _one_of(allowed, f"the name of {readable}"),
            )

    def _reads_value(self, path: Path, reference: StageRef) -> None:
        allowed = [
            name for name, s in self._stages.items() if s.verb in ("reduce", "gather") and s.per == "run"
        ]
        stage = self._stages.get(reference.name)
        expected = _one_of(allowed, "a reduce or gather with `per: run`")
        token = str(reference)
        if stage is None:
            message = f"there is no stage `{reference.name}`"
            self._note(path, message, expected, allowed=allowed, given=reference.name, fragment=token)
        elif stage.verb == "update":
            name = reference.name
            expected = f"${{state.{name}}}; a stage with `after: {name}` gets its last value"
            self._note(path, f"`{name}` is an update", expected, fragment=token)
        elif stage.verb == "run":
            self._note(
                path, f"`{reference.name}` is a run, which has no single value", expected, fragment=token
            )
        elif stage.verb is not None and stage.per != "run":
            message = f"`{reference.name}` has a value per {stage.per}, not one for the run"
            self._note(path, message, expected, fragment=token)

    def _reads_state(self, path: Path, reference: StateRef) -> None:
        allowed = [name for name, stage in self._stages.items() if stage.verb == "update"]
        stage = self._stages.get(reference.name)
        if stage is None or stage.verb not in ("update", None):
            message = f"there is no update `{reference.name}`"
            self._note(
                path,
                message,
                _one_of(allowed, "the name of an update"),
                allowed=allowed,
                given=reference.name,
                fragment=str(reference),
            )

    def _is_chained(self, name: str, other: str) -> bool:
        """Return whether both are updates that are applied at the same times."""
        pair = [self._stages.get(update) for update in (name, other)]
        if any(stage is None or stage.verb != "update" for stage in pair):
            return False
        sources = [self._stages.get(stage.of or "") for stage in pair if stage is not None]
        return len({source.per if source is not None else "" for source in sources}) == 1

    def _axis(self, path: Path, raw: Mapping[str, object]) -> None:
        op = raw.get("reduce")
        if isinstance(op, str) and op in OPS and "axis" not in raw:
            self._note(
                path,
                "`axis` is missing: a built-in op needs one",
                "an integer or a list of them (along the components' axes, over all calls), or null "
                "(across calls, element by element)",
                at_key=True,
            )
        elif "axis" in raw and (callable(op) or (isinstance(op, str) and ":" in op)):
            self._note(
                (*path, "axis"),
                f"`axis` goes with built-in ops only, and `reduce` is {describe(op)}",
                "no `axis`",
                at_key=True,
            )

    def _unknown(self, path: Path, kind: str, given: str, allowed: Iterable[str]) -> None:
        allowed = list(allowed)
        self._note(
            path,
            f"there is no {kind} `{given}`",
            _one_of(allowed, f"the name of a {kind}"),
            allowed=allowed,
            given=given,
        )

    def _note(
        self,
        path: Path,
        message: str,
        expected: str,
        *,
        allowed: Iterable[str] = (),
        given: str = "",
        at_key: bool = False,
        fragment: str = "",
    ) -> None:
        self._problems.add(
            path, message, expected=expected, allowed=allowed, given=given, at_key=at_key, fragment=fragment
        )


def _one_of(names: Sequence[str], otherwise: str) -> str:
    return listing(names) if names else f"{otherwise}, of which the spec has none"


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "update" else f"a {kind}"


def _unfit(ending: str, stage: Outline) -> tuple[str, str] | None:
    """Return why a gather's value can't be in a table of single cells, and what could hold it."""
    if ending not in _TABLES or stage.verb != "gather":
        return None
    if stage.per in ("step", "epoch"):
        return (
            f"`{ending}` holds one row for each {stage.per}, and a gather has many",
            ".jsonl or .npz, or a gather with `per: run`",
        )
    axis = stage.raw.get("gather")
    if type(axis) is int and axis > 0:
        return (
            f"`{ending}` holds columns of one dimension; a gather along axis {axis} has {axis + 1} or more",
            "a .npz or .json file",
        )
    return None
