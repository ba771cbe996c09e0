"""Elements that can't be processed cost themselves, and nothing else: `on_error: quarantine`."""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import pipedist
from pipedist.cli.run_command import RunOptions, execute
from pipedist.datasets.division import Division
from pipedist.datasets.feeds import IndexedFeed
from pipedist.datasets.sources import open_source
from pipedist.outputs.document import error_document
from pipedist.runs.quarantine import PassQuarantine
from pipedist.scheduler import SchedulerLimits
from pipedist.scheduler.commands import CallsQuarantined, Cause

F = "tests.runs.poison_functions"
N = 64


def document(
    culprits: list[int], how: str = "raises", run: str = "poison", *, replicas: int = 2, **keys: Any
) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "poisoned",
        "replicas": replicas,
        "dataset": {"range": N, "batch": 32},
        "stages": {
            "a": {
                "run": f"{F}:{run}",
                "with": {"how": how, "culprits": culprits},
                "on_error": "quarantine",
                **keys,
            },
            "all": {"gather": 0, "of": "a"},
        },
    }


def check(result: pipedist.Result, culprits: list[int], cause: str, replicas: int = 2) -> None:
    """The rest was processed in order, in one call a shard, and nothing is missing but the culprits."""
    rest = [i for i in range(N) if i not in culprits]
    assert result["all"]["ids"].tolist() == rest
    assert result["all"]["y"].tolist() == [2 * i for i in rest]
    assert len(result["all"]["noise"]) == 2 * replicas
    assert result.ledger.to_json() == {
        "elements": N,
        "committed": len(rest),
        "quarantined": len(culprits),
        "lost": 0,
    }
    assert [(x["element"], x["stage"], x["cause"]) for x in result.quarantined] == [
        (i, "a", cause) for i in culprits
    ]


CAUSES = {
    "raises": "ValueError: indigestible",
    "segfault": "signal 11 (SIGSEGV)",
    "exit": "exit code 3",
    "sys.exit": "SystemExit: the function called sys.exit(4)",
}


@pytest.mark.parametrize("how", CAUSES)
def test_an_element_is_quarantined_however_it_fails(how: str) -> None:
    check(pipedist.run(document([17], how), workers=2), [17], CAUSES[how])


def test_an_element_that_exhausts_memory_is_found() -> None:
    result = pipedist.run(document([17], "memory"), workers=2)
    cause = result.quarantined[0]["cause"]
    assert "MemoryError" in cause
    check(result, [17], cause)


@pytest.mark.parametrize(
    ("how", "run"),
    [
        ("hang with the GIL", "poison"),
        pytest.param("hang", "poison", marks=pytest.mark.slow),
        pytest.param("hang with the GIL", "poison_async", marks=pytest.mark.slow),
        pytest.param("await", "poison_async", marks=pytest.mark.slow),
    ],
)
def test_an_element_that_hangs_is_found_by_its_timeout(how: str, run: str) -> None:
    """With retries, for innocent calls: a process that is kept waiting takes too long as well."""
    result = pipedist.run(document([17], how, run, replicas=16, timeout_s=0.6, retries=1), workers=2)
    check(result, [17], "TimeoutError: timed out after 0.6 s", replicas=16)


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_the_result_is_the_same_for_any_number_of_workers(workers: int) -> None:
    result = pipedist.run(document([0, 17, 40], "segfault", replicas=8), workers=workers)
    check(result, [0, 17, 40], "signal 11 (SIGSEGV)", replicas=8)
    clean = pipedist.run(document([], replicas=8), workers=1)
    assert result["all"]["noise"].tolist() == clean["all"]["noise"].tolist(), "the rng of the whole call"


@pytest.mark.asyncio
async def test_the_result_is_the_same_whichever_workers_die_meanwhile() -> None:
    kills = 6
    limits = SchedulerLimits(deaths_max=kills + 1)  # all of them may come under one call
    async with (
        pipedist.LocalCluster(workers=2, limits=limits) as cluster,
        pipedist.open(document([17, 40]), cluster=cluster) as run,
        asyncio.TaskGroup() as tasks,
    ):
        results = tasks.create_task(run.results())
        for kill in range(kills):
            await cluster.ready()
            await asyncio.sleep(0.03)  # in the middle of something: which call it is does not matter
            cluster.kill(kill % 2)
        check(await results, [17, 40], CAUSES["raises"])


