"""Simulations of whole specs, with the user's own functions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipedist.coordinator.worker_pool import WorkerPool
from pipedist.errors import CallError, SpecError, UsageError
from pipedist.scheduler import Scheduler
from pipedist.testing import Faults, SimulationFailure, SpecSimulation, simulate
from pipedist.testing.fakes import POISON
from pipedist.testing.fingerprints import Fingerprint, difference
from pipedist.testing.simulated_cluster import SimulatedLauncher
from tests.testing import replica_functions as fn

STORM = Faults.parse(
    "drop=0.03,duplicate=0.03,delay=0.03,cut=0.02,partition=0.02,crash=0.04,pause=0.04,slow=0.1"
)


def spec_of(function: object, *, collectives: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "replicas": 3,
        "dataset": {"range": 60, "batch": 6},
        "stages": {
            "each": {"run": function, **({"collectives": True} if collectives else {})},
            "total": {"reduce": "sum", "of": "each", "axis": 0},
            "all": {"gather": 0, "of": "each"},
        },
        **more,
    }


@pytest.mark.parametrize("function", [fn.squares, fn.draws, fn.sleeps, fn.waits, fn.prints])
def test_faults_change_no_bit(function: object, capsys: pytest.CaptureFixture[str]) -> None:
    counts = simulate(spec_of(function), seeds=range(8), faults=STORM)
    assert counts["crash"]
    assert not capsys.readouterr().out


@pytest.mark.parametrize("function", [fn.draws, fn.waits])
def test_in_asyncios_debug_mode(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    assert simulate(spec_of(function), seeds=range(2), faults=STORM)["crash"]


@pytest.mark.parametrize("function", [fn.whitened, fn.whitened_in_turns])
def test_gangs_too(function: object) -> None:
    counts = simulate(spec_of(function, collectives=True), seeds=range(8), faults=STORM)
    assert counts["crash"]


def test_it_gives_the_result_of_a_real_run() -> None:
    result = SpecSimulation(spec_of(fn.squares)).check(0).result
    assert result is not None
    assert result["total"] == sum(i * i for i in range(60))
    assert np.array_equal(result["all"], np.arange(60) ** 2)


def test_a_limit_of_time_limits_nothing_in_virtual_time() -> None:
    document = spec_of(fn.squares)
    document["stages"]["each"]["timeout_s"] = 0.001
    assert simulate(document, seeds=range(4), faults=STORM)["crash"]


def test_virtual_hours_take_no_time() -> None:
    began = time.monotonic()
    played = SpecSimulation(spec_of(fn.sleeps), workers=2).check(0)
    assert played.took_s > 3600 * 10
    assert time.monotonic() - began < 60


def test_one_seed_is_one_story() -> None:
    simulation = SpecSimulation(spec_of(fn.draws), faults=STORM)
    first, again, other = simulation.play(3), simulation.play(3), simulation.play(4)
    assert (first.took_s, first.counts) == (again.took_s, again.counts)
    assert (first.took_s, first.counts) != (other.took_s, other.counts)


async def _inside() -> int:
    return simulate(spec_of(fn.squares), seeds=[0], faults=STORM).total()


@pytest.mark.asyncio
async def test_inside_a_running_loop() -> None:
    await _inside()


def test_files_are_compared(tmp_path: Path) -> None:
    spec = spec_of(fn.HowMany, outputs={"all": "all.npy"})
    with pytest.raises(SimulationFailure, match=r"file all\.npy is another one"):
        simulate(spec, faults=STORM)


# -- functions that are not deterministic --------------------------------------------------------


def test_what_an_instance_remembers_shows() -> None:
    with pytest.raises(SimulationFailure) as caught:
        simulate(spec_of(fn.HowMany), faults=STORM)
    told = str(caught.value)
    assert "stage total is " in told
    assert "not deterministic in (shard, with, ctx)" in told
    assert "play it again: with faults(drop=0.03, duplicate=0.03," in told
    assert "workers=3, seed=" in told


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({}, ""),
        ({"what": "a b"}, " --set 'what=\"a b\"'"),
        ({"what": [1, "2"]}, " --set 'what=[1, \"2\"]'"),
    ],
)
def test_the_command_has_the_file_and_its_parameters(
    tmp_path: Path, params: dict[str, Any], told: str
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(
        "pipedist: 1\nparams: {what: 1}\ndataset: {range: 4, batch: 2}\n"
        "stages: {t: {reduce: sum, of: dataset, axis: 0}}\n"
    )
    simulation = SpecSimulation(file, params=params)
    assert simulation.replay(4) == f"pipedist simulate {file} --seed 4 --workers 3 --faults none{told}"
    unsaid = SpecSimulation(file, params={"what": {"a": 1}})
    assert unsaid.replay(4) == "with faults(workers=3, seed=4) as simulated: ..."


def test_what_plays_it_again_has_the_rates_to_the_bit() -> None:
    faults = Faults(crash=1 / 30)
    assert Faults.parse(str(faults)) == faults
    simulation = SpecSimulation(spec_of(fn.squares), faults=faults)
    assert f"crash={1 / 30!r}, " in simulation.replay(0)


def test_no_workers() -> None:
    with pytest.raises(UsageError, match="workers is 0; expected an int from 1 on"):
        SpecSimulation(spec_of(fn.squares), workers=0)


def test_the_time_shows_without_faults() -> None:
    with pytest.raises(SimulationFailure, match="without faults, on one worker, the second time") as caught:
        simulate(spec_of(fn.at_what_time))
    assert "randomness that is not ctx.rng" in str(caught.value)


def test_another_structure_is_told_by_what_is_missing() -> None:
    many, few = Fingerprint({"stage s": "a"}, {"s": [1, 2, 3]}), Fingerprint({"stage s": "b"}, {"s": [1, 2]})
    assert difference(many, few) == "stage s has another structure: 2 leaves, expected 3 leaves, 2 among them"
    assert difference(few, many) == "stage s has another structure: 3 leaves, 2 among them, expected 2 leaves"


def test_a_function_that_fails_must_fail_the_same_way() -> None:
    played = SpecSimulation(spec_of(fn.fails), faults=STORM).check(1)
    assert isinstance(played.error, CallError)
    assert played.fingerprint.error == "CallError: stage each, step 2, replica 0: ValueError: two is bad"


# -- declared costs --------------------------------------------------------------------------------


def test_a_stage_of_a_declared_cost_is_not_executed() -> None:
    simulation = SpecSimulation(spec_of(fn.never_executed), costs={"each": 7.0}, workers=3)
    assert simulation.reference.took_s > 7 * 30
    played = simulation.check(0)
    assert 7 * 10 < played.took_s < 7 * 30


def test_costs_of_what_is_no_stage() -> None:
    with pytest.raises(UsageError, match="'total' is no run stage; there are: each"):
        SpecSimulation(spec_of(fn.squares), costs={"total": 1.0})


def test_a_stage_that_gets_a_stand_in() -> None:
    spec = spec_of(fn.squares)
    spec["stages"]["next"] = {"run": fn.squares, "of": "each"}
    spec["stages"]["sum"] = {"reduce": "sum", "of": "next", "axis": 0}
    with pytest.raises(UsageError, match="declare a cost for next too"):
        SpecSimulation(spec, costs={"each": 1.0}).check(0)


def test_what_is_not_simulated_is_said() -> None:
    with pytest.raises(UsageError, match="error is not simulated for a spec"):
        SpecSimulation(spec_of(fn.squares), faults=Faults(error=0.1)).check(0)
    with pytest.raises(SpecError):
        SpecSimulation({"pipedist": 1})


# -- the simulation itself: without a fence, something shows -----------------------------------------


def shows(faults: Faults, seeds: int = 60) -> str:
    simulation = SpecSimulation(spec_of(fn.draws), faults=faults, workers=4)
    for seed in range(seeds):
        violation = simulation.play(seed).violation
        if violation:
            return violation
    return ""


def test_a_missing_fence_lets_poison_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the coordinator nor the scheduler asks whether a lease is held any more."""
    known: dict[tuple[int, int], Any] = {}

    def held(self: Scheduler, name: str, incarnation: int, lease: int, lo: int, hi: int) -> Any:
        return known.setdefault((id(self), lease), self._members.leases.get(lease))

    def pass_of(self: Scheduler, worker: str, lease: int) -> int | None:
        found = known.setdefault((id(self), lease), self._members.leases.get(lease))
        return None if found is None else int(found.pass_id)

    monkeypatch.setattr(Scheduler, "_held_lease", held)
    monkeypatch.setattr(Scheduler, "pass_of", pass_of)
    assert shows(Faults(crash=0.1, duplicate=0.1))


def test_workers_that_nobody_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerPool, "on_exit", lambda self, exit_: None)
    assert "did not come to its end" in shows(Faults(crash=0.1), seeds=5)


def test_a_run_that_does_not_come_to_its_end_without_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedLauncher, "start", lambda *_: None)
    with pytest.raises(SimulationFailure, match="without faults, on one worker: it did not come to its end"):
        simulate(spec_of(fn.squares))


def test_poison_is_no_value() -> None:
    assert POISON.startswith("POISON")
