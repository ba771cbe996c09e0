"""A pass as its reader sees it: steps in, results out, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.lowlevel
from msgspec import Struct

from pipedist.coordinator.cached_results import key_of
from pipedist.coordinator.policy import Policy
from pipedist.coordinator.store import Chunk, ResultStore, Slots
from pipedist.coordinator.worker_pool import Fate
from pipedist.coordinator.worker_registry import Peer
from pipedist.core.types import Tree
from pipedist.datasets.feeds import ElementRanges, Feed
from pipedist.errors import CallError, LocalProtocolError, RunCancelled, RunDrained
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame
from pipedist.protocol.program import Program, Shards, to_frames
from pipedist.scheduler import Event, PassSettings
from pipedist.scheduler import events as ev
from pipedist.scheduler.commands import CallsQuarantined
from pipedist.worker.progress import Running

BATCH_STEPS_MAX = 256
"""Steps that a reader gets at once; the valve opens again batch by batch."""

BATCH_BYTES_MAX = 4 * 2**20
"""Results that a reader gets at once, unless a single step has more."""

States = Mapping[str, Sequence[int]]
"""Of each state that a call reads, by name, [space, version]."""

Arrival = Callable[[Chunk], None]
"""Takes results as they arrive."""

SetAside = Callable[[CallsQuarantined], None]
"""Takes which elements of which calls are set aside, and why."""

Answer = Callable[[list[Slots], BaseException | None], None]
"""Takes what the calls of a step sent back, in replica order, or the error that ended it."""


class Batch(Struct, frozen=True):
    """Consecutive steps that have become visible.

    Args:
        first: number of the first one.
        steps: of each, what its calls sent back, in replica order. Empty shards make no call, and
            are always those of the last replicas, so that entry r is replica r's. A call all of whose
            elements are set aside sent nothing back: its entry is empty.
        bytes: what the batch holds.
    """

    first: int
    steps: list[list[Slots]]
    bytes: int


@dataclass(slots=True)
class PassCounts:
    """How far a pass is, for progress and the ledger."""

    calls_done: int = 0
    elements_offered: int = 0
    elements_visible: int = 0
    steps_visible: int = 0


class PassHandle:
    """One pass as its reader sees it. Made by `Coordinator.open_pass`.

    Args:
        post: tells the scheduler.
        pass_id, name, program, settings: of the pass.
        policy: what becomes of its calls that fail.
        feed: where its steps come from; None: from `call_step`.
        on_arrival: told of results as they arrive.
        on_quarantine: told of elements that are set aside.
        stamp: see `Coordinator.open_pass`.

    Raises:
        UnsendableError: the program can't be sent; the text names the place.
        LocalProtocolError: a pass with a feed is not ordered, or one without is.
    """

    def __init__(
        self,
        post: Callable[[Event], None],
        pass_id: int,
        name: str,
        program: Program,
        settings: PassSettings,
        policy: Policy,
        feed: Feed | None,
        on_arrival: Arrival | None,
        on_quarantine: SetAside | None = None,
        stamp: str = "",
    ) -> None:
        if settings.ordered != (feed is not None):
            raise LocalProtocolError("a pass is read in order if it has a feed, and only then")
        self.id = pass_id
        self.name = name
        self.settings = settings
        self.policy = policy
        self.slots = frozenset(emit.slot for emit in program.emits)
        """What each call sends back."""
        self.program_frames: list[Frame] = to_frames(program)
        self.key = key_of(stamp, self.program_frames) if stamp else ""
        """Under which workers keep results of the pass until they are durable; "": they do not."""
        self.code = program.code
        """Folders of the user's modules."""
        self.counts = PassCounts()
        self.raised: dict[int, msg.Failed] = {}
        """The latest exception of each call that raised and whose step is not visible."""
        self._post = post
        self._feed = feed
        self._on_arrival = on_arrival
        self._on_quarantine = on_quarantine
        self._store = ResultStore()
        self._visible: deque[tuple[int, int]] = deque()
        """Ranges of steps to be read."""
        self._changed = anyio.Event()
        self._demand = 0
        """Steps that the valve lets in, and that were not offered yet."""
        self._demanded = anyio.Event()
        self._complete = False
        self._error: BaseException | None = None
        self._inputs: dict[int, tuple[list[Tree], States | None]] = {}
        self._waiting: dict[int, Answer] = {}
        self._left: dict[int, anyio.Event] = {}
        """By step that is not over, and for which nobody waits: what is set when it is."""
        self._executed: dict[int, Sequence[Peer]] = {}
        """Who executed a step, where somebody wants to know."""
        self._next_step = 0

    # -- for readers -------------------------------------------------------------------

    async def batches(self) -> AsyncIterator[Batch]:
        """Yield the steps in order, as they become visible; the valve follows the reader.

        Raises:
            CallError: if a call failed for good; it is that of the lowest (step, replica).
            WorkersLost: if no worker can be kept alive.
            RunDrained: if the pass was held, and what was running is finished.
            RunCancelled: if the pass was closed meanwhile.
            Exception: whatever the feed raised.
        """
        if self._feed is None:
            raise LocalProtocolError("a pass without a feed has no order in which it could be read")
        while True:
            while self._visible:
                batch = self._take_batch()
                last = batch.first + len(batch.steps)
                yield batch
                self._feed.release(last)
                self._post(ev.StepsConsumed(self.id, last, batch.bytes))
                del batch
                await anyio.lowlevel.checkpoint()  # a reader that never waits must not starve the sockets
            if self._error is not None:
                raise self._error
            if self._complete:
                return
            self._changed = anyio.Event()
            await self._changed.wait()

    def _take_batch(self) -> Batch:
        first, last = self._visible.popleft()
        replicas = self.settings.replicas
        fitting = int(BATCH_BYTES_MAX / max(1.0, self._store.bytes_mean * replicas))
        end = min(last, first + max(1, min(BATCH_STEPS_MAX, fitting)))
        if end < last:
            self._visible.appendleft((end, last))
        steps, size = self._store.take(first, end, replicas)
        return Batch(first, steps, size)

    async def call_step(
        self,
        values: Sequence[Tree],
        states: States | None = None,
        *,
        produced: Callable[[list[Slots]], Mapping[int, int]] | None = None,
        left: deque[anyio.Event] | None = None,
    ) -> list[Slots]:
        """Execute one step of given values, one call each, and return what came back.

        Args:
            values: R trees, one a replica.
            states: name -> [space, version] of each state that the calls read; of gangs only.
            produced: told what came back; returns space -> version of each state that the workers of the
                step hold since then, so that it need not be sent to them. What it raises comes through.
            left: where the caller is cancelled, it gets an event that is set when the step is over.

        Raises:
            CallError: of the lowest replica that failed; `__cause__` is the user's exception.
            WorkersLost: if no worker can be kept alive.
            RunCancelled: if the pass was closed.
                A value that can't be sent fails its step so, with UnsendableError as the cause.
        """
        answered: asyncio.Future[tuple[list[Slots], BaseException | None]]
        answered = asyncio.get_running_loop().create_future()
        step = self.begin_step(values, partial(_answer, answered), states)
        if produced is not None:
            self._executed[step] = ()
        try:
            parts, error = await answered
        finally:
            if self._waiting.pop(step, None) is not None and left is not None:
                left.append(self._left.setdefault(step, anyio.Event()))
            peers = self._executed.pop(step, ())  # the inputs stay: the step may still be sent
        if error is not None:
            raise error
        if produced is not None:
            for space, version in produced(parts).items():
                for peer in peers:
                    peer.hold(space, version)
        return parts

    def begin_step(self, values: Sequence[Tree], answer: Answer, states: States | None = None) -> int:
        """Offer one step of given values, and return its number at once.

        Args:
            values: R trees, one a replica.
            answer: called once, on the event loop, with what `call_step` returns, or with the error
                that it raises. It must not raise, and may be called before this returns.
            states: as for `call_step`.

        Raises:
            WorkersLost, RunCancelled: as `call_step`, where the pass has failed already.
        """
        if self._error is not None:
            raise self._error
        if states and not self.settings.gang:
            raise LocalProtocolError("only a gang reads states: other leases may span several steps")
        step = self._next_step
        self._next_step += 1
        self._inputs[step] = (list(values), states)
        self._waiting[step] = answer
        self._post(ev.StepsAvailable(self.id, step, step + 1, len(values)))
        return step

    def hold(self) -> None:
        """Issue nothing more; when nothing of this pass is running, `batches` raises RunDrained."""
        self._post(ev.PassDraining(self.id))

    def settle(self, before: int) -> None:
        """All steps before `before` are durable: workers need not keep their results any more."""
        if self.key:
            self._post(ev.StepsCommitted(self.id, before))

    def close(self) -> None:
        """Forget the pass; what is running of it is dropped. Closing twice is no fault."""
        self._post(ev.PassClosed(self.id))

    async def run_feed(self) -> None:
        """Offer steps as they are wanted, until the feed ends; an error of it ends the pass.

        Whoever reads the pass runs this beside, in a task group of its own: what a feed reads
        is released only when it has ended.
        """
        if self._feed is None:
            return
        try:
            while await self._offer(self._feed):
                while self._demand <= 0:
                    self._demanded = anyio.Event()
                    await self._demanded.wait()
        except Exception as error:  # the user's own iterator may raise anything: it ends this pass
            self.fail(error)

    async def _offer(self, feed: Feed) -> bool:
        """Offer what is wanted now; return whether there may be more."""
        while self._demand > 0:
            offers = await feed.pull(self._demand)
            if not offers:
                self._post(ev.StepsEnded(self.id))
                return False
            for offer in offers:
                self._demand -= offer.last - offer.first
                self.counts.elements_offered += offer.elements
                parts = self.settings.replicas if self.settings.gang else offer.parts
                holes = () if self.settings.gang else offer.skipped_replicas
                self._leave_out(offer.first, offer.last, holes)
                self._post(ev.StepsAvailable(self.id, offer.first, offer.last, parts, offer.bytes, holes))
            await anyio.lowlevel.checkpoint()
        return True

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error: no step of it is executed any more."""
        return self._error is not None

    @property
    def has_feed(self) -> bool:
        """Whether its steps come from a feed, and not from `call_step`."""
        return self._feed is not None

    @property
    def steps_total(self) -> int | None:
        """Number of steps, None where it is not known yet."""
        return self._feed.steps_total if self._feed is not None else None

    # -- for the coordinator -------------------------------------------------------------

    def shards(self, lo: int, hi: int, *, local: bool, elements: ElementRanges = ()) -> Shards:
        """Return what is sent for calls [lo, hi).

        Args:
            local: the worker shares this host's files.
            elements: of a single call, the positions of those that are sent; none: all of them.

        Raises:
            Exception: whatever reading the data raises.
        """
        if self._feed is not None:
            if elements:
                return self._feed.some(lo, elements, local=local)
            return self._feed.shards(lo, hi, local=local)
        replicas = self.settings.replicas
        if self.settings.gang:  # all calls of a lease are of one step
            values, states = self._inputs[lo // replicas]
            first = lo % replicas
            told = None if states is None else {name: list(at) for name, at in states.items()}
            return Shards(values=values[first : first + hi - lo], states=told)
        return Shards(values=[self._inputs[c // replicas][0][c % replicas] for c in range(lo, hi)])

    def separable(self, call: int) -> int:
        """Return how many elements of a call can be sent without the others."""
        return 0 if self._feed is None else self._feed.separable(call)

    def set_aside(self, command: CallsQuarantined) -> None:
        """Take note that elements of calls are set aside, before their step is visible."""
        if self._on_quarantine is not None:
            self._on_quarantine(command)
        if not command.remains:
            self._store.put(Chunk(command.lo, command.hi, [{} for _ in range(command.lo, command.hi)], 0))

    def _leave_out(self, first: int, last: int, holes: Sequence[int]) -> None:
        """Note that some calls of steps are not made, though they are not the last ones of their step."""
        for step in range(first, last) if holes else ():
            for call in (step * self.settings.replicas + hole for hole in holes):
                self._store.put(Chunk(call, call + 1, [{}], 0))

    def ended(self, running: Running, *, timed_out: bool) -> Fate:
        """Return what it means for a call that its worker died.

        Args:
            timed_out: it took too long.
        """
        told = self.policy.timed_out(running) if timed_out else None
        if self._feed is None and running.call // self.settings.replicas not in self._waiting:
            # Nobody waits for the step any more, and it may have hung: it is not tried again.
            why, cls = "its caller was cancelled", RunCancelled
            told = msg.Failed(
                running.lease, running.call, self.name, cls.__module__, cls.__name__, why, "", False
            )
        if told is not None:
            self.raised[running.call] = told
        return self.policy.fate(running, told)

    def not_sent(self, lo: int, hi: int, lease: int, error: Exception) -> None:
        """Note why calls [lo, hi) could not be sent."""
        cls = type(error)
        for call in range(lo, hi):
            self.raised[call] = msg.Failed(
                lease, call, self.name, cls.__module__, cls.__qualname__, str(error), "", False
            )

    def gang_arrived(self, chunks: Sequence[Chunk], peers: Sequence[Peer]) -> None:
        """Keep the results of a gang, whose members were these."""
        step = chunks[0].lo // self.settings.replicas
        if step in self._executed:
            self._executed[step] = peers
        for chunk in chunks:
            self.arrived(chunk)

    def arrived(self, chunk: Chunk) -> None:
        """Keep results that count."""
        self.counts.calls_done += chunk.hi - chunk.lo
        self._store.put(chunk)
        if self._on_arrival is not None:
            self._on_arrival(chunk)

    def ready(self, first: int, last: int) -> None:
        """Steps [first, last) are visible."""
        self.counts.steps_visible += last - first
        if self._feed is None:
            for step in range(first, last):
                self._finish(step, None)
            return
        self.counts.elements_visible += self._feed.elements(first, last)
        self._forgive(first, last)
        if self._visible and self._visible[-1][1] == first:
            self._visible[-1] = (self._visible[-1][0], last)
        else:
            self._visible.append((first, last))
        self._changed.set()

    def step_failed(self, step: int, error: CallError) -> None:
        """A step failed for good."""
        if self._feed is not None:
            self.fail(error)
        else:
            self._finish(step, error)

    def _finish(self, step: int, error: BaseException | None) -> None:
        """Answer the `call_step` that waits for a step, if it still does."""
        (parts,), _ = self._store.take(step, step + 1, self.settings.replicas)
        self._inputs.pop(step, None)
        self._forgive(step, step + 1)
        if step in self._left:
            self._left.pop(step).set()
        answer = self._waiting.pop(step, None)
        if answer is not None:
            answer(parts, error)

    def _forgive(self, first: int, last: int) -> None:
        """Forget the exceptions of calls that were tried again with success."""
        replicas = self.settings.replicas
        for call in [c for c in self.raised if first <= c // replicas < last]:
            del self.raised[call]

    def fail(self, error: BaseException) -> None:
        """End the pass with an error; the first one stays, and what is done is done."""
        if self._error is None:
            self._error = error
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for answer in waiting:
            answer([], error)
        while self._left:
            self._left.popitem()[1].set()
        self._changed.set()

    def closed(self, error: BaseException) -> None:
        """The scheduler forgets the pass: let go of everything that is held for it."""
        self.fail(error)
        self._store.clear()
        self._visible.clear()
        self._inputs.clear()
        self.raised.clear()

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


def _answer(
    answered: asyncio.Future[tuple[list[Slots], BaseException | None]],
    parts: list[Slots],
    error: BaseException | None,
) -> None:
    if not answered.done():  # whoever waited may be gone
        answered.set_result((parts, error))
