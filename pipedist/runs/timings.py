"""Timings of a run: where its time went, by stage and worker, and the file that keeps them.

The file, `.pipedist/timings/N.msgpack` in the output folder, has the measurements of one process that executed the
run; a resumed run adds one. It is replaced as a whole while the run is active, at intervals of at least a hundred
times the time that writing takes, so that it costs at most one percent of the run. It is also what a report reads of
a run that was killed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pipedist.coordinator.measurements import PassRecord, Recorder, Totals
from pipedist.coordinator.spans import SPAN, DriverSpan, Mark
from pipedist.core.files import replace_file
from pipedist.core.names import few
from pipedist.core.platform_id import peak_memory_bytes
from pipedist.errors import UsageError

FORMAT = 1
FILES_MAX = 5  # files of processes that are kept; with at most 12 MiB each
SHARE_MAX = 0.01  # of the run's time that writing the file may take
INTERVAL_S = 1.0  # between two writings, at least
SAVING_S_MAX = 5.0  # for the last writing

_BUSY = 0.75  # a share above which workers or the driver count as busy
_NAMED_MAX = 4  # workers that a sentence names
_TAIL = 0.25  # a share of the time with one busy worker that is worth a sentence


class StageTimings(Struct, frozen=True):
    """Where the time of one pass went, over all workers.

    Args:
        name: the stages that its calls execute: runs, an update, or the combine function of a reduction.
        phase: the phase in which it ran, from 0.
        calls: calls whose results count, as in the progress of the run.
        failed, retries: calls that raised or exceeded their time limit; attempts that did not count, as in
            `Result.retries`.
        trials: executions with a part of a call's elements, which search for those to quarantine.
        waits: whether its functions are async, so that its calls wait at the same time.
        elements: elements of completed steps.
        seconds: from the beginning of its first call to the end of its last one.
        busy_s: time that workers spent on its calls, also on those that failed, summed. While calls overlap, it counts
            once for each worker.
        reading_s: the part of it that was spent reading shards from their source.
        input_wait_s, stage_wait_s, driver_wait_s: time that workers were idle before a lease: because the driver
            process was reading its data; because it needed an update, or values of another pass; or although it could
            be sent.
        p50_s, p95_s, max_s: duration of a call. Calls of a few milliseconds are reported together, and count
            with their mean.
        slowest: the longest call, as `STAGE/STEP/REPLICA`, for `pipedist replay`; "" for an update or a combine
            function.
        slowest_worker: the worker that executed it.
        bytes_in, bytes_out: bytes of messages to the workers and of their results, with the arrays in shared memory.
        stages_s: busy time by stage, if the calls execute several.
        cpu_s: processor time of all threads of the workers, summed.
    """

    name: str
    phase: int
    calls: int
    failed: int
    retries: int
    trials: int
    waits: bool
    elements: int
    seconds: float
    busy_s: float
    reading_s: float
    input_wait_s: float
    stage_wait_s: float
    driver_wait_s: float
    p50_s: float
    p95_s: float
    max_s: float
    slowest: str
    slowest_worker: str
    bytes_in: int
    bytes_out: int
    stages_s: Mapping[str, float]
    cpu_s: float = 0.0

    @property
    def elements_per_s(self) -> float:
        """Elements per second, over all workers."""
        return self.elements / self.seconds if self.seconds > 0 else 0.0


class WorkerTimings(Struct, frozen=True):
    """Where the time of one worker went; the names are those of `StageTimings`.

    Args:
        calls: calls that returned.
        memory_bytes: the largest resident memory of its process, 0 if unknown.
    """

    name: str
    calls: int
    busy_s: float
    reading_s: float
    input_wait_s: float
    stage_wait_s: float
    driver_wait_s: float
    bytes_in: int
    bytes_out: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Timings(Mapping[str, float]):
    """Timings of a run: a mapping from its parts ("phase 1", "total") to seconds, with details.

    Args:
        parts: seconds by part.
        stages: by pass, in order.
        workers: by worker, in the order in which they got calls.
        limit: one sentence that names what limited the run; "" if it was too short to say.

    Example:
        >>> timings = Timings({"total": 1.5})
        >>> timings["total"]
        1.5
    """

    parts: Mapping[str, float]
    stages: Sequence[StageTimings] = ()
    workers: Sequence[WorkerTimings] = ()
    limit: str = ""

    def __getitem__(self, part: str) -> float:
        """Return the seconds of a part of the run; raises KeyError for others."""
        return self.parts[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def with_parts(self, parts: Mapping[str, float]) -> Timings:
        """Return the timings with some parts replaced."""
        return Timings({**self.parts, **parts}, self.stages, self.workers, self.limit)

    def details(self) -> dict[str, Any]:
        """Return everything but the parts, as plain JSON values."""
        found: dict[str, Any] = msgspec.to_builtins(
            {"stages": self.stages, "workers": self.workers, "limit": self.limit}
        )
        return found

    @classmethod
    def of(cls, parts: Mapping[str, float], details: Mapping[str, Any]) -> Timings:
        """Return timings from their plain form."""
        return cls(
            parts,
            msgspec.convert(details.get("stages", []), list[StageTimings]),
            msgspec.convert(details.get("workers", []), list[WorkerTimings]),
            details.get("limit", ""),
        )


class Measured(Struct, frozen=True):
    """The measurements of one process that executed a run, as in its file."""

    format: int
    run: str
    name: str
    began_at: float  # time.time()
    seconds: float  # from the beginning to the last writing
    is_over: bool
    driver_busy_s: float
    driver_memory_bytes: int
    replicas: int
    passes: Sequence[tuple[str, Sequence[str], int]]  # name, stages and phase, by number
    worker_names: Sequence[str]  # by number
    stages: Sequence[StageTimings]
    workers: Sequence[WorkerTimings]
    limit: str
    marks: Sequence[Mark]
    memory: Sequence[tuple[int, int, int]]  # nanoseconds, worker, bytes; worker -1: the driver
    packed: bytes  # the spans, compressed once the measurements are in the file
    driver: Sequence[DriverSpan] = ()

    def compressed(self) -> Measured:
        """Return the measurements as they are in the file."""
        return msgspec.structs.replace(self, packed=zlib.compress(self.packed, 1))

    @property
    def spans(self) -> NDArray[np.void]:
        """The spans of compressed measurements, an array of dtype `SPAN`."""
        return np.frombuffer(zlib.decompress(self.packed), SPAN)


class Measurements:
    """The measurements of a run in this process: a recorder, and what is derived from it.

    Created where the run's event loop runs: the time of that thread is the driver's busy time.
    """

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._busy_s = time.thread_time()

    def driver_busy_s(self) -> float:
        """Return the processor time of the event loop's thread; call it in that thread."""
        return time.thread_time() - self._busy_s

    def stages(self) -> list[StageTimings]:
        recorder = self.recorder
        # updates after their pass
        in_order = sorted(recorder.passes, key=lambda each: (each.phase, not each.stages))
        return [_stage(record, recorder.workers) for record in in_order if record.totals]

    def workers(self) -> list[WorkerTimings]:
        recorder = self.recorder
        found = []
        for number, name in enumerate(recorder.workers):
            totals = [record.totals[number] for record in recorder.passes if number in record.totals]
            found.append(
                WorkerTimings(
                    name=name,
                    calls=sum(each.calls for each in totals),
                    **_costs(totals),
                    memory_bytes=recorder.states[number].memory_bytes,
                )
            )
        return found

    def timings(self, parts: Mapping[str, float]) -> Timings:
        """Return the timings for the result; call it on the event loop."""
        self.recorder.settle()
        stages, workers, recorder = self.stages(), self.workers(), self.recorder
        limit = limit_of(recorder.spans, stages, workers, self.driver_busy_s(), recorder.now() * 1e-9)
        return Timings(parts, stages, workers, limit)

    def measured(self, run: str, name: str, *, is_over: bool) -> Measured:
        """Return everything, for the file; call it on the event loop, and `compressed` of the result elsewhere."""
        recorder = self.recorder
        recorder.settle()
        now = recorder.now() * 1e-9
        stages, workers = self.stages(), self.workers()
        return Measured(
            format=FORMAT,
            run=run,
            name=name,
            began_at=recorder.began_at,
            seconds=now,
            is_over=is_over,
            driver_busy_s=self.driver_busy_s(),
            driver_memory_bytes=peak_memory_bytes(),
            replicas=recorder.passes[0].replicas if recorder.passes else 0,
            passes=[(each.name, each.stages, each.phase) for each in recorder.passes],
            worker_names=list(recorder.workers),
            stages=stages,
            workers=workers,
            limit=limit_of(recorder.spans, stages, workers, self.driver_busy_s(), now),
            marks=list(recorder.marks),
            memory=list(recorder.memory),
            packed=recorder.spans.tobytes(),
            driver=list(recorder.driver),
        )


