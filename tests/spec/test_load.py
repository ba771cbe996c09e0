from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipedist.errors import SpecError, UsageError
from pipedist.spec import (
    GatherSpec,
    InitFile,
    InitFunction,
    InitLiteral,
    ReduceSpec,
    RunSpec,
    StageRef,
    StateRef,
    UpdateSpec,
    load,
    references,
    substitute,
    with_cluster,
)
from pipedist.spec.datasets import CsvSource, RangeSource

TOTAL: dict[str, Any] = {
    "pipedist": 1,
    "dataset": {"range": 10, "batch": 4},
    "stages": {"total": {"reduce": "sum", "of": "dataset", "axis": 0}},
}


@pytest.mark.parametrize(
    ("name", "message", "rest"),
    [
        ("okay", "this file does not exist", "did you mean 'okay.yaml'?"),
        ("other.yaml", "this file does not exist", "expected the path of a YAML file$"),
        (".", "this is a folder", "expected ./okay.yaml"),
        ("rows.csv", "this is a data file, not a spec", "`pipedist init --from rows.csv` writes one"),
        ("functions.py", "this is a Python file, not a spec", "expected a YAML file"),
    ],
)
def test_a_path_that_is_no_spec_gets_a_hint(
    name: str, message: str, rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for each in ("okay.yaml", "rows.csv", "functions.py"):
        (tmp_path / each).touch()
    with pytest.raises(SpecError) as caught:
        load(name)
    assert str(caught.value).startswith(f"{name}: {message}\n")
    assert rest in f"{caught.value}$"


def test_sections_cannot_be_hashed_whatever_they_hold() -> None:
    with pytest.raises(TypeError, match="unhashable type: 'RangeSource'"):
        hash(RangeSource(stop=10))
    with pytest.raises(TypeError, match="unhashable type: 'Spec'"):
        hash(load(TOTAL))


def write(folder: Path, text: str, name: str = "flights.yaml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def problems_of(source: Any, **options: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(source, **options)
    return [f"{problem.where}: {problem.message}" for problem in caught.value.problems]


def test_the_example_of_the_reference(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        pipedist: 1
        params: {late_after_min: 15}
        replicas: 4
        dataset:
          csv: {path: "data/flights*.csv", columns: {carrier: str, dep_delay: float32}}
          batch: 4096
        stages:
          delays:
            run: flights:delays
            with: {late_after_min: "${params.late_after_min}"}
            timeout_s: 60
            retries: 2
          late: {reduce: sum, of: delays, axis: 0}
          rows: {gather: 0, of: delays}
        outputs: {late: ./late.json, rows: rows.npz}
        """,
    )
    spec = load(path)
    assert (spec.name, spec.replicas, spec.seed, spec.threads_per_replica) == ("flights", 4, 0, 1)
    assert spec.folder == spec.code == tmp_path
    assert (spec.cluster.launcher, spec.cluster.workers, spec.cluster.grace_s) == ("local", "auto", 10.0)
    dataset = spec.datasets["dataset"]
    assert (dataset.batch, dataset.drop_remainder, dataset.epochs, dataset.shuffle) == (4096, False, 1, False)
    assert dataset.kind == "csv"
    assert isinstance(dataset.csv, CsvSource)
    assert dataset.config == {
        "path": ["data/flights*.csv"],
        "columns": {"carrier": "str", "dep_delay": "float32"},
        "delimiter": ",",
        "quote": '"',
    }
    delays, late, rows = spec.stages.values()
    assert isinstance(delays, RunSpec)
    assert (delays.run, delays.of, delays.with_) == ("flights:delays", "dataset", {"late_after_min": 15})
    assert (delays.timeout_s, delays.retries, delays.on_error) == (60.0, 2, "fail")
    assert isinstance(late, ReduceSpec)
    assert (late.op, late.combine, late.axis, late.per) == ("sum", None, 0, "run")
    assert isinstance(rows, GatherSpec)
    assert (rows.gather, rows.of) == (0, "delays")
    assert spec.outputs == {"late": "late.json", "rows": "rows.npz"}


def test_a_spec_is_immutable() -> None:
    spec = load(TOTAL)
    with pytest.raises(AttributeError):
        spec.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.stages["x"] = spec.stages["total"]  # type: ignore[index]
    with pytest.raises(ValidationError, match="frozen"):
        spec.datasets["dataset"].batch = 8


def test_a_dict_may_hold_functions_and_arrays() -> None:
    data = {"x": np.arange(6.0)}

    def double(shard: Any) -> Any:
        return shard

    document: dict[str, Any] = {
        "pipedist": 1,
        "dataset": {"arrays": data, "batch": 2},
        "stages": {
            "a": {"run": double, "with": {"w": np.ones(3), "t": (1, {2: "x"})}},
            "b": {"reduce": max, "of": "a", "per": "epoch"},
            "c": {"update": double, "of": "b", "init": np.zeros(3), "until": double},
        },
    }
    spec = load(document)
    assert spec.name == "spec"
    assert spec.datasets["dataset"].config["arrays"] is data
    run, reduce, update = spec.stages.values()
    assert isinstance(run, RunSpec)
    assert isinstance(reduce, ReduceSpec)
    assert isinstance(update, UpdateSpec)
    assert run.run is double
    assert run.with_["w"] is document["stages"]["a"]["with"]["w"]
    assert run.with_["t"] == (1, {2: "x"})
    assert reduce.combine is max
    assert reduce.op is None
    assert isinstance(update.init, InitLiteral)
    assert update.init.value is document["stages"]["c"]["init"]
    assert update.until is not None
    assert update.until.function is double


def test_problems_of_a_dict_have_paths_in_the_order_of_the_dict() -> None:
    document = {
        "stages": {"late": {"reduce": "summ", "of": "datset", "axis": 0, 5: 1}},
        "dataset": {"range": "x", "batch": 0},
        "pipedist": 1,
        "outputs": {"late": "a.txt"},
    }
    assert problems_of(document) == [
        "stages.late: the key 5 is not text",
        "stages.late.reduce: `reduce` must be sum, mean, min, max, prod, or \"package.module:combine\", got 'summ'",
        "stages.late.of: there is no dataset or stage `datset`",
        "dataset.range: `range` must be an integer, or a mapping with `stop` and optionally `start` and `step`, "
        "got 'x'",
        "dataset.batch: `batch` must be a positive whole number of elements, got 0",
        "outputs.late: 'a.txt' does not end in a known format",
    ]


def test_the_user_s_dict_is_not_changed() -> None:
    document = {**TOTAL, "name": "${params.x}", "params": {"x": "y"}}
    before = repr(document)
    assert load(document).name == "y"
    assert repr(document) == before


@pytest.mark.parametrize(
    ("written", "config"),
    [
        (10, {"start": 0, "stop": 10, "step": 1}),
        ({"start": 2, "stop": 11, "step": 3}, {"start": 2, "stop": 11, "step": 3}),
        ({"stop": -3, "step": -1}, {"start": 0, "stop": -3, "step": -1}),
    ],
)
def test_ranges(written: object, config: dict[str, int]) -> None:
    dataset = load({**TOTAL, "dataset": {"range": written, "batch": 1}}).datasets["dataset"]
    assert isinstance(dataset.range, RangeSource)
    assert dataset.config == config


def test_a_range_s_step_is_not_zero() -> None:
    document = {**TOTAL, "dataset": {"range": {"stop": 3, "step": 0}, "batch": 1}}
    assert problems_of(document) == ["dataset.range.step: `step` must be an integer other than 0, got 0"]


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        (0.5, InitLiteral(0.5)),
        ({"w": [1, 2], "b": None}, InitLiteral({"w": [1, 2], "b": None})),
        ({"file": "w.npy"}, InitFile("w.npy")),
        ({"function": "m:f"}, InitFunction("m:f", {})),
        ({"function": "m:f", "with": {"n": 3}}, InitFunction("m:f", {"n": 3})),
    ],
)
def test_initial_states(init: object, expected: object) -> None:
    stages = {
        "total": TOTAL["stages"]["total"],
        "state": {"update": "m:u", "of": "total", "init": init},
    }
    state = load({**TOTAL, "stages": stages}).stages["state"]
    assert isinstance(state, UpdateSpec)
    assert state.init == expected


def test_every_key_of_a_connected_cluster() -> None:
    cluster = {"launcher": "connect", "listen": "tcp://[::1]:*", "key_file": "k.json", "workers": 3}
    spec = load({**TOTAL, "cluster": cluster})
    assert spec.cluster.listen == "tcp://[::1]:*"
    assert spec.cluster.key_file == str(Path.cwd() / "k.json")


@pytest.mark.parametrize("listen", ["tcp://h:65536", "tcp://:1", "ipc:///x", "tcp://h", "tcp://h:1/x", 5])
def test_a_bad_endpoint_is_rejected(listen: object) -> None:
    cluster = {"launcher": "connect", "listen": listen, "key_file": "k.json"}
    (problem,) = problems_of({**TOTAL, "cluster": cluster})
    assert problem.startswith("cluster.listen: `listen` must be ")


def test_other_packages_report_problems_with_places(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        pipedist: 1
        dataset:
          csv: {path: a.csv, columns: {delay: int8}}
          batch: 1
        stages:
          late: {run: "flights:delayz"}
        """,
    )
    problem = load(path).document.problem(
        ("stages", "late", "run"), "no such function", expected="a function", allowed=["delays", "arrivals"]
    )
    assert str(problem).replace(str(path), "F") == textwrap.dedent(
        """\
        F:6:15: no such function
              late: {run: "flights:delayz"}
                          ^
            expected a function
            did you mean 'delays'?"""
    )
    column = load(path).document.problem(("datasets", "dataset", "csv", "columns", "delay"), "x", at_key=True)
    assert column.where == f"{path}:3:32"
    default = load(path).document.problem(("stages", "late", "of"), "x")
    assert default.where == f"{path}:6:9", "what is not written has the place of what is around it"
    nothing = load(path).document.problem(("outputs", "late"), "x")
    assert nothing.where == f"{path}:1:1"


def test_references_in_a_with_tree_can_be_listed_and_replaced() -> None:
    tree = {"a": [StageRef("x"), 1], "b": (StateRef("y"),), "c": np.ones(2)}
    assert references(tree) == [StageRef("x"), StateRef("y")]
    replaced = substitute(tree, lambda reference: reference.name.upper())
    assert replaced["a"] == ["X", 1]
    assert replaced["b"] == ("Y",)
    assert replaced["c"] is tree["c"]


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "x")
    with pytest.raises(SpecError, match="did you mean") as caught:
        load(tmp_path / "flihgts.yaml")
    assert caught.value.exit_code == 2
    assert caught.value.problems[0].nearest == str(tmp_path / "flights.yaml")


@pytest.mark.parametrize("path", ["/", "/dev/zero", "nothing/here.yaml", "a\0b"])
def test_what_is_no_file_is_a_spec_error(path: str) -> None:
    with pytest.raises(SpecError):
        load(path)


def test_one_problem_hides_no_other(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        pipedist: 1
        replcias: 2
        dataset: {rnge: 10, batch: 0}
        stages:
          a: {run: "m:f", timeout_s: x, of: datset}
          b: {redcue: sum, of: aa, axis: 0}
        outputs: {b: ../b.json, c: c.json}
        """,
    )
    places = [problem.removeprefix(str(path)).split(":")[1:3] for problem in problems_of(path)]
    assert places == [
        ["2", "1"], ["3", "11"], ["3", "28"], ["5", "30"], ["5", "37"], ["6", "7"], ["6", "24"],
        ["7", "14"], ["7", "25"],
    ]  # fmt: skip


def test_terminal_escapes_never_reach_an_error() -> None:
    (problem, *_) = problems_of({**TOTAL, "\x1b[2J": 1})
    assert "\x1b" not in problem


@pytest.mark.parametrize(
    ("file", "gather", "word"),
    [
        ("a.csv", {"gather": 1}, "2 or more"),
        ("a.parquet", {"gather": 0, "per": "step"}, "for each step"),
        ("a.csv", {"gather": 0, "per": "epoch"}, "for each epoch"),
        ("a.csv", {"gather": 0}, ""),
        ("a.csv", {"gather": -1}, ""),
        ("a.jsonl", {"gather": 0, "per": "step"}, ""),
        ("a.npz", {"gather": 1, "per": "step"}, ""),
    ],
)
def test_what_a_format_can_not_hold_is_known_without_data(
    file: str, gather: dict[str, Any], word: str
) -> None:
    document = {**TOTAL, "stages": {"a": {"of": "dataset", **gather}}, "outputs": {"a": file}}
    if not word:
        assert load(document).outputs == {"a": file}
        return
    (problem,) = problems_of(document)
    assert problem.startswith("outputs.a: ")
    assert word in problem


@pytest.mark.parametrize("value", [1, 1.5, 4, 1_000_000, "off"])
def test_speculation(value: object) -> None:
    spec = load({**TOTAL, "cluster": {"speculation": value}})
    assert spec.cluster.speculation == value


@pytest.mark.parametrize(
    "value", [0, 0.5, -1, True, False, float("nan"), float("inf"), 1_000_001, "on", None]
)
def test_a_speculation_out_of_range_is_rejected(value: object) -> None:
    with pytest.raises(SpecError, match="a number from 1 to 1,000,000, or off"):
        load({**TOTAL, "cluster": {"speculation": value}})


@pytest.mark.parametrize("value", [0, -1, "off", None, float("inf")])
def test_a_stall_time_that_is_not_positive_is_rejected(value: object) -> None:
    with pytest.raises(SpecError, match="a number of seconds, more than 0"):
        load({**TOTAL, "cluster": {"stall_s": value}})


def test_speculation_and_stall_time_have_defaults() -> None:
    cluster = load(TOTAL).cluster
    assert (cluster.speculation, cluster.stall_s) == (4.0, 60.0)


@pytest.mark.parametrize(
    ("launcher", "address"),
    [
        ("ray", "local"),
        ("ray", "auto"),
        ("ray", "10.0.0.1:6379"),
        ("ray", "ray://[::1]:10001"),
        ("dask", "local"),
        ("dask", "tcp://h:8786"),
        ("dask", "tls://h:8786"),
    ],
)
def test_every_key_of_an_engines_cluster(launcher: str, address: str) -> None:
    keys = {"launcher": launcher, "address": address, "place_s": 5, "listen": "tcp://10.0.0.1:5555"}
    cluster = load({**TOTAL, "cluster": keys}).cluster
    assert (cluster.address, cluster.place_s, cluster.placement) == (address, 5.0, "pack")


@pytest.mark.parametrize(
    ("launcher", "address"),
    [
        ("ray", "tcp://h:1"),
        ("ray", "h"),
        ("dask", "auto"),
        ("dask", "h:8786"),
        ("dask", "ray://h:1"),
        ("ray", 5),
    ],
)
def test_an_address_of_another_kind_is_rejected(launcher: str, address: object) -> None:
    (problem,) = problems_of({**TOTAL, "cluster": {"launcher": launcher, "address": address}})
    assert problem.startswith("cluster.address: `address` must be ")


@pytest.mark.parametrize(
    ("choice", "launcher", "key", "value"),
    [
        ("local", "local", "address", None),
        ("ray", "ray", "address", None),
        ("ray:auto", "ray", "address", "auto"),
        ("ray:ray://h:10001", "ray", "address", "ray://h:10001"),
        ("ray://h:10001", "ray", "address", "ray://h:10001"),
        ("dask:tcp://h:8786", "dask", "address", "tcp://h:8786"),
        ("connect:tcp://h:5555", "connect", "listen", "tcp://h:5555"),
        ("connect", "connect", "key_file", str(Path.cwd() / "cluster.key")),
    ],
)
def test_another_cluster_can_be_chosen(choice: str, launcher: str, key: str, value: object) -> None:
    spec = load({**TOTAL, "cluster": {"launcher": "ray", "placement": "spread", "workers": 3, "grace_s": 7}})
    cluster = with_cluster(spec, choice).cluster
    assert (cluster.launcher, getattr(cluster, key)) == (launcher, value)
    assert (cluster.workers, cluster.grace_s) == (3, 7.0), "what goes with every launcher stays"
    assert cluster.placement == ("spread" if launcher == "ray" else "pack"), "nothing of another launcher's"


@pytest.mark.parametrize(
    "choice",
    ["", "rey", "local:x", "ray:tcp://h:1", "ray://h", "dask://h:1", "dask:auto", "connect:h", "slurm"],
)
def test_an_unknown_cluster_choice_is_rejected(choice: str) -> None:
    with pytest.raises(UsageError, match="cluster"):
        with_cluster(load(TOTAL), choice)
