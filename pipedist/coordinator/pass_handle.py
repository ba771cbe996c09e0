"""A pass as its reader sees it: steps in, results out, in order.

A pass has either a feed, whose steps are read in order with `batches`, or gets single steps from `call_step`. The
scheduler limits the steps that are offered (`want`), according to the results that the reader has consumed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from operator import attrgetter

import anyio
import anyio.lowlevel
import anyio.to_thread
from msgspec import Struct
from msgspec.structs import replace

from pipedist.coordinator.failures import DeathOutcome, FailedCalls, FailurePolicy
from pipedist.coordinator.measurements import PassRecord
from pipedist.coordinator.results import Chunk, ElementStore, QuarantinedCall, ResultStore, Slots, key_of
from pipedist.coordinator.spans import DriverWork
from pipedist.coordinator.worker_registry import Peer
from pipedist.core.types import Tree
from pipedist.datasets.feeds import ElementRanges, Feed, ShardRead
from pipedist.errors import LocalProtocolError, QuarantineError, RunDrained
from pipedist.protocol.codec import Frame
from pipedist.protocol.program import Program, Shards, to_frames
from pipedist.scheduler import Event, PassSettings
from pipedist.scheduler import events as ev
from pipedist.scheduler.commands import CallsQuarantined, Failure, QuarantineFull
from pipedist.worker.progress import Running

BATCH_STEPS_MAX = 256  # maximum steps that a reader gets at once; more steps are requested batch by batch
BATCH_BYTES_MAX = 4 * 2**20  # maximum bytes of results that a reader gets at once, unless one step has more
States = Mapping[str, Sequence[int]]  # by name, [space, version] of each state that a call reads
Arrival = Callable[[Chunk], None]

OnQuarantine = Callable[[CallsQuarantined], int]  # records quarantined elements, and returns their number
OnStepDone = Callable[[list[Slots], BaseException | None], None]  # results by replica, or what ended the step


class Batch(Struct, frozen=True):
    """Consecutive steps that have become visible."""

    first: int  # number of the first one
    steps: Sequence[list[Slots]]  # by call, in replica order; empty shards make no call, and are the last
    bytes: int


class ReadJob(Struct, eq=False):
    """A read of the data of leases."""

    read: Callable[[], list[Shards]]  # reads the data, in a thread
    is_needed: Callable[[], bool]  # whether the leases still wait for it
    on_read: Callable[[list[Shards] | Exception], None]  # on the event loop: the data, or `read`'s error


class PassCounts(Struct):
    calls_done: int = 0
    calls_past: int = 0  # need no execution: committed by earlier processes, or fully quarantined
    elements_offered: int = 0
    elements_visible: int = 0
    steps_visible: int = 0


class PassHandle:
    """One pass as its reader sees it; see `Coordinator.open_pass`. Raises UnsendableError for its program."""

    def __init__(
        self,
        post: Callable[[Event], None],
        pass_id: int,
        name: str,
        program: Program,
        settings: PassSettings,
        policy: FailurePolicy,
        feed: Feed | None,
        on_arrival: Arrival | None,
        on_quarantine: OnQuarantine | None,
        stamp: str,
        record: PassRecord | None,
    ) -> None:
        if settings.ordered != (feed is not None):
            raise LocalProtocolError("a pass with a feed must be ordered, and one without a feed must not")
        self.id = pass_id
        self.name = name
        self.settings = settings
        self.policy = policy
        whole = [emit.whole for emit in program.emits if emit.whole]
        self.slots = frozenset([*whole, *(emit.slot for emit in program.emits)])
        # in a gang, stages are not called with empty shards; values of short calls are not stored
        required = [] if settings.gang else [emit.slot for emit in program.emits if not emit.stored]
        self.required_slots = frozenset(required)
        self.program_frames: list[Frame] = to_frames(program)
        self.key = key_of(stamp, self.program_frames) if stamp else ""
        """The key under which workers cache results of the pass until they are durable; "": they do not."""
        self.code = program.code
        self.counts = PassCounts()
        self._post = post
        self._feed = feed
        self.has_feed = feed is not None
        self._on_arrival = on_arrival
        self._on_quarantine = on_quarantine
        self.record = record
        self._store = ResultStore(in_order=feed is not None)
        self._step_results: dict[int, list[Slots]] = {}
        """The results of gangs that ended, by step, until their caller gets them; without a feed."""
        self.elements = ElementStore(program.stages)
        self._quarantined: dict[int, QuarantinedCall] = {}  # by call, until read; without their results
        self._restored: dict[int, Chunk] = {}  # by call, until offered; from an earlier process
        self.keeps_results = False
        """Whether results that were not read are kept when the pass is closed, for `finished_calls`."""
        self.begin_prepared: Callable[[PassHandle, int], bool] = lambda _handle, _step: False
        """Sends an offered step if the scheduler need not see it first; see `coordinator.prepared_steps`."""
        self.settled = anyio.Event()  # set when the pass is closed, and no worker reports results any more
        self._late: dict[int, Slots] = {}  # results of cancelled calls, if they are kept
        self._is_closed = False
        # The first and the last, exclusive, of the steps that the reader has not consumed
        self._visible = (0, 0)
        self._changed = anyio.Event()
        self._demand = 0  # steps that the scheduler has requested, and that were not offered yet
        self._demanded = anyio.Event()
        self._reads: deque[ReadJob] = deque()  # at most as many as the leases that the scheduler has assigned
        self._requested = anyio.Event()
        self._complete = False
        self._error: BaseException | None = None
        self._inputs: dict[int, tuple[list[Tree], States | None]] = {}
        self._waiting: dict[int, OnStepDone] = {}
        self._left: dict[int, anyio.Event] = {}  # by step whose caller was cancelled: set at its end
        self._executed: dict[int, Sequence[Peer]] = {}  # by step whose caller passed `produced`
        self._next_step = 0
        self.next_number = 0  # as functions see the next step; differs once a step has stood for several
        self._numbers: dict[int, int] = {}  # of unfinished steps that functions see as another one
        self.failed = FailedCalls(name, settings.replicas, policy, self._numbers, record)

    # -- for readers -------------------------------------------------------------------

    async def batches(self) -> AsyncIterator[Batch]:
        """Yield the steps in order, as they become visible.

        The scheduler requests more steps as the reader consumes these. Exceptions of the feed are raised as they are.
        Raises CallError for the lowest (step, replica) that failed for good, WorkersLost, RunDrained when the pass was
        held and its running calls are finished, RunCancelled when it was closed.
        """
        if self._feed is None:
            raise LocalProtocolError("a pass without a feed can't be read in order")
        while True:
            while self._visible[0] < self._visible[1]:
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
        first, last = self._visible
        replicas = self.settings.replicas
        fitting = int(BATCH_BYTES_MAX / max(1.0, self._store.bytes_mean * replicas))
        end = min(last, first + max(1, min(BATCH_STEPS_MAX, fitting)))
        self._visible = (end, last)
        steps, size = self._store.take(first, end, replicas)
        for call in [call for call in self._quarantined if call < end * replicas]:
            del self._quarantined[call]
        return Batch(first, steps, size)

    async def call_step(
        self,
        values: Sequence[Tree],  # R trees, one per replica
        states: States | None = None,  # only gangs read states
        *,
        produced: Callable[[list[Slots]], Mapping[int, int]] | None = None,
        left: deque[anyio.Event] | None = None,
        number: int | None = None,
    ) -> list[Slots]:
        """Execute one step of given values, one call each, and return the results; `number`: see `begin_step`.

        `produced` gets them, and returns space -> version of each state that the step's workers hold from now on, so
        that it is not sent to them; its exceptions are passed on. If the caller is cancelled, `left` gets an event that
        is set when the step ends. Raise WorkersLost, RunCancelled, or the CallError of the lowest replica that failed;
        its `__cause__` is the user's exception, or UnsendableError.
        """
        result: asyncio.Future[tuple[list[Slots], BaseException | None]]
        result = asyncio.get_running_loop().create_future()

        def on_done(parts: list[Slots], error: BaseException | None) -> None:
            if not result.done():  # the caller may have been cancelled
                result.set_result((parts, error))

        step = self.begin_step(values, on_done, states, number=number)
        if produced is not None:
            self._executed[step] = ()
        try:
            parts, error = await result
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

    def begin_step(
        self,
        values: Sequence[Tree],
        on_done: OnStepDone,
        states: States | None = None,
        *,
        steps: int = 1,
        number: int | None = None,
    ) -> int:
        """Offer one step of given values, and return its number; see `call_step`.

        Functions see the step as `number`, None: as the next one; it may stand for several `steps` of the caller, whose
        values are then lists of them. `on_done` is called once, on the event loop, with the value that `call_step`
        returns, or the error that it raises. It must not raise, and may be called before this returns.
        """
        if self._error is not None:
            raise self._error
        if states and not self.settings.gang:
            raise LocalProtocolError("only a gang reads states: other leases may span several steps")
        step = self._next_step
        self._next_step += 1
        if number is None:
            number = self.next_number
            self.next_number += steps
        if number != step:
            self._numbers[step] = number
        self._inputs[step] = (list(values), states)
        self._waiting[step] = on_done
        if self.record is not None:  # until now, other calls made its values
            recorder = self.record.recorder
            recorder.later(self.record.offered, step + 1, 0, recorder.now())
        if not self.begin_prepared(self, step):
            self._post(ev.StepsAvailable(self.id, step, step + 1, len(values)))
        return step

    def number_of(self, step: int) -> int:
        """Return the number as which functions see a step, -1 if it is its own."""
        return self._numbers.get(step, -1) if self._numbers else -1

    def inputs_of(self, step: int) -> tuple[list[Tree], States | None]:
        """Return the values and states of a step of a pass without a feed."""
        return self._inputs[step]

    def hold(self) -> None:
        """Assign no more calls; when none is running, `batches` raises RunDrained."""
        self._post(ev.PassDraining(self.id))

    @property
    def reported(self) -> int:
        """The number of results of calls and elements that arrived."""
        return self.counts.calls_done + self.elements.added

    def restore(
        self,
        chunks: Iterable[Chunk],
        quarantined: Mapping[int, QuarantinedCall] = {},
        elements: Mapping[tuple[int, int, int], Tree] = {},
    ) -> None:
        """Set results of an earlier process, of one call each, before the feed runs: these are not executed.

        `quarantined` has those calls of them that have quarantined elements; `elements` has elements of other calls, by
        (call, stage, element).
        """
        self._quarantined = {
            call: replace(each, command=replace(each.command, pass_id=self.id))
            for call, each in quarantined.items()
        }
        self._restored = {
            chunk.lo: chunk
            for chunk in chunks
            if self._required(chunk.lo) <= chunk.calls[0].keys() <= self.slots
        }
        for (call, stage, element), result in elements.items():
            if call not in self._restored:
                self.elements.add(call, stage, element, result)

    def _required(self, call: int) -> frozenset[str]:
        found = self._quarantined.get(call)
        return self.required_slots if found is None or found.command.remains else frozenset()

    def finished_calls(self) -> dict[int | tuple[int, int, int], Tree]:
        """Return what the reader has not consumed, by call, or by (call, stage, element).

        That is a result, a `QuarantinedCall` or a `FailedElement`.
        """
        found: dict[int | tuple[int, int, int], Tree] = dict(self.elements.all().items())
        restored = {call: chunk.calls[0] for call, chunk in self._restored.items()}
        calls = self._late | restored | self._store.all()
        for call, result in calls.items():
            lacking = self._quarantined.get(call)
            found[call] = result if lacking is None else replace(lacking, result=result)
        return found

    def settle(self, before: int) -> None:
        """Report that steps before `before` are durable: caches may be dropped."""
        if self.key:
            self._post(ev.StepsCommitted(self.id, before))

    def close(self) -> None:
        """Close the pass and drop its running calls; may be called twice."""
        self._post(ev.PassClosed(self.id))

    async def stop(self, wait_s_max: float) -> None:
        """Close the pass, and wait for results that workers have when they drop its calls."""
        self.close()
        if self._is_closed and self.keeps_results:
            with anyio.move_on_after(wait_s_max, shield=True):
                await self.settled.wait()

    async def run_feed(self) -> None:
        """Offer steps on demand until the feed ends, and read data; an error of either ends the pass.

        The reader runs this concurrently in a task group of its own, because the feed's resources are
        released only when it has ended.
        """
        if self._feed is None:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read_requested, name=f"reads of {self.name}")
            await self._offer_all(self._feed)

    async def _offer_all(self, feed: Feed) -> None:
        try:
            while await self._offer(feed):
                while self._demand <= 0:
                    self._demanded = anyio.Event()
                    await self._demanded.wait()
        except Exception as error:  # the user's own iterator may raise anything: it ends this pass
            self.fail(error)

    async def _read_requested(self) -> None:
        """Read the data of leases, one after the other, until the pass is over."""
        while not self._complete and self._error is None:
            while self._reads:
                job = self._reads.popleft()
                if not job.is_needed():
                    continue
                shards: list[Shards] | Exception
                began = 0 if self.record is None else self.record.recorder.now()
                try:
                    shards = await anyio.to_thread.run_sync(job.read, abandon_on_cancel=True)
                except Exception as error:  # reading the user's data may raise anything
                    shards = error
                if self.record is not None:
                    self.record.recorder.driver_span(DriverWork.READ, began, self.name)
                job.on_read(shards)
            self._requested = anyio.Event()
            if not self._complete and self._error is None:
                await self._requested.wait()

    async def _offer(self, feed: Feed) -> bool:
        """Offer the requested steps; return whether there may be more."""
        while self._demand > 0:
            since = 0 if self.record is None else self.record.recorder.now()
            held = feed.held_ns
            batches = await feed.pull(self._demand)
            if not batches:
                self._post(ev.StepsEnded(self.id))
                return False
            if self.record is not None:
                held = feed.held_ns - held
                self.record.recorder.later(self.record.offered, batches[-1].last, since, held)
            for batch in batches:
                self._demand -= batch.last - batch.first
                self.counts.elements_offered += batch.elements
                parts = self.settings.replicas if self.settings.gang else batch.parts
                skipped = batch.skipped_replicas
                if self.settings.gang:  # all replicas of a step join, or none
                    skipped = tuple(range(parts)) if len(skipped) == batch.parts else ()
                first = batch.first
                while first < batch.last:
                    # Single steps while there are restored results.
                    last = first + 1 if self._restored else batch.last
                    size = batch.bytes * (last - first) // (batch.last - batch.first)
                    holes = self._put_past(first, last, skipped)
                    self._post(ev.StepsAvailable(self.id, first, last, parts, size, holes))
                    first = last
            await anyio.lowlevel.checkpoint()
        return True

    def _put_past(self, first: int, last: int, skipped: Sequence[int]) -> tuple[int, ...]:
        """Store restored results of the first step, and empty ones for skipped replicas; return all of these."""
        replicas = self.settings.replicas
        done = [r for r in range(replicas) if first * replicas + r in self._restored and r not in skipped]
        self.counts.calls_past += len(done) + (last - first) * len(skipped)
        for replica in done:
            call = first * replicas + replica
            if call in self._quarantined and self._on_quarantine is not None:
                elements = self._on_quarantine(self._quarantined[call].command)
                self._post(ev.ElementsQuarantined(self.id, elements))
            self._put(self._restored.pop(call))
        for step in range(first, last) if skipped else ():
            for call in [step * replicas + replica for replica in skipped]:
                self._store.put(Chunk(call, call + 1, [{}], 0))
        return tuple(sorted((*skipped, *done)))

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def steps_total(self) -> int | None:
        """Number of steps; None if not known yet."""
        return self._feed.steps_total if self._feed is not None else None

    # -- for the coordinator -------------------------------------------------------------

    def request(self, lo: int, hi: int, *, local: bool, elements: ElementRanges = ()) -> Shards | ShardRead:
        """Return the data of calls [lo, hi), or the function that reads it, for `read`.

        `local`: the worker shares this host's files; `elements`: positions of those sent of a single call; none: all.
        """
        if self._feed is not None:
            return self._feed.request(lo, hi, local=local, elements=elements)
        replicas = self.settings.replicas
        if self.settings.gang:  # all calls of a lease are of one step
            values, states = self._inputs[lo // replicas]
            first = lo % replicas
            versions = None if states is None else {name: list(at) for name, at in states.items()}
            return Shards(values=values[first : first + hi - lo], states=versions)
        return Shards(values=[self._inputs[c // replicas][0][c % replicas] for c in range(lo, hi)])

    def read(self, job: ReadJob) -> None:
        """Read the data of a lease in a thread, after that of earlier leases of the pass."""
        self._reads.append(job)
        self._requested.set()

    def separable(self, call: int) -> int:
        """Return the number of a call's elements that can be sent separately."""
        return 0 if self._feed is None else self._feed.separable(call)

    def on_quarantined(self, command: CallsQuarantined) -> int:
        """Record quarantined elements, before their step is visible; return how many the scheduler can't count."""
        elements = 0 if self._on_quarantine is None else self._on_quarantine(command)
        for call in range(command.lo, command.hi):
            self._quarantined[call] = QuarantinedCall({}, command, elements)
        if not command.remains:
            self.counts.calls_past += command.hi - command.lo
            self.elements.drop(command.lo, command.hi)
            self._store.put(Chunk(command.lo, command.hi, [{} for _ in range(command.lo, command.hi)], 0))
        return 0 if command.whole is None else elements

    def on_quarantine_full(self, command: QuarantineFull) -> None:
        """Fail the pass, because more elements failed than may be quarantined."""
        lines: dict[str, tuple[str, int, int]] = {}  # elements of one call often fail for one reason
        for call, cause in command.first:
            stage, (step, replica) = cause.stage or self.name, divmod(call, self.settings.replicas)
            lines.setdefault(
                f"\n    stage {stage}, step {step}, replica {replica}: {cause.text}", (stage, step, replica)
            )
        text = (
            f"{self.name}: {command.elements:,} elements failed, and at most {self.settings.quarantine_max:,} "
            "may be quarantined (`quarantine_max` in the spec), so the run ends. The first failures:"
            f"{''.join(lines)}\n  Raise `quarantine_max` and rerun with --resume, or fix the function or the data and "
            "rerun with --reuse"
        )
        stage, step, replica = next(iter(lines.values()))
        self.fail(QuarantineError(text, stage=stage, step=step, replica=replica))

    def on_death(self, running: Running, *, timed_out: bool) -> DeathOutcome:
        """Return the consequence of a worker's death for the call that it executed."""
        is_left = self._feed is None and running.call // self.settings.replicas not in self._waiting
        return self.failed.on_death(running, timed_out=timed_out, is_left=is_left)

    def gang_arrived(self, chunks: Sequence[Chunk], peers: Sequence[Peer]) -> None:
        step = chunks[0].lo // self.settings.replicas
        if step in self._executed:
            self._executed[step] = peers
        if self._feed is None and self._on_arrival is None:
            self._count(self.settings.replicas)
            in_order = sorted(chunks, key=attrgetter("lo"))
            self._step_results[step] = [slots for chunk in in_order for slots in chunk.calls]
            return
        for chunk in chunks:
            self.arrived(chunk)

    def arrived(self, chunk: Chunk) -> None:
        self._count(chunk.hi - chunk.lo)
        self.elements.drop(chunk.lo, chunk.hi)
        self._put(chunk)

    def _count(self, calls: int) -> None:
        self.counts.calls_done += calls
        if self.record is not None:
            self.record.calls += calls

    def arrived_late(self, chunk: Chunk) -> None:
        """Keep results of cancelled calls."""
        self._late.update(zip(range(chunk.lo, chunk.hi), chunk.calls, strict=True))

    def _put(self, chunk: Chunk) -> None:
        self._store.put(chunk)
        if self._on_arrival is not None:
            self._on_arrival(chunk)

    def ready(self, first: int, last: int) -> None:
        self.counts.steps_visible += last - first
        elements = 0 if self._feed is None else self._feed.elements(first, last)
        if self.record is not None:
            self.record.recorder.later(self.record.completed, last, elements)
        if self._feed is None:
            for step in range(first, last):
                self._finish(step, None)
            return
        self.counts.elements_visible += elements
        self.failed.forget(first, last)
        begin, end = self._visible  # steps become visible in order
        if begin < end:
            self._visible = (begin, last)
        else:
            self._visible = (first, last)
            self._changed.set()  # it stays set while there is a step

    def step_failed(self, step: int, failure: Failure) -> None:
        """End a step that failed for good; with a feed, end the pass."""
        error = self.failed.error_of(step, failure)
        if self._feed is not None:
            self.fail(error)
        else:
            self._finish(step, error)

    def _finish(self, step: int, error: BaseException | None) -> None:
        """End a step, and report it to its caller, unless that was cancelled."""
        parts = self._step_results.pop(step, None)
        if parts is None:
            (parts,), _ = self._store.take(step, step + 1, self.settings.replicas)
        self._inputs.pop(step, None)
        self.failed.forget(step, step + 1)
        if self._numbers:
            self._numbers.pop(step, None)
        if step in self._left:
            self._left.pop(step).set()
        on_done = self._waiting.pop(step, None)
        if on_done is not None:
            on_done(parts, error)

    def fail(self, error: BaseException) -> None:
        """End the pass with its first error; visible steps stay."""
        if self._error is None:
            self._error = error
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for on_done in waiting:
            on_done([], error)
        while self._left:
            self._left.popitem()[1].set()
        self._changed.set()
        self._requested.set()

    def on_closed(self, error: BaseException) -> None:
        """End the pass with an error, and release everything that it holds, unless it keeps results."""
        self.fail(error)
        self._is_closed = True
        if not self.keeps_results:
            self.release()
        self._visible = (0, 0)
        self._reads.clear()
        self._inputs.clear()
        self.failed.clear()

    def release(self) -> None:
        """Release the results that were not read."""
        self.keeps_results = False
        for kept in (
            self._store,
            self._step_results,
            self.elements,
            self._restored,
            self._quarantined,
            self._late,
        ):
            kept.clear()

    def completed(self) -> None:
        """Let `batches` end after the last visible step."""
        self._complete = True
        self._changed.set()
        self._requested.set()

    def on_drained(self) -> None:
        if not self._complete:
            self.fail(RunDrained("the run was stopped; the calls that were running are finished"))

    def want(self, count: int) -> None:
        self._demand += count
        self._demanded.set()
