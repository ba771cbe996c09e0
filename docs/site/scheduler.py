"""Tables of the scheduler, generated from its code."""

from __future__ import annotations

import enum
import inspect
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


def transitions(title: str, rows: Mapping[tuple[State, str], State], begins: State) -> str:
    """Return a transition table as Markdown.

    Args:
        begins: the initial state.
    """
    lines = [
        f"{title} begins in state `{begins.value}`.",
        "",
        "| state | event | next state |",
        "|---|---|---|",
    ]
    lines += [f"| {state.value} | {what} | {after.value} |" for (state, what), after in rows.items()]
    return "\n".join(lines)


def table(title: str, classes: Sequence[type[Struct]]) -> str:
    """Return classes as a markdown table: name, fields, and the first line of the docstring."""
    lines = [f"| {title} | carries | meaning |", "|---|---|---|"]
    for cls in classes:
        fields = ", ".join(cls.__struct_fields__)
        meaning = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{cls.__name__}` | {fields or '-'} | {meaning} |")
    return "\n".join(lines)


def tables() -> str:
    """Return the generated part of the page about the scheduler."""
    return "\n\n".join(
        [
            "### A worker",
            transitions("A worker", WORKER_TRANSITIONS, WorkerState.STARTING),
            "### A pass",
            transitions("A pass", PASS_TRANSITIONS, PassState.OPEN),
            "### A gang",
            transitions("A gang", GANG_TRANSITIONS, GangState.RUNNING),
            "### Events",
            table("event", events.Event.__subclasses__()),
            "### Commands",
            table("command", commands.Command.__subclasses__()),
        ]
    )
