"""What a run of a changed spec takes over, and what it says of the rest."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.journal.killing import Job, everything, training

STEPS = 8


def changed(job: Job, *replacements: tuple[str, str]) -> None:
    for old, new in replacements:
        assert old in job.spec
        job.spec = job.spec.replace(old, new)
    (job.folder / "spec.yaml").write_text(job.spec)


def stages_called(job: Job, before: int) -> set[str]:
    lines = (job.folder / "calls").read_text().splitlines()[before:]
    return {line.split()[0] for line in lines}


SECOND = (
    ("again: {gather: 0, of: centred}", "again: {gather: 0, of: centred, per: epoch}"),
    ("again: again.csv", "again: again.json"),
)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run with another second phase, from its beginning."""
    folder = tmp_path_factory.mktemp("fresh")
    job = Job(folder, everything(folder, STEPS))
    changed(job, *SECOND)
    assert job.run() == 0, job.stderr
    return job


@pytest.mark.parametrize(
    "end",
    [
        "finished",
        pytest.param("killed in phase 2", marks=pytest.mark.slow),
        pytest.param("killed in phase 1", marks=pytest.mark.slow),
    ],
)
def test_a_change_of_the_second_phase_keeps_the_first(fresh: Job, tmp_path: Path, end: str) -> None:
    job = Job(tmp_path / "job", everything(tmp_path / "job", STEPS))
    kill_at = {"finished": 0, "killed in phase 2": 2 + STEPS + 4, "killed in phase 1": 4}[end]
    assert job.run(kill_at=kill_at) == (-signal.SIGKILL if kill_at else 0), job.stderr
    before = sum(job.calls().values())
    first = job.history().header.run
    changed(job, *SECOND)
    assert job.run("--resume") == 2
    assert "stages.again.per: 'run' there, 'epoch' now" in job.stderr

    assert job.run("--reuse") == 0, job.stderr
    if end == "killed in phase 1":
        assert (
            "reusing the first 3 steps of numbers: its definition and its inputs are unchanged" in job.stderr
        )
        assert job.calls()["numbers", 2, 1] == 1
    else:
        assert "reusing all steps of numbers" in job.stderr
        assert stages_called(job, before) == {"centred"}
    assert "again: centred, because\n    stages.again.per" in job.stderr.replace("\n      ", "\n    ")
    assert job.document["run"] != first
    assert not job.history().problems
    assert job.outcome() == fresh.outcome()


@pytest.mark.slow
def test_what_decides_everything_keeps_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", everything(tmp_path / "job", STEPS))
    assert job.run() == 0, job.stderr
    changed(job, ("seed: 5", "seed: 6"))
    assert job.run("--reuse") == 0, job.stderr
    assert job.stderr.count("seed: 5 there, 6 now") == 2
    assert "reusing" not in job.stderr
    assert set(job.calls().values()) == {2}
    fresh = Job(tmp_path / "fresh", job.spec.replace(str(tmp_path / "job"), str(tmp_path / "fresh")))
    assert fresh.run() == 0, fresh.stderr
    assert job.outcome() == fresh.outcome()