def test_a_shuffled_dataset_with_epochs_has_its_ids() -> None:
    doc = document([17])
    doc["dataset"] = {"range": N, "batch": 32, "shuffle": True, "epochs": 2}
    result = pipedist.run(doc, workers=2)
    assert sorted(x["element"] for x in result.quarantined) == [17, N + 17]
    assert result.ledger.to_json() == {"elements": 128, "committed": 126, "quarantined": 2, "lost": 0}
    assert sorted(result["all"]["ids"].tolist()) == [i for i in range(128) if i % N != 17]


def test_elements_that_fail_only_together_cost_their_shard() -> None:
    doc = document([], run="together")
    del doc["stages"]["a"]["with"]
    result = pipedist.run(doc, workers=2)
    assert result["all"].tolist() == list(range(16, N))
    cause = "ValueError: 3 and 5 (not separable: no element fails alone)"
    assert [tuple(x.values()) for x in result.quarantined] == [(i, "a", cause) for i in range(16)]


def test_if_nothing_remains_nothing_counts() -> None:
    result = pipedist.run(document(list(range(16))), workers=2)
    assert result["all"]["ids"].tolist() == list(range(16, N))
    assert result.ledger.quarantined == 16


def test_elements_that_fail_only_together_are_culprits_too() -> None:
    doc = document([], run="needs_company")
    del doc["stages"]["a"]["with"]
    result = pipedist.run(doc, workers=2)
    assert [x["element"] for x in result.quarantined] == [0, 1]
    assert result["all"].tolist() == list(range(2, N))


def test_retries_come_first_also_for_the_elements_and_for_the_rest(tmp_path: Path) -> None:
    doc = document([], run="flaky", replicas=1, retries=2)
    doc["stages"]["a"]["with"] = {"folder": str(tmp_path)}
    result = pipedist.run(doc, workers=2)
    assert [x["element"] for x in result.quarantined] == [9]
    assert result["all"].tolist() == [i for i in range(N) if i != 9]


def test_a_stage_with_on_error_fail_still_fails_the_run() -> None:
    doc = document([17])
    doc["stages"] = {
        **doc["stages"],
        "b": {"run": f"{F}:only_y", "of": "a"},
        "all": {"gather": 0, "of": "b"},
    }
    with pytest.raises(pipedist.CallError) as caught:
        pipedist.run(doc, workers=2)
    assert (caught.value.stage, caught.value.step, caught.value.replica) == ("b", 1, 0)


def test_each_stage_of_a_chain_has_its_own_culprits() -> None:
    doc = document([17])
    doc["stages"] = {
        **doc["stages"],
        "b": {"run": f"{F}:only_y", "of": "a", "on_error": "quarantine"},
        "all": {"gather": 0, "of": "b"},
    }
    result = pipedist.run(doc, workers=2)
    assert result["all"].tolist() == [2 * i for i in range(N) if i not in (17, 35)]
    assert [(x["element"], x["stage"]) for x in result.quarantined] == [(17, "a"), (35, "b")]


