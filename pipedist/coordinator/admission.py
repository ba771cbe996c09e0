"""Who may join a cluster."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np

from pipedist import messages as msg
from pipedist.coordinator.roster import Peer
from pipedist.version import __version__
from pipedist.worker.hello import cpu_model, cpu_traits


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
    ours = {
        "python": ".".join(map(str, sys.version_info[:2])),
        "numpy": np.__version__,
        "pipedist": __version__,
    }
    theirs = {
        "python": ".".join(hello.python.split(".")[:2]),
        "numpy": hello.numpy,
        "pipedist": hello.pipedist,
    }
    differing = [f"{k} {theirs[k]} (the run {ours[k]})" for k in ours if ours[k] != theirs[k]]
    here = () if managed else cpu_traits()
    if not managed and hello.traits != here:
        only_there = [trait for trait in hello.traits if trait not in here]
        only_here = [trait for trait in here if trait not in hello.traits]
        parts = [f"with {' '.join(only_there)}"] if only_there else []
        parts += [f"without {' '.join(only_here)}"] if only_here else []
        differing.append(
            f"another processor type, {hello.cpu}, {' and '.join(parts)} (the run: {cpu_model()})"
        )
    return "it runs " + ", ".join(differing) if differing else ""
