from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from pipedist.coordinator import measurements
from pipedist.coordinator.measurements import PassRecord, Recorder
from pipedist.coordinator.spans import DriverWork, SpanEnd, thin
from pipedist.protocol.messages import Failed, Results
from tests.python_calls import PythonCalls


class Clock:
    def __init__(self) -> None:
        self.ns = 1_000
        self.recorder = Recorder(self)

    def __call__(self) -> int:
        return self.ns

    def at(self, ns: int) -> None:
        self.ns = 1_000 + ns

    def note(self, record: Callable[..., None], *arguments: object, **named: object) -> None:
        """Record something at once."""
        if record.__name__ == "sent":
            named.setdefault("asked", self.recorder.now())
        self.recorder.later(partial(record, **named), *arguments)
        self.recorder.settle()


def begun(replicas: int = 1) -> tuple[Clock, Recorder, PassRecord]:
    clock = Clock()
    return clock, clock.recorder, clock.recorder.begin_pass("x", ["x"], replicas, 0)


def failed(lease: int, call: int, name: str = "ValueError") -> Failed:
    return Failed(lease, call, "x", "builtins", name, "", "", True)


def test_a_span_has_the_times_of_its_calls() -> None:
    clock, recorder, record = begun(replicas=2)
    clock.note(record.offered, 4, since=0)
    clock.at(100)
    clock.note(record.sent, "w0", 1, 0, 4, attempt=0, bytes_in=10)
    clock.at(1_000)
    clock.note(record.returned, "w0", Results(1, 0, 4, 600), 50)
    (span,) = recorder.spans
    names = ("lo", "hi", "calls", "queued", "sent", "started", "finished", "busy", "bytes_out", "outcome")
    assert [int(span[name]) for name in names] == [0, 4, 4, 0, 100, 400, 1_000, 600, 50, SpanEnd.DONE]
    totals = record.totals[0]
    assert (totals.calls, totals.busy_ns, totals.bytes_in, totals.bytes_out) == (4, 600, 10, 50)
    assert record.slowest == (150, 0, 0)
    assert recorder.open == {}


def test_idle_time_is_divided_by_what_the_worker_waited_for() -> None:
    clock, _, record = begun()
    clock.note(record.offered, 1, since=0)
    clock.note(record.sent, "w0", 1, 0, 1, attempt=0, bytes_in=0)
    clock.at(100)
    clock.note(record.returned, "w0", Results(1, 0, 1, 100), 0)
    clock.at(400)  # the scheduler asked for steps at 150, and the input came at 400
    clock.note(record.offered, 2, since=150)
    clock.at(450)
    clock.note(record.sent, "w0", 2, 1, 2, attempt=0, bytes_in=0)
    totals = record.totals[0]
    assert (totals.input_wait_ns, totals.driver_wait_ns) == (250, 100)


def test_calls_that_overlap_keep_their_worker_busy_once() -> None:
    clock, _, record = begun()
    clock.note(record.offered, 2, since=0)
    clock.note(record.sent, "w0", 1, 0, 1, attempt=0, bytes_in=0, overlaps=True)
    clock.note(record.sent, "w0", 2, 1, 2, attempt=0, bytes_in=0, overlaps=True)
    clock.at(1_000)
    clock.note(record.returned, "w0", Results(1, 0, 1, 0), 0)
    clock.at(1_500)
    clock.note(record.returned, "w0", Results(2, 1, 2, 0), 0)
    assert record.totals[0].busy_ns == 1_500
    assert record.slowest == (1_500, 1, 0)


@pytest.mark.parametrize(
    ("name", "end"), [("ValueError", SpanEnd.FAILED), ("TimeoutError", SpanEnd.TIMED_OUT)]
)
def test_a_failed_call_is_a_span_of_its_own(name: str, end: SpanEnd) -> None:
    clock, recorder, record = begun()
    clock.note(record.sent, "w0", 1, 0, 3, attempt=1, bytes_in=0)
    clock.at(10)
    clock.note(record.returned, "w0", Results(1, 0, 1, 10), 0)
    clock.at(30)
    clock.note(record.raised, "w0", failed(1, 1, name))
    assert [(int(s["lo"]), int(s["started"]), int(s["outcome"])) for s in recorder.spans][1] == (1, 10, end)
    assert record.totals[0].failed == 1


def test_the_calls_of_a_lost_worker_are_lost() -> None:
    clock, recorder, record = begun()
    clock.note(record.sent, "w0", 1, 0, 4, attempt=0, bytes_in=0)
    clock.note(record.sent, "w1", 2, 4, 8, attempt=0, bytes_in=0)
    clock.at(10)
    clock.note(record.returned, "w0", Results(1, 0, 1, 10), 0)
    recorder.left("w0")
    lost = recorder.spans[-1]
    assert (int(lost["lo"]), int(lost["hi"]), int(lost["outcome"])) == (1, 4, SpanEnd.LOST)
    assert list(recorder.open) == [("w1", 2)]
    clock.note(record.returned, "w0", Results(1, 1, 2, 10), 0)  # a late message: the lease is over
    assert len(recorder.spans) == 2


