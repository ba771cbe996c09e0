"""How a worker comes in: what people are told meanwhile, and what it takes over from its scheduler."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from pipedist.messages import Welcome

SILENT_S = 2.0
"""How long a scheduler may take to answer before that is told."""


def host_of(endpoint: str) -> tuple[str, int] | None:
    """Return host and port of a TCP endpoint, None of another one."""
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    return (host.strip("[]"), int(port)) if scheme == "tcp" else None


def unknown_host(endpoint: str) -> str:
    """Return, to be said after a ";", that an endpoint's host can't be found; "" if it can be."""
    import socket  # seldom needed

    place = host_of(endpoint)
    if place is None:
        return ""
    try:
        socket.getaddrinfo(place[0], None)
    except (OSError, UnicodeError) as error:
        return f"; the host {place[0]!r} can't be found: {error}"
    return ""


class Joining:
    """From Hello to Welcome.

    Args:
        tell: told, for people, that the worker has joined, or waits for a scheduler.
        threads: BLAS and OpenMP threads of this process.
        join_s: how long the connection may take, seconds.
        endpoint: the scheduler's; "": not known.
    """

    def __init__(
        self, tell: Callable[[str], None], *, threads: int, join_s: float, endpoint: str = ""
    ) -> None:
        self._tell = tell
        self._endpoint = endpoint
        self._threads = threads
        self._join_s = join_s
        self._waits_from: float | None = None
        """Since when nobody has answered; None where that has been told, or does not matter any more."""

    def begin(self) -> None:
        """Hello is being said."""
        self._waits_from = time.monotonic()

    def look(self) -> None:
        """Tell once that nobody answers, if it has taken that long."""
        if self._waits_from is not None and time.monotonic() - self._waits_from >= SILENT_S:
            self._waits_from = None
            self._tell(
                f"waiting for a scheduler, for at most {self._join_s:.3g} s{unknown_host(self._endpoint)}"
            )

    def joined(self, welcome: Welcome) -> None:
        """Tell that the worker is in, and resolve modules as the scheduler's process on this host does."""
        self._waits_from = None
        threads = "1 thread" if self._threads == 1 else f"{self._threads} threads"
        self._tell(f"joined cluster {welcome.cluster}, {threads}")
        if welcome.notice:
            self._tell(welcome.notice)
        theirs = [entry for entry in welcome.sys_path if os.path.isabs(entry)]
        if theirs:
            sys.path[:] = theirs + [entry for entry in sys.path if entry not in theirs]
