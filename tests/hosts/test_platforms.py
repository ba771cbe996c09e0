"""Workers whose versions or processor could change bits are refused, and named on both ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pipedist.coordinator.worker_registry import differences
from pipedist.core.platform_id import cpu_traits
from pipedist.transport.keys import write_key_file
from pipedist.worker.process_setup import make_hello
from tests.hosts.dialled import worker

SPEC = """\
pipedist: 1
replicas: 2
dataset: {range: 40, batch: 4}
stages:
  total: {reduce: sum, of: dataset, axis: 0}
"""


def dispatched() -> str:
    """Return a feature that NumPy dispatches on here and that can be disabled; "" if there is none."""
    from numpy._core import _multiarray_umath as core

    there = [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]
    return there[-1] if there else ""


def test_differences_that_could_change_bits() -> None:
    alike = make_hello("w", 0)
    assert differences(alike, managed=False) == ""
    assert (
        differences(replace(alike, numpy="1.0"), managed=False)
        == f"it runs numpy 1.0 (the run {np.__version__})"
    )
    assert "python 3.5" in differences(replace(alike, python="3.5.1"), managed=False)
    assert "pipedist 9" in differences(replace(alike, pipedist="9"), managed=True)
    assert (
        differences(replace(alike, python=f"{sys.version_info[0]}.{sys.version_info[1]}.99"), managed=False)
        == ""
    )
    other = replace(alike, traits=(*cpu_traits()[:-1], "SOMETHING"), cpu="Other 9000")
    told = differences(other, managed=False)
    assert f"another processor type, Other 9000, with SOMETHING and without {cpu_traits()[-1]}" in told
    assert differences(other, managed=True) == "", "a process that was started here has the same processor"


def test_the_traits_are_those_by_which_numpy_and_blas_choose_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from numpy._core import _multiarray_umath as core

    assert {name for name, there in core.__cpu_features__.items() if there} <= set(cpu_traits())
    before = cpu_traits()
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert set(cpu_traits()) - set(before) == {"OPENBLAS_CORETYPE=Haswell"}


@pytest.mark.parametrize("force", [False, True], ids=["refused", "forced"])
def test_another_type_of_processor_is_rejected_without_force(tmp_path: Path, force: bool) -> None:
    feature = dispatched()
    if not feature:
        pytest.skip("NumPy dispatches on nothing here; run it on an x86-64 host with AVX2 or newer")
    (tmp_path / "spec.yaml").write_text(SPEC)
    write_key_file(tmp_path / "key")
    command = [
        sys.executable,
        "-m",
        "pipedist",
        "run",
        "spec.yaml",
        "--json",
        "--cluster",
        "connect:tcp://127.0.0.1:*",
    ]
    command += ["--key-file", "key", *(["--force"] if force else [])]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert run.stderr is not None
        endpoint = next(found[1] for line in run.stderr if (found := re.search(r"--connect (\S+)", line)))
        env = {"NPY_DISABLE_CPU_FEATURES": feature}
        with worker(endpoint, tmp_path / "key", hidden=None, cwd=tmp_path, env=env) as other:
            _, said = other.communicate(timeout=100)
        if not force:
            assert other.returncode == 1
            assert f"without {feature}" in said
            assert "--force" in said
            with worker(endpoint, tmp_path / "key", hidden=None, cwd=tmp_path) as alike:
                alike.communicate(timeout=100)
                assert alike.returncode == 0
        else:
            assert other.returncode == 0, said
            assert f"without {feature}" in said
        out, err = run.communicate(timeout=100)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == 0, err
    assert json.loads(out)["results"]["total"] == sum(range(40))
    assert ("joins, though" if force else "pipedist: rejected (1 so far): worker ") in err
    assert f"without {feature}" in err