def test_quantiles_are_within_five_percent() -> None:
    _, _, record = begun()
    for milliseconds in range(1, 1001):
        record.durations.add(milliseconds * 1e6, 1)
    assert record.durations.quantile_s(0.5) == pytest.approx(0.5, rel=0.06)
    assert record.durations.quantile_s(0.95) == pytest.approx(0.95, rel=0.06)


def test_thinning_keeps_sums_failures_and_the_newest_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "SPANS_MAX", 4096)
    clock, recorder, record = begun()
    for call in range(20_000):
        clock.note(record.sent, f"w{call % 3}", call, call, call + 1, attempt=0, bytes_in=0)
        clock.at(10 * call + 7)
        if call == 77:
            clock.note(record.raised, f"w{call % 3}", failed(call, call))
        else:
            clock.note(record.returned, f"w{call % 3}", Results(call, call, call + 1, 5), 1)
    spans = recorder.spans
    assert len(spans) <= 4096
    assert spans["calls"].sum() == 20_000
    assert spans["bytes_out"].sum() == 19_999
    assert (spans["outcome"] == SpanEnd.FAILED).sum() == 1
    assert (np.diff(spans["finished"]) >= 0).all()
    assert (spans["merged"][-2048:] == 1).all(), "the newest spans keep their detail"
    assert sum(totals.calls for totals in record.totals.values()) == 19_999


def test_thinning_always_makes_room() -> None:
    spans = np.zeros(10, measurements.SPAN)
    spans["worker"] = np.arange(10)  # no two can be joined
    assert len(thin(spans)) < 10


def test_state_is_bounded_by_numbers_not_by_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "WORKERS_MAX", 8)
    monkeypatch.setattr(measurements, "MARKS_MAX", 16)
    monkeypatch.setattr(measurements, "MEMORY_STEPS_MAX", 16)
    clock, recorder, record = begun()
    for number in range(100):
        clock.note(record.offered, number + 1, since=0)
        clock.note(record.sent, f"w{number}", number, number, number + 1, attempt=0, bytes_in=0)
        clock.note(record.returned, f"w{number}", Results(number, number, number + 1, 0), 0)
        clock.note(record.completed, number + 1, 1)
        clock.note(recorder.grown, f"w{number}", 2**number)
        recorder.mark(f"worker w{number} is lost")
    assert recorder.workers == [f"w{n}" for n in range(7)] + ["others"]
    assert len(record.totals) == 8
    assert record.totals[7].calls == 93
    assert len(recorder.memory) == 16
    assert len(recorder.marks) == 16
    assert recorder.marks[-1].text == "worker w99 is lost"
    assert len(record._offers) <= measurements._OFFERS_KEPT + 1
    assert recorder.open == {}


def test_idle_time_before_an_update_is_not_input() -> None:
    clock, _, record = begun()
    clock.note(record.offered, 1, since=0)
    clock.note(record.sent, "w0", 1, 0, 1, attempt=0, bytes_in=0)
    clock.at(100)
    clock.note(record.returned, "w0", Results(1, 0, 1, 100), 0)
    clock.at(400)  # read from 50 to 150, then held back until 400
    clock.note(record.offered, 2, since=50, held_ns=250)
    clock.at(430)
    clock.note(
        record.sent, "w0", 2, 1, 2, attempt=0, bytes_in=0, asked=410
    )  # the driver read its data for 20
    totals = record.totals[0]
    assert (totals.input_wait_ns, totals.stage_wait_ns, totals.driver_wait_ns) == (50 + 20, 250, 10)


def test_what_the_worker_measured_is_added() -> None:
    clock = Clock()
    recorder = clock.recorder
    record = recorder.begin_pass("a -> b", ["a", "b"], 1, 0)
    clock.note(record.sent, "w0", 1, 0, 2, attempt=0, bytes_in=0)
    clock.at(100)
    clock.note(record.returned, "w0", Results(1, 0, 1, 100, 30, (40, 20), 5_000), 0)
    clock.at(200)
    clock.note(record.returned, "w0", Results(1, 1, 2, 100, 2**62, (40, 120), 4_000), 0)
    assert record.totals[0].reading_ns == 30 + 200, "not more than the time since it was sent"
    assert record.stages_ns == [40 + 25, 20 + 75], "their sum is the time of the worker at most"
    assert recorder.memory == [(100, 0, 5_000)]


