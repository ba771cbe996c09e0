"""Generate diagrams and tables of the scheduler from its code: `python -m tests.scheduler.diagram`.

`docs/scheduler.md` contains the output, and a test compares the two.
"""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from pipedist.scheduler import commands, events
from pipedist.scheduler.transitions import (
    GANG_TRANSITIONS,
    PASS_TRANSITIONS,
    WORKER_TRANSITIONS,
    GangState,
    PassState,
    WorkerState,
)

State = TypeVar("State", bound=enum.Enum)


def diagram(transitions: Mapping[tuple[State, str], State], begins: State) -> str:
    """Return a transition table as a mermaid state diagram.

    Args:
        begins: the initial state.
    """
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {begins.value}"]
    lines += [f"    {state.value} --> {after.value}: {what}" for (state, what), after in transitions.items()]
    return "\n".join([*lines, "```"])


def table(title: str, classes: Sequence[type[Struct]]) -> str:
    """Return classes as a markdown table: name, fields, and the first line of the docstring."""
    lines = [f"| {title} | carries | meaning |", "|---|---|---|"]
    for cls in classes:
        fields = ", ".join(cls.__struct_fields__)
        meaning = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{cls.__name__}` | {fields or '-'} | {meaning} |")
    return "\n".join(lines)


def drawn() -> str:
    """Return the generated part of the page."""
    return "\n\n".join(
        [
            "### A worker",
            diagram(WORKER_TRANSITIONS, WorkerState.STARTING),
            "### A pass",
            diagram(PASS_TRANSITIONS, PassState.OPEN),
            "### A gang",
            diagram(GANG_TRANSITIONS, GangState.RUNNING),
            "### Events",
            table("event", events.Event.__subclasses__()),
            "### Commands",
            table("command", commands.Command.__subclasses__()),
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(drawn() + "\n")