def _seconds_of(totals: Sequence[Totals], kind: str) -> float:
    return float(sum(getattr(each, f"{kind}_ns") for each in totals) * 1e-9)


def _costs(totals: Sequence[Totals]) -> dict[str, Any]:
    """Return the times and bytes that timings of stages and of workers have."""
    kinds = ("busy", "reading", "input_wait", "stage_wait", "driver_wait")
    return {
        **{f"{kind}_s": _seconds_of(totals, kind) for kind in kinds},
        "bytes_in": sum(each.bytes_in for each in totals),
        "bytes_out": sum(each.bytes_out for each in totals),
    }


def _stage(record: PassRecord, workers: Sequence[str]) -> StageTimings:
    totals = list(record.totals.values())
    duration, call, worker = record.slowest
    step, replica = divmod(call, record.replicas)
    begun = [each.first_ns for each in totals if each.first_ns >= 0]
    return StageTimings(
        name=record.name,
        phase=record.phase,
        calls=record.calls,
        failed=sum(each.failed for each in totals),
        retries=record.retries,
        trials=sum(each.trials for each in totals),
        waits=record.waits,
        elements=record.elements,
        seconds=(max(each.last_ns for each in totals) - min(begun)) * 1e-9 if begun else 0.0,
        p50_s=min(record.durations.quantile_s(0.5), duration * 1e-9),
        p95_s=min(record.durations.quantile_s(0.95), duration * 1e-9),
        max_s=duration * 1e-9,
        slowest=f"{record.stages[0]}/{step}/{replica}" if call >= 0 and record.stages else "",
        slowest_worker=workers[worker] if call >= 0 else "",
        stages_s={
            stage: spent * 1e-9 for stage, spent in zip(record.stages, record.stages_ns, strict=True) if spent
        },
        **_costs(totals),
        cpu_s=_seconds_of(totals, "cpu"),
    )


