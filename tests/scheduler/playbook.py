"""The public playbook, and what the scheduler's own tests need beside it."""

from __future__ import annotations

from collections.abc import Iterable

from pipedist.scheduler import Command
from pipedist.scheduler import commands as cmd
from pipedist.testing.playbook import Playbook, PlaybookError

__all__ = ["Playbook", "PlaybookError", "assigns"]


def assigns(commands: Iterable[Command]) -> list[cmd.SendAssign]:
    """Return the leases among some commands."""
    return [c for c in commands if isinstance(c, cmd.SendAssign)]
