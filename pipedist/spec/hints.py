"""Hints for specs by newcomers: words of other systems, keys in the wrong section, files of another kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pipedist.spec.datasets import SOURCES, DatasetSpec
from pipedist.spec.fields import COLUMN_TYPES, Section, function_name, keys_of
from pipedist.spec.model import CheckpointSection, ClusterSection, SpecSection
from pipedist.spec.scalars import as_yaml, listing
from pipedist.spec.stages import OPS, STAGES

VERBS_ELSEWHERE: Final = {
    **dict.fromkeys(("map", "apply", "call", "function", "fn", "func", "transform", "task", "step"), "run"),
    **dict.fromkeys(("aggregate", "agg", "fold", "combine", "accumulate", "reduce_by"), "reduce"),
    **dict.fromkeys(("collect", "concat", "concatenate", "stack", "rows"), "gather"),
    **dict.fromkeys(("state", "train", "fit", "optimize"), "update"),
}
"""What other systems call the verbs of stages."""

KEYS_ELSEWHERE: Final = {
    **dict.fromkeys(("from", "source", "on"), "of"),
    **dict.fromkeys(("args", "kwargs", "arguments"), "with"),
    **dict.fromkeys(("depends_on", "wait_for"), "after"),
}
"""What other systems call keys of stages."""

SOURCES_BY_ENDING: Final = {
    **{f".{name}": name for name in ("csv", "parquet", "jsonl", "npy", "npz")},
    ".tsv": "csv",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".log": "text",
}
"""The source that reads files of an ending."""

OPS_ELSEWHERE: Final = {
    **dict.fromkeys(("avg", "average"), "mean"),
    **dict.fromkeys(("add", "total"), "sum"),
    **dict.fromkeys(("product", "mul", "multiply"), "prod"),
    "minimum": "min",
    "maximum": "max",
}
"""What other systems call the ops of `reduce`."""

TYPES_ELSEWHERE: Final = {
    **dict.fromkeys(("int", "integer", "long"), "int64"),
    "uint": "uint64",
    **dict.fromkeys(("float", "double", "number"), "float64"),
    **dict.fromkeys(("text", "object"), "str"),
    **dict.fromkeys(("datetime", "datetime64"), "timestamp"),
}
"""What other systems call the types of columns. The nearest name of `int` would be `int8`, in which little fits."""

_THE_SPEC: Final = "the spec itself"
_SECTIONS: Final[Mapping[str, type[Section]]] = {
    _THE_SPEC: SpecSection,
    "`cluster`": ClusterSection,
    "`checkpoint`": CheckpointSection,
    "`dataset`": DatasetSpec,
    **{f"`{name}`": model for name, model in SOURCES.items() if name != "arrays"},
    **{f"`{verb}`": model for verb, model in STAGES.items()},
}
_COMBINERS = ("counter", "moments", "top_k", "by_key", "by_key_moments")


def misplaced(name: str, section: type[Section], written: Iterable[str] = ()) -> tuple[str, str] | None:
    """Return that a key belongs to other sections, and what is expected there; None if no section has it.

    Args:
        section: the model of the section that has the key.
        written: the keys of that section; those that hold a section are preferred.
    """
    homes = {
        label: model for label, model in _SECTIONS.items() if model is not section and name in keys_of(model)
    }
    inner = {label: model for label, model in homes.items() if label.strip("`") in written}
    homes = inner or homes
    if not homes:
        return None
    here = next((label for label, model in _SECTIONS.items() if model is section), "this section")
    label, model = next(iter(homes.items()))
    example = as_yaml({name: (keys_of(model)[name].examples or [None])[0]})[1:-1]
    expected = f"it under {listing(homes)}"
    if label == _THE_SPEC:
        expected = f"`{example}` without indentation"
    elif label.strip("`") in STAGES:
        expected = f"it in a stage, as in `{{{label.strip('`')}: ..., {example}}}`"
    elif len(homes) == 1:
        expected += f", as in `{label.strip('`')}: {{{example}}}`"
    return f"`{name}` is a key of {listing(homes)}, not of {here}", expected


def verb_elsewhere(key: object, value: object) -> tuple[str, str]:
    """Return the verb that a key of a stage probably means, and the expected text: one of them may be ""."""
    name = str(key).lower()
    if name in OPS:
        of = value if isinstance(value, str) else "STAGE"
        return "", f"`{as_yaml({'reduce': name, 'of': of, 'axis': None})[1:-1]}`"
    return VERBS_ELSEWHERE.get(name, ""), ""


def source_of_path(dataset: Mapping[object, object]) -> str:
    """Return the source that a dataset with a `path` of its own needs, as an example, or ""."""
    path = dataset.get("path")
    if not isinstance(path, str):
        return ""
    source = next((name for ending, name in SOURCES_BY_ENDING.items() if path.endswith(ending)), "")
    inner: dict[str, object] = {"path": path}
    if source == "csv":
        inner |= {"delimiter": "\t"} if path.endswith(".tsv") else {}
        inner["columns"] = dataset.get("columns", "infer")
    return f"`{source}: {as_yaml(inner)}`" if source else ""


def function_meant(text: str, expected: str) -> str:
    """Return the function, op, or type of a column that a text probably means, or ""; `expected`: of its key."""
    if expected.startswith(", ".join(COLUMN_TYPES[:2])):
        return TYPES_ELSEWHERE.get(text.lower(), "")
    if "package.module:" not in expected:
        return ""
    if text in _COMBINERS and "combine" in expected:
        return f"pipedist.combiners:{text}"
    if expected.startswith(OPS[0]) and text.lower() in OPS_ELSEWHERE:
        return OPS_ELSEWHERE[text.lower()]
    module, colon, attribute = text.strip().removesuffix("()").removeprefix("./").partition(":")
    if not colon:
        module, _, attribute = module.rpartition(".")
    meant = f"{module.removesuffix('.py').replace('/', '.')}:{attribute}"
    try:
        function_name(meant)
    except ValueError:
        return ""
    return meant if attribute != "py" else ""


def setting_meant(name: str, value: str) -> str:
    """Return what `--set NAME=VALUE` of a key of the spec should be, or ""."""
    if name in ("workers", "output", "cluster"):
        return f"`--{name} {value}`: it is not a parameter"
    if name in keys_of(SpecSection) and name not in ("dataset", "datasets", "stages", "params"):
        return f"a parameter: `params: {{{name}: {value}}}`, which `{name}: ${{params.{name}}}` reads"
    return ""


def no_spec(name: str) -> str:
    """Return what a file is, by its name, if it can't be a spec; else ""."""
    ending = name[name.rfind(".") :].lower() if "." in name else ""
    if ending == ".py":
        return "a Python file"
    return "a notebook" if ending == ".ipynb" else "a data file" if ending in SOURCES_BY_ENDING else ""
