"""What a run gives back: results, ledger, progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedist.core.types import Tree


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every element went; elements = committed + quarantined + lost.

    Args:
        elements: distinct ids issued, over all datasets.
        committed: done in every stage that reads them.
        quarantined: set aside, in any stage.
        lost: the rest; 0 for a run that finished.
    """

    elements: int = 0
    committed: int = 0
    quarantined: int = 0
    lost: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the ledger as it stands in the results document."""
        return {
            "elements": self.elements,
            "committed": self.committed,
            "quarantined": self.quarantined,
            "lost": self.lost,
        }


@dataclass(frozen=True, slots=True)
class StageCount:
    """How far one pass is.

    Args:
        name: the stages that its calls execute.
        dataset: whose elements they are.
        elements_done, elements_total: visible, and in all (None: not known yet).
        steps_done, steps_total: the same in steps.
        calls_done: calls that came back.
    """

    name: str
    dataset: str
    elements_done: int
    elements_total: int | None
    steps_done: int
    steps_total: int | None
    calls_done: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Args:
        passes: those of the current phase.
        phase, phases: the current one, from 0, and their number.
        workers_ready: workers that have joined and are alive.
        elapsed_s: since the first phase began.
    """

    passes: tuple[StageCount, ...]
    phase: int
    phases: int
    workers_ready: int
    elapsed_s: float


class NoSuchValue(KeyError):
    """A result has no value of that name; a KeyError whose text is readable."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Result(Mapping[str, Tree]):
    """The finished values of a run, by stage: a read-only mapping.

    A reduce or gather stage has one value, or a list of them (`per: step`, `per: epoch`). A
    gather that was streamed into a file is given as the file's path.

    Args:
        name: the spec's name.
        run_id: the run's id.
        by_stage: the values.
        files: the files written, by stage, absolute.
        ledger: where every element went.
        timings: seconds, by part of the run.
        notice: what the user should know about the output folder, or "".
        restored: the document of a run that was finished before, and was not run again.
        quarantined: of each element that was set aside its id, the stage that can't process it, and why.
        quarantine_file: where they are listed with what they are, or None.
    """

    name: str
    run_id: str
    by_stage: Mapping[str, Tree]
    files: Mapping[str, Path]
    ledger: Ledger
    timings: Mapping[str, float]
    notice: str = ""
    restored: Mapping[str, Any] | None = None
    quarantined: Sequence[Mapping[str, Any]] = ()
    quarantine_file: Path | None = None

    @property
    def document(self) -> Any:
        """The results document, as `pipedist run --json` prints it; made anew at each look.

        Raises:
            OutputError: a value has no JSON form.
        """
        if self.restored is not None:
            return self.restored
        from pipedist.outputs.document import run_document  # few ask for it

        return run_document(
            run_id=self.run_id,
            name=self.name,
            results=self.by_stage,
            files=self.files,
            ledger=self.ledger.to_json(),
            timings={name: round(seconds, 6) for name, seconds in self.timings.items()},
            quarantined=self.quarantined,
        )

    def __getitem__(self, stage: str) -> Tree:
        """Return a stage's value.

        Raises:
            KeyError: it has none; the text says which stages have.
        """
        try:
            return self.by_stage[stage]
        except KeyError:
            raise NoSuchValue(
                f"no value {stage!r}; there are: {', '.join(self.by_stage) or 'none'}. A run stage has no "
                "single value: stream it with `async for step in run.steps(NAME)`, or gather it"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_stage)

    def __len__(self) -> int:
        return len(self.by_stage)