def limit_of(
    spans: NDArray[np.void],
    stages: Sequence[StageTimings],
    workers: Sequence[WorkerTimings],
    driver_busy_s: float,
    seconds: float,
) -> str:
    """Return a sentence that names what limited a run; "" if no call returned."""
    if not len(spans) or not workers or not stages:
        return ""
    first, last = int(spans["started"].min()), int(spans["finished"].max())
    window = (last - first) * 1e-9
    if window < seconds / 2:
        before = first * 1e-9
        return (
            f"Calls ran for {brief(window)} of {brief(seconds)}: {brief(before)} passed before the first one began, "
            f"and {brief(max(0.0, seconds - before - window))} after the last one, for writing results."
        )
    tail, slowest = _tail(spans, last)
    if len(workers) > 1 and tail > _TAIL * window:
        worker = workers[slowest].name if slowest < len(workers) else "one worker"
        longest = max(stages, key=lambda each: each.max_s)
        if longest.slowest_worker == worker and longest.max_s > tail / 2:
            return (
                f"For the last {brief(tail)} only {worker} was busy; the longest call was {longest.slowest} "
                f"({brief(longest.max_s)}, the median {brief(longest.p50_s)})."
            )
        return (
            f"For the last {brief(tail)} only {worker} was busy: smaller batches divide the work more evenly."
        )
    capacity = window * len(workers)
    busy = min(capacity, sum(each.busy_s for each in workers))
    share, reading = busy / capacity, sum(each.reading_s for each in workers)
    driver = min(1.0, driver_busy_s / window)
    if share >= _BUSY:
        most = max(stages, key=lambda each: each.busy_s)
        if most.waits:
            return (
                f"Workers had calls of {most.name} that waited {share:.0%} of the time: a higher `concurrency` or "
                "`rate`, or a faster server, makes it faster."
            )
        if reading > busy / 2:
            return f"Workers were busy {share:.0%} of the time, {reading / busy:.0%} of that with reading their input."
        return (
            f"Workers were busy {share:.0%} of the time: more workers, or faster functions, make it faster."
        )
    if driver > _BUSY:
        return f"The driver was busy {driver:.0%} of the time, workers {share:.0%}: larger batches need fewer messages."
    loaded = [each for each in workers if each.busy_s > _BUSY * window]
    if loaded and min(each.busy_s for each in workers) < _BUSY / 2 * window:
        names = few([each.name for each in loaded], _NAMED_MAX)
        return (
            f"Only {names} of {len(workers)} workers had calls for more than {_BUSY:.0%} of the time: the others could "
            "not execute more of them."
        )
    for_input, for_stages = (
        sum(getattr(each, f"{kind}_wait_s") for each in workers) / capacity for kind in ("input", "stage")
    )
    if for_stages > max(for_input, _TAIL):
        name = max(stages, key=lambda each: each.stage_wait_s).name
        return (
            f"Workers waited {for_stages:.0%} of the time until calls of {name} had an update or values of another "
            f"stage, and were busy {share:.0%} of it."
        )
    if for_input > _TAIL:
        return f"Workers waited {for_input:.0%} of the time for input that the driver read, and were busy {share:.0%}."
    return f"Workers were busy {share:.0%} of the time, and the driver {driver:.0%} of it."


