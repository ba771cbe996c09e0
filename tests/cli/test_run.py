from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests import preloaded
from tests.cli.conftest import Command
from tests.cluster.launchers.processes import wait_gone

LEDGER = {"elements": 10, "committed": 10, "quarantined": 0, "lost": 0}


def test_the_table_is_on_stdout_and_all_else_on_stderr(pipedist: Command, spec: Path, tmp_path: Path) -> None:
    done = pipedist("run", "squares.yaml")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["stage", "verb", "value", "file"]
    assert lines[2] == ["total", "reduce", "sum", "285"]
    assert lines[3] == ["steps", "reduce", "sum", "per", "step", "[14,", "126,", "145]"]
    assert lines[4] == ["rows", "gather", "0", "int64[10]", "out/squares/rows.npy"]
    assert "10 elements: 10 committed, 0 quarantined, 0 lost" in done.stdout
    assert "[squares 2 1 w0] shard of 1" in done.stderr
    rows = np.load(tmp_path / "out/squares/rows.npy")
    assert rows.tolist() == [n * n for n in range(10)]


def test_json_is_exactly_one_document(pipedist: Command, spec: Path, tmp_path: Path) -> None:
    done = pipedist("run", "squares.yaml", "--json", "--set", "factor=2", "--output", "here")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert set(document) == {"format", "run", "name", "results", "ledger", "timings", "measurements"}
    assert document["format"] == 1
    assert document["name"] == "squares"
    assert document["results"] == {
        "total": 570,
        "steps": [28, 252, 290],
        "rows": {"file": str(tmp_path / "here/rows.npy")},
    }
    assert document["ledger"] == LEDGER
    kept = json.loads((tmp_path / "here/.pipedist/results.json").read_bytes())
    assert document["timings"]["total"] > kept["timings"]["total"]  # it includes the end of the run
    assert document | {"timings": 0} == kept | {"timings": 0}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_files_are_the_same_bytes_for_any_workers(
    pipedist: Command, spec: Path, tmp_path: Path, workers: str
) -> None:
    assert pipedist("run", "squares.yaml", "--workers", workers).returncode == 0
    np.save(tmp_path / "expected.npy", np.arange(10) ** 2)
    assert (tmp_path / "out/squares/rows.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()


def test_a_failing_function(pipedist: Command, spec: Path, tmp_path: Path) -> None:
    spec.write_text(spec.read_text().replace("squares:squares", "squares:fail").replace("factor: 1}", "}", 1))
    spec.write_text(spec.read_text().replace(', with: {factor: "${params.factor}"}', ""))
    done = pipedist("run", "squares.yaml", "--json")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["error"] == {
        "class": "ValueError",
        "message": "seven is bad",
        "stage": "squares",
        "step": 1,
        "replica": 0,
        "replay": "pipedist replay out/squares --call squares/1/0",
    }
    assert document["ledger"]["committed"] == 4
    assert (
        "Committed steps and finished calls are kept. Fix the problem, then rerun with --resume (--reuse"
        in done.stderr
    )
    assert document["results"] == {}
    ledger = document["ledger"]
    assert ledger["elements"] == ledger["committed"] + ledger["quarantined"] + ledger["lost"]
    assert "stage squares, step 1, replica 0" in done.stderr
    assert "ValueError: seven is bad" in done.stderr
    assert "defect" not in done.stderr
    assert not (tmp_path / "out/squares/rows.npy").exists()
    plain = pipedist("run", "squares.yaml")
    assert (plain.returncode, plain.stdout) == (2, "")
    assert "holds the failed run" in plain.stderr
    assert "--resume continues it; --restart discards it" in plain.stderr
    assert plain.stderr.endswith("\n  pipedist run squares.yaml --resume\n")
    forced = pipedist("run", "squares.yaml", "--restart", "--force-code")
    assert (forced.returncode, forced.stdout) == (2, "")
    assert "--force-code needs --resume or --reuse" in forced.stderr
    anew = pipedist("run", "squares.yaml", "--restart")
    assert (anew.returncode, anew.stdout) == (1, "")


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("replicas: 2", "replicaz: 2", "squares.yaml:3:1: "),
        ("range: 10", "npy: {path: missing.npy}", "squares.yaml:5:"),
        ("squares:squares", "squares:sqares", "squares.yaml:7:"),
        ("rows.npy", "../rows.npy", "squares.yaml:11:"),
    ],
)
def test_what_validate_and_plan_find_is_exit_2(
    pipedist: Command, spec: Path, tmp_path: Path, old: str, new: str, place: str
) -> None:
    spec.write_text(spec.read_text().replace(old, new))
    done = pipedist("run", "squares.yaml", "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(place)
    assert not (tmp_path / "out").exists()


def test_a_dataset_that_no_function_reads_is_named_by_its_first_fold(
    pipedist: Command, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("a\n1\nx\n")
    (tmp_path / "rows.yaml").write_text(
        "pipedist: 1\n"
        "dataset: {csv: {path: rows.csv, columns: {a: int8}}, batch: 1}\n"
        "stages: {all: {gather: 0, of: dataset}}\n"
        "outputs: {all: all.npz}\n"
    )
    done = pipedist("run", "rows.yaml", "-w", "1")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "pipedist: stage all, step 1, replica 0, worker w0: SourceError: rows.csv:3:1:"
    )
    assert "pipedist replay out/rows --call all/1/0" in done.stderr


def test_an_unknown_set_name_is_a_usage_error(pipedist: Command, spec: Path) -> None:
    for text in ("factr=2", "factor"):
        done = pipedist("run", "squares.yaml", "--set", text)
        assert done.returncode == 2
        assert text.partition("=")[0] in done.stderr
        assert done.stdout == ""


def test_a_finished_run_is_shown_again_by_resume_and_replaced_without(
    pipedist: Command, spec: Path, tmp_path: Path
) -> None:
    first = json.loads(pipedist("run", "squares.yaml", "--json").stdout)
    again = pipedist("run", "squares.yaml", "--json", "--resume")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) | {"timings": 0} == first | {"timings": 0}
    assert "is finished: these are its results" in again.stderr
    table = pipedist("run", "squares.yaml", "--resume")
    assert table.returncode == 0, table.stderr
    assert "285" in table.stdout
    other = pipedist("run", "squares.yaml", "--resume", "--set", "factor=3")
    assert other.returncode == 2
    assert "another spec" in other.stderr
    replaced = json.loads(pipedist("run", "squares.yaml", "--json").stdout)
    assert replaced["run"] != first["run"]


