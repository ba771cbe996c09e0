"""`pipedist init`: projects for data of each kind run as they are, and their tests pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from pathlib import Path

import numpy as np
import pytest

from pipedist.datasets.sources import open_source
from pipedist.spec import load
from tests import preloaded
from tests.cli.conftest import Command


def csv(path: Path) -> None:
    path.mkdir()
    for part in range(2):
        head = 'town,"a ""quoted"" name",zip,late,on,day\n'
        text = head + "x,1,01234,2.5,true,2026-01-01\ny,2,01235,NA,false,2026-01-02\n" * 10
        (path / f"{part}.csv").write_text(text)


def tsv(path: Path) -> None:
    path.write_text("a\ttime\n1\t2026-01-01T00:00:00\n")


def parquet(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="an extra: pip install 'pipedist[parquet]'")
    from pyarrow.parquet import write_table

    columns = {"a": [1, None, 3], "b": ["x", "y", "z"], "c": [[1], [2], [3]], "d": [1.5, 2.5, 3.5]}
    write_table(arrow.table(columns), path)


def jsonl(path: Path) -> None:
    rows = [
        {"user": "ann", "n": 1, "price": 2, "tags": ["x"], "ok": True},
        {"user": None, "n": 2, "price": 2.5, "ok": False},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))


def npy(path: Path) -> None:
    np.save(path, np.arange(60, dtype=np.float32).reshape(10, 2, 3))


def npz(path: Path) -> None:
    np.savez(path, pixels=np.arange(24).reshape(6, 4), label=np.array(list("abcdef")))


def text(path: Path) -> None:
    path.write_text("one line\nanother line\n" * 20)


def files(path: Path) -> None:
    path.mkdir()
    for number in range(5):
        (path / f"{number}.png").write_bytes(b"\x89PNG" + bytes(number))


KINDS: dict[str, tuple[Callable[[Path], None], str, str, dict[str, object]]] = {
    "csv": (csv, "data", "data/*.csv", {
        "rows": 40,
        'a "quoted" name': {"known": 40, "sum": 60.0},
        "late": {"known": 20, "sum": 50.0},
        "on": {"known": 40, "sum": 20.0},
    }),
    "tsv": (tsv, "t.tsv", "t.tsv", {"rows": 1, "a": {"known": 1, "sum": 1.0}}),
    "parquet": (parquet, "t.parquet", "t.parquet", {
        "rows": 3, "a": {"known": 2, "sum": 4.0}, "d": {"known": 3, "sum": 7.5},
    }),
    "jsonl": (jsonl, "e.jsonl", "e.jsonl", {
        "rows": 8, "n": {"known": 8, "sum": 12.0}, "price": {"known": 8, "sum": 18.0}, "ok": {"known": 8, "sum": 4.0},
    }),
    "npy": (npy, "a.npy", "a.npy", {
        "rows": 10, "sum": np.arange(60).reshape(10, 2, 3).sum(0).astype(float).tolist(),
    }),
    "npz": (npz, "a.npz", "a.npz", {
        "rows": 6, "pixels": {"known": [6] * 4, "sum": np.arange(24).reshape(6, 4).sum(0).astype(float).tolist()},
    }),
    "text": (text, "log.txt", "log.txt", {"lines": 40, "words": 80, "characters": 400}),
    "files": (files, "images", "images/*.png", {"files": 5, "bytes": 30}),
}  # fmt: skip


SLOW = [kind if kind == "csv" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", SLOW)
def test_a_project_reads_data_of_a_kind(
    kind: str, pipedist: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, name, pattern, totals = KINDS[kind]
    make(tmp_path / name)
    made = pipedist("init", "my-project", "--from", pattern)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.endswith(
        "Next: cd my-project && pipedist run my_project.yaml\n"
        "It writes my-project/out/my_project/totals.json. The test: cd my-project && python -m pytest\n"
    )
    project = tmp_path / "my-project"
    spec = load(project / "my_project.yaml")
    assert spec.datasets["dataset"].kind == ("csv" if kind == "tsv" else kind)
    if kind == "csv":
        assert spec.datasets["dataset"].config["columns"] == {
            "town": "str", 'a "quoted" name': "int64", "zip": "str", "late": "float64", "on": "bool", "day": "date",
        }  # fmt: skip
    schema_line = "# yaml-language-server: $schema=pipedist.schema.json\n"
    assert (project / "my_project.yaml").read_text().startswith(schema_line)
    assert json.loads((project / "pipedist.schema.json").read_text())["title"]
    monkeypatch.syspath_prepend(str(project))
    compile((project / "test_my_project.py").read_text(), "test", "exec")
    invalidate_caches()
    summarize = import_module("my_project_functions").summarize
    del sys.modules["my_project_functions"]
    dataset = spec.datasets["dataset"]
    source = open_source(dataset.kind, dataset.config, folder=project)
    np.testing.assert_equal(summarize(source.read(source.locate(range(source.length or 0)))), totals)
    source.close()


def test_a_column_with_a_cell_that_is_no_number_is_reported(pipedist: Command, tmp_path: Path) -> None:
    rows = [f"p{row},{row}.5,{row},0{row},2026-01-{row + 10},{'x' * (row % 2) or 1}" for row in range(20)]
    rows[7], rows[9] = "p,tall,7,x,2026-01-11,1", "p,1.5,,03,soon,1"
    (tmp_path / "people.csv").write_text("\n".join(["name,height,age,zip,day,mixed", *rows, ""]))
    made = pipedist("init", "p", "--from", "people.csv")
    assert made.returncode == 0, made.stderr
    advice = "To read it as float64, see its comment in p.yaml, and add it to NUMBERS in p_functions.py"
    assert (
        f"height is read as text: 'tall' is not of type float64 at people.csv:9:2. {advice}\n" in made.stdout
    )
    advice = "To read it as date, see its comment in p.yaml\n"
    assert f"day is read as text: 'soon' is not of type date at people.csv:11:5. {advice}" in made.stdout
    spec = tmp_path / "p" / "p.yaml"
    text = spec.read_text()
    notes = [line.split() for line in text.splitlines() if "sets such rows aside" in line]
    assert [(words[0], words[1]) for words in notes] == [("height:", "str"), ("day:", "str")]
    fixed = text.replace("height: str", "height: float64").replace("day: str", "day: date")
    spec.write_text(fixed.replace("  parts:", "  parts:\n    on_error: quarantine"))
    done = pipedist("run", "p/p.yaml", "-w", "1", "-o", "out")
    assert done.returncode == 3, done.stderr
    assert json.loads((tmp_path / "out" / "totals.json").read_text())["rows"] == 18


def test_the_comment_of_a_column_stays_in_its_line(pipedist: Command, tmp_path: Path) -> None:
    (tmp_path / "two\nlines.csv").write_text("a\n" + "1\n" * 20 + "x\n")
    made = pipedist("init", "p", "--from", "two\nlines.csv")
    assert made.returncode == 0, made.stderr
    assert load(tmp_path / "p" / "p.yaml").datasets["dataset"].config["columns"] == {"a": "str"}


@pytest.mark.parametrize(
    ("rows", "batch", "replicas"), [(1, 1, 1), (3, 1, 1), (15, 2, 1), (16, 4, 4), (1000, 128, 4)]
)
def test_no_shard_of_a_full_step_is_empty(
    rows: int, batch: int, replicas: int, pipedist: Command, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("a\n" + "1\n" * rows)
    made = pipedist("init", "p", "--from", "rows.csv")
    assert made.returncode == 0, made.stderr
    spec = load(tmp_path / "p" / "p.yaml")
    assert (spec.datasets["dataset"].batch, spec.replicas) == (batch, replicas)


@pytest.mark.parametrize("kind", ["example", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)])
def test_a_project_runs_as_it_is_and_its_test_passes(kind: str, pipedist: Command, tmp_path: Path) -> None:
    if kind == "example":
        made, totals = pipedist("init"), {"rows": 24}
    else:
        make, name, pattern, totals = KINDS[kind]
        make(tmp_path / name)
        made = pipedist("init", "--from", pattern)
    assert made.returncode == 0, made.stderr
    command = made.stdout.split("Next: cd pipeline && pipedist ")[1].splitlines()[0]
    done = preloaded.run_module("pipedist", *command.split(), "-w", "2", cwd=tmp_path / "pipeline")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "pipeline" / "out" / "pipeline" / "totals.json").read_text())
    assert written.items() >= totals.items()
    tested = preloaded.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "pipeline", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["full"], "the folder full is not empty. Give another one: pipedist init NAME"),
        (["rows.csv"], "rows.csv is a file. To read it: pipedist init --from rows.csv"),
        (["--from", "rows.csv", "empty.csv", "x.csv"], "Put a pattern in quotes"),
        (["--from", "none.csv"], "--from none.csv: no file matches 'none.csv'"),
        (["--from", "full"], "the name does not show the kind of the files"),
        (["--from", "fake.parquet"], "not a readable parquet file: it seems to be csv text"),
        (["--from", "empty.csv"], "empty.csv: the file is empty"),
    ],
)
def test_what_init_refuses(args: list[str], message: str, pipedist: Command, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").touch()
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    (tmp_path / "fake.parquet").write_text("a,b\n1,2\n")
    (tmp_path / "empty.csv").touch()
    done = pipedist("init", *args)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not (tmp_path / "pipeline").exists()
