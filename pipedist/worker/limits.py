"""The limits of a worker."""

from __future__ import annotations

from msgspec import Struct

from pipedist.protocol.messages import CACHED_RANGES_MAX


class Limits(Struct, frozen=True):
    """The limits of a worker.

    Args:
        join_s: how long Hello may stay unanswered, seconds.
        flush_s: how long a finished call may wait to be reported, seconds.
        flush_bytes: how many bytes of results may gather before they are reported.
        leases_queued_max: leases that may wait behind the one that executes.
        recalls_queued_max: recalls that may wait besides; as many as a worker offers.
        passes_max: passes that may be bound at a time.
        states_max: states of which values may be kept at a time.
    """

    join_s: float = 30.0
    flush_s: float = 0.02
    flush_bytes: int = 4 * 2**20
    leases_queued_max: int = 64
    recalls_queued_max: int = CACHED_RANGES_MAX
    passes_max: int = 1024
    states_max: int = 4096