def test_a_folder_of_somebody_else_is_exit_2(pipedist: Command, spec: Path, tmp_path: Path) -> None:
    done = pipedist("run", "squares.yaml", "--output", ".")
    assert done.returncode == 2
    assert "not made by pipedist" in done.stderr


def test_a_reader_that_leaves_is_no_error(spec: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m pipedist run squares.yaml 2>err | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "0\n"
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_every_format(pipedist: Command, spec: Path, tmp_path: Path) -> None:
    text = spec.read_text()
    stages = "".join(f"  {name}: {{gather: 0, of: squares}}\n" for name in ("a", "b", "c", "d", "e"))
    text = text.replace("outputs: {", stages + "  per: {gather: 0, of: squares, per: step}\noutputs: {")
    files = "a: a.json, b: b.npz, c: c.csv, d: deep/d.parquet, e: e.jsonl, steps: steps.csv, per: per.jsonl, "
    spec.write_text(text.replace("outputs: {", "outputs: {" + files))
    done = pipedist("run", "squares.yaml")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out/squares"
    squares = [n * n for n in range(10)]
    assert json.loads((out / "a.json").read_text()) == squares
    with np.load(out / "b.npz") as archive:
        assert archive["data"].tolist() == squares
    assert (out / "c.csv").read_text().splitlines() == ["value", *map(str, squares)]
    assert [json.loads(line) for line in (out / "e.jsonl").read_text().splitlines()] == [
        {"value": n} for n in squares
    ]
    assert (out / "steps.csv").read_text().splitlines() == ["value", "14", "126", "145"]
    assert (out / "per.jsonl").read_text().splitlines()[2] == '{"value": [64, 81]}'
    assert (out / "deep/d.parquet").read_bytes()[:4] == b"PAR1"
    assert sorted(p.name for p in out.iterdir()) == sorted(
        [".pipedist", "a.json", "b.npz", "c.csv", "deep", "e.jsonl", "per.jsonl", "rows.npy", "steps.csv"]
    )


@pytest.mark.parametrize(
    "args", [("run", "squares.yaml", "--json"), ("plan", "squares.yaml", "--format", "json")]
)
def test_stdout_is_the_document_whatever_modules_print(
    pipedist: Command, spec: Path, args: tuple[str, ...]
) -> None:
    module = spec.with_name("squares.py")
    module.write_text(
        "import os\nprint('hello')\nos.system('echo from a child')\n" + module.read_text()
        + "def rows():\n    print('reading')\n    yield from range(10)\n"
    )  # fmt: skip
    spec.write_text(spec.read_text().replace("range: 10", 'function: {call: "squares:rows"}'))
    done = pipedist(*args)
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert "hello" in done.stderr
    assert "from a child" in done.stderr


def test_an_output_that_fails_at_the_end_costs_no_other_value(
    pipedist: Command, spec: Path, tmp_path: Path
) -> None:
    module = spec.with_name("squares.py")
    module.write_text(module.read_text() + "def two(a, b):\n    return {'x': np.ones(2), 'y': np.ones(3)}\n")
    text = spec.read_text().replace("outputs: {", '  odd: {reduce: "squares:two", of: squares}\noutputs: {')
    spec.write_text(text.replace("rows: rows.npy", "rows: rows.npy, odd: odd.csv"))
    done = pipedist("run", "squares.yaml", "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["results"]["total"] == 285
    assert document["results"]["rows"] == {"file": str(tmp_path / "out/squares/rows.npy")}
    assert document["results"]["odd"] == {"x": [1.0, 1.0], "y": [1.0, 1.0, 1.0]}
    assert document["error"]["class"] == "OutputError"
    assert document["ledger"] == LEDGER
    assert done.stderr.splitlines()[-1].startswith("pipedist: outputs.odd (odd.csv): leaf 'y' has 3 rows")
    assert (tmp_path / "out/squares/rows.npy").exists()
    table = pipedist("run", "squares.yaml", "--restart")
    assert table.returncode == 1
    assert "285" in table.stdout
    assert "outputs.odd" in table.stderr


@pytest.mark.parametrize("place", ["squares.py", "squares.py/below", "/proc/nothing"])
def test_a_place_that_can_not_be_a_folder_is_exit_2(pipedist: Command, spec: Path, place: str) -> None:
    done = pipedist("run", "squares.yaml", "--output", place)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pipedist: ")
    assert place in done.stderr
    assert "defect" not in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        "run squares.yaml",
        "validate squares.yaml",
        "--help",
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in ("run squares.yaml --json", "plan squares.yaml", "schema", "--version", "run --help")
        ),
    ],
)
def test_a_full_disk_behind_stdout(spec: Path, args: str) -> None:
    with open("/dev/full", "w") as full:
        done = preloaded.run(
            [sys.executable, "-m", "pipedist", *args.split()],
            cwd=spec.parent, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "can't write to standard output: No space left on device" in done.stderr
    assert "defect" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "file",
    [
        "rows.npy",
        "rows.json",
        *(
            pytest.param(f"rows.{ending}", marks=pytest.mark.slow)
            for ending in ("npz", "csv", "parquet", "jsonl")
        ),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_full_disk_below_the_folder(spec: Path, file: str, axis: int) -> None:
    if axis and file in ("rows.csv", "rows.parquet"):
        return  # refused before it runs
    module = spec.with_name("squares.py")
    module.write_text(
        module.read_text() + "def wide(shard):\n    a = np.ones((len(shard), 9)) * shard[:, None]\n"
        f"    return {{str(n): a[:, n] for n in range(9)}} if {axis == 0} else a.T\n"
    )
    text = spec.read_text().replace(', with: {factor: "${params.factor}"}', "")
    text = (
        text.replace("squares:squares", "squares:wide")
        .replace("rows.npy", file)
        .replace("range: 10", "range: 20000")
    )
    text = text.replace("batch: 4", "batch: 4000").replace("gather: 0", f"gather: {axis}")
    if file == "rows.npy" and not axis:
        text = text.replace("of: squares}\noutputs", "of: dataset}\noutputs")
    spec.write_text(text)
    limit = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000));"
        "from pipedist.cli import main; sys.argv[0] = 'pipedist'; main()"
    )
    done = preloaded.run(
        [sys.executable, "-c", limit, "run", "squares.yaml"],
        cwd=spec.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert f"can't write outputs.rows ({file})" in done.stderr or "the journal in " in done.stderr
    assert "defect" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (spec.parent / "out/squares" / file).exists()


# --- signals ------------------------------------------------------------------------------------


@contextmanager
def slow_run(spec: Path, grace_s: float, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose calls wait for the file `go`; the first one has begun."""
    folder = spec.parent
    text = spec.read_text().replace("squares:squares", "squares:slow")
    text = text.replace(', with: {factor: "${params.factor}"}', "")
    spec.write_text(text.replace("workers: 1", f"workers: 1, grace_s: {grace_s}"))
    process = preloaded.Popen(
        [sys.executable, "-m", "pipedist", "run", "squares.yaml", *args],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(folder / "began", process)
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    """Read stderr up to the line with this text; lines about progress may come before it."""
    assert process.stderr is not None
    lines = []
    for line in islice(process.stderr, 100):
        if text in line:
            return
        lines.append(line)
    raise AssertionError(f"{text!r} is not among {lines}")


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.01)


def left_of(session: int) -> list[int]:
    """The processes of a session, other than its leader, that do not end."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != session:
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[3] == str(session) and fields[0] != "Z":
                found.append(int(entry.name))
    return wait_gone(found)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_drains_the_run(pipedist: Command, spec: Path, number: int, code: int) -> None:
    """Also one that all its processes get: of a terminal, `timeout`, `systemctl stop`."""
    with slow_run(spec, 60) as process:
        os.killpg(process.pid, number)
        read_until(process, "no new calls")
        (spec.parent / "go").touch()
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out == ""
    assert "Traceback" not in err
    assert (spec.parent / "ended").exists()
    assert "Continue it with --resume, or start again with --restart" in err
    assert left_of(process.pid) == []
    refused = pipedist("run", "squares.yaml")
    assert refused.returncode == 2
    assert "--restart" in refused.stderr
    again = pipedist("run", "squares.yaml", "--resume")
    assert again.returncode == 0, again.stderr
    assert "resuming the run" in again.stderr


def test_the_second_signal_ends_the_run_at_once(spec: Path) -> None:
    with slow_run(spec, 600) as process:
        process.send_signal(signal.SIGINT)
        read_until(process, "no new calls")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert left_of(process.pid) == []


def test_the_grace_time_ends(spec: Path) -> None:
    with slow_run(spec, 0.1) as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert left_of(process.pid) == []


SIGNALLED = """
import os, signal, zmq
socket = zmq.Context.socket
def signalled(self, *args, **kwargs):
    zmq.Context.socket = socket
    opened = socket(self, *args, **kwargs)
    os.kill(os.getpid(), signal.SIGINT)
    open("went_on", "w").close()
    return opened
zmq.Context.socket = signalled
from pipedist.cli import main
main()
"""


def test_a_signal_while_the_cluster_is_opened_does_not_tear_it(pipedist: Command, spec: Path) -> None:
    """A socket that is made, but known to nobody yet, would be waited for without an end."""
    ended = preloaded.run(
        [sys.executable, "-c", SIGNALLED, "run", "squares.yaml"],
        cwd=spec.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "pipedist: the run was stopped before its first call\n"
    assert (spec.parent / "went_on").exists()
    assert pipedist("run", "squares.yaml").returncode == 0  # nothing is discarded, so no option is needed


def test_a_signal_before_the_run_ends_the_process(spec: Path) -> None:
    """While the user's module is imported nothing runs yet, and the event loop is busy."""
    module = spec.with_name("squares.py")
    module.write_text(module.read_text() + "open('began', 'w').close()\ntime.sleep(600)\n")
    process = preloaded.Popen(
        [sys.executable, "-m", "pipedist", "run", "squares.yaml"],
        cwd=spec.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(spec.with_name("began"), process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (130, "", "")
    assert not (spec.parent / "out").exists()


def test_two_runs_into_one_folder(pipedist: Command, spec: Path) -> None:
    with slow_run(spec, 0.1):
        done = pipedist("run", "squares.yaml", "--restart")
        assert done.returncode == 2
        assert "another run is writing" in done.stderr


def test_a_terminal_gets_a_bar(spec: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with preloaded.Popen(
        [sys.executable, "-m", "pipedist", "run", "squares.yaml"],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "150"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    ) as process:
        os.close(theirs)
        shown = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                data = os.read(ours, 65_536)
            except OSError:  # the other end is closed
                break
            shown += data
        out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, shown
    assert "285" in out
    assert b"elements/s" in shown or b"starting" in shown
    assert b"shard of 2" in shown


@pytest.mark.parametrize(("says", "threads"), [(None, 1), ("3", 3)])
def test_a_function_source_computes_in_one_thread_unless_the_user_sets_another_number(
    pipedist: Command, tmp_path: Path, says: str | None, threads: int
) -> None:
    (tmp_path / "source.py").write_text(
        "import os\nimport numpy as np\n"
        "def threads():\n    return np.array([int(os.environ['OPENBLAS_NUM_THREADS'])])\n"
    )
    (tmp_path / "source.yaml").write_text(
        'pipedist: 1\ndataset: {function: {call: "source:threads"}, batch: 1}\n'
        "stages:\n  threads: {gather: 0, of: dataset}\n"
    )
    done = pipedist("run", "source.yaml", "--json", OPENBLAS_NUM_THREADS=says or "")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"]["threads"] == [threads]


def test_an_output_without_a_name_is_not_the_current_folder(tmp_path: Path, spec: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = preloaded.run(
        [sys.executable, "-m", "pipedist", "run", str(spec), "--output", ""],
        cwd=tmp_path / "empty", capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "pipedist: --output is empty. Give a folder, such as --output out/NAME\n"
    assert list((tmp_path / "empty").iterdir()) == []
