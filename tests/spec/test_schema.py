from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from pipedist.errors import SpecError
from pipedist.spec import load
from pipedist.spec.datasets import SOURCES, DatasetSpec
from pipedist.spec.fields import Section, expected_phrase, keys_of
from pipedist.spec.scalars import as_yaml
from pipedist.spec.schema import SECTIONS, json_schema
from pipedist.spec.yaml_text import read_yaml
from tests.spec.golden import INVALID, ROOT
from tests.spec.test_typos import SHIPPED

SCHEMA = json_schema()
VALIDATOR = Draft7Validator(SCHEMA)


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from nodes(part)


def test_the_package_contains_the_schema() -> None:
    published = files("pipedist.spec").joinpath("schema.json").read_text()
    assert json.loads(published) == SCHEMA, "write it again: pipedist schema > pipedist/spec/schema.json"


def test_the_schema_is_draft_07_and_plain_json() -> None:
    Draft7Validator.check_schema(json.loads(json.dumps(SCHEMA)))
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    written = [key for node in nodes(SCHEMA) for key in node]
    assert not {"$defs", "prefixItems", "discriminator", "dependentRequired", "unevaluatedProperties"} & set(
        written
    )
    for node in nodes(SCHEMA):
        assert "$ref" not in node or set(node) == {"$ref"}, "draft-07 ignores the keywords beside a $ref"
        if isinstance(node.get("$ref"), str):
            assert node["$ref"].removeprefix("#/definitions/") in SCHEMA["definitions"]


@pytest.mark.parametrize("spec", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_spec_is_valid(spec: Path) -> None:
    document, _ = read_yaml(spec.read_bytes(), "")
    assert [error.message for error in VALIDATOR.iter_errors(document.value)] == []


@pytest.mark.parametrize(
    "name",
    [
        "arrays_in_a_file",
        "axis_wrong",
        "batch_missing",
        "batch_zero",
        "cluster",
        "collectives",
        "column_type",
        "columns_missing",
        "dataset_and_datasets",
        "durations",
        "function_names",
        "gpus_of_nothing",
        "key_of_another_verb",
        "missing_version",
        "no_dataset",
        "no_path",
        "no_source",
        "no_stages",
        "no_verb",
        "parameters",
        "per_unknown",
        "reference_in_a_key",
        "reference_unclosed",
        "sections_of_wrong_type",
        "state_before_the_run",
        "two_sources",
        "two_verbs",
        "unknown_key_source",
        "unknown_key_stage",
        "unknown_key_top",
        "unknown_op",
        "wrong_version",
    ],
)
def test_the_schema_rejects_what_an_editor_can_see(name: str) -> None:
    document, _ = read_yaml((ROOT / INVALID / f"{name}.yaml").read_bytes(), "")
    assert not VALIDATOR.is_valid(document.value)


TEXTS = [
    "${params.x}", "${env.X}", "${env.Y:1}", "${stages.total}", "${state.w}", "x${stages.total}", "${nothing.x}",
    "${params.x", "$${params.x}", "a-${params.x}", "a-$${b}", "${spec.dir}", "$$${params.x}", "text",
]  # fmt: skip

PLACES: dict[str, tuple[tuple[str, ...], object]] = {
    "an integer at the top": (("replicas",), 3),
    "a text": (("name",), "x"),
    "a path": (("code",), "x"),
    "a constant": (("pipedist",), 1),
    "a word": (("cluster", "launcher"), "local"),
    "an integer or a word": (("cluster", "workers"), 2),
    "a number": (("cluster", "grace_s"), 1.5),
    "a section": (("cluster",), {}),
    "a default": (("params", "other"), 1),
    "an integer of a dataset": (("datasets", "d", "batch"), 2),
    "a boolean": (("datasets", "d", "shuffle"), True),
    "a source": (("datasets", "d", "range"), 5),
    "a dataset": (("datasets", "d"), {"range": 4, "batch": 2}),
    "an argument of a source": (("datasets", "f", "function", "with", "a"), 1),
    "a mapping of arguments": (("stages", "r", "with"), {"a": 1}),
    "an argument": (("stages", "r", "with", "a"), 1),
    "an inner argument": (("stages", "r", "with", "a"), [1]),
    "an argument of an update": (("stages", "w", "with", "a"), 1),
    "a function": (("stages", "r", "run"), "m:f"),
    "a duration or null": (("stages", "r", "timeout_s"), None),
    "a boolean or a mapping": (("stages", "r", "collectives"), True),
    "a name": (("stages", "total", "of"), "d"),
    "an op": (("stages", "total", "reduce"), "sum"),
    "axes": (("stages", "total", "axis"), [0, 1]),
    "a first state": (("stages", "w", "init"), 0.5),
    "a file": (("outputs", "total"), "total.json"),
}


def spec_with(path: tuple[str, ...], value: object) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "pipedist": 1,
        "params": {"x": 1},
        "cluster": {},
        "datasets": {
            "d": {"range": 4, "batch": 2},
            "f": {"function": {"call": "m:f", "with": {}}, "batch": 1},
        },
        "stages": {
            "r": {"run": "m:f", "of": "d", "with": {}},
            "total": {"reduce": "sum", "of": "d", "axis": 0},
            "w": {"update": "m:u", "of": "total", "init": 0, "with": {}},
        },
        "outputs": {},
    }
    inner = spec
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return spec


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_reference_is_valid_exactly_where_it_is_replaced(place: str, text: str) -> None:
    """The parameter has a value that fits, so `load` rejects a reference only where it is not allowed."""
    path, value = PLACES[place]
    spec = spec_with(path, [text] if place == "an inner argument" else text)
    spec["params"]["x"] = value
    messages: list[str] = []
    try:
        load(spec, env={"X": as_yaml(value).removeprefix('"').removesuffix('"')})
    except SpecError as error:
        messages = [problem.message for problem in error.problems]
    # these depend on values and on other sections, which no schema sees
    unseen = ["there is no", "does not end in", "is outside", "wait for", "has no effect"]
    if any(part in text for part in ("${params.x}", "${env.", "${spec.")):
        unseen += ["must be", "only a scalar"]
    seen = [message for message in messages if not any(part in message for part in unseen)]
    if not messages:
        assert VALIDATOR.is_valid(spec), [error.message for error in VALIDATOR.iter_errors(spec)]
    elif seen:
        assert not VALIDATOR.is_valid(spec), seen


@pytest.mark.parametrize("model", SECTIONS, ids=lambda model: model.__name__)
def test_every_key_has_a_description_and_a_valid_example(model: type[Section]) -> None:
    definitions = {**SCHEMA["definitions"], "SpecSection": SCHEMA}
    for key, field in keys_of(model).items():
        if key == "arrays":
            continue
        assert field.description is not None, key
        assert field.description.endswith((".", ")")), key
        assert not expected_phrase(field.annotation, field.metadata).endswith("."), key
        schema = definitions[model.__name__]["properties"][key]
        assert schema["description"].startswith(field.description)
        assert field.examples, key
        for example in field.examples:
            Draft7Validator({**schema, "definitions": SCHEMA["definitions"]}).validate(example)
            document, problems = read_yaml(as_yaml({key: example}).encode(), "")
            problems.raise_all()
            assert document.value == {key: example}, "the reference shows the same value as YAML"


def test_every_source_is_a_key_of_datasets() -> None:
    assert list(SOURCES) == [key for key in keys_of(DatasetSpec) if key in SOURCES]
