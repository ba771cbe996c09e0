"""What workers have finished for a scheduler that is gone, and which pass of this one it is good for.

A worker names what it kept by a key (`key_of`), which is the same only for the same pass of the same run
with the same program and code. What no pass here goes by is as good as not offered.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipedist.errors import RemoteProtocolError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame
from pipedist.scheduler import events as ev

_OFFER = re.compile(r"([0-9a-f]{32}):([0-9]{1,18})-([0-9]{1,18})", re.ASCII)

_Ranges = tuple[tuple[int, int], ...]


def key_of(stamp: str, program: Sequence[Frame]) -> str:
    """Return the key of a pass.

    Args:
        stamp: of the run, the pass and its code.
        program: of the pass, as it is sent.
    """
    digest = hashlib.sha256(stamp.encode())
    for frame in program:
        digest.update(memoryview(frame).nbytes.to_bytes(8, "little"))
        digest.update(frame)
    return digest.hexdigest()[:32]


class Offers:
    """The latest offer of each worker."""

    def __init__(self) -> None:
        self._workers: dict[str, tuple[int, Mapping[str, _Ranges]]] = {}

    def take(self, hello: msg.Hello, passes: Mapping[str, int]) -> list[ev.CallsCached]:
        """Take note of what a worker offers; return what of it is good for passes that are open.

        Args:
            passes: the numbers of open passes, by key.

        Raises:
            RemoteProtocolError: it is malformed.
        """
        offer = _read(hello.cached)
        self._workers.pop(hello.worker, None)
        if not offer:
            return []
        self._workers[hello.worker] = (hello.incarnation, offer)
        return [
            ev.CallsCached(hello.worker, hello.incarnation, passes[key], ranges)
            for key, ranges in offer.items()
            if key in passes
        ]

    def of_pass(self, key: str, pass_id: int) -> Iterator[ev.CallsCached]:
        """Yield what was offered of a pass that begins now."""
        for worker, (incarnation, offer) in list(self._workers.items()):
            if key and key in offer:
                yield ev.CallsCached(worker, incarnation, pass_id, offer[key])

    def forget(self, worker: str, incarnation: int) -> None:
        """Forget the offer of a worker that may not join."""
        if worker in self._workers and self._workers[worker][0] == incarnation:
            del self._workers[worker]


def _read(kept: Iterable[str]) -> dict[str, _Ranges]:
    offer: dict[str, list[tuple[int, int]]] = {}
    for count, text in enumerate(kept):
        found = _OFFER.fullmatch(text)
        if found is None or count >= msg.CACHED_RANGES_MAX:
            raise RemoteProtocolError(f"finished calls were offered as {text[:80]!r}, or too many of them")
        key, lo, hi = found[1], int(found[2]), int(found[3])
        if lo >= hi:
            raise RemoteProtocolError(f"finished calls [{lo}, {hi}) were offered")
        offer.setdefault(key, []).append((lo, hi))
    return {key: tuple(sorted(ranges)) for key, ranges in offer.items()}
