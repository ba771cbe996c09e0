"""Run stages with other resources: their calls run at the same time, on other workers, with the same bits."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import pipedist
from pipedist.coordinator import pass_handle
from pipedist.core import gpus as accelerators
from pipedist.core.gpus import VisibleGpus
from pipedist.datasets.division import permutation
from pipedist.errors import CallError, FoldError, RunDrained
from pipedist.runs import execution, pass_execution, pass_journal
from pipedist.runs.call_keys import CallKey
from pipedist.runs.replay import open_replay
from pipedist.testing import Faults, simulate
from tests.runs import stream_functions as functions

COUNT = 61
ROOT = Path(__file__).parents[2]
F = "tests.runs.stream_functions"


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "found", lambda: VisibleGpus(("0",), "a test has 1"))


def spec_of(*, batch: int | None = 10, gpus: int = 1, replicas: int = 2, **more: Any) -> dict[str, Any]:
    """Return a spec; `decode` and `infer` are further keys of these stages."""
    return {
        "pipedist": 1,
        "name": "streamed",
        "replicas": replicas,
        "seed": 3,
        "cluster": {"speculation": "off"},
        "dataset": {"range": COUNT, "batch": 4, "shuffle": True},
        "stages": {
            "decoded": {"run": functions.decode, **more.get("decode", {})},
            "noise": {"reduce": "sum", "of": "decoded", "axis": 0}
            if "noise" in more
            else {"gather": 0, "of": "decoded"},
            "inferred": {
                "run": functions.infer,
                "of": "decoded",
                "batch": batch,
                "resources": {"gpus": gpus} if gpus else None,
                **more.get("infer", {}),
            },
            "kept": {"run": functions.bits, "of": "inferred", "batch": more.get("back")},
            "rows": {"gather": 0, "of": "kept"},
            "where": {"gather": 0, "of": "inferred"},
        },
    }


def same(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture(scope="module")
def alone() -> Any:
    """Return the results of one worker without faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerators, "found", lambda: VisibleGpus(("0",), "a test has 1"))
        return pipedist.run(spec_of(back=7), workers=1)


# -- the same bits ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 4])
def test_results_are_those_of_one_worker_and_only_owners_infer(alone: Any, workers: int) -> None:
    result = pipedist.run(spec_of(back=7), workers=workers)
    same(result["rows"], alone["rows"])
    where = result["where"]
    assert len(set(where["inferrer"])) == 1
    assert set(where["device"]) == {"cuda:0"}
    assert result.ledger == alone.ledger
    assert (result.ledger.elements, result.ledger.lost) == (COUNT, 0)