def test_a_later_phase_reads_what_remains() -> None:
    doc = document([17, *range(32, 48)], replicas=4)
    doc["dataset"]["batch"] = 64  # shards of 16: of the third one nothing remains
    doc["stages"] = {
        "a": doc["stages"]["a"],
        "size": {"reduce": f"{F}:first_of", "of": "a"},
        "c": {"run": f"{F}:with_ids", "of": "a", "with": {"size": "${stages.size}"}},
        "all": {"gather": 0, "of": "c"},
    }
    result = pipedist.run(doc, workers=2)
    rest = [i for i in range(N) if i != 17 and not 32 <= i < 48]
    assert result["all"]["ids"].tolist() == rest
    assert result["all"]["replica"].tolist() == [i // 16 for i in rest]
    assert result.ledger.to_json() == {"elements": N, "committed": len(rest), "quarantined": 17, "lost": 0}


async def streamed(doc: dict[str, Any]) -> list[Any]:
    async with pipedist.open(doc, workers=2) as run:
        return [step["a"].components async for step in run.steps("a")]


@pytest.mark.parametrize("second", ["element", None])
def test_each_stage_of_a_call_has_its_own_culprits(second: str | None) -> None:
    doc = document([17], run="reject", per="element")
    del doc["stages"]["a"]["with"]["how"]
    doc["stages"]["b"] = {"run": f"{F}:reject", "of": "a", "with": {"culprits": [5, 19]}, "per": second}
    doc["stages"]["b"]["on_error"] = "quarantine"
    doc["stages"]["all"]["of"] = "b"
    result = pipedist.run(doc, workers=2)
    assert result["all"].tolist() == [i for i in range(N) if i not in (5, 17, 19)]
    found = [(x["element"], x["stage"], x["cause"]) for x in result.quarantined]
    assert found == [(i, stage, CAUSES["raises"]) for i, stage in ((5, "b"), (17, "a"), (19, "b"))]


def test_elements_are_executed_again_if_their_values_depend_on_a_culprit() -> None:
    doc = document([9], run="reject", per="element", of="sums", replicas=1)
    del doc["stages"]["a"]["with"]["how"]
    doc["stages"]["sums"] = {"run": f"{F}:plus_sum"}
    doc["stages"]["values"] = {"gather": 0, "of": "sums"}
    doc["dataset"] = {"range": 4, "batch": 4}
    result = pipedist.run(doc, workers=1)
    assert [x["element"] for x in result.quarantined] == [3]
    assert result["values"].tolist() == [3, 4, 5]
    assert result["all"].tolist() == [3, 4, 5]


@pytest.mark.parametrize("first", [[0], [0, 1], [4, 5], [2, 3, 6]])
@pytest.mark.parametrize("second", [[], [2], [6, 7, 9]])
@pytest.mark.parametrize("after", ["", "x"])
def test_quarantined_elements_keep_their_places_in_every_later_batch(
    first: list[int], second: list[int], after: str
) -> None:
    doc = document([])
    doc["dataset"] = {"range": 12, "batch": 12}
    doc["stages"] = {}
    for name, of, batch, culprits in (("a", "", 0, first), ("b", "a", 4, second), ("c", "b", 3, [])):
        stage = {"run": f"{F}:reject", "with": {"culprits": culprits}, "on_error": "quarantine"}
        doc["stages"][name] = stage | ({"of": of, "batch": batch} if of else {})
    doc["stages"]["x"] = {"gather": 0, "of": "b"}
    if after:  # in a later phase, which reads stored values
        doc["stages"]["c"]["after"] = after
    doc["stages"]["steps"] = {"gather": 0, "of": "c", "per": "step"}
    result = pipedist.run(doc, workers=2)
    rest = [[i for i in range(at, at + 3) if i not in (*first, *second)] for at in range(0, 12, 3)]
    assert [[] if step is None else step.tolist() for step in result["steps"]] == rest
    assert result.ledger.quarantined == len({*first, *second})


@pytest.mark.asyncio
async def test_a_shard_of_which_nothing_remains_is_none_in_a_stream() -> None:
    first, second = await streamed(document(list(range(16))))
    assert first[0] is None
    assert first[1]["ids"].tolist() == list(range(16, 32))
    assert all(part is not None for part in second)


@pytest.mark.parametrize("how", ["raises", "segfault"])
def test_a_gang_is_all_or_nothing(how: str) -> None:
    doc = document([], run="gang_of_three", replicas=3, collectives=True)
    doc["stages"]["a"]["with"] = {"how": how}
    doc["dataset"] = {"range": 12, "batch": 6}
    result = pipedist.run(doc, workers=2)
    assert result["all"].tolist() == [sum(range(6, 12))] * 3
    assert [x["element"] for x in result.quarantined] == list(range(6))
    assert "a gang's step is all or nothing" in result.quarantined[0]["cause"]
    assert result.ledger.to_json() == {"elements": 12, "committed": 6, "quarantined": 6, "lost": 0}


# -- what is written ---------------------------------------------------------------------------


def write_csv(path: Path) -> None:
    rows = [f"{i},{-1 if i in (4, 9) else i}" for i in range(12)]
    path.write_text("id,value\n" + "\n".join(rows) + "\n")


def csv_document(tmp_path: Path) -> dict[str, Any]:
    write_csv(tmp_path / "rows.csv")
    return {
        "pipedist": 1,
        "name": "rows",
        "dataset": {
            "csv": {"path": str(tmp_path / "rows.csv"), "columns": {"id": "int64", "value": "float64"}},
            "batch": 6,
        },
        "stages": {
            "v": {"run": f"{F}:bad_row", "on_error": "quarantine"},
            "total": {"reduce": "sum", "of": "v", "axis": 0},
        },
        "outputs": {"total": "total.json"},
    }


def test_the_file_lists_what_they_are(tmp_path: Path) -> None:
    result = pipedist.run(csv_document(tmp_path), output=tmp_path / "out", workers=1)
    assert result["total"] == sum(i for i in range(12) if i not in (4, 9))
    assert result.quarantine_file == tmp_path / "out" / "quarantine.jsonl"
    lines = [json.loads(line) for line in result.quarantine_file.read_text().splitlines()]
    assert lines == [
        {
            "dataset": "dataset",
            "element": i,
            "stage": "v",
            "cause": "ValueError: negative",
            "step": i // 6,
            "replica": 0,
            "call": f"v/{i // 6}/0",
            "alone": True,
            "input": {"id": i, "value": -1.0},
        }
        for i in (4, 9)
    ]
    assert result.document["quarantined"] == [
        {"element": i, "stage": "v", "cause": "ValueError: negative"} for i in (4, 9)
    ]


def test_the_list_is_the_same_wherever_it_is(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(json.dumps(csv_document(tmp_path)))
    lists = [
        pipedist.run(str(tmp_path / "spec.yaml"), output=tmp_path / name, workers=1).quarantine_file
        for name in ("one", "other")
    ]
    one, other = (path.read_bytes() for path in lists if path is not None)
    assert one == other


def listed(orders: list[list[int]]) -> list[str]:
    """The lines of a quarantine whose calls come in such orders, each in a process of its own."""
    source = open_source("range", {"start": 0, "stop": 40, "step": 1}, folder=Path())
    feed = IndexedFeed(source, "d", Division(40, 8, 2, False), epochs=1, shuffle_seed=1)
    asyncio.run(feed.pull(5))
    cause, state = Cause("a", "ValueError: no"), []
    for calls in orders:
        quarantine = PassQuarantine("a", feed, 2)
        quarantine.restore(state)
        for call in calls:
            culprits = tuple((place, cause) for place in range(4 - call % 2))
            quarantine.add(CallsQuarantined(0, call, call + 1, culprits))
        asyncio.run(quarantine.read_inputs(5))
        state = quarantine.state(5)
    return [each.line("d") for each in quarantine]


def test_only_the_first_elements_are_listed_with_what_they_are_whichever_came_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipedist.runs.quarantine.INPUTS_MAX", 17)
    lines = listed([list(range(10))])
    assert [json.loads(line)["input"] is not None for line in lines] == [True] * 17 + [False] * 18
    assert listed([[*range(9, -1, -1)]]) == lines
    assert listed([[7, 2, 9, 0, 1, 8, 3, 4, 6, 5]]) == lines
    assert listed([[1, 0, 3, 2], [9, 4, 8, 5, 7, 6]]) == lines, "of a run that was resumed"


def test_a_clean_run_after_it_leaves_no_list(tmp_path: Path) -> None:
    doc = csv_document(tmp_path)
    assert pipedist.run(doc, output=tmp_path / "out", workers=1).quarantine_file is not None
    (tmp_path / "rows.csv").write_text("id,value\n1,1\n")
    result = pipedist.run(doc, output=tmp_path / "out", workers=1)
    assert result.quarantine_file is None
    assert not (tmp_path / "out" / "quarantine.jsonl").exists()


def test_a_resumed_run_restores_its_quarantine(tmp_path: Path) -> None:
    doc = document([3, 50], replicas=1)
    doc["dataset"]["batch"] = 4
    (tmp_path / "calls").mkdir()
    arguments = {"path": str(tmp_path / "mended"), "folder": str(tmp_path / "calls")}
    doc["stages"] = {
        "a": doc["stages"]["a"],
        "b": {"run": f"{F}:unless", "of": "a", "with": arguments},
        "all": {"gather": 0, "of": "b"},
    }
    doc["outputs"] = {"all": "all.npy"}
    with pytest.raises(pipedist.CallError, match="sixty"):
        pipedist.run(doc, output=tmp_path / "out", workers=1)
    (tmp_path / "mended").touch()
    result = pipedist.run(doc, output=tmp_path / "out", workers=2, resume=True)
    assert np.load(result.files["all"]).tolist() == [i for i in range(N) if i not in (3, 50)]
    assert [x["element"] for x in result.quarantined] == [3, 50]
    assert result.ledger.to_json() == {"elements": N, "committed": 62, "quarantined": 2, "lost": 0}
    assert result.quarantine_file is not None
    assert len(result.quarantine_file.read_text().splitlines()) == 2
    assert (tmp_path / "calls" / "0").stat().st_size == 2, "a probe and the call that counts; not once more"


def test_a_row_that_can_not_be_read_is_listed_with_why(tmp_path: Path) -> None:
    doc = csv_document(tmp_path)
    (tmp_path / "rows.csv").write_text("id,value\n0,0\n1,one\n2,2\n")
    result = pipedist.run(doc, output=tmp_path / "out", workers=1)
    assert result["total"] == 2.0
    [entry] = result.quarantined
    assert (entry["element"], entry["stage"]) == (1, "v")
    assert result.quarantine_file is not None
    line = json.loads(result.quarantine_file.read_text())
    assert line["input"] is None
    assert "can't be read" in line["note"]


def test_the_command_line_reports_quarantined_elements_and_exits_with_3(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    doc = csv_document(tmp_path)
    spec = tmp_path / "rows.yaml"
    spec.write_text(json.dumps(doc))
    code = execute(RunOptions(str(spec), workers=1, output=str(tmp_path / "out"), as_json=True))
    out, err = capfd.readouterr()
    assert code == 3
    assert [x["element"] for x in json.loads(out)["quarantined"]] == [4, 9]
    assert "element 4, stage v: ValueError: negative" in err
    folder = shlex.quote(str(tmp_path / "out"))
    assert f"to replay: pipedist replay {folder} --call v/0/0 --element 4\n" in err
    assert "quarantine.jsonl" in err
    again = execute(RunOptions(str(spec), workers=1, output=str(tmp_path / "out"), resume=True))
    assert again == 3, "of a run that is finished already, too"


def test_a_run_that_sets_all_elements_aside_fails_and_keeps_the_files_of_the_run_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec, out = tmp_path / "rows.yaml", tmp_path / "out"

    def run(function: str, resume: bool = False, **keys: Any) -> int:
        stages = {"v": {"run": function, "on_error": "quarantine"}, "rows": {"gather": 0, "of": "v"}}
        doc = {"pipedist": 1, "dataset": {"range": 4, "batch": 2}, "stages": stages, **keys}
        spec.write_text(json.dumps(doc | {"outputs": {"rows": "rows.csv"}}))
        return execute(RunOptions(str(spec), workers=1, output=str(out), resume=resume))

    assert run("numpy:negative") == 0
    before = (out / "rows.csv").read_bytes()
    capfd.readouterr()
    for resume in (False, True):
        assert run("json:loads", resume) == 1
        err = capfd.readouterr().err
        assert "all elements of dataset failed (4), so the run ends. The first failures:" in err
        assert "\n    element 0, stage v: TypeError: " in err
        assert "rerun with --reuse" in err
        assert f"To execute only this call again: pipedist replay {out} --call v/0/0\n" in err
        assert (out / "rows.csv").read_bytes() == before
    assert run("json:loads", resume=True, quarantine_max=4) == 3
    assert (out / "rows.csv").read_bytes() != before


def test_a_dataset_of_which_nothing_is_left_fails_the_run_beside_others() -> None:
    doc = document(list(range(N)))
    doc["datasets"] = {"bad": doc.pop("dataset"), "good": {"range": 4, "batch": 4}}
    doc["stages"] |= {"total": {"reduce": "sum", "of": "good", "axis": 0}}
    doc["stages"]["a"]["of"] = "bad"
    with pytest.raises(pipedist.QuarantineError, match=r"all elements of bad failed \(64\)") as caught:
        pipedist.run(doc, workers=2)
    told = error_document(caught.value)
    assert (told["stage"], told["step"], told["replica"]) == ("a", 0, 0)
    assert "--reuse" not in str(caught.value), "nothing is kept without a folder"


# -- timeouts without quarantine ------------------------------------------------------------------


def test_a_call_that_takes_too_long_fails_the_run_with_a_timeout() -> None:
    doc = document([5], "hang with the GIL", on_error="fail", timeout_s=0.5)  # in the lowest call
    with pytest.raises(pipedist.CallError) as caught:
        pipedist.run(doc, workers=2)
    error = caught.value
    assert isinstance(error.__cause__, TimeoutError)
    assert str(error.__cause__) == "timed out after 0.5 s"
    assert (error.stage, error.step, error.replica, error.attempts) == ("a", 0, 0, 1)


def test_a_timeout_has_retries_and_costs_the_neighbours_no_attempt(tmp_path: Path) -> None:
    doc = document([], run="slow_once", replicas=1, timeout_s=1, retries=3, on_error="fail")
    doc["stages"]["a"]["with"] = {"folder": str(tmp_path)}
    doc["dataset"] = {"range": N, "batch": 1}
    result = pipedist.run(doc, workers=1)
    assert result["all"].tolist() == list(range(N))
    assert (tmp_path / "8").stat().st_size >= 2, "more where it was kept waiting for a second"


def test_a_call_within_its_time_is_left_alone() -> None:
    check(pipedist.run(document([], timeout_s=30), workers=2), [], "")
    check(pipedist.run(document([], run="poison_async", timeout_s=30), workers=2), [], "")


@pytest.mark.parametrize("how", [pytest.param("hang", marks=pytest.mark.slow), "hang with the GIL"])
def test_a_gang_member_that_hangs_is_found_by_its_timeout(how: str) -> None:
    doc = document([], run="gang_of_three", replicas=3, collectives=True, timeout_s=1, on_error="fail")
    doc["stages"]["a"]["with"] = {"how": how}
    doc["dataset"] = {"range": 6, "batch": 6}
    with pytest.raises(pipedist.CallError, match="timed out after 1 s") as caught:
        pipedist.run(doc, workers=2)
    assert caught.value.replica == 2, "the one that hangs, not those that wait for it"


def test_of_async_calls_that_overlap_the_one_that_has_the_thread_is_blamed(tmp_path: Path) -> None:
    """With a retry, for who waits: all of them take too long where their process is kept waiting."""
    doc = document([], run="hog_among_waiters", replicas=1, timeout_s=1, retries=1, on_error="fail")
    doc["stages"]["a"]["with"] = {"path": str(tmp_path / "attempts")}
    doc["dataset"] = {"range": 512, "batch": 1}

    async def main() -> None:
        limits = SchedulerLimits(
            bundle_s=60.0
        )  # leases grow as far as they may: 1 call, 8, 64, and the others
        async with (
            pipedist.LocalCluster(workers=1, limits=limits) as cluster,
            pipedist.open(doc, cluster=cluster) as run,
        ):
            await run.results()

    with pytest.raises(pipedist.CallError, match="timed out after 1 s") as caught:
        asyncio.run(main())
    assert caught.value.step == 300
    assert (tmp_path / "attempts").read_text() == "..", "one more where another call was blamed for it"


def test_time_in_which_a_replica_waits_for_others_is_not_its_own() -> None:
    doc = document([], run="wait_for_the_slow", replicas=16, collectives=True, timeout_s=3, on_error="fail")
    del doc["stages"]["a"]["with"]
    doc["dataset"] = {"range": 16, "batch": 16}

    async def main() -> pipedist.Result:
        async with pipedist.LocalCluster(workers=2) as cluster:
            await cluster.ready()  # 8 replicas each: the first ones wait for 3.2 s
            async with pipedist.open(doc, cluster=cluster) as run:
                return await run.results()

    assert asyncio.run(main())["all"].tolist() == [120] * 16


def test_arrays_of_a_probe_are_like_others() -> None:
    """Subsets come read-only and C-contiguous, too."""
    doc = document([17])
    doc["dataset"] = {"arrays": np.arange(N * 2).reshape(2, N).T[:, 0].copy(), "batch": 32}
    assert [x["element"] for x in pipedist.run(doc, workers=2).quarantined] == [17]


@pytest.mark.parametrize("gang", [False, True])
def test_a_run_in_which_every_element_fails_ends_at_the_limit_and_resumes(tmp_path: Path, gang: bool) -> None:
    doc = document(list(range(N)), collectives=gang) | {"quarantine_max": 20}
    with pytest.raises(pipedist.QuarantineError, match="may be quarantined") as caught:
        pipedist.run(doc, workers=2, output=tmp_path)
    text = str(caught.value)
    assert "stage a, step 0, replica" in text
    assert "ValueError: indigestible" in text
    lines = text.splitlines()
    assert len(lines) == len(set(lines)), "a reason is named once for each call"
    assert "Raise `quarantine_max` and rerun with --resume, or fix the function" in text
    result = pipedist.run(doc | {"quarantine_max": N}, workers=2, output=tmp_path, resume=True)
    assert result.ledger.quarantined == N


def test_the_command_line_says_once_how_to_continue_after_the_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "rows.yaml"
    options = RunOptions(str(spec), workers=1, output=str(tmp_path / "out"))
    doc = csv_document(tmp_path)
    doc["dataset"]["batch"] = 2  # the steps before that of the first bad row are committed
    spec.write_text(json.dumps(doc | {"quarantine_max": 1}))
    assert execute(options) == 1
    err = capfd.readouterr().err
    assert [err.count(option) for option in ("rerun with --resume", "rerun with --reuse")] == [1, 1]
    assert err.endswith("\nCommitted steps and finished calls are kept.\n")
    spec.write_text(json.dumps(doc | {"quarantine_max": 2}))
    assert execute(structs.replace(options, resume=True)) == 3


def test_a_large_quarantined_file_is_listed_with_its_path_and_first_bytes(tmp_path: Path) -> None:
    for name, content in {"a": b"good", "b": b"bad" + bytes(200_000), "c": b"good"}.items():
        (tmp_path / name).write_bytes(content)
    doc = {
        "pipedist": 1,
        "dataset": {"files": {"path": str(tmp_path / "*")}, "batch": 3},
        "stages": {
            "a": {"run": f"{F}:rejects_bad_files", "on_error": "quarantine"},
            "all": {"gather": 0, "of": "a"},
        },
    }
    result = pipedist.run(doc, workers=1, output=tmp_path / "out")
    assert result.quarantine_file is not None
    [entry] = map(json.loads, result.quarantine_file.read_text().splitlines())
    assert entry["input"]["path"] == str(tmp_path / "b")
    assert base64.b64decode(entry["input"]["bytes"]).startswith(b"bad")
    assert entry["note"].startswith("shortened: ")
    assert len(json.dumps(entry)) < 10_000
