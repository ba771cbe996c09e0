from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from pipedist.errors import UsageError
from pipedist.transport.endpoints import (
    SOCKET_PATH_BYTES_MAX,
    ipc_endpoint,
    parse_endpoint,
    private_directory,
)
from pipedist.transport.keys import ClusterKeys, new_keys, read_key_file, write_key_file


def test_a_private_directory_is_private_and_goes_away() -> None:
    with private_directory() as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert ipc_endpoint(directory) != ipc_endpoint(directory)
        assert parse_endpoint(ipc_endpoint(directory), bind=True, has_keys=False).path
        (directory / "left over").write_text("x")
    assert not directory.exists()


def test_a_long_temporary_directory_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with private_directory() as directory:
        assert directory.parent == Path("/tmp")
        path = ipc_endpoint(directory).removeprefix("ipc://")
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path)


def test_the_longest_path_is_the_kernels() -> None:
    with private_directory() as directory:
        room = SOCKET_PATH_BYTES_MAX - len(str(directory)) - 1
        parse_endpoint(f"ipc://{directory}/{'x' * room}", bind=True, has_keys=False)
        with pytest.raises(UsageError, match="at most 107 bytes"):
            parse_endpoint(f"ipc://{directory}/{'x' * (room + 1)}", bind=True, has_keys=False)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"{directory}/{'x' * room}")


@pytest.mark.parametrize("bind", [True, False])
def test_ipc_only_in_a_private_directory(tmp_path: Path, bind: bool) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match=r"yours alone .* 0755"):
        parse_endpoint(f"ipc://{tmp_path}/s", bind=bind, has_keys=False)
    tmp_path.chmod(0o700)
    parse_endpoint(f"ipc://{tmp_path}/s", bind=bind, has_keys=False)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="yours alone"):
        parse_endpoint(f"ipc://{tmp_path}/link/s", bind=bind, has_keys=False)
    with pytest.raises(UsageError, match="No such file"):
        parse_endpoint(f"ipc://{tmp_path}/absent/s", bind=bind, has_keys=False)


def test_a_path_that_is_taken_is_not_stolen(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "s").touch()
    with pytest.raises(UsageError, match="exists already"):
        parse_endpoint(f"ipc://{tmp_path}/s", bind=True, has_keys=False)
    parse_endpoint(f"ipc://{tmp_path}/s", bind=False, has_keys=False)


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5555", "tcp://127.0.0.1:0", "tcp://*:0", "tcp://[::]:1"])
def test_tcp_without_keys_is_rejected(endpoint: str) -> None:
    with pytest.raises(UsageError, match="needs keys"):
        parse_endpoint(endpoint, bind=True, has_keys=False)
    assert parse_endpoint(endpoint, bind=True, has_keys=True).is_tcp


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:5",
        "tcp://127.0.0.1",
        "tcp://h:65536",
        "tcp://h:-1",
        "tcp://a b:1",
        "udp://h:1",
        "ipc://rel",
    ],
)
def test_malformed_endpoints(endpoint: str) -> None:
    for bind in (True, False):
        with pytest.raises(UsageError, match="endpoint"):
            parse_endpoint(endpoint, bind=bind, has_keys=True)


@pytest.mark.parametrize("endpoint", ["tcp://h:0", "tcp://*:5", "tcp://h:*"])
def test_one_connects_to_a_place(endpoint: str) -> None:
    with pytest.raises(UsageError, match="host and a port"):
        parse_endpoint(endpoint, bind=False, has_keys=True)


# --- key files ------------------------------------------------------------------------------


def test_a_key_file_comes_back_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    before = os.umask(0)
    try:
        keys = write_key_file(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key_file(path) == keys
    assert json.loads(path.read_text())["pipedist_keys"] == 1
    with pytest.raises(UsageError, match="exists already"):
        write_key_file(path)


def test_a_worker_file_has_no_server_secret(tmp_path: Path) -> None:
    keys = new_keys()
    path = tmp_path / "worker.json"
    write_key_file(path, ClusterKeys(keys.client, None))
    assert read_key_file(path) == ClusterKeys(keys.client, None)
    assert "server_secret" not in path.read_text()


def test_a_key_file_that_others_can_read_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_key_file(path)
    path.chmod(0o640)
    with pytest.raises(UsageError, match=r"mode 0640.*chmod 600"):
        read_key_file(path)


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_key_file(tmp_path / "absent")
    with pytest.raises(UsageError, match="can't write"):
        write_key_file(tmp_path / "absent" / "keys")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: "not json", "no pipedist key file"),
        (lambda d: [1], "no pipedist key file"),
        (lambda d: {}, "no pipedist key file"),
        (lambda d: {**d, "pipedist_keys": 2}, "version 2, expected 1"),
        (lambda d: {**d, "client_secret": "short"}, "client_secret must be"),
        (lambda d: {**d, "client_secret": 5}, "client_secret must be"),
        (lambda d: {**d, "client_secret": "~" * 40}, "client_secret is not"),
        (lambda d: {**d, "client_secret": "#" * 40}, "client_secret is not"),
        (lambda d: {**d, "client_secret": d["server_secret"]}, "does not belong"),
        (lambda d: {**d, "server_secret": d["client_secret"]}, "does not belong"),
        (lambda d: {k: v for k, v in d.items() if k != "server_public"}, "server_public must be"),
        (lambda d: "x" * 5000, "no pipedist key file"),
    ],
)
def test_malformed_key_files(tmp_path: Path, change: object, match: str) -> None:
    path = tmp_path / "keys.json"
    write_key_file(path)
    changed = change(json.loads(path.read_text()))  # type: ignore[operator]
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(UsageError, match=match):
        read_key_file(path)
