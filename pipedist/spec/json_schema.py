"""The JSON Schema of the language, for editors: completion, descriptions, a first check.

It is derived from the model. It accepts every spec that `load` accepts; what it can't say
(names that must exist, cycles, what interpolation gives) only `load` checks.
"""

from __future__ import annotations

from typing import Any

from pipedist.spec.model import ClusterSpec, SpecKeys
from pipedist.spec.section import REQUIRED, Field, Key, Section
from pipedist.spec.sources import SOURCE_EXAMPLES, SOURCES, DatasetKeys
from pipedist.spec.stages import STAGES, CollectivesSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_REFERENCE = {"$ref": "#/$defs/Reference"}


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of version 1 of the language."""
    files = {name: model for name, model in SOURCES.items() if name != "arrays"}
    parts: list[type[Section]] = [SpecKeys, ClusterSpec, CollectivesSpec, DatasetKeys]
    models = [*parts, *STAGES.values(), *files.values()]
    definitions = {model.__name__: _section(model) for model in models}
    definitions["Reference"] = {
        "type": "string",
        "pattern": r"\$\{",
        "description": "A value with `${params.NAME}`, `${env.NAME}` or `${spec.dir}` in it.",
    }
    definitions["Dataset"] = _dataset(definitions.pop("DatasetKeys"), files)
    definitions["Stage"] = {"anyOf": [{"$ref": f"#/$defs/{model.__name__}"} for model in STAGES.values()]}
    definitions["RunSpec"]["required"].remove("of")
    root = definitions.pop("SpecKeys")
    names = {"pattern": r"^[^\W\d][\w-]{0,99}$"}
    properties = root["properties"]
    for name, inner in (("datasets", "Dataset"), ("stages", "Stage")):
        properties[name] |= {
            "type": "object",
            "propertyNames": names,
            "minProperties": 1,
            "additionalProperties": _or_reference({"$ref": f"#/$defs/{inner}"}),
        }
        properties[name].pop("anyOf", None)
    properties["dataset"].pop("anyOf", None)
    properties["dataset"] |= _or_reference({"$ref": "#/$defs/Dataset"})
    root["oneOf"] = [{"required": ["dataset"]}, {"required": ["datasets"]}]
    return {
        "$schema": DIALECT,
        "title": "pipedist spec, version 1",
        "description": "A dataset, replica functions and reductions.",
        **{key: value for key, value in root.items() if key not in ("title", "description")},
        "$defs": dict(sorted(definitions.items())),
    }


def _section(model: type[Section]) -> dict[str, Any]:
    """Return the schema of a section, with each key's account."""
    required = [name for name, field in model.fields.items() if field.default is REQUIRED]
    return {
        "type": "object",
        "description": " ".join((model.__doc__ or "").split()),
        "additionalProperties": False,
        "properties": {name: _property(name, field) for name, field in model.fields.items()},
        **({"required": required} if required else {}),
    }


def _property(name: str, field: Field) -> dict[str, Any]:
    """Return the schema of a key; references are allowed where a value may stand."""
    schema = field.kind.schema()
    key = field.account
    if key is None:
        return schema
    described: dict[str, Any] = {
        "description": f"{key.says} Expected: {key.expected}.",
        "examples": [example_value(key, name)],
    }
    if isinstance(field.default, str | int | float):
        described["default"] = field.default
    elif isinstance(field.default, tuple):
        described["default"] = list(field.default)
    return {**_or_reference(_leaves(schema)), **described}


def example_value(key: Key, name: str) -> Any:
    """Return the value that a key's example gives to the key."""
    from pipedist.spec.yaml_text import read_yaml  # the schema alone needs no YAML elsewhere

    document, problems = read_yaml(key.example.encode(), "")
    problems.raise_all()
    assert isinstance(document.value, dict), key.example
    return document.value[name]


def _leaves(inner: dict[str, Any]) -> dict[str, Any]:
    """Allow references also inside lists and mappings."""
    if "anyOf" in inner:
        inner = {**inner, "anyOf": [_leaves(option) for option in inner["anyOf"]]}
    for part in ("items", "additionalProperties"):
        if isinstance(inner.get(part), dict) and inner[part]:
            inner = {**inner, part: _or_reference(inner[part])}
    return inner


def _or_reference(inner: dict[str, Any]) -> dict[str, Any]:
    """Return a schema for `inner`, or a text with a reference in it."""
    if not inner or inner == {"type": "string"}:
        return inner
    options = inner["anyOf"] if set(inner) == {"anyOf"} else [inner]
    return {"anyOf": [*options, _REFERENCE]}


def _dataset(keys: dict[str, Any], sources: dict[str, type[Section]]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, model in sources.items():
        options: list[dict[str, Any]] = [{"$ref": f"#/$defs/{model.__name__}"}]
        if name == "range":
            options.append({"type": "integer"})
        key = Key("", "", SOURCE_EXAMPLES[name])
        properties[name] = {
            "description": " ".join((model.__doc__ or "").split()),
            "examples": [example_value(key, name)],
            "anyOf": [*options, _REFERENCE],
        }
    return {
        **keys,
        "description": "A dataset: exactly one source, and how it is cut into steps.",
        "properties": {**properties, **keys["properties"]},
        "oneOf": [{"required": [name]} for name in sources],
    }
