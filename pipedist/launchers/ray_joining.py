"""How the process of a run joins a Ray cluster that is there without it. It is called in Ray's thread."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from pipedist.errors import UsageError

AUTO = "auto"
"""The address that stands for the Ray that runs on this host, or that RAY_ADDRESS names."""

_ANSWER_S = 10.0
"""How long a Ray cluster's address may take to answer."""


def named(address: str | None) -> str:
    """Return the address that is meant: where it is left open that of RAY_ADDRESS, if there is one."""
    if address not in (None, AUTO):
        return str(address)
    return os.environ.get("RAY_ADDRESS") or AUTO


def join(address: str, environment: Mapping[str, object], place_s: float) -> None:
    """Connect this process to a Ray cluster.

    Args:
        address: `auto`, `HOST:PORT` or `ray://HOST:PORT`.
        environment: the `runtime_env` of what is started for it.
        place_s: how long a client server may take to have a process for this one, seconds.

    Raises:
        ConnectionError: nobody answers there.
        UsageError: who answers can't be joined: it has another version of Ray or Python, or Ray Client is
            not installed.
    """
    import ray

    if address != AUTO:  # Ray itself would try for a long time
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise ConnectionError(str(error)) from error
    until = time.monotonic() + place_s
    while True:
        try:
            ray.init(
                address=address, runtime_env=dict(environment), log_to_driver=False, logging_level="ERROR"
            )
        except ConnectionError:  # a client server starts a process for each client: it may come to nothing
            if not address.startswith("ray://") or time.monotonic() >= until:
                raise
        except (ImportError, RuntimeError, ValueError) as error:
            ray.shutdown()
            raise UsageError(f"can't join the Ray cluster at {address}: {str(error).strip()}") from error
        else:
            return