def test_elements_belong_to_steps_and_replicas_by_their_positions(alone: Any) -> None:
    rows, order = alone["rows"], alone["noise"]["id"]
    assert rows["id"].tolist() == order.tolist()
    assert rows["step"].tolist() == [position // 10 for position in range(COUNT)]
    assert rows["replica"].tolist() == [position % 10 // 5 for position in range(COUNT - 1)] + [0]


def test_a_run_without_a_batch_has_the_bits_of_one_call(alone: Any) -> None:
    together = pipedist.run(spec_of(batch=None, gpus=0), workers=1)
    result = pipedist.run(spec_of(batch=None), workers=2)
    same(result["rows"], together["rows"])


@pytest.mark.parametrize("stage", ["decode", "infer"])
def test_a_worker_that_dies_in_either_stage_changes_nothing(alone: Any, tmp_path: Path, stage: str) -> None:
    more = {stage: {"with": {"folder": str(tmp_path), "dies": 23}}}
    result = pipedist.run(spec_of(back=7, **more), workers=2)
    assert (tmp_path / f"{stage}-died").exists()
    same(result["rows"], alone["rows"])


def test_both_stages_run_at_the_same_time(tmp_path: Path) -> None:
    with_ = {"folder": str(tmp_path)}
    document = spec_of(
        decode={"run": functions.decode_half_before_first_inference, "with": {**with_, "half": 30}},
        infer={"run": functions.infer_first, "with": with_},
    )
    document["dataset"]["shuffle"] = False
    del document["stages"]["kept"], document["stages"]["rows"]
    assert pipedist.run(document, workers=2)["where"].tolist() == list(range(COUNT))


def test_a_batch_needs_no_gpus_and_one_worker_is_enough(alone: Any) -> None:
    result = pipedist.run(spec_of(gpus=0, back=7), workers=1)
    same(result["rows"], alone["rows"])


def test_a_batch_in_a_later_phase_divides_the_kept_values() -> None:
    document = spec_of(gpus=0)
    document["stages"]["inferred"]["after"] = ["noise"]
    later = pipedist.run(document, workers=2)
    same(later["rows"], pipedist.run(spec_of(gpus=0), workers=2)["rows"])


def test_simulated_faults_change_nothing() -> None:
    document = spec_of(back=7)
    document["stages"] = {name: document["stages"][name] for name in ("decoded", "inferred", "kept", "rows")}
    faults = Faults(crash=0.05, drop=0.05, delay=0.1)
    assert simulate(document, seeds=range(4), workers=3, faults=faults).total() > 0


# -- quarantine ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_culprits_of_both_stages_are_found_by_their_ids(workers: int, tmp_path: Path) -> None:
    def document(**more: Any) -> dict[str, Any]:
        quarantining = {
            stage: {"on_error": "quarantine", "with": {"bad": bad}}
            for stage, bad in (("decode", (7, 8, 40)), ("infer", (8, 9, 50)))
        }
        return spec_of(**quarantining, **more)

    result = pipedist.run(
        {**document(back=7), "outputs": {"rows": "rows.npz"}}, workers=workers, output=tmp_path
    )
    lines = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert {(line["element"], line["stage"]) for line in lines} == {
        *((element, "decoded") for element in (7, 8, 40)),
        *((element, "inferred") for element in (9, 50)),
    }
    assert all(line["alone"] for line in lines)
    assert {line["input"]["id"] for line in lines if line["stage"] == "inferred"} == {9, 50}
    rows = arrays(tmp_path / "rows.npz")
    positions = {int(i): at for at, i in enumerate(order_of())}
    left = [i for i in order_of() if i not in (7, 8, 40, 9, 50)]
    assert rows["id"].tolist() == left
    assert rows["step"].tolist() == [positions[i] // 10 for i in left]
    assert (result.ledger.committed, result.ledger.quarantined, result.ledger.lost) == (COUNT - 5, 5, 0)


def arrays(path: Path) -> dict[str, Any]:
    with np.load(path) as found:
        return dict(found)


def order_of() -> list[int]:
    return [int(i) for i in permutation(3, "dataset", 0, COUNT)]


def test_a_shard_of_values_without_rows_is_quarantined_as_a_whole() -> None:
    document = spec_of(replicas=1, batch=None, decode={"run": functions.length})
    document["dataset"]["shuffle"] = False
    document["stages"] = {
        "decoded": {"run": functions.length},
        "inferred": {
            "run": functions.not_four,
            "of": "decoded",
            "resources": {"gpus": 1},
            "on_error": "quarantine",
        },
        "rows": {"reduce": "sum", "of": "inferred", "axis": None},
    }
    result = pipedist.run(document, workers=2)
    assert (result.ledger.quarantined, result["rows"]) == (60, 1)


# -- failures --------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(("stage", "name"), [("decode", "decoded"), ("infer", "inferred")])
async def test_an_error_of_either_stage_ends_the_run_at_once(
    stage: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "ORDER_S_MAX", 1e6)
    document = spec_of(batch=None, **{stage: {"with": {"bad": tuple(order_of()[30:31])}}})
    with anyio.fail_after(60), pytest.raises(CallError) as caught:
        async with pipedist.open(document, workers=2) as run:
            await run.results()
    assert (caught.value.stage, caught.value.step) == (name, 7)


def test_values_that_cannot_be_divided_end_the_run_with_the_stage() -> None:
    document = spec_of(decode={"run": functions.length})
    del document["stages"]["noise"]
    with pytest.raises(FoldError, match=r"decoded: its values can't be divided into calls"):
        pipedist.run(document, workers=2)


@pytest.mark.asyncio
async def test_a_pass_that_waits_for_values_of_another_one_says_so(tmp_path: Path) -> None:
    with_ = {"folder": str(tmp_path), "half": 0}
    document = spec_of(decode={"run": functions.decode_half_before_first_inference, "with": with_})
    document["stages"] = {name: document["stages"][name] for name in ("decoded", "where", "inferred")}
    document["stages"]["inferred"] |= {"run": functions.infer_first, "with": {"folder": str(tmp_path)}}
    document["stages"]["inferred"]["resources"] = None
    async with pipedist.open(document, workers=2) as run, anyio.create_task_group() as tasks:
        tasks.start_soon(run.results)
        with anyio.fail_after(60):
            waits: list[dict[str, Any]] = []
            while not waits:
                waits = [w for w in run.why().get("waits", ()) if w["reason"] == "stream"]
                await anyio.sleep(0.001)
        assert waits[0]["text"] == "not all values of decoded for the next step are made"
        (tmp_path / "inferred").touch()


# -- resume, replay, reuse -------------------------------------------------------------------


def calls(folder: Path, stage: str) -> Counter[int]:
    """Return how often each element was in a call of a stage."""
    return Counter(int(line) for line in (folder / stage).read_text().splitlines())


def document_of(folder: Path, bad: tuple[int, ...] = ()) -> Path:
    """Write a spec whose `infer` fails on elements that are listed in a file."""
    (folder / "bad.json").write_text(json.dumps(bad))
    document = spec_of(back=7)
    stages = document["stages"]
    stages["decoded"] |= {"run": f"{F}:decode", "with": {"folder": str(folder)}}
    stages["inferred"] |= {"run": f"{F}:infer_checked", "with": {"folder": str(folder)}}
    stages["kept"]["run"] = f"{F}:bits"
    path = folder / "spec.json"
    path.write_text(json.dumps({**document, "code": str(ROOT), "outputs": {"rows": "rows.npz"}}))
    return path


def test_a_run_that_fails_in_the_second_stage_is_resumed(alone: Any, tmp_path: Path) -> None:
    bad = order_of()[-1]
    spec = document_of(tmp_path, (bad,))
    with pytest.raises(CallError):
        pipedist.run(spec, workers=2, output=tmp_path / "out")
    before = calls(tmp_path, "decode")
    spec = document_of(tmp_path)
    result = pipedist.run(spec, workers=4, output=tmp_path / "out", resume=True)
    same(arrays(tmp_path / "out" / "rows.npz"), alone["rows"])
    assert calls(tmp_path, "decode") == before, "all of its values are durable"
    assert result.ledger == alone.ledger


@pytest.mark.asyncio
async def test_a_drained_run_is_resumed(tmp_path: Path) -> None:
    document = {**spec_of(), "dataset": {"range": 4_000, "batch": 4}, "outputs": {"where": "where.npz"}}
    document["stages"] = {name: document["stages"][name] for name in ("decoded", "inferred", "where")}
    document["stages"]["inferred"]["run"] = functions.infer_id

    async def drained() -> None:
        async with pipedist.open(document, workers=2, output=tmp_path) as run:
            async for step in run.steps("inferred"):  # 400 steps, which are not all ahead of their reader
                if step.index == 1:
                    run.drain()

    with anyio.fail_after(60), pytest.raises(RunDrained):
        await drained()
    async with pipedist.open(document, workers=2, output=tmp_path, resume=True) as run:
        result = await run.results()
    assert arrays(tmp_path / "where.npz")["id"].tolist() == list(range(4_000))
    assert (result.ledger.committed, result.ledger.lost) == (4_000, 0)


@pytest.mark.asyncio
async def test_a_step_is_committed_after_the_steps_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commits of the first pass wait until the second one has taken everything."""
    monkeypatch.setattr(pass_journal, "COMMIT_S", 0.0)
    monkeypatch.setattr(pass_handle, "BATCH_STEPS_MAX", 1)
    committed: dict[str, int] = {}
    all_taken = anyio.Event()
    commit, take = pass_journal.RunJournal.commit, pass_execution.PassExecution._take

    async def checked(self: Any, taken: Sequence[Any], **more: Any) -> None:
        steps = {s.key: committed.get(s.key, 0) + s.elements for s in (each.snapshot for each in taken)}
        if [*steps] == ["0/dataset"]:
            await all_taken.wait()
        else:
            assert steps.get("0/decoded+1+10", 0) <= {**committed, **steps}.get("0/dataset", 0)
        await commit(self, taken, **more)
        committed.update(steps)

    async def counted(self: Any, *step: Any) -> None:
        await take(self, *step)
        if self.name == "inferred" and self.elements == COUNT:
            all_taken.set()

    monkeypatch.setattr(pass_journal.RunJournal, "commit", checked)
    monkeypatch.setattr(pass_execution.PassExecution, "_take", counted)
    async with pipedist.open(spec_of(), workers=2, output=tmp_path) as run:
        with anyio.fail_after(60):
            await run.results()
    assert committed["0/decoded+1+10"] == COUNT


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, alone: Any) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerators, "found", lambda: VisibleGpus(("0",), "a test has 1"))
        pipedist.run(document_of(folder), workers=2, output=folder / "out")
    return folder


@pytest.mark.parametrize(("stage", "step", "replica", "size"), [("inferred", 3, 1, 5), ("kept", 8, 0, 3)])
def test_a_call_of_a_later_pass_is_replayed(
    finished: Path, alone: Any, stage: str, step: int, replica: int, size: int
) -> None:
    with open_replay(finished / "out", CallKey(stage, step, replica)) as replay:
        made = replay.execute()
    assert made.failure is None
    first = 35 if stage == "inferred" else 56
    assert list(replay.elements) == order_of()[first : first + size]
    for name in ("id", "score", "step"):
        assert made.value[name].tobytes() == alone["rows"][name][first : first + size].tobytes()


def test_one_element_of_a_later_pass_is_replayed(finished: Path) -> None:
    element = order_of()[36]
    with open_replay(finished / "out", CallKey("inferred", 3, 1), (element,)) as replay:
        made = replay.execute()
    assert made.value["id"].tolist() == [element]


def test_a_changed_second_stage_reads_the_values_of_the_first_again(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    before = calls(folder, "decode")
    spec = json.loads((folder / "spec.json").read_text())
    spec["stages"]["inferred"]["batch"] = 20
    (folder / "spec.json").write_text(json.dumps(spec))
    pipedist.run(folder / "spec.json", workers=2, output=folder / "out", resume="reuse")
    rows = arrays(folder / "out" / "rows.npz")
    assert rows["step"].tolist() == [position // 20 for position in range(COUNT)]
    assert calls(folder, "decode") == before