def _tail(spans: NDArray[np.void], last: int) -> tuple[float, int]:
    """Return how long one worker was busy alone at the end, in seconds, and its number."""
    ends = np.zeros(int(spans["worker"].max()) + 1, np.int64)
    np.maximum.at(ends, spans["worker"], spans["finished"])
    order = np.argsort(ends)
    others = int(ends[order[-2]]) if len(ends) > 1 else 0
    return (last - others) * 1e-9, int(order[-1])


def brief(seconds: float) -> str:
    """Return a duration with up to three digits: "27 ms", "1.4 s"."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def pause_after(writing_s: float) -> float:
    """Return the seconds between a writing of the file that took so long and the next one."""
    return max(INTERVAL_S, writing_s / SHARE_MAX)


def write_timings(folder: Path, number: int, measured: Measured) -> None:
    """Replace the file of a process's measurements."""
    folder.mkdir(exist_ok=True)
    replace_file(folder / f"{number}.msgpack", msgspec.msgpack.encode(measured.compressed()))


def next_number(folder: Path) -> int:
    """Return the number of the file of this process; remove the oldest ones, and what killed processes left."""
    for partial in folder.glob(".*.partial"):
        partial.unlink(missing_ok=True)
    numbers = sorted(int(path.stem) for path in folder.glob("*.msgpack") if path.stem.isdecimal())
    for number in numbers[: -FILES_MAX + 1]:
        (folder / f"{number}.msgpack").unlink(missing_ok=True)
    return numbers[-1] + 1 if numbers else 1


def read_timings(folder: Path) -> list[Measured]:
    """Return the measurements of each process that executed a run, in order.

    Args:
        folder: the `.pipedist/timings` of an output folder.

    Raises:
        UsageError: a file is damaged, or was written by another version.
    """
    found = []
    for path in sorted(folder.glob("*.msgpack"), key=lambda each: int(each.stem)):
        try:
            measured = msgspec.msgpack.decode(path.read_bytes(), type=Measured)
            _ = measured.spans
        except (msgspec.MsgspecError, zlib.error, ValueError) as error:
            raise UsageError(f"{path} can't be read: {error}. The run's results are not affected.") from error
        if measured.format != FORMAT:
            raise UsageError(f"{path} was written by another version of pipedist (format {measured.format}).")
        found.append(measured)
    return found
