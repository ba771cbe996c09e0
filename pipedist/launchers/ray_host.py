"""What runs inside a Ray actor that keeps a worker; it needs nothing of Ray."""

from __future__ import annotations

import os

from msgspec.structs import replace

from pipedist.launchers.hosted import HostedWorker, Terms


class RayHost:
    """Keeps one worker, as long as its actor lives. Its methods are called in threads of the actor.

    Args:
        terms: how the worker joins.
        brings_code: the actor's working folder is a copy of the spec's modules.
    """

    def __init__(self, terms: Terms, brings_code: bool) -> None:
        code = (os.getcwd(),) if brings_code else ()
        self._hosted = HostedWorker(replace(terms, code=code))

    def left(self) -> str | None:
        """Return how the worker left, as soon as it has: "" if it was told to."""
        return self._hosted.wait()

    def close(self, grace_s: float) -> None:
        """End the worker; see `HostedWorker.close`."""
        self._hosted.close(grace_s)
