from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import pipedist
from pipedist.coordinator.spans import SPAN
from pipedist.errors import UsageError
from pipedist.report import collect, page
from pipedist.report.metrics import exposition
from pipedist.report.previews import preview
from pipedist.runs.timings import Measured, write_timings
from tests.preloaded import run_module
from tests.report.jobs import MARKUP, finished, waiting
from tests.runs.test_feeds import until


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "out"
    finished(path)
    return path


def test_the_report_of_a_finished_run_has_everything(job: Path) -> None:
    data = collect(job)
    assert (data["name"], data["state"]) == ("job", "finished")
    assert data["ledger"] == {"elements": 40, "committed": 39, "quarantined": 1, "lost": 0}
    (process,) = data["processes"]
    (stage,) = process["stages"]
    assert (stage["name"], stage["elements"]) == ("parts -> losses", 40)
    assert stage["calls"] >= 10, "and those that look for the culprit"
    assert [each["name"] for each in process["workers"]] == process["worker_names"]
    assert any("died: signal 9" in text for _, text in process["marks"])
    assert process["spans"]["count"] >= 10
    assert sum(sum(values) for values in process["throughput"]) > 0
    (row,) = data["quarantine"]["rows"]
    assert (row["element"], row["call"], data["quarantine"]["count"]) == (13, "parts/1/1", 1)
    table = next(each for each in data["outputs"] if each["file"] == "table.csv")
    assert table["preview"]["names"] == ["id", "text", "value"]
    assert table["preview"]["rows"][0] == ["0", MARKUP, "0.0"]
    assert table["sha256"] == hashlib.sha256((job / "table.csv").read_bytes()).hexdigest()
    (curve,) = data["curves"]
    assert curve["lines"][0]["values"] == np.load(job / "curve.npy").tolist()
    assert data["about"]["environment"]["numpy"] == np.__version__
    assert {node["name"] for node in data["about"]["graph"]["nodes"]} >= {"dataset", "parts", ">table.csv"}


def test_the_page_is_one_file_that_can_load_nothing(job: Path) -> None:
    text = page(collect(job))
    assert "@@" not in text
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src &#x27;none&#x27;" in policy
    assert "connect-src &#x27;none&#x27;" in policy
    for part in re.findall(r"<style>(.*?)</style>", text, re.DOTALL) + re.findall(
        r"<script>(.*?)</script>", text, re.DOTALL
    ):
        assert base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() in policy
    assert MARKUP not in text, "text of the data is not markup of the page"
    assert not re.findall(r'(?:src|href)="', text)
    embedded = re.findall(r'type="application/json">(.*?)</script>', text, re.DOTALL)
    assert json.loads(embedded[0])["name"] == "job"


def test_a_failed_run_has_a_report(tmp_path: Path) -> None:
    spec = {
        "pipedist": 1,
        "dataset": {"range": 40, "batch": 2},
        "stages": {"y": {"run": "tests.runs.functions:fails_on_13"}, "out": {"gather": 0, "of": "y"}},
        "outputs": {"out": "out.npy"},
    }
    with pytest.raises(pipedist.CallError):
        pipedist.run(spec, workers=2, output=tmp_path)
    data = collect(tmp_path)
    assert data["state"] == "failed"
    assert "KeyError: 'thirteen'" in data["failure"]
    assert data["processes"][0]["stages"][0]["failed"] >= 1
    assert data["outputs"] == []
    page(data)


