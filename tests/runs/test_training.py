"""States: what updates make of them, what reads them, and that nothing but the spec shows in them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import pipedist
from benchmarks.training import DISK_BYTES_MAX, PEAK_BYTES_MAX, measure
from pipedist.datasets.division import Division, permutation
from pipedist.errors import CallError, FoldError, RunDrained
from pipedist.reduction.tree import FoldTree, Reduction
from pipedist.runs.identity import digest
from pipedist.spec import load
from tests.runs import training_functions as functions

F = "tests.runs.training_functions"

EPOCHS, ROWS, BATCH, REPLICAS = 3, 70, 16, 4


def spec(gradients: str = "gradients", descend: str = "descend", folder: str = "") -> dict[str, Any]:
    """Gradient descent with a partial last batch, and the error on held-out rows."""
    own = {"folder": folder} if folder else {}
    return {
        "pipedist": 1,
        "name": "descent",
        "replicas": REPLICAS,
        "seed": 3,
        "datasets": {
            "train": {
                "function": {"call": f"{F}:rows", "with": {"count": ROWS, "seed": 1}},
                "batch": BATCH,
                "epochs": EPOCHS,
                "shuffle": True,
            },
            "held_out": {
                "function": {"call": f"{F}:rows", "with": {"count": 30, "seed": 2}},
                "batch": 8,
            },
        },
        "stages": {
            "gradients": {
                "run": f"{F}:{gradients}",
                "of": "train",
                "with": {"weights": "${state.weights}", **(own if gradients == "deadly" else {})},
            },
            "sums": {"reduce": "sum", "of": "gradients", "axis": None, "per": "step"},
            "weights": {
                "update": f"{F}:{descend}",
                "of": "sums",
                "init": {"function": f"{F}:first", "with": {"bias": 0.5}},
                "with": {"rate": 0.1, **(own if descend == "deadly_descend" else {})},
            },
            "errors": {
                "run": f"{F}:squared_errors",
                "of": "held_out",
                "with": {"weights": "${state.weights}"},
            },
            "error": {"reduce": "mean", "of": "errors", "axis": 0, "per": "epoch"},
            "worst": {"gather": 0, "of": "errors", "per": "epoch"},
        },
        "outputs": {"weights": "weights.npz", "error": "error.csv", "sums": "sums.npz"},
    }


def oracle() -> tuple[dict[str, Any], list[Any]]:
    """The weights and errors of `spec`, by NumPy and the fixed tree alone."""
    weights = functions.first(0.5)
    train, held_out = functions.rows(ROWS, 1), functions.rows(30, 2)
    division, evaluation = Division(ROWS, BATCH, REPLICAS), Division(30, 8, REPLICAS)
    total = Reduction.of("sum", None)
    mean = Reduction.of("mean", 0)
    errors = []
    for epoch in range(EPOCHS):
        order = permutation(3, "train", epoch, ROWS)
        for step in range(division.steps_per_epoch):
            parts: FoldTree[Any] = FoldTree(total.combine)
            for replica in range(division.parts(step)):
                _, lo, hi = division.bounds(step, replica)
                shard = {name: column[order[lo:hi]] for name, column in train.items()}
                parts.push(replica, total.partial(functions.gradients(shard, weights)))
            weights = functions.descend(weights, total.finish(parts.result()), 0.1)
        steps: FoldTree[Any] = FoldTree(mean.combine)
        for step in range(evaluation.steps_per_epoch):
            of_step: FoldTree[Any] = FoldTree(mean.combine)
            for replica in range(evaluation.parts(step)):
                _, lo, hi = evaluation.bounds(step, replica)
                shard = {name: column[lo:hi] for name, column in held_out.items()}
                of_step.push(replica, mean.partial(functions.squared_errors(shard, weights)))
            steps.push(step, of_step.result())
        errors.append(mean.finish(steps.result()))
    return weights, errors


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("one")
    result = pipedist.run(spec(), workers=1, output=folder)
    weights, errors = oracle()
    assert result["weights"]["w"].tobytes() == weights["w"].tobytes()
    assert result["weights"]["b"] == weights["b"]
    written = (folder / "error.csv").read_text().split()
    assert written[0] == "value"
    assert [np.float32(text) for text in written[1:]] == errors
    assert [len(rows) for rows in result["worst"]] == [30] * EPOCHS
    assert result.ledger == pipedist.Ledger(3 * ROWS + 3 * 30, 3 * ROWS + 3 * 30, 0, 0)
    assert errors[-1] < errors[0]
    with np.load(folder / "weights.npz") as arrays:
        assert arrays["w"].tobytes() == weights["w"].tobytes()
    return digests(folder)


@pytest.mark.parametrize("workers", [2, 4])
def test_the_number_of_workers_and_the_timing_never_show(
    workers: int, reference: dict[str, str], tmp_path: Path
) -> None:
    pipedist.run(spec("jittered"), workers=workers, output=tmp_path)
    assert len(reference) == 3
    assert digests(tmp_path) == reference


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("which", [("deadly", "descend"), ("gradients", "deadly_descend")])
def test_killed_workers_never_show(
    which: tuple[str, str], workers: int, reference: dict[str, str], tmp_path: Path
) -> None:
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    result = pipedist.run(spec(*which, folder=str(deaths)), workers=workers, output=tmp_path / "out")
    assert len(list(deaths.iterdir())) >= 3
    assert digests(tmp_path / "out") == reference
    assert result.ledger.lost == 0


# -- when a state changes ------------------------------------------------------------------------


def counting(per: str, *, epochs: int = 2, **stages: Any) -> dict[str, Any]:
    """Six elements, three steps an epoch: 0+1, 2+3, 4+5."""
    return {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 6, "batch": 2, "epochs": epochs},
        "stages": {
            "total": {"reduce": "sum", "of": "dataset", "axis": 0, "per": per},
            "state": {"update": f"{F}:add", "of": "total", "init": 100},
            **stages,
        },
    }


@pytest.mark.parametrize(
    ("per", "read", "final"),
    [
        ("step", [100, 101, 106, 115, 116, 121], 130),
        ("epoch", [100, 100, 100, 115, 115, 115], 130),
        ("run", [100] * 6, 130),
    ],
)
def test_a_step_reads_the_state_before_it(per: str, read: list[int], final: int) -> None:
    stages = {
        "y": {"run": f"{F}:shifted", "with": {"s": "${state.state}"}},
        "seen": {"reduce": "max", "of": "y", "axis": 0, "per": "step"},
    }
    result = pipedist.run(counting(per, **stages), workers=2)
    assert [float(value[0]) for value in result["seen"]] == read
    assert result["state"] == final


@pytest.mark.parametrize("per", ["step", "epoch", "run"])
def test_a_state_that_no_stage_reads(per: str) -> None:
    result = pipedist.run(counting(per), workers=2)
    assert dict(result) == {"state": 130} | ({"total": 30} if per == "run" else {})
    if per != "run":
        with pytest.raises(KeyError, match="an update"):
            result["total"]


@pytest.mark.parametrize("verb", [{"reduce": "sum", "axis": 0}, {"reduce": f"{F}:add"}, {"gather": 0}])
@pytest.mark.parametrize("per", ["step", "epoch"])
def test_values_that_feed_an_update_are_kept_with_an_output(
    verb: dict[str, Any], per: str, tmp_path: Path
) -> None:
    """Without one, neither the results nor the journal have them; with one that is added later, they are made again."""
    document = counting(per, y={"run": f"{F}:plus", "with": {"amount": 0}})
    document["stages"]["total"] = {**verb, "of": "y", "per": per}
    document["stages"]["state"] |= {"update": f"{F}:append", "init": []}
    document["outputs"] = {"state": "state.json"}
    pipedist.run(document, workers=2, output=tmp_path)
    assert json.loads((tmp_path / ".pipedist/results.json").read_bytes())["results"].keys() == {"state"}
    logged = (tmp_path / ".pipedist/journal/0-dataset.total.log").exists()
    assert logged == ("gather" in verb and per == "epoch")  # a snapshot needs the rows of its epoch
    document["outputs"]["total"] = "total.jsonl"
    result = pipedist.run(document, workers=2, output=tmp_path, resume="reuse")
    assert len((tmp_path / "total.jsonl").read_text().splitlines()) == {"step": 6, "epoch": 2}[per]
    sums = [[1.0], [5.0], [9.0]] if per == "step" else [[15.0]]
    assert result["state"] == [*sums, *sums]


def test_an_update_that_reads_a_state_comes_after_its_update() -> None:
    """`later` is written first, and sees each step's `state`; the epoch's update sees its last step."""
    document = counting("step")
    document["stages"] = {
        "later": {"update": f"{F}:append", "of": "total", "init": [], "with": {"s": "${state.state}"}},
        **document["stages"],
        "whole": {"reduce": "sum", "of": "dataset", "axis": 0, "per": "epoch"},
        "of_epochs": {
            "update": f"{F}:append",
            "of": "whole",
            "init": [],
            "with": {"s": "${state.state}", "steps": "${state.later}"},
        },
        "once": {"reduce": "sum", "of": "dataset", "axis": 0},
        "of_run": {"update": f"{F}:append", "of": "once", "init": [], "with": {"s": "${state.of_epochs}"}},
    }
    result = pipedist.run(document, workers=2)
    assert result["later"] == [[1, 101], [5, 106], [9, 115], [1, 116], [5, 121], [9, 130]]
    assert result["of_epochs"] == [[15, 115, 3], [15, 130, 6]]
    assert result["of_run"] == [[30, 2]]


def test_after_until_no_step_is_visible() -> None:
    document = counting("step", epochs=50)
    document["stages"]["state"] |= {"init": 0, "until": f"{F}:at_least_20"}
    document["stages"] |= {
        "y": {"run": f"{F}:shifted", "with": {"s": "${state.state}"}},
        "ys": {"gather": 0, "of": "y"},
        "steps": {"reduce": "sum", "of": "dataset", "axis": 0, "per": "step"},
        "epochs": {"reduce": "sum", "of": "dataset", "axis": 0, "per": "epoch"},
        "all": {"reduce": "sum", "of": "dataset", "axis": 0},
        "last": {"update": f"{F}:append", "of": "epochs", "init": []},
    }
    result = pipedist.run(document, workers=2)
    assert result["steps"] == [1, 5, 9, 1, 5], "the fifth step makes it 21"
    assert result["state"] == 21
    assert result["all"] == 21
    assert result["ys"].shape == (10, 1)
    assert result["last"] == [[15], [6]], "the second epoch ends early"
    assert result.ledger == pipedist.Ledger(10, 10, 0, 0)


def test_an_end_by_epoch_and_the_last_evaluation() -> None:
    document = counting("epoch", epochs=50)
    document["datasets"] = {
        "dataset": document.pop("dataset"),
        "held_out": {"range": 4, "batch": 3, "shuffle": True},
    }
    document["stages"]["total"]["of"] = "dataset"
    document["stages"]["state"] |= {"init": 0, "until": f"{F}:at_least_20"}
    document["stages"] |= {
        "y": {"run": f"{F}:shifted", "of": "dataset", "with": {"s": "${state.state}"}},
        "ys": {"gather": 0, "of": "y"},
        "e": {"run": f"{F}:shifted", "of": "held_out", "with": {"s": "${state.state}"}},
        "es": {"gather": 0, "of": "e", "per": "epoch"},
        "ids": {"run": f"{F}:seen", "of": "held_out"},
        "where": {"reduce": "max", "of": "ids", "axis": None, "per": "epoch"},
    }
    result = pipedist.run(document, workers=2)
    assert result["state"] == 30
    assert [values.ravel().tolist() for values in result["es"]] == [[15.0] * 4, [30.0] * 4]
    assert [seen[:2] for seen in result["where"]] == [[1, 0], [3, 1]], "its steps and epochs count on"
    assert result.ledger == pipedist.Ledger(20, 20, 0, 0)


def test_the_data_of_an_iterator_can_feed_and_be_held_out() -> None:
    document = counting("step", epochs=3)
    document["datasets"] = {
        "dataset": {"function": {"call": three}, "batch": 2, "epochs": 3},
        "held_out": {"function": {"call": three}, "batch": 2},
    }
    del document["dataset"]
    document["stages"]["total"]["of"] = "dataset"
    document["stages"] |= {
        "y": {"run": f"{F}:plus", "of": "dataset", "with": {"amount": "${state.state}"}},
        "e": {"run": f"{F}:plus", "of": "held_out", "with": {"amount": "${state.state}"}},
        "es": {"reduce": "max", "of": "e", "axis": 0, "per": "epoch"},
    }
    result = pipedist.run(document, workers=2)
    assert result["es"] == [105, 108, 111]


def three() -> Any:
    return iter([np.int64(0), np.int64(1), np.int64(2)])


def test_a_dataset_without_elements_changes_nothing() -> None:
    document = counting("epoch", e={"run": f"{F}:plus", "of": "h", "with": {"amount": "${state.state}"}})
    document["datasets"] = {"d": {"range": 0, "batch": 2, "epochs": 2}, "h": {"range": 2, "batch": 2}}
    del document["dataset"]
    document["stages"]["total"]["of"] = "d"
    document["stages"]["es"] = {"reduce": "max", "of": "e", "axis": 0, "per": "epoch"}
    result = pipedist.run(document, workers=1)
    assert result["state"] == 100
    assert result["es"] == [101, 101]


def test_held_out_data_without_a_step_has_no_value_in_each_epoch() -> None:
    document = counting("step", epochs=3)
    document["datasets"] = {
        "d": document.pop("dataset"),
        "h": {"range": 2, "batch": 3, "drop_remainder": True},
    }
    document["stages"]["total"]["of"] = "d"
    document["stages"] |= {
        "e": {"run": f"{F}:plus", "of": "h", "with": {"amount": "${state.state}"}},
        "es": {"reduce": "max", "of": "e", "axis": 0, "per": "epoch"},
    }
    result = pipedist.run(document, workers=1)
    assert result["es"] == [None, None, None]
    assert result["state"] == 145
    assert result.ledger == pipedist.Ledger(18, 18, 0, 0)


def test_memory_and_disk_do_not_grow_with_the_steps() -> None:
    """20 gradients of 4 MB would be 80 MB in memory and in the journal, and 200 MB of text in the results."""
    measured = measure(1_000_000, 20)
    assert measured.peak_bytes < PEAK_BYTES_MAX
    assert measured.disk_bytes < DISK_BYTES_MAX


# -- phases --------------------------------------------------------------------------------------


def test_two_pass_statistics_come_before_and_the_final_state_after() -> None:
    document = counting("step", epochs=2)
    document["stages"] |= {
        "mean": {"reduce": "mean", "of": "dataset", "axis": 0},
        "centred": {"run": f"{F}:plus", "with": {"amount": "${stages.mean}"}},
        "total": {"reduce": "sum", "of": "read", "axis": 0, "per": "step"},
        "read": {"run": f"{F}:plus", "of": "centred", "with": {"amount": "${state.state}"}},
        "largest": {"reduce": "max", "of": "read", "axis": 0},
        "late": {
            "run": f"{F}:shifted",
            "of": "dataset",
            "with": {"s": "${state.state}", "m": "${stages.largest}"},
        },
        "lates": {"reduce": "max", "of": "late", "axis": 0},
    }
    with pipedist_plan(document) as plan:
        assert [[(p.runs, p.updates) for p in phase] for phase in plan.phases] == [
            [((), ())],
            [(("centred", "read"), ("state",))],
            [(("late",), ())],
        ]
    result = pipedist.run(document, workers=2)
    state, largest = 100.0, 0.0
    for step in [(0, 1), (2, 3), (4, 5)] * 2:
        values = [x + 2.5 + state for x in step]
        largest = max(largest, *values)
        state += sum(values)
    assert result["state"] == state
    assert result["lates"].tolist() == [state, largest]


def pipedist_plan(document: dict[str, Any]) -> Any:
    from contextlib import closing

    from pipedist.plan import compile_plan

    return closing(compile_plan(load(document), workers=2))


def test_a_late_reading_of_the_dataset_ends_where_it_has_ended() -> None:
    document = counting("step", epochs=50)
    document["stages"]["state"] |= {"init": 0, "until": f"{F}:at_least_20"}
    document["stages"] |= {
        "late": {"run": f"{F}:plus", "with": {"amount": 1}, "after": "state"},
        "lates": {"gather": 0, "of": "late"},
    }
    result = pipedist.run(document, workers=2)
    assert result["lates"].tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
    assert result.ledger == pipedist.Ledger(10, 10, 0, 0)


# -- what goes wrong -----------------------------------------------------------------------------


def test_an_update_that_raises_is_the_error_of_its_stage() -> None:
    document = counting("step")
    document["stages"]["state"]["update"] = f"{F}:raises"
    with pytest.raises(CallError, match=r"stage state, step 0.*update of 1") as caught:
        pipedist.run(document, workers=2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"update": f"{F}:nothing"}, "stage state: the update returned None: is a `return` missing"),
        ({"until": f"{F}:no_truth"}, r"stage state: `until` returned an array of float64, shape \[2\], not"),
        ({"until": f"{F}:change"}, r"`until` returned 1.5 of type float, not True or False: compare it"),
        ({"until": f"{F}:nothing"}, r"`until` returned None of type NoneType, .*: is a `return` missing"),
    ],
)
def test_a_missing_return_and_a_number_for_a_bool_are_reported(keys: dict[str, Any], text: str) -> None:
    document = counting("step")
    document["stages"]["state"] |= keys
    with pytest.raises(FoldError, match=text):
        pipedist.run(document, workers=1)


def test_a_state_that_does_not_fit_its_file_is_reported_with_the_first_update(tmp_path: Path) -> None:
    document = counting("step")
    document["stages"]["state"] |= {"update": f"{F}:append", "init": []}
    document["outputs"] = {"state": "state.npy"}
    with pytest.raises(pipedist.OutputError, match=r"outputs\.state"):
        pipedist.run(document, workers=1, output=tmp_path)


# -- forms of states and readers -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["w.npy", "w.npz", "w.json"])
def test_a_state_begins_as_a_file(name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.float64(7))
    np.savez(tmp_path / "w.npz", s=np.float64(7))
    (tmp_path / "w.json").write_text('{"s": 7.0}')
    document = counting("run")
    document["stages"]["state"] |= {"init": {"file": str(tmp_path / name)}, "update": kept}
    state = pipedist.run(document, workers=1)["state"]
    assert (state if name == "w.npy" else state["s"]) == 7


def kept(state: Any, value: Any) -> Any:
    return state


def test_a_class_is_constructed_anew_for_each_version() -> None:
    stages = {
        "y": {"run": f"{F}:Scaled", "with": {"factor": "${state.state}"}},
        "ys": {"reduce": "sum", "of": "y", "axis": 0, "per": "step"},
    }
    result = pipedist.run(counting("step", epochs=1, **stages), workers=2)
    assert result["ys"] == [100 * 1, 101 * 5, 106 * 9]


def test_functions_of_a_dict_spec_may_be_callables() -> None:
    document = counting("step", epochs=1)
    document["stages"]["state"] |= {
        "update": lambda state, value: state - value,
        "init": {"function": lambda n: np.arange(n), "with": {"n": 2}},
        "until": lambda old, new: False,
    }
    assert pipedist.run(document, workers=2)["state"].tolist() == [-15, -14]


def test_two_begins_are_two_identities() -> None:
    one, two = counting("step"), counting("step")
    two["stages"]["state"]["init"] = np.arange(3000)
    three = counting("step")
    three["stages"]["state"]["init"] = np.arange(3000) + (np.arange(3000) == 1500)
    assert len({digest(load(document)) for document in (one, two, three)}) == 3


def test_the_type_of_a_number_is_part_of_the_identity() -> None:
    document = counting("step", y={"run": f"{F}:plus", "with": {"k": "${params.k}"}})
    document["params"] = {"k": 1}
    values = (1, 1.0, True, "1", np.int8(1), np.int64(1), np.float32(1), np.float64(1), np.True_)
    assert len({digest(load(document, params={"k": k})) for k in values}) == len(values)


@pytest.mark.asyncio
async def test_steps_of_a_training_can_be_streamed() -> None:
    stages = {"y": {"run": f"{F}:plus", "with": {"amount": "${state.state}"}}}
    async with pipedist.open(counting("step", epochs=1, **stages), workers=2) as run:
        seen = [(step.index, step["y"].components, step["total"]) async for step in run.steps("y", "total")]
        result = await run.results()
    assert [total for *_, total in seen] == [1, 5, 9]
    assert [int(y[0][0]) for _, y, _ in seen] == [100, 103, 110]
    assert result["state"] == 115


# -- stopping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["y", "e", "state"])
@pytest.mark.asyncio
async def test_a_training_can_be_drained_anywhere(where: str, tmp_path: Path) -> None:
    """While a step, a held-out step or an update is executed: that is finished, and nothing begins."""
    document = counting("step", epochs=1000)
    document["datasets"] = {"d": {"range": 2, "batch": 2, "epochs": 1000}, "h": {"range": 2, "batch": 2}}
    del document["dataset"]
    document["stages"]["total"]["of"] = "d"
    document["stages"] |= {
        "y": {"run": f"{F}:plus", "of": "d", "with": {"amount": "${state.state}"}},
        "ys": {"reduce": "max", "of": "y", "axis": 0, "per": "epoch"},
        "e": {"run": f"{F}:plus", "of": "h", "with": {"amount": "${state.state}"}},
        "es": {"reduce": "max", "of": "e", "axis": 0, "per": "epoch"},
    }
    marked = tmp_path / "marked"
    if where == "state":
        document["stages"]["state"] |= {"update": f"{F}:slow_add", "with": {"mark": str(marked)}}
    else:
        document["stages"][where] |= {"run": f"{F}:slow_plus"}
        document["stages"][where]["with"]["mark"] = str(marked)
    async with pipedist.open(document, workers=2) as run, anyio.create_task_group() as tasks:

        async def drain() -> None:
            while not marked.exists():  # noqa: ASYNC110 - a worker makes it
                await anyio.sleep(0.005)
            run.drain()

        tasks.start_soon(drain)
        with pytest.raises(RunDrained):
            await run.results()
        ledger = run.ledger()
    assert 0 <= ledger.lost <= 4
    assert ledger.elements < 100


# -- gangs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gang_has_all_replicas_also_those_without_elements(workers: int) -> None:
    document = {
        "pipedist": 1,
        "replicas": 4,
        "dataset": {"arrays": np.arange(10.0), "batch": 8},
        "stages": {
            "y": {"run": f"{F}:normalized", "collectives": True},
            "ys": {"gather": 0, "of": "y"},
            "count": {"reduce": "mean", "of": "dataset", "axis": None, "per": "step"},
            "plain": {"run": f"{F}:plus", "with": {"amount": 1}},
            "plains": {"gather": 0, "of": "plain"},
            "later": {"run": f"{F}:plus", "of": "y", "with": {"amount": 1}, "after": "ys"},
            "laters": {"gather": 0, "of": "later"},
        },
    }
    result = pipedist.run(document, workers=workers)
    assert result["ys"].tolist() == [*(np.arange(8.0) - 3.5), -0.5, 0.5]
    assert result["plains"].tolist() == list(np.arange(10.0) + 1)
    assert result["laters"].tolist() == [x + 1 for x in result["ys"]], "kept values, of the gang"
    assert result.ledger == pipedist.Ledger(10, 10, 0, 0)


@pytest.mark.asyncio
async def test_a_stage_configures_its_collectives() -> None:
    async with pipedist.LocalCluster(workers=2, shared_memory=False) as cluster:

        async def values(collectives: object) -> object:
            document = {
                "pipedist": 1,
                "replicas": 2,
                "dataset": {"arrays": np.arange(10.0) / 3, "batch": 8},
                "stages": {
                    "y": {"run": f"{F}:normalized", "collectives": collectives},
                    "ys": {"gather": 0, "of": "y"},
                },
            }
            async with pipedist.open(document, cluster=cluster) as run:
                return (await run.results())["ys"].tolist()

        assert await values({"implementation": "transport", "bytes_per_pack": 8}) == await values(True)
        with pytest.raises(
            CallError, match="implementation 'shared' needs all workers of the gang on one host"
        ):
            await values({"implementation": "shared"})


def test_a_training_in_gangs_with_workers_killed(tmp_path: Path) -> None:
    def document(folder: str) -> dict[str, Any]:
        with_ = {"shift": "${state.state}", "folder": folder}
        return {
            "pipedist": 1,
            "replicas": 4,
            "dataset": {"arrays": np.sqrt(np.arange(50.0)), "batch": 8, "epochs": 2},
            "stages": {
                "y": {"run": f"{F}:deadly_normalized", "collectives": True, "with": with_},
                "ys": {"gather": 0, "of": "y"},
                "most": {"reduce": "max", "of": "y", "axis": 0, "per": "step"},
                "state": {"update": f"{F}:add", "of": "most", "init": 0.1},
            },
        }

    expected = pipedist.run(document(""), workers=1)
    for workers in (1, 2, 4):
        folder = tmp_path / str(workers)
        folder.mkdir()
        found = pipedist.run(document(str(folder)), workers=workers)
        assert len(list(folder.iterdir())) >= 3
        assert found["ys"].tobytes() == expected["ys"].tobytes()
        assert found["state"] == expected["state"]
        assert found.ledger == expected.ledger == pipedist.Ledger(100, 100, 0, 0)
