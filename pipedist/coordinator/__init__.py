"""The coordinator, the only async driver of the scheduler.

Entry points: `Coordinator` (`coordinator.py`) drives the scheduler over a router and a launcher; its `open_pass`
returns a `PassHandle` (`pass_handle.py`), through which steps go in and results come out. All of its code runs
in the driver process, on one event loop. Messages from workers come in through `inbound.py`; the scheduler's
commands are executed in `outbound.py`; `worker_pool.py` decides which workers are members.
"""

from pipedist.coordinator.coordinator import Coordinator
from pipedist.coordinator.inbound import LogSink
from pipedist.coordinator.pass_handle import Arrival, Batch, PassHandle
from pipedist.coordinator.results import Chunk, GroupedByStep, Slots

__all__ = ["Arrival", "Batch", "Chunk", "Coordinator", "GroupedByStep", "LogSink", "PassHandle", "Slots"]
