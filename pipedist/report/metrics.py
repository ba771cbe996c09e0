"""Metrics of a run in the text format of Prometheus.

Names follow the conventions of Prometheus: base units, and `_total` for counters. They are those that an exporter of
OpenTelemetry makes of the names in `pipedist.runs.telemetry`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipedist.runs.telemetry import DRIVER_BUSY, STAGE_COUNTERS, WORKER_BUSY, WORKER_MEMORY

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_UNITS = {"s": "_seconds", "By": "_bytes"}


def _name_of(name: str, unit: str) -> str:
    """Return the name for Prometheus of one of OpenTelemetry, as its exporters write it."""
    return name.replace(".", "_") + _UNITS.get(unit, "")


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
    names = sorted({stage["name"] for stage in process.get("stages", ())})  # of several passes, perhaps
    for field, name, unit, text in STAGE_COUNTERS:
        counter = CounterMetricFamily(_name_of(name, unit), text, labels=["stage"])
        for stage in names:
            same = (each[field] for each in process["stages"] if each["name"] == stage)
            counter.add_metric([stage], sum(same))
        yield counter
    memory = GaugeMetricFamily(_name_of(*WORKER_MEMORY[:2]), WORKER_MEMORY[2], labels=["worker"])
    busy = CounterMetricFamily(_name_of(*WORKER_BUSY[:2]), WORKER_BUSY[2], labels=["worker"])
    for worker in process.get("workers", ()):
        memory.add_metric([worker["name"]], worker["memory_bytes"])
        busy.add_metric([worker["name"]], worker["busy_s"])
    yield memory
    yield busy
    driver = CounterMetricFamily(_name_of(*DRIVER_BUSY[:2]), DRIVER_BUSY[2])
    driver.add_metric([], process.get("driver_busy_s", 0.0))
    yield driver
