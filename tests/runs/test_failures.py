"""What happens when user code fails: one clear error, the lowest call's, and a clean end."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import pipedist
from pipedist.runs import execution

F = "tests.runs.functions"


def document(run: str, *, n: int = 40, batch: int = 4, **keys: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": n, "batch": batch},
        "stages": {"y": {"run": f"{F}:{run}", **keys}, "out": {"gather": 0, "of": "y"}},
    }


def test_an_exception_reaches_the_caller_with_its_place() -> None:
    with pytest.raises(pipedist.CallError) as caught:
        pipedist.run(document("fails_on_13"), workers=2)
    error = caught.value
    assert (error.stage, error.step, error.replica, error.attempts) == ("y", 3, 0, 1)
    assert error.worker in ("w0", "w1")
    assert isinstance(error.__cause__, KeyError)
    assert str(error.__cause__) == "'thirteen'"
    assert "functions.py" in error.remote_traceback
    assert "raise KeyError" in error.remote_traceback


def test_the_error_of_an_in_place_change_suggests_a_copy() -> None:
    with pytest.raises(pipedist.CallError) as caught:
        pipedist.run(document("doubles_in_place"), workers=1)
    assert str(caught.value.__cause__) == "output array is read-only"
    assert "read-only: change a copy" in str(caught.value)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_failure_of_the_lowest_step_is_raised_in_any_order_of_arrival(workers: int) -> None:
    with pytest.raises(pipedist.CallError) as caught:
        pipedist.run(document("fails_slowly_on_low_steps"), workers=workers)
    assert (caught.value.step, caught.value.replica) == (0, 0)
    assert str(caught.value.__cause__) == "step 0 replica 0"


@pytest.mark.parametrize(
    ("slow", "quick", "batch", "fails"), [("a", "b", 20, "x"), ("b", "a", 20, "y"), ("b", "a", 4, "x")]
)
def test_of_two_datasets_the_lowest_step_fails_then_the_first_in_the_plan(
    slow: str, quick: str, batch: int, fails: str
) -> None:
    spec = {
        "pipedist": 1,
        "replicas": 2,
        "datasets": {slow: {"range": 40, "batch": 4}, quick: {"range": 20, "batch": batch}},
        "stages": {
            "x": {"run": f"{F}:fails_slowly_on_low_steps", "of": slow},
            "y": {"run": f"{F}:fails_on_13", "of": quick},
            "xs": {"gather": 0, "of": "x"},
            "ys": {"gather": 0, "of": "y"},
        },
    }
    with pytest.raises(pipedist.CallError) as caught:
        pipedist.run(spec, workers=2)
    assert (caught.value.stage, caught.value.step) == (fails, 0)


def test_an_error_waits_a_limited_time_for_a_dataset_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "ORDER_S_MAX", 0.1)
    hangs = {"run": f"{F}:waits_in_step", "of": "a", "with": {"folder": str(tmp_path), "step": 0}}
    spec = {
        "pipedist": 1,
        "replicas": 1,
        "datasets": {"a": {"range": 4, "batch": 4}, "b": {"range": 20, "batch": 20}},
        "stages": {
            "x": hangs,
            "y": {"run": f"{F}:fails_on_13", "of": "b"},
            "xs": {"gather": 0, "of": "x"},
            "ys": {"gather": 0, "of": "y"},
        },
        "cluster": {"grace_s": 0.1},
    }
    with pytest.raises(pipedist.CallError, match="stage y, step 0"):
        pipedist.run(spec, workers=2)


def counted(retries: int, folder: Path) -> dict[str, Any]:
    """Each call counts its attempts in a file: a slow one gets no second attempt beside the first."""
    spec = document("fails_twice", retries=retries, **{"with": {"folder": str(folder)}})
    return {**spec, "cluster": {"speculation": "off"}}


def test_retries(tmp_path: Path) -> None:
    result = pipedist.run(counted(2, tmp_path), workers=2)
    assert result["out"].tolist() == list(range(40))
    assert {p.stat().st_size for p in tmp_path.iterdir()} == {3}


def test_retries_are_counted(tmp_path: Path) -> None:
    with pytest.raises(pipedist.CallError, match="tried 2 times"):
        pipedist.run(counted(1, tmp_path), workers=2)


def imports_what_is_missing(_: object) -> None:
    import not_there_at_all.client  # noqa: F401


def test_a_missing_package_is_named_with_the_command_of_its_python() -> None:
    spec = {
        "pipedist": 1,
        "dataset": {"range": 2, "batch": 2},
        "stages": {"out": {"run": imports_what_is_missing}, "all": {"gather": 0, "of": "out"}},
    }
    with pytest.raises(pipedist.CallError) as caught:
        pipedist.run(spec, workers=1)
    assert f"with {shlex.quote(sys.executable)} -m pip install not_there_at_all" in str(caught.value)


def test_a_call_that_kills_every_worker_is_given_up() -> None:
    with pytest.raises(pipedist.CallError) as caught:
        pipedist.run(document("always_dies", n=4), workers=2)
    assert isinstance(caught.value.__cause__, pipedist.WorkerDied)
    assert "exit code 7" in str(caught.value)


def test_a_result_that_cannot_be_sent_names_its_place() -> None:
    with pytest.raises(pipedist.CallError, match="a/1") as caught:
        pipedist.run(document("unsendable", retries=3), workers=1)
    assert caught.value.attempts == 1


@pytest.mark.parametrize(
    "verb", [{"gather": 0}, pytest.param({"reduce": "sum", "axis": None}, marks=pytest.mark.slow)]
)
def test_a_result_of_too_many_objects_is_refused(verb: dict[str, Any]) -> None:
    spec = document("many_numbers", n=4)
    spec["stages"]["out"] = {"of": "y", **verb}
    with pytest.raises(
        pipedist.CallError, match=rf"{F}:many_numbers cannot be sent: .*1,000,000; return an array"
    ) as caught:
        pipedist.run(spec, workers=1)
    assert (caught.value.step, caught.value.replica, caught.value.attempts) == (0, 0, 1)


@pytest.mark.slow
def test_a_combine_function_takes_dicts_with_more_keys() -> None:
    spec = document("many_keys", n=4)
    spec["stages"]["out"] = {"of": "y", "reduce": f"{F}:count_keys"}
    assert pipedist.run(spec, workers=1)["out"] == {"keys": 2_000_000}


def test_components_that_do_not_fit_are_a_fold_error() -> None:
    spec = document("double")
    spec["stages"]["out"] = {"gather": 1, "of": "y"}
    with pytest.raises(pipedist.FoldError, match="stage out"):
        pipedist.run(spec, workers=1)


@pytest.mark.parametrize(
    ("function", "stage", "text", "call"),
    [
        ("wider_rows", "gather: 0", r"step 1, replica 0: .* shape \(4, 2\), this one \(4, 3\)", "y/1/0"),
        (
            "wider_rows",
            "reduce: sum, axis: null",
            r"step 1, replica 0 does not fit step 0, replica 0: ",
            "y/1/0",
        ),
        ("number", "gather: 0", "step 0, replica 0: .* has a scalar", "y/0/0"),
        ("double", "reduce: sum, axis: 1", r"axis 1 is out of range: the shape is \(4,\)", "t/0/0"),
    ],
)
def test_values_that_do_not_fit_name_their_function_and_call(
    function: str, stage: str, text: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = tmp_path / "s.yaml"
    spec.write_text(
        f"pipedist: 1\nreplicas: 2\ndataset: {{range: 16, batch: 8}}\n"
        f"stages:\n  y: {{run: '{F}:{function}'}}\n  t: {{{stage}, of: y}}\n"
    )
    with pytest.raises(pipedist.FoldError if call[0] == "y" else pipedist.CallError, match=text) as caught:
        pipedist.run("s.yaml", workers=1, output="out")
    verb = stage.partition(": ")[0]
    *_, origin, command = str(caught.value).splitlines()
    place = f"s.yaml:6:{9 + len(verb)}"
    assert (
        origin
        == f"The function {F}:{function} of stage y returned the values that stage t, at {place}, {verb}s."
    )
    assert command == f"To execute only this call again: pipedist replay out --call {call}"


def test_a_reduction_of_texts_names_the_stage() -> None:
    spec = document("empty_dict")
    spec["stages"]["out"] = {"reduce": "sum", "of": "y", "axis": 0}
    with pytest.raises(pipedist.CallError, match="stage out"):
        pipedist.run(spec, workers=1)


def test_every_missing_thing_is_listed_at_once() -> None:
    spec = {
        "pipedist": 1,
        "dataset": {"npy": {"path": "nothing/*.npy"}, "batch": 4},
        "stages": {
            "a": {"run": f"{F}:doubel"},
            "b": {"run": "no_such_module:fn"},
            "c": {"run": f"{F}:plus", "with": {"amuont": 1}},
        },
    }
    with pytest.raises(pipedist.PlanError) as caught:
        pipedist.run(spec, workers=1)
    text = str(caught.value)
    assert len(caught.value.problems) == 4, text
    assert "did you mean 'double'" in text
    assert "nothing/*.npy" in text
    assert "amuont" in text
