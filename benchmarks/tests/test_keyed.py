"""The jobs of `benchmarks.keyed` give the answers of plain Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import keyed
from benchmarks.keyed_systems.pipedist_jobs import Jobs


def test_pipedist_counts_and_groups_as_plain_python_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow", reason="an extra: pip install 'pipedist[parquet]'")
    monkeypatch.setattr(keyed, "DATA", tmp_path)
    monkeypatch.setattr(keyed, "LINES", 200)
    jobs = {title.partition(" ")[0]: path for title, _, path in keyed.jobs_of(0, 100)}
    keyed.write_text(text := tmp_path / "text.txt", 20_000)
    lines = text.read_text().splitlines()
    words = Counter(word for line in lines for word in line.split())
    pairs = Counter(pair for line in lines for pair in zip(line.split(), line.split()[1:]))  # noqa: B905
    with Jobs(2) as found:
        assert found.words(str(text)) == (len(words), words.total(), max(words.values()))
        assert found.bigrams(str(text)) == (len(pairs), pairs.total(), max(pairs.values()))
        keys, total, _ = found.group(str(jobs["group"]))
    assert 20 < keys <= 30
    assert 30 < total < 70
