"""Files and modules that change between a run and its resume: nothing stale is printed, nothing is mixed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.journal.killing import Job

ELEMENTS = range(40)

SPEC = """
pipedist: 1
name: stale
dataset: {range: 40, batch: 4}
stages:
  y:
    run: "pack.first:f"
    with: {path: "${spec.dir}/model.json"}
    inputs: ["extra/*.txt"]
  t: {reduce: sum, of: y, axis: 0}
  rows: {gather: 0, of: y}
outputs: {t: t.json, rows: rows.npy}
"""

FIRST = "from .middle import scaled\ndef f(x, path):\n    return scaled(x, path)\n"
MIDDLE = """
import json
from pathlib import Path
def scaled(x, path):
    from pack import last
    extra = int((Path(path).parent / "extra" / "a.txt").read_text())
    return x * json.loads(Path(path).read_text())["scale"] * last.TIMES * extra
"""


def job_of(folder: Path) -> Job:
    for name, text in {
        "pack/first.py": FIRST,
        "pack/middle.py": MIDDLE,
        "pack/last.py": "TIMES = 1\n",
        "pack/unused.py": "TIMES = 1\n",
        "extra/a.txt": "1",
        "model.json": '{"scale": 1}',
    }.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    return Job(folder, SPEC)


CHANGES = {
    "with": ("model.json", '{"scale": 1000}', "model.json has changed"),
    "module": ("pack/last.py", "TIMES = 1000\n", "module pack.last has changed"),
    "inputs": ("extra/a.txt", "1000", "extra/a.txt has changed"),
}


def total(job: Job) -> int:
    return int(json.loads((job.folder / "out" / "t.json").read_text()))


@pytest.mark.parametrize("what", [*CHANGES])
def test_a_finished_run_is_not_printed_when_it_is_stale(tmp_path: Path, what: str) -> None:
    job = job_of(tmp_path)
    assert job.run() == 0, job.stderr
    (tmp_path / "pack/unused.py").write_text("TIMES = 22\n")
    assert job.run("--resume") == 0, job.stderr
    name, text, message = CHANGES[what]
    (tmp_path / name).write_text(text)
    assert job.run("--resume") == 2
    assert "its results are stale" in job.stderr
    assert message in job.stderr
    assert job.run("--resume", "--force-code") == 0, job.stderr
    assert message in job.stderr
    assert total(job) == sum(ELEMENTS)
    assert job.run("--reuse") == 0, job.stderr
    assert total(job) == 1000 * sum(ELEMENTS)
    assert job.run("--resume") == 0, job.stderr


@pytest.mark.parametrize("what", [*CHANGES])
def test_an_unfinished_run_does_not_mix_old_and_new_rows(tmp_path: Path, what: str) -> None:
    import numpy as np

    job = job_of(tmp_path)
    assert job.run(kill_at=5) == -signal.SIGKILL, job.stderr
    name, text, message = CHANGES[what]
    (tmp_path / name).write_text(text)
    assert job.run("--resume") == 2
    assert message in job.stderr
    assert "--reuse" in job.stderr
    if what == "module":
        assert str(tmp_path / name) in job.stderr
        assert "--force-code" in job.stderr
    assert job.run("--reuse") == 0, job.stderr
    assert np.load(tmp_path / "out" / "rows.npy").tolist() == [1000 * n for n in ELEMENTS]


@pytest.mark.parametrize("change", ["module", "spec"])
def test_a_refused_resume_does_not_make_an_unfinished_run_replaceable(tmp_path: Path, change: str) -> None:
    job = job_of(tmp_path)
    assert job.run(kill_at=5) == -signal.SIGKILL, job.stderr
    if change == "module":
        (tmp_path / "pack/last.py").write_text("TIMES = 1000\n")
        assert job.run("--resume") == 2
    else:  # all of its steps are spares now, and the run fails in its first step
        (tmp_path / "pack/first.py").write_text("def f(x, path):\n    raise ValueError('no')\n")
        assert job.run("--reuse") == 1
        (tmp_path / "pack/first.py").write_text(FIRST)
    assert job.run() == 2
    assert "--restart discards it" in job.stderr
    assert job.run("--reuse", "--json") == 0, job.stderr
    assert total(job) == sum(ELEMENTS) * (1000 if change == "module" else 1)


def test_a_refused_resume_leaves_a_finished_run_as_it_is(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert job.run() == 0, job.stderr
    record = tmp_path / "out/.pipedist/run.json"
    before = record.read_bytes()
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.replace("rows: rows.npy", "rows: others.npy"))
    (tmp_path / "pack/last.py").write_text("TIMES = 1000\n")
    assert job.run("--resume") == 2
    assert "module pack.last has changed" in job.stderr
    assert record.read_bytes() == before


def test_forced_code_keeps_committed_steps(tmp_path: Path) -> None:
    import numpy as np

    job = job_of(tmp_path)
    assert job.run(kill_at=5) == -signal.SIGKILL, job.stderr
    (tmp_path / "pack/last.py").write_text("TIMES = 1000\n")
    assert job.run("--resume", "--force-code") == 0, job.stderr
    assert "module pack.last has changed; committed steps are kept as they are" in job.stderr
    rows = np.load(tmp_path / "out" / "rows.npy").tolist()
    assert rows == [n if n < 16 else 1000 * n for n in ELEMENTS]


def test_a_touched_file_has_not_changed_and_a_rewritten_one_has(tmp_path: Path) -> None:
    import os

    job = job_of(tmp_path)
    assert job.run() == 0, job.stderr
    model = tmp_path / "model.json"
    before = model.stat()
    os.utime(model, ns=(1, 1))
    assert job.run("--resume") == 0, job.stderr
    model.write_text('{"scale": 2}')  # the same number of bytes
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert job.run("--resume") == 2
    assert "model.json has changed" in job.stderr


def test_a_log_that_functions_write_is_no_input(tmp_path: Path) -> None:
    spec = """
