"""A network that delays, loses and repeats packets, and lets them overtake each other."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.networks.relay import relayed
from tests.networks.runs import Work, running


@pytest.mark.slow
def test_delay_loss_and_repeats_change_nothing(
    tmp_path: Path, work: Work, expected: dict[str, bytes]
) -> None:
    names = ["scheduler", "one", "two"]
    with relayed(tmp_path, names, seed=7, delay_ms=50, loss=0.01, repeat=0.01) as (hosts, relay):
        # What is lost is sent again after a while: a heartbeat may be later than on a good network.
        with running(work, hosts["scheduler"], heartbeat_timeout_s=16.0) as run:
            workers = [run.start_worker(hosts[name]) for name in ("one", "two")]
            run.told.wait_for("workers", ready=2)
            work.reaches({"one", "two"})
            assert run.finish() == expected
            assert [worker.wait(60) for worker in workers] == [0, 0]
        relay.send_signal(signal.SIGTERM)
        packets, _ = relay.communicate(timeout=60)
    counted = json.loads(packets)
    assert counted["lost"] > 0, "the network was better than it was to be"
    assert counted["repeated"] > 0
