"""Simulations of whole specs, with the user's own functions."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipedist.coordinator.worker_pool import WorkerPool
from pipedist.errors import CallError, SpecError, UsageError
from pipedist.scheduler import Scheduler
from pipedist.testing import Faults, SimulationFailure, SpecSimulation, simulate
from pipedist.testing.simulated_cluster import POISON, SimulatedLauncher
from pipedist.testing.spec_simulation import Fingerprint, difference
from tests.testing import replica_functions as fn

FAULTS = Faults.parse(
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
def test_faults_do_not_change_the_results(function: object, capsys: pytest.CaptureFixture[str]) -> None:
    counts = simulate(spec_of(function), seeds=range(8), faults=FAULTS)
    assert counts["crash"]
    assert not capsys.readouterr().out


def test_a_simulation_without_a_choice_of_faults_has_some() -> None:
    assert simulate(spec_of(fn.squares), seeds=range(8))["crash"]
    assert not simulate(spec_of(fn.squares), seeds=range(2), faults=Faults())


@pytest.mark.parametrize("function", [fn.draws, pytest.param(fn.waits, marks=pytest.mark.slow)])
def test_in_asyncios_debug_mode(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    assert simulate(spec_of(function), seeds=range(2), faults=FAULTS)["crash"]


@pytest.mark.parametrize("function", [fn.whitened, fn.whitened_in_turns])
def test_faults_do_not_change_the_results_of_gangs(function: object) -> None:
    counts = simulate(spec_of(function, collectives=True), seeds=range(8), faults=FAULTS)
    assert counts["crash"]


def test_the_result_is_that_of_a_real_run() -> None:
    result = SpecSimulation(spec_of(fn.squares)).check(0).result
    assert result is not None
    assert result["total"] == sum(i * i for i in range(60))
    assert np.array_equal(result["all"], np.arange(60) ** 2)


def test_a_limit_of_time_limits_nothing_in_virtual_time() -> None:
    document = spec_of(fn.squares)
    document["stages"]["each"]["timeout_s"] = 0.001
    assert simulate(document, seeds=range(4), faults=FAULTS)["crash"]


def test_virtual_hours_take_no_time() -> None:
    began = time.monotonic()
    outcome = SpecSimulation(spec_of(fn.sleeps), workers=2).check(0)
    assert outcome.took_s > 3600 * 10
    assert time.monotonic() - began < 60


def test_one_seed_is_one_order_of_events() -> None:
    simulation = SpecSimulation(spec_of(fn.draws), faults=FAULTS)
    first, again, other = simulation.run(3), simulation.run(3), simulation.run(4)
    assert (first.took_s, first.counts) == (again.took_s, again.counts)
    assert (first.took_s, first.counts) != (other.took_s, other.counts)


async def _inside() -> int:
    return simulate(spec_of(fn.squares), seeds=[0], faults=FAULTS).total()


@pytest.mark.asyncio
async def test_inside_a_running_loop() -> None:
    await _inside()


@pytest.mark.parametrize(
    ("file", "at"),
    [
        ("all.npy", r" is \d+ at index \[\d+\], expected \d+"),
        ("all.csv", r" is \d+ at index \[\d+\], expected \d+"),
        ("all.json", r" at \d+ is \d+, expected \d+"),
        ("all.jsonl", r" at \d+/value is \d+, expected \d+"),
        ("all.parquet", " differs"),
    ],
)
def test_files_are_compared(file: str, at: str) -> None:
    spec = spec_of(fn.HowMany, outputs={"all": file})
    with pytest.raises(SimulationFailure, match=rf"file {re.escape(file)}{at}"):
        simulate(spec, faults=FAULTS)


# -- functions that are not deterministic --------------------------------------------------------


@pytest.mark.parametrize("file", ["all.zarr", "all.parquet/", "{id}.json", "all.sqlite", "all.duckdb"])
def test_folders_and_databases_are_compared_by_their_contents(tmp_path: Path, file: str) -> None:
    def rows(x: np.ndarray, plus: float) -> dict[str, np.ndarray]:
        return {"id": x, "y": x + plus}

    def fingerprint(plus: float) -> Fingerprint:
        spec = spec_of(rows, outputs={"all": file})
        spec["stages"]["each"]["with"] = {"plus": plus}
        simulation = SpecSimulation(spec, faults=FAULTS)
        return simulation.check(1).fingerprint

    assert fingerprint(0.5).digests == fingerprint(0.5).digests
    file_digests = [{k: v for k, v in fingerprint(x).digests.items() if "file" in k} for x in (0.5, 0.25)]
    assert file_digests[0].keys() == file_digests[1].keys()
    assert file_digests[0] != file_digests[1]


def test_state_of_an_instance_is_found() -> None:
    with pytest.raises(SimulationFailure) as caught:
        simulate(spec_of(fn.HowMany), faults=FAULTS)
    text = str(caught.value)
    assert "stage total is " in text
    assert "not deterministic in (shard, with, ctx)" in text
    assert "reproduce: with pipedist_faults(drop=0.03, duplicate=0.03," in text
    assert "workers=3, seed=" in text


@pytest.mark.parametrize(
    ("params", "option"),
    [
        ({}, ""),
        ({"what": "a b"}, " --set 'what=\"a b\"'"),
        ({"what": [1, "2"]}, " --set 'what=[1, \"2\"]'"),
    ],
)
def test_the_command_has_the_file_and_its_parameters(
    tmp_path: Path, params: dict[str, Any], option: str
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(
        "pipedist: 1\nparams: {what: 1}\ndataset: {range: 4, batch: 2}\n"
        "stages: {t: {reduce: sum, of: dataset, axis: 0}}\n"
    )
    simulation = SpecSimulation(file, params=params, faults=Faults())
    assert simulation.replay(4) == f"pipedist simulate {file} --seed 4 --workers 3 --faults none{option}"
    without_option = SpecSimulation(file, params={"what": {"a": 1}}, faults=Faults())
    assert without_option.replay(4) == ("with pipedist_faults(drop=0.0, workers=3, seed=4) as simulated: ...")


def test_the_reproducing_command_has_exact_rates() -> None:
    faults = Faults(crash=1 / 30)
    assert Faults.parse(str(faults)) == faults
    simulation = SpecSimulation(spec_of(fn.squares), faults=faults)
    assert f"crash={1 / 30!r}, " in simulation.replay(0)


def test_no_workers() -> None:
    with pytest.raises(UsageError, match="workers must be an integer >= 1, got 0"):
        SpecSimulation(spec_of(fn.squares), workers=0)


def test_use_of_the_time_is_found_without_faults() -> None:
    with pytest.raises(SimulationFailure, match="without faults, on one worker, the second run") as caught:
        simulate(spec_of(fn.at_what_time))
    assert "randomness other than ctx.rng" in str(caught.value)


def test_another_structure_is_described_by_its_missing_leaves() -> None:
    many, few = (
        Fingerprint({"stage s": "a"}, {"stage s": [1, 2, 3]}),
        Fingerprint({"stage s": "b"}, {"stage s": [1, 2]}),
    )
    assert difference(many, few) == "stage s has another structure: 2 leaves, expected 3 leaves, including 2"
    assert difference(few, many) == "stage s has another structure: 3 leaves, including 2, expected 2 leaves"


def test_a_function_that_fails_must_fail_the_same_way() -> None:
    outcome = SpecSimulation(spec_of(fn.fails), faults=FAULTS).check(1)
    assert isinstance(outcome.error, CallError)
    assert outcome.fingerprint.error == "CallError: stage each, step 2, replica 0: ValueError: two is bad"


# -- declared costs --------------------------------------------------------------------------------


def test_a_stage_of_a_declared_cost_is_not_executed() -> None:
    simulation = SpecSimulation(spec_of(fn.never_executed), costs={"each": 7.0}, workers=3)
    assert simulation.reference.took_s > 7 * 30
    outcome = simulation.check(0)
    assert 7 * 10 < outcome.took_s < 7 * 30


def test_costs_of_what_is_no_stage() -> None:
    with pytest.raises(UsageError, match="'total' is not a run stage; the run stages are: each"):
        SpecSimulation(spec_of(fn.squares), costs={"total": 1.0})


def test_a_stage_that_reads_a_fake_result() -> None:
    spec = spec_of(fn.squares)
    spec["stages"]["next"] = {"run": fn.squares, "of": "each"}
    spec["stages"]["sum"] = {"reduce": "sum", "of": "next", "axis": 0}
    with pytest.raises(UsageError, match="Declare a cost for next too"):
        SpecSimulation(spec, costs={"each": 1.0}).check(0)


def test_unsupported_faults_are_rejected() -> None:
    with pytest.raises(UsageError, match="`error` is not available for a spec"):
        SpecSimulation(spec_of(fn.squares), faults=Faults(error=0.1)).check(0)
    with pytest.raises(SpecError):
        SpecSimulation({"pipedist": 1})


# -- the simulation itself: a removed protection is found -----------------------------------------------


def first_violation(faults: Faults, seeds: int = 60) -> str:
    simulation = SpecSimulation(spec_of(fn.draws), faults=faults, workers=4)
    for seed in range(seeds):
        violation = simulation.run(seed).violation
        if violation:
            return violation
    return ""


def test_a_missing_fence_lets_poison_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the coordinator nor the scheduler checks that a lease is valid."""
    known: dict[tuple[int, int], Any] = {}

    def held(self: Scheduler, name: str, incarnation: int, lease: int, lo: int, hi: int) -> Any:
        return known.setdefault((id(self), lease), self._members.leases.get(lease))

    def pass_of(self: Scheduler, worker: str, lease: int) -> int | None:
        found = known.setdefault((id(self), lease), self._members.leases.get(lease))
        return None if found is None else int(found.pass_id)

    monkeypatch.setattr(Scheduler, "_valid_lease", held)
    monkeypatch.setattr(Scheduler, "pass_of", pass_of)
    assert first_violation(Faults(crash=0.1, duplicate=0.1))