pipedist: 1
name: logs
dataset: {range: 40, batch: 4}
stages:
  y: {run: "mine:f", with: {new: new.log, old: old.log}}
  t: {reduce: sum, of: y, axis: 0}
outputs: {t: t.json}
"""
    (tmp_path / "mine.py").write_text(
        "def f(x, new, old):\n"
        "    for name in (new, old):\n"
        "        with open(name, 'a') as file:\n            file.write('called\\n')\n"
        "    return x\n"
    )
    (tmp_path / "old.log").write_text("of another run\n")
    job = Job(tmp_path, spec)
    assert job.run(kill_at=5) == -signal.SIGKILL, job.stderr
    assert job.run("--resume", kill_at=3) == -signal.SIGKILL, job.stderr
    assert job.run("--resume") == 0, job.stderr
    assert job.run("--resume") == 0, job.stderr
    (tmp_path / "old.log").write_text("something else\n")
    assert job.run("--resume") == 2


def test_an_input_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (tmp_path / "extra/a.txt").unlink()
    assert job.run() == 2
    assert "no file matches 'extra/*.txt'" in job.stderr


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_another_name_or_format_of_an_output_recomputes_nothing(tmp_path: Path, end: str) -> None:
    import numpy as np

    spec = SPEC.replace("t: t.json,", "t: t.json, each: each.csv,").replace(
        "  rows:", "  each: {reduce: sum, of: y, axis: 0, per: step}\n  rows:"
    )
    job = job_of(tmp_path)
    counted = FIRST.replace("return", "open('calls', 'a').write('x'); return")
    (tmp_path / "pack/first.py").write_text(counted)
    job.spec = spec
    (tmp_path / "spec.yaml").write_text(spec)
    if end == "finished":
        assert job.run() == 0, job.stderr
    else:
        assert job.run(kill_at=5) == -signal.SIGKILL, job.stderr
    calls = (tmp_path / "calls").read_text()
    committed = job.history().passes["0/dataset"].steps
    new = (
        spec.replace("t.json", "u.npy").replace("each.csv", "each.jsonl").replace("rows.npy", "sub/rows.csv")
    )
    (tmp_path / "spec.yaml").write_text(new)
    assert job.run("--resume") == 0, job.stderr
    if end == "finished":
        assert (tmp_path / "calls").read_text() == calls
    else:
        assert committed == 4
        assert "durable: y: 4 steps" in job.stderr
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == [".pipedist", "each.jsonl", "sub", "u.npy"]
    assert np.load(out / "u.npy") == sum(ELEMENTS)
    assert (out / "sub/rows.csv").read_text() == "value\n" + "".join(f"{n}\n" for n in ELEMENTS)
    assert len((out / "each.jsonl").read_text().splitlines()) == 10
    assert job.run("--resume") == 0, job.stderr
    assert "is finished" in job.stderr
