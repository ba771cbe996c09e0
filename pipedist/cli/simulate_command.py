"""The command `pipedist simulate`: run a spec in virtual time with faults, one seed after another."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipedist.cli import terminal
from pipedist.cli.terminal import stdout_to_stderr, write_error, write_out
from pipedist.core.names import plural
from pipedist.errors import UsageError
from pipedist.runs.progress import LineTimes, duration

if TYPE_CHECKING:
    from pipedist.testing.spec_simulation import SpecSimulation

SEEDS = 100
FAILURES_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """Options of `pipedist simulate`, as `pipedist.cli.app` describes them."""

    spec: str
    seeds: int | None = None
    seed: int | None = None
    workers: int = 3
    faults: str | None = None
    costs: str | None = None
    sets: tuple[str, ...] = ()


def execute(options: SimulateOptions, clock_s: Callable[[], float] = time.monotonic) -> int:
    """Simulate a spec, and print the findings; return 1 if the run without faults fails, or a seed differs."""
    if options.seed is not None and options.seeds is not None:
        raise UsageError(
            "--seeds and --seed exclude each other. --seeds N simulates 0 to N-1, --seed K simulates K only"
        )
    from pipedist.testing.faults import Faults
    from pipedist.testing.spec_simulation import SimulationFailure, SpecSimulation

    faults = None if options.faults is None else Faults.parse(options.faults)
    costs = parse_costs(options.costs)
    count = SEEDS if options.seeds is None else options.seeds
    seeds: Sequence[int] = range(count) if options.seed is None else [options.seed]
    found = Findings()
    with stdout_to_stderr():  # the user's modules may print
        simulation = SpecSimulation(
            options.spec, workers=options.workers, faults=faults, costs=costs, sets=options.sets
        )
        try:
            failure = simulation.reference.error
            if failure is not None and options.seed is None:  # one seed may be simulated to study the failure
                seeds = ()
            progress = SeedProgress(len(seeds), clock_s)
            for seed in seeds:
                found.add(seed, simulation)
                progress.update(found.simulated, len(found.failures))
        except SimulationFailure as error:
            write_error(f"pipedist: {error}\n")
            return terminal.FAILED
        except KeyboardInterrupt as interrupt:
            found.interrupt = interrupt
    found.show(options.workers)
    if failure is not None:
        terminal.report(failure)
        effect = "Fix it first; no seeds were simulated"
        if seeds:
            effect = "The seed was only compared with that failure"
        write_error(f"The spec fails without injected faults. {effect}.\n")
    return terminal.FAILED if found.failures or failure is not None else terminal.OK


class Findings:
    """The outcomes of the simulated seeds."""

    def __init__(self) -> None:
        self.simulated = 0
        self.failures: list[str] = []  # a text for each seed with a violation
        self.interrupt: KeyboardInterrupt | None = None  # that ended the simulation
        self._counts: Counter[str] = Counter()
        self._poisoned = 0

    def add(self, seed: int, simulation: SpecSimulation) -> None:
        """Simulate a seed."""
        outcome = simulation.run(seed)
        self.simulated += 1
        self._counts.update(outcome.counts)
        self._poisoned += outcome.poisoned
        if outcome.violation:
            self.failures.append(
                f"seed {seed}: {outcome.violation}\n  reproduce: {simulation.replay(seed)}\n"
            )

    def show(self, workers: int) -> None:
        """Print the findings; raise the interrupt that ended the simulation, if one did."""
        from pipedist.testing.spec_simulation import REASONS

        if self.simulated:
            write_out(_table(self.simulated, workers, self._counts, self._poisoned, len(self.failures)))
        for text in self.failures[:FAILURES_SHOWN_MAX]:
            write_out(text)
        if len(self.failures) > FAILURES_SHOWN_MAX:
            write_out(f"and {len(self.failures) - FAILURES_SHOWN_MAX} more seeds\n")
        if self.failures:
            write_out(REASONS + "\n")
        if self.interrupt is not None:
            for note in getattr(self.interrupt, "__notes__", ()):
                write_error(f"pipedist: {note}")
            raise self.interrupt


class SeedProgress:
    """Prints a line on standard error after the first seed, and at growing intervals, of a simulation of seconds.

    A live bar is not possible: standard error is redirected while a seed is simulated.
    """

    def __init__(self, seeds: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._seeds = seeds
        self._times = LineTimes(clock_s)
        self._hint = "; --seeds N simulates fewer"

    def update(self, simulated: int, violations: int) -> None:
        if simulated == self._seeds or not self._times.is_due():
            return
        elapsed_s = self._times.elapsed_s
        left_s = elapsed_s / simulated * (self._seeds - simulated)
        found = plural(violations, "violation")
        write_error(
            f"simulate: {simulated} of {self._seeds} seeds, {found}, {duration(elapsed_s)} so far, "
            f"about {duration(left_s)} left{self._hint}\n"
        )
        self._hint = ""


def parse_costs(text: str | None) -> dict[str, float]:
    """Return seconds by stage, parsed from "slow=0.05,other=2"."""
    costs: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        stage, equals, value = part.partition("=")
        try:
            seconds = float(value) if equals else -1.0
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf") or stage in costs:
            raise UsageError(f"costs: {part!r} can't be parsed. Give STAGE=SECONDS, each stage once")
        costs[stage] = seconds
    return costs


def _table(seeds: int, workers: int, counts: Mapping[str, int], poisoned: int, violations: int) -> str:
    rows: list[tuple[str, Sequence[str]]] = [
        ("seeds", [str(seeds)]),
        ("workers", [str(workers)]),
        ("faults", [f"{kind} {counts[kind]}" for kind in sorted(counts)] or ["none"]),
        ("superseded", [f"{plural(poisoned, 'message')} of earlier attempts, replaced by wrong values"]),
        ("violations", [str(violations)]),
    ]
    return "".join(f"{title:<11} {', '.join(cells)}\n" for title, cells in rows)
