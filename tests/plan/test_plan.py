"""The plan: phases, what it says, and everything that is missing, all at once."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipedist.core.functions import how_to_install
from pipedist.core.gpus import Supply
from pipedist.datasets.sources import Source
from pipedist.errors import PlanError, SpecError
from pipedist.plan import Plan, compile_plan
from pipedist.plan import compiler as plan_compiler
from pipedist.plan.view import as_json, as_mermaid, as_text
from pipedist.spec import load

F = "tests.runs.functions"
GOLDEN = Path(__file__).parent / "golden"

TWO_PHASES: dict[str, Any] = {
    "pipedist": 1,
    "name": "two",
    "replicas": 4,
    "seed": 7,
    "datasets": {
        "train": {"range": 10_000, "batch": 4096, "epochs": 2, "shuffle": True},
        "test": {"range": 10, "batch": 3},
    },
    "stages": {
        "y": {"run": f"{F}:as_float", "of": "train"},
        "mean": {"reduce": "mean", "of": "y", "axis": 0},
        "merged": {"reduce": f"{F}:larger", "of": "y", "per": "epoch"},
        "centred": {"run": f"{F}:subtract", "of": "y", "with": {"mean": "${stages.mean}"}},
        "rows": {"gather": 0, "of": "centred"},
        "fresh": {"run": f"{F}:subtract", "of": "test", "with": {"mean": "${stages.mean}"}},
        "worst": {"reduce": "max", "of": "fresh", "axis": None, "per": "step"},
        "count": {"reduce": "sum", "of": "test", "axis": [0]},
        "alone": {"run": f"{F}:double", "of": "test", "after": ["fresh"]},
    },
    "outputs": {"rows": "rows.npy", "mean": "deep/mean.json"},
}


G = "tests.runs.training_functions"
TRAINING: dict[str, Any] = {
    "pipedist": 1,
    "name": "training",
    "replicas": 4,
    "datasets": {
        "train": {
            "function": {"call": f"{G}:rows", "with": {"count": 64, "seed": 1}},
            "batch": 16,
            "epochs": 5,
        },
        "held_out": {"function": {"call": f"{G}:rows", "with": {"count": 8, "seed": 2}}, "batch": 8},
    },
    "stages": {
        "centred": {"run": f"{G}:normalized", "of": "train", "collectives": True},
        "mean": {"reduce": "mean", "of": "centred", "axis": 0},
        "gradients": {"run": f"{G}:gradients", "of": "train", "with": {"weights": "${state.weights}"}},
        "sums": {"reduce": "sum", "of": "gradients", "axis": None, "per": "step"},
        "weights": {
            "update": f"{G}:descend",
            "of": "sums",
            "init": {"function": f"{G}:first", "with": {"bias": "${params.bias}"}},
            "with": {"rate": "${state.rate}"},
            "until": f"{G}:at_least_20",
        },
        "whole": {"reduce": "sum", "of": "gradients", "axis": None, "per": "epoch"},
        "rate": {"update": f"{G}:add", "of": "whole", "init": 0.5, "with": {"mean": "${stages.scale}"}},
        "scale": {"reduce": "max", "of": "labels", "axis": 0},
        "labels": {"run": f"{G}:labels", "of": "train"},
        "errors": {
            "run": f"{G}:squared_errors",
            "of": "held_out",
            "with": {"weights": "${state.weights}"},
        },
        "error": {"reduce": "mean", "of": "errors", "axis": 0, "per": "epoch"},
        "residuals": {
            "run": f"{G}:squared_errors",
            "of": "train",
            "with": {"weights": "${state.weights}"},
            "after": "weights",
        },
        "residual": {"reduce": "max", "of": "residuals", "axis": 0},
    },
    "params": {"bias": 0.0},
    "outputs": {"weights": "weights.npz", "error": "error.csv"},
}


STREAM: dict[str, Any] = {
    "pipedist": 1,
    "name": "stream",
    "replicas": 2,
    "dataset": {"range": 100, "batch": 4},
    "stages": {
        "decoded": {"run": f"{F}:double"},
        "resized": {"run": f"{F}:double", "of": "decoded"},
        "sizes": {"reduce": "sum", "of": "decoded", "axis": 0},
        "inferred": {"run": f"{F}:double", "of": "resized", "batch": 32, "resources": {"gpus": 1}},
        "scored": {"run": f"{F}:double", "of": "inferred", "resources": {"gpus": 1}},
        "drawn": {"run": f"{F}:double", "of": "scored"},
        "rows": {"gather": 0, "of": "drawn"},
        "score": {"reduce": "sum", "of": "scored", "axis": 0},
    },
}


def planned(document: dict[str, Any], workers: int = 2) -> Plan:
    supply = Supply((1.0,) + (0.0,) * (workers - 1), ("0",), "nvidia-smi lists them")
    return compile_plan(load(document), workers=workers, supply=supply)


def shown(plan: Plan) -> dict[str, str]:
    """Return each view; `python -m tests.plan.test_plan` writes them anew, and the diff is read."""
    name = plan.spec.name
    return {
        f"{name}.txt": as_text(plan) + "\n",
        f"{name}.mmd": as_mermaid(plan) + "\n",
        f"{name}.json": json.dumps(as_json(plan), indent=1) + "\n",
    }


def test_the_text_has_the_shard_of_a_source_whose_elements_are_no_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("{}\n")
    for source, shard in (
        ("text", "a list of n texts"),
        ("jsonl", "a list of n objects"),
    ):
        dataset = {source: {"path": str(tmp_path / "a.txt")}, "batch": 1}
        stages = {"rows": {"gather": 0, "of": "dataset"}}
        plan = planned({"pipedist": 1, "dataset": dataset, "stages": stages})
        assert f"  a shard of n elements is {shard}\n" in as_text(plan)
        plan.close()


@pytest.mark.parametrize("document", [TWO_PHASES, TRAINING, STREAM], ids=["two", "training", "stream"])
@pytest.mark.parametrize("ending", ["txt", "mmd", "json"])
def test_views(document: dict[str, Any], ending: str) -> None:
    plan = planned(document)
    try:
        name = f"{document['name']}.{ending}"
        assert shown(plan)[name] == (GOLDEN / name).read_text()
    finally:
        plan.close()


def test_mermaid_shows_names_as_they_are() -> None:
    plan = planned(
        {
            "pipedist": 1,
            "dataset": {"range": 4, "batch": 2},
            "stages": {"y": {"run": lambda x: x}, "t": {"gather": 0, "of": "y"}},
            "outputs": {"t": 'a <i>#1; "b" & c.npy'},
        }
    )
    try:
        assert "lambda#gt;<br/>x 1" in as_mermaid(plan)
        assert '"a #lt;i#gt;#35;1; #quot;b#quot; #amp; c.npy"' in as_mermaid(plan)
    finally:
        plan.close()


def test_the_head_explains_replicas_and_workers() -> None:
    lines = as_text(planned(TWO_PHASES, workers=1)).splitlines()
    assert lines[:2] == [
        "two: 4 replicas, 1 worker, seed 7, launcher local",
        "  another number of replicas changes the results; another number of workers never does",
    ]


def test_steps_that_are_not_shown_have_a_line() -> None:
    def steps(length: int) -> list[str]:
        document = {
            "pipedist": 1,
            "replicas": 2,
            "dataset": {"range": length, "batch": 3},
            "stages": {"t": {"reduce": "sum", "of": "dataset", "axis": 0}},
        }
        lines = as_text(planned(document)).splitlines()
        return [line.strip() for line in lines if line.startswith(("dataset:", "  step", "  ..."))]

    first = "step 0: elements [0, 2) for replica 0, [2, 3) for replica 1"
    assert steps(4) == [
        "dataset: range, 4 elements, 2 steps of 3 (up to 2 per replica)",
        first,
        "step 1: elements [3, 4) for replica 0, none for replica 1",
    ]
    assert steps(9)[1:] == [first, "...", "step 2: elements [6, 8) for replica 0, [8, 9) for replica 1"]


def test_phases() -> None:
    plan = planned(TWO_PHASES)
    assert [[(p.root, p.runs, p.folds, p.kept) for p in phase] for phase in plan.phases] == [
        [("test", (), ("count",), ()), ("train", ("y",), ("mean", "merged"), ("y",))],
        [("test", ("fresh",), ("worst",), ()), ("y", ("centred",), ("rows",), ())],
        [("test", ("alone",), (), ())],
    ]


def test_a_chain_longer_than_the_stack() -> None:
    stages: dict[str, Any] = {
        f"s{i}": {"run": f"{F}:double", "of": f"s{i - 1}" if i else "dataset"} for i in range(1500)
    }
    document = {
        "pipedist": 1,
        "dataset": {"range": 3, "batch": 1},
        "stages": dict(reversed(stages.items())),
    }
    plan = planned(document)
    assert [p.runs for p in plan.passes] == [tuple(f"s{i}" for i in range(1500))]


def test_a_class_whose_instances_cannot_be_called_is_a_mistake_in_the_spec() -> None:
    stages = {"y": {"run": "decimal:Decimal", "with": {"value": 1}}}
    with pytest.raises(PlanError) as caught:
        planned({"pipedist": 1, "dataset": {"range": 3, "batch": 1}, "stages": stages})
    (problem,) = caught.value.problems
    assert problem.where == "stages.y.run"
    assert "class decimal:Decimal has no __call__ method" in problem.message


def with_update(**keys: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "replicas": 4,
        "dataset": {"range": 10, "batch": 4},
        "stages": {
            "total": {"reduce": "sum", "of": "dataset", "axis": 0, "per": "step"},
            "w": {"update": f"{G}:add", "of": "total", "init": 0, **keys},
        },
    }


@pytest.mark.parametrize(
    ("keys", "place", "text"),
    [
        ({"update": f"{G}:no_such"}, "stages.w.update", "has no attribute 'no_such'"),
        ({"update": f"{G}:plus"}, "", ""),
        (
            {"update": f"{G}:nothing", "with": {"x": 1}},
            "stages.w.with",
            "called as nothing(state, value, x=...)",
        ),
        ({"until": f"{G}:labels"}, "stages.w.until", "called as labels(old, new)"),
        ({"until": f"{G}:no_such"}, "stages.w.until", "has no attribute 'no_such'"),
        ({"init": {"function": f"{G}:first"}}, "stages.w.init.function", "called as first()"),
        (
            {"init": {"function": f"{G}:first", "with": {"b": 1}}},
            "stages.w.init.with",
            "called as first(b=...)",
        ),
        ({"init": {"function": f"{G}:first", "with": {"bais": 1}}}, "stages.w.init.with", "you mean 'bias'?"),
        ({"init": {"file": "no/such.npy"}}, "stages.w.init.file", "no/such.npy: No such file"),
        ({"init": {"file": "pyproject.json"}}, "stages.w.init.file", "No such file"),
    ],
)
def test_errors_of_a_state_have_their_place(keys: dict[str, Any], place: str, text: str) -> None:
    if not place:
        planned(with_update(**keys)).close()
        return
    with pytest.raises(PlanError) as caught:
        planned(with_update(**keys))
    (problem,) = caught.value.problems
    assert problem.where == place
    assert text in problem.message


def test_a_file_of_objects_is_rejected_as_a_state(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.array([{}], object))
    with pytest.raises(PlanError, match="the first value of the state can't be read from"):
        planned(with_update(init={"file": str(tmp_path / "w.npy")}))


def test_an_empty_shard_has_something_to_join_a_collective_with() -> None:
    stages: dict[str, Any] = {
        "a": {"run": f"{F}:double"},
        "b": {"run": f"{G}:normalized", "of": "a", "collectives": True},
    }
    document = {
        "pipedist": 1,
        "replicas": 4,
        "dataset": {"range": 10, "batch": 8},
        "stages": stages,
    }
    with pytest.raises(PlanError) as caught:
        planned(document)
    (problem,) = caught.value.problems
    assert problem.where == "stages.b.of"
    assert "step 1 of an epoch has 2 shards for 4 replicas. An empty shard has no value of `a`" in str(
        problem
    )
    stages["a"]["collectives"] = True
    planned(document).close()
    del stages["a"]["collectives"]
    planned({**document, "dataset": {"range": 10, "batch": 8, "drop_remainder": True}}).close()


def test_a_shard_may_be_empty_if_its_elements_were_quarantined() -> None:
    stages: dict[str, Any] = {
        "parsed": {"run": f"{F}:double", "on_error": "quarantine"},
        "a": {"run": f"{F}:double", "of": "parsed", "batch": 4},
        "b": {"run": f"{G}:normalized", "of": "a", "collectives": True},
    }
    document = {"pipedist": 1, "replicas": 4, "dataset": {"range": 8, "batch": 4}, "stages": stages}
    with pytest.raises(PlanError) as caught:
        planned(document)
    (problem,) = caught.value.problems
    assert problem.where == "stages.b.of"
    assert "`parsed` may quarantine all elements of a shard. An empty shard has no value of `a`" in str(
        problem
    )
    planned(document | {"replicas": 1}).close()  # an empty shard is an empty step
    stages["a"]["collectives"] = True
    planned(document).close()
    del stages["a"]["collectives"], stages["parsed"]["on_error"]
    planned(document).close()


def gang(**collectives: object) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "replicas": 4,
        "dataset": {"range": 8, "batch": 8},
        "stages": {
            "a": {"run": f"{G}:normalized", "collectives": collectives},
            "b": {"run": f"{G}:normalized", "of": "a", "collectives": True},
        },
    }


def test_a_gang_uses_the_implementation_of_any_of_its_stages() -> None:
    plan = planned(gang(implementation="transport"), workers=3)
    plan.close()
    assert "a gang of 4 replicas: at the same time, on 3 workers, collectives through transport" in as_text(
        plan
    )
    document = gang(implementation="transport")
    document["stages"]["b"]["collectives"] = {"timeout_s": 3}
    with pytest.raises(PlanError) as caught:
        planned(document)
    (problem,) = caught.value.problems
    assert problem.where == "stages.b.collectives"
    assert "`b` and `a` run in the same gang but have different" in problem.message


@pytest.mark.parametrize("workers", [3, 4])
def test_torch_needs_a_worker_for_each_replica(workers: int) -> None:
    if workers == 4 and find_spec("torch") is not None:
        planned(gang(implementation="gloo"), workers=workers).close()
        return
    with pytest.raises(PlanError) as caught:
        planned(gang(implementation="gloo"), workers=workers)
    problem, *others = caught.value.problems
    assert problem.where == "stages.a.collectives.implementation"
    if workers == 3:
        assert problem.message == "`gloo` needs a worker for each replica: there are 4 replicas on 3 workers"
        assert problem.expected == "--workers 4, or `implementation: auto`"
    else:
        assert "torch is not installed" in problem.message
        assert not others


def test_updates_are_fed_by_one_reading() -> None:
    document = with_update()
    document["stages"] |= {
        "a": {"run": f"{F}:double"},
        "largest": {"reduce": "max", "of": "a", "axis": 0},
        "b": {"run": f"{F}:subtract", "of": "a", "with": {"mean": "${stages.largest}"}},
        "bs": {"reduce": "sum", "of": "b", "axis": 0, "per": "step"},
        "v": {"update": f"{G}:add", "of": "bs", "init": 0},
    }
    with pytest.raises(
        PlanError, match="the updates are fed by 'a' here and by 'dataset' elsewhere"
    ) as caught:
        planned(document)
    assert caught.value.problems[0].where == "stages.b.of"


@pytest.mark.parametrize("fault", ["problem", "crash"])
def test_sources_are_closed_where_a_plan_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Source] = []
    closed: list[Source] = []
    original = plan_compiler.open_source

    def spying(*args: Any, **kwargs: Any) -> Source:
        if fault == "crash" and len(opened) == 2:
            raise ZeroDivisionError("a source's own defect")
        source = original(*args, **kwargs)
        opened.append(source)
        monkeypatch.setattr(source, "close", lambda: closed.append(source))
        return source

    monkeypatch.setattr(plan_compiler, "open_source", spying)
    document = {
        "pipedist": 1,
        "datasets": {name: {"range": 3, "batch": 1} for name in "abc"},
        "stages": {"y": {"run": f"{F}:no_such_function", "of": "a"}},
    }
    with pytest.raises(PlanError if fault == "problem" else ZeroDivisionError):
        planned(document)
    assert closed == opened[::-1]
    assert len(closed) == (3 if fault == "problem" else 2)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for document in (TWO_PHASES, TRAINING, STREAM):
        for file, text in shown(planned(document)).items():
            (GOLDEN / file).write_text(text)


# -- passes within a phase -------------------------------------------------------------------


def runs_of(stages: dict[str, Any], **more: Any) -> list[tuple[str, tuple[str, ...], int]]:
    document = {"pipedist": 1, "replicas": 2, "dataset": {"range": 100, "batch": 4}, "stages": stages}
    plan = planned({**document, **more})
    try:
        return [(p.root, p.runs, p.batch) for p in plan.passes]
    finally:
        plan.close()


def run(of: str = "dataset", gpus: float = 0, **more: Any) -> dict[str, Any]:
    return {"run": f"{F}:double", "of": of, "resources": {"gpus": gpus} if gpus else None, **more}


def test_runs_with_other_resources_are_calls_of_their_own() -> None:
    assert runs_of({"a": run(), "b": run("a"), "c": run("b", 1), "d": run("c", 1), "e": run("d")}) == [
        ("dataset", ("a", "b"), 4),
        ("b", ("c", "d"), 4),
        ("d", ("e",), 4),
    ]


def test_readers_with_the_same_resources_share_a_call() -> None:
    stages = {"z": run(), "a": run("z", 1), "b": run("z", 1), "c": run("z", 0.5), "d": run("z", 1, batch=9)}
    assert runs_of(stages) == [
        ("dataset", ("z",), 4),
        ("z", ("c",), 4),
        ("z", ("a", "b"), 4),
        ("z", ("d",), 9),
    ]


def test_a_batch_is_that_of_all_runs_after_it_also_in_a_later_phase() -> None:
    stages = {
        "a": run(),
        "b": run("a", batch=32),
        "t": {"reduce": "sum", "of": "b", "axis": 0},
        "c": run("b", **{"with": {"amount": "${stages.t}"}, "run": f"{F}:plus"}),
        "d": run("b", **{"with": {"amount": "${stages.t}"}, "run": f"{F}:plus", "batch": 8}),
    }
    assert runs_of(stages) == [
        ("dataset", ("a",), 4),
        ("a", ("b",), 32),
        ("b", ("d",), 8),
        ("b", ("c",), 32),
    ]


def test_runs_of_one_dataset_with_other_resources_are_calls_of_their_own() -> None:
    stages = {"a": run(), "b": run(gpus=1), "c": run("b", 1), "d": run("b"), "e": run(gpus=0.5)}
    total = {"total": {"reduce": "sum", "of": "dataset", "axis": 0}}
    assert runs_of(stages | total) == [
        ("dataset", ("a",), 4),
        ("dataset", ("e",), 4),
        ("dataset", ("b", "c"), 4),
        ("b", ("d",), 4),
    ]
    only_gpus = {"b": run(gpus=1), "c": run(gpus=1)}
    assert runs_of(only_gpus | total) == [("dataset", ("b", "c"), 4)]


def training(**stages: Any) -> dict[str, Any]:
    """Return the stages of a training, whose last run is `b`."""
    return {
        **stages,
        "t": {"reduce": "sum", "of": "b", "axis": 0, "per": "step"},
        "s": {"update": f"{F}:plus", "of": "t", "init": 0},
    }


def test_values_are_streamed_to_a_gang_and_to_a_training() -> None:
    gang = {"a": run(), "b": run("a", 0.5, collectives=True)}
    assert runs_of(gang, replicas=1) == [("dataset", ("a",), 4), ("a", ("b",), 4)]
    assert runs_of(training(a=run(), b=run("a", 1))) == [("dataset", ("a",), 4), ("a", ("b",), 4)]
    assert runs_of(training(a=run(), b=run("a", batch=8))) == [("dataset", ("a",), 4), ("a", ("b",), 8)]
    beside = training(a=run(), b=run("a", 1), c=run("a"), d=run("b"), e=run(gpus=0.5))
    assert runs_of(beside) == [
        ("dataset", ("a", "c"), 4),
        ("dataset", ("e",), 4),
        ("a", ("b",), 4),
        ("b", ("d",), 4),
    ]


READS = {"with": {"amount": "${state.s}"}, "run": f"{F}:plus"}


@pytest.mark.parametrize(
    "stages",
    [
        training(a=run(**READS), b=run("a", 1)),
        training(a=run(), b=run("a", 1), c=run("a", **READS)),
        training(a=run(), b=run("a", 1))
        | {"s": {"update": f"{F}:plus", "of": "t", "init": 0, "until": f"{G}:at_least_20"}},
    ],
    ids=["before", "beside", "until"],
)
def test_stages_that_depend_on_the_updates_stay_in_one_call(stages: dict[str, Any]) -> None:
    names = tuple(name for name in stages if "run" in stages[name])
    assert runs_of(stages) == [("dataset", names, 4)]
    plan = planned({"pipedist": 1, "replicas": 2, "dataset": {"range": 103, "batch": 4}, "stages": stages})
    assert re.search("one call executes a, b.*, although their `resources` differ: `", as_text(plan))
    plan.close()


def test_runs_of_kept_values_with_other_resources_are_calls_of_their_own() -> None:
    stages = {
        "a": run(),
        "t": {"reduce": "sum", "of": "a", "axis": 0},
        "b": run("a", after=["t"]),
        "c": run("a", 1, after=["t"]),
    }
    assert runs_of(stages) == [("dataset", ("a",), 4), ("a", ("b",), 4), ("a", ("c",), 4)]


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ({"a": run(batch=8)}, "`batch` requires the input of `a` to be a run, and `dataset` is a dataset"),
        (
            training(a=run(**READS), b=run("a", batch=8)),
            "`b` can't have a `batch`: `a`, which does not read `b`, is part of the training too",
        ),
        (
            {"a": run(), "b": run("a", batch=0)},
            "`batch` must be a positive whole number of elements, or null",
        ),
    ],
)
def test_a_batch_that_has_no_effect_is_an_error(stages: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        runs_of(stages)


def test_the_steps_of_a_batch_follow_the_steps_that_are_not_dropped() -> None:
    dataset = {"range": 103, "batch": 10, "epochs": 2, "drop_remainder": True}
    plan = planned(
        {"pipedist": 1, "replicas": 2, "dataset": dataset, "stages": {"a": run(), "b": run("a", batch=32)}}
    )
    division = plan.division_of(plan.passes[1])
    assert division is not None
    assert [division.rows(step) for step in range(8)] == [32, 32, 32, 4] * 2
    assert plan.elements(plan.passes[0], 11) == 110
    assert plan.elements(plan.passes[1], 5) == 132
    plan.close()


def rows_of(tmp_path: Path, **stage: Any) -> dict[str, Any]:
    (tmp_path / "a.csv").write_text("id,name\n1,x\n2,y\n")
    (tmp_path / "b.csv").write_text('name,id\n\n"z, z",three\n4,5\n')
    path = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    return {
        "pipedist": 1,
        "dataset": {"csv": {"path": path, "columns": {"name": "str", "id": "int64"}}, "batch": 2},
        "stages": {"y": {"run": f"{F}:double", **stage}, "z": {"run": f"{F}:double", "of": "y"}},
    }


def test_the_first_row_of_each_csv_file_is_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        compile_plan(load(rows_of(tmp_path)), workers=1)
    [problem] = caught.value.problems
    assert problem.message == f"{tmp_path}/b.csv:3:2: column 'id': 'three' is not of type int64"
    assert "columns.id" in str(caught.value)


def test_the_first_line_of_each_jsonl_file_is_read(tmp_path: Path) -> None:
    document = rows_of(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"id": "x"}\n')
    document["dataset"] = {
        "jsonl": {"path": str(tmp_path / "a.jsonl"), "columns": {"id": "int8"}},
        "batch": 2,
    }
    with pytest.raises(PlanError, match=r"a\.jsonl:1: column 'id': 'x' is not of type int8"):
        compile_plan(load(document), workers=1)


def test_rows_that_are_set_aside_are_not_refused_by_the_plan(tmp_path: Path) -> None:
    compile_plan(load(rows_of(tmp_path, on_error="quarantine")), workers=1).close()
    document = rows_of(tmp_path)
    document["stages"]["z"]["on_error"] = "quarantine"
    compile_plan(load(document), workers=1).close()


def test_a_module_that_cannot_be_imported_is_reported_once_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_module.py").write_text("def f(shard):\n    return shard *\n")
    (tmp_path / "needs_a_module.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "whole_module.py").write_text("")
    (tmp_path / "a.yaml").write_text(
        "pipedist: 1\n"
        "dataset: {range: 4, batch: 4}\n"
        "stages:\n"
        "  a: {run: broken_module:f}\n"
        "  b: {run: broken_module:g}\n"
        "  c: {run: needs_a_module:f}\n"
        "  d: {run: whole_module.py:f}\n"
    )
    with pytest.raises(PlanError) as caught:
        compile_plan(load("a.yaml"), workers=1)
    assert str(caught.value).splitlines() == [
        "broken_module.py:2:19: importing broken_module failed: SyntaxError: invalid syntax",
        "        return shard *",
        "                      ^",
        "    expected a module that can be imported, for `broken_module:f` at a.yaml:4:12",
        "needs_a_module.py:1: importing needs_a_module failed, because the module 'not_installed_anywhere' is not "
        f"installed here. {how_to_install('not_installed_anywhere')}",
        "    import not_installed_anywhere",
        "    expected a module that can be imported, for `needs_a_module:f` at a.yaml:6:12",
        "a.yaml:7:12: whole_module.py:f: there is no module 'whole_module.py' in "
        f"{tmp_path} or on the import path; write it without `.py`",
        "      d: {run: whole_module.py:f}",
        "               ^",
    ]
