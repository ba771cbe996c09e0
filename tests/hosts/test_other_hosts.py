"""Runs with workers on another host, which lacks the code, and in some tests the data."""

from __future__ import annotations

import json
import os
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.coordinator.inbound import Inbound
from pipedist.datasets.sources.paths import is_visible
from pipedist.plan import compile_plan
from pipedist.plan.view import as_json
from pipedist.protocol import messages as msg
from pipedist.spec import load
from pipedist.transport.keys import write_key_file
from tests.hosts.dialled import needs_namespaces, worker

FUNCTIONS = """
import os, signal
from {name}_lib import deeper
def double(shard, ctx, died=""):
    if died and ctx.step == 3 and not os.path.exists(died):
        open(died, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    print("at", deeper.place())
    return shard * 2
"""


@dataclass(frozen=True)
class Project:
    """Modules beside a spec; their names are their own, as the driver's process imports them too."""

    folder: Path
    name: str

    def spec(self, run: str = "double", **with_: object) -> Path:
        text = {
            "pipedist": 1,
            "replicas": 2,
            "dataset": {"npy": {"path": "x.npy"}, "batch": 4},
            "stages": {
                "doubles": {"run": f"{self.name}_{run}", "with": with_},
                "all": {"gather": 0, "of": "doubles"},
            },
        }
        path = self.folder / "far.yaml"
        path.write_text(json.dumps(text))
        return path


@pytest.fixture
def project(tmp_path: Path) -> Project:
    it = Project(tmp_path / "code", f"far_{uuid.uuid4().hex[:8]}")
    library = it.folder / f"{it.name}_lib"
    library.mkdir(parents=True)
    (it.folder / f"{it.name}_functions.py").write_text(FUNCTIONS.format(name=it.name))
    (library / "__init__.py").write_text("")
    (library / "deeper.py").write_text("def place():\n    return __file__\n")
    (it.folder / f"{it.name}_broken.py").write_text(
        f"import {it.name}_large\ndef f(shard):\n    return shard\n"
    )
    (it.folder / f"{it.name}_large.py").write_text("#" * (2 << 20))
    (it.folder / f"{it.name}_opens.py").write_text(
        f"def f(shard):\n    return open({str(it.folder / 'x.npy')!r})\n"
        "def imports(shard):\n    import no_such_package\n"
    )
    np.save(it.folder / "x.npy", np.arange(40))
    write_key_file(tmp_path / "key")
    return it


def leftovers(tmp_path: Path) -> list[Path]:
    """Return the files in the temporary folder that `run_with` gives to its worker."""
    return list((tmp_path / "temporary").iterdir())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The passes whose data a worker on another host sees."""
    passes: list[int] = []
    handle = Inbound.handle

    def record(self: Inbound, peer: Any, message: msg.Message, frames: Any) -> None:
        if isinstance(message, msg.DataVisible):
            passes.append(message.pass_id)
        handle(self, peer, message, frames)

    monkeypatch.setattr(Inbound, "handle", record)
    return passes


async def run_with(tmp_path: Path, spec: Path, hidden: Path) -> tuple[pipedist.Result, str]:
    """Run with one worker that does not see a folder; return the result, and the worker's output."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary)}
    with ExitStack() as stack:
        try:
            async with pipedist.ConnectCluster(key_file=tmp_path / "key") as cluster:
                endpoint = cluster.coordinator.endpoint
                process = stack.enter_context(
                    worker(endpoint, tmp_path / "key", hidden=hidden, cwd=tmp_path, env=env)
                )
                async with pipedist.open(spec, cluster=cluster) as run:
                    result = await run.results()
        finally:
            _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        return result, said


@pytest.mark.asyncio
async def test_code_and_shards_travel_where_the_folder_is_not_there(
    tmp_path: Path, project: Project, seen: list[int]
) -> None:
    """Also after the worker process died: the copy is its supervisor's. Nothing of it is left at the end."""
    needs_namespaces()
    died = tmp_path / "died"
    spec = project.spec("functions:double", died=str(died))
    result, said = await run_with(tmp_path, spec, project.folder)
    assert np.array_equal(result["all"], np.arange(40) * 2)
    assert died.exists()
    assert "worker process ended: signal 9" in said
    assert seen == []
    assert leftovers(tmp_path) == []


