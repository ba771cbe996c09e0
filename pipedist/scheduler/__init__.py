"""The scheduler: a state machine that assigns calls to workers, without I/O, clock or randomness.

Entry points: `Scheduler.handle(event, now)`, which returns commands, and `Scheduler.deadline()`, the time of
the next `Tick`. Its code runs in the driver's process; the only async driver is `pipedist.coordinator`. The
same machine runs in scenario tests and in simulations.
"""

from pipedist.scheduler.commands import Command
from pipedist.scheduler.events import Event
from pipedist.scheduler.machine import Scheduler
from pipedist.scheduler.settings import PassSettings, SchedulerLimits

__all__ = ["Command", "Event", "PassSettings", "Scheduler", "SchedulerLimits"]
