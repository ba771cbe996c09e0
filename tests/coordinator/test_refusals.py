from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from pipedist import ConnectCluster
from pipedist.cluster.remote import server_keys
from pipedist.coordinator.rejections import LOGGER, Refusals
from pipedist.errors import RemoteProtocolError
from pipedist.transport.dealer import Dealer
from pipedist.transport.keys import new_keys


def test_nobody_can_fill_a_log(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(tells=True)
    for number in range(1, 100_001):
        refusals.note(f"reason {number}")
    assert refusals.count == 100_000
    told = [int(record.getMessage().rpartition(" ")[2]) for record in caplog.records]
    assert told == [*range(1, 9), *(2**k for k in range(4, 17))]


def test_what_is_said_already_is_only_counted(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(tells=True)
    for _ in range(20):
        refusals.note("an old key")
    refusals.note("no key")
    assert [record.getMessage() for record in caplog.records] == [
        "pipedist: refused (1 so far): an old key",
        "pipedist: refused (16 so far): an old key",
        "pipedist: refused (21 so far): no key",
    ]


def test_a_worker_that_is_started_again_and_again_leaves_room_for_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = Refusals(tells=True)
    for number in range(12):
        refusals.note(f"worker 'one:{number}' of 'one': it runs numpy 1.0", "one: it runs numpy 1.0")
    refusals.note("worker 'two:7' of 'two': it runs numpy 1.0", "two: it runs numpy 1.0")
    assert [record.getMessage() for record in caplog.records] == [
        "pipedist: refused (1 so far): worker 'one:0' of 'one': it runs numpy 1.0",
        "pipedist: refused (13 so far): worker 'two:7' of 'two': it runs numpy 1.0",
    ]


def test_where_nobody_may_come_they_are_only_counted(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(tells=False)
    refusals.note("it died in its handshake")
    assert refusals.count == 1
    assert caplog.records == []


def test_what_a_stranger_wrote_is_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    Refusals(tells=True).note("peer\n\x1b[31m" + "x" * 10_000)
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("pipedist: refused (1 so far): peer\ufffd\ufffd[31mx")
    assert len(text) < 600


@pytest.mark.asyncio
async def test_the_run_says_who_was_kept_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with ConnectCluster(key_file=tmp_path / "cluster.key") as cluster:
        keys, others = server_keys(str(tmp_path / "cluster.key")), new_keys()
        stranger = type(others.client)(keys.public, others.client.public, others.client.secret)
        with (
            Dealer(cluster.coordinator.endpoint, identity=b"stranger", keys=stranger) as worker,
            pytest.raises(RemoteProtocolError, match="refused this worker's key"),
        ):
            await asyncio.to_thread(worker.poll, 30.0)
        assert cluster.coordinator.rejected > 0
    told = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    key = re.escape(others.client.public.decode())
    assert re.match(
        rf"pipedist: refused \(1 so far\): a peer at 127\.0\.0\.1 with the unknown key {key}", told[0]
    )
