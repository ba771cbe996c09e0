"""The benchmarks measure what they say: every workload, tiny, through pipedist; no timing is judged."""

from __future__ import annotations

import importlib
import json
import operator
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import call_profile, functions, goals, limits, pages, report, worker_profile, workloads
from benchmarks.adapter import Adapter, Take
from benchmarks.data import make_data
from benchmarks.one import MARK
from benchmarks.pipedist_adapter import Pipedist
from benchmarks.sizes import SMOKE
from benchmarks.systems import SUBJECT, SYSTEMS
from benchmarks.workloads import WORKLOADS, WrongResult

ROOT = Path(functions.__file__).parent.parent
ANSWERED = SYSTEMS[SUBJECT].answers


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), SMOKE)


@pytest.fixture(scope="module")
def system() -> Iterator[Pipedist]:
    started = Pipedist()
    started.start()
    yield started
    started.stop()


@pytest.mark.parametrize("name", ANSWERED)
def test_workload_on_pipedist(name: str, system: Pipedist, data: Path) -> None:
    if name == "FP":
        pytest.importorskip("pyarrow")
    assert WORKLOADS[name].measure(system, SMOKE, data).value > 0


@pytest.mark.parametrize("name", ["pool", "executor", "zmq", "zmq-asyncio", "single"])
def test_peers_that_need_nothing_else(name: str, data: Path) -> None:
    """In a process of their own, as `run` measures them: they fork."""
    pytest.importorskip("pyarrow")
    for workload in sorted({"W3", "W8", "FN"} & {*SYSTEMS[name].answers}):
        command = [sys.executable, "-m", "benchmarks.one", name, workload, "--smoke", "--data", str(data)]
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
        result = json.loads(out.splitlines()[-1].removeprefix(MARK))
        assert result["outcome"] == "", workload
        assert result["value"] > 0


@pytest.mark.parametrize("name", [name for name in limits.LIMITS if not name.startswith("imports")])
def test_limits(name: str) -> None:
    """In a process of their own: they fork."""
    command = [sys.executable, "-m", "benchmarks.limits", "--smoke", name]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(out)["value"] > 0


@pytest.mark.parametrize("place", [*call_profile.PARTS, *worker_profile.PARTS])
def test_what_the_profile_wraps_is_there(place: str) -> None:
    module_name, _, path = place.removeprefix("async ").partition(":")
    operator.attrgetter(path)(importlib.import_module(module_name))


class Liar(Adapter):
    """Gives back wrong results."""

    def calls(self, fn: object, count: int) -> list[int]:
        return list(range(count, 0, -1))

    def stream(self, fn: object, batches: np.ndarray, *, ordered: bool, take: Take) -> None:
        for index, batch in enumerate(batches):
            take(index, batch * 3 if ordered else float(batch.sum()) + 1)

    def steps(self, count: int, make: object) -> list[float]:
        return [0.0] * count


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W8"])
def test_a_wrong_result_is_no_measurement(name: str, data: Path) -> None:
    with pytest.raises(WrongResult):
        WORKLOADS[name].measure(Liar(), SMOKE, data)


def record(system: str, workload: str, value: float | None, outcome: str = "") -> report.Record:
    return {"system": system, "workload": workload, "value": value, "outcome": outcome, "detail": {}}


def test_goals_are_ratios_of_medians() -> None:
    records = [
        *(record(SUBJECT, "W1", v) for v in (40_000.0, 60_000.0, 50_000.0)),
        *(record("pool", "W1", v) for v in (9_000.0, 10_000.0, 11_000.0)),
        record("executor", "W1", 4_000.0),
        record("zmq", "W1", 1e9),  # no engine: not the best peer
        record("loky", "W1", None, "hangs"),
    ]
    medians = report.medians_of(report.collect(records))
    assert goals.best_peer(medians, "W1") == ("pool", 10_000.0)
    goal = next(g for g in goals.GOALS if g.workload == "W1")
    assert (goal.bound(medians), goal.is_met(medians)) == (50_000.0, True)
    assert goal.is_met({**medians, (SUBJECT, "W1"): 49_999.0}) is False
    assert goal.is_met({}) is None
    text = report.markdown(records)
    assert "hangs" in text
    assert "| yes" in text


def test_a_lower_time_is_better() -> None:
    medians = {("loky", "W5"): 0.6, ("pool", "W5"): 0.1, (SUBJECT, "W5"): 0.5, ("limit imports", ""): 0.3}
    assert goals.best_peer(medians, "W5") == ("pool", 0.1)
    met = [goal.is_met(medians) for goal in goals.GOALS if goal.workload == "W5"]
    assert met == [True, False]


def test_every_goal_names_what_is_measured() -> None:
    for goal in goals.GOALS:
        assert goal.workload in WORKLOADS
        assert goal.workload in ANSWERED
        if goal.of.startswith("limit "):
            assert goal.of.removeprefix("limit ") in limits.FOR_WORKLOAD[goal.workload]
        elif goal.of not in (goals.BEST_PEER, goals.NOTHING):
            assert (goal.at or goal.workload) in SYSTEMS[goal.of].answers


def test_docs_are_written_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_section(page, "new")
    assert page.read_text() == f"before\n{report.BEGIN}\n\nnew\n{report.END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no section"):
        report.write_section(page, "new")


def test_the_pages_have_the_ratios_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in (("USER_PAGE", pages.USER_PAGE), ("METHOD_PAGE", pages.METHOD_PAGE)):
        assert report.BEGIN in path.read_text()
        (tmp_path / name).write_text(f"{report.BEGIN}\n{report.END}\n")
        monkeypatch.setattr(pages, name, tmp_path / name)
    monkeypatch.setattr(pages, "CHART", tmp_path / "chart.svg")
    monkeypatch.setattr(
        pages.Release, "read", lambda: pages.Release("0.1", "", "old", "m", {"W1": 40_000.0, "W5": 0.6})
    )
    records = [
        {"environment": {"date": "today", "commit": "new", "machine": "m"}},
        *(record(SUBJECT, name, value) for name, value in (("W1", 50_000.0), ("W5", 0.5))),
        *(record("pool", name, value) for name, value in (("W1", 10_000.0), ("W5", 0.1))),
        {"limit": "zmq-messages", "value": 200_000.0},
    ]
    pages.publish(records)
    found = [
        [cell.strip() for cell in line.split("|")]
        for line in (tmp_path / "USER_PAGE").read_text().splitlines()
    ]
    (first,) = [cells for cells in found if cells[1:] and cells[1].startswith("W1:")]
    assert first[2:7] == ["50,000 calls/s", "pool: 10,000", "5.00", "0.25", "1.25"]
    (cold,) = [cells for cells in found if cells[1:] and cells[1].startswith("W5:")]
    assert (cold[4], cold[6]) == ("0.20", "1.20"), "less time is better"
    assert "### All systems" in (tmp_path / "METHOD_PAGE").read_text()
    bars = [
        each.get("class") for each in ElementTree.parse(tmp_path / "chart.svg").iter() if each.get("height")
    ]
    assert bars == ["better", "slower"]


def test_the_published_release_has_workloads_that_there_are() -> None:
    assert set(pages.Release.read().medians) <= set(WORKLOADS)


def test_growth_counts_only_what_was_right() -> None:
    class Forgetful(Adapter):
        def summed_calls(self, fn: object, count: int) -> int:
            return count * (count + 1) // 2 - (count > SMOKE.growth[0])

    with pytest.raises(WrongResult, match="400"):
        workloads.WORKLOADS["W6"].measure(Forgetful(), SMOKE, Path())
