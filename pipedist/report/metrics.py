"""Metrics of a run in the text format of Prometheus.

Names follow the conventions of Prometheus: base units, and `_total` for counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STAGE = (
    ("calls", "pipedist_calls", "Calls that returned."),
    ("failed", "pipedist_failed_calls", "Attempts of calls that raised or exceeded their time limit."),
    ("repeated", "pipedist_repeated_calls", "Attempts of calls after the first."),
    ("elements", "pipedist_elements", "Elements of completed steps."),
    ("busy_s", "pipedist_busy_seconds", "Time that workers spent on calls."),
    ("reading_s", "pipedist_reading_seconds", "Time that workers spent reading shards."),
    ("bytes_in", "pipedist_sent_bytes", "Bytes sent to workers."),
    ("bytes_out", "pipedist_received_bytes", "Bytes of results."),
)


def exposition(data: dict[str, Any]) -> str:
    """Return the metrics of what `pipedist.report.collect` returned, as text.

    Raises:
        ImportError: prometheus_client is not installed; `pipedist[live]` has it.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    class Run:
        def collect(self) -> Iterator[Metric]:
            return _metrics(data)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Run())
    return generate_latest(registry).decode()


def _metrics(data: dict[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    process: dict[str, Any] = data["processes"][-1] if data["processes"] else {}
    state = GaugeMetricFamily(
        "pipedist_run_state", "1 for the state of the run.", labels=["run", "name", "state"]
    )
    state.add_metric([data["run"], data["name"], data["state"]], 1)
    yield state
    seconds = GaugeMetricFamily("pipedist_run_seconds", "Time since this process began the run.")
    seconds.add_metric([], process.get("seconds", 0.0))
    yield seconds
    for field, name, text in _STAGE:
        counter = CounterMetricFamily(name, text, labels=["stage"])
        for stage in process.get("stages", ()):
            counter.add_metric([stage["name"]], stage[field])
        yield counter
    memory = GaugeMetricFamily(
        "pipedist_worker_memory_max_bytes", "Largest memory of a worker.", labels=["worker"]
    )
    busy = CounterMetricFamily(
        "pipedist_worker_busy_seconds", "Time that a worker spent on calls.", labels=["worker"]
    )
    for worker in process.get("workers", ()):
        memory.add_metric([worker["name"]], worker["memory_bytes"])
        busy.add_metric([worker["name"]], worker["busy_s"])
    yield memory
    yield busy
    driver = CounterMetricFamily("pipedist_driver_busy_seconds", "Processor time of the driver's event loop.")
    driver.add_metric([], process.get("driver_busy_s", 0.0))
    yield driver
