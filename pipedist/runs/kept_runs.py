"""The values of the runs of one pass that are kept: for passes that read them, and for a later `--reuse`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from pipedist.coordinator import Slots
from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed
from pipedist.plan import PassPlan, Plan
from pipedist.runs.kept_values import Spool
from pipedist.runs.pass_feeds import SpoolFeed
from pipedist.runs.programs import parts_of, slot_of, stored_slot
from pipedist.runs.quarantine import PassQuarantine
from pipedist.runs.rebatching import kept_shards

if TYPE_CHECKING:
    from pipedist.runs.pass_journal import PassJournal

Places = tuple[list[Tree], list[tuple[int, NDArray[np.int64]]]]
"""The ids and the removed positions of a step; see `PassQuarantine.ids`."""

STORED_BYTES_MAX = 256 * 2**20
"""Bytes of the values of one run that are stored for a reuse; with more, none of them are."""


class KeptRuns:
    """Keeps the values of runs, step by step.

    Args:
        spools: the open spools of the runs that later phases read.
        is_divisible: whether a reuse may continue some stages of the pass.
    """

    def __init__(
        self,
        plan: Plan,
        pass_: PassPlan,
        feed: Feed,
        quarantine: PassQuarantine,
        spools: Mapping[str, Spool],
        durable: PassJournal | None,
        *,
        is_divisible: bool,
    ) -> None:
        self._plan = plan
        self._feed = feed
        self._quarantine = quarantine
        self._durable = durable
        self.readers: dict[str, list[SpoolFeed]] = {}
        """The feeds of other passes of the phase, by the run whose values they get."""
        self._spools = {name: spools[name] for name in pass_.kept if name in spools}
        self.storable: tuple[str, ...] = ()
        """The other runs. The same ones in each process of a run, because cached results are of one program."""
        self._stored: dict[str, Spool] = {}
        """The values of these, as long as all of them are worth storing for a reuse."""
        self._not_stored: list[str] = []  # runs whose logs are not continued
        if durable is not None and is_divisible:
            self.storable = tuple(name for name in pass_.runs if name not in pass_.kept)
            names = [name for name in self.storable if not durable.before.steps or durable.has_log(name)]
            self._stored = {name: Spool(name, durable.log(name)) for name in names}

    @property
    def feeds(self) -> list[SpoolFeed]:
        """The feeds of other passes that get values."""
        return [feed for feeds in self.readers.values() for feed in feeds]

    @property
    def full(self) -> list[str]:
        """The runs whose readers are slower than the pass."""
        return [name for name, feeds in self.readers.items() if any(feed.is_full for feed in feeds)]

    async def restore(self) -> None:
        for name, spool in (self._spools | self._stored).items():
            if self._durable is not None:
                await spool.restore(self._durable.places(name))

    async def add(self, first: int, epoch: int, steps: Sequence[list[Slots]], step_bytes: int) -> None:
        """Keep the values of the next steps, and give them to the passes of the phase that read them."""
        if not (self._spools or self._stored or self.readers):
            return
        numbers = range(first, first + len(steps))
        places = [self._quarantine.ids(step) for step in numbers]
        counts = [self._feed.elements(step, step + 1) for step in numbers]
        if self._spools or self._stored:
            await anyio.to_thread.run_sync(self._append, epoch, steps, places, counts)
        for name, feeds in self.readers.items():
            for at, parts in enumerate(self._by_replica(name, steps, places)):
                ids, removed = places[at]
                shards = kept_shards(ids, parts, counts[at], self._plan.spec.replicas, removed)
                for feed in feeds:
                    feed.put(epoch, counts[at], step_bytes, shards)

    def _append(
        self, epoch: int, steps: Sequence[list[Slots]], places: list[Places], counts: list[int]
    ) -> None:
        """Append steps to the spools, in a thread; nothing else uses the spools meanwhile."""
        for name, spool in self._spools.items():
            for at, parts in enumerate(self._by_replica(name, steps, places)):
                ids, removed = places[at]
                spool.append(parts, ids, elements=counts[at], epoch=epoch, removed=removed)
        for name, spool in list(self._stored.items()):
            for at, found in enumerate(parts_of(stored_slot(name), steps)):
                if len(found) < len(steps[at]) or spool.bytes(0, len(spool)) > STORED_BYTES_MAX:
                    del self._stored[name]
                    self._not_stored.append(name)
                    break
                ids, removed = places[at]
                values = [value for (value,) in found]
                spool.append(values, ids, elements=counts[at], epoch=epoch, removed=removed)

    def _by_replica(
        self, name: str, steps: Sequence[list[Slots]], places: list[Places]
    ) -> Iterator[list[Tree]]:
        """Yield the values of each step by replica, None for quarantined shards."""
        slot = slot_of(self._plan, name)
        for at, parts in enumerate(parts_of(slot, steps)):
            shards = len(places[at][0])
            yield parts if len(parts) >= shards else [slots.get(slot) for slots in steps[at][:shards]]

    def dropped(self) -> list[str]:
        """Return the open logs that are no longer needed."""
        durable = self._durable
        return [] if durable is None else [name for name in self._not_stored if durable.is_open(name)]

    async def finish(self) -> None:
        """Write the last steps, so that the spools can be read."""
        for spool in (self._spools | self._stored).values():
            await anyio.to_thread.run_sync(spool.finish)
