from __future__ import annotations

import json
import subprocess
import sys

import pytest
from jsonschema import Draft202012Validator

from pipedist.spec.json_schema import example_value, schema
from pipedist.spec.model import ClusterSpec, SpecKeys
from pipedist.spec.reference import reference
from pipedist.spec.sources import SOURCE_EXAMPLES, SOURCES, DatasetKeys
from pipedist.spec.stages import STAGES
from pipedist.spec.yaml_text import read_yaml
from tests.spec.golden import INVALID, ROOT
from tests.spec.test_typos import SHIPPED

VALIDATOR = Draft202012Validator(schema())
SECTIONS = [SpecKeys, ClusterSpec, DatasetKeys, *STAGES.values(), *SOURCES.values()]


def test_the_schema_is_a_schema_and_plain_json() -> None:
    Draft202012Validator.check_schema(json.loads(json.dumps(schema())))


@pytest.mark.parametrize("spec", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_spec_is_valid(spec: object) -> None:
    document, _ = read_yaml(spec.read_bytes(), "")  # type: ignore[attr-defined]
    assert [error.message for error in VALIDATOR.iter_errors(document.value)] == []


@pytest.mark.parametrize(
    "name",
    [
        "unknown_key_top",
        "unknown_key_stage",
        "unknown_op",
        "batch_zero",
        "no_verb",
        "two_sources",
        "column_type",
    ],
)
def test_the_schema_refuses_what_an_editor_can_see(name: str) -> None:
    document, _ = read_yaml((ROOT / INVALID / f"{name}.yaml").read_bytes(), "")
    assert not VALIDATOR.is_valid(document.value)


@pytest.mark.parametrize("key", ["batch", "epochs", "shuffle", "drop_remainder"])
def test_references_are_allowed_where_a_value_may_stand(key: str) -> None:
    dataset = {"range": "${params.n}", "batch": 4, key: "${params.x}"}
    stages = {"a": {"reduce": "${params.op}", "of": "dataset", "axis": "${params.axis}"}}
    spec = {"pipedist": 1, "dataset": dataset, "stages": stages}
    assert VALIDATOR.is_valid(spec)
    dataset[key] = "text"
    assert not VALIDATOR.is_valid(spec)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_key_has_an_account_and_an_example_that_holds(section: type) -> None:
    name = section.__name__
    definitions = schema()["$defs"]
    properties = {
        "SpecKeys": schema()["properties"],
        "DatasetKeys": definitions["Dataset"]["properties"],
    }.get(name) or definitions.get(name, {}).get("properties", {})
    for alias, field in section.fields.items():  # type: ignore[attr-defined]
        if name == "ArraysSource":
            continue
        key = field.account
        assert key is not None, alias
        assert key.says.endswith((".", ")"))
        assert not key.expected.endswith(".")
        value = example_value(key, alias)
        Draft202012Validator({**properties[alias], "$defs": definitions}).validate(value)
        assert properties[alias]["description"].startswith(key.says)


def test_every_source_has_an_example() -> None:
    assert set(SOURCE_EXAMPLES) == set(SOURCES)
    dataset = Draft202012Validator({"$ref": "#/$defs/Dataset", "$defs": schema()["$defs"]})
    for example in filter(None, SOURCE_EXAMPLES.values()):
        document, _ = read_yaml(example.encode(), "")
        assert isinstance(document.value, dict)
        dataset.validate({**document.value, "batch": 1})


def test_the_reference_is_up_to_date() -> None:
    command = [sys.executable, "-m", "pipedist.spec.reference"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert printed == reference()
    assert (ROOT / "docs" / "language.md").read_text() == printed, f"run: {' '.join(command[1:])}"


def test_the_reference_s_examples_are_yaml() -> None:
    for block in reference().split("```yaml\n")[1:]:
        document, problems = read_yaml(block.split("```")[0].encode(), "")
        problems.raise_all()
        assert isinstance(document.value, dict)
