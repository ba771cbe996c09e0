"""Damaged messages on the decoder: envelope, message and payload. Each is read, or refused by name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from pipedist.errors import RemoteProtocolError
from pipedist.protocol.codec import decode
from pipedist.protocol.limits import LIMITS
from pipedist.protocol.wire import unpack, unseal
from tests.acceptance.frame_mutations import mutated
from tests.acceptance.recorded import Frames
from tests.acceptance.watch import MIB, peak_bytes

FRAMES = 1_000_000
GROWTH_BYTES_MAX = 64 * MIB
SLOW_S = 1.0


class Found(Exception):
    """A frame that did what it must not."""


def read(frames: Sequence[bytes]) -> str:
    """Read one message as a router does; return what it was.

    Raises:
        RemoteProtocolError: it is refused.
    """
    head, header, references = unseal(memoryview(frames[0]), LIMITS)
    message = unpack(head)
    if header.nbytes and not references:
        decode([header, *frames[1:]])
    return type(message).__name__


def fuzz(corpus: Sequence[Frames], seeds: Sequence[int]) -> tuple[Counter[str], float]:
    """Read one damaged message for each seed.

    Returns:
        How many were read of each kind, and refused; processor seconds of the slowest.

    Raises:
        Found: a message raised another error, took long, or much memory; the text describes it.
    """
    told: Counter[str] = Counter()
    slowest_s = 0.0
    before = 0
    for seed in seeds:
        frames = mutated(corpus, seed)
        begin = time.process_time()
        try:
            told[read(frames)] += 1
        except RemoteProtocolError:
            told["refused"] += 1
        except BaseException as error:
            raise Found(f"seed {seed}: {type(error).__name__}: {error}") from error
        took_s = time.process_time() - begin
        slowest_s = max(slowest_s, took_s)
        if took_s > SLOW_S:
            raise Found(f"seed {seed}: {took_s:.2f} s")
        if seed % 1000 == 0:
            peak = peak_bytes()
            before = before or peak
            if peak - before > GROWTH_BYTES_MAX:
                raise Found(
                    f"within 1000 before seed {seed}: memory has grown by {(peak - before) // MIB} MiB"
                )
    return told, slowest_s
