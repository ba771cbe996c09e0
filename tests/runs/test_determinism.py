"""Law 1: the spec and the seed decide every bit; workers, timing and deaths never do."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

import pipedist

F = "tests.runs.functions"


def spec(run: Any, **with_: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "bits",
        "seed": 3,
        "replicas": 3,
        "dataset": {"range": 301, "batch": 11, "epochs": 2, "shuffle": True},
        "stages": {
            "y": {"run": run, "with": with_},
            "noise": {"run": f"{F}:noisy"},
            "parts": {"run": f"{F}:component"},
            "total": {"reduce": "sum", "of": "y", "axis": 0},
            "mean": {"reduce": "mean", "of": "y", "axis": 0, "per": "epoch"},
            "merged": {"reduce": f"{F}:merge", "of": "parts"},
            "rows": {"gather": 0, "of": "y"},
            "drawn": {"gather": 0, "of": "noise", "per": "epoch"},
            "again": {"run": f"{F}:plus", "of": "y", "with": {"amount": "${stages.total}"}},
            "later": {"gather": 0, "of": "again"},
        },
        "outputs": {
            "total": "total.json",
            "mean": "mean.csv",
            "merged": "merged.npz",
            "rows": "rows.npy",
            "drawn": "drawn.jsonl",
            "later": "later.npz",
        },
    }


def digests(folder: Path) -> dict[str, str]:
    files = [p for p in folder.iterdir() if p.is_file()]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def outputs(folder: Path, document: dict[str, Any], workers: int) -> dict[str, str]:
    result = pipedist.run(document, workers=workers, output=folder)
    assert result.ledger == pipedist.Ledger(602, 602, 0, 0)
    return digests(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outputs(tmp_path_factory.mktemp("one"), spec(f"{F}:jittered"), workers=1)


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_the_number_of_workers_and_the_timing_never_show(
    workers: int, reference: dict[str, str], tmp_path: Path
) -> None:
    assert len(reference) == 6
    assert outputs(tmp_path, spec(f"{F}:jittered"), workers) == reference


def test_killed_workers_never_show(reference: dict[str, str], tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    found = outputs(tmp_path / "out", spec(f"{F}:dies_once", folder=str(deaths)), workers=2)
    assert len(list(deaths.iterdir())) > 10
    assert found == reference


def test_the_seed_shows(reference: dict[str, str], tmp_path: Path) -> None:
    other = {**spec(f"{F}:jittered"), "seed": 4}
    found = outputs(tmp_path, other, workers=2)
    assert {n for n in found if found[n] == reference[n]} <= {"total.json", "mean.csv"}
