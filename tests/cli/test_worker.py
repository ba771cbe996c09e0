"""`pipedist worker` joins a running scheduler from another process, over TCP with keys."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pipedist.transport.keys import write_key_file
from tests import preloaded
from tests.cli.conftest import Command

FUNCTIONS = (
    "import os, signal\n"
    "def cube(shard, ctx):\n"
    "    if ctx.step == 3 and not os.path.exists('died'):\n"
    "        open('died', 'w').close()\n"
    "        os.kill(os.getpid(), signal.SIGKILL)\n"
    "    return shard ** 3\n"
)
SPEC = (
    "pipedist: 1\n"
    "replicas: 2\n"
    'cluster: {launcher: connect, listen: "tcp://127.0.0.1:0", key_file: cluster.key}\n'
    "dataset: {range: 40, batch: 4}\n"
    "stages:\n"
    '  cubes: {run: "cubes:cube"}\n'
    "  total: {reduce: sum, of: cubes, axis: 0}\n"
)


@contextmanager
def started(*args: str | Path, cwd: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = preloaded.Popen(
        [sys.executable, "-m", "pipedist", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_worker_whose_gpus_are_not_found_says_so(tmp_path: Path) -> None:
    """It joins, and would never get a call that needs one."""
    write_key_file(tmp_path / "cluster.key")
    worker = ("worker", "--connect", "tcp://127.0.0.1:1", "--key-file", "cluster.key")
    with started(*worker, cwd=tmp_path, CUDA_VISIBLE_DEVICES="63") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
    assert line.startswith("pipedist worker owns no GPU: ")
    assert "CUDA_VISIBLE_DEVICES" in line
    assert "'63'" in line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cubes.py").write_text(FUNCTIONS)
    (tmp_path / "cubes.yaml").write_text(SPEC)
    return tmp_path


def hint_of(run: subprocess.Popen[str]) -> list[str]:
    """Read stderr until the run says how workers may join; return the arguments."""
    assert run.stderr is not None
    for line in run.stderr:
        found = re.search(r"pipedist worker (--connect .*)", line)
        if found:
            return shlex.split(found[1])
    raise AssertionError("the run ended without saying where to join")


def endpoint_of(run: subprocess.Popen[str]) -> str:
    """Read stderr until the run says where workers may join."""
    return hint_of(run)[1]


def test_workers_dial_in_and_a_killed_one_comes_back(folder: Path) -> None:
    with started("run", "cubes.yaml", "--json", cwd=folder) as run:
        endpoint = endpoint_of(run)
        with started("worker", "--connect", endpoint, "--key-file", "cluster.key", cwd=folder) as worker:
            out, err = run.communicate(timeout=60)
            assert run.returncode == 0, err
            assert json.loads(out)["results"]["total"] == sum(k**3 for k in range(40))
            assert (folder / "died").exists()
            _, said = worker.communicate(timeout=60)
            assert worker.returncode == 0, said
    assert (folder / "cluster.key").stat().st_mode & 0o777 == 0o600


FORKS = """
import multiprocessing, time
fork = multiprocessing.get_context("fork")
def how_it_ended(shard):
    child = fork.Process(target=time.sleep, args=(600,), daemon=True)
    child.start()
    child.terminate()
    child.join(60)
    return child.exitcode or 0
def talk():
    for line in range(1500):
        print(line)
    print("unfinished", end="")
def how_it_talked(shard):
    print("to be ", end="")
    child = fork.Process(target=talk)
    child.start()
    child.join(20)
    child.kill()
    child.join()
    print("continued")
    return child.exitcode
