"""Simulations of a whole spec: the user's own functions, executed under faults, in virtual time.

The REFERENCE is a run of the spec without faults on one worker. Each seed is one run on simulated workers
with faults. Its results must have the same bits, its ledger must add up, no pass or lease may remain open, and
it must end within a bounded time after the faults stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import shlex
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np

from pipedist.core import trees
from pipedist.core.import_guard import reject_during_import
from pipedist.core.temp_dirs import ScratchFolder
from pipedist.core.types import Tree
from pipedist.errors import CallError, PipedistError, PlanError, UsageError
from pipedist.outputs.databases import PROGRESS
from pipedist.protocol.codec import encode
from pipedist.runs.api import in_own_thread
from pipedist.runs.result import Result
from pipedist.runs.run import Run, SpecLike
from pipedist.spec import RunSpec, Spec, load
from pipedist.spec.interpolation import read_setting
from pipedist.testing.cooperative_threads import current_threads
from pipedist.testing.faults import USUAL_FAULTS, Faults
from pipedist.testing.simulated_cluster import CheckedCoordinator, SimulatedCluster
from pipedist.testing.virtual_clock import SimulationStalled, VirtualLoop, virtual_clock

RECOVERY_S = 600.0  # time of a run after the faults stop, besides 100 times its time without faults
_exclusive = threading.Lock()  # held by the running simulation: its clock replaces that of the whole process

REASONS = """\
Without faults, on one worker, two runs of the spec gave the same results. So either a replica function (a
combiner, an update) depends on earlier calls in its process, on the worker, or on the number of attempts: it is
not deterministic in (shard, with, ctx). Or this is a defect of pipedist: please report it."""

NOT_DETERMINISTIC = """\
A replica function (a combiner, an update, a dataset's function) is not deterministic in (shard, with, ctx): it
uses the time, randomness other than ctx.rng, or state of an earlier call."""

_SHOWN_CHARS = 80


class SimulationFailure(AssertionError):
    """A simulation found a violation; the text describes it, and how to reproduce it."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies the results of a run, to the bit."""

    digests: Mapping[str, str] = field(default_factory=dict)  # by "stage NAME" and "file NAME"
    values: Mapping[str, Tree] = field(default_factory=dict)  # by the same names, to describe a difference
    error: str = ""  # the error of a failed run without its variable parts (worker, attempts), or ""


def fingerprint_of_result(result: Result) -> Fingerprint:
    digests: dict[str, str] = {}
    values: dict[str, Tree] = {}
    for name, value in result.by_stage.items():
        if isinstance(value, Path):
            continue
        values[f"stage {name}"] = value
        digests[f"stage {name}"] = _digest(encode(value))
    for path in result.files.values():
        digests[f"file {path.name}"] = _digest(_contents(path))
        value = _value_of(path)
        if value is not None:
            values[f"file {path.name}"] = value
    return Fingerprint(digests, values)


def _contents(path: Path) -> Iterator[bytes]:
    """Yield what an output must have in common in all runs: its bytes, or the rows of a database, which vary."""
    if path.is_dir():
        for file in sorted(each for each in path.rglob("*") if each.is_file()):
            yield from (os.fsencode(file.relative_to(path)), file.read_bytes())
    elif path.suffix == ".sqlite":
        import sqlite3

        with contextlib.closing(sqlite3.connect(path)) as rows:
            yield from (line.encode() for line in rows.iterdump() if PROGRESS not in line)
    elif path.suffix == ".duckdb":
        import duckdb

        with duckdb.connect(path, read_only=True) as database:
            for (name,) in database.execute("SELECT table_name FROM duckdb_tables() ORDER BY 1").fetchall():
                if name != PROGRESS:
                    yield repr((name, database.table(name).fetchall())).encode()
    else:
        yield path.read_bytes()


def _value_of(path: Path) -> Tree:
    """Return what a file of an output holds; None for formats other than these."""
    match path.suffix:
        case ".npy":
            return np.load(path)
        case ".npz":
            with np.load(path) as arrays:
                return dict(arrays)
        case ".json":
            return json.loads(path.read_bytes())
        case ".jsonl":
            return [json.loads(line) for line in path.read_bytes().splitlines()]
        case ".csv":
            return np.array(path.read_text("utf-8").splitlines())
    return None


def fingerprint_of_error(error: Exception) -> Fingerprint:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, CallError):
        text = f"CallError: stage {error.stage}, step {error.step}, replica {error.replica}: {error.cause}"
    return Fingerprint(error=text)


