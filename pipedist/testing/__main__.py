"""Simulations of the machines alone, from the command line: the bar, or one seed again.

python -m pipedist.testing                          the whole bar
python -m pipedist.testing --share 0.1              a tenth of it
python -m pipedist.testing --seed 7 --workers 5 --calls 40 --faults crash=0.05
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipedist.errors import UsageError
from pipedist.testing.campaign import BAR, Campaign
from pipedist.testing.faults import Faults
from pipedist.testing.simulation import Simulation, SimulationFailure


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, and print what came of it; return the exit code: 0, 1 for a violation, 2 for usage."""
    parser = argparse.ArgumentParser(prog="python -m pipedist.testing", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="which part of the bar")
    parser.add_argument("--seed", type=int, help="play this seed alone")
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--faults", help="KIND=RATE,...; default: drawn from the seed")
    parser.add_argument("--check-every", type=int, help="events; default: by the number of workers")
    told = parser.parse_args(arguments)
    try:
        faults = None if told.faults is None else Faults.parse(told.faults)
    except UsageError as error:
        parser.error(str(error))
    try:
        if told.seed is not None:
            Simulation(
                told.seed,
                workers=told.workers,
                calls=told.calls,
                faults=faults,
                check_every=told.check_every,
            ).run()
            _print(f"seed {told.seed}: no violation")
            return 0
        for size in BAR:
            campaign = Campaign(size.workers, size.calls)
            campaign.run(range(max(1, round(size.seeds * told.share))))
            _print(str(campaign))
    except SimulationFailure as failure:
        _print(str(failure))
        return 1
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