def test_a_changed_module_is_a_changed_definition(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(x):\n    return x * 2\n")
    spec = """
pipedist: 1
name: modules
dataset: {range: 40, batch: 4}
stages: {y: {run: "mine:f"}, t: {reduce: sum, of: y, axis: 0}, n: {reduce: max, of: dataset, axis: 0}}
outputs: {t: t.json}
"""
    job = Job(tmp_path, spec)
    assert job.run() == 0, job.stderr
    # of another length: Python takes bytecode of the same second and length for that of the new file
    (tmp_path / "mine.py").write_text("def f(x):\n    return x * 3.0\n")
    changed(job, ("reduce: max", "reduce: min"))
    assert job.run("--reuse") == 0, job.stderr
    assert "module mine has changed" in job.stderr
    assert (tmp_path / "out" / "t.json").read_text() == f"{3.0 * sum(range(40))}\n"


def test_a_value_that_has_a_file_is_reused_by_a_later_phase(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def same(x):\n    return x\ndef by(x, g):\n    return x * g.sum()\n")
    spec = """
pipedist: 1
name: later
dataset: {range: 40, batch: 4}
stages:
  y: {run: "mine:same"}
  g: {gather: 0, of: y}
outputs: {g: g.npy}
"""
    job = Job(tmp_path, spec)
    assert job.run() == 0, job.stderr
    by = '  z: {run: "mine:by", of: dataset, with: {g: "${stages.g}"}}\n  t: {reduce: sum, of: z, axis: 0}\n'
    changed(job, ("outputs:", f"{by}outputs:"))
    assert job.run("--reuse") == 0, job.stderr
    assert "reusing all steps of y" in job.stderr
    assert job.document["results"]["t"] == sum(range(40)) ** 2


def test_what_ends_a_training_decides_what_later_phases_read_of_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def same(x):\n    return x\n"
        "def plus(old, more):\n    return old + more\n"
        "def once(old, new):\n    return True\n"
        "def thrice(old, new):\n    return bool(new >= 3 * 28)\n"
        "def by(x, t):\n    return x * 0 + t\n"
    )
    spec = """
pipedist: 1
name: ends
dataset: {range: 8, batch: 4, epochs: 6}
stages:
  y: {run: "mine:same"}
  s: {reduce: sum, of: y, axis: 0, per: epoch}
  w: {update: "mine:plus", of: s, init: 0, until: "mine:once"}
  t: {reduce: sum, of: y, axis: 0}
  z: {run: "mine:by", of: dataset, with: {t: "${stages.t}"}}
  q: {reduce: sum, of: z, axis: 0}
outputs: {q: q.json}
"""
    job = Job(tmp_path, spec)
    assert job.run() == 0, job.stderr
    assert (tmp_path / "out" / "q.json").read_text() == f"{8 * 28}\n"
    changed(job, ("mine:once", "mine:thrice"))
    assert job.run("--reuse") == 0, job.stderr
    assert (tmp_path / "out" / "q.json").read_text() == f"{24 * 84}\n"
    assert job.stderr.count("stages.w.until: 'mine:once' there, 'mine:thrice' now") == 2


def test_a_training_is_reused_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    job = Job(tmp_path, training(tmp_path, 2))
    assert job.run() == 0, job.stderr
    loss = tmp_path / "out" / "loss.json"
    before = loss.read_bytes()
    loss.unlink()
    assert job.run("--reuse") == 0, job.stderr
    assert loss.read_bytes() == before
    assert set(job.calls().values()) == {1}
    loss.unlink()
    (job.journal / "0-held_out.loss.log").unlink()
    assert job.run("--reuse") == 0, job.stderr
    assert "it is part of the training of errors, which is executed again" in job.stderr
    assert {job.calls()[stage, 0, 0] for stage in ("gradients", "errors")} == {2}
    assert job.history().header.spares == {}  # a training is not taken up again in parts


@pytest.mark.parametrize("what", ["module", pytest.param("input", marks=pytest.mark.slow)])
def test_a_change_since_a_finished_run_of_the_same_spec(tmp_path: Path, what: str) -> None:
    (tmp_path / "mine.py").write_text("def f(x):\n    return x['n'] * 2\n")
    (tmp_path / "n.csv").write_text("n\n1\n2\n3\n")
    spec = """
pipedist: 1
name: since
dataset: {csv: {path: n.csv, columns: {n: int64}}, batch: 2}
stages: {y: {run: "mine:f"}, t: {reduce: sum, of: y, axis: 0}}
outputs: {t: t.json}
"""
    job = Job(tmp_path, spec)
    assert job.run() == 0, job.stderr
    assert job.run("--resume") == 0
    assert "is finished: these are its results" in job.stderr
    assert "changed" not in job.stderr
    if what == "module":
        (tmp_path / "mine.py").write_text("def f(x):\n    return x['n'] * 3.0\n")
        expected, total = "module mine has changed", "18.0\n"
    else:
        (tmp_path / "n.csv").write_text("n\n1\n2\n3\n40\n")
        expected, total = "n.csv has changed", "92\n"
    assert job.run("--resume") == 2
    assert expected in job.stderr
    assert "--reuse" in job.stderr
    assert job.run("--resume", "--force-code") == 0
    assert expected in job.stderr, "the values are those of before, with a notice"
    assert (tmp_path / "out" / "t.json").read_text() == "12\n"
    assert job.run("--reuse") == 0, job.stderr
    assert expected in job.stderr
    assert (tmp_path / "out" / "t.json").read_text() == total
    assert job.run("--resume") == 0
    assert "changed" not in job.stderr


def test_a_file_of_a_finished_run_that_is_gone(tmp_path: Path) -> None:
    spec = """
pipedist: 1
name: gone
dataset: {range: 4, batch: 2}
stages: {t: {reduce: sum, of: dataset, axis: 0}}
outputs: {t: t.json}
"""
    job = Job(tmp_path, spec)
    assert job.run() == 0, job.stderr
    (tmp_path / "out" / "t.json").unlink()
    assert job.run("--resume") == 2
    assert "t.json of the finished run" in job.stderr
    assert job.run("--reuse") == 0, job.stderr
    assert (tmp_path / "out" / "t.json").read_text() == "6\n"


def test_a_reexported_function_changes_with_its_own_module(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("from mine.own import f\n")
    (tmp_path / "mine" / "own.py").write_text("def f(x):\n    return x * 2\n")
    spec = """
pipedist: 1
name: packages
datasets: {d: {range: 8, batch: 4}, e: {range: 8, batch: 4}}
stages: {y: {run: "mine:f", of: d}, t: {reduce: sum, of: y, axis: 0}, n: {reduce: max, of: e, axis: 0}}
outputs: {t: t.json}
"""
    job = Job(tmp_path, spec)
    assert job.run() == 0, job.stderr
    (tmp_path / "mine" / "own.py").write_text("def f(x):\n    return x * 3.0\n")
    changed(job, ("reduce: max", "reduce: min"))
    assert job.run("--reuse") == 0, job.stderr
    assert "module mine.own has changed" in job.stderr
    assert (tmp_path / "out" / "t.json").read_text() == "84.0\n"


def test_a_pass_that_comes_in_another_phase_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nHERE = os.path.dirname(__file__)\n"
        "def shifted(x, by=()): return x + sum(by)\n"
        "def add(state, value): return state + value\n"
        "def tenfold(x):\n"
        "    if 12 in x and not os.path.exists(HERE + '/mended'): raise ValueError('not yet')\n"
        "    return x * 10\n"
    )
    alone = """
pipedist: 1
name: phases
dataset: {range: 16, batch: 4}
stages:
  x: {run: "mine:tenfold"}
  rows: {gather: 0, of: x}
outputs: {rows: rows.json}
"""
    beside_a_training = alone.replace(
        "outputs:",
        """  early: {run: "mine:shifted"}
  all: {gather: 0, of: early}
  late: {run: "mine:shifted", of: early, with: {by: "${stages.all}"}}
  total: {reduce: sum, of: late, axis: 0, per: step}
  state: {update: "mine:add", of: total, init: 0}
outputs:""",
    )
    job = Job(tmp_path, beside_a_training)
    assert job.run() == 1
    assert job.history().passes["2/dataset"].steps == 3
    (tmp_path / "mended").touch()
    job.spec = alone
    changed(job)
    assert job.run("--reuse") == 0, job.stderr
    assert "again: x, because" in job.stderr
    assert json.loads((tmp_path / "out" / "rows.json").read_text()) == [10 * n for n in range(16)]


def test_a_missing_file_is_made_again(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", everything(tmp_path / "job", STEPS))
    assert job.run() == 0, job.stderr
    (job.folder / "out" / "rows.npz").unlink()
    changed(job, ("again: again.csv", "again: again.json"))
    assert job.run("--reuse") == 0, job.stderr
    assert (job.folder / "out" / "rows.npz").exists()
    assert set(job.calls().values()) == {1}, "it is written again from the journal"


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_quarantined_elements_are_listed_again(tmp_path: Path, end: str) -> None:
    (tmp_path / "mine.py").write_text(
        "def f(x):\n    if 13 in x: raise ValueError('indigestible')\n    return x * 2\n"
    )
    spec = """
pipedist: 1
name: picky
replicas: 2
dataset: {range: 40, batch: 4}
stages:
  y: {run: "mine:f", on_error: quarantine}
  t: {reduce: sum, of: y, axis: 0}
outputs: {t: t.json}
"""
    job = Job(tmp_path, spec)
    assert job.run(kill_at=5 if end == "killed" else 0) == (-signal.SIGKILL if end == "killed" else 3)
    changed(job, ("replicas: 2", "replicas: 4"))
    assert job.run("--reuse") == 3, job.stderr
    listed = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["element"] for line in listed] == [13]
    assert (tmp_path / "out" / "t.json").read_text() == f"{2 * (sum(range(40)) - 13)}\n"
