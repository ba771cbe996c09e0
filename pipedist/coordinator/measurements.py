"""Measurements of a run: when ranges of calls were sent, executed and returned, and what they cost.

Rules
-----
* A SPAN is a range of calls of one lease that one message reported, or that ended otherwise. Calls shorter than a
  message takes (some 10 ms) share one, and count with their mean duration.
* All times are nanoseconds of the driver's monotonic clock since the recorder was made. Clocks of workers are not
  compared with it: a span is finished when its results arrive, and started its busy time before that.
* At most `SPANS_MAX` spans are kept: when there are more, the older half is thinned, by joining neighbours of the
  same pass and worker. The totals of each pass and worker are exact.
* What happens to a call is only noted, with `Recorder.later`: one small tuple. The rest is derived when there are
  `_LATER_MAX` notes, and before anything is read.
* Nothing here decides anything: a run without a recorder is the same run.
"""

from __future__ import annotations

import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeVarTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pipedist.coordinator.spans import SPAN, DriverSpan, DriverWork, DurationHistogram, Mark, SpanEnd, thin
from pipedist.protocol.messages import Failed, Results

SPANS_MAX = 2**17  # 12 MiB
MARKS_MAX = 4096  # maximum number of marks; the first half and the latest ones are kept
WORKERS_MAX = 1024  # workers with totals of their own; later ones count as "others"
DRIVER_SPANS_MAX = 2**13  # maximum number of spans of work in the driver; the longest are kept
MEMORY_STEPS_MAX = 4096  # maximum number of recorded growths of memory
MEMORY_GROWTH = 1.02  # a smaller growth is not recorded
OTHERS = "others"

_TEXT_MAX = 300
_ATTEMPT_MAX = 255
_OFFERS_KEPT = 64  # offers are forgotten when there are more, and their steps are complete
_SPANS_FIRST = 1024
_LATER_MAX = 256
_Arguments = TypeVarTuple("_Arguments")


_DONE = int(SpanEnd.DONE)
_FORMAT = struct.Struct("=HHBBI9q")  # that of `SPAN`: writing its bytes takes a tenth of assigning a tuple
_SPAN_BYTES = SPAN.itemsize
_pack_into = _FORMAT.pack_into


class Totals(Struct):
    """Totals of the calls of one pass on one worker."""

    calls: int = 0  # that returned
    failed: int = 0  # that raised, or exceeded their time limit
    trials: int = 0  # that searched for elements to quarantine; else they count in times and bytes only
    busy_ns: int = 0  # also of calls that failed
    reading_ns: int = 0  # the part of the busy time for reading shards
    cpu_ns: int = 0  # processor time of all threads of its process
    input_wait_ns: int = 0  # idle, because the driver process was reading
    stage_wait_ns: int = 0  # idle, because the next steps needed an update, or values of another pass
    driver_wait_ns: int = 0  # idle, although steps could be executed
    bytes_in: int = 0
    bytes_out: int = 0
    first_ns: int = -1
    last_ns: int = 0


class _WorkerState(Struct):
    """The state of a worker, for the time that it is idle."""

    leases: int = 0
    idle_since: int = -1  # -1: it has leases, or has had none yet
    last_finished: int = 0
    memory_bytes: int = 0


class OpenLease(Struct):
    """A lease that is sent and not over."""

    record: PassRecord
    worker: int
    lo: int
    hi: int
    attempt: int
    overlaps: bool  # its calls wait, and overlap with those of other leases
    is_trial: bool  # it has a part of a call's elements
    queued: int
    sent: int
    left: int  # calls that have not returned
    state: _WorkerState
    totals: Totals  # those of the worker in the pass


