"""Verifies a journal: from its records alone, and against what else says how the run ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from pipedist.errors import JournalError
from pipedist.journal.history import History, read_history


class Audit(Struct, frozen=True):
    """What a journal says, and what does not add up.

    Args:
        history: the journal; None where it can't be read at all.
        problems: what does not add up, with offsets; none: all elements are accounted for.
    """

    history: History | None
    problems: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the audit for people."""
        lines = []
        if self.history is not None:
            header = self.history.header
            lines.append(
                f"run {header.run} of {header.name}: {self.history.count:,} records, hash chain intact"
            )
            replicas = header.replicas
            for key, said in header.passes.items():
                found = self.history.passes.get(key)
                steps = 0 if found is None else found.steps
                state = "not begun" if found is None else "complete" if found.complete else "not complete"
                elements = 0 if found is None else found.elements
                lines.append(
                    f"  {said['name']} (of {said['dataset']}): {state}; calls [0, {steps * replicas:,}) in "
                    f"{steps:,} steps, {elements:,} elements"
                )
            ledger = self.history.ledger()
            shown = " + ".join(f"{ledger[name]:,} {name}" for name in ("committed", "quarantined", "lost"))
            over = "the run is over" if self.history.ended is not None else "the run is not over"
            lines.append(f"  {ledger['elements']:,} elements = {shown}; {over}")
            if self.history.torn:
                lines.append(
                    f"  {self.history.torn:,} bytes of a last record that was not finished: not counted"
                )
        lines += [f"WRONG: {problem}" for problem in self.problems]
        lines.append("it does not add up" if self.problems else "it adds up")
        return lines


def audit(folder: Path, *, finished: bool = False, ledger: Mapping[str, int] | None = None) -> Audit:
    """Verify a journal.

    Args:
        folder: that it is in.
        finished: the output folder says that the run is finished.
        ledger: that of its results document; None where there is none.

    Raises:
        UsageError: there is no journal, or it is another version's.
    """
    try:
        history = read_history(folder)
    except JournalError as error:
        return Audit(None, (str(error),))
    if history is None:
        return Audit(None, ("the journal has no whole record",))
    problems = list(history.problems)
    if finished and history.ended is None:
        problems.append(
            f"the run is finished, and its journal ends at offset {history.size} without saying so: records "
            "were removed from its end"
        )
    if finished and history.torn:
        problems.append(
            f"the run is finished, and {history.torn} bytes follow the journal's last good record"
        )
    if ledger is not None and dict(ledger) != history.ledger():
        problems.append(f"the results say {dict(ledger)}, and the journal's calls give {history.ledger()}")
    return Audit(history, tuple(problems))
