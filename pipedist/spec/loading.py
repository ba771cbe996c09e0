"""A spec from a file or a dict: read, interpolate, check, and tell every mistake at once."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

from pipedist.core.types import Tree
from pipedist.errors import Problem, SpecError
from pipedist.spec.checks import Checks, outline
from pipedist.spec.document import Document, Path
from pipedist.spec.interpolation import DEPTH_MAX, Interpolation
from pipedist.spec.model import ClusterSpec, SpecKeys
from pipedist.spec.problems import Problems, listing, nearest
from pipedist.spec.scalars import describe
from pipedist.spec.sections import SectionReader
from pipedist.spec.sources import DatasetSpec
from pipedist.spec.stages import InitFunction, StageSpec, UpdateSpec

SPEC_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A spec without mistakes, interpolated, with all defaults filled in.

    Args:
        name: of the run; default: the file's stem, "spec" for a dict.
        replicas: shards per step.
        seed: where all randomness comes from.
        threads_per_replica: BLAS and OpenMP threads of a replica call.
        folder: the spec's folder, absolute; of a dict: the current directory.
        code: the folder of the user's modules, absolute.
        cluster: where workers come from; its `key_file` is absolute.
        datasets, stages: by name, in the order of writing.
        outputs: stage name -> normalised path, relative to the output folder.
        params: the parameters' values.
    """

    name: str
    replicas: int
    seed: int
    threads_per_replica: int
    folder: FilePath
    code: FilePath
    cluster: ClusterSpec
    datasets: Mapping[str, DatasetSpec]
    stages: Mapping[str, StageSpec]
    outputs: Mapping[str, str]
    params: Mapping[str, Tree]
    document: Document = field(repr=False, compare=False)

    def problem(
        self,
        path: Path,
        message: str,
        *,
        expected: str = "",
        allowed: Iterable[str] = (),
        given: str = "",
        at_key: bool = False,
    ) -> Problem:
        """Return a problem with its place in the document, for what later floors find.

        Args:
            path: e.g. `("stages", "late", "of")`; `("datasets", "dataset", ...)` also where the
                document says `dataset:`. What is not written there stands for what is around it.
            message: what is wrong, one line, no final full stop.
            expected: what would have been right.
            allowed: the names that would have been right; the nearest to `given` is suggested.
            given: what was written instead; default: the text at `path`.
            at_key: the place is that of the key, not that of its value.
        """
        return self.document.problem(
            path, message, expected=expected, allowed=allowed, given=given, at_key=at_key
        )