class PassRecord:
    """The measurements of one pass.

    Its methods are called by `Recorder.later`, which passes the time first: nanoseconds since the recorder was made.
    """

    def __init__(
        self,
        recorder: Recorder,
        number: int,
        name: str,
        stages: Sequence[str],
        replicas: int,
        phase: int,
        waits: bool,
    ) -> None:
        self.name = name
        self.stages = tuple(stages)
        self.replicas = replicas
        self.phase = phase
        self.totals: dict[int, Totals] = {}  # by worker
        self.calls = 0  # whose results count
        self.retries = 0  # attempts that did not count, as in the result of the run
        self.elements = 0  # of completed steps
        self.waits = waits  # whether its functions are async, so that its calls wait at the same time
        self.durations = DurationHistogram()
        self.stages_ns = [0] * len(stages)  # busy time by stage, if there are several
        self.slowest = (0, -1, -1)  # duration, first call and worker of the span with the longest calls
        self.recorder = recorder
        self._number = number
        # Offers whose steps are not complete: their last steps; times when reading began and ended, and their own
        self._lasts: list[int] = []
        self._offers: list[tuple[int, int, int]] = []
        # The workers that have numbers of their own, for one look-up
        self._workers: dict[str, tuple[int, _WorkerState, Totals]] = {}

    def offered(self, now: int, last: int, since: int, held_ns: int = 0) -> None:
        """Record that steps before `last` can be executed.

        They were read `since` a time, and held back for the last `held_ns`, until calls of other stages were over.
        """
        read = now - held_ns
        self._lasts.append(last)
        self._offers.append((since, read if read > since else since, now))

    def completed(self, _now: int, last: int, elements: int) -> None:
        """Record that all steps before `last` are complete, `elements` more."""
        self.elements += elements
        if len(self._lasts) > _OFFERS_KEPT and self._lasts[_OFFERS_KEPT // 2] <= last:
            over = bisect_right(self._lasts, last)
            del self._lasts[:over], self._offers[:over]

    def sent(
        self,
        now: int,
        worker: str,
        lease: int,
        lo: int,
        hi: int,
        attempt: int,
        bytes_in: int,
        asked: int,
        overlaps: bool = False,
        is_trial: bool = False,
    ) -> None:
        """Record a lease of calls [lo, hi), whose data was read since it was `asked` for; -1: it was there."""
        recorder = self.recorder
        number, state, totals = self._workers.get(worker) or self._enter(worker)
        place = bisect_right(self._lasts, lo // self.replicas)
        since, read, queued = self._offers[place] if place < len(self._offers) else (now, now, now)
        recorder.open[worker, lease] = OpenLease(
            self, number, lo, hi, attempt, overlaps, is_trial, queued, now, hi - lo, state, totals
        )
        if state.idle_since >= 0:
            if asked < 0:
                asked = now
            _add_idle(totals, now, state.idle_since, since, read, queued, asked)
            state.idle_since = -1
        state.leases += 1
        totals.bytes_in += bytes_in
        if is_trial:
            totals.trials += hi - lo

    def returned(self, now: int, worker: str, results: Results, bytes_out: int) -> None:
        """Record results of calls of a lease."""
        recorder = self.recorder
        opened = recorder.open.get((worker, results.lease))
        if opened is None:
            return
        state, totals, sent = opened.state, opened.totals, opened.sent
        lo, reading_ns = results.lo, results.reading_ns
        calls = results.hi - lo
        if opened.overlaps:  # each call has waited since it was sent, and the worker for all of them at once
            duration = now - sent
            busy = min(duration, now - state.last_finished)
            started = sent
        else:
            busy = results.busy_ns
            if busy > now - sent:
                busy = now - sent
            duration = busy // calls
            started = now - busy
        if not opened.is_trial:
            totals.calls += calls
            self.durations.add(duration, calls)
            if recorder.on_returned is not None:
                recorder.on_returned(self.name, duration * 1e-9)
        totals.bytes_out += bytes_out
        totals.cpu_ns += results.cpu_ns
        if reading_ns:
            totals.reading_ns += min(reading_ns, now - sent)
        if results.memory_bytes > state.memory_bytes * MEMORY_GROWTH:
            recorder.grown(now, worker, results.memory_bytes)
        if results.stages_ns:
            self._add_stages(results.stages_ns, busy)
        if duration > self.slowest[0]:
            self.slowest = (duration, lo, opened.worker)
        self._add(opened, worker, results.lease, lo, results.hi, started, now, busy, bytes_out, _DONE)

    def _add_stages(self, stages_ns: Sequence[int], busy: int) -> None:
        if len(stages_ns) == len(self.stages_ns):
            # The times of calls that overlap have a longer sum than the time of their worker.
            spent = sum(stages_ns)
            share = min(1.0, busy / spent) if spent else 0.0
            self.stages_ns = [
                each + int(more * share) for each, more in zip(self.stages_ns, stages_ns, strict=True)
            ]

    def raised(self, now: int, worker: str, failed: Failed) -> None:
        """Record a call of a lease that failed."""
        opened = self.recorder.open.get((worker, failed.lease))
        if opened is not None:
            opened.totals.failed += not opened.is_trial
            timed_out = failed.name == "TimeoutError" and failed.module == "builtins"
            outcome = SpanEnd.TIMED_OUT if timed_out else SpanEnd.FAILED
            self._end(opened, worker, failed.lease, failed.call, failed.call + 1, outcome, now)

    def ended(self, now: int, worker: str, lease: int, outcome: SpanEnd) -> None:
        """Record that the calls of a lease that have not returned will not."""
        opened = self.recorder.open.get((worker, lease))
        if opened is not None:
            self._end(opened, worker, lease, opened.hi - opened.left, opened.hi, outcome, now)

    def _end(
        self, opened: OpenLease, worker: str, lease: int, lo: int, hi: int, outcome: SpanEnd, now: int
    ) -> None:
        # the call before it, or of another lease, was over
        began = max(opened.sent, opened.state.last_finished)
        started = opened.sent if opened.overlaps else began
        self._add(opened, worker, lease, lo, hi, started, now, now - began, 0, outcome)

    def _enter(self, worker: str) -> tuple[int, _WorkerState, Totals]:
        """Return the number, state and totals of a worker, and keep them."""
        number = self.recorder.number_of(worker)
        entered = (number, self.recorder.states[number], self.totals.setdefault(number, Totals()))
        if number < WORKERS_MAX - 1:
            self._workers[worker] = entered
        return entered

    def _add(
        self,
        opened: OpenLease,
        worker: str,
        lease: int,
        lo: int,
        hi: int,
        started: int,
        finished: int,
        busy: int,
        bytes_out: int,
        outcome: int,
    ) -> None:
        """Add a span, and close its lease if it was the last one."""
        totals, attempt, state = opened.totals, opened.attempt, opened.state
        if started < totals.first_ns or totals.first_ns < 0:
            totals.first_ns = started
        totals.busy_ns += busy
        totals.last_ns = state.last_finished = finished
        if attempt > _ATTEMPT_MAX:
            attempt = _ATTEMPT_MAX
        recorder = self.recorder
        if recorder.count == recorder.room:
            recorder.make_room()
        _pack_into(
            recorder.buffer, recorder.count * _SPAN_BYTES,
            self._number, opened.worker, outcome, attempt, 1, lo, hi, hi - lo,
            opened.queued, opened.sent, started, finished, busy, bytes_out,
        )  # fmt: skip
        recorder.count += 1
        opened.left -= hi - lo
        if opened.left <= 0:
            del recorder.open[worker, lease]
            state.leases -= 1
            if not state.leases:
                state.idle_since = finished


def _add_idle(
    totals: Totals, now: int, idle_since: int, since: int, read: int, queued: int, asked: int
) -> None:
    """Divide the idle time of a worker by what it waited for; `max` would take as long as all the rest."""
    if idle_since > since:
        since = idle_since
    for_input = read - since if read > since else 0
    if idle_since > read:
        read = idle_since
    for_stages = queued - read if queued > read else 0
    if queued > asked:
        asked = queued
    if idle_since > asked:
        asked = idle_since
    if now > asked:
        for_input += now - asked
    totals.input_wait_ns += for_input
    totals.stage_wait_ns += for_stages
    totals.driver_wait_ns += now - idle_since - for_input - for_stages


class Recorder:
    """The measurements of a run."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._began_ns = clock_ns()
        self.began_at = time.time()  # seconds, wall clock
        self.passes: list[PassRecord] = []
        self.workers: list[str] = []  # names by number
        self.states: list[_WorkerState] = []  # by number
        self.open: dict[tuple[str, int], OpenLease] = {}  # by worker and lease
        self.marks: list[Mark] = []
        self.on_returned: Callable[[str, float], None] | None = None
        """Called with the name of a pass and the duration of a call, in seconds, for each message of results."""
        self.memory: list[tuple[int, int, int]] = []  # time, worker, bytes
        self.count = 0  # spans
        self.room = _SPANS_FIRST
        self.buffer = bytearray(self.room * _SPAN_BYTES)  # of `room` spans
        self._numbers: dict[str, int] = {}
        self._later: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []  # with their times
        self._driver: list[tuple[DriverWork, int, int, str]] = []
        """The fields of `DriverSpan`, in order of ends."""

    def now(self) -> int:
        """Return the nanoseconds since the run began."""
        return self._clock_ns() - self._began_ns

    def later(self, record: Callable[[int, *tuple[*_Arguments]], None], *arguments: *_Arguments) -> None:
        """Note that something happened now: a method of a `PassRecord`, and its arguments after the time."""
        self._later.append((self._clock_ns(), record, arguments))
        if len(self._later) == _LATER_MAX:
            self.settle()

    def settle(self) -> None:
        """Record what was noted; before anything is read."""
        later, self._later = self._later, []
        began_ns = self._began_ns
        for at_ns, record, arguments in later:
            record(at_ns - began_ns, *arguments)

    @property
    def spans(self) -> NDArray[np.void]:
        """The spans, in order of their ends."""
        return np.frombuffer(bytes(memoryview(self.buffer)[: self.count * _SPAN_BYTES]), SPAN)

    @property
    def driver(self) -> list[DriverSpan]:
        """Work in the driver, in order of its ends."""
        return [DriverSpan(*each) for each in self._driver]

    def begin_pass(
        self, name: str, stages: Sequence[str], replicas: int, phase: int, *, waits: bool = False
    ) -> PassRecord:
        record = PassRecord(self, len(self.passes), name, stages, replicas, phase, waits)
        self.passes.append(record)
        return record

    def number_of(self, worker: str) -> int:
        number = self._numbers.get(worker)
        if number is None:
            if len(self.workers) == WORKERS_MAX:
                return WORKERS_MAX - 1
            number = len(self.workers)
            is_last = number == WORKERS_MAX - 1
            if not is_last:
                self._numbers[worker] = number
            self.workers.append(OTHERS if is_last else worker)
            self.states.append(_WorkerState())
        return number

    def mark(self, text: str) -> None:
        """Record an event, as a line for people."""
        if len(self.marks) == MARKS_MAX:
            del self.marks[MARKS_MAX // 2]
        self.marks.append(Mark(self.now(), text[:_TEXT_MAX]))

    def driver_span(self, work: DriverWork, began: int, text: str) -> None:
        """Record work in the driver from `began` until now."""
        self._driver.append((work, began, self._clock_ns() - self._began_ns, text[:_TEXT_MAX]))
        if len(self._driver) > DRIVER_SPANS_MAX:
            longest = sorted(self._driver, key=lambda each: each[2] - each[1])[DRIVER_SPANS_MAX // 2 :]
            self._driver = sorted(longest, key=itemgetter(2))

    def left(self, worker: str) -> None:
        """Record that a worker is gone; its leases are lost."""
        self.settle()
        now = self.now()
        for name, lease in [place for place in self.open if place[0] == worker]:
            self.open[name, lease].record.ended(now, name, lease, SpanEnd.LOST)
        if worker in self._numbers:
            self.states[self._numbers[worker]].idle_since = -1

    def grown(self, now: int, worker: str, memory_bytes: int) -> None:
        """Record the largest memory of a worker so far."""
        number = self.number_of(worker)
        state = self.states[number]
        if memory_bytes > state.memory_bytes * MEMORY_GROWTH:
            state.memory_bytes = memory_bytes
            if len(self.memory) < MEMORY_STEPS_MAX:
                self.memory.append((now, number, memory_bytes))

    def make_room(self) -> None:
        """Make room for another span: thin the older half if there are `SPANS_MAX`."""
        if self.room < SPANS_MAX:
            self.buffer += bytes(len(self.buffer))
            self.room *= 2
            return
        older, newer = np.split(np.frombuffer(self.buffer, SPAN), 2)
        kept = np.concatenate([thin(older), newer])
        self.count = len(kept)
        self.buffer[: kept.nbytes] = kept.tobytes()
