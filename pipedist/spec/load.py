"""Entry points that load a spec: `load`, from a file or a dict, and `with_cluster`.

A document is made canonical, interpolated, validated against the models, and checked; then every problem is
raised at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from pipedist.core.names import nearest
from pipedist.core.types import Tree
from pipedist.errors import Problem, SpecError, UsageError
from pipedist.spec.checks import Checks, StageSummary, as_dict, summarize
from pipedist.spec.datasets import DatasetSpec
from pipedist.spec.diagnostics import Document, Path, Problems
from pipedist.spec.fields import is_endpoint
from pipedist.spec.hints import no_spec
from pipedist.spec.interpolation import DEPTH_MAX, Interpolation
from pipedist.spec.model import (
    ENGINE_ADDRESS_EXPECTED,
    LAUNCHERS,
    LAUNCHERS_OF,
    CheckpointSection,
    ClusterSection,
    fits_engine,
)
from pipedist.spec.outputs import OutputFile, output_of
from pipedist.spec.scalars import describe, listing
from pipedist.spec.stages import StageSpec
from pipedist.spec.training import Links
from pipedist.spec.validation import Validation

SPECS_NAMED_MAX = 5
KEY_FILE = "cluster.key"  # the default name of the file with a cluster's keys, in the spec's folder


class Spec(Struct, frozen=True, kw_only=True):
    """A spec without problems, interpolated, with all defaults filled in.

    `folder` (for a dict: the current directory), `code` and the cluster's `key_file` are absolute. `sinks` are
    the files of values, by STAGE, or by STAGE/PATH for a part of a value. `links` are the dependencies of each stage.
    """

    __hash__ = None  # type: ignore[assignment]  # it has mappings

    name: str
    replicas: int
    seed: int
    threads_per_replica: int
    quarantine_max: int | Literal["auto"]
    folder: FilePath
    code: FilePath
    cluster: ClusterSection
    checkpoint: CheckpointSection
    datasets: Mapping[str, DatasetSpec]
    stages: Mapping[str, StageSpec]
    sinks: Mapping[str, OutputFile]
    params: Mapping[str, Tree]
    document: Document
    links: Mapping[str, Links]

    @property
    def outputs(self) -> dict[str, str]:
        """The normalised paths of the files of `sinks`, relative to the output folder."""
        return {key: sink.path for key, sink in self.sinks.items()}

    def files_of(self, stage: str) -> dict[str, str]:
        """Return the output files of a stage, by path in its value; "" is the whole value."""
        split = ((*key.partition("/")[::2], file) for key, file in self.outputs.items())
        return {path: file for name, path, file in split if name == stage}


def load(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    params: Mapping[str, Tree] | None = None,
    sets: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Spec:
    """Load a spec, without reading data or importing code.

    Args:
        source: the path of a YAML file, or the same document as a dict, in which a function may
            be a callable and a source may be `{"arrays": tree}`.
        sets: texts "NAME=VALUE", as after `--set`; they override `params`.
        env: default: the environment of this process.

    Raises:
        SpecError: the spec has problems; it lists all of them, in the order of their places.
        UsageError: `params` is not a mapping, or `source` neither a path nor a dict.
    """
    if params is not None and not isinstance(params, Mapping):
        raise UsageError(f"`params` must be a dict from names to values, got {params!r}")
    if isinstance(source, Mapping):
        problems = Problems(Document("", dict(source)))
        folder, stem = os.getcwd(), "spec"
    elif not isinstance(source, str | os.PathLike):
        raise UsageError(
            f"a spec is the path of a YAML file, or a dict, got a value of type {type(source).__name__}"
        )
    else:
        name = os.fspath(source)
        problems = _read(name)
        folder = os.path.dirname(os.path.abspath(name))
        stem = os.path.basename(name).rpartition(".")[0].lstrip(".-") or "spec"
    return Loader(problems, folder).load(stem, params or {}, sets, os.environ if env is None else env)


def _read(name: str) -> Problems:
    from pipedist.spec.yaml_text import DOCUMENT_BYTES_MAX, read_yaml  # a dict needs no YAML

    if kind := no_spec(name):
        advice = f"; `pipedist init --from {name}` writes one that reads it" if kind == "a data file" else ""
        raise SpecError([Problem(f"this is {kind}, not a spec", name, expected=f"a YAML file{advice}")])
    try:
        with open(name, "rb") as file:
            data = file.read(DOCUMENT_BYTES_MAX + 1)
    except FileNotFoundError:
        problem = Problem("this file does not exist", name, expected="the path of a YAML file")
        raise SpecError([replace(problem, nearest=_similar_file(name))]) from None
    except IsADirectoryError:
        specs = [
            os.path.join(name, each) for each in sorted(os.listdir(name)) if each.endswith((".yaml", ".yml"))
        ]
        expected = listing(specs[:SPECS_NAMED_MAX]) if specs else "the path of a YAML file"
        raise SpecError([Problem("this is a folder", name, expected=expected)]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = Problem(f"the spec cannot be read: {reason}", name, expected="a readable YAML file")
        raise SpecError([problem]) from error
    return read_yaml(data, name)[1]


def _similar_file(name: str) -> str:
    folder, base = os.path.split(name)
    try:
        others = [other for other in os.listdir(folder or ".") if other.endswith((".yaml", ".yml"))]
    except OSError:
        return ""
    stems = {os.path.splitext(other)[0]: other for other in others}  # equal endings make no names similar
    stem = base if base in stems else nearest(os.path.splitext(base)[0], stems)
    return os.path.join(folder, stems[stem]) if stem else ""


class Loader:
    """Carries one document through all checks; its folder is absolute."""

    def __init__(self, problems: Problems, folder: str) -> None:
        self._document = problems.document
        self._problems = problems
        self._folder = folder

    def load(
        self, stem: str, params: Mapping[str, Tree], sets: Sequence[str], env: Mapping[str, str]
    ) -> Spec:
        """Return the spec; `stem` is the default name of its run."""
        problems = self._problems
        interpolation = Interpolation(problems, env, self._folder)
        validation = Validation(problems, interpolation.origin, in_memory=not self._document.lines)
        written = self._canonical(validation)
        values = interpolation.read_params(written.get("params", {}), params, sets)
        tree: dict[str, Any] = {
            key: value if key == "params" else interpolation.replace(value, (key,))
            for key, value in written.items()
        }
        summaries = self._respell(tree, validation)
        section = validation.validate(tree)
        datasets = as_dict(tree.get("datasets"))
        checks = Checks(datasets, summaries, interpolation.references, problems)
        checks.check(outputs=as_dict(tree.get("outputs")), cluster=as_dict(tree.get("cluster")))
        if "checkpoint" in tree and not any(stage.verb == "update" for stage in summaries.values()):
            message = "`checkpoint` has no effect: no stage is an `update`"
            problems.add(("checkpoint",), message, "an `update`, or no `checkpoint`", at_key=True)
        problems.raise_all()
        assert section is not None, "a spec without a model has a problem"
        cluster = section.cluster
        if cluster.key_file is not None:
            cluster = cluster.model_copy(update={"key_file": self._below(cluster.key_file)})
        return Spec(
            name=section.name or stem,
            replicas=section.replicas,
            seed=section.seed,
            threads_per_replica=section.threads_per_replica,
            quarantine_max=section.quarantine_max,
            folder=FilePath(self._folder),
            code=FilePath(self._below(section.code)),
            cluster=cluster,
            checkpoint=section.checkpoint,
            datasets=MappingProxyType(section.datasets),
            stages=MappingProxyType(section.stages),
            sinks=MappingProxyType(_flat(section.outputs)),
            params=MappingProxyType(values),
            document=self._document,
            links=checks.links,
        )

    def _canonical(self, validation: Validation) -> dict[str, Any]:
        """Return the document with known keys at its top, and the short form `dataset` written out."""
        raw = self._document.value
        if not isinstance(raw, dict):
            message = f"the spec must be a mapping, got {describe(raw)}"
            self._problems.fail((), message, "a mapping that begins with `pipedist: 1`")
        if not self._document.lines:
            raw = self._with_text_keys(raw, ())
        canonical = validation.respelled_top(raw)
        if "dataset" in canonical:
            written = self._document.written(("dataset",))
            dataset = canonical.pop("dataset")
            others = canonical.get("datasets", {})
            if "datasets" in canonical:
                message = "a spec has `dataset` or `datasets`, not both"
                self._problems.add(("dataset",), message, "all datasets below `datasets`", at_key=True)
            if isinstance(others, dict) and "dataset" not in others:
                canonical["datasets"] = {"dataset": dataset, **others}
                self._document.moved["datasets", "dataset"] = written
        elif "datasets" not in canonical:
            expected = "a dataset, as in `dataset: {range: 10, batch: 4}`"
            self._problems.add((), "`dataset` is missing", expected)
        elif isinstance(canonical["datasets"], dict) and not canonical["datasets"]:
            self._problems.add(("datasets",), "`datasets` is empty", "at least one dataset")
            self._problems.break_at(("datasets",))
        return canonical

    def _with_text_keys(self, value: Any, path: Path) -> Any:
        """Return a dict document without keys that are not text, which are problems outside of the user's values."""
        own = (path[:1] == ("params",) and len(path) > 1) or path[-1:] in (("with",), ("init",), ("arrays",))
        if type(value) is not dict or own or len(path) > DEPTH_MAX:
            return value
        kept = {}
        for key, item in value.items():
            if isinstance(key, str):
                kept[key] = self._with_text_keys(item, (*path, key))
            else:
                self._problems.add(path, f"the key {key!r} is not text", expected="text as keys")
        return kept

    @staticmethod
    def _respell(tree: dict[str, Any], validation: Validation) -> dict[str, StageSummary]:
        """Replace misspelled keys in all sections of a tree; return summaries of its stages."""
        summaries: dict[str, StageSummary] = {}
        for key, model in (("cluster", ClusterSection), ("checkpoint", CheckpointSection)):
            if key in tree:
                tree[key] = validation.section(tree[key], model, key)
        datasets, stages, outputs = tree.get("datasets"), tree.get("stages"), tree.get("outputs")
        if isinstance(datasets, dict):
            tree["datasets"] = {
                name: validation.dataset(value, ("datasets", name)) for name, value in datasets.items()
            }
        if isinstance(outputs, dict):
            tree["outputs"] = {
                name: validation.output(value, ("outputs", name)) for name, value in outputs.items()
            }
        if isinstance(stages, dict):
            only = next(iter(datasets)) if isinstance(datasets, dict) and len(datasets) == 1 else None
            tree["stages"] = {}
            for name, value in stages.items():
                verb, stage = validation.stage(value, ("stages", name))
                if verb == "run" and isinstance(stage, dict) and only is not None:
                    stage = {"of": only, **stage}
                tree["stages"][name] = stage
                summaries[name] = summarize(verb, stage)
        return summaries

    def _below(self, path: str) -> str:
        return os.path.normpath(os.path.join(self._folder, path))


