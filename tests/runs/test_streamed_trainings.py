"""Runs of one dataset, and those before a gang or a training, with other resources: calls of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

import pipedist
from pipedist.core import gpus as accelerators
from pipedist.core.gpus import VisibleGpus
from pipedist.errors import CallError, RunDrained
from pipedist.runs.call_keys import CallKey
from pipedist.runs.replay import open_replay
from pipedist.testing import Faults, simulate
from tests.runs import stream_functions as functions
from tests.runs.test_streamed_passes import arrays

ROOT = Path(__file__).parents[2]
F, G = "tests.runs.stream_functions", "tests.runs.training_functions"
COUNT, EPOCHS = 70, 3


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "found", lambda: VisibleGpus(("0",), "a test has 1"))


GPU = {"resources": {"gpus": 1}}

# -- runs of one dataset ---------------------------------------------------------------------


def siblings(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "siblings",
        "replicas": 2,
        "cluster": {"speculation": "off"},
        "dataset": {**source, "batch": 4},
        "stages": {
            "decoded": {"run": functions.decode_half_before_first_inference, **more.get("decode", {})},
            "inferred": {"run": functions.infer_first, **GPU, **more.get("infer", {})},
            "a": {"gather": 0, "of": "decoded"},
            "b": {"gather": 0, "of": "inferred"},
        },
    }


@pytest.mark.parametrize("is_read_once", [False, True])
def test_runs_of_one_dataset_are_executed_at_the_same_time(tmp_path: Path, is_read_once: bool) -> None:
    """Also of a source that can be read once only, and whose slower reader holds back the other."""
    once = iter(range(2_000))
    source = {"function": {"call": lambda: once}} if is_read_once else {"range": 2_000}
    with_ = {"folder": str(tmp_path)}
    document = siblings(source, decode={"with": {**with_, "half": 4}}, infer={"with": with_})
    result = pipedist.run(document, workers=2)
    assert result["a"].tolist() == result["b"].tolist() == list(range(2_000))
    assert (result.ledger.committed, result.ledger.lost) == (2_000, 0)


def test_runs_of_a_dataset_that_is_read_once_resume_at_their_own_steps(tmp_path: Path) -> None:
    """One has failed early, the other one has gone on."""
    (tmp_path / "bad.json").write_text("[37]")
    path = tmp_path / "spec.json"
    document: dict[str, Any] = siblings(
        {"function": {"call": f"{F}:counted", "with": {"folder": str(tmp_path)}}}
    )
    document["stages"]["decoded"]["run"] = f"{F}:unchanged"
    document["stages"]["inferred"] |= {"run": f"{F}:unchanged_checked", "with": {"folder": str(tmp_path)}}
    path.write_text(json.dumps({**document, "code": str(ROOT), "outputs": {"a": "a.npz", "b": "b.npz"}}))
    with pytest.raises(CallError):
        pipedist.run(path, workers=2, output=tmp_path / "out")
    (tmp_path / "bad.json").write_text("[]")
    (tmp_path / "read").unlink()
    result = pipedist.run(path, workers=2, output=tmp_path / "out", resume=True)
    assert (result.ledger.committed, result.ledger.lost) == (functions.COUNTED, 0)
    for name in "ab":
        (rows,) = arrays(tmp_path / "out" / f"{name}.npz").values()
        assert rows.tolist() == list(range(functions.COUNTED))
    assert len((tmp_path / "read").read_text().splitlines()) == functions.COUNTED, "read once for both"


# -- a gang and a training -------------------------------------------------------------------


def training(
    *, streamed: bool = True, gang: bool = False, batch: int | None = None, **more: Any
) -> dict[str, Any]:
    """Return a training behind a decode, in which the decode is streamed or in the same call."""
    gradients = {"run": f"{F}:gradients_of_decoded", "of": "decoded", "with": {"weights": "${state.weights}"}}
    if gang:
        gradients |= {"run": f"{F}:all_gradients", "collectives": True}
    if streamed:
        gradients["resources"] = {"gpus": 0.5 if gang else 1}
    return {
        "pipedist": 1,
        "name": "trained",
        "replicas": 2,
        "seed": 3,
        "code": str(ROOT),
        "cluster": {"speculation": "off"},
        "datasets": {
            "train": {
                "function": {"call": f"{G}:rows", "with": {"count": COUNT, "seed": 1}},
                "batch": 8,
                "epochs": EPOCHS,
                "shuffle": True,
                "drop_remainder": gang and batch is None,
            },
            "held_out": {"function": {"call": f"{G}:rows", "with": {"count": 30, "seed": 2}}, "batch": 8},
        },
        "stages": {
            "decoded": {"run": f"{F}:decode_rows", "of": "train", **more.get("decode", {})},
            "gradients": {**gradients, "batch": batch, **more.get("train", {})},
            "sums": {"reduce": "sum", "of": "gradients", "axis": None, "per": "step"},
            "weights": {
                "update": f"{G}:descend",
                "of": "sums",
                "init": {"function": f"{G}:first", "with": {"bias": 0.5}},
                "with": {"rate": 0.1},
            },
            "errors": {
                "run": f"{G}:squared_errors",
                "of": "held_out",
                "with": {"weights": "${state.weights}"},
            },
            "error": {"reduce": "mean", "of": "errors", "axis": 0, "per": "epoch"},
        },
        "outputs": {"weights": "weights.npz", "error": "error.npz", "sums": "sums.npz"},
    }


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.npz").read_bytes() for name in ("weights", "error", "sums")}


def made(folder: Path, document: dict[str, Any], workers: int = 2) -> dict[str, bytes]:
    result = pipedist.run(document, workers=workers, output=folder)
    assert (result.ledger.lost, result.ledger.committed) == (0, result.ledger.elements)
    return files(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    """Return the files of trainings in one call, with and without collectives."""
    folder = tmp_path_factory.mktemp("together")
    return {gang: made(folder / str(gang), training(streamed=False, gang=gang)) for gang in (False, True)}


@pytest.mark.parametrize(("gang", "workers"), [(False, 1), (False, 2), (True, 2), (True, 3)])
def test_a_streamed_training_has_the_bits_of_one_call(
    tmp_path: Path, finished: dict[bool, Any], gang: bool, workers: int
) -> None:
    assert made(tmp_path, training(gang=gang), workers) == finished[gang]


def test_a_batch_of_a_training_is_that_of_its_steps(tmp_path: Path) -> None:
    """The last step of an epoch has an empty shard, which joins the collectives too."""
    gang = made(tmp_path / "gang", training(gang=True, batch=23))
    assert made(tmp_path / "gang-3", training(gang=True, batch=23), 3) == gang
    steps = arrays(tmp_path / "gang" / "sums.npz")["n"]
    assert steps.tolist() == [23, 23, 23, 1] * EPOCHS


@pytest.mark.parametrize("stage", ["decode", "train"])
@pytest.mark.parametrize("gang", [False, True])
def test_a_worker_that_dies_beside_a_training_changes_nothing(
    tmp_path: Path, finished: dict[bool, Any], gang: bool, stage: str
) -> None:
    more = {stage: {"with": {"weights": "${state.weights}"} if stage == "train" else {}}}
    more[stage]["with"] |= {"folder": str(tmp_path), "dies": 31}
    assert made(tmp_path / "out", training(gang=gang, **more)) == finished[gang]
    assert (tmp_path / f"{stage}-died").exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("step", [0, 5])
async def test_a_drained_training_is_resumed(tmp_path: Path, finished: dict[bool, Any], step: int) -> None:
    async def drained() -> None:
        async with pipedist.open(training(), workers=2, output=tmp_path) as run:
            async for each in run.steps("sums"):
                if each.index == step:
                    run.drain()

    with anyio.fail_after(60), pytest.raises(RunDrained):
        await drained()
    async with pipedist.open(training(), workers=3, output=tmp_path, resume=True) as run:
        result = await run.results()
    assert files(tmp_path) == finished[False]
    assert result.ledger.lost == 0


@pytest.mark.parametrize("gang", [False, True])
def test_a_failed_training_is_resumed_and_replayed(
    tmp_path: Path, finished: dict[bool, Any], gang: bool
) -> None:
    (tmp_path / "bad.json").write_text("[33]")
    train = {"with": {"weights": "${state.weights}", "folder": str(tmp_path)}}
    document = training(gang=gang, train=train, decode={"with": {"folder": str(tmp_path)}})
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(document))
    with pytest.raises(CallError):
        pipedist.run(path, workers=2, output=tmp_path / "out")
    (tmp_path / "bad.json").write_text("[]")
    pipedist.run(path, workers=2, output=tmp_path / "out", resume=True)
    assert files(tmp_path / "out") == finished[gang]
    with open_replay(tmp_path / "out", CallKey("gradients", 11, 1)) as replay:
        assert replay.execute().failure is None
    assert replay.states == {"weights": 11}


def test_simulated_faults_change_no_streamed_training() -> None:
    document = training()
    del document["outputs"], document["datasets"]["held_out"]
    document["stages"] = {
        name: document["stages"][name] for name in ("decoded", "gradients", "sums", "weights")
    }
    assert simulate(document, seeds=range(3), workers=3, faults=Faults(crash=0.05, drop=0.05)).total() > 0
