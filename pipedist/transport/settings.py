"""How long sockets wait and how much they queue; one value for both ends."""

from __future__ import annotations

from msgspec import Struct

from pipedist.transport.limits import GIB, KIB


class Settings(Struct, frozen=True):
    """The times and queue lengths of a socket.

    Args:
        queue_messages_max: messages that ZeroMQ queues per peer and direction. More than the
            credit that the scheduler gives a worker, so that it is not felt.
        outbox_messages_max, outbox_bytes_max: what a Router keeps for one peer beyond that,
            before it gives the peer up.
        linger_s: how long closing waits for what is not sent yet.
        handshake_s: how long a peer may take for its handshake.
        heartbeat_s, heartbeat_timeout_s: ZeroMQ's own heartbeat on TCP, which finds a host that
            went away without a word. Hung workers are the scheduler's business.
        handshakes_failed_max: failed handshakes without a stated reason, after which a Dealer
            gives up.
        flush_retry_s: how often what waits for a full queue is tried again, at the least.
        frames_per_wake_up: frames that a Router handles before other tasks have their turn.
        peers_max: identities that a Router remembers.
    """

    queue_messages_max: int = 256
    outbox_messages_max: int = 64 * KIB
    outbox_bytes_max: int = 4 * GIB
    linger_s: float = 1.0
    handshake_s: float = 5.0
    heartbeat_s: float = 5.0
    heartbeat_timeout_s: float = 30.0
    handshakes_failed_max: int = 3
    flush_retry_s: float = 0.005
    frames_per_wake_up: int = 256
    peers_max: int = 64 * KIB


SETTINGS = Settings()
"""The settings of the protocol; tests use smaller ones."""
