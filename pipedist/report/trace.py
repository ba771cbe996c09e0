"""Traces of runs in the Trace Event Format, for Perfetto and chrome://tracing.

The driver and each worker are processes. Complete events ("X") on one track must not overlap, so calls that run at the
same time are on several tracks of their worker. The driver sees the end of a call when its results arrive; as workers
execute other calls one at a time, a call that seems to overlap with the next one is drawn earlier.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipedist.coordinator.measurements import SPANS_MAX
from pipedist.coordinator.spans import DriverSpan, DriverWork, Mark, SpanEnd, thin
from pipedist.errors import UsageError
from pipedist.outputs.run_record import PRIVATE, existing_record
from pipedist.runs.timings import Measured, read_timings

POINTS_MAX = 4096  # of the counter of calls in flight
SEND_NS = 1_000
"""A send is drawn this long, as its duration is not recorded, unless the next one begins earlier."""

_PROCESS = 2048
"""Numbers of processes of the trace for each process that executed the run: driver and workers."""
_SENDS, _EVENTS, _FIRST = 1, 2, 10  # tracks of the driver
_LANES = 100  # tracks of the driver for each kind of work
_WORKS = {DriverWork.READ: "reads", DriverWork.FOLD: "folds", DriverWork.COMMIT: "journal commits"}

Slice = tuple[int, int, int]  # beginning, end, track


def trace_of(path: Path) -> bytes:
    """Return the trace of the run in an output folder.

    Raises:
        UsageError: there is no run in the folder, or it has no measurements.
    """
    existing_record(path)
    processes = read_timings(path / PRIVATE / "timings")
    if not processes:
        raise UsageError(
            f"the run in {path} has no measurements: it has not begun, or an older version executed it"
        )
    return trace(processes)


def trace(processes: Sequence[Measured]) -> bytes:
    """Return the trace of a run, a JSON document.

    Args:
        processes: the measurements of each process that executed the run, compressed.
    """
    first = processes[0]
    began_at = min(each.began_at for each in processes)  # a wall clock may have been set back
    events: list[str] = []
    flows = 0
    for number, measured in enumerate(processes):
        shift = int((measured.began_at - began_at) * 1e9)
        spans = _bounded(measured.spans, len(processes))
        events += _Process(measured, spans, number, shift, flows).events()
        flows += len(spans)
    about = {"run": first.run, "name": first.name, "began_at": began_at, "producer": "pipedist"}
    body = ",\n".join(events)
    return (f'{{"displayTimeUnit":"ms","otherData":{_text(about)},"traceEvents":[\n{body}\n]}}\n').encode()


def _text(value: object) -> str:
    """Return JSON."""
    return msgspec.json.encode(value).decode()


def _bounded(spans: NDArray[np.void], processes: int) -> NDArray[np.void]:
    while len(spans) > SPANS_MAX // processes:
        spans = thin(spans)
    return spans


class _Process:
    """The events of one process that executed a run."""

    def __init__(
        self, measured: Measured, spans: NDArray[np.void], number: int, shift: int, flows: int
    ) -> None:
        self._measured = measured
        self._spans = spans
        self._shift = shift  # nanoseconds from the beginning of the trace to that of this process
        self._flows = flows  # number of flows of earlier processes
        self._driver = number * _PROCESS + 1
        self._suffix = f" (process {number + 1})" if number else ""

    def events(self) -> Iterator[str]:
        yield from self._named(self._driver, f"driver{self._suffix}", 0)
        for number, name in enumerate(self._measured.worker_names):
            yield from self._named(self._worker(number), f"worker {name}{self._suffix}", number + 1)
        yield from self._sends()
        yield from self._calls()
        for work, name in _WORKS.items():
            yield from self._work(_FIRST + work * _LANES, name, work)
        yield from self._marks(self._measured.marks)
        yield from self._counters()

    def _worker(self, number: int) -> int:
        return self._driver + 1 + number

    def _at(self, ns: int) -> str:
        """Return a time in microseconds."""
        return f"{(ns + self._shift) / 1000:.3f}"

    def _named(self, pid: int, name: str, order: int) -> Iterator[str]:
        for kind, arguments in (
            ("process_name", {"name": name}),
            ("process_sort_index", {"sort_index": self._driver + order}),
        ):
            yield f'{{"ph":"M","pid":{pid},"name":"{kind}","args":{_text(arguments)}}}'

    def _thread(self, pid: int, tid: int, name: str) -> str:
        return f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"thread_name","args":{_text({"name": name})}}}'

    def _slice(self, pid: int, at: Slice, name: str, category: str, arguments: dict[str, object]) -> str:
        began, ended, tid = at
        return (
            f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":{self._at(began)},"dur":{(ended - began) / 1000:.3f},'
            f'"name":{name},"cat":"{category}","args":{_text(arguments)}}}'
        )

    def _calls(self) -> Iterator[str]:
        """Yield the calls on the tracks of each worker, and the ends of the arrows to them."""
        names = [_text(name) for name, _, _ in self._measured.passes]
        firsts = [stages[0] if stages else name for name, stages, _ in self._measured.passes]
        replicas = max(1, self._measured.replicas)
        for worker in range(len(self._measured.worker_names)):
            places = np.flatnonzero(self._spans["worker"] == worker)
            own = self._spans[places]
            pid = self._worker(worker)
            slices = [(began, ended, 1 + lane) for began, ended, lane in lanes(in_order(own))]
            for lane in range(max((lane for _, _, lane in slices), default=1)):
                yield self._thread(pid, 1 + lane, f"calls {lane + 1}" if lane else "calls")
            for place, at, span in zip(places.tolist(), slices, own.tolist(), strict=True):
                pass_, _, outcome, attempt, merged, lo, hi, calls, _, _, _, _, _, size = span
                step, replica = divmod(lo, replicas)
                found: dict[str, object] = {"call": f"{firsts[pass_]}/{step}/{replica}", "calls": calls}
                if merged > 1:
                    found |= {"to": f"{firsts[pass_]}/{(hi - 1) // replicas}/{(hi - 1) % replicas}"}
                if attempt:
                    found["attempt"] = attempt + 1
                if size:
                    found["bytes"] = size
                category = (
                    "call" if outcome == SpanEnd.DONE else SpanEnd(outcome).name.lower().replace("_", " ")
                )
                yield self._slice(pid, at, names[pass_], category, found)
                yield self._flow("f", place, pid, at[2], at[0], ',"bp":"e"')

    def _flow(self, phase: str, place: int, pid: int, tid: int, at: int, more: str = "") -> str:
        return (
            f'{{"ph":"{phase}","id":{self._flows + place},"pid":{pid},"tid":{tid},"ts":{self._at(at)},'
            f'"name":"lease","cat":"lease"{more}}}'
        )

    def _sends(self) -> Iterator[str]:
        """Yield the leases that the event loop sends, and the beginnings of the arrows from them."""
        if not len(self._spans):
            return
        yield self._thread(self._driver, _SENDS, "sends")
        order = np.argsort(self._spans["sent"], kind="stable")
        times, starts = np.unique(self._spans["sent"][order], return_index=True)
        ends = np.append(times[1:], times[-1] + SEND_NS)
        for at, end, places in zip(times.tolist(), ends.tolist(), np.split(order, starts[1:]), strict=True):
            slice_ = (at, min(end, at + SEND_NS), _SENDS)
            yield self._slice(self._driver, slice_, '"send"', "send", {})
            for place in places.tolist():
                yield self._flow("s", place, self._driver, _SENDS, at)

    def _work(self, first: int, name: str, work: DriverWork) -> Iterator[str]:
        own: list[DriverSpan] = [each for each in self._measured.driver if each.work == work]
        slices = lanes([(each.began, each.ended) for each in own])
        for lane in range(max((lane for _, _, lane in slices), default=-1) + 1):
            yield self._thread(self._driver, first + lane, f"{name} {lane + 1}" if lane else name)
        for each, (began, ended, lane) in zip(own, slices, strict=True):
            at = (began, ended, first + lane)
            yield self._slice(self._driver, at, _text(each.text), work.name.lower(), {})

    def _marks(self, marks: Sequence[Mark]) -> Iterator[str]:
        """Yield deaths and retries as instants, also on the track of the worker that they name."""
        if marks:
            yield self._thread(self._driver, _EVENTS, "events")
        numbers = {name: number for number, name in enumerate(self._measured.worker_names)}
        for mark in marks:
            places = [(self._driver, _EVENTS)]
            named = re.match(r"worker (\S+)", mark.text)
            if named is not None and named[1].rstrip(":,") in numbers:
                places.append((self._worker(numbers[named[1].rstrip(":,")]), 1))
            for pid, tid in places:
                yield (
                    f'{{"ph":"i","s":"t","pid":{pid},"tid":{tid},"ts":{self._at(mark.at_ns)},'
                    f'"name":{_text(mark.text)},"cat":"event"}}'
                )

    def _counter(self, pid: int, at: int, name: str, unit: str, value: float) -> str:
        return f'{{"ph":"C","pid":{pid},"ts":{self._at(at)},"name":"{name}","args":{{"{unit}":{value:g}}}}}'

    def _counters(self) -> Iterator[str]:
        for at, worker, size in self._measured.memory:
            pid = self._driver if worker < 0 else self._worker(worker)
            yield self._counter(pid, at, "memory", "MiB", size / 2**20)
        end = int(self._measured.seconds * 1e9)
        yield self._counter(self._driver, end, "memory", "MiB", self._measured.driver_memory_bytes / 2**20)
        spans = self._spans
        times = np.concatenate([spans["sent"], spans["finished"]])
        changes = np.concatenate([spans["calls"], -spans["calls"]])
        order = np.argsort(times, kind="stable")
        totals = np.cumsum(changes[order])
        for place in (
            np.unique(np.linspace(0, max(0, len(order) - 1), POINTS_MAX).astype(int)) if len(order) else ()
        ):
            at, calls = int(times[order[place]]), int(totals[place])
            yield self._counter(self._driver, at, "in flight", "calls", calls)


def in_order(spans: NDArray[np.void]) -> list[tuple[int, int]]:
    """Return when each span of a worker began and ended, with those one after the other that can't overlap.

    Calls that wait overlap: their span begins when they were sent. The results of others arrive late, never early.
    """
    found = [(int(span["started"]), max(int(span["finished"]), int(span["started"]) + 1)) for span in spans]
    sent = spans["sent"].tolist()
    following = None
    for place in np.argsort(spans["finished"], kind="stable")[::-1].tolist():
        began, ended = found[place]
        if began <= sent[place]:
            continue
        if following is not None and ended > following:
            began, ended = max(sent[place], began - (ended - following)), following
        if ended > began:
            found[place] = began, ended
            following = began
    return found


def lanes(intervals: Sequence[tuple[int, int]]) -> list[Slice]:
    """Return intervals with the number of a track each, so that those of a track do not overlap."""
    found: list[Slice] = [(began, ended, 0) for began, ended in intervals]
    busy: list[tuple[int, int]] = []  # the end and number of the tracks in use
    free: list[int] = []
    count = 0
    for place in sorted(range(len(found)), key=found.__getitem__):
        began, ended, _ = found[place]
        while busy and busy[0][0] <= began:
            heappush(free, heappop(busy)[1])
        if not free:
            heappush(free, count)
            count += 1
        lane = heappop(free)
        found[place] = began, ended, lane
        heappush(busy, (ended, lane))
    return found


__all__ = ["trace", "trace_of"]
