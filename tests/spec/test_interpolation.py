from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.errors import Problem, SpecError, UsageError
from pipedist.spec import RunSpec, StageRef, StateRef, load
from pipedist.spec.interpolation import read_setting
from pipedist.spec.scalars import ScalarError


def document(with_: dict[str, Any], params: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "params": params or {},
        "dataset": {"range": 10, "batch": 4},
        "stages": {
            "x": {"run": "m:f", "with": with_},
            "mean": {"reduce": "mean", "of": "dataset", "axis": 0},
            "w": {"update": "m:u", "of": "mean", "init": 0},
        },
    }


def with_of(with_: dict[str, Any], params: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    stage = load(document(with_, params), **options).stages["x"]
    assert isinstance(stage, RunSpec)
    return stage.with_


def messages(with_: dict[str, Any], params: dict[str, Any] | None = None, **options: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(document(with_, params), **options)
    return [problem.message for problem in caught.value.problems]


@pytest.mark.parametrize("value", [3, 2.5, True, None, "text", [1, [2]], {"a": 1}])
def test_a_lone_reference_keeps_its_type(value: object) -> None:
    assert with_of({"v": "${params.p}"}, {"p": value})["v"] == value


@pytest.mark.parametrize(
    ("value", "text"), [(3, "3"), (2.5, "2.5"), (True, "true"), (None, "null"), ("t", "t")]
)
def test_inside_text_a_reference_becomes_text(value: object, text: str) -> None:
    assert with_of({"v": "<${params.p}|${params.p}>"}, {"p": value})["v"] == f"<{text}|{text}>"


def test_literal_dollars() -> None:
    tree = {"a": "$${params.p}", "b": "$$", "c": "$5 {x}", "d": "${params.p}$${params.p}"}
    assert with_of(tree, {"p": 1}) == {"a": "${params.p}", "b": "$$", "c": "$5 {x}", "d": "1${params.p}"}


def test_references_are_found_anywhere_in_a_tree() -> None:
    tree = {"a": [1, {"b": ("${params.p}", "${stages.mean}")}], "c": "${state.w}"}
    assert with_of(tree, {"p": 1}) == {
        "a": [1, {"b": (1, StageRef("mean"))}],
        "c": StateRef("w"),
    }


def test_what_holds_no_reference_stays_the_same_object() -> None:
    tree = {"a": [1, {"b": (2, "x")}]}
    assert with_of(tree)["a"] is tree["a"]


def test_environment_and_folder() -> None:
    env = {"N": "3", "L": "[1, two, 'no']", "V": "1.10", "E": ""}
    tree = {
        "n": "${env.N}",
        "l": "${env.L}",
        "v": "v${env.V}",
        "e": "${env.E}",
        "d": "${env.D:0.5}",
        "u": "${env.D:tcp://h:1}",
        "dir": "${spec.dir}/x",
    }
    assert with_of(tree, env=env) == {
        "n": 3,
        "l": [1, "two", "no"],
        "v": "v1.10",
        "e": None,
        "d": 0.5,
        "u": "tcp://h:1",
        "dir": f"{Path.cwd()}/x",
    }


def test_settings_override_defaults_and_given_values() -> None:
    params = {"a": 1, "b": 2, "c": 3}
    tree = {name: f"${{params.{name}}}" for name in params} | {"t": "c=${params.c}"}
    spec = load(document(tree, params), params={"b": 20, "c": 30}, sets=["c=3.0"])
    assert dict(spec.params) == {"a": 1, "b": 20, "c": 3.0}
    stage = spec.stages["x"]
    assert isinstance(stage, RunSpec)
    assert stage.with_ == {"a": 1, "b": 20, "c": 3.0, "t": "c=3.0"}


def test_parameters_may_use_the_environment() -> None:
    assert with_of({"v": "${params.p}"}, {"p": "${env.N:7}"}, env={})["v"] == 7


def test_a_setting_replaces_a_default_that_has_no_value() -> None:
    assert with_of({"v": "${params.p}"}, {"p": 1}, sets=["p=${x}"])["v"] == "${x}"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rat=1", "the spec has no parameter `rat`"),
        ("rate", "the setting has no name and value"),
        ("=1", "the setting has no name and value"),
        ("rate=[1", "the list is not closed, or a comma is missing"),
        ("rate=1e999", "the number 1e999 is beyond float64"),
        ('rate=["\udcff"]', "byte 0xff is not UTF-8"),
    ],
)
def test_bad_settings_are_usage_errors(setting: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(document({}, {"rate": 1}), sets=[setting])
    (problem,) = caught.value.problems
    assert problem.where == f"--set {setting}".replace("\udcff", "\N{REPLACEMENT CHARACTER}")
    assert problem.message == message
    assert problem.nearest == ("rate" if setting == "rat=1" else "")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("replicas=2", "a parameter: `params: {replicas: 2}`, which `replicas: ${params.replicas}` reads"),
        ("workers=2", "`--workers 2`: it is not a parameter"),
        ("rows=2", "a name in `params`: rate"),
    ],
)
def test_a_setting_of_no_parameter_gets_a_hint(setting: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(document({}, {"rate": 1}), sets=[setting])
    assert [problem.expected for problem in caught.value.problems] == [expected]


def test_unknown_given_parameters_are_rejected() -> None:
    with pytest.raises(SpecError) as caught:
        load(document({}, {"rate": 1}), params={"rats": 2})
    (problem,) = caught.value.problems
    assert (problem.where, problem.nearest) == ("params", "rate")


def test_parameters_that_are_no_mapping_are_rejected() -> None:
    with pytest.raises(UsageError, match=r"`params` must be a dict from names to values, got \['rate'\]"):
        load(document({}, {"rate": 1}), params=["rate"])  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [None, 3, b"spec.yaml", [{}]])
