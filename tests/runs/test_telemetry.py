"""Spans and metrics with OpenTelemetry's own SDK."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import pipedist
from pipedist.report import collect
from pipedist.report.metrics import exposition
from pipedist.runs.identity import digest
from pipedist.runs.telemetry import exporters, is_wanted, open_providers
from pipedist.spec import load
from tests.report.jobs import finished

RANGE = {
    "pipedist": 1,
    "name": "small",
    "dataset": {"range": 40, "batch": 2},
    "stages": {"y": {"run": "tests.runs.functions:fails_on_13"}, "out": {"gather": 0, "of": "y"}},
}


class Exported:
    """What a program's providers got."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meters = MeterProvider([self._reader])

    def spans(self, name: str) -> list[ReadableSpan]:
        return [each for each in self._spans.get_finished_spans() if each.name == name]

    def metrics(self) -> dict[str, Any]:
        data = self._reader.get_metrics_data()
        assert data is not None
        (resource,) = data.resource_metrics
        (scope,) = resource.scope_metrics
        return {each.name: each for each in scope.metrics}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    """The providers of this program; those of the process can be set only once."""
    found = Exported()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: found.tracers)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: found.meters)
    return found


def named(event: Any) -> tuple[str, Any]:
    return event.name, event.attributes.get("pipedist.call")


def calls_of(event: Any) -> list[tuple[int, int]]:
    """Return the step and replica of each call of an event, with two replicas."""
    _, step, replica = event.attributes["pipedist.call"].split("/")
    first = int(step) * 2 + int(replica)
    return [divmod(call, 2) for call in range(first, first + event.attributes["pipedist.calls"])]


def test_a_run_has_spans_and_metrics(exported: Exported, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with exported.tracers.get_tracer("program").start_as_current_span("mine") as mine:
        result = finished(path)
    (run,) = exported.spans("pipedist.run")
    (pass_,) = exported.spans("pipedist.pass")
    assert run.parent is not None
    assert run.context is not None
    assert run.parent.span_id == mine.get_span_context().span_id
    assert pass_.parent == run.context
    assert run.attributes is not None
    assert pass_.attributes is not None
    assert dict(run.attributes) == {
        "pipedist.run.name": "job", "pipedist.run.id": result.run_id, "pipedist.workers": 2,
        "pipedist.spec.digest": run.attributes["pipedist.spec.digest"], "pipedist.elements": 40,
        "pipedist.committed": 39, "pipedist.quarantined": 1, "pipedist.lost": 0,
    }  # fmt: skip
    assert run.status.status_code is StatusCode.UNSET
    assert any("died: signal 9" in event.name for event in run.events)
    assert pass_.attributes["pipedist.stage"] == "parts -> losses"
    assert ("call failed", "parts/1/1") in map(named, pass_.events)
    lost = [call for event in pass_.events if event.name == "call lost" for call in calls_of(event)]
    assert (1, 0) in lost, "with those before it that were not reported yet"
    assert None not in (run.start_time, run.end_time, pass_.start_time, pass_.end_time)
    assert run.start_time < pass_.start_time < pass_.end_time < run.end_time  # type: ignore[operator]

    found = exported.metrics()
    (stage,) = result.timings.stages
    for name, total in (
        ("pipedist.calls", stage.calls),
        ("pipedist.failed_calls", stage.failed),
        ("pipedist.elements", 40),
        ("pipedist.busy", stage.busy_s),
        ("pipedist.received", stage.bytes_out),
    ):
        (point,) = found[name].data.data_points
        assert point.value == pytest.approx(total), name
        assert point.attributes == {"pipedist.run.name": "job", "pipedist.stage": "parts -> losses"}
    (durations,) = found["pipedist.call.duration"].data.data_points
    assert 0 < durations.count <= stage.calls
    assert durations.max < 60

    units = {"s": "_seconds", "By": "_bytes"}
    families = set(re.findall(r"# TYPE (\S+?)(?:_total)? ", exposition(collect(path))))
    names = {name.replace(".", "_") + units.get(each.unit, "") for name, each in found.items()}
    assert names - families <= {"pipedist_call_duration_seconds", "pipedist_worker_memory_max_bytes"}
    assert families - names <= {
        "pipedist_run_state", "pipedist_run_seconds", "pipedist_retries", "pipedist_reading_seconds",
        "pipedist_worker_memory_max_bytes",
    }, "and those of other runs and the server"  # fmt: skip


@pytest.mark.asyncio
async def test_counters_of_two_runs_add_up(exported: Exported) -> None:
    spec = RANGE | {"dataset": {"range": 10, "batch": 2}}
    async with pipedist.LocalCluster(workers=1) as cluster:
        for _ in range(2):
            async with pipedist.open(spec, cluster=cluster) as run:
                await run.results()
    (point,) = exported.metrics()["pipedist.elements"].data.data_points
    assert point.value == 20
    assert len(exported.spans("pipedist.run")) == 2


def test_the_span_of_a_failed_run_has_its_error(exported: Exported) -> None:
    with pytest.raises(pipedist.CallError):
        pipedist.run(RANGE, workers=1)
    (run,) = exported.spans("pipedist.run")
    assert run.status.status_code is StatusCode.ERROR
    assert "KeyError: 'thirteen'" in str(run.status.description)
    assert [event.name for event in run.events if event.name == "exception"] == ["exception"]
    assert run.attributes is not None
    assert run.attributes["pipedist.spec.digest"] == digest(load(RANGE))
    (pass_,) = exported.spans("pipedist.pass")
    assert ("call failed", "y/6/0") in map(named, pass_.events)


def test_a_program_may_have_a_provider_of_spans_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tracers = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracers)
    assert is_wanted()
    opened = open_providers()
    assert opened is not None
    (spans, meters), is_own = opened
    assert (spans, is_own) == (tracers, False)
    assert isinstance(meters, metrics.NoOpMeterProvider), "a proxy would keep the instruments of each run"