@pytest.mark.asyncio
async def test_a_running_run_has_a_report_and_so_has_an_interrupted_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    async with (
        pipedist.open(waiting(tmp_path), workers=1, output=path) as run,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(run.results)
        await until(lambda: any(path.glob(".pipedist/timings/*")))
        data = await anyio.to_thread.run_sync(collect, path)
        assert data["state"] == "running"
        assert data["status"]["workers"]["ready"] == 1
        tasks.cancel_scope.cancel()
    data = collect(path)
    assert data["state"] == "interrupted"
    page(data)


def test_many_calls_make_a_small_page(tmp_path: Path, job: Path) -> None:
    """200,000 calls in as many spans as are kept at most: below 5 MiB."""
    spans = np.zeros(131_072, SPAN)
    rng = np.random.default_rng(0)
    spans["worker"] = rng.integers(0, 8, len(spans))
    spans["started"] = np.sort(rng.integers(0, 10**12, len(spans)))
    spans["finished"] = spans["started"] + rng.integers(10**5, 10**7, len(spans))
    spans["calls"] = spans["merged"] = 2
    names = [f"w{n}" for n in range(8)]
    measured = Measured(
        1,
        "r",
        "many",
        0.0,
        1000.0,
        True,
        1.0,
        1,
        1,
        [("y", ["y"], 0)],
        names,
        [],
        [],
        "",
        [],
        [],
        spans.tobytes(),
    )
    private = tmp_path / ".pipedist"
    private.mkdir()
    (private / "run.json").write_bytes((job / ".pipedist/run.json").read_bytes())
    write_timings(private / "timings", 1, measured)
    text = page(collect(tmp_path))
    assert len(text) < 5 * 2**20
    assert len(text) > 500_000, "the timeline still has its detail"


ABBREVIATED = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"}
NOT_BASE = {
    "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "bits", "kilobytes", "megabytes",
    "mebibytes", "percent", "fahrenheit",
}  # fmt: skip


def test_metrics_pass_the_rules_of_promlint(job: Path) -> None:
    """Those of `promtool check metrics`."""
    from prometheus_client.parser import text_string_to_metric_families

    data = collect(job)
    process = data["processes"][0]
    process["stages"] *= 2  # two passes with the same name, in two phases
    text = exposition(data)
    families = list(text_string_to_metric_families(text))
    assert len(families) > 10
    for family in families:
        name = family.name  # the parser removes `_total`
        assert family.documentation, "metrics have help"
        assert re.fullmatch("pipedist(_[a-z]+)+", name), "without colons and camel case"
        words = set(name.split("_"))
        assert not words & {
            "counter",
            "gauge",
            "histogram",
            "summary",
            "total",
            "count",
            "sum",
            "bucket",
            "info",
        }
        assert not words & (ABBREVIATED | NOT_BASE), "units are base units in full"
        assert words.isdisjoint({"seconds", "bytes"}) or name.endswith(("_seconds", "_bytes"))
        assert all(each.name.endswith("_total") == (family.type == "counter") for each in family.samples)
    samples = [(each.name, *sorted(each.labels.items())) for family in families for each in family.samples]
    assert len(samples) == len(set(samples))
    calls = next(family.samples for family in families if family.name == "pipedist_calls")
    assert [each.value for each in calls] == [2 * process["stages"][0]["calls"]]


def test_the_command_writes_the_page_into_the_folder_of_its_run(job: Path, tmp_path: Path) -> None:
    run = tmp_path / "out"
    shutil.copytree(job, run)
    before = sorted(path.name for path in run.iterdir())
    done = run_module("pipedist", "report", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "out/report.html\n"), done.stderr
    assert sorted(path.name for path in run.iterdir()) == sorted([*before, "report.html"])
    assert run_module("pipedist", "diff", job, "out", cwd=tmp_path).returncode == 0, "it is no result"


def test_the_command_writes_the_page_where_it_is_told(job: Path, tmp_path: Path) -> None:
    done = run_module("pipedist", "report", job, "-o", "r.html", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "r.html\n"), done.stderr
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    missing = run_module("pipedist", "report", tmp_path / "nowhere", cwd=tmp_path)
    assert missing.returncode == 2
    assert "there is no run in" in missing.stderr
    unwritable = run_module("pipedist", "report", job, "-o", "no/where/r.html", cwd=tmp_path)
    assert unwritable.returncode == 2
    assert "can't write no/where/r.html" in unwritable.stderr


def test_a_damaged_file_is_named(job: Path, tmp_path: Path) -> None:
    private = tmp_path / ".pipedist"
    private.mkdir()
    (private / "run.json").write_bytes((job / ".pipedist/run.json").read_bytes())
    (private / "about.json").write_text("{")
    with pytest.raises(UsageError, match=r"about\.json can't be read"):
        collect(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("a.npy", np.arange(1000.0), "array"),
        ("b.npy", np.array(3), "array"),
        ("c.npy", np.array(["x", "y"]), "array"),
        ("d.npy", np.full(10, np.nan), "array"),
        ("e.npy", np.zeros((0, 3)), "array"),
    ],
)
def test_arrays_have_a_preview(tmp_path: Path, name: str, value: Any, kind: str) -> None:
    np.save(tmp_path / name, value)
    found = preview(tmp_path / name)
    assert found is not None
    assert (found["kind"], found["shape"]) == (kind, list(value.shape))
    assert ("histogram" in found) == (name == "a.npy")
    json.dumps(found, allow_nan=False)


def test_tables_have_a_preview_of_their_first_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"id": {n}, "tags": [{n}]}}\n' for n in range(100)))
    found = preview(tmp_path / "a.jsonl")
    assert found is not None
    assert found["names"] == ["id", "tags"]
    assert len(found["rows"]) == 10
    (tmp_path / "b.jsonl").write_text("not json\n")
    damaged = preview(tmp_path / "b.jsonl")
    assert damaged is not None
    assert damaged["text"].startswith("no preview: ")
    assert preview(tmp_path / "a.bin") is None
