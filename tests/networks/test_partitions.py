"""Hosts that are cut off, for a while or for good: the same bytes, and nothing counts twice."""

from __future__ import annotations

import time

import pytest

from tests.networks.hosts import Network
from tests.networks.runs import PATIENCE_S, Work, running

HEARTBEAT_TIMEOUT_S = 3.2
HEARTBEATS = 3.2
"""Heartbeats in that time."""

WAYS = {
    "both": [("one", "scheduler"), ("scheduler", "one")],
    "to_scheduler": [("one", "scheduler")],
    "from_scheduler": [("scheduler", "one")],
}


def test_a_run_over_three_hosts(hosts: Network, work: Work, expected: dict[str, bytes]) -> None:
    with running(work, hosts["scheduler"]) as run:
        workers = [run.start_worker(hosts[name]) for name in ("one", "two", "three")]
        run.told.wait_for("workers", ready=3)
        work.reaches({"one", "two", "three"})
        assert run.finish() == expected
        assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    assert len(work.begun()) == 3 * Work.STEPS  # nothing went wrong, so nothing was done twice


LONG = {"to_scheduler": [pytest.mark.slow], "from_scheduler": [pytest.mark.networks_full]}


# TCP's acknowledgements are packets too: what is cut in one direction soon says nothing in the other.
@pytest.mark.parametrize(
    "ways", [pytest.param(ways, id=name, marks=LONG.get(name, [])) for name, ways in WAYS.items()]
)
def test_a_partition_costs_time_and_the_worker_comes_back(
    hosts: Network, work: Work, expected: dict[str, bytes], ways: list[tuple[str, str]]
) -> None:
    with running(work, hosts["scheduler"], heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S) as run:
        workers = [run.start_worker(hosts[name]) for name in ("one", "two")]
        run.told.wait_for("workers", ready=2)
        for way in ways:
            hosts.cut(*way)
        run.told.wait_for("workers", ready=1)
        before = len(work.begun())
        for way in ways:
            hosts.heal(*way)
        run.told.wait_for("workers", ready=2)
        work.reaches({"one"}, after=before)  # it has come back, and is given something
        assert run.finish() == expected
        assert [worker.wait(60) for worker in workers] == [0, 0]


@pytest.mark.slow
def test_a_host_that_is_cut_off_for_good(hosts: Network, work: Work, expected: dict[str, bytes]) -> None:
    with running(work, hosts["scheduler"], heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S) as run:
        worker, other = (run.start_worker(hosts[name]) for name in ("one", "two"))
        run.told.wait_for("workers", ready=2)
        hosts.part("one", "scheduler")
        run.told.wait_for("workers", ready=1)
        assert run.finish() == expected
        assert other.wait(60) == 0
        assert worker.poll() is None  # it can't know


@pytest.mark.networks_full
@pytest.mark.timeout(300)
def test_a_worker_that_is_cut_off_for_longer_than_it_waits_leaves(
    hosts: Network, work: Work, expected: dict[str, bytes]
) -> None:
    """No packet reports that the network is gone: ZeroMQ's heartbeat times out after 30 s."""
    with running(work, hosts["scheduler"], heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, rejoin_s=2.0) as run:
        worker, other = (run.start_worker(hosts[name]) for name in ("one", "two"))
        run.told.wait_for("workers", ready=2)
        hosts.part("one", "scheduler")
        run.told.wait_for("workers", ready=1)
        assert worker.wait(PATIENCE_S) == 1
        said = f"the driver at {run.endpoint} is gone, and none has come back within 2 s"
        assert said in run.said("one")
        hosts.join("one", "scheduler")
        assert run.finish() == expected
        assert other.wait(60) == 0


@pytest.mark.networks_full
@pytest.mark.timeout(300)
def test_a_partition_of_thirty_seconds_with_the_usual_heartbeat(
    hosts: Network, work: Work, expected: dict[str, bytes]
) -> None:
    with running(work, hosts["scheduler"], heartbeat_timeout_s=16.0) as run:
        workers = [run.start_worker(hosts[name]) for name in ("one", "two")]
        run.told.wait_for("workers", ready=2)
        hosts.part("one", "scheduler")
        time.sleep(30)  # the length of the partition is what is tested
        hosts.join("one", "scheduler")
        run.told.wait_for("workers", ready=1)
        run.told.wait_for("workers", ready=2)
        assert run.finish() == expected
        assert [worker.wait(60) for worker in workers] == [0, 0]


@pytest.mark.networks_full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("heartbeat_timeout_s", [HEARTBEAT_TIMEOUT_S, 16.0])
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_a_partition_is_detected_within_three_heartbeats_and_a_second(
    hosts: Network, work: Work, ways: list[tuple[str, str]], heartbeat_timeout_s: float
) -> None:
    with running(work, hosts["scheduler"], heartbeat_timeout_s=heartbeat_timeout_s) as run:
        run.start_worker(hosts["one"])
        run.told.wait_for("workers", ready=1)
        for way in ways:
            hosts.cut(*way)
        cut_at = time.monotonic()
        took_s = run.told.wait_for("workers", ready=0)["at"] - cut_at
        heartbeat_s = heartbeat_timeout_s / HEARTBEATS
        print(f"noticed after {took_s:.2f} s, with a heartbeat of {heartbeat_s:g} s")
        # A heartbeat whose acknowledgement is dropped has arrived all the same: one more counts.
        heard_after_s = heartbeat_s if ways == WAYS["from_scheduler"] else 0.0
        assert took_s - heard_after_s <= 3 * heartbeat_s + 1.0
