"""The diagrams and tables of docs/scheduler.md are generated from the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipedist.scheduler.transitions import GANG_TRANSITIONS, PASS_TRANSITIONS, WORKER_TRANSITIONS
from tests.scheduler.diagram import drawn

PAGE = Path(__file__).parents[2] / "docs" / "scheduler.md"
BEGIN, END = "<!-- drawn: python -m tests.scheduler.diagram -->\n", "<!-- end of what is drawn -->\n"


def test_the_page_is_generated_from_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0]
    assert shown == drawn() + "\n", f"put the output of `python -m tests.scheduler.diagram` into {PAGE}"


def test_every_transition_is_drawn() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "tests.scheduler.diagram"], capture_output=True, text=True, check=True
    ).stdout
    assert out.count("-->") == len(WORKER_TRANSITIONS) + len(PASS_TRANSITIONS) + len(GANG_TRANSITIONS) + 3
