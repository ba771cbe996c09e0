"""Gangs of real processes that share memory: killed, stopped, mismatched, late; and nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from pipedist import values
from pipedist.collectives.segment import SegmentOwner
from tests.acceptance.watch import shared_memory
from tests.collectives.member_process import digest, vector
from tests.collectives.processes import Nursery, Process

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd")


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def expected_sum(replicas: int) -> str:
    components = values.PerReplica([vector(r) for r in range(replicas)])
    return digest(values.reduce("sum", components, None, replicas))


def errors(process: Process) -> list[str]:
    return [outcome.get("error", "") for outcome in process.outcomes()]


@pytest.mark.parametrize("sizes", [[1, 1], [2, 1], [1, 1, 1, 1], [2, 2]])
def test_the_same_bits_from_any_processes(nursery: Nursery, sizes: list[int]) -> None:
    replicas = sum(sizes)
    members = nursery.start(nursery.owner(replicas), sizes, "reduce_once")
    found = [outcome for member in members for outcome in member.outcomes()]
    assert found == [{"value": expected_sum(replicas)}] * replicas


def test_everything_that_goes_through_packs(nursery: Nursery) -> None:
    big = [vector(r, 1_000_000) for r in range(3)]
    mean = digest(values.reduce("mean", values.PerReplica(big), None, 3))
    rows = digest(np.concatenate([x[: 300_000 + r] for r, x in enumerate(big)]))
    members = nursery.start(nursery.owner(3), [1, 2], "everything")
    found = [outcome for member in members for outcome in member.outcomes()]
    assert found == [{"value": [mean, rows, digest(big[1]), r, 24]} for r in range(3)]


def test_one_segment_serves_attempts_one_after_the_other(nursery: Nursery) -> None:
    owner = nursery.owner(2)
    for serial in (3, 4, 9):
        for member in nursery.start(owner, [1, 1], "reduce_once", serial=serial):
            assert member.outcomes() == [{"value": expected_sum(2)}]


def test_kill_in_a_collective_and_again_from_the_start(nursery: Nursery) -> None:
    owner = nursery.owner(2)
    first, second = nursery.start(owner, [1, 1], "reduce_for_ever")
    first.ready()
    second.ready()
    second.process.kill()
    second.end()
    owner.abort(1)  # as the scheduler's process does when it hears of the death
    assert errors(first) == ["GangAborted"]  # long before it would be a timeout
    for member in nursery.start(nursery.owner(2), [1, 1], "reduce_once", serial=2):
        assert member.outcomes() == [{"value": expected_sum(2)}]


def test_killed_while_the_others_wait(nursery: Nursery) -> None:
    owner = nursery.owner(3)
    members = nursery.start(owner, [1, 1, 1], "die")
    for member in members:
        member.ready()
    members[2].end()
    assert members[2].process.returncode == -signal.SIGKILL
    owner.abort(1)
    assert [errors(member) for member in members[:2]] == [["GangAborted"]] * 2


def test_a_stopped_member_is_a_timeout_and_spoils_nothing_when_it_wakes_up(nursery: Nursery) -> None:
    owner = nursery.owner(2)
    first, second = nursery.start(owner, [1, 1], "reduce_for_ever", timeouts_s=[0.5, 60])
    first.ready()
    second.ready()
    second.process.send_signal(signal.SIGSTOP)
    (outcome,) = first.outcomes()
    assert outcome["error"] == "CollectiveTimeoutError"
    assert "has waited 0.5 s for member 1 of the gang" in outcome["text"]
    owner.abort(1)
    again = nursery.start(nursery.owner(2), [1, 1], "reduce_once", serial=2)
    again[0].ready()
    second.process.send_signal(signal.SIGCONT)
    assert errors(second) == ["GangAborted"]
    for member in again:
        assert member.outcomes() == [{"value": expected_sum(2)}]


def test_the_scheduler_can_end_members_that_wait(nursery: Nursery) -> None:
    owner = nursery.owner(3)
    members = nursery.start(owner, [1, 1, 1], "wait_for_ever")
    for member in members:
        member.ready()
    owner.abort(1)
    for member in members[:2]:
        (outcome,) = member.outcomes()
        assert outcome == {
            "error": "GangAborted",
            "text": "attempt 1 of the gang was aborted by the scheduler",
        }


def test_mismatch(nursery: Nursery) -> None:
    members = nursery.start(nursery.owner(3), [1, 2], "mismatch")
    found = [outcome for member in members for outcome in member.outcomes()]
    assert {outcome["error"] for outcome in found} == {"CollectiveMismatchError"}
    (text,) = {outcome["text"] for outcome in found}
    lines = text.splitlines()
    assert lines[1].startswith("  replica 0: all_gather(axis=0) of float32[10], at member_process.py:")
    assert lines[2].startswith("  replicas 1-2: all_reduce(sum) of float32[10], at member_process.py:")


def test_returned_while_others_wait(nursery: Nursery) -> None:
    first, second = nursery.start(nursery.owner(2), [1, 1], "return_early")
    assert second.outcomes() == [{"value": "early"}]
    (outcome,) = first.outcomes()
    assert outcome["error"] == "CollectiveMismatchError"
    assert "replica 1: returned, and calls nothing more" in outcome["text"]


def test_nothing_is_left(nursery: Nursery) -> None:
    descriptors, names = set(os.listdir("/proc/self/fd")), shared_memory()
    for scenario in ("reduce_once", "die"):
        owner = SegmentOwner(2)
        members = nursery.start(owner, [1, 1], scenario)
        members[1].process.wait(60)
        owner.abort(1)
        for member in members:
            member.end()
        owner.close()
        owner.close()
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert shared_memory() <= names