@pytest.mark.parametrize(
    ("variables", "traces", "metrics"),
    [
        ({}, [], []),
        ({"OTEL_SERVICE_NAME": "x"}, [], []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}, ["otlp"], ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318"}, ["otlp"], []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_METRICS_EXPORTER": "none"}, ["otlp"], []),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", "otlp"], []),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "TRUE"}, [], []),
    ],
)
def test_the_variables_of_opentelemetry_choose_exporters(
    variables: dict[str, str], traces: list[str], metrics: list[str]
) -> None:
    assert exporters("traces", variables) == traces
    assert exporters("metrics", variables) == metrics


def test_a_program_without_a_provider_makes_no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    assert not is_wanted(), "although this test has imported the packages"


SCRIPT = """
import sys, pipedist
spec = {"pipedist": 1, "name": "small", "dataset": {"range": 4, "batch": 2},
        "stages": {"y": {"run": "tests.runs.functions:fails_on_13"}, "out": {"gather": 0, "of": "y"}}}
if __name__ == "__main__":
    pipedist.run(spec, workers=1)
    print("imported:", "opentelemetry" in sys.modules)
"""


def executed(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(SCRIPT)
    others = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**others, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_nothing_is_imported_without_the_variables(tmp_path: Path) -> None:
    done = executed(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "imported: False\n", "")


def test_the_variables_suffice(tmp_path: Path) -> None:
    """An exporter that is not installed changes nothing else."""
    done = executed(tmp_path, OTEL_TRACES_EXPORTER="console,missing", OTEL_METRICS_EXPORTER="console")
    assert done.returncode == 0, done.stderr
    assert '"name": "pipedist.run"' in done.stdout
    assert '"name": "pipedist.pass"' in done.stdout
    assert '"name": "pipedist.calls"' in done.stdout
    assert "imported: True" in done.stdout
    assert done.stderr.startswith("pipedist: no traces are exported to missing: it is not installed.")