def _digest(frames: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for frame in frames:
        digest.update(frame)
        digest.update(b"|")
    return digest.hexdigest()


def difference(expected: Fingerprint, actual: Fingerprint) -> str:
    """Describe the differences of two runs, or return ""."""
    if expected.error != actual.error:
        return f"the run ended with {actual.error or 'no error'}, expected {expected.error or 'none'}"
    differences = []
    for name in {**expected.digests, **actual.digests}:
        if expected.digests.get(name) == actual.digests.get(name):
            continue
        if name in expected.values and name in actual.values:
            differences.append(f"{name} {_first_difference(expected.values[name], actual.values[name])}")
        else:
            differences.append(f"{name} {'differs' if name in actual.digests else 'is missing'}")
    return "; ".join(differences)


def _first_difference(expected: Tree, actual: Tree) -> str:
    """Describe the first leaf in which two trees differ, with its values."""
    expected_leaves, actual_leaves = trees.flatten(expected)[0], trees.flatten(actual)[0]
    paths, others = trees.paths(expected), trees.paths(actual)
    if paths != others:
        return f"has another structure: {_only(others, paths)}, expected {_only(paths, others)}"
    for path, a, b in zip(paths, expected_leaves, actual_leaves, strict=True):
        if _digest(encode(a)) != _digest(encode(b)):
            at = f"at {path} " if path else ""
            return f"{at}is {_short(b, a)}, expected {_short(a, b)}"
    return "differs"


def _only(paths: Sequence[str], others: Sequence[str]) -> str:
    """Return the number of leaves of a tree, and the first one that another tree lacks."""
    alone = [path for path in paths if path not in set(others)]
    return f"{len(paths)} leaves" + (f", including {alone[0] or 'the value itself'}" if alone else "")


def _short(value: Tree, other: Tree) -> str:
    """Format a value; for two arrays of one shape, their first differing element."""
    arrays = isinstance(value, np.ndarray) and isinstance(other, np.ndarray) and value.dtype.kind != "O"
    if arrays and value.shape == other.shape:
        if value.ndim == 0:
            return str(value[()])
        differs = np.argwhere(~((value == other) | ((value != value) & (other != other))))
        if len(differs):
            index = tuple(int(i) for i in differs[0])
            return f"{value[index]} at index {list(index)}"
    return f"{value:.17g}" if isinstance(value, float) else f"{value!s:.{_SHOWN_CHARS}}"


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The outcome of one simulated run."""

    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    result: Result | None = None  # None if the run failed
    took_s: float = 0.0  # virtual time
    counts: Counter[str] = field(default_factory=Counter)  # number of faults, by kind
    poisoned: int = 0  # number of messages of superseded attempts, whose results were replaced
    violation: str = ""  # the first violation, or ""
    error: PipedistError | None = None  # the error of a failed run


class SpecSimulation:
    """Runs one spec repeatedly, in simulated clusters.

    Args:
        spec: a path, a dict, or a loaded spec.
        workers: number of simulated workers, at least 1.
        faults: the rates of the faults; None: most kinds, at low rates, as `pipedist simulate` has them.
        costs: seconds of virtual time of a call, by stage; such a stage is not executed.
        params: values of the spec's `params`.
        sets: the same as texts, "NAME=VALUE".

    Raises:
        SpecError: the spec is invalid.
        UsageError: a key of `costs` is not a run stage, a stage with `compile` has no cost, or `workers` is out of
            range.

    Example:
        >>> SpecSimulation("spec.yaml", faults=Faults(crash=0.05)).check(seed=7).result["total"]
    """

    def __init__(
        self,
        spec: SpecLike,
        *,
        workers: int = 3,
        faults: Faults | None = None,
        costs: Mapping[str, float] | None = None,
        params: Mapping[str, Tree] | None = None,
        sets: Sequence[str] = (),
    ) -> None:
        self._file = os.fspath(spec) if isinstance(spec, str | os.PathLike) else ""
        given = {name: _setting(name, value) for name, value in (params or {}).items()}
        self._sets = (*sets, *(text for text in given.values() if text))
        self._can_replay = bool(self._file) and all(given.values())
        self._spec = spec if isinstance(spec, Spec) else load(spec, params=params, sets=sets)
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise UsageError(f"workers must be an integer >= 1, got {workers!r}")
        self._workers = workers
        self._faults = USUAL_FAULTS if faults is None else faults
        self._costs = dict(costs or {})
        for stage in self._costs:
            if not isinstance(self._spec.stages.get(stage), RunSpec):
                runs = [n for n, s in self._spec.stages.items() if isinstance(s, RunSpec)]
                raise UsageError(
                    f"costs: {stage!r} is not a run stage; the run stages are: {', '.join(runs) or 'none'}"
                )
        for name, run in self._spec.stages.items():
            if isinstance(run, RunSpec) and run.compile and name not in self._costs:
                raise UsageError(
                    f"stage {name} is compiled by JAX, whose devices belong to one process, but simulated workers "
                    f"share this one. Simulate a cost in its place: --costs {name}=0.01"
                )
        self._reference: SimulatedRun | None = None

    @property
    def reference(self) -> SimulatedRun:
        """The run without faults, on one worker.

        Raises:
            SimulationFailure: the run does not end, or a second run has other results.
        """
        if self._reference is None:
            first = self._run_once(0, 1, Faults(), 0.0, 1e6)
            if isinstance(first.error, UsageError):  # no call has run
                raise first.error
            if first.violation:
                raise SimulationFailure(f"without faults, on one worker: {first.violation}")
            again = self._run_once(1, 1, Faults(), 0.0, 1e6)
            violation = again.violation or difference(first.fingerprint, again.fingerprint)
            if violation:
                raise SimulationFailure(
                    f"without faults, on one worker, the second run: {violation}\n{NOT_DETERMINISTIC}"
                )
            self._reference = first
        return self._reference

    def run(self, seed: int) -> SimulatedRun:
        """Run the spec once, with the faults of a seed.

        Returns:
            The outcome; `violation` describes how it differs from the reference.
        """
        reference = self.reference
        faults_s = Random(seed).choice((0.5, 2.0, 6.0)) * (reference.took_s / self._workers + 1.0)
        recovery_s = RECOVERY_S + 100 * reference.took_s
        run = self._run_once(seed, self._workers, self._faults, faults_s, recovery_s)
        if isinstance(run.error, PlanError):  # the spec needs another number of workers
            raise run.error
        return replace(run, violation=run.violation or difference(reference.fingerprint, run.fingerprint))

    def check(self, seed: int) -> SimulatedRun:
        """Run the spec once, as `run` does, and raise if there is a violation.

        Raises:
            SimulationFailure: there is a violation; the text describes it, and how to reproduce it.
        """
        __tracebackhide__ = True  # a failure shows the line of the test
        run = self.run(seed)
        if run.violation:
            raise SimulationFailure(
                f"seed {seed}: {run.violation}\nreproduce: {self.replay(seed)}\n{REASONS}"
            )
        return run

    def replay(self, seed: int) -> str:
        """Return the command that reproduces a seed, or Python code if no command can."""
        if not self._can_replay:
            rates = [f"{kind}={float(rate)!r}, " for kind, rate in self._faults.rates().items() if rate]
            rates = rates or ["drop=0.0, "]  # without a rate, it would have the usual ones
            return f"with pipedist_faults({''.join(rates)}workers={self._workers}, seed={seed}) as simulated: ..."
        words = ["pipedist", "simulate", self._file, "--seed", str(seed), "--workers", str(self._workers)]
        words += ["--faults", str(self._faults)]  # also "none", because the default is not
        if self._costs:
            words += ["--costs", ",".join(f"{name}={float(cost)!r}" for name, cost in self._costs.items())]
        for text in self._sets:
            words += ["--set", text]
        return shlex.join(words)

    def _run_once(
        self, seed: int, workers: int, faults: Faults, faults_s: float, recovery_s: float
    ) -> SimulatedRun:
        reject_during_import("pipedist.testing.simulate")
        if current_threads() is not None:
            raise UsageError("a simulated function cannot start another simulation")
        threads = self._spec.threads_per_replica
        cluster = SimulatedCluster(
            workers, seed=seed, faults=faults, costs=self._costs, threads_per_replica=threads
        )
        loop = VirtualLoop()
        with _exclusive, contextlib.closing(ScratchFolder("simulate")) as folder:
            try:
                # In its own thread: the caller's may have a running loop, and Ctrl-C must end a blocked function.
                return in_own_thread(
                    lambda: self._in_virtual_time(loop, cluster, Path(folder.path), faults_s, recovery_s),
                    loop.interrupt,
                    "pipedist-simulation",
                    daemon=True,
                )
            except BaseException as stop:
                if cluster.simulated is not None and cluster.simulated.blocked_at:
                    stop.add_note(
                        f"the simulation ended while a function was blocked:\n{cluster.simulated.blocked_at}"
                    )
                raise

    def _in_virtual_time(
        self, loop: VirtualLoop, cluster: SimulatedCluster, folder: Path, faults_s: float, recovery_s: float
    ) -> SimulatedRun:
        output = io.StringIO()
        with (
            asyncio.Runner(loop_factory=lambda: loop) as runner,
            virtual_clock(loop),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            try:
                outcome = runner.run(self._run(loop, cluster, folder, faults_s, recovery_s))
            except SimulationStalled as error:
                outcome = SimulatedRun(violation=str(error))
            except asyncio.CancelledError:
                outcome = SimulatedRun(violation="the run was cancelled")
            except TimeoutError:
                text = f"the run did not end within {recovery_s:g} s of virtual time after the faults stopped"
                outcome = SimulatedRun(violation=text)
            simulated = cluster.simulated
            defects = [*loop.errors, *(simulated.defects if simulated is not None else ())]
            if defects:  # other violations follow from it
                outcome = replace(outcome, violation=f"{type(defects[0]).__name__}: {defects[0]}")
            if simulated is not None:
                counts, poisoned = simulated.network.counts, simulated.poisoned
                outcome = replace(outcome, counts=counts, poisoned=poisoned)
            return replace(outcome, took_s=loop.now)

    async def _run(
        self, loop: VirtualLoop, cluster: SimulatedCluster, folder: Path, faults_s: float, recovery_s: float
    ) -> SimulatedRun:
        output = folder / "out" if self._spec.outputs else None
        task = asyncio.current_task()
        assert task is not None
        loop.on_interrupt = task.cancel
        if loop.is_interrupted:
            task.cancel()
        async with asyncio.timeout(faults_s + recovery_s), cluster:
            simulated, coordinator = cluster.simulated, cluster.coordinator
            assert simulated is not None
            assert isinstance(coordinator, CheckedCoordinator)
            loop.call_later(faults_s, simulated.stop_faults)
            simulated.on_defect = task.cancel
            outcome = SimulatedRun()
            try:
                async with Run(self._spec, cluster=cluster, output=output) as run:
                    result = await run.results()
                    outcome = SimulatedRun(fingerprint_of_result(result), result)
            except PipedistError as error:
                outcome = replace(outcome, fingerprint=fingerprint_of_error(error), error=error)
            if outcome.result is not None:
                ledger = outcome.result.ledger
                if ledger.elements != ledger.committed + ledger.quarantined or ledger.lost:
                    return replace(outcome, violation=f"the ledger does not add up: {ledger}")
            left = coordinator.left_open()
            return replace(outcome, violation=left and f"resources of the ended run remain: {left}")


def _setting(name: str, value: Tree) -> str:
    """Return a parameter as an argument of `--set`, or "" if that is not possible."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        return f"{name}={text}" if read_setting(text) == value else ""
    except (TypeError, ValueError):  # for example an array
        return ""


def simulate(
    spec: SpecLike,
    *,
    seeds: Sequence[int] = range(100),
    workers: int = 3,
    faults: Faults | None = None,
    costs: Mapping[str, float] | None = None,
    params: Mapping[str, Tree] | None = None,
) -> Counter[str]:
    """Run a spec in simulated clusters with faults, once per seed.

    May be called inside a running event loop too.

    Args:
        seeds: each determines the faults of one run.
        spec, workers, faults, costs, params: see `SpecSimulation`.

    Returns:
        The number of faults, by kind.

    Raises:
        SimulationFailure: a run differs from the one without faults; the first such seed is reported.

    Example:
        >>> simulate("spec.yaml", seeds=range(20), faults=Faults(drop=0.05, crash=0.05))
    """
    simulation = SpecSimulation(spec, workers=workers, faults=faults, costs=costs, params=params)
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += simulation.check(seed).counts
    return counts
