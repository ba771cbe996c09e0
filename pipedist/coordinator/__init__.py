"""The only async driver of the scheduler, and the passes that it runs."""

from pipedist.coordinator.driver import Coordinator, LogSink
from pipedist.coordinator.handle import Arrival, PassHandle, StepResult
from pipedist.coordinator.store import Slots

__all__ = ["Arrival", "Coordinator", "LogSink", "PassHandle", "Slots", "StepResult"]