def test_calls_that_fail_keep_their_worker_busy() -> None:
    clock, _, record = begun()
    clock.note(record.sent, "w0", 1, 0, 2, attempt=0, bytes_in=0)
    clock.note(record.sent, "w0", 2, 2, 3, attempt=0, bytes_in=0)
    clock.at(100)
    clock.note(record.raised, "w0", failed(1, 0))
    clock.at(150)
    clock.note(record.ended, "w0", 1, SpanEnd.CANCELLED)
    clock.at(400)
    record.recorder.left("w0")
    assert record.totals[0].busy_ns == 400


def test_trials_count_apart_from_calls() -> None:
    clock, _, record = begun()
    clock.note(record.sent, "w0", 1, 0, 1, attempt=1, bytes_in=0, is_trial=True)
    clock.note(record.sent, "w0", 2, 0, 1, attempt=2, bytes_in=0, is_trial=True)
    clock.at(100)
    clock.note(record.returned, "w0", Results(1, 0, 1, 100), 7)
    clock.at(150)
    clock.note(record.raised, "w0", failed(2, 0))
    totals = record.totals[0]
    assert (totals.calls, totals.failed, totals.trials) == (0, 0, 2)
    assert (totals.busy_ns, totals.bytes_out, record.durations.quantile_s(0.5)) == (150, 7, 0.0)


def test_aggregates_of_many_calls_are_exact_and_spans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million calls in messages of 1,000."""
    monkeypatch.setattr(measurements, "SPANS_MAX", 2**11)
    clock, recorder, record = begun()
    for number in range(10_000):
        clock.note(record.sent, "w0", number, 1000 * number, 1000 * number + 1000, attempt=0, bytes_in=3)
        clock.at(10 * number + 7)
        clock.note(record.returned, "w0", Results(number, 1000 * number, 1000 * number + 1000, 5), 2)
    totals = record.totals[0]
    assert (totals.calls, totals.bytes_in, totals.bytes_out) == (10_000_000, 30_000, 20_000)
    assert recorder.spans["calls"].sum() == 10_000_000
    assert len(recorder.spans) <= 2**11
    assert measurements.SPAN.itemsize * 2**17 < 16 * 2**20, (
        "the file is below 64 MiB, before it is compressed"
    )


def test_the_longest_work_of_the_driver_is_kept() -> None:
    clock, recorder, _ = begun()
    for n in range(3 * measurements.DRIVER_SPANS_MAX):
        clock.at(1_000_000 * n)
        recorder.driver_span(DriverWork.FOLD, 1_000_000 * n - (50_000 if n % 1000 == 0 else 10), "x")
    kept = recorder.driver
    assert len(kept) <= measurements.DRIVER_SPANS_MAX
    assert [each.ended for each in kept] == sorted(each.ended for each in kept)
    assert sum(each.duration > 10 for each in kept) == len(range(0, 3 * measurements.DRIVER_SPANS_MAX, 1000))


def test_what_is_recorded_later_has_the_time_at_which_it_happened() -> None:
    clock, recorder, record = begun()
    clock.at(100)
    recorder.later(record.sent, "w0", 1, 0, 1, 0, 0, 100, False, False)
    clock.at(300)
    recorder.later(record.returned, "w0", Results(1, 0, 1, 150), 0)
    clock.at(900)
    assert not recorder.open
    recorder.settle()
    (span,) = recorder.spans
    assert [int(span[name]) for name in ("sent", "started", "finished")] == [100, 150, 300]
    assert recorder.now() == 900


# The number of Python calls that measuring a lease makes in the driver, from its offer to its completed step, with what
# is derived from it later. It is the same on every machine, while the time depends on the load.
PYTHON_CALLS_MAX = 12
NOTING_CALLS_MAX = 4.5


def test_measuring_a_lease_makes_a_limited_number_of_python_calls() -> None:
    _, recorder, record = begun()
    results = [Results(lease, lease, lease + 1, 5, memory_bytes=1) for lease in range(1024)]

    def measure(leases: range) -> float:
        with PythonCalls() as counted:
            for lease in leases:
                recorder.later(record.offered, lease + 1, 0, 0)
                recorder.later(record.sent, "w0", lease, lease, lease + 1, 0, 8, 0, False, False)
                recorder.later(record.returned, "w0", results[lease], 8)
                recorder.later(record.completed, lease + 1, 1)
        return counted.made / len(leases)

    noted = measurements._LATER_MAX // 4 - 1  # the next ones are recorded with them
    clock_calls = 4  # of the tests' clock; the real one is no Python function
    assert measure(range(noted)) - clock_calls <= NOTING_CALLS_MAX
    assert measure(range(noted, 1024)) - clock_calls <= PYTHON_CALLS_MAX
    recorder.settle()
    assert (record.totals[0].calls, len(recorder.spans)) == (1024, 1024)
