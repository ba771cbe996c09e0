"""Divide the limits of a pass among the workers that hold its calls.

A limit on calls at the same time holds for all workers together. Each worker has a quota of it, and the quotas
add up to the limit at most: a quota grows only by what no other worker has. A worker whose quota becomes lower still
runs its calls, and confirms the quota (`QuotaConfirmed`) as soon as it runs no more than that. So quotas move to
workers that join or get calls, and away from those that leave or have no calls left, without a moment above the limit.
A lowered quota does not grow before it is confirmed: a confirmation on its way could be taken for a later one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

Quota = tuple[int, ...]  # calls at the same time, one number per limit
Process = tuple[str, int]  # a worker and its incarnation


class Quotas:
    """The quotas of one pass; `limits` has a 0 for a limit of the rate only."""

    def __init__(self, limits: Quota) -> None:
        self.limits = limits
        self.none = (0,) * len(limits)
        self.held: dict[Process, Quota] = {}  # until it confirms less
        self._sent: dict[Process, Quota] = {}  # never above `held`
        self._free = list(limits)
        self._sharing = 0  # number of workers with calls

    def divide(self, holders: Collection[Process], alive: Collection[Process]) -> Iterator[tuple[str, Quota]]:
        """Yield the new quotas of workers that are `alive`; `holders` are those with calls."""
        for worker in [each for each in self.held if each not in alive]:
            self._hold(worker, None)
        # Workers that have a quota come first, so that little of it moves.
        workers = [each for each in self.held if each in holders]
        workers += [each for each in holders if each not in self.held]
        count, changed, self._sharing = len(workers), len(workers) != self._sharing, len(workers)
        places = {worker: place for place, worker in enumerate(workers)}
        for worker in [*self.held, *(each for each in workers if each not in self.held)]:
            place = places.get(worker)
            wanted = [0 if place is None else n // count + (place < n % count) for n in self.limits]
            held = self.held.get(worker, self.none)
            quota = tuple(min(w, h + f) for w, h, f in zip(wanted, held, self._free, strict=True))
            if (sent := self._sent.get(worker, held)) != held:
                quota = tuple(map(min, quota, sent))
            if place is None and not any(held):
                self._hold(worker, None)
                continue
            if changed or quota != self._sent.get(worker):
                yield worker[0], quota
            self._sent[worker] = quota
            self._hold(worker, tuple(map(max, held, quota)))

    def met(self, worker: Process, quota: Quota) -> None:
        """Record that a worker runs at most this many calls."""
        if worker in self.held and len(quota) == len(self.limits):
            most = map(max, quota, self._sent[worker])
            self._hold(worker, tuple(map(min, self.held[worker], most)))

    def _hold(self, worker: Process, quota: Quota | None) -> None:
        for n, (before, now) in enumerate(
            zip(self.held.get(worker, self.none), quota or self.none, strict=True)
        ):
            self._free[n] += before - now
        if quota is None:
            self.held.pop(worker, None)
            self._sent.pop(worker, None)
        else:
            self.held[worker] = quota
