"""Runs that are killed at a record of their journal, and resumed; and what is to be true of them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipedist.journal.history import History, read_history
from tests.preloaded import ROOT, run_module

F = "tests.journal.functions"
REPLICAS = 2
NEVER = 10**9
"""A record that no run has: it is executed step by step, and not killed."""


def head(name: str, seed: int = 0) -> str:
    """The first keys of a spec; calls that take long are not begun a second time elsewhere: they are counted."""
    return f"""
pipedist: 1
name: {name}
replicas: {REPLICAS}
seed: {seed}
code: {ROOT}
cluster: {{speculation: off}}"""


def everything(folder: Path, steps: int) -> str:
    """A spec with every kind of value: folded, gathered, kept for a later phase, inline, streamed."""
    return f"""{head("many", 5)}
dataset: {{range: {8 * steps - 1}, batch: 8}}
stages:
  numbers: {{run: "{F}:numbers", with: {{calls: "{folder}/calls"}}}}
  mean: {{reduce: mean, of: numbers, axis: 0}}
  each: {{reduce: sum, of: numbers, axis: 0, per: step}}
  merged: {{reduce: "{F}:merge", of: numbers}}
  rows: {{gather: 0, of: numbers}}
  inline: {{gather: 0, of: numbers, per: epoch}}
  centred:
    run: "{F}:centred"
    of: numbers
    with: {{mean: "${{stages.mean}}", calls: "{folder}/calls"}}
  spread: {{reduce: sum, of: centred, axis: 0}}
  again: {{gather: 0, of: centred}}
outputs: {{each: each.jsonl, rows: rows.npz, again: again.csv}}
"""


def streamed(folder: Path, steps: int) -> str:
    """Runs that read each other's values while they are made, in steps of other sizes, in two epochs."""
    return f"""{head("streamed", 5)}
dataset: {{range: {4 * steps - 1}, batch: 8, epochs: 2, shuffle: true}}
stages:
  numbers: {{run: "{F}:numbers", with: {{calls: "{folder}/calls"}}}}
  sum: {{reduce: sum, of: numbers, axis: 0}}
  scaled: {{run: "{F}:scaled", of: numbers, batch: 20, with: {{calls: "{folder}/calls"}}}}
  each: {{reduce: sum, of: scaled, axis: 0, per: step}}
  halved: {{run: "{F}:halved", of: scaled, batch: 6, with: {{calls: "{folder}/calls"}}}}
  rows: {{gather: 0, of: halved}}
outputs: {{each: each.jsonl, rows: rows.npy}}
"""


def gang(folder: Path, steps: int) -> str:
    """A gang, fed by a source without random access, in two epochs."""
    return f"""{head("gang")}
dataset: {{function: {{call: "{F}:one_by_one", with: {{count: {4 * steps - 3}}}}}, batch: 4, epochs: 2}}
stages:
  y: {{run: "{F}:together", collectives: true, with: {{calls: "{folder}/calls"}}}}
  t: {{reduce: sum, of: y, axis: 0, per: epoch}}
  rows: {{gather: 0, of: y}}
outputs: {{rows: rows.csv}}
"""


def training(folder: Path, steps: int) -> str:
    """A state that changes with each step, and held-out data read after each of three epochs."""
    return f"""{head("descent", 3)}
datasets:
  train:
    function: {{call: "tests.runs.training_functions:rows", with: {{count: {8 * steps}, seed: 1}}}}
    batch: 8
    epochs: 3
    shuffle: true
  held_out:
    function: {{call: "tests.runs.training_functions:rows", with: {{count: 12, seed: 2}}}}
    batch: 4
stages:
  gradients:
    run: "{F}:gradients"
    of: train
    with: {{weights: "${{state.weights}}", calls: "{folder}/calls"}}
  sums: {{reduce: sum, of: gradients, axis: null, per: step}}
  weights:
    update: "{F}:descend"
    of: sums
    init: {{function: "tests.runs.training_functions:first", with: {{bias: 0.5}}}}
    with: {{rate: 0.1, calls: "{folder}/calls"}}
  errors:
    run: "{F}:errors"
    of: held_out
    with: {{weights: "${{state.weights}}", calls: "{folder}/calls"}}
  loss: {{reduce: sum, of: errors, axis: 0, per: epoch}}
outputs: {{weights: weights.npz, loss: loss.json}}
"""


