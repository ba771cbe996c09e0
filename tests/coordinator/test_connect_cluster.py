"""The join command that a run prints for its workers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pipedist import ConnectCluster
from pipedist.errors import UsageError
from pipedist.transport.keys import new_keys, write_key_file


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("listen", "host"),
    [(None, "127.0.0.1"), ("tcp://*:0", os.uname().nodename), ("tcp://0.0.0.0:*", os.uname().nodename)],
)
async def test_it_prints_the_join_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], listen: str | None, host: str
) -> None:
    key_file = tmp_path / "cluster.key"
    if listen is not None:  # other hosts can reach it
        write_key_file(key_file)
    async with ConnectCluster(listen=listen, key_file=key_file) as cluster:
        port = cluster.coordinator.endpoint.rpartition(":")[2]
    printed = capsys.readouterr().err
    assert (
        printed
        == f"waiting for workers: pipedist worker --connect tcp://{host}:{port} --key-file {key_file}\n"
    )


@pytest.mark.asyncio
async def test_it_names_the_key_file_for_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = new_keys()
    write_key_file(tmp_path / "cluster.key", keys)
    write_key_file(tmp_path / "cluster.worker.key", replace(keys, server=None))
    async with ConnectCluster(key_file=tmp_path / "cluster.key"):
        pass
    assert capsys.readouterr().err.endswith(f"--key-file {tmp_path}/cluster.worker.key\n")


@pytest.mark.asyncio
@pytest.mark.parametrize("listen", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://[::]:0"])
async def test_missing_keys_are_not_created_if_other_hosts_can_connect(tmp_path: Path, listen: str) -> None:
    with pytest.raises(UsageError, match=r"does not exist.*pipedist keys new --output .*wrong\.worker\.key"):
        await ConnectCluster(listen=listen, key_file=tmp_path / "wrong.key").__aenter__()
    assert not (tmp_path / "wrong.key").exists()


def test_a_key_file_is_required() -> None:
    with pytest.raises(UsageError, match="need keys"):
        ConnectCluster(listen="tcp://0.0.0.0:0")
