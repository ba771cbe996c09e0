"""The JSON Schema (draft-07) of the language, for editors: completion, descriptions, a first check.

pydantic derives it from the models; this module adds the interpolation: a reference is allowed exactly where
`load` replaces one. The schema accepts every spec that `load` accepts. Only `load` checks the rules between
sections (names that must exist, cycles), and values that come from references.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import CoreSchema

from pipedist.core.plugins import Plugin
from pipedist.errors import UsageError
from pipedist.spec.datasets import SOURCES, DatasetSpec
from pipedist.spec.fields import Section, expected_phrase, keys_of, summary
from pipedist.spec.model import CheckpointSection, ClusterSection, SpecSection
from pipedist.spec.outputs import SINK_SECTIONS
from pipedist.spec.plugins import plugin_sinks, plugin_sources, section_of
from pipedist.spec.stage_options import CollectivesSpec, RateSpec, ResourcesSpec, RetrySpec
from pipedist.spec.stages import STAGES

SECTIONS: Final[tuple[type[Section], ...]] = (
    SpecSection,
    ClusterSection,
    CheckpointSection,
    DatasetSpec,
    *SOURCES.values(),
    *STAGES.values(),
    CollectivesSpec,
    ResourcesSpec,
    RateSpec,
    RetrySpec,
    *SINK_SECTIONS.values(),
)

_PARAMETER = r"\$\{params\.[^{}\n]+\}"
_VALUE = r"\$\{(params\.[^{}\n]+|env\.[^{}\n]+)\}"
_UNKNOWN = r"(^|[^$])\$\{(?!(params\.[^{}\n]+|env\.[^{}\n]+|spec\.dir)\})"
"""A `${` that begins neither a reference nor, as `$${`, a text."""

_NO_REFERENCE = {"not": {"pattern": r"\$\{"}}
_NAME = {"pattern": r"^[^\W\d][\w-]{0,99}$"}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/definitions/{name}"}


def _tree(leaf: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of any tree of values, whose texts have a schema of their own."""
    return {
        "anyOf": [
            {"type": ["number", "boolean", "null"]},
            leaf,
            {"type": "array", "items": _ref(name)},
            {"type": "object", "propertyNames": _NO_REFERENCE, "additionalProperties": _ref(name)},
        ]
    }


_DEFINITIONS: Final[dict[str, dict[str, Any]]] = {
    "Text": {
        "description": "Text, which may contain `${params.NAME}`, `${env.NAME}` and `${spec.dir}`.",
        "type": "string",
        "not": {"pattern": _UNKNOWN},
    },
    "Interpolated": {
        "description": "Text with a reference in it: `${params.NAME}`, `${env.NAME}` or `${spec.dir}`.",
        "allOf": [_ref("Text"), {"pattern": r"(^|[^$])\$\{"}],
    },
    "Reference": {
        "description": "A reference to a value: `${params.NAME}` or `${env.NAME}`, and nothing else.",
        "type": "string",
        "pattern": f"^{_VALUE}$",
    },
    "Parameter": {
        "description": "A reference to a parameter: `${params.NAME}`, and nothing else.",
        "type": "string",
        "pattern": f"^{_PARAMETER}$",
    },
    "Value": _tree(_ref("Text"), "Value"),
    "Argument": _tree(
        {"anyOf": [_ref("Text"), {"type": "string", "pattern": r"^\$\{(stages|state)\.[^{}\n]+\}$"}]},
        "Argument",
    ),
    "Default": _tree({"allOf": [_ref("Text"), {"not": {"pattern": rf"(^|[^$]){_PARAMETER}"}}]}, "Default"),
}
"""Texts and references; trees of values, of arguments of a stage, and of defaults of parameters."""


