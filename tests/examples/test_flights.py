"""The demo's results against NumPy's answer on all 336,776 rows."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FLIGHTS = ROOT / "examples" / "flights"


@pytest.fixture(scope="module")
def columns() -> dict[str, np.ndarray]:
    """Read the file with Python's csv module, knowing nothing of pipedist."""
    subprocess.run([sys.executable, str(FLIGHTS / "fetch.py")], check=True, timeout=60)
    with zipfile.ZipFile(FLIGHTS / "data" / "flights.csv.zip") as archive:
        text = io.TextIOWrapper(archive.open(archive.namelist()[0]), "utf-8", newline="")
        rows = list(csv.DictReader(text))

    def numbers(name: str) -> np.ndarray:
        return np.array([float(r[name]) if r[name] not in ("", "NA") else np.nan for r in rows], np.float32)

    return {
        "carrier": np.array([r["carrier"] for r in rows]),
        "arr_delay": numbers("arr_delay"),
        "dep_delay": numbers("dep_delay"),
        "distance": numbers("distance"),
    }


@pytest.fixture(scope="module")
def output(columns: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flights") / "out"
    command = [sys.executable, "-m", "pipedist", "run", str(FLIGHTS / "flights.yaml"), "--json"]
    done = subprocess.run(
        [*command, "--workers", "2", "--output", str(folder)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ledger"] == {"elements": 336_776, "committed": 336_776, "quarantined": 0, "lost": 0}
    assert Path(document["results"]["minutes"]["file"]) == folder / "minutes.npy"
    return folder


def test_the_data_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes may look for it while it is extracted; and that may be interrupted."""
    found = importlib.util.spec_from_file_location("fetch", FLIGHTS / "fetch.py")
    assert found
    assert found.loader
    fetch = importlib.util.module_from_spec(found)
    found.loader.exec_module(fetch)
    monkeypatch.setattr(fetch, "TARGET", tmp_path / "data" / "flights.csv.zip")
    package = tmp_path / "package.tar.gz"
    with tarfile.open(package, "w:gz") as archive:
        archive.add(FLIGHTS / "flights.yaml", "package-1/package/data/flights.csv.zip")

    def interrupted(_source: object, target: io.BufferedWriter) -> None:
        target.write(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch.shutil, "copyfileobj", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch.unpack(package)
    assert not fetch.TARGET.exists()
    fetch.unpack(package)
    assert fetch.TARGET.read_bytes() == (FLIGHTS / "flights.yaml").read_bytes()


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_statistics_per_carrier(columns: dict[str, np.ndarray], output: Path) -> None:
    found = read_json(output / "carriers.json")
    assert sorted(found) == sorted(set(columns["carrier"].tolist()))
    for carrier, moments in found.items():
        delays = columns["arr_delay"][columns["carrier"] == carrier].astype(np.float64)
        known = delays[~np.isnan(delays)]
        assert moments["count"] == len(known)
        assert moments["missing"] == len(delays) - len(known)
        assert moments["mean"] == pytest.approx(known.mean(), rel=1e-12)
        assert moments["m2"] / len(known) == pytest.approx(known.var(), rel=1e-11)
        assert (moments["min"], moments["max"]) == (known.min(), known.max())
    assert sum(m["missing"] for m in found.values()) == 9_430


def test_totals_over_the_data_set(columns: dict[str, np.ndarray], output: Path) -> None:
    delay = columns["arr_delay"]
    assert read_json(output / "totals.json") == {
        "flights": 336_776,
        "missing": 9_430,
        "late": int(np.count_nonzero(delay > 15)),
        "delay_min": float(np.nansum(delay, dtype=np.float64)),
        "miles": float(np.sum(columns["distance"], dtype=np.float64)),
    }


def test_the_gathered_column(columns: dict[str, np.ndarray], output: Path) -> None:
    minutes = np.load(output / "minutes.npy")
    expected = columns["dep_delay"] - columns["arr_delay"]
    assert minutes.dtype == np.float32
    assert np.array_equal(minutes, expected, equal_nan=True)