@dataclass(frozen=True)
class Kind:
    """A kind of job.

    Args:
        spec: returns its text, of a folder and a number of steps an epoch.
        passes: by stage, what the pass that executes it is called in the journal.
    """

    spec: Callable[[Path, int], str]
    passes: dict[str, str]


MANY = Kind(everything, {"numbers": "0/dataset", "centred": "1/numbers"})
STREAMED = Kind(streamed, {"numbers": "0/dataset", "scaled": "0/numbers+0+20", "halved": "0/scaled+0+6"})
GANG = Kind(gang, {"together": "0/dataset"})
TRAINING = Kind(training, {"gradients": "0/train", "errors": "0/held_out"})


@dataclass
class Job:
    """A spec that is run, killed and resumed.

    Args:
        folder: for everything of it.
        spec: its text, in which `calls` is a file in the folder.
    """

    folder: Path
    spec: str
    stderr: str = field(default="", init=False)
    """What the last process wrote on standard error."""

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True, parents=True)
        (self.folder / "spec.yaml").write_text(self.spec)

    @property
    def journal(self) -> Path:
        return self.folder / "out" / ".pipedist" / "journal"

    def history(self) -> History:
        found = read_history(self.journal)
        assert found is not None
        return found

    def run(self, *flags: str, kill_at: int = 0, workers: int = 2, fresh: bool = False) -> int:
        """Run in a process of its own, and return its exit code, negative where a signal ended it.

        Args:
            kill_at: the record when the process kills itself; 0: never, and it is an ordinary run.
            fresh: start an interpreter for it: with its own hash seed, and libraries that read its environment.
        """
        command = ["tests.journal.killed", str(kill_at), "run", "spec.yaml"]
        command += ["--workers", str(workers), "--output", "out", "--json", *flags]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = (
            subprocess.run(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env=env,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if fresh
            else run_module(*command, cwd=self.folder, env=env)
        )
        self.stderr = done.stderr
        if done.returncode == 0:
            self.document: dict[str, Any] = json.loads(done.stdout)
        return done.returncode

    def calls(self) -> Counter[tuple[str, int, int]]:
        """Return how often each call (stage, step, replica) was executed until now."""
        return self.calls_in(self.folder / "calls")

    @staticmethod
    def calls_in(path: Path) -> Counter[tuple[str, int, int]]:
        """Return the same of a file."""
        lines = path.read_text().splitlines() if path.exists() else []
        parts = [line.split() for line in lines]
        return Counter((stage, int(step), int(replica)) for stage, step, replica in parts)

    def outcome(self) -> tuple[str, dict[str, str]]:
        """Return the results, and the SHA-256 of each file: what has to be the same."""
        results = json.dumps(self.document["results"], sort_keys=True).replace(str(self.folder), "")
        files = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((self.folder / "out").iterdir())
            if path.is_file()
        }
        return results, files


def committed(history: History | None, stages: dict[str, str]) -> set[tuple[str, int, int]]:
    """Return the calls that a journal says are committed.

    Args:
        stages: the pass that executes each stage.
    """
    passes = {} if history is None else history.passes
    return {
        (stage, step, replica)
        for stage, key in stages.items()
        for step in range(passes[key].steps if key in passes else 0)
        for replica in range(REPLICAS)
    }


def kill_and_resume(
    folder: Path, spec: str, record: int, stages: dict[str, str], workers: int = 1, *, or_end: bool = False
) -> Job:
    """Kill a run when a record is durable, resume it, and check that no journalled call is done again.

    Args:
        or_end: it may come to its end before: held-out readings are committed alone, or with the training.
    """
    job = Job(folder, spec)
    code = job.run(kill_at=record)
    if or_end and code == 0:
        return job
    assert code == -signal.SIGKILL, job.stderr
    done = committed(read_history(job.journal), stages)
    before = job.calls()
    assert job.run("--resume", workers=workers) == 0, job.stderr
    again = {call for call, count in job.calls().items() if count > before[call]} & done
    assert not again, f"journalled calls were done again: {sorted(again)[:5]}"
    assert not job.history().problems
    return job
