"""Ports for those who must know one before anybody listens there."""

from __future__ import annotations

import itertools
import os
import random
import socket

_FIRST = 10_000
_EACH = 1000
_turn = itertools.count(random.randrange(_EACH))


def free_port() -> int:
    """Return a port at which nobody listens, and which nobody else gets meanwhile.

    It is none of those that the kernel gives to whoever asks for any port; and each process of the suite has
    its own ones.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 20
    while True:
        port = _FIRST + _EACH * process + next(_turn) % _EACH
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
