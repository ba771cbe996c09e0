"""The plan: phases, what it says, and everything that is missing, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipedist.datasets.sources import Source
from pipedist.errors import PlanError
from pipedist.plan import Plan, compile_plan
from pipedist.plan import compiler as plan_compiler
from pipedist.spec import load

F = "tests.pipeline.functions"
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


def planned(document: dict[str, Any], workers: int = 2) -> Plan:
    return compile_plan(load(document), workers=workers)


def shown(plan: Plan) -> dict[str, str]:
    """Return each view; `python -m tests.plan.test_plan` writes them anew, and the diff is read."""
    return {
        "two.txt": plan.text() + "\n",
        "two.mmd": plan.mermaid() + "\n",
        "two.json": json.dumps(plan.to_json(), indent=1) + "\n",
    }


@pytest.mark.parametrize("name", ["two.txt", "two.mmd", "two.json"])
def test_views(name: str) -> None:
    plan = planned(TWO_PHASES)
    try:
        assert shown(plan)[name] == (GOLDEN / name).read_text()
    finally:
        plan.close()


def test_the_first_line_is_that_of_the_language() -> None:
    document = {**TWO_PHASES, "datasets": {**TWO_PHASES["datasets"], "test": {"range": 9, "batch": 4096}}}
    plan = planned(document)
    assert plan.text().splitlines()[0] == (
        "4 replicas (decide the result) on 2 workers (never do); 4096 elements a step, 1024 a replica"
    )
    single = {
        "pipedist": 1,
        "dataset": {"range": 3, "batch": 1},
        "stages": {"t": {"reduce": "sum", "of": "dataset", "axis": 0}},
    }
    assert planned(single, workers=1).text().splitlines()[0] == (
        "1 replica (decides the result) on 1 worker (never does); 1 element a step, 1 a replica"
    )


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


NOT_YET: dict[str, tuple[dict[str, Any], str]] = {
    "collectives": ({"stages": {"y": {"run": f"{F}:double", "collectives": True}}}, "stages.y.collectives"),
    "quarantine": ({"stages": {"y": {"run": f"{F}:double", "on_error": "quarantine"}}}, "stages.y.on_error"),
    "timeout": ({"stages": {"y": {"run": f"{F}:double", "timeout_s": 1}}}, "stages.y.timeout_s"),
    "launcher": ({"cluster": {"launcher": "ray"}}, "cluster.launcher"),
    "update": (
        {
            "stages": {
                "y": {"run": f"{F}:double"},
                "t": {"reduce": "sum", "of": "y", "axis": 0, "per": "step"},
                "w": {"update": f"{F}:plus", "of": "t", "init": 0},
            }
        },
        "stages.w.update",
    ),
    "state": (
        {
            "stages": {
                "y": {"run": f"{F}:plus", "with": {"amount": "${state.w}"}},
                "t": {"reduce": "sum", "of": "y", "axis": 0, "per": "step"},
                "w": {"update": f"{F}:plus", "of": "t", "init": 0},
            }
        },
        "stages.y.with.amount",
    ),
}


def test_a_class_whose_instances_cannot_be_called_is_a_mistake_in_the_spec() -> None:
    stages = {"y": {"run": "decimal:Decimal", "with": {"value": 1}}}
    with pytest.raises(PlanError) as caught:
        planned({"pipedist": 1, "dataset": {"range": 3, "batch": 1}, "stages": stages})
    (problem,) = caught.value.problems
    assert problem.where == "stages.y.run"
    assert "class decimal:Decimal has no __call__ method" in problem.message


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_there_yet_is_said_with_its_place(name: str) -> None:
    keys, place = NOT_YET[name]
    base = {
        "pipedist": 1,
        "dataset": {"range": 3, "batch": 1},
        "stages": {"y": {"run": f"{F}:double"}},
    }
    with pytest.raises(PlanError) as caught:
        planned({**base, **keys})
    told = {p.where: p.message for p in caught.value.problems}
    assert any(where.endswith(place) for where in told), told
    assert all("not yet" in message for message in told.values())


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
    for file, text in shown(planned(TWO_PHASES)).items():
        (GOLDEN / file).write_text(text)
