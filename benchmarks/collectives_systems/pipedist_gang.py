"""pipedist's gangs and shared memory alone: a bare process per replica, without cluster or scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks import collectives_systems as systems
from benchmarks.collectives_loop import Size, measure
from pipedist.collectives.gang import LocalGang
from pipedist.collectives.requests import ALL_REDUCE, BARRIER, CallSite, CollectiveRequest
from pipedist.collectives.segment import SegmentOwner, attach
from pipedist.collectives.shared import SharedChannel

PLACE = "PIPEDIST_BENCHMARK_MEMBER"


def member(replicas: int, sizes: tuple[Size, ...], number: int, where: str) -> dict[int, float]:
    """Be one member."""
    spans = [range(n, n + 1) for n in range(replicas)]
    channel = SharedChannel(attach(where), serial=1, member=number, spans=spans)
    gang = LocalGang(replicas=replicas, local=spans[number], channel=channel)

    def make(elements: int, value: float) -> Any:
        return np.full(elements, value, np.float32)

    def call_site() -> CallSite:
        frame = sys._getframe(1)
        return CallSite(frame.f_code, frame.f_lasti)

    def reduce(vector: Any) -> Any:
        return gang.call(number, CollectiveRequest(ALL_REDUCE, call_site(), vector))

    def barrier() -> None:
        gang.call(number, CollectiveRequest(BARRIER, call_site()))

    (found,) = gang.run([lambda: measure(sizes, replicas, make, reduce, barrier)])
    if isinstance(found, BaseException):
        raise found
    return found


def main() -> None:
    """Start the members, or be one of them."""
    replicas, sizes = systems.options()
    place = os.environ.get(PLACE)
    if place is not None:
        number, _, where = place.partition(" ")
        found = member(replicas, sizes, int(number), where)
        if number == "0":
            systems.tell(found)
        return
    owner = SegmentOwner(replicas)
    command = [sys.executable, "-m", "benchmarks.collectives_systems.pipedist_gang", *sys.argv[1:]]
    members = [
        subprocess.Popen(command, env={**os.environ, PLACE: f"{number} {owner.where}"})
        for number in range(replicas)
    ]
    codes = [process.wait() for process in members]
    owner.close()
    sys.exit(max(codes, key=abs))


if __name__ == "__main__":
    main()
