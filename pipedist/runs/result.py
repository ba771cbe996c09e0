"""Results, ledger and progress of a run, also of a finished run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from msgspec import Struct
from msgspec.structs import asdict

from pipedist.core import html
from pipedist.core.names import few, listed
from pipedist.core.types import Tree
from pipedist.errors import OutputError, UsageError
from pipedist.runs.quarantine import FILE as QUARANTINE
from pipedist.runs.timings import Timings, brief
from pipedist.spec import RunSpec, Spec, per_of

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

    from pipedist.outputs import FinishedRun
    from pipedist.outputs.summary import Records
    from pipedist.outputs.tables import Table

STAGES_SHOWN = 6  # in the short text of a result


class Ledger(Struct, frozen=True):
    """Counts of elements: elements = committed + quarantined + lost.

    Args:
        elements: distinct ids issued, over all datasets.
        committed: processed by every stage that reads them.
        quarantined: set aside in any stage.
        lost: all others; 0 for a finished run.

    Example:
        ledger = pipedist.run("spec.yaml").ledger
        assert ledger.elements == ledger.committed + ledger.quarantined + ledger.lost
    """

    elements: int = 0
    committed: int = 0
    quarantined: int = 0
    lost: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the ledger in the form of the results document."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        counts = self.to_json()
        return html.table(list(counts), [[f"{count:,}" for count in counts.values()]])


class StageCount(Struct, frozen=True):
    """Progress of one pass.

    Args:
        name: the stages that its calls execute.
        dataset: name of the dataset that it reads.
        elements_done, elements_total: elements of completed steps, and in total (None: not known yet).
        steps_done, steps_total: the same in steps.
        calls_done, calls_total: the same in calls: those that have returned, and those that a resumed run need not
            execute.
        calls_past: of the calls done, those that this process need not execute.
        elements_ahead: elements that are over in a stage with `per: element`, of calls that are not.
    """

    name: str
    dataset: str
    elements_done: int
    elements_total: int | None
    steps_done: int
    steps_total: int | None
    calls_done: int
    calls_total: int | None = None
    calls_past: int = 0
    elements_ahead: int = 0


class Progress(Struct, frozen=True):
    """Progress of a run.

    Args:
        passes: the passes of the current phase.
        phase, phases: the index of the current phase, from 0, and the number of phases.
        workers_ready: workers that have joined and are alive.
        elapsed_s: seconds since the first phase began.
        activity: the work on the results after the last call of the phase; before that, "".

    Example:
        if progress := run.progress():
            print(sum(each.calls_done for each in progress.passes), "calls,", progress.workers_ready, "workers")
    """

    passes: tuple[StageCount, ...]
    phase: int
    phases: int
    workers_ready: int
    elapsed_s: float
    activity: str = ""


class NoSuchValue(KeyError):
    """A KeyError with a readable text, for a name without a value."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Result(Mapping[str, Tree]):
    """The finished values of a run, by stage: a read-only mapping.

    A reduce or gather stage has one value, or a list of them (`per: step`, `per: epoch`). The value of a
    gather that was streamed into a file is the file's path, or a dict of paths if its parts have files; so is a value
    of more than 64 MiB, or a table by key, of a run that was finished before.

    Args:
        name: the spec's name.
        run_id: the run's id.
        by_stage: the values.
        files: absolute paths of the written files, by stage, or by STAGE/PATH for a part of its value.
        ledger: counts of elements.
        timings: seconds by part of the run, with details by stage and worker.
        retries: by stage, the number of attempts of calls that did not count, by reason: "error" (another attempt
            followed), "timeout", "death" (of the worker), "slow" (executed a second time beside the first, which took
            far longer than others). Trials of single elements for a quarantine are attempts too.
        resumed: by pass, the numbers of "steps" that an earlier process had committed, of "calls" of later steps that
            it had finished, and of "elements" of other calls: these were not executed again.
        notice: a message about the output folder for the user, or "".
        restored: the document of a finished run, if this one was not executed again.
        quarantined: id, failing stage and cause of each quarantined element.
        quarantine_file: the file that lists them with their inputs, or None.
        stored: references to the files of values that are too large for the document, by stage.
        pers: how often a stage has a value: run, epoch or step.
        tables: functions that return the columns of results by key, by stage.

    Example:
        result = pipedist.run("spec.yaml")
        result["total"]  # a value, or the path of its file
        result.ledger, result.timings, result.files
    """

    name: str
    run_id: str
    by_stage: Mapping[str, Tree]
    files: Mapping[str, Path]
    ledger: Ledger
    timings: Timings
    retries: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    resumed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    notice: str = ""
    restored: Mapping[str, Any] | None = None
    quarantined: Sequence[Mapping[str, Any]] = ()
    quarantine_file: Path | None = None
    stored: Mapping[str, Any] = field(default_factory=dict)
    pers: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)

    @property
    def document(self) -> Any:
        """The results document, as `pipedist run --json` prints it.

        Raises:
            OutputError: a value has no JSON form.
        """
        if self.restored is not None:
            return self.restored
        from pipedist.outputs.document import run_document  # rarely needed

        return run_document(
            run_id=self.run_id,
            name=self.name,
            results=self.by_stage,
            files=self.files,
            ledger=self.ledger.to_json(),
            timings={name: round(seconds, 6) for name, seconds in self.timings.items()},
            stored=self.stored,
            quarantined=self.quarantined,
            retries=self.retries,
            measurements=self.timings.details(),
            resumed=self.resumed,
        )

    def __getitem__(self, stage: str) -> Tree:
        """Return a stage's value.

        Raises:
            KeyError: the stage has none; the text lists the stages that have one.
        """
        try:
            return self.by_stage[stage]
        except KeyError:
            raise NoSuchValue(
                f"no value {stage!r}; available: {', '.join(self.by_stage) or 'none'}. A run stage has no "
                "single value: stream it with `async for step in run.steps(NAME)`, or gather it. A stage that feeds "
                "an update per step or epoch has values only with an output"
            ) from None

    @overload
    def frame(self, stage: str, *, library: Literal["pandas"] = "pandas") -> pandas.DataFrame: ...

    @overload
    def frame(self, stage: str, *, library: Literal["polars"]) -> polars.DataFrame: ...

    @overload
    def frame(self, stage: str, *, library: Literal["arrow"]) -> pyarrow.Table: ...

    def frame(self, stage: str, *, library: Literal["pandas", "polars", "arrow"] = "pandas") -> Any:
        """Return a stage's value as a DataFrame, also if it was written to a file.

        Args:
            stage: the stage, or STAGE/PATH for a part of its value: a file of `files`, or a key of a dict.
            library: that of the frame; `arrow`: a pyarrow Table.

        Returns:
            A column for each leaf path of the value, "value" if it is bare. A row for each index of axis 0, record of a
            list, key of a result by key or a counter, or step or epoch of a value per step or epoch. Numbers
            without an axis are one row.

        Raises:
            UsageError: the library is not installed, or the value is no table.
            KeyError: the stage has no value.

        Example:
            >>> result.frame("delays").groupby("carrier").mean()
            >>> result.frame("delays", library="polars")
        """
        from pipedist.outputs.dataframes import frame_of  # rarely needed

        name, _, part = stage.partition("/")
        value: Tree = self.files[stage] if stage in self.files and part else self[name]
        if part and not isinstance(value, Path):
            for key in part.split("/"):
                value = _child(value, key, stage)
        try:
            return frame_of(
                value, library, per=self.pers.get(name, "run"), table=None if part else self.tables.get(name)
            )
        except UsageError as error:
            raise UsageError(f"result.frame({stage!r}): {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_stage)

    def __len__(self) -> int:
        return len(self.by_stage)

    def __repr__(self) -> str:
        stages = few([*self.by_stage], STAGES_SHOWN)
        counts = ", ".join(f"{count:,} {kind}" for kind, count in self.ledger.to_json().items())
        return f"<Result of {self.name}: {stages or 'no values'}; {counts}>"

    def _repr_html_(self) -> str:
        """Return tables for notebooks: the first values and records, the ledger and the timings."""
        from pipedist.outputs.summary import shown  # rarely needed

        values: list[list[str]] = []
        below: list[str] = []
        for name, value in islice(self.by_stage.items(), html.ROWS_MAX):
            text, found = _summary(value)
            if found is not None:
                text = f"{found.count:,} records, below"
                more = max(0, found.count - html.ROWS_MAX)
                below.append(html.table([name, *found.names], found.rows[: html.ROWS_MAX], more))
            values.append([name, text, shown(self.files[name]) if name in self.files else ""])
        parts = [html.table(["stage", "value", "file"], values, len(self) - len(values)), *below]
        parts.append(self.ledger._repr_html_())
        heads = ["stages", "calls", "elements/s", "busy", "median", "longest call"]
        times = [
            [
                stage.name,
                f"{stage.calls:,}",
                f"{stage.elements_per_s:,.0f}",
                brief(stage.busy_s),
                brief(stage.p50_s),
                f"{stage.slowest} {brief(stage.max_s)}",
            ]
            for stage in self.timings.stages[: html.ROWS_MAX]
        ]
        parts.append(html.table(heads, times, len(self.timings.stages) - len(times)) if times else "")
        total = ", ".join(
            f"{name} {brief(seconds)}" for name, seconds in islice(self.timings.items(), html.ROWS_MAX)
        )
        notes = [self.timings.limit, total, self.notice]
        return "".join(
            [html.paragraph(f"run {self.name}"), *parts, *(html.paragraph(note) for note in notes if note)]
        )


def _child(value: Tree, key: str, stage: str) -> Tree:
    if isinstance(value, Mapping):
        for each, child in value.items():
            if str(each) == key:
                return child
    raise NoSuchValue(f"no value {stage!r}: there is no {key!r} in it")


def _summary(value: Tree) -> tuple[str, Records | None]:
    """Return a value as text, and as records; the text is its type if it has no JSON form."""
    from pipedist.outputs.summary import records, summarize  # rarely needed

    if isinstance(value, Path):
        return "in its file", None
    try:
        return summarize(value), records(value)
    except (OutputError, RecursionError, ValueError):  # ValueError: an integer of thousands of digits
        return type(value).__name__, None


def files_of(spec: Spec) -> list[str]:
    """Return the names of all files that a run may write into its folder."""
    stages = spec.stages.values()
    sets_aside = any(isinstance(stage, RunSpec) and stage.on_error == "quarantine" for stage in stages)
    return [*spec.outputs.values(), *([QUARANTINE] if sets_aside else [])]


def restored(spec: Spec, finished: FinishedRun, tables: Mapping[str, Table]) -> Result:
    """Return the result of a finished run, from its document and saved values; `tables`: see `Result`."""
    document: Any = finished.document
    notice = f"the run in {finished.path} is finished: these are its results, nothing was executed"
    if finished.since or finished.moved:
        notice += (
            f". Something has changed since then:{listed([*finished.since, *finished.moved])}\n"
            "  To execute the affected passes again, use --reuse; to execute everything again, --restart"
        )
    files = {n: finished.files[o] for n, o in spec.outputs.items() if o in finished.files}
    places: dict[str, Tree] = {**finished.stored}
    for key, file in files.items():
        name, _, part = key.partition("/")
        places[name] = {**places.get(name, {}), part: file} if part else file
    pers = {name: per_of(stage) for name, stage in spec.stages.items()}
    values: Mapping[str, Tree] = {}
    if finished.values is not None:
        from pipedist.runs.saved_values import read_values

        stored = {name: file for name, file in finished.stored.items() if pers.get(name) == "run"}
        values = read_values(finished.values, stored)
    return Result(
        name=document["name"],
        run_id=document["run"],
        by_stage={
            n: values[n] if n in values else places.get(n, value) for n, value in document["results"].items()
        },
        files=files,
        ledger=Ledger(**document["ledger"]),
        timings=Timings.of(document["timings"], document.get("measurements", {})),
        retries=document.get("retries", {}),
        resumed=document.get("resumed", {}),
        quarantined=document.get("quarantined", []),
        quarantine_file=finished.files.get(QUARANTINE),
        notice=notice,
        restored=document,
        pers=pers,
        tables=tables,
    )
