"""Specs are data: names are imported as `package.module:name` from known folders, or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipedist.errors import SpecError
from pipedist.spec import load

NAMES = (
    "os:system('touch hacked')", "os:system;x", "os.system", "os:", ":system", "os:system:x", "os: system",
    "__import__('os'):system", "os/../os:system", "../evil:run", "/tmp/evil:run", "os:sys tem",
    "os:system\x00", "os:lambda: 0", "os:1x", "1os:x", "os..path:join", ".os:x", "os:.x", "os:x.", "os:x..y",
    "{}:x", "os:${env.HOME}", "os:x\ny", "http://x/y:z", "os:system()", "eval:('1')", "о́s:x\u200b",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["run", "reduce"])
def test_invalid_names_are_refused(name: str, key: str) -> None:
    stage = {"run": name} if key == "run" else {"reduce": name, "of": "y"}
    stages = {"y": {"run": "math:sqrt"}, "z": stage}
    with pytest.raises(SpecError) as caught:
        load({"pipedist": 1, "dataset": {"range": 4, "batch": 2}, "stages": stages})
    assert any(problem.where.startswith("stages.z") for problem in caught.value.problems)


SHADOWS = ("numpy", "msgpack", "zmq", "json", "optree", "anyio", "pipedist", "squares_of_another")


def test_a_run_imports_nothing_from_the_current_directory(tmp_path: Path) -> None:
    """Neither the driver nor the fork server nor a worker; nor a shadow in the spec's own folder."""
    here, code = tmp_path / "here", tmp_path / "code"
    here.mkdir()
    code.mkdir()
    for folder in (here, code):
        for name in SHADOWS:
            text = f"open({str(tmp_path / 'hacked')!r}, 'a').write(__file__)\n"
            (folder / f"{name}.py").write_text(text)
    (code / "mine.py").write_text("import json, numpy\ndef double(x):\n    return x * 2\n")
    (code / "spec.yaml").write_text(
        "pipedist: 1\n"
        "dataset: {range: 10, batch: 3}\n"
        'stages: {y: {run: "mine:double"}, total: {reduce: sum, of: y, axis: 0}}\n'
        "outputs: {total: total.json}\n"
    )
    command = [os.path.join(os.path.dirname(sys.executable), "pipedist"), "run", "../code/spec.yaml"]
    done = subprocess.run(command, cwd=here, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (here / "out/spec/total.json").read_text().strip() == "90"
    assert not (tmp_path / "hacked").exists(), (tmp_path / "hacked").read_text()
