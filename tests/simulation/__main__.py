"""Run simulations of the machines from the command line: the release suite, or one seed.

python -m tests.simulation                          the whole suite
python -m tests.simulation --share 0.1              a tenth of it
python -m tests.simulation --seed 7 --workers 5 --calls 40 --faults crash=0.05
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipedist.errors import UsageError
from pipedist.testing import Faults, SimulationFailure
from tests.simulation.simulation import Simulation
from tests.simulation.simulation_suite import RELEASE_SIZES, SimulationSuite


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print the outcome; return the exit code: 0, 1 for a violation, 2 for usage."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="share of the suite")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--faults", help="KIND=RATE,...; default: drawn from the seed")
    parser.add_argument("--check-every", type=int, help="events; default: by the number of workers")
    options = parser.parse_args(arguments)
    try:
        faults = None if options.faults is None else Faults.parse(options.faults)
    except UsageError as error:
        parser.error(str(error))
    try:
        if options.seed is not None:
            Simulation(
                options.seed,
                workers=options.workers,
                calls=options.calls,
                faults=faults,
                check_every=options.check_every,
            ).run()
            _print(f"seed {options.seed}: no violation")
            return 0
        for size in RELEASE_SIZES:
            suite = SimulationSuite(size.workers, size.calls)
            suite.run(range(max(1, round(size.seeds * options.share))))
            _print(str(suite))
    except SimulationFailure as failure:
        _print(str(failure))
        return 1
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
