"""The command `pipedist simulate`: a spec in virtual time, with faults, seed after seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipedist.cli import exits
from pipedist.cli.streams import stdout_to_stderr, write_error, write_out
from pipedist.errors import UsageError

SEEDS = 100
"""How many are played where the command line says nothing of it."""

FAILURES_SHOWN_MAX = 5
"""Seeds with a violation that are told one by one."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What the command line says.

    Args:
        spec: path of the spec, as typed.
        seeds: how many are played, from 0 on; None: 100, or `seed`.
        seed: the only one that is played; None for `seeds`.
        workers: how many workers there are.
        faults: text KIND=RATE,... ; None: some of everything.
        costs: text STAGE=SECONDS,... of stages that are not executed.
        sets: texts NAME=VALUE.
    """

    spec: str
    seeds: int | None = None
    seed: int | None = None
    workers: int = 3
    faults: str | None = None
    costs: str | None = None
    sets: tuple[str, ...] = ()


EVERYTHING = "drop=0.01,duplicate=0.01,delay=0.02,cut=0.01,partition=0.01,crash=0.02,pause=0.02,slow=0.05"
"""The faults of a simulation that names none."""


_NOTHING_SHOWN = """\
The spec fails so without any fault, on one worker: no seed was played, and nothing is shown. Mend it first.
"""

_ONLY_COMPARED = """\
The spec fails so without any fault, on one worker: the seed was only compared with that.
"""


def execute(options: SimulateOptions) -> int:
    """Simulate a spec, and print what came of it.

    Returns:
        The exit code: 0, or 1 if a run differs from the one without faults, or that one fails.

    Raises:
        SpecError: the spec can't be executed.
        UsageError: the options make no sense.
    """
    if options.seed is not None and options.seeds is not None:
        raise UsageError(
            "--seeds and --seed exclude each other: --seeds N plays 0 to N-1, --seed K plays K alone"
        )
    from pipedist.harness.faults import Faults
    from pipedist.harness.simulation import SimulationFailure
    from pipedist.harness.spec_simulation import REASONS, SpecSimulation

    faults = Faults.parse(EVERYTHING if options.faults is None else options.faults)
    costs = parse_costs(options.costs)
    counts: Counter[str] = Counter()
    failures: list[str] = []
    poisoned = 0
    with stdout_to_stderr():  # modules of the user may print
        simulation = SpecSimulation(
            options.spec, workers=options.workers, faults=faults, costs=costs, sets=options.sets
        )
        many = SEEDS if options.seeds is None else options.seeds
        seeds: Sequence[int] = range(many) if options.seed is None else [options.seed]
        interrupted: KeyboardInterrupt | None = None
        played = 0
        try:
            fails = simulation.reference.error
            if fails is not None and options.seed is None:  # one seed may be played to look into the failure
                seeds = ()
            for seed in seeds:
                came = simulation.play(seed)
                played += 1
                counts.update(came.counts)
                poisoned += came.poisoned
                if came.violation:
                    failures.append(f"seed {seed}: {came.violation}\n  again: {simulation.replay(seed)}\n")
        except SimulationFailure as failure:
            write_error(f"pipedist: {failure}\n")
            return exits.FAILED
        except KeyboardInterrupt as stop:  # what was found until then is told all the same
            interrupted = stop
    if played:
        write_out(_table(played, options.workers, counts, poisoned, len(failures)))
    for told in failures[:FAILURES_SHOWN_MAX]:
        write_out(told)
    if len(failures) > FAILURES_SHOWN_MAX:
        write_out(f"and {len(failures) - FAILURES_SHOWN_MAX} more seeds\n")
    if failures:
        write_out(REASONS + "\n")
    if interrupted is not None:
        for note in getattr(interrupted, "__notes__", ()):
            write_error(f"pipedist: {note}")
        raise interrupted
    if fails is not None:
        exits.report(fails)
        write_error(_NOTHING_SHOWN if not seeds else _ONLY_COMPARED)
    return exits.FAILED if failures or fails is not None else exits.OK


def parse_costs(text: str | None) -> dict[str, float]:
    """Return seconds by stage: "slow=0.05,other=2".

    Raises:
        UsageError: it was not understood.
    """
    costs: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        stage, equals, value = part.partition("=")
        try:
            seconds = float(value) if equals else -1.0
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf") or stage in costs:
            raise UsageError(f"costs: {part!r} was not understood; expected STAGE=SECONDS, each stage once")
        costs[stage] = seconds
    return costs


def _table(seeds: int, workers: int, counts: Mapping[str, int], poisoned: int, violations: int) -> str:
    rows: list[tuple[str, Sequence[str]]] = [
        ("seeds", [str(seeds)]),
        ("workers", [str(workers)]),
        ("faults", [f"{kind} {counts[kind]}" for kind in sorted(counts)] or ["none"]),
        ("superseded", [f"{poisoned} messages, whose results were replaced by poison"]),
        ("violations", [str(violations)]),
    ]
    return "".join(f"{title:<11} {', '.join(cells)}\n" for title, cells in rows)
