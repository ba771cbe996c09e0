"""The specs and examples that train: on real data, beside scikit-learn, the same on any cluster."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import pipedist

ROOT = Path(__file__).parents[2]


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.iterdir() if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


def run(name: str, folder: Path, **options: Any) -> pipedist.Result:
    return pipedist.run(ROOT / "specs" / f"{name}.yaml", output=folder, **options)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    result = run("digits", folder, workers=1)
    assert result.ledger == pipedist.Ledger(20 * 1797, 20 * 1797, 0, 0)
    return folder


def test_digits_are_recognised(digits: Path) -> None:
    accuracy = np.loadtxt(digits / "accuracy.csv", skiprows=1)
    assert len(accuracy) == 20
    assert accuracy[-1] >= 0.95
    assert accuracy[0] < accuracy[-1]
    with np.load(digits / "steps.npz") as steps:
        assert steps["rows"][:23].tolist() == [64] * 22 + [1434 - 22 * 64], "the last batch is partial"
        loss = (steps["loss"] / steps["rows"]).reshape(20, 23).mean(axis=1)
    assert loss[-1] < 0.1 < loss[0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_digits_are_the_same_on_any_number_of_workers(digits: Path, workers: int, tmp_path: Path) -> None:
    run("digits", tmp_path, workers=workers)
    assert digests(tmp_path) == digests(digits)


@pytest.mark.slow
def test_digits_are_the_same_with_workers_killed(digits: Path, tmp_path: Path) -> None:
    killed: list[int] = []
    kills = {3: ("w1",), 100: ("w0", "w1"), 300: ("w0",)}

    async def main() -> None:
        async with pipedist.LocalCluster(workers=2) as cluster:
            spec = ROOT / "specs" / "digits.yaml"
            async with pipedist.open(spec, cluster=cluster, output=tmp_path) as opened:
                async for step in opened.steps("sums"):
                    await cluster.ready()
                    async with anyio.create_task_group() as tasks:
                        for worker in kills.get(step.index, ()):
                            killed.append(cluster.pids[worker])
                            tasks.start_soon(cluster.restart, worker)
                await opened.results()

    anyio.run(main)
    assert len(set(killed)) == 4
    assert digests(tmp_path) == digests(digits)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_kmeans_finds_the_centroids_of_scikit_learn(workers: int, tmp_path: Path) -> None:
    from sklearn.cluster import KMeans
    from sklearn.datasets import load_iris

    result = run("kmeans", tmp_path, workers=workers)
    rows = load_iris().data
    peer = KMeans(3, init=rows[::50], n_init=1, algorithm="lloyd", tol=0).fit(rows)
    found = np.load(tmp_path / "centroids.npy")
    np.testing.assert_allclose(found, peer.cluster_centers_, rtol=0, atol=1e-6)
    iterations = (tmp_path / "clusters.jsonl").read_text().splitlines()
    assert len(iterations) < 100, "it has converged"
    assert result.ledger.elements == 150 * len(iterations)
    assert result.ledger.lost == 0
    single = tmp_path / "single"
    run("kmeans", single, workers=1)
    assert digests(single) == digests(tmp_path)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_step_is_normalised_as_a_whole(workers: int, tmp_path: Path) -> None:
    run("batch_norm", tmp_path, workers=workers)
    rows = np.load(tmp_path / "rows.npy")
    x = np.sqrt(np.arange(1003.0))
    expected = [(step - step.mean()) / step.std() for step in np.split(x, range(100, 1003, 100))]
    np.testing.assert_allclose(rows, np.concatenate(expected), rtol=0, atol=1e-8)


def test_regression_finds_the_weights(tmp_path: Path) -> None:
    result = run("regression", tmp_path, workers=2)
    np.testing.assert_allclose(np.load(tmp_path / "weights.npy"), [1.0, -2.0, 0.5], atol=0.01)
    assert np.loadtxt(tmp_path / "error.csv", skiprows=1)[-1] < 2e-4
    assert result.ledger.lost == 0


@pytest.mark.parametrize(
    ("example", "pattern"),
    [
        pytest.param(
            "digits.py", r"accuracy by epoch: 0\.\d{3}( 0\.\d{3}){18} 0\.9[5-9]\d\n", marks=pytest.mark.slow
        ),
        ("kmeans.py", r"4 iterations, within \de-1\d of scikit-learn's centroids\n"),
        ("embedded.py", r"(above \d\.0: \d+ of 100000, by step \[.*\]\n){3}"),
    ],
)
def test_the_examples_of_the_embedded_api(example: str, pattern: str) -> None:
    path = ROOT / "examples" / example
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(pattern, done.stdout), done.stdout
    assert example == "embedded.py" or len(path.read_text().splitlines()) < 40
