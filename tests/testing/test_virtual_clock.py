"""Waits in simulated workers: in virtual time if the simulation can resume them, otherwise in real time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from pipedist.errors import CallError
from pipedist.testing import Faults, SpecSimulation
from tests.testing import impatient_functions as fn

FAULTS = Faults(crash=0.05, slow=0.1, pause=0.05)


def simulation(function: object, **stage: Any) -> SpecSimulation:
    document = {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 4, "batch": 2},
        "stages": {"each": {"run": function, **stage}, "all": {"gather": 0, "of": "each"}},
    }
    return SpecSimulation(document, faults=FAULTS)


@pytest.mark.parametrize(
    "function",
    [
        fn.in_a_loop_of_its_own,
        fn.busy,
        fn.in_a_thread_of_its_own,
        fn.in_a_thread_of_the_loop,
        fn.in_a_loop_in_a_thread,
        fn.speaks_with_others,
    ],
)
def test_a_function_that_waits(function: object) -> None:
    result = simulation(function).check(0).result
    assert result is not None
    assert np.array_equal(result["all"], np.arange(4))


@pytest.mark.parametrize(
    "function", [fn.in_a_loop_of_its_own, fn.in_a_thread_of_the_loop, fn.in_a_loop_in_a_thread]
)
def test_hours_pass_at_once(function: object) -> None:
    assert simulation(function).reference.took_s >= 2 * 3600


def test_replicas_of_a_gang_that_wait_by_themselves() -> None:
    result = simulation(fn.waits_in_a_gang, collectives=True).check(0).result
    assert result is not None
    assert np.array_equal(result["all"], np.arange(4))


def test_a_process_that_a_function_forks_ends_where_it_leaves_the_function(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert simulation(fn.splits).check(0).result is not None
    assert "a process that the function made with os.fork returned: it ends here" in capfd.readouterr().err


def test_a_function_that_ends_its_process_ends_no_simulation() -> None:
    error = simulation(fn.ends_its_process).check(0).error
    assert isinstance(error, CallError)
    assert "the function called os._exit(3), which would end its worker" in str(error)


def test_a_clock_that_a_module_keeps_is_real_afterwards() -> None:
    assert simulation(fn.keeps_a_clock).check(0).result is not None
    before, kept, after = time.monotonic(), fn.kept[0](), time.monotonic()
    assert before <= kept <= after


def test_gpus_are_there_whatever_this_machine_has() -> None:
    assert simulation(fn.busy, resources={"gpus": 2}).check(0).result is not None
