"""Reads a journal: the meaning of its records, and every inconsistency, also with the results of the run.

Each record is a map with a `kind`:

| kind | content |
|---|---|
| `header` | the first record: format, version, run, spec, inputs, plan |
| `steps` | per pass: the calls committed since the record before, and their values |
| `phase` | the same for all passes of a phase, which are complete |
| `resumed` | a process resumed the run |
| `end` | the run has ended: its ledger |
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgpack
from msgspec import Struct, convert, field

from pipedist.core.names import plural
from pipedist.errors import JournalError, UsageError
from pipedist.journal.log_format import FIRST, JournalRecord, LogEnd, read_records, unpacked

FORMAT: Final = 8
NAME: Final = "journal"


class Header(Struct, frozen=True):
    """The first record of a journal: the run, and all that decides its results.

    Args:
        pipedist: version of the program that created it.
        spec: everything in the spec that decides results, as plain values.
        digest: of `spec`.
        inputs: by path in the spec, path -> stamp of each file that it names (`pipedist.runs.input_stamps`).
        code: name -> SHA-256 of the modules of the functions.
        replicas: call number = step * replicas + replica.
        platform: fields of the `Platform` that the run began on; bits depend on it.
        passes: by key of the pass: its plan, its name, and what in the spec and which modules decide its values.
        source: absolute path of the spec's file; "" if there was none.
        sets: NAME=VALUE texts of the command line.
        params: values of other parameters, as a record of a log.
        spares: by key, passes of earlier runs that this one does not continue, until it ends
            (`pipedist.runs.reuse`).
    """

    format: int
    pipedist: str
    run: str
    name: str
    spec: Mapping[str, Any]
    digest: str
    inputs: Mapping[str, Mapping[str, list[Any]]]
    code: Mapping[str, str]
    replicas: int
    platform: Mapping[str, Any]
    passes: Mapping[str, Mapping[str, Any]]
    source: str = ""
    sets: Sequence[str] = ()
    params: bytes = b""
    spares: Mapping[str, Any] = {}


class StoredValue(Struct, frozen=True, omit_defaults=True):
    """A value that is replaced as a whole: in a record, or in a file."""

    inline: bytes | None = None
    file: str = ""
    end: LogEnd | None = None


CALLS: Final = "calls."  # prefix of the logs of finished calls, and the snapshot key of their numbers


class DurableProgress(Struct, frozen=True):
    """How much of a pass is durable: its first steps, calls of later steps, and elements of other calls."""

    steps: int
    calls: int = 0
    elements: int = 0

    def __str__(self) -> str:
        counts = {"step": self.steps, "call": self.calls, "element": self.elements}
        texts = [plural(count, what) for what, count in counts.items() if count or what == "step"]
        return f"{', '.join(texts[:-1])} and {texts[-1]}" if texts[1:] else texts[0]


class PassHistory(Struct):
    """The durable state of one pass.

    Args:
        steps, elements: steps [0, steps) are committed, and have this number of elements.
        complete: there are no more steps, and its values are complete.
        parts: values that are replaced as a whole, by name.
        logs: the ends of its logs, by name.
        quarantined: the step of each quarantined element.
        code: the modules of the process that committed its first steps, as in the header.
    """

    steps: int = 0
    elements: int = 0
    complete: bool = False
    parts: dict[str, StoredValue] = field(default_factory=dict)
    logs: dict[str, LogEnd] = field(default_factory=dict)
    quarantined: dict[int, int] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)

    @property
    def progress(self) -> DurableProgress:
        part = self.parts.get(CALLS)
        finished = [] if part is None or part.inline is None else unpacked(part.inline)
        return DurableProgress(self.steps, *finished)

    def files(self) -> set[str]:
        """Return the names of the files that hold its values."""
        return {*self.logs, *(part.file for part in self.parts.values() if part.file)}


class History(Struct):
    """The content of a journal.

    Args:
        epoch: how often the run was resumed.
        unwritten: the reason why an output has no file, by stage.
        ended: the ledger of the run, if it has ended.
        count: number of records.
        size: where the last good record ends, bytes; the rest is a torn tail.
        torn: bytes of the torn tail.
        digest: of the last record.
        problems: inconsistencies, with offsets.
    """

    header: Header
    epoch: int = 0
    passes: dict[str, PassHistory] = field(default_factory=dict)
    unwritten: dict[str, str] = field(default_factory=dict)
    ended: dict[str, int] | None = None
    count: int = 1
    size: int = 0
    torn: int = 0
    digest: bytes = FIRST
    problems: list[str] = field(default_factory=list)
    _code: Mapping[str, str] = field(default_factory=dict)
    """The modules of the latest process, if it resumed the run."""

    def ledger(self) -> dict[str, int]:
        """Return the ledger that follows from the ranges of calls."""
        elements = committed = quarantined = 0
        for dataset in dict.fromkeys(each["dataset"] for each in self.header.passes.values()):
            described = [each for each in self.header.passes.items() if each[1]["dataset"] == dataset]
            passes = [self.passes.get(key, PassHistory()) for key, _ in described]
            batches = [each.get("batch", 1) for _, each in described]
            most = max(p.elements for p in passes)
            elements += most
            places = zip(passes, batches, strict=True)
            quarantine = {element: step * b for p, b in places for element, step in p.quarantined.items()}
            places = zip(passes, batches, strict=True)
            reached = min((p.steps * b for p, b in places if not p.complete), default=None)
            whole = [place for place in quarantine.values() if reached is None or place < reached]
            committed += min(most if p.complete else p.elements for p in passes) - len(whole)
            quarantined += len(quarantine)
        return {
            "elements": elements,
            "committed": committed,
            "quarantined": quarantined,
            "lost": elements - committed - quarantined,
        }

    def _apply(self, content: Mapping[str, Any], offset: int) -> None:
        def report(problem: str) -> None:
            self.problems.append(f"record {number} at offset {offset}: {problem}")

        number, self.count = self.count, self.count + 1
        kind = content["kind"]
        if self.ended is not None and kind != "resumed":
            report(f"a record of kind {kind} follows the end of the run")
        self.ended = None
        if kind in ("steps", "phase"):
            for entry in content["passes"]:
                self._apply_pass(entry, report)
            self.unwritten.update(content.get("unwritten", {}))
        elif kind == "resumed":
            if content["epoch"] != self.epoch + 1:
                report(f"the epoch of a resumed run is {content['epoch']}, expected {self.epoch + 1}")
            self.epoch = content["epoch"]
            self._code = content.get("code", {})
        elif kind == "end":
            self.ended = ledger = dict(content["ledger"])
            if ledger["elements"] != ledger["committed"] + ledger["quarantined"] + ledger["lost"]:
                report(f"the ledger is inconsistent: {_text(ledger)}")
            found = self.ledger()
            if found != ledger:
                report(f"the ledger has {_text(ledger)}, but the journal's calls give {_text(found)}")
        else:
            report(f"unknown kind of record {kind!r}")

    def _apply_pass(self, entry: Mapping[str, Any], report: Callable[[str], None]) -> None:
        key = entry["pass"]
        if key not in self.header.passes:
            report(f"the plan has no pass {key!r}")
            return
        pass_ = self.passes.setdefault(key, PassHistory())
        if not pass_.steps:
            pass_.code = self._code or self.header.code
        replicas = self.header.replicas
        lo, hi = entry["calls"]
        calls = f"calls [{lo}, {hi}) of pass {key}"
        begin = pass_.steps * replicas
        if pass_.complete:
            report(f"pass {key} continues after it was complete")
        if lo != begin:
            report(f"{calls} {'overlap' if lo < begin else 'leave a gap'}: those before end at {begin}")
        if hi < lo or hi % replicas:
            report(f"{calls} are not whole steps of {replicas}")
        if entry["elements"] < 0 or (entry["elements"] > 0) != (hi > lo):
            report(f"{entry['elements']} elements in {calls}")
        for element, step in entry["quarantined"].items():
            if not lo <= step * replicas < hi:
                report(
                    f"element {element} is quarantined in step {step} of pass {key}, outside of calls [{lo}, {hi})"
                )
            pass_.quarantined[element] = step
        pass_.steps = hi // replicas
        pass_.elements += entry["elements"]
        pass_.complete = entry["complete"]
        pass_.parts.update(convert(entry["parts"], dict[str, StoredValue]))
        for name, end in convert(entry["logs"], dict[str, LogEnd]).items():
            if name in pass_.logs and end.bytes < pass_.logs[name].bytes:
                report(f"{name} has shrunk to {end.bytes} bytes")
            pass_.logs[name] = end
        for name in entry["dropped"]:
            pass_.logs.pop(name, None)


def _text(ledger: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in ledger.items())


def read_history(folder: Path) -> History | None:
    """Read the journal in a folder; return None if it has no whole record.

    Raises:
        JournalError: the journal is damaged, or can't be read.
        UsageError: there is no journal, or another version of pipedist wrote it.
    """
    path = folder / NAME
    history: History | None = None
    try:
        for found in _records(path):
            # names of files need not be UTF-8
            content = msgpack.unpackb(found.payload, strict_map_key=False, unicode_errors="surrogatepass")
            if history is None:
                history = History(_header(content, path))
            else:
                history._apply(content, found.offset)
            history.size, history.digest = found.end, found.digest
        size = path.stat().st_size
    except FileNotFoundError:
        raise UsageError(f"there is no journal in {folder}") from None
    except OSError as error:
        raise JournalError(f"{path} can't be read: {error.strerror or error}") from error
    except JournalError as error:
        raise JournalError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise JournalError(f"{path}: a record is malformed: {error!r}") from error
    if history is None:
        return None
    history.torn = size - history.size
    return history


def _records(path: Path) -> Iterator[JournalRecord]:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return
        # not closed here: the traceback of an error may hold views of it
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        yield from read_records(memoryview(data))


def _header(content: Mapping[str, Any], path: Path) -> Header:
    from pipedist._version import __version__

    if content["kind"] != "header":
        raise JournalError(f"the first record is of kind {content['kind']!r}, expected the header")
    if (content["format"], content["pipedist"]) != (FORMAT, __version__):
        raise UsageError(
            f"{path} was written by pipedist {content['pipedist']} (journal format {content['format']}), "
            f"and this is {__version__} (format {FORMAT}): the results could differ. "
            "--restart discards the run."
        )
    return convert(content, Header)


class Audit(Struct, frozen=True):
    """The result of an audit.

    Args:
        history: the journal's content; None if it can't be read.
        problems: inconsistencies, with offsets; none: all elements are accounted for.
    """

    history: History | None
    problems: tuple[str, ...]

    def passes(self) -> list[dict[str, Any]]:
        """Return the durable progress of each pass as plain JSON values."""
        if self.history is None:
            return []
        described = [
            (each, self.history.passes.get(key, PassHistory()))
            for key, each in self.history.header.passes.items()
        ]
        return [
            {
                "stages": each["name"],
                "dataset": each["dataset"],
                "complete": found.complete,
                "steps_done": found.steps,
                "elements_done": found.elements,
                "later_calls_done": found.progress.calls,
                "later_elements_done": found.progress.elements,
            }
            for each, found in described
        ]

    def lines(self) -> list[str]:
        lines = []
        if self.history is not None:
            header = self.history.header
            lines.append(
                f"run {header.run} of {header.name}: {plural(self.history.count, 'record')}, hash chain intact"
            )
            replicas = header.replicas
            for key, each in header.passes.items():
                found = self.history.passes.get(key)
                state = "not begun" if found is None else "complete" if found.complete else "not complete"
                found = found or PassHistory()
                lines.append(
                    f"  {each['name']} (of {each['dataset']}): {state}; calls [0, {found.steps * replicas:,}) in "
                    f"{plural(found.steps, 'step')}, {plural(found.elements, 'element')}"
                )
                if found.progress != DurableProgress(found.steps):
                    lines.append(f"    durable, and not executed again: {found.progress}")
            ledger = self.history.ledger()
            sum_text = " + ".join(f"{ledger[name]:,} {name}" for name in ("committed", "quarantined", "lost"))
            state = "the run has ended" if self.history.ended is not None else "the run has not ended"
            lines.append(f"  {plural(ledger['elements'], 'element')} = {sum_text}; {state}")
            if self.history.torn:
                torn = plural(self.history.torn, "byte")
                lines.append(f"  {torn} of an incomplete last record: not counted")
        lines += [f"WRONG: {problem}" for problem in self.problems]
        lines.append("the journal is inconsistent" if self.problems else "the journal is consistent")
        return lines


def audit(folder: Path, *, finished: bool = False, ledger: Mapping[str, int] | None = None) -> Audit:
    """Verify a journal.

    Args:
        finished: `run.json` has the state "finished".
        ledger: of the run's results document.
    """
    try:
        history = read_history(folder)
    except JournalError as error:
        return Audit(None, (str(error),))
    if history is None:
        return Audit(None, ("the journal has no complete record",))
    problems = list(history.problems)
    if finished and history.ended is None:
        problems.append(
            f"the run is finished, but its journal ends at offset {history.size} without a record of "
            "the end: records were removed"
        )
    if finished and history.torn:
        problems.append(
            f"the run is finished, but {history.torn} bytes follow the journal's last good record"
        )
    if ledger is not None and dict(ledger) != history.ledger():
        problems.append(f"the results have {dict(ledger)}, but the journal's calls give {history.ledger()}")
    return Audit(history, tuple(problems))
