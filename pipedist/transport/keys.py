"""CURVE keys, which let a process join a cluster over TCP, and their file.

One key file serves a cluster. Both ends read the same file, or workers get one without
`server_secret` (`workers_file`). It is JSON: {"pipedist_keys": 1, "server_public", "client_public",
"client_secret", "server_secret"}, each key 40 characters of Z85.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from pipedist.errors import UsageError

KEY_FILE_VERSION: Final = 1
_FILE_BYTES_MAX: Final = 4096
_REQUIRED: Final = ("server_public", "client_public", "client_secret")


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The scheduler's key pair, and clients' public keys (Z85, 40 bytes)."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A worker's key pair, and the scheduler's public key (Z85, 40 bytes)."""

    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The keys of one cluster; `server` is None in a file made for workers alone."""

    client: ClientKeys
    server: ServerKeys | None


def new_keys() -> ClusterKeys:
    server_public, server_secret = zmq.curve_keypair()
    public, secret = zmq.curve_keypair()
    return ClusterKeys(
        client=ClientKeys(server_public, public, secret),
        server=ServerKeys(server_public, server_secret, frozenset({public})),
    )


def workers_file(path: str | os.PathLike[str]) -> Path:
    """Return where the workers' part of a key file is: of `cluster.key`, `cluster.worker.key` beside it."""
    whole = Path(path)
    return whole.with_name(f"{whole.stem}.worker{whole.suffix}")


def key_text(keys: ClusterKeys) -> str:
    document: dict[str, object] = {
        "pipedist_keys": KEY_FILE_VERSION,
        "server_public": keys.client.server_public.decode("ascii"),
        "client_public": keys.client.public.decode("ascii"),
        "client_secret": keys.client.secret.decode("ascii"),
    }
    if keys.server is not None:
        document["server_secret"] = keys.server.secret.decode("ascii")
    return json.dumps(document, indent=1) + "\n"


def write_key_file(path: str | os.PathLike[str], keys: ClusterKeys | None = None) -> ClusterKeys:
    """Write keys, new ones by default, to a new file of mode 0600; return them."""
    if keys is None:
        keys = new_keys()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(key_text(keys))
    except FileExistsError:
        raise UsageError(
            f"key file {os.fspath(path)} exists already; remove it first, or choose another name"
        ) from None
    except OSError as error:
        raise UsageError(f"can't write key file {os.fspath(path)}: {error.strerror}") from None
    return keys


def read_key_file(path: str | os.PathLike[str]) -> ClusterKeys:
    """Read a cluster's keys; raise UsageError if the file is unreadable, readable by others, or has none."""
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"can't read key file {name}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(
            f"key file {name} is readable by others (mode {stat.S_IMODE(mode):04o}); "
            f"run `chmod 600 {name}`, or make new keys if others may have read it"
        )
    return keys_in(content, f"key file {name}")


def keys_in(content: bytes | str, name: str) -> ClusterKeys:
    """Return the keys that `key_text` has written; `name`: of the text, for errors."""
    try:
        document = json.loads(content) if len(content) <= _FILE_BYTES_MAX else None
    except ValueError:
        document = None
    if not isinstance(document, dict) or "pipedist_keys" not in document:
        raise UsageError(f"{name} is no pipedist key file")
    if document["pipedist_keys"] != KEY_FILE_VERSION:
        raise UsageError(f"{name} has version {document['pipedist_keys']!r}, expected {KEY_FILE_VERSION}")
    server_public, client_public, client_secret = (_key(document, key, name) for key in _REQUIRED)
    server = None
    if "server_secret" in document:
        secret = _key(document, "server_secret", name)
        server = ServerKeys(server_public, secret, frozenset({client_public}))
        _check_pair(server_public, secret, "server", name)
    _check_pair(client_public, client_secret, "client", name)
    return ClusterKeys(ClientKeys(server_public, client_public, client_secret), server)


def _key(document: dict[str, object], key: str, name: str) -> bytes:
    value = document.get(key)
    if not isinstance(value, str) or len(value) != 40 or not value.isascii():
        raise UsageError(f"{name}: {key} must be a key of 40 characters")
    text = value.encode("ascii")
    try:
        is_key = z85.encode(z85.decode(text)) == text
    except (KeyError, ValueError, struct.error):
        is_key = False
    if not is_key:
        raise UsageError(f"{name}: {key} is not a key in Z85")
    return text


def _check_pair(public: bytes, secret: bytes, side: str, name: str) -> None:
    if zmq.curve_public(secret) != public:
        raise UsageError(f"{name}: {side}_secret does not belong to {side}_public")
