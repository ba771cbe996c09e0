"""Simulations of a whole spec: the user's own functions, executed under faults, in virtual time.

The REFERENCE is the spec run without faults on one worker. Each seed is one run on simulated workers
with faults. It has to give the same bits, its ledger has to add up, nothing may be left open, and it
has to come to its end within a bounded time once no new faults happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shlex
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from pipedist.core.import_guard import reject_during_import
from pipedist.core.temp_dirs import ScratchFolder
from pipedist.core.types import Tree
from pipedist.errors import PipedistError, UsageError
from pipedist.runs.api import in_own_thread
from pipedist.runs.result import Result
from pipedist.runs.run import Run, SpecLike
from pipedist.spec import RunSpec, Spec, load
from pipedist.spec.interpolation import read_setting
from pipedist.testing.faults import Faults
from pipedist.testing.fibers import current_fiber
from pipedist.testing.fingerprints import Fingerprint, difference, of_error, of_result
from pipedist.testing.simulated_cluster import CheckedCoordinator, SimulatedCluster
from pipedist.testing.simulation import SimulationFailure
from pipedist.testing.virtual_clock import virtual_clock
from pipedist.testing.virtual_loop import NothingHappens, VirtualLoop

CALM_S = 600.0
"""How long a run may take once no new faults happen, beside a hundred times its time without faults."""

_alone = threading.Lock()
"""Of the simulation that is played: its clock is that of the whole process."""

REASONS = """\
Without faults, on one worker, the spec gives the same twice. So either a replica function (a combiner, an
update) depends on what ran before it in its process, on the worker, or on how often it was tried: it is
not deterministic in (shard, with, ctx). Or this is a defect of pipedist: please report it."""

ALWAYS_ANOTHER = """\
So a replica function (a combiner, an update, a dataset's function) is not deterministic in (shard, with,
ctx): it uses the time, randomness that is not ctx.rng, or what an earlier call has left behind."""


@dataclass(frozen=True, slots=True)
class Played:
    """What came of one simulated run.

    Args:
        fingerprint: what it gave.
        result: the run's; None where it failed.
        took_s: virtual seconds.
        counts: faults that have happened, by kind.
        poisoned: messages of superseded attempts, whose results were replaced.
        violation: what was wrong, "" if nothing.
    """

    fingerprint: Fingerprint
    result: Result | None
    took_s: float
    counts: Counter[str]
    poisoned: int
    violation: str = ""
    error: PipedistError | None = None
    """How the run failed; None where it did not."""


class SpecSimulation:
    """Runs one spec again and again, in simulated clusters.

    Args:
        spec: a path, a dict, or a spec that was loaded already.
        workers: how many workers there are.
        faults: how often each kind of fault happens.
        costs: seconds of virtual time of a call, by stage; such a stage is not executed.
        params: values for the spec's `params`.
        sets: the same as texts.

    Raises:
        SpecError: the spec has mistakes.
        UsageError: a stage of `costs` is none of the spec's, or there are no workers.
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
            raise UsageError(f"workers is {workers!r}; expected an int from 1 on")
        self._workers = workers
        self._faults = Faults() if faults is None else faults
        self._costs = dict(costs or {})
        for stage in self._costs:
            if not isinstance(self._spec.stages.get(stage), RunSpec):
                runs = [n for n, s in self._spec.stages.items() if isinstance(s, RunSpec)]
                raise UsageError(f"costs: {stage!r} is no run stage; there are: {', '.join(runs) or 'none'}")
        self._reference: Played | None = None

    @property
    def reference(self) -> Played:
        """The run without faults, on one worker.

        Raises:
            SimulationFailure: it does not come to its end, or gives something else the next time.
        """
        if self._reference is None:
            first = self._play(0, workers=1, faults=Faults(), storm_s=0.0, calm_s=1e6)
            if isinstance(first.error, UsageError):  # nothing has run
                raise first.error
            if first.violation:
                raise SimulationFailure(f"without faults, on one worker: {first.violation}")
            again = self._play(1, workers=1, faults=Faults(), storm_s=0.0, calm_s=1e6)
            violation = again.violation or difference(first.fingerprint, again.fingerprint)
            if violation:
                raise SimulationFailure(
                    f"without faults, on one worker, the second time: {violation}\n{ALWAYS_ANOTHER}"
                )
            self._reference = first
        return self._reference

    def play(self, seed: int) -> Played:
        """Run the spec once, with the faults that a seed brings.

        Returns:
            What came of it; `violation` says how it differs from the reference.
        """
        reference = self.reference
        storm_s = Random(seed).choice((0.5, 2.0, 6.0)) * (reference.took_s / self._workers + 1.0)
        played = self._play(
            seed,
            workers=self._workers,
            faults=self._faults,
            storm_s=storm_s,
            calm_s=CALM_S + 100 * reference.took_s,
        )
        if played.violation:
            return played
        violation = difference(reference.fingerprint, played.fingerprint)
        if not violation:
            return played
        return replace(played, violation=violation)

    def check(self, seed: int) -> Played:
        """Run the spec once, as `play` does.

        Raises:
            SimulationFailure: something was wrong; the text says what, and how to play it again.
        """
        __tracebackhide__ = True  # of a test that fails, what the test says is of interest
        played = self.play(seed)
        if played.violation:
            raise SimulationFailure(
                f"seed {seed}: {played.violation}\nplay it again: {self.replay(seed)}\n{REASONS}"
            )
        return played

    def replay(self, seed: int) -> str:
        """Return the command that plays one seed again, or what a test says where no command can."""
        if not self._can_replay:
            rates = [f"{kind}={float(rate)!r}, " for kind, rate in self._faults.rates().items() if rate]
            return f"with faults({''.join(rates)}workers={self._workers}, seed={seed}) as simulated: ..."
        words = ["pipedist", "simulate", self._file, "--seed", str(seed), "--workers", str(self._workers)]
        words += ["--faults", str(self._faults)]  # also none: without the option there are some
        if self._costs:
            words += ["--costs", ",".join(f"{name}={float(cost)!r}" for name, cost in self._costs.items())]
        for text in self._sets:
            words += ["--set", text]
        return shlex.join(words)

    # -- one run -------------------------------------------------------------------------------

    def _play(self, seed: int, *, workers: int, faults: Faults, storm_s: float, calm_s: float) -> Played:
        reject_during_import("pipedist.testing.simulate")
        if current_fiber() is not None:
            raise UsageError("a simulation can't be run by a function that is itself being simulated")
        cluster = SimulatedCluster(
            workers,
            seed=seed,
            faults=faults,
            costs=self._costs,
            threads_per_replica=self._spec.threads_per_replica,
        )
        loop = VirtualLoop()
        with _alone, contextlib.closing(ScratchFolder("simulate")) as folder:
            try:
                # Not in the caller's thread: there a loop may be running, and Ctrl-C has to end what blocks.
                return in_own_thread(
                    lambda: self._in_virtual_time(loop, cluster, Path(folder.path), storm_s, calm_s),
                    loop.interrupt,
                    "pipedist-simulation",
                    daemon=True,
                )
            except BaseException as stop:
                if cluster.simulated is not None and cluster.simulated.left_at:
                    stop.add_note(f"a function was left where it blocked:\n{cluster.simulated.left_at}")
                raise

    def _in_virtual_time(
        self, loop: VirtualLoop, cluster: SimulatedCluster, folder: Path, storm_s: float, calm_s: float
    ) -> Played:
        silence = io.StringIO()
        with (
            asyncio.Runner(loop_factory=lambda: loop) as runner,
            virtual_clock(loop),
            contextlib.redirect_stdout(silence),
            contextlib.redirect_stderr(silence),
        ):
            violation, fingerprint, result = "", Fingerprint(), None
            failed: PipedistError | None = None
            try:
                fingerprint, result, failed, violation = runner.run(
                    self._run(loop, cluster, folder, storm_s, calm_s)
                )
            except NothingHappens as error:
                violation = str(error)
            except asyncio.CancelledError:
                violation = "it was cancelled"
            except TimeoutError:
                violation = f"it did not come to its end in {calm_s:g} s of virtual time without faults"
            simulated = cluster.simulated
            defects = [*loop.errors, *(simulated.defects if simulated is not None else ())]
            if defects:  # whatever else was wrong follows from it
                violation = f"{type(defects[0]).__name__}: {defects[0]}"
            return Played(
                fingerprint,
                result,
                loop.now,
                Counter() if simulated is None else simulated.network.counts,
                0 if simulated is None else simulated.poisoned,
                violation,
                failed,
            )

    async def _run(
        self, loop: VirtualLoop, cluster: SimulatedCluster, folder: Path, storm_s: float, calm_s: float
    ) -> tuple[Fingerprint, Result | None, PipedistError | None, str]:
        output = folder / "out" if self._spec.outputs else None
        task = asyncio.current_task()
        assert task is not None
        loop.on_interrupt = task.cancel
        if loop.is_interrupted:
            task.cancel()
        async with asyncio.timeout(storm_s + calm_s), cluster:
            simulated, coordinator = cluster.simulated, cluster.coordinator
            assert simulated is not None
            assert isinstance(coordinator, CheckedCoordinator)
            loop.call_later(storm_s, simulated.calm)
            simulated.on_defect = task.cancel
            result, fingerprint, violation = None, Fingerprint(), ""
            failed: PipedistError | None = None
            try:
                async with Run(self._spec, cluster=cluster, output=output) as run:
                    result = await run.results()
                    fingerprint = of_result(result)
            except PipedistError as error:
                failed, fingerprint = error, of_error(error)
            if result is not None:
                ledger = result.ledger
                if ledger.elements != ledger.committed + ledger.quarantined or ledger.lost:
                    violation = f"the ledger does not add up: {ledger}"
            left = coordinator.left_open()
            if left and not violation:
                violation = f"something is left of a run that is over: {left}"
            return fingerprint, result, failed, violation


def _setting(name: str, value: Tree) -> str:
    """Return what `--set` says of a parameter; "" where it can't say it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        return f"{name}={text}" if read_setting(text) == value else ""
    except (TypeError, ValueError):  # an array, for one
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
    """Run a spec once a seed in simulated clusters, with faults; works inside a running event loop too.

    Args: as `SpecSimulation`.

    Returns:
        How many faults have happened, by kind.

    Raises:
        SimulationFailure: of the first seed whose run differs from the one without faults.
    """
    simulation = SpecSimulation(spec, workers=workers, faults=faults, costs=costs, params=params)
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += simulation.check(seed).counts
    return counts