@pytest.mark.asyncio
async def test_a_worker_that_sees_the_same_files_reads_them_and_uses_the_folder(
    tmp_path: Path, project: Project, seen: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    needs_namespaces()
    (tmp_path / "other").mkdir()
    result, _ = await run_with(tmp_path, project.spec("functions:double"), tmp_path / "other")
    assert np.array_equal(result["all"], np.arange(40) * 2)
    assert seen, "another mount namespace is another host, but the files are the same"
    assert f"at {project.folder}/{project.name}_lib/deeper.py" in capfd.readouterr().err


@pytest.mark.asyncio
async def test_a_missing_import_names_module_worker_and_sent_files(tmp_path: Path, project: Project) -> None:
    needs_namespaces()
    with pytest.raises(pipedist.CallError) as caught:
        await run_with(tmp_path, project.spec("broken:f"), project.folder)
    told = str(caught.value)
    assert f"it needs the module '{project.name}_large'" in told
    assert f"this is worker {os.uname().nodename}:" in told
    assert f"was sent: {project.folder} (" in told
    assert f"without {project.name}_large.py (2.0 MiB)" in told
    assert leftovers(tmp_path) == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("function", "error", "advice"),
    [
        ("opens:f", "FileNotFoundError", "files that a function opens itself must exist there too"),
        (
            "opens:imports",
            "No module named 'no_such_package'",
            "packages that a function imports must be installed there too",
        ),
    ],
)
async def test_files_that_a_function_opens_are_not_sent(
    tmp_path: Path, project: Project, function: str, error: str, advice: str
) -> None:
    needs_namespaces()
    with pytest.raises(pipedist.CallError) as caught:
        await run_with(tmp_path, project.spec(function), project.folder)
    told = str(caught.value)
    assert error in told
    assert f"this is worker {os.uname().nodename}:" in told
    assert advice in told


def test_the_plan_shows_which_workers_read_each_dataset(project: Project, tmp_path: Path) -> None:
    import gzip

    (project.folder / "packed.csv.gz").write_bytes(gzip.compress(b"n\n1\n2\n"))
    spec: dict[str, object] = {
        "pipedist": 1,
        "cluster": {"launcher": "connect", "listen": "tcp://127.0.0.1:0", "key_file": str(tmp_path / "key")},
        "datasets": {
            "own": {"arrays": np.arange(4), "batch": 2},
            "seen": {"npy": {"path": f"{project.folder}/x.npy"}, "batch": 2},
            "numbers": {"range": 4, "batch": 2},
            "packed": {
                "csv": {"path": f"{project.folder}/packed.csv.gz", "columns": {"n": "int64"}}, "batch": 2,
            },
            "whole": {"files": {"path": f"{project.folder}/*.npy"}, "batch": 2},
        },
        "stages": {
            f"s_{name}": {"gather": 0, "of": name} for name in ("own", "seen", "numbers", "packed")
        } | {"w": {"run": len, "of": "whole"}},
    }  # fmt: skip
    plan = compile_plan(load(spec), workers=2)
    try:
        delivery = {name: found["delivery"] for name, found in as_json(plan)["datasets"].items()}
        visible = {
            name for name, source in plan.sources.items() if source.config and is_visible(source.config)
        }
        assert visible == {"seen", "numbers"}, "here all files are; but not all would be elsewhere"
    finally:
        plan.close()
    assert delivery == {
        "own": "shards are sent to the workers: they are in this process's memory",
        "seen": "workers that see the same files (path, size, time of change) read their own shards; "
        "other workers receive theirs",
        "numbers": "workers read their own shards",
        "packed": "workers on this host read their own shards; other workers receive theirs: they are compressed, "
        "and were unpacked on this host",
        "whole": "workers on this host read their own shards; other workers receive theirs: files that are "
        "elements are read one by one",
    }
