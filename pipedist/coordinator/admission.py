"""Who may join a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from pipedist.coordinator.worker_registry import Peer
from pipedist.core import platform_id
from pipedist.core.platform_id import Platform
from pipedist.protocol import messages as msg


def refusal(
    hello: msg.Hello,
    *,
    started: Mapping[str, int],
    managed: bool,
    dial_in: bool,
    current: Peer | None,
    threads: int | None = None,
) -> str:
    """Return why a worker may not join, whatever it runs; "" if it may.

    Args:
        started: the incarnation of each worker that was started here and is alive.
        managed: the name is one of the workers that are started here.
        dial_in: whether others may join.
        current: the peer of that name that has joined before, None if there is none.
        threads: BLAS and OpenMP threads that it has to have, since they change bits; None: any.
    """
    if managed and started.get(hello.worker) != hello.incarnation:
        return f"incarnation {hello.incarnation} of {hello.worker} was not started by this cluster"
    if not managed and not dial_in:
        return f"this cluster starts its own workers and knows no {hello.worker!r}"
    if current is not None and current.incarnation == hello.incarnation:
        return f"incarnation {hello.incarnation} of {hello.worker} has joined already"
    if current is not None and current.incarnation > hello.incarnation:
        return f"incarnation {current.incarnation} of {hello.worker} has joined, which is a later one"
    if hello.wire != msg.WIRE_VERSION:
        return f"it speaks protocol {hello.wire} (the run {msg.WIRE_VERSION})"
    if threads is not None and hello.threads != threads:
        return f"it runs with --threads {hello.threads} (the run: threads_per_replica: {threads})"
    return ""


def differences(hello: msg.Hello, *, managed: bool) -> str:
    """Return in what a worker differs from this process that could change bits of a result, "" for nothing.

    Args:
        managed: it was started here, on this very processor.
    """
    theirs = Platform(hello.python, hello.numpy, hello.pipedist, hello.cpu, hello.traits)
    differing = platform_id.differences(theirs, Platform.here(), called="the run", same_processor=managed)
    return "it runs " + ", ".join(differing) if differing else ""