def test_what_is_neither_a_path_nor_a_dict_is_no_spec(source: Any) -> None:
    name = type(source).__name__
    with pytest.raises(
        UsageError, match=f"a spec is the path of a YAML file, or a dict, got a value of type {name}"
    ):
        load(source)


def test_one_bad_parameter_is_one_problem() -> None:
    found = messages({"a": "${params.p}", "b": "x${params.p}"}, {"p": "${env.NOT_SET}"}, env={})
    assert found == ["the environment variable NOT_SET is not set"]


def test_the_default_of_a_parameter_that_is_given_is_not_read() -> None:
    declared = {"p": "${env.NOT_SET}", "q": "${env.NOT_SET}"}
    spec = load(document({"a": "${params.p}${params.q}"}, declared), params={"p": "x"}, sets=["q=y"], env={})
    assert spec.params == {"p": "x", "q": "y"}


def test_every_bad_reference_of_a_text_is_reported() -> None:
    assert messages({"a": "${params.p} ${env.X} ${"}, env={}) == [
        "the spec has no parameter `p`",
        "the environment variable X is not set",
        "`${` is never closed",
    ]


def test_text_does_not_grow_without_bound() -> None:
    assert messages({"a": "${params.p}" * 1000}, {"p": "x" * 1000}) == [
        "the text is longer than 65536 characters"
    ]


def test_a_dict_that_holds_itself_is_rejected() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    assert messages(loop) == ["the document has more than 32 levels"]


def test_a_dict_of_shared_lists_is_rejected_before_it_expands() -> None:
    tree: list[Any] = [1] * 10
    for _ in range(12):
        tree = [tree] * 10
    assert messages({"a": tree}) == ["the document has more than 1000000 values"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-0x1f", "-0x1f"), ("0x1f", 31), ("0o17", 15), ("017", 17), ("1_000", "1_000"),
        ("1:20", "1:20"), ("no", "no"), ("On", "On"), ("true", True), ("~", None), ("", None),
        ("1.", 1.0), (".5", 0.5), ("1e3", 1000.0), ("-.inf", -math.inf), ("+12", 12),
        ("2024-01-01", "2024-01-01"),
        (" 3 ", 3), ("'3'", "3"), ('"a\\n"', "a\n"), ("[]", []), ("[[1], {a: b}]", [[1], {"a": "b"}]),
        ("{a: 1}", "{a: 1}"), ("a: b # c", "a: b # c"), ("&x", "&x"), ("!!int 3", "!!int 3"),
        ("18446744073709551615", 2**64 - 1), ("-9223372036854775808", -(2**63)),
    ],
)  # fmt: skip
def test_settings_are_yaml_1_2_scalars_or_flow_lists(text: str, value: object) -> None:
    assert read_setting(text) == value
    assert type(read_setting(text)) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(read_setting(".nan"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["9" * 100_000, "18446744073709551616", "1e400", "0x" + "f" * 17, "[!!int 3]"]
)
def test_numbers_that_a_spec_can_t_hold_are_rejected(text: str) -> None:
    with pytest.raises(ScalarError):
        read_setting(text)


@given(st.text(alphabet="${}.:paramsenv x\n\\'\"[]", max_size=40))
def test_no_text_crashes_the_interpolation(text: str) -> None:
    found: tuple[Problem, ...] = ()
    try:
        load(document({"v": text}, {"p": 1}), env={})
    except SpecError as error:
        found = error.problems
    assert all(problem.where == "stages.x.with.v" for problem in found)
