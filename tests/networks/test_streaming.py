"""A worker decodes for a worker with a GPU on another host, and both are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipedist.core import gpus as accelerators
from pipedist.core.gpus import VisibleGpus
from tests.networks.hosts import Network
from tests.networks.runs import Work, running


class StreamedWork(Work):
    """40 steps of a decode and 20 of an inference; half of the decodes on host `one` wait for the first inference."""

    MODULE = "streamed_code"
    CODE = """\
import os, signal, time
import numpy as np

def _die_once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

def _note(stage, ctx, folder):
    host = os.uname().nodename
    with open(os.path.join(folder, "begun"), "a") as file:
        file.write(f"{ctx.step} {stage} {host}\\n")
    return host

def decode(shard, ctx, folder):
    if _note(0, ctx, folder) == "one" and ctx.step >= 20:
        end = time.monotonic() + 60
        while not os.path.exists(os.path.join(folder, "inferred")):
            assert time.monotonic() < end, "nothing was inferred while host one decoded"
            time.sleep(0.005)
        _die_once(os.path.join(folder, "decode-died"))
    return {"id": shard, "pixels": ctx.rng.standard_normal((len(shard), 32, 32)).astype(np.float32)}

def infer(images, ctx, folder):
    _note(1, ctx, folder)
    assert ctx.device == "cuda:0"
    open(os.path.join(folder, "inferred"), "w").close()
    if ctx.step >= 5:
        _die_once(os.path.join(folder, "infer-died"))
    return {"id": images["id"], "score": images["pixels"].sum((1, 2)) * ctx.rng.standard_normal()}
"""
    SPEC = """\
pipedist: 1
name: networks
replicas: 3
cluster: {{{cluster}}}
dataset: {{range: {elements}, batch: 12, shuffle: true}}
stages:
  decoded: {{run: "streamed_code:decode", with: {{folder: "{folder}"}}}}
  inferred: {{run: "streamed_code:infer", of: decoded, batch: 25, with: {{folder: "{folder}"}}, resources: {{gpus: 1}}}}
  rows: {{gather: 0, of: inferred}}
outputs: {{rows: rows.npz}}
"""


@pytest.mark.slow
def test_values_stream_from_host_to_host(
    tmp_path: Path, hosts: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "found", lambda: VisibleGpus(("0",), "a test has 1"))
    expected = StreamedWork(tmp_path / "one_host").execute_locally()
    work = StreamedWork(tmp_path / "work")
    with running(work, hosts["scheduler"]) as run:
        workers = [run.start_worker(hosts["one"])]
        work.reaches({"one"})
        workers.append(run.start_worker(hosts["two"], gpus="0"))
        assert run.finish() == expected
        assert [worker.wait(60) for worker in workers] == [0, 0]
    assert {host for _, stage, host in work.begun() if stage == 1} == {"two"}
    assert (work.folder / "decode-died").exists()
    assert (work.folder / "infer-died").exists()