class _Generator(GenerateJsonSchema):
    """Writes draft-07: `definitions` instead of `$defs`, no titles of keys."""

    schema_dialect = "http://json-schema.org/draft-07/schema#"

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        return value  # examples keep their order

    def generate(self, schema: CoreSchema, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        generated = super().generate(schema, mode)
        definitions: dict[str, Any] = {**generated.pop("$defs", {}), "SpecSection": generated}
        del definitions["ArraysSource"], definitions["DatasetSpec"]["properties"]["arrays"]
        for model in SECTIONS:
            if model.__name__ in definitions:
                _complete(definitions[model.__name__], model)
        root = definitions.pop("SpecSection")
        definitions["RunSpec"]["required"].remove("of")  # a spec with one dataset needs none
        sinks = {name: self._plugin(each, is_sink=True) for name, each in plugin_sinks().items()}
        definitions["SinkSection"]["properties"] |= sinks
        definitions["SinkSection"] |= {"minProperties": 1, "maxProperties": 1}
        plugins = {name: self._plugin(each) for name, each in plugin_sources().items()}
        definitions["DatasetSpec"]["properties"] |= plugins
        names = [name for name in (*SOURCES, *plugins) if name != "arrays"]
        definitions["DatasetSpec"]["oneOf"] = [{"required": [name]} for name in names]
        root["oneOf"] = [{"required": ["dataset"]}, {"required": ["datasets"]}]
        properties = root["properties"]
        for name in ("datasets", "stages"):
            _options(properties[name])[0]["propertyNames"] = _NAME
        for owner, name in (
            ("RunSpec", "Argument"),
            ("UpdateSpec", "Argument"),
            ("FunctionSource", "Value"),
            ("ClassSource", "Value"),
            ("ClassOutput", "Value"),
        ):
            _options(definitions[owner]["properties"]["with"])[0]["additionalProperties"] = _ref(name)
        definitions["UpdateSpec"]["properties"]["init"].update(_ref_all("Value"))
        properties["params"].pop("anyOf")
        parameter = {"propertyNames": _NAME, "additionalProperties": _ref("Default")}
        properties["params"] |= {"type": "object", **parameter}
        return {
            "$schema": self.schema_dialect,
            **root,
            "title": "pipedist spec, version 1",
            "definitions": dict(sorted({**definitions, **_DEFINITIONS}.items())),
        }

    @staticmethod
    def _plugin(plugin: Plugin, *, is_sink: bool = False) -> dict[str, Any]:
        """Return the schema of the keys of a class of another package, or why it can't be imported."""
        try:
            model = section_of(plugin, "path" if is_sink else "")
        except UsageError as error:
            return {"description": str(error)}
        section = model.model_json_schema(
            ref_template="#/definitions/{model}", schema_generator=GenerateJsonSchema
        )
        section.pop("$defs", None)
        _complete(section, model)
        if is_sink:
            section["properties"]["path"] = _ref_all("Text")
            section["required"] = ["path", *section.get("required", [])]
        return section


def json_schema() -> dict[str, Any]:
    return SpecSection.model_json_schema(ref_template="#/definitions/{model}", schema_generator=_Generator)


def _ref_all(name: str) -> dict[str, Any]:
    """Return a reference that may stand beside other keywords: draft-07 ignores those beside a `$ref`."""
    return {"allOf": [_ref(name)]}


def _options(schema: dict[str, Any]) -> list[dict[str, Any]]:
    options: list[dict[str, Any]] = schema["anyOf"]
    return options


def _complete(section: dict[str, Any], model: type[Section]) -> None:
    """Add the expectations and the references to the schema of a section."""
    section.pop("title", None)
    section["description"] = summary(model)
    for key, field in keys_of(model).items():
        if key not in section["properties"]:
            continue
        schema = section["properties"][key]
        phrase = expected_phrase(field.annotation, field.metadata)
        about = {name: schema.pop(name) for name in ("description", "default", "examples") if name in schema}
        about["description"] = f"{field.description} Expected: {phrase}." if phrase else field.description
        if about.get("default", "") is None:
            del about["default"]
        section["properties"][key] = {**about, **_interpolated(schema)}


def _interpolated(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also accepts the references that can give such a value."""
    if not schema:
        return schema
    if schema == {"type": "string"}:
        return _ref_all("Text")
    if {"type": "string"} in schema.get("oneOf", ()):  # a path, or a mapping of these
        schema = {"anyOf": schema["oneOf"]}
    options = [_inner(option) for option in schema.get("anyOf", [schema])]
    types = {_type(option) for option in options}
    if _ref_all("Text") in options:
        return {"anyOf": options}
    reference = "Interpolated" if "string" in types else "Parameter" if types == {"object"} else "Reference"
    return {"anyOf": [*options, _ref(reference)]}


def _type(option: dict[str, Any]) -> str:
    words = [*option.get("enum", []), *([option["const"]] if "const" in option else [])]
    if words:
        return "string" if isinstance(words[0], str) else "number"
    return "object" if "$ref" in option or "oneOf" in option else str(option.get("type", "string"))


def _inner(option: dict[str, Any]) -> dict[str, Any]:
    """Add the references inside a list or mapping, or to a text."""
    if option.get("type") == "array":
        return {**option, "items": _interpolated(option["items"])}
    if option.get("type") == "object":
        values = option.get("additionalProperties", True)
        values = _interpolated(values) if isinstance(values, dict) else values
        return {**option, "propertyNames": _NO_REFERENCE, "additionalProperties": values}
    if option.get("type") == "string" and not {"enum", "const"} & set(option):
        return _ref_all("Text") if set(option) == {"type"} else {**option, **_ref_all("Text")}
    return option
