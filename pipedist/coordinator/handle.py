"""A pass as its reader sees it: steps in, results out, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from pipedist.coordinator.store import Chunk, ResultStore, Slots
from pipedist.errors import CallError, RunDrained
from pipedist.feeds import Feed
from pipedist.program import Program, Shards, Tree, to_tree
from pipedist.scheduler import Event, PassSettings
from pipedist.scheduler import events as ev
from pipedist.transport.codec import Frame, encode

Arrival = Callable[[int, int, str, list[Slots]], None]
"""Takes results as they arrive: (lo, hi, worker, one entry a call)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One visible step of a pass.

    Args:
        parts: one entry a replica; None where no call was made (an empty shard).
    """

    step: int
    parts: list[Slots | None]


@dataclass(slots=True)
class PassCounts:
    """How far a pass is, for progress."""

    calls_done: int = 0
    calls_failed: int = 0
    steps_offered: int = 0
    elements_offered: int = 0
    elements_visible: int = 0
    steps_visible: int = 0


class PassHandle:
    """One pass as its reader sees it. Made by `Coordinator.open_pass`."""

    def __init__(
        self,
        post: Callable[[Event], None],
        pass_id: int,
        name: str,
        program: Program,
        settings: PassSettings,
        feed: Feed | None,
        on_arrival: Arrival | None,
    ) -> None:
        self.id = pass_id
        self.name = name
        self.program = program
        self.settings = settings
        self.counts = PassCounts()
        self._post = post
        self._feed = feed
        self._on_arrival = on_arrival
        self._store = ResultStore()
        self._visible: deque[tuple[int, int]] = deque()
        self._changed = anyio.Event()
        self._demand = 0
        self._demanded = anyio.Event()
        self._complete = False
        self._error: BaseException | None = None
        self._frames: list[Frame] | None = None
        self._inputs: dict[int, list[Tree]] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._next_step = 0

    # -- for readers -------------------------------------------------------------------

    async def steps(self) -> AsyncIterator[StepResult]:
        """Yield the steps in order, as they become visible; the valve follows the reader.

        Raises:
            CallError: if a call failed for good; it is that of the lowest (step, replica).
            WorkersLost: if no worker can be kept alive.
            RunCancelled: if the pass was closed meanwhile.
        """
        replicas = self.settings.replicas
        while True:
            while self._visible:
                first, last = self._visible.popleft()
                freed = 0
                for step in range(first, last):
                    parts: list[Slots | None] = []
                    for call in range(step * replicas, (step + 1) * replicas):
                        slots, size = self._store.take(call)
                        parts.append(slots)
                        freed += size
                    yield StepResult(step, parts)
                if self._feed is not None:
                    self._feed.release(last)
                self._post(ev.StepsConsumed(self.id, last, freed))
            if self._error is not None:
                raise self._error
            if self._complete:
                return
            self._changed = anyio.Event()
            await self._changed.wait()

    async def call_step(self, values: Sequence[Tree]) -> list[Slots]:
        """Execute one step of given values, one call each, and return what came back.

        Args:
            values: R trees, one a replica.

        Raises:
            CallError: of the lowest replica that failed; `__cause__` is the user's exception.
        """
        if self._error is not None:
            raise self._error
        step = self._next_step
        self._next_step += 1
        self._inputs[step] = list(values)
        waiting = self._waiting[step] = _Waiting()
        self._post(ev.StepsOffered(self.id, step, step + 1, len(values)))
        try:
            await waiting.done.wait()
        finally:
            self._waiting.pop(step, None)  # the inputs stay until the step is done: it may still be sent
        if waiting.error is not None:
            raise waiting.error
        return waiting.parts

    def offer(self, values: Sequence[Tree]) -> int:
        """Add the next step of given values; its results come from `steps`.

        Returns:
            The step's number.
        """
        step = self._next_step
        self._next_step += 1
        self._inputs[step] = list(values)
        self._post(ev.StepsOffered(self.id, step, step + 1, len(values)))
        return step

    def end(self) -> None:
        """Say that no more steps will be offered."""
        self._post(ev.StepsEnded(self.id))

    def hold(self) -> None:
        """Issue nothing more; when nothing of this pass is running, `steps` raises RunDrained."""
        self._post(ev.PassHeld(self.id))

    def close(self) -> None:
        """Forget the pass; what is running of it is dropped. Closing twice is no fault."""
        self._post(ev.PassClosed(self.id))

    async def aclose(self) -> None:
        """Close, for `async with`-like use."""
        self.close()
        await anyio.lowlevel.checkpoint()

    @property
    def steps_total(self) -> int | None:
        """Number of steps, None where it is not known yet."""
        return self._feed.steps_total if self._feed is not None else None

    # -- for the coordinator -------------------------------------------------------------

    def shards(self, lo: int, hi: int, *, local: bool) -> Shards:
        """Return what is sent for calls [lo, hi)."""
        if self._feed is not None:
            return self._feed.shards(lo, hi, local=local)
        replicas = self.settings.replicas
        return Shards(values=[self._inputs[c // replicas][c % replicas] for c in range(lo, hi)])

    def program_frames(self) -> list[Frame]:
        """Return the program's payload, encoded once."""
        if self._frames is None:
            self._frames = encode(to_tree(self.program))
        return self._frames

    def arrived(self, chunk: Chunk) -> None:
        """Keep results that count."""
        self.counts.calls_done += chunk.hi - chunk.lo
        self._store.put(chunk)
        if self._on_arrival is not None:
            self._on_arrival(chunk.lo, chunk.hi, chunk.worker, chunk.calls())

    def ready(self, first: int, last: int) -> None:
        """Steps [first, last) are visible."""
        self.counts.steps_visible += last - first
        if not self.settings.ordered:
            for step in range(first, last):
                self._finish(step, None)
            return
        for step in range(first, last):
            if self._feed is not None:
                self.counts.elements_visible += self._feed.elements(step)
            else:
                self._inputs.pop(step, None)
        self._visible.append((first, last))
        self._changed.set()

    def step_failed(self, step: int, error: CallError) -> None:
        """A step failed for good."""
        self.counts.calls_failed += 1
        if self.settings.ordered:
            self.fail(error)
        else:
            self._finish(step, error)

    def _finish(self, step: int, error: BaseException | None) -> None:
        replicas = self.settings.replicas
        parts = [self._store.take(c)[0] for c in range(step * replicas, (step + 1) * replicas)]
        self._inputs.pop(step, None)
        waiting = self._waiting.get(step)
        if waiting is not None:
            waiting.error = error
            waiting.parts = [p for p in parts if p is not None]
            waiting.done.set()

    def fail(self, error: BaseException) -> None:
        """End the pass with an error; the first one stays."""
        if self._error is None:
            self._error = error
        for waiting in self._waiting.values():
            waiting.error = waiting.error or error
            waiting.done.set()
        self._changed.set()

    def completed(self) -> None:
        """Every step was visible."""
        self._complete = True
        self._changed.set()

    def went_quiet(self) -> None:
        """Nothing of the held pass is running."""
        if not self._complete:
            self.fail(RunDrained("the run was stopped; the calls that were running are finished"))

    def want(self, count: int) -> None:
        """The valve lets in `count` more steps."""
        self._demand += count
        self._demanded.set()

    async def run_feed(self) -> None:
        """Offer steps as they are wanted, until the feed ends."""
        feed = self._feed
        if feed is None:
            return
        try:
            while True:
                while self._demand > 0:
                    offers = await feed.pull(self._demand)
                    if not offers:
                        self._post(ev.StepsEnded(self.id))
                        return
                    for offer in offers:
                        count = offer.last - offer.first
                        self._demand -= count
                        self.counts.steps_offered += count
                        self.counts.elements_offered += offer.elements
                        self._post(
                            ev.StepsOffered(self.id, offer.first, offer.last, offer.parts, offer.bytes)
                        )
                    await anyio.lowlevel.checkpoint()
                self._demanded = anyio.Event()
                await self._demanded.wait()
        except Exception as error:  # the user's own iterator may raise anything: it ends this pass
            self.fail(error)


@dataclass(slots=True)
class _Waiting:
    """A `call_step` that waits."""

    done: anyio.Event = field(default_factory=anyio.Event)
    parts: list[Slots] = field(default_factory=list)
    error: BaseException | None = None
