"""Datasets of Hugging Face, compared with what `datasets` returns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import pipedist
from pipedist.datasets.element import described
from pipedist.datasets.sources import Source, SourceError, open_source
from pipedist.testing import check_source
from tests.datasets.sources.reading import read_elsewhere
from tests.datasets.sources.test_reader_classes import ByIds

pytestmark = pytest.mark.slow  # `datasets` takes seconds to import, here and in each worker
R = "tests.datasets.sources.sample_readers"


def test_a_saved_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install 'pipedist[huggingface]'")
    rows = {
        "text": [f"review {n}" for n in range(50)],
        "score": [n / 3 for n in range(50)],
        "label": [n % 2 for n in range(50)],
        "tokens": [list(range(n % 4)) for n in range(50)],
    }
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "score": datasets.Value("float32"),
            "label": datasets.ClassLabel(names=["bad", "good"]),
            "tokens": datasets.Sequence(datasets.Value("int32")),
        }
    )
    whole = datasets.Dataset.from_dict(rows, features=features).shuffle(seed=1)
    datasets.DatasetDict(
        {"train": whole.select(range(40)), "test": whole.select(range(40, 50))}
    ).save_to_disk(tmp_path / "reviews", num_proc=None)

    def make(**config: object) -> Source:
        return open_source("huggingface", {"path": "reviews", "split": "train", **config}, folder=tmp_path)

    source = make()
    assert (source.length, bool(source.fingerprint)) == (40, True)
    assert described(source.element_spec) == "{label: int64, score: float32, text: str, tokens: object}"
    for ids in (range(40), range(3, 9), np.array([39, 0, 7, 7]), range(0)):
        shard = read_elsewhere(source, ids)
        want = whole.select(range(40))[np.asarray(ids, int).tolist()] if len(ids) else {"text": []}
        assert shard["text"].tolist() == want["text"]
        if len(ids):
            assert shard["label"].tolist() == want["label"]
            assert shard["score"].tolist() == want["score"]
            assert [each.tolist() for each in shard["tokens"]] == want["tokens"]
    check_source(ByIds(make(columns=["text"])), make=lambda: ByIds(make(columns=["text"])))
    for config, message in (
        ({"split": "trian"}, "reviews has no split 'trian'"),
        ({"columns": ["txt"]}, "reviews has no column 'txt'"),
        ({"split": None}, "reviews has the splits train, test"),
        ({"path": "nowhere/such"}, "nowhere/such: can't be loaded: "),
    ):
        with pytest.raises(SourceError, match=message):
            make(**config)
    spec = tmp_path / "s.yaml"
    spec.write_text(json.dumps({
        "pipedist": 1,
        "dataset": {"huggingface": {"path": "reviews", "split": "test", "columns": ["score"]}, "batch": 3},
        "stages": {"read": {"run": f"{R}:numbers"}, "sum": {"reduce": "sum", "of": "read", "axis": 0}},
    }))  # fmt: skip
    result = pipedist.run(spec, workers=2)
    assert result["sum"]["score"] == pytest.approx(sum(whole.select(range(40, 50))["score"]), rel=1e-5)
