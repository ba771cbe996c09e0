"""The scheduler: a state machine without I/O, clock or randomness.

`Scheduler.handle(event, now)` returns commands; `Scheduler.deadline()` says when to call
again though nothing happened. The one async driver is `pipedist.coordinator`.
"""

from pipedist.scheduler.commands import Command
from pipedist.scheduler.events import Event
from pipedist.scheduler.machine import Scheduler
from pipedist.scheduler.settings import Limits, PassSettings

__all__ = ["Command", "Event", "Limits", "PassSettings", "Scheduler"]