def load(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    params: Mapping[str, Tree] | None = None,
    sets: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Spec:
    """Load a spec.

    No data is read and no code imported: this is all that `pipedist validate` does.

    Args:
        source: the path of a YAML file, or the same document as a dict, in which a function may
            be a callable and a source may be `{"arrays": tree}`.
        params: values for parameters of the spec.
        sets: texts "NAME=VALUE", as after `--set`; they win over `params`.
        env: the environment; default: this process's.

    Raises:
        SpecError: the spec has mistakes; it lists all of them, in order of place.
        PlanError: it has none, and asks for something that this version does not execute.
    """
    if isinstance(source, Mapping):
        document = Document("", dict(source))
        problems = Problems(document)
        folder, stem = os.getcwd(), "spec"
    else:
        name = os.fspath(source)
        document, problems = _read(name)
        folder = os.path.dirname(os.path.abspath(name))
        stem = os.path.basename(name).rpartition(".")[0].lstrip(".-") or "spec"
    return _Loader(document, problems, folder).load(
        stem, params or {}, sets, os.environ if env is None else env
    )


def _read(name: str) -> tuple[Document, Problems]:
    from pipedist.spec.yaml_text import DOCUMENT_BYTES_MAX, read_yaml  # a dict needs no YAML

    try:
        with open(name, "rb") as file:
            data = file.read(DOCUMENT_BYTES_MAX + 1)
    except FileNotFoundError:
        raise SpecError([_no_such_file(name)]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(
            [Problem(f"the spec can't be read: {reason}", name, expected="a YAML file")]
        ) from error
    return read_yaml(data, name)


def _no_such_file(name: str) -> Problem:
    folder, base = os.path.split(name)
    try:
        others = [other for other in os.listdir(folder or ".") if other.endswith(SPEC_ENDINGS)]
    except OSError:
        others = []
    close = nearest(base, others)
    return Problem(
        "there is no such file",
        name,
        expected="the path of a YAML file",
        nearest=os.path.join(folder, close) if close else "",
    )


class _Loader:
    """Carries one document through all checks; the first three steps make it canonical."""

    def __init__(self, document: Document, problems: Problems, folder: str) -> None:
        self._document = document
        self._problems = problems
        self._folder = folder

    def load(
        self, stem: str, params: Mapping[str, Tree], sets: Sequence[str], env: Mapping[str, str]
    ) -> Spec:
        problems = self._problems
        written = self._canonical()
        interpolation = Interpolation(self._document, problems, env, self._folder)
        values = interpolation.read_params(written.get("params", {}), params, sets)
        raw: dict[str, Any] = {
            key: value if key == "params" else interpolation.replace(value, (key,))
            for key, value in written.items()
        }
        sections = SectionReader(problems, interpolation.origin, in_memory=not self._document.lines)
        keys = sections.read(SpecKeys, raw, ())
        raw_datasets = _mapping(raw.get("datasets"))
        datasets = {name: sections.dataset(value, ("datasets", name)) for name, value in raw_datasets.items()}
        outlines, stages = {}, {}
        for name, value in _mapping(raw.get("stages")).items():
            path = ("stages", name)
            verb, spelled = sections.verb_of(value, path)
            if verb == "run" and isinstance(spelled, dict) and len(raw_datasets) == 1:
                spelled = {"of": next(iter(raw_datasets)), **spelled}
            outlines[name] = outline(verb, spelled)
            stages[name] = sections.stage(spelled, path, verb)
        checks = Checks(tuple(raw_datasets), outlines, interpolation.references, problems)
        checks.names()
        checks.keys()
        checks.edges()
        checks.cycles()
        checks.states(raw_datasets)
        checks.outputs(_mapping(raw.get("outputs")))
        checks.cluster(_mapping(raw.get("cluster")))
        self._check_nested_arguments(checks, datasets, stages)
        problems.raise_all()
        assert keys is not None, "a section without a model has a problem"
        return self._spec(stem, keys, datasets, stages, values)

    def _canonical(self) -> dict[str, Any]:
        """Return the document's keys with their right names, the short form `dataset` written out."""
        raw = self._document.value
        if not isinstance(raw, dict):
            self._problems.add(
                (), f"the spec is {describe(raw)}", expected="a mapping that begins with `pipedist: 1`"
            )
            self._problems.raise_all()
            return {}
        if not self._document.lines:
            raw = self._with_text_keys(raw, ())
        allowed = list(SpecKeys.fields)
        canonical: dict[str, Any] = {}
        written = "dataset"
        for key, value in raw.items():
            meant = key if key in allowed else nearest(str(key), allowed)
            if meant != key:
                self._problems.add(
                    (key,),
                    f"unknown key `{key}`",
                    expected=listing(allowed),
                    allowed=allowed,
                    at_key=True,
                    given=str(key),
                )
                if not meant or meant in raw or meant in canonical:
                    continue
                self._document.move((meant,), (key,))
            canonical[meant] = value
            if meant == "dataset":
                written = key
        if "dataset" in canonical:
            dataset = canonical.pop("dataset")
            others = canonical.get("datasets", {})
            if "datasets" in canonical:
                self._problems.add(
                    ("dataset",),
                    "a spec has `dataset` or `datasets`, not both",
                    expected="all datasets below `datasets`",
                    at_key=True,
                )
            if isinstance(others, dict) and "dataset" not in others:
                canonical["datasets"] = {"dataset": dataset, **others}
                self._document.move(("datasets", "dataset"), (written,))
        elif "datasets" not in canonical:
            self._problems.add((), "`dataset` is missing", expected="a dataset, for the stages to read")
        elif isinstance(canonical["datasets"], dict) and not canonical["datasets"]:
            self._problems.add(("datasets",), "`datasets` is empty", expected="at least one dataset")
        return canonical

    def _with_text_keys(self, value: Any, path: Path) -> Any:
        """Return a dict document without the keys that are no text, which are noted.

        YAML text has none. Values of the user's own may have any keys.
        """
        own = (path[:1] == ("params",) and len(path) > 1) or path[-1:] in (("with",), ("init",), ("arrays",))
        if type(value) is not dict or own or len(path) > DEPTH_MAX:
            return value
        kept = {}
        for key, item in value.items():
            if isinstance(key, str):
                kept[key] = self._with_text_keys(item, (*path, key))
            else:
                self._problems.add(path, f"the key {key!r} is not text", expected="a text as key")
        return kept

    def _check_nested_arguments(
        self,
        checks: Checks,
        datasets: Mapping[str, DatasetSpec | None],
        stages: Mapping[str, StageSpec | None],
    ) -> None:
        for name, dataset in datasets.items():
            if dataset is not None and dataset.kind == "function":
                checks.arguments(dataset.config["with"], ("datasets", name, "function", "with"))
        for name, stage in stages.items():
            if isinstance(stage, UpdateSpec) and isinstance(stage.init, InitFunction):
                checks.arguments(stage.init.with_, ("stages", name, "init", "with"))

    def _spec(
        self,
        stem: str,
        keys: SpecKeys,
        datasets: Mapping[str, DatasetSpec | None],
        stages: Mapping[str, StageSpec | None],
        params: Mapping[str, Tree],
    ) -> Spec:
        cluster = keys.cluster
        if cluster.key_file is not None:
            cluster = cluster.replaced(key_file=self._below(cluster.key_file))
        return Spec(
            name=keys.name or stem,
            replicas=keys.replicas,
            seed=keys.seed,
            threads_per_replica=keys.threads_per_replica,
            folder=FilePath(self._folder),
            code=FilePath(self._below(keys.code)),
            cluster=cluster,
            datasets=MappingProxyType({name: d for name, d in datasets.items() if d is not None}),
            stages=MappingProxyType({name: s for name, s in stages.items() if s is not None}),
            outputs=MappingProxyType({n: posixpath.normpath(p) for n, p in keys.outputs.items()}),
            params=MappingProxyType(dict(params)),
            document=self._document,
        )

    def _below(self, path: str) -> str:
        return os.path.normpath(os.path.join(self._folder, path))


def _mapping(value: object) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}
