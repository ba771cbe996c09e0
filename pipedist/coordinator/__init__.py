"""The only async driver of the scheduler, and the passes that it runs."""

from pipedist.coordinator.coordinator import Coordinator
from pipedist.coordinator.log_sinks import LogSink
from pipedist.coordinator.pass_handle import Arrival, Batch, PassHandle
from pipedist.coordinator.store import Chunk, Slots

__all__ = ["Arrival", "Batch", "Chunk", "Coordinator", "LogSink", "PassHandle", "Slots"]
