"""Spans and metrics of a run for OpenTelemetry.

Rules
-----
* Nothing of OpenTelemetry is imported, unless its variables ask for an exporter, or the program has set a provider.
* A span is a run or a pass, not a call: a run may have millions. Failed attempts and deaths are events of these spans.
  An event names the first call and how many it stands for: with a worker, all calls of its lease are lost.
* Everything is taken from the recorder of the run, on the event loop; only the exporters have threads.
* An exporter that fails or is slow never changes a run, and delays its end by at most `FLUSH_S_MAX`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from threading import Thread
from typing import TYPE_CHECKING, Any

from pipedist.coordinator.measurements import PassRecord
from pipedist.coordinator.spans import SpanEnd
from pipedist.runs.timings import Measurements, StageTimings

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

UPDATE_S = 5.0  # between two updates of the metrics
FLUSH_S_MAX = 5.0  # for the exporters, when a run has ended
EVENTS_MAX = 128  # maximum number of events in a span, as in OpenTelemetry

STAGE_COUNTERS = (
    ("calls", "pipedist.calls", "{call}", "Calls that returned."),
    (
        "failed",
        "pipedist.failed_calls",
        "{call}",
        "Attempts of calls that raised or exceeded their time limit.",
    ),
    ("retries", "pipedist.retries", "{call}", "Attempts of calls that did not count."),
    ("elements", "pipedist.elements", "{element}", "Elements of completed steps."),
    ("busy_s", "pipedist.busy", "s", "Time that workers spent on calls."),
    ("reading_s", "pipedist.reading", "s", "Time that workers spent reading shards."),
    ("bytes_in", "pipedist.sent", "By", "Bytes sent to workers."),
    ("bytes_out", "pipedist.received", "By", "Bytes of results."),
)
WORKER_BUSY = ("pipedist.worker.busy", "s", "Time that a worker spent on calls.")
WORKER_MEMORY = ("pipedist.worker.memory_max", "By", "Largest memory of a worker.")
DRIVER_BUSY = ("pipedist.driver.busy", "s", "Processor time of the driver's event loop.")
CALL_DURATION = ("pipedist.call.duration", "s", "Duration of a call; one value for each message of results.")

_BOUNDS_S = [0.0001, 0.001, 0.01, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600]
_SIGNALS = ("traces", "metrics")

Providers = tuple["TracerProvider", "MeterProvider"]


def exporters(signal: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the exporters that OpenTelemetry's variables ask for.

    Args:
        signal: "traces" or "metrics".
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return []
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    default = "otlp" if any(environment.get(name) for name in endpoints) else ""
    names = environment.get(f"OTEL_{signal.upper()}_EXPORTER") or default
    return [name for each in names.split(",") if (name := each.strip()) not in ("", "none")]


def _given() -> tuple[TracerProvider | None, MeterProvider | None]:
    """Return the providers that the program has set; they are proxies otherwise."""
    trace, metrics = (sys.modules.get(f"opentelemetry.{name}") for name in ("trace", "metrics"))
    tracers = None if trace is None else trace.get_tracer_provider()
    meters = None if metrics is None else metrics.get_meter_provider()
    return (
        None if "Proxy" in type(tracers).__name__ else tracers,
        None if "Proxy" in type(meters).__name__ else meters,
    )


def is_wanted() -> bool:
    """Return whether a run makes spans and metrics."""
    return _given() != (None, None) or any(map(exporters, _SIGNALS))


def open_providers() -> tuple[Providers, bool] | None:
    """Return the program's providers, or new ones as the variables say, and whether they are new.

    Return None if OpenTelemetry is not installed. It imports packages, which takes a while.
    """
    try:
        from opentelemetry import metrics, trace

        given = _given()
        if given != (None, None):  # a proxy would keep the instruments of each run
            return (given[0] or trace.NoOpTracerProvider(), given[1] or metrics.NoOpMeterProvider()), False
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import (
            MetricExporter,
            MetricReader,
            PeriodicExportingMetricReader,
        )
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        return None
    tracers = TracerProvider(shutdown_on_exit=False)
    for exporter in _loaded("traces"):
        tracers.add_span_processor(BatchSpanProcessor(exporter))
    readers: list[MetricReader] = [
        PeriodicExportingMetricReader(each) if isinstance(each, MetricExporter) else each
        for each in _loaded("metrics")
    ]
    return (tracers, MeterProvider(readers, shutdown_on_exit=False)), True


def _loaded(signal: str) -> Iterator[Any]:
    """Yield the exporters of a signal that are installed."""
    import logging
    from importlib.metadata import entry_points

    for name in exporters(signal):
        if name == "otlp":
            variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
            protocol = next((os.environ[each] for each in variables if os.environ.get(each)), "http/protobuf")
            name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
        try:
            (entry,) = entry_points(group=f"opentelemetry_{signal}_exporter", name=name)
            yield entry.load()()
        except Exception as error:  # of a package that is missing or not configured
            cause = "it is not installed" if isinstance(error, ValueError) else str(error)
            text = (
                "pipedist: no %s are exported to %s: %s. The extra pipedist[otel] has the exporters of OTLP"
            )
            logging.getLogger("pipedist.telemetry").warning(text, signal, name, cause)


class Telemetry:
    """The spans and metrics of one run; its methods are called on the event loop.

    Args:
        attributes: of the span of the run.
    """

    def __init__(
        self,
        providers: Providers,
        *,
        is_own: bool,
        name: str,
        attributes: Mapping[str, Any],
        measured: Measurements,
    ) -> None:
        tracers, meters = providers
        self._providers = providers if is_own else ()
        self._measured = measured
        self._name = name
        self._tracer = tracers.get_tracer("pipedist")
        self._span: Span = self._tracer.start_span(
            "pipedist.run", attributes={"pipedist.run.name": name, **attributes}
        )
        meter = meters.get_meter("pipedist")
        counters = [*(each[1:] for each in STAGE_COUNTERS), WORKER_BUSY, DRIVER_BUSY]
        self._counters = {each[0]: meter.create_counter(*each) for each in counters}
        self._memory = meter.create_gauge(*WORKER_MEMORY)
        self._durations = meter.create_histogram(
            *CALL_DURATION, explicit_bucket_boundaries_advisory=_BOUNDS_S
        )
        self._counted: dict[tuple[str, str], float] = {}
        measured.recorder.on_returned = self._returned

    def _labels(self, **more: str) -> dict[str, str]:
        return {"pipedist.run.name": self._name} | {f"pipedist.{key}": value for key, value in more.items()}

    def _returned(self, stage: str, duration_s: float) -> None:
        self._durations.record(duration_s, self._labels(stage=stage))

    def _count(self, name: str, total: float, **labels: str) -> None:
        """Add to a counter what is new since the latest update."""
        key = name, "".join(labels.values())
        new = total - self._counted.get(key, 0)
        if new > 0:
            self._counted[key] = total
            self._counters[name].add(new, self._labels(**labels))

    def update(self) -> None:
        """Update the metrics."""
        for stage, totals in by_name(self._measured.stages()).items():
            for (_, name, _, _), total in zip(STAGE_COUNTERS, totals, strict=True):
                self._count(name, total, stage=stage)
        for worker in self._measured.workers():
            self._count(WORKER_BUSY[0], worker.busy_s, worker=worker.name)
            if worker.memory_bytes:
                self._memory.set(worker.memory_bytes, self._labels(worker=worker.name))
        self._count(DRIVER_BUSY[0], self._measured.driver_busy_s())

    def end(self, error: BaseException | None, ledger: Mapping[str, int]) -> None:
        """End the span of the run, and make those of its passes."""
        from opentelemetry.trace import Status, StatusCode

        recorder = self._measured.recorder
        recorder.settle()
        recorder.on_returned = None
        self.update()
        for mark in recorder.marks[:EVENTS_MAX]:
            self._span.add_event(mark.text, timestamp=self._time(mark.at_ns))
        for number, record in enumerate(recorder.passes):
            self._add_pass(number, record)
        self._span.set_attributes({f"pipedist.{name}": count for name, count in ledger.items()})
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._span.end()

    def _time(self, ns: int) -> int:
        """Return the time since the epoch, in nanoseconds."""
        return int(self._measured.recorder.began_at * 1e9) + ns

    def _add_pass(self, number: int, record: PassRecord) -> None:
        from opentelemetry.trace import set_span_in_context

        totals = [each for each in record.totals.values() if each.first_ns >= 0]
        if not totals:
            return
        span = self._tracer.start_span(
            "pipedist.pass",
            context=set_span_in_context(self._span),
            start_time=self._time(min(each.first_ns for each in totals)),
            attributes={
                "pipedist.stage": record.name,
                "pipedist.phase": record.phase,
                "pipedist.calls": sum(each.calls for each in totals),
                "pipedist.elements": record.elements,
            },
        )
        recorder = self._measured.recorder
        spans = recorder.spans
        failed = [SpanEnd.FAILED, SpanEnd.TIMED_OUT, SpanEnd.LOST]
        chosen = (spans["pass"] == number) & (spans["outcome"][:, None] == failed).any(axis=1)
        for each in spans[chosen][:EVENTS_MAX]:
            step, replica = divmod(int(each["lo"]), record.replicas)
            span.add_event(
                f"call {SpanEnd(each['outcome']).name.lower().replace('_', ' ')}",
                {
                    "pipedist.call": f"{record.stages[0] if record.stages else record.name}/{step}/{replica}",
                    "pipedist.calls": int(each["calls"]),
                    "pipedist.worker": recorder.workers[each["worker"]],
                    "pipedist.attempt": int(each["attempt"]) + 1,
                },
                self._time(int(each["finished"])),
            )
        span.end(self._time(max(each.last_ns for each in totals)))

    def close(self) -> None:
        """Export what is left, in at most `FLUSH_S_MAX`; it blocks."""

        def shut_down() -> None:
            for provider in self._providers:
                provider.shutdown()  # type: ignore[union-attr]

        if self._providers:
            thread = Thread(target=shut_down, name="OpenTelemetry's end", daemon=True)
            thread.start()
            thread.join(FLUSH_S_MAX)


def by_name(stages: list[StageTimings]) -> dict[str, list[float]]:
    """Return the values of `STAGE_COUNTERS` by name of the pass; passes of several phases may have the same one."""
    found: dict[str, list[float]] = {}
    for stage in stages:
        before = found.setdefault(stage.name, [0] * len(STAGE_COUNTERS))
        for place, (field, *_) in enumerate(STAGE_COUNTERS):
            before[place] += getattr(stage, field)
    return found