def test_workers_that_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerPool, "on_exit", lambda self, exit_: None)
    assert "the run did not end" in first_violation(Faults(crash=0.1), seeds=5)


def test_a_run_that_does_not_end_without_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedLauncher, "start", lambda *_: None)
    with pytest.raises(SimulationFailure, match="without faults, on one worker: the run did not end"):
        simulate(spec_of(fn.squares))


def test_poison_is_not_a_value() -> None:
    assert POISON.startswith("POISON")


def test_calls_that_wait_give_the_same_results_under_faults() -> None:
    """Elements, attempts, a rate and overlapping calls, whose waits take virtual time only."""
    retry = {"attempts": 4, "backoff_s": 2, "on": "ConnectionError"}
    keys = {"per": "element", "concurrency": 6, "retry": retry, "rate": {"calls": 30}, "timeout_s": 20}
    spec = {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 40, "batch": 8},
        "stages": {
            "y": {"run": "tests.testing.replica_functions:answer", **keys},
            "z": {"run": "tests.testing.replica_functions:waits_long"},
            "rows": {"gather": 0, "of": "y"},
            "total": {"reduce": "sum", "of": "z", "axis": 0},
        },
    }
    faults = simulate(spec, seeds=range(6), faults=Faults(crash=0.03, drop=0.02, slow=0.05, pause=0.02))
    assert faults["crash"] > 0
