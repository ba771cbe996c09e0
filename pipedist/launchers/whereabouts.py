"""Where the workers that an engine has placed find the processes of a run, one after the other.

    RUN/.pipedist/placed.json    the endpoint and the cluster's keys (0600), and who has placed the workers

The process of the run writes it as soon as it listens, and removes it when the cluster is closed. Where it is
killed, the next one listens at the same endpoint with the same keys, so that the workers, which dial it
again and again, find it there; and it takes over, from the engine, what keeps them.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
from pathlib import Path
from typing import Final

from msgspec import Struct

from pipedist.errors import UsageError
from pipedist.launchers.private_files import read_document, write_document
from pipedist.transport.keys import ClusterKeys, key_text, keys_in

_FORMAT: Final = 1
_RUN: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)


class Succession(Struct, frozen=True):
    """The processes of one run, of which each takes over the workers of the one before.

    Args:
        run: whose workers they are, 16 hexadecimal digits.
        life: which of the processes this is, from 1.
        rejoin_s: how long workers wait for the next one, seconds.
    """

    run: str
    life: int
    rejoin_s: float

    @property
    def name(self) -> str:
        """What this process calls that which keeps its workers."""
        return self.name_of(self.life)

    @property
    def earlier(self) -> list[str]:
        """What the processes before it called theirs, the latest first."""
        return [self.name_of(life) for life in range(self.life - 1, 0, -1)]

    def name_of(self, life: int) -> str:
        """Return what one of the processes calls that which keeps its workers."""
        return f"pipedist-{self.run}-{life}"

    def next(self, rejoin_s: float) -> Succession:
        """Return that of the process after this one."""
        return Succession(self.run, self.life + 1, rejoin_s)


def first(rejoin_s: float) -> Succession:
    """Return the succession that a process begins."""
    return Succession(secrets.token_hex(8), 1, rejoin_s)


class Whereabouts(Struct, frozen=True):
    """What a process of a run leaves for the next one.

    Args:
        succession: its own.
        endpoint: where it listens.
        keys: with which.
        placing: what its workers were placed on, and with.
    """

    succession: Succession
    endpoint: str
    keys: ClusterKeys
    placing: str


def read(path: Path) -> Whereabouts | None:
    """Return what another process of the run has left; None if there is nothing, or nothing to be trusted."""
    document = read_document(path) or {}
    run, life, endpoint = document.get("run"), document.get("life"), document.get("endpoint")
    keys, placing = document.get("keys"), document.get("placing")
    if (
        document.get("format") != _FORMAT
        or not isinstance(run, str)
        or _RUN.fullmatch(run) is None
        or not isinstance(life, int)
        or life < 1
        or not isinstance(endpoint, str)
        or not isinstance(keys, str)
        or not isinstance(placing, str)
    ):
        return None
    try:
        found = keys_in(keys, f"{path}: `keys`")
    except UsageError:
        return None
    if found.server is None:
        return None
    return Whereabouts(Succession(run, life, 0.0), endpoint, found, placing)


def write(path: Path, whereabouts: Whereabouts) -> None:
    """Write it (mode 0600), all of it or nothing.

    Raises:
        UsageError: it can't be written.
    """
    write_document(
        path,
        {
            "format": _FORMAT,
            "run": whereabouts.succession.run,
            "life": whereabouts.succession.life,
            "endpoint": whereabouts.endpoint,
            "keys": key_text(whereabouts.keys),
            "placing": whereabouts.placing,
        },
    )


def remove(path: Path) -> None:
    """Remove it: nobody is to be found there any more."""
    with contextlib.suppress(OSError):  # who reads it finds nobody: nothing worse
        path.unlink(missing_ok=True)


def why_deaf(endpoint: str) -> str:
    """Return why nobody can listen at an endpoint, "" if that is not known.

    Args:
        endpoint: `tcp://ADDRESS:PORT`.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]").replace("*", "")  # "": every address
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ's
            probe.bind((host, int(port)))
            probe.listen(1)
    except (OSError, ValueError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""
