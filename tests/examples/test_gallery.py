"""The jobs of the gallery, at reduced size, against answers that know nothing of pipedist."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import pipedist

EXAMPLES = Path(__file__).parents[2] / "examples"


class Job:
    """A copy of an example, without its data."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder / name
        shutil.copytree(EXAMPLES / name, self.folder, ignore=shutil.ignore_patterns("data", "__pycache__"))
        self.output = folder / "out"
        self.name = name

    def module(self, name: str) -> ModuleType:
        found = importlib.util.spec_from_file_location(
            f"gallery_{self.name}_{name}", self.folder / f"{name}.py"
        )
        assert found
        assert found.loader
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        return module

    def run(self, **params: Any) -> pipedist.Result:
        spec = next(self.folder.glob("*.yaml"))
        return pipedist.run(spec, workers=2, params=params, output=self.output, progress=False)

    def rows(self, name: str) -> list[dict[str, str]]:
        with (self.output / name).open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    modules = set(sys.modules)
    made = Job(request.param, tmp_path)
    path = list(sys.path)
    yield made
    sys.path[:] = path  # each example has a module of its own name
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("job", ["words"], indirect=True)
def test_word_statistics(job: Job) -> None:
    job.module("data").main(12)
    job.run()
    lines = [
        line for path in sorted((job.folder / "data").glob("*.txt")) for line in path.read_text().splitlines()
    ]
    split = [
        "".join(c if c.isascii() and (c.isalpha() or c == "'") else " " for c in x.lower()).split()
        for x in lines
    ]
    words = [[word.strip("'") for word in line if word.strip("'")] for line in split]
    plain = {w for line in words for w in line if w.isalpha()}
    counted = {row["value"]: int(row["count"]) for row in job.rows("count.csv")}
    truth = Counter(word for line in words for word in line)
    assert len(plain) > 200
    assert {w: counted[w] for w in plain} == {w: truth[w] for w in plain}
    pairs = {row["value"]: int(row["count"]) for row in job.rows("pairs.csv")}
    assert pairs["of the"] > 5
    assert sum(counted.values()) == sum(json.loads((job.output / "by_length.json").read_text()))


@pytest.mark.parametrize("job", ["sweep"], indirect=True)
def test_hyper_parameters(job: Job) -> None:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.svm import SVC

    job.run(folds=3, costs=[1], gammas=[0.1, 0.3])
    images, labels = load_digits(return_X_y=True)
    for gamma in (0.1, 0.3):
        folds = StratifiedKFold(3, shuffle=True, random_state=0)
        wanted = cross_val_score(SVC(C=1, gamma=gamma), images / 16, labels, cv=folds)
        (row,) = (row for row in job.rows("scores.csv") if row["key"] == f"C=1 gamma={gamma:g}")
        assert float(row["mean"]) == pytest.approx(wanted.mean(), rel=1e-12)
        assert float(row["min"]) == pytest.approx(wanted.min(), rel=1e-12)


@pytest.mark.parametrize("job", ["llm"], indirect=True)
def test_evaluation_of_a_model(job: Job) -> None:
    server, questions = job.module("server"), job.module("questions")
    with server.Server(("127.0.0.1", 0), server.Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            result = job.run(count=60, url=f"http://127.0.0.1:{serving.server_address[1]}/v1/answer")
        finally:
            serving.shutdown()
            thread.join()
    asked = questions.load(60)
    answers = [json.loads(line) for line in (job.output / "answers.jsonl").read_text().splitlines()]
    refused = [k for k, prompt in enumerate(asked["prompt"]) if "password" in prompt]
    assert len(refused) == 2
    assert result.ledger.quarantined == 2
    kept = [k for k in range(60) if k not in refused]
    assert [row["prompt"] for row in answers] == [asked["prompt"][k] for k in kept]
    right = [server.answer(asked["prompt"][k]) == f"It is {asked['expected'][k]}." for k in kept]
    assert [row["correct"] for row in answers] == right
    for row in job.rows("accuracy.csv"):
        mine = [ok for k, ok in zip(kept, right, strict=True) if asked["category"][k] == row["key"]]
        assert float(row["mean"]) == pytest.approx(np.mean(mine), rel=1e-12)


@pytest.mark.parametrize("job", ["filetypes"], indirect=True)
def test_inference_with_an_onnx_model(job: Job) -> None:
    from magika import Magika

    job.module("data").main(3)
    job.run()
    network = Magika()
    files = sorted((job.folder / "data").iterdir())
    assert len(files) > 20
    rows = job.rows("types.csv")
    assert [row["file"] for row in rows] == [path.name for path in files]
    assert [row["found"] for row in rows] == [str(network.identify_path(path).output.label) for path in files]


@pytest.mark.parametrize("job", ["climate"], indirect=True)
def test_climate_statistics(job: Job) -> None:
    import zarr

    job.module("data").main(years=4, rows=4, columns=6)
    job.run()
    group = zarr.open_group(job.folder / "data" / "climate.zarr", mode="r")
    air, day = np.asarray(group["temperature"][:], np.float64), np.asarray(group["day"][:])
    months = np.array(
        [int(m) for m in (np.datetime64("2001-01-01") + day % 365).astype("datetime64[M]").astype(int) % 12]
    )
    normals = np.stack([air[months == month].mean(axis=0) for month in range(12)])
    np.testing.assert_allclose(np.load(job.output / "normals.npy"), normals, rtol=1e-9)
    anomaly = (air - normals[months]).reshape(len(day), -1)
    slopes = np.polyfit(day / 3650, anomaly, 1)[0].reshape(4, 6)
    np.testing.assert_allclose(np.load(job.output / "trend.npy"), slopes, rtol=1e-6)


@pytest.mark.parametrize("job", ["images"], indirect=True)
def test_features_of_images(job: Job) -> None:
    from PIL import Image

    job.module("data").main(10)
    job.run()
    found = np.load(job.output / "features.npz")
    files = sorted((job.folder / "data").glob("*/*.png"))
    assert found["label"].tolist() == [path.parent.name for path in files]
    for index, path in enumerate(files):
        image = Image.open(path)
        assert found["histogram"][index].sum() == 3 * 32 * 32
        assert found["colour"][index] == pytest.approx([np.asarray(band).mean() for band in image.split()])
        wide = np.asarray(image.convert("L"), np.int64)
        around = sum(np.roll(wide, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1))
        edges = np.clip(9 * wide - around, 0, 255)[1:-1, 1:-1]
        assert found["edges"][index] == pytest.approx(edges.mean())