def _flat(outputs: Mapping[str, Any]) -> dict[str, OutputFile]:
    """Return the files of outputs by STAGE, or STAGE/PATH for a part of a value."""
    found: dict[str, OutputFile] = {}
    for name, written in outputs.items():
        parts = (
            {f"{name}/{part}": file for part, file in written.items()} if isinstance(written, dict) else None
        )
        found |= {key: output_of(key, file) for key, file in (parts or {name: written}).items()}
    return found


def with_cluster(spec: Spec, choice: str) -> Spec:
    """Return a spec with the cluster of `--cluster NAME[:ADDRESS]`; keys of every launcher are kept.

    The address is that of the engine with `ray` and `dask`, the endpoint of the driver with `connect`. UsageError:
    there is no such launcher, or the address does not fit it.
    """
    name, colon, address = choice.partition(":")
    if name not in LAUNCHERS:
        also = "; `pipedist launch slurm` prints a job for it" if name == "slurm" else ""
        raise UsageError(
            f"there is no cluster {name!r}: use {', '.join(LAUNCHERS)}, or one of them with an "
            f"address, such as ray:auto{also}"
        )
    cluster = spec.cluster
    if cluster.launcher != name:
        own = {key: ClusterSection.model_fields[key].default for key in LAUNCHERS_OF}
        cluster = cluster.model_copy(update={"launcher": name, **own})
    if colon:
        cluster = cluster.model_copy(update=_address(name, address, choice))
    if name == "connect" and cluster.key_file is None:
        cluster = cluster.model_copy(update={"key_file": str(spec.folder / KEY_FILE)})
    return replace(spec, cluster=cluster)


def _address(name: str, address: str, choice: str) -> dict[str, str]:
    """Return the key of a cluster that holds an address, and its value."""
    if name == "ray" and address.startswith("//"):  # `ray://HOST:PORT`, without a name before it
        address = choice
    if name in ENGINE_ADDRESS_EXPECTED:
        if fits_engine(address, name):
            return {"address": address}
        raise UsageError(f"cluster {choice!r}: use {ENGINE_ADDRESS_EXPECTED[name]} after `{name}:`")
    if name == "connect":
        if is_endpoint(address):
            return {"listen": address}
        raise UsageError(f"cluster {choice!r}: use tcp://ADDRESS:PORT after `connect:`")
    raise UsageError(f"cluster {choice!r}: {name} has no address. Use --cluster {name}")
