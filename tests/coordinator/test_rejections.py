from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from pipedist import ConnectCluster
from pipedist.coordinator.inbound import Rejections
from pipedist.coordinator.notices import LOGGER
from pipedist.errors import RemoteProtocolError
from pipedist.transport.dealer import Dealer
from pipedist.transport.keys import new_keys, read_key_file


def test_many_rejections_are_logged_at_a_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
    rejections = Rejections(verbose=True)
    for number in range(1, 100_001):
        rejections.add(f"reason {number}")
    assert rejections.count == 100_000
    logged = [int(record.getMessage().rpartition(" ")[2]) for record in caplog.records]
    assert logged == [*range(1, 9), *(2**k for k in range(4, 17))]


def test_a_repeated_reason_is_only_counted(caplog: pytest.LogCaptureFixture) -> None:
    rejections = Rejections(verbose=True)
    for _ in range(20):
        rejections.add("an old key")
    rejections.add("no key")
    assert [record.getMessage() for record in caplog.records] == [
        "pipedist: rejected (1 so far): an old key",
        "pipedist: rejected (16 so far): an old key",
        "pipedist: rejected (21 so far): no key",
    ]


def test_a_worker_that_is_restarted_again_and_again_is_one_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rejections = Rejections(verbose=True)
    for number in range(12):
        rejections.add(f"worker 'one:{number}' of 'one': it runs numpy 1.0", "one: it runs numpy 1.0")
    rejections.add("worker 'two:7' of 'two': it runs numpy 1.0", "two: it runs numpy 1.0")
    assert [record.getMessage() for record in caplog.records] == [
        "pipedist: rejected (1 so far): worker 'one:0' of 'one': it runs numpy 1.0",
        "pipedist: rejected (13 so far): worker 'two:7' of 'two': it runs numpy 1.0",
    ]


def test_rejections_of_a_local_cluster_are_only_counted(caplog: pytest.LogCaptureFixture) -> None:
    rejections = Rejections(verbose=False)
    rejections.add("it died in its handshake")
    assert rejections.count == 1
    assert caplog.records == []


def test_text_of_a_peer_is_logged_as_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    Rejections(verbose=True).add("peer\n\x1b[31m" + "x" * 10_000)
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("pipedist: rejected (1 so far): peer \ufffd[31mx")
    assert len(text) < 600


@pytest.mark.asyncio
async def test_a_run_logs_the_peers_that_it_rejects(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with ConnectCluster(key_file=tmp_path / "cluster.key") as cluster:
        keys, others = read_key_file(tmp_path / "cluster.key").client, new_keys()
        stranger = type(others.client)(keys.server_public, others.client.public, others.client.secret)
        with (
            Dealer(cluster.coordinator.endpoint, identity=b"stranger", keys=stranger) as worker,
            pytest.raises(RemoteProtocolError, match="refused this worker's key"),
        ):
            await asyncio.to_thread(worker.poll, 30.0)
        assert cluster.coordinator.rejected > 0
    logged = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    key = re.escape(others.client.public.decode())
    assert re.match(
        rf"pipedist: rejected \(1 so far\): a peer at 127\.0\.0\.1 with the unknown key {key}", logged[0]
    )
