"""Output folders behind URLs, with the file systems that fsspec has itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.errors import OutputError, UsageError
from pipedist.outputs.remote_folder import MANIFEST, RemoteFolder

fsspec = pytest.importorskip("fsspec", reason="needs fsspec: make install")

SPEC: dict[str, Any] = {
    "pipedist": 1,
    "name": "remote",
    "dataset": {"range": 10, "batch": 5},
    "stages": {
        "rows": {"gather": 0, "of": "dataset"},
        "table": {"gather": 0, "of": "dataset"},
        "total": {"reduce": "sum", "of": "dataset", "axis": 0},
    },
    "outputs": {"rows": "deep/rows.npy", "table": "table.parquet/", "total": "total.json"},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    fsspec.filesystem("memory").store.clear()


def files_of(url: str) -> dict[str, bytes]:
    system, root = fsspec.core.url_to_fs(url)
    return {name.removeprefix(root).lstrip("/"): system.cat_file(name) for name in system.find(root)}


@pytest.mark.slow
def test_outputs_appear_behind_a_url_when_they_are_complete(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket/run"
    result = pipedist.run(SPEC, workers=1, output=url)
    assert np.load(result["rows"]).tolist() == list(range(10))
    found = files_of(url)
    manifest = json.loads(found.pop(MANIFEST))
    assert sorted(found) == ["deep/rows.npy", "table.parquet/part-00000.parquet", "total.json"]
    assert found["total.json"] == b"45\n"
    assert manifest == {
        "run": result.run_id,
        "complete": True,
        "files": {name: len(data) for name, data in found.items()},
    }
    other = {**SPEC, "outputs": {"total": "sum.json"}}
    pipedist.run(other, workers=1, output=url)
    assert sorted(files_of(url)) == [MANIFEST, "sum.json"]


def test_an_upload_that_failed_is_continued_by_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    system = fsspec.filesystem("memory")
    put, sent = type(system).put_file, []

    def put_file(self: Any, local: str, remote: str, **options: Any) -> None:
        sent.append(remote.rpartition("/")[2])
        if len(sent) == 2:
            raise ConnectionError("the network is down")
        put(self, local, remote, **options)

    monkeypatch.setattr(type(system), "put_file", put_file)
    with pytest.raises(OutputError, match=r"can't upload to memory://run: ConnectionError: .* with --resume"):
        pipedist.run(SPEC, workers=1, output="memory://run")
    assert json.loads(files_of("memory://run")[MANIFEST])["complete"] is False
    result = pipedist.run(SPEC, workers=1, output="memory://run", resume=True)
    assert sent == ["rows.npy", "part-00000.parquet", "part-00000.parquet", "total.json"]
    found = files_of("memory://run")
    assert json.loads(found[MANIFEST])["complete"] is True
    assert found["deep/rows.npy"] == result["rows"].read_bytes()
    pipedist.run(SPEC, workers=1, output="memory://run", resume=True)
    assert len(sent) == 4


def test_folders_that_pipedist_did_not_write_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/data.csv").write_text("x")
    with pytest.raises(UsageError, match="is not empty and was not written by pipedist"):
        RemoteFolder(f"file://{tmp_path}/mine")
    with pytest.raises(
        UsageError, match="can't use nothing://x as output folder: ValueError: Protocol not known"
    ):
        RemoteFolder("nothing://x")
    (tmp_path / f"mine/{MANIFEST}").write_text('{"files": {"../x": 1}}')
    with pytest.raises(UsageError, match="names a file outside of the folder"):
        RemoteFolder(f"file://{tmp_path}/mine")
