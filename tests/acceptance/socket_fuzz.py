"""Damaged messages on the sockets of a working cluster: its runs and workers are not affected."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
from collections.abc import Sequence
from multiprocessing import resource_tracker

import numpy as np
import zmq

import pipedist
from tests.acceptance.decoder_fuzz import Found
from tests.acceptance.frame_mutations import mutated
from tests.acceptance.recorded import Frames
from tests.acceptance.watch import MIB, descriptors, rss_bytes

MESSAGES = 10_000
BATCH = 20
"""Messages per context of the sender."""

GROWTH_BYTES_MAX = 64 * MIB
SECOND_HALF_BYTES_MAX = 16 * MIB
"""The memory of thousands of connections must be freed or reused."""

RUN_S_MAX = 60.0
SPEC = {
    "pipedist": 1,
    "replicas": 2,
    "dataset": {"range": 1000, "batch": 20},
    "stages": {
        "y": {"run": "tests.acceptance.functions:floats", "with": {"pause_s": 0.001}},
        "total": {"reduce": "sum", "of": "y", "axis": 0},
    },
}


async def fuzz(corpus: Sequence[Frames], seeds: Sequence[int]) -> tuple[int, int, int]:
    """Send one damaged message for each seed to the router of a cluster while runs use it.

    Returns:
        Messages sent, peers that were refused or dropped, and runs that finished beside them.

    Raises:
        Found: a run gave something else, a worker was lost, or memory or descriptors have grown.
    """
    async with pipedist.LocalCluster(workers=2) as cluster:
        await cluster.ready()
        want = await _result(cluster)
        pids = dict(cluster.pids)
        resource_tracker.ensure_running()  # the rogue's process needs it, with a descriptor here
        open_ = descriptors()
        memory = await _settled_bytes(open_)
        half = len(seeds) // 2
        runs = await _beside(cluster, want, corpus, seeds[:half])
        halfway = await _settled_bytes(open_)
        runs += await _beside(cluster, want, corpus, seeds[half:])
        assert await _result(cluster) == want
        if dict(cluster.pids) != pids:
            raise Found(f"workers were lost: {pids} became {dict(cluster.pids)}")
        end = await _settled_bytes(open_)
        if end - memory > GROWTH_BYTES_MAX or end - halfway > SECOND_HALF_BYTES_MAX:
            mib = [amount // MIB for amount in (memory, halfway, end)]
            raise Found(f"memory has grown from {mib[0]} MiB to {mib[1]} halfway and {mib[2]} in the end")
        return len(seeds), cluster.coordinator.rejected, runs


async def _beside(
    cluster: pipedist.LocalCluster, want: bytes, corpus: Sequence[Frames], seeds: Sequence[int]
) -> int:
    """Run repeatedly while another process sends damaged messages; return the number of runs."""
    spawn = multiprocessing.get_context("spawn")
    rogue = spawn.Process(target=send_all, args=(cluster.coordinator.endpoint, corpus, seeds))
    rogue.start()
    runs = 0
    try:
        while rogue.is_alive() or not runs:
            found = await _result(cluster)
            runs += 1
            if found != want:
                raise Found(f"run {runs} beside messages of {seeds} gave other bits")
    finally:
        rogue.kill()
        rogue.join()
    if rogue.exitcode:
        raise Found(f"the sender ended with {rogue.exitcode}: nothing was shown")
    return runs


async def _settled_bytes(open_: int) -> int:
    """Return the memory in use after ended connections are closed, which takes a second.

    How many there are at one time depends on how busy the machine is, and so does what the allocator keeps
    of theirs: it gives that back first.
    """
    for _ in range(400):
        if descriptors() <= open_:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            return rss_bytes()
        await asyncio.sleep(0.05)
    raise Found(f"descriptors have grown from {open_} to {descriptors()}")


async def _result(cluster: pipedist.LocalCluster) -> bytes:
    async with asyncio.timeout(RUN_S_MAX), pipedist.open(SPEC, cluster=cluster) as run:
        result = await run.results()
    assert result.ledger == pipedist.Ledger(1000, 1000)
    return np.asarray(result["total"]).tobytes()


def send_all(endpoint: str, corpus: Sequence[Frames], seeds: Sequence[int]) -> None:
    """Run the rogue, in a separate process: one connection per message."""
    for number, begin in enumerate(range(0, len(seeds), BATCH)):
        batch = [mutated(corpus, seed) for seed in seeds[begin : begin + BATCH]]
        _send(endpoint, f"rogue{number}".encode(), batch)


def _send(endpoint: str, name: bytes, batch: Sequence[list[bytes]]) -> None:
    with zmq.Context() as context:  # its end waits until all messages are sent
        for at, frames in enumerate(batch):
            with context.socket(zmq.DEALER) as peer:
                peer.linger = 5000
                peer.sndtimeo = 5000
                peer.routing_id = name + b"-%d" % at
                peer.connect(endpoint)
                peer.send_multipart(frames)