"""


def test_the_printed_worker_command_can_be_pasted(folder: Path) -> None:
    (folder / "my keys").mkdir()
    (folder / "cubes.yaml").write_text(SPEC.replace("key_file: cluster.key", 'key_file: "my keys/of it.key"'))
    with started("run", "cubes.yaml", cwd=folder) as run:
        assert hint_of(run)[2:] == ["--key-file", str(folder / "my keys" / "of it.key")]


def run_forks(folder: Path, function: str) -> tuple[int, str, str]:
    """Give what the calls of a function return, in all, and what run and worker say."""
    (folder / "forks.py").write_text(FORKS)
    stages = f'stages: {{of: {{run: "forks:{function}"}}, all: {{reduce: sum, of: of, axis: null}}}}\n'
    (folder / "cubes.yaml").write_text(SPEC.partition("stages:")[0].replace("40", "4") + stages)
    with ExitStack() as stack:
        run = stack.enter_context(started("run", "cubes.yaml", "--json", cwd=folder))
        worker = stack.enter_context(started("worker", *hint_of(run), cwd=folder))
        out, err = run.communicate(timeout=90)
        _, said = worker.communicate(timeout=90)
    assert run.returncode == 0, err
    return json.loads(out)["results"]["all"], err, said


def test_a_process_that_a_function_forks_is_ended_by_sigterm(folder: Path) -> None:
    """As in a local worker: it is no worker, which would go on."""
    assert run_forks(folder, "how_it_ended")[0] == -2 * signal.SIGTERM


def test_a_process_that_a_function_forks_prints_to_stderr(folder: Path) -> None:
    """The connection is its parent's: ZeroMQ sends nothing of a copy's, and lets it wait."""
    ended, told, said = run_forks(folder, "how_it_talked")
    assert ended == 0
    for replica in (0, 1):
        assert f"[of 0 {replica}] 1499\n" in said
        assert f"[of 0 {replica}] unfinished\n" in said
    assert len(re.findall(r"\] to be continued\n", told)) == 2


def test_a_worker_with_another_number_of_threads_is_not_let_in(folder: Path) -> None:
    """Its first call would fail the run."""
    (folder / "cubes.yaml").write_text(SPEC + "threads_per_replica: 2\n")
    with started("run", "cubes.yaml", "--json", "--force", cwd=folder) as run:
        join = hint_of(run)
        assert join[-2:] == ["--threads", "2"]
        with started("worker", *join[:-2], cwd=folder) as worker:
            _, said = worker.communicate(timeout=60)
            assert worker.returncode == 1, said
            assert "it runs with --threads 1 (the run: threads_per_replica: 2)" in said
        with started("worker", *join, cwd=folder):
            out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert json.loads(out)["results"]["total"] == sum(k**3 for k in range(40))


@pytest.mark.slow
def test_a_worker_with_other_keys_reports_it(folder: Path) -> None:
    write_key_file(folder / "other.key")
    with started("run", "cubes.yaml", "--json", cwd=folder) as run:
        endpoint = endpoint_of(run)
        with started("worker", "--connect", endpoint, "--key-file", "other.key", cwd=folder) as worker:
            _, said = worker.communicate(timeout=60)
            assert worker.returncode != 0
            assert "key" in said, said
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=60)
        assert run.returncode == 130


def test_a_full_host_is_reported_without_a_traceback(tmp_path: Path) -> None:
    """No file can be written: not even an empty folder helps where nothing can be put into it."""
    write_key_file(tmp_path / "cluster.key")
    arguments = "worker --connect tcp://127.0.0.1:9 --key-file cluster.key"
    command = f'ulimit -f 0; exec "$0" -m pipedist {arguments}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"pipedist: worker \S+ can't be kept alive on this host: .*directory.*", line)


def test_a_port_that_is_taken_is_a_usage_error(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        (folder / "cubes.yaml").write_text(SPEC.replace("tcp://127.0.0.1:0", address))
        with started("run", "cubes.yaml", "--json", cwd=folder) as run:
            out, err = run.communicate(timeout=60)
        assert (run.returncode, out) == (2, ""), err
        assert f"port {taken.getsockname()[1]} on 127.0.0.1 is taken" in err
        assert "Traceback" not in err


def test_a_run_whose_cluster_did_not_open_leaves_nothing_to_resume(folder: Path, pipedist: Command) -> None:
    spec = SPEC + "outputs: {total: total.json}\n"
    (folder / "cubes.yaml").write_text(spec.replace("tcp://127.0.0.1:0", "tcp://192.0.2.1:5555"))
    write_key_file(folder / "cluster.key")
    (folder / "died").touch()
    refused = pipedist("run", "cubes.yaml")
    assert refused.returncode == 2, refused.stderr
    assert "can't bind tcp://192.0.2.1:5555" in refused.stderr
    done = pipedist("run", "cubes.yaml", "--cluster", "local")
    assert done.returncode == 0, done.stderr
    assert (folder / "out/cubes/total.json").is_file()


def test_calls_that_need_a_gpu_wait_for_a_worker_that_was_given_one(folder: Path) -> None:
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-00)'\necho 'GPU 1: NVIDIA H100 (UUID: GPU-11)'\n"
    )
    tool.chmod(0o700)
    path = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    (folder / "seen.py").write_text(
        "import os\n"
        "def see(shard, ctx):\n"
        "    return [ctx.device, os.environ['CUDA_VISIBLE_DEVICES']] if shard[0] == 0 else None\n"
        "def device(tree):\n"
        "    return 10 * (tree[0] == 'cuda:0') + int(tree[1]) if tree else 0\n"
    )
    spec = (folder / "cubes.yaml").read_text().partition("stages:")[0]
    (folder / "seen.yaml").write_text(
        f"{spec}stages:\n"
        "  sees: {run: 'seen:see', resources: {gpus: 1}}\n"
        "  on: {run: 'seen:device', of: sees}\n"
        "  which: {reduce: max, of: on, axis: null}\n"
    )
    with started("run", "seen.yaml", "--json", cwd=folder) as run:
        assert run.stderr is not None
        line = next(line for line in run.stderr if "--connect" in line)
        assert "waiting for workers: CUDA_VISIBLE_DEVICES=0 pipedist worker" in line
        join = ("worker", "--connect", line.split("--connect ")[1].split()[0], "--key-file", "cluster.key")
        with started(*join, cwd=folder) as plain:
            assert plain.stderr is not None
            assert any("joined" in said for said in plain.stderr)  # and is dealt nothing
            with started(*join, cwd=folder, CUDA_VISIBLE_DEVICES="1", PATH=path):
                out, err = run.communicate(timeout=60)
                assert run.returncode == 0, err
    assert json.loads(out)["results"]["which"] == 11


@pytest.mark.slow  # tests/engines/test_supervisor_process.py has one that is quicker
def test_elements_that_kill_cost_themselves_and_not_the_workers_that_dialled_in(folder: Path) -> None:
    """Looking for them takes many deaths; the supervisor gave up after five."""
    (folder / "cubes.py").write_text(
        "import os, signal\n"
        "def cube(shard):\n"
        "    if (shard % 20 == 3).any():\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return shard ** 3\n"
    )
    (folder / "cubes.yaml").write_text(SPEC.replace('cube"', 'cube", on_error: quarantine'))
    run_ = started("run", "cubes.yaml", "--json", cwd=folder)
    with run_ as run, started("worker", *hint_of(run), cwd=folder):
        out, err = run.communicate(timeout=120)
    assert run.returncode == 3, err
    assert json.loads(out)["results"]["total"] == sum(k**3 for k in range(40) if k % 20 != 3)
