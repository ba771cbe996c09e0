"""Fuzzes the decoder, the sockets of a working cluster, and the reader of specs.

    python -m tests.acceptance.fuzz [decoder | socket | specs ...] [--share 0.01] [--seed N]

All of it is 1,000,000 messages on the decoder, 10,000 on live sockets, 10,000 specs. A failure is printed with
the seed that reproduces it.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.acceptance import decoder_fuzz, socket_fuzz, spec_fuzz
from tests.acceptance.recorded import record
from tests.acceptance.watch import MIB, peak_bytes

TARGETS = ("decoder", "socket", "specs")
MEMORY_BYTES_MAX = 4096 * MIB
"""Limit of this process's address space while it decodes: excessive allocation becomes an error."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=", ".join(TARGETS))
    parser.add_argument("--share", type=float, default=1.0, help="which part of the whole")
    parser.add_argument("--seed", type=int, help="this seed alone")
    told = parser.parse_args()
    if unknown := set(told.targets) - set(TARGETS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    try:
        for target in told.targets or TARGETS:
            begin = time.monotonic()
            found = {"decoder": _decoder, "socket": _socket, "specs": _specs}[target](told.share, told.seed)
            print(
                f"{target}: {found}; {time.monotonic() - begin:.0f} s, peak {peak_bytes() // MIB} MiB",
                flush=True,
            )
    except decoder_fuzz.Found as found:
        print(f"FOUND: {found}", flush=True)
        return 1
    return 0


def _seeds(count: int, share: float, seed: int | None) -> range:
    return range(max(1, round(count * share))) if seed is None else range(seed, seed + 1)


def _decoder(share: float, seed: int | None) -> str:
    seeds = _seeds(decoder_fuzz.FRAMES, share, seed)
    corpus = record()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, before[1]))
    try:
        told, slowest_s = decoder_fuzz.fuzz(corpus, seeds)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return (
        f"{len(seeds)} messages, {told['refused']} refused, others read as {len(told) - 1} classes, "
        f"slowest {1000 * slowest_s:.1f} ms"
    )


def _socket(share: float, seed: int | None) -> str:
    seeds = _seeds(socket_fuzz.MESSAGES, share, seed)
    sent, rejected, runs = asyncio.run(socket_fuzz.fuzz(record(), seeds))
    return f"{sent} messages, {rejected} peers refused, {runs} runs beside them with the same bits"


def _specs(share: float, seed: int | None) -> str:
    seeds = _seeds(spec_fuzz.SPECS, share, seed)
    with tempfile.TemporaryDirectory() as folder:
        told, slowest_s = spec_fuzz.fuzz(spec_fuzz.shipped(), seeds, Path(folder))
    return (
        f"{len(seeds)} specs, {told['refused']} refused with line and column, {told['read']} read, "
        f"slowest {1000 * slowest_s:.0f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
