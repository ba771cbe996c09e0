"""The simulation with scripted workers: hundreds of small seeds, and mutations that it must find."""

from __future__ import annotations

import pytest

from pipedist.testing import SimulationFailure
from tests.simulation.mutations import MUTATIONS
from tests.simulation.scripted_simulation import ScriptedSimulation

SEEDS = 300


def run_seeds(first: int, last: int) -> None:
    for seed in range(first, last):
        ScriptedSimulation(seed).run()


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_no_violation(first: int) -> None:
    run_seeds(first, first + 50)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found_within_300_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    with pytest.raises(SimulationFailure) as caught:
        run_seeds(0, SEEDS)
    cause = caught.value.__cause__
    assert not isinstance(cause, TypeError | AttributeError), "the mutation itself is broken"
