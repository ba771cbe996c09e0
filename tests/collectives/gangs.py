"""Gangs of threads: the same replicas over any number of members, over any transfer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pipedist.collectives import requests
from pipedist.collectives.channel import Channel
from pipedist.collectives.gang import LocalGang
from pipedist.collectives.options import CommunicationOptions
from pipedist.collectives.segment import GangSegment, SegmentOwner, attach
from pipedist.collectives.shared import SharedChannel
from tests.collectives.queues import Board, QueueChannel

TRANSFERS = ("shared", "queue")


def call_site() -> requests.CallSite:
    """Return the place where a test's function called a method of `Replica`."""
    frame = sys._getframe(3)
    return requests.CallSite(frame.f_code, frame.f_lasti)


class Replica:
    """What a test's replica function has of a gang."""

    def __init__(self, gang: LocalGang, number: int) -> None:
        self.gang = gang
        self.number = number

    def _call(self, kind: str, tree: Any = None, **fields: Any) -> Any:
        return self.gang.call(self.number, requests.CollectiveRequest(kind, call_site(), tree, **fields))

    def all_reduce(self, op: Any, tree: Any, options: CommunicationOptions | None = None) -> Any:
        return self._call(requests.ALL_REDUCE, tree, op=op, options=options)

    def all_gather(self, tree: Any, axis: Any = 0, options: CommunicationOptions | None = None) -> Any:
        return self._call(requests.ALL_GATHER, tree, axis=axis, options=options)

    def broadcast(self, tree: Any, source: Any = 0, options: CommunicationOptions | None = None) -> Any:
        return self._call(requests.BROADCAST, tree, source=source, options=options)

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        self._call(requests.BARRIER, options=options)

    def merge_call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        label = getattr(function, "__qualname__", "")
        return self._call(requests.MERGE_CALL, (args, kwargs), function=function, label=label)


Function = Callable[[Replica], Any]


def spans_of(sizes: Sequence[int]) -> list[range]:
    """Return neighbouring ranges of these sizes."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def run_member(gang: LocalGang, span: range, function: Function) -> list[Any]:
    """Run the replicas of one member."""

    def call(number: int) -> Callable[[], Any]:
        return lambda: function(Replica(gang, number))

    return gang.run([call(number) for number in span])


def run_gang(
    sizes: Sequence[int],
    function: Function,
    *,
    transfer: str = "shared",
    pack_bytes: int = 0,
    serial: int = 1,
    owner: SegmentOwner | None = None,
    **settings: Any,
) -> list[Any]:
    """Run `function(replica)` in a gang whose members have so many replicas; outcomes by replica."""
    spans = spans_of(sizes)
    replicas = spans[-1].stop
    if len(sizes) == 1:
        gang = LocalGang(replicas=replicas, local=spans[0], **settings)
        return run_member(gang, spans[0], function)
    board = Board(len(sizes))
    own = None
    if transfer == "shared" and owner is None:
        own = owner = SegmentOwner(replicas, pack_bytes=pack_bytes)
    outcomes: dict[int, list[Any]] = {}

    def member(number: int) -> None:
        segment: GangSegment | None = None
        channel: Channel = QueueChannel(board, number)
        if transfer == "shared":
            assert owner is not None
            segment = attach(owner.where)
            channel = SharedChannel(segment, serial=serial, member=number, spans=spans)
        gang = LocalGang(replicas=replicas, local=spans[number], channel=channel, **settings)
        outcomes[number] = run_member(gang, spans[number], function)
        channel.close()
        if segment is not None:
            segment.close()

    threads = [threading.Thread(target=member, args=(number,)) for number in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if own is not None:
        own.close()
    return [outcome for number in range(len(sizes)) for outcome in outcomes[number]]
