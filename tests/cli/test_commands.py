from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from pipedist._version import __version__
from tests import preloaded
from tests.cli.conftest import Command


def test_version(pipedist: Command) -> None:
    done = pipedist("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"pipedist {__version__}\n", "")


@pytest.mark.parametrize(
    "args",
    [
        ["frob"],
        ["run"],
        ["run", "x.yaml", "--workers", "0"],
        ["run", "x.yaml", "--workers", "two"],
        ["run", "x.yaml", "--frob"],
        ["run", "x.yaml", "--resume", "--restart"],
        ["run", "missing.yaml"],
        ["validate"],
        ["validate", "missing.yaml"],
        ["plan", "missing.yaml"],
        ["plan", "x.yaml", "--format", "pdf"],
        ["worker"],
        ["worker", "--connect", "tcp://127.0.0.1:1"],
    ],
)
def test_usage_errors_are_exit_2_and_say_so_on_stderr(pipedist: Command, args: list[str]) -> None:
    done = pipedist(*args)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_option_or_number_gets_one_hint(pipedist: Command) -> None:
    wrong = pipedist("run", "x.yaml", "--worker", "2").stderr
    assert "--workers" in wrong
    assert "--force" not in wrong
    assert "'two' is not a valid integer." in pipedist("run", "x.yaml", "--workers", "two").stderr


def test_a_batch_system_is_no_cluster_but_has_a_command(pipedist: Command, spec: Path) -> None:
    done = pipedist("run", "squares.yaml", "--cluster", "slurm")
    assert done.returncode == 2
    assert "`pipedist launch slurm` prints a job for it" in done.stderr


def test_a_worker_without_its_keys(pipedist: Command, tmp_path: Path) -> None:
    done = pipedist("worker", "--connect", "tcp://127.0.0.1:1", "--key-file", "missing.key")
    assert done.returncode == 2, done.stderr
    assert "missing.key" in done.stderr
    assert "Traceback" not in done.stderr


def test_validate_tells_all_problems_of_all_files(pipedist: Command, spec: Path) -> None:
    bad = spec.with_name("bad.yaml")
    bad.write_text("pipedist: 1\nreplicaz: 2\ndataset: {range: 10, batch: 0}\nstages: {}\n")
    worse = spec.with_name("worse.yaml")
    worse.write_text("pipedist: 1\n  x: [\n")
    done = pipedist("validate", "bad.yaml", "squares.yaml", "worse.yaml")
    assert done.returncode == 2
    assert done.stdout == "squares.yaml: OK\n"
    lines = done.stderr.splitlines()
    assert lines[0].startswith("bad.yaml:2:1: ")
    assert any(line.startswith("bad.yaml:3:") for line in lines)
    assert any(line.startswith("worse.yaml:") for line in lines)
    assert "did you mean 'replicas'?" in done.stderr
    good = pipedist("validate", "squares.yaml")
    assert (good.returncode, good.stderr) == (0, "")


def test_validate_imports_no_code_and_reads_no_data(pipedist: Command, spec: Path) -> None:
    spec.with_name("squares.py").write_text("raise SystemExit('imported')")
    text = spec.read_text().replace("range: 10", "npy: {path: missing.npy}")
    spec.write_text(text)
    assert pipedist("validate", spec).returncode == 0


def test_schema_is_a_json_schema(pipedist: Command) -> None:
    from jsonschema import Draft7Validator

    done = pipedist("schema")
    assert done.returncode == 0
    Draft7Validator.check_schema(json.loads(done.stdout))


def test_plan_formats(pipedist: Command, spec: Path) -> None:
    text = pipedist("plan", spec, "--workers", "3")
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("squares: 2 replicas, 3 workers, seed ")
    mermaid = pipedist("plan", spec, "--format", "mermaid")
    assert mermaid.returncode == 0, mermaid.stderr
    assert mermaid.stdout.startswith(("flowchart", "graph"))
    document = pipedist("plan", spec, "--format", "json")
    assert document.returncode == 0, document.stderr
    assert isinstance(json.loads(document.stdout), dict)


def test_plan_imports_functions(pipedist: Command, spec: Path) -> None:
    spec.write_text(spec.read_text().replace("squares:squares", "squares:sqares"))
    done = pipedist("plan", "squares.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("squares.yaml:7:")
    assert "sqares" in done.stderr
    assert done.stdout == ""


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m pipedist schema | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize("closed", [pytest.param(">&-", marks=pytest.mark.slow), "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_take_what_is_printed(tmp_path: Path, spec: Path, closed: str) -> None:
    spec.write_text(spec.read_text().replace("squares:squares", "squares:prints"))
    with (tmp_path / "squares.py").open("a") as module:
        module.write(
            "def prints(shard, factor):\n"
            "    os.write(1, b'x' * 100)\n"
            "    os.write(2, b'x' * 100)\n"
            "    return shard * factor\n"
        )
    for words in ("run squares.yaml --output out", "replay out --call squares/1/1"):
        command = f"exec {sys.executable} -m pipedist {words} {closed}"
        assert (
            subprocess.run(["bash", "-c", command], cwd=tmp_path, check=False, timeout=60).returncode == 0
        ), words
    assert np.load(tmp_path / "out" / "rows.npy").tolist() == list(range(10))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_behind_stdout_is_reported(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = preloaded.run(
            [sys.executable, "-m", "pipedist", "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "pipedist: can't write to standard output: No space left on device\n"


def test_the_current_directory_is_not_importable(pipedist: Command, tmp_path: Path, spec: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    spec.rename(elsewhere / "squares.yaml")
    spec.with_name("squares.py").rename(elsewhere / "squares.py")
    for name in ("numpy", "click", "zmq", "pydantic"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('a shadow of {name} was imported')")
    done = pipedist("plan", "elsewhere/squares.yaml")
    assert done.returncode == 0, done.stderr


def test_little_is_imported_before_it_is_needed(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "import pipedist.cli.app\n"
        "heavy = {'numpy', 'pydantic', 'rich', 'ruamel', 'zmq', 'anyio', 'pyarrow', 'optree', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_defect_is_called_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from pipedist.cli import terminal

    def broken() -> int:
        raise ZeroDivisionError("oh")

    assert terminal.guarded(broken) == 1
    told = capsys.readouterr().err
    assert told.startswith("pipedist: this is a defect in pipedist")
    assert "ZeroDivisionError: oh" in told


def test_plan_reports_where_gpus_are_missing(pipedist: Command, spec: Path) -> None:
    text = spec.read_text().replace('"squares:squares"', '"squares:squares", resources: {gpus: 1}')
    assert "gpus" in text
    spec.write_text(text)
    done = pipedist("plan", "squares.yaml", PATH="/nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("squares.yaml:7:")
    assert "needs 1 GPU per call, but there is none here (there is no nvidia-smi on the PATH" in done.stderr
    assert "resources: {gpus: 1}" in done.stderr


def test_plan_stops_unpacking_files_that_expand_without_end(pipedist: Command, tmp_path: Path) -> None:
    packer = zlib.compressobj(9, wbits=-15)
    mebibyte = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)  # may be repeated
    zeros = mebibyte * 10_000  # 10 GB in 10 MB
    (tmp_path / "a.txt.gz").write_bytes(b"\x1f\x8b\x08" + bytes(7) + zeros)
    size, name = 2**32 - 2, b"b.txt"  # as the archive announces it
    fields = (20, 0, 8, 0, 33, 0, len(zeros), size, len(name), 0)
    head = struct.pack("<4s5H3I2H", b"PK\3\4", *fields) + name
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, *fields, 0, 0, 0, 0, 0) + name
    place = (0, 0, 1, 1, len(entry), len(head) + len(zeros), 0)
    (tmp_path / "b.zip").write_bytes(head + zeros + entry + struct.pack("<4s4H2IH", b"PK\5\6", *place))
    (tmp_path / "bomb.yaml").write_text(
        "pipedist: 1\n"
        "datasets:\n"
        "  a: {text: {path: a.txt.gz, unpacked_bytes_max: 3000000}, batch: 4}\n"
        "  b: {text: {path: b.zip}, batch: 4}\n"
        "stages:\n"
        "  x: {gather: 0, of: a}\n"
        "  y: {gather: 0, of: b}\n"
    )
    done = pipedist("plan", "bomb.yaml")
    assert done.returncode == 2, done.stderr
    assert f"a.txt.gz: its {len(zeros) + 10:,} bytes unpack to more than 3,000,000 bytes" in done.stderr
    packed = (tmp_path / "b.zip").stat().st_size
    assert f"b.zip: its {packed:,} bytes unpack to {size:,} bytes, 1,0" in done.stderr
    assert done.stderr.count("set `unpacked_bytes_max`") == 2
