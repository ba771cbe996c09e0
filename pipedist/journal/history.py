"""What the records of a journal mean, one after the other, and whether they add up.

The kinds of records, each a map with `kind`:

| kind | says |
|---|---|
| `header` | first of all: format, version, run, spec, inputs, plan |
| `steps` | of some passes: which calls are committed since the last time, and what they left behind |
| `phase` | the same of the passes of a phase, which are complete now |
| `resumed` | a process has taken the run up |
| `end` | the run is over: its ledger |
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgpack
from msgspec import Struct

from pipedist.errors import JournalError, UsageError
from pipedist.journal.frames import FIRST, Placed, records
from pipedist.journal.logs import End

FORMAT: Final = 2
NAME: Final = "journal"
"""The journal's file, in its folder."""


class Header(Struct, frozen=True):
    """What a journal is about.

    Args:
        format: version of the journal's format.
        pipedist: version of the program that began it.
        run: the run's id.
        name: the spec's name.
        spec: everything in the spec that decides results, as plain values.
        digest: of `spec`.
        inputs: of each dataset, path -> [bytes, mtime in ns] of the files that it reads.
        code: path -> SHA-256 of the modules that the functions come from.
        replicas: call number = step * replicas + replica.
        platform: fields of the `Platform` that the run began on, which decides bits too.
        passes: of each pass, by its key: dataset, name for people, digest of all that decides its values.
        source: absolute path of the spec's file; "" where there was none.
        sets: what was set on the command line.
        params: what was given for its parameters otherwise, as a record of a log.
    """

    format: int
    pipedist: str
    run: str
    name: str
    spec: Mapping[str, Any]
    digest: str
    inputs: Mapping[str, Mapping[str, list[int]]]
    code: Mapping[str, str]
    replicas: int
    platform: Mapping[str, Any]
    passes: Mapping[str, Mapping[str, Any]]
    source: str = ""
    sets: Sequence[str] = ()
    params: bytes = b""

    def payload(self) -> dict[str, Any]:
        """Return the record."""
        return {"kind": "header", **{name: getattr(self, name) for name in self.__struct_fields__}}


class Part(Struct, frozen=True):
    """A value as a whole: in the record itself, or in a file of its own.

    Args:
        inline: its bytes, None where they are in a file.
        file, end: the file, and what is in it.
    """

    inline: bytes | None = None
    file: str = ""
    end: End | None = None

    def plain(self) -> Any:
        """Return the part as it stands in a record."""
        return self.inline if self.end is None else [self.file, self.end.bytes, self.end.crc]

    @classmethod
    def of(cls, plain: Any) -> Part:
        """Return the part that a record describes."""
        if isinstance(plain, bytes):
            return cls(plain)
        file, size, crc = plain
        return cls(None, file, End(size, crc))


@dataclass(slots=True)
class PassHistory:
    """What is durable of one pass.

    Args:
        steps: steps [0, steps) are committed.
        elements: of these steps.
        complete: there are no more steps, and its values are complete.
        parts: values that are replaced as a whole, by name.
        logs: files that grow, by name.
        quarantined: the step of each element that is set aside.
    """

    steps: int = 0
    elements: int = 0
    complete: bool = False
    parts: dict[str, Part] = field(default_factory=dict)
    logs: dict[str, End] = field(default_factory=dict)
    quarantined: dict[int, int] = field(default_factory=dict)

    def files(self) -> set[str]:
        """Return the names of the files that hold its values."""
        return {*self.logs, *(part.file for part in self.parts.values() if part.file)}


@dataclass(slots=True)
class History:
    """Everything that a journal says.

    Args:
        header: its first record.
        epoch: how often a process took the run up.
        passes: by key.
        unwritten: why an output has no file, by stage.
        ended: the ledger of the run, once it is over.
        count: number of records.
        size: where the last good one ends, bytes; what is behind it is a torn tail.
        torn: bytes of the torn tail.
        digest: of the last record.
        problems: what does not add up, with offsets.
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

    def ledger(self) -> dict[str, int]:
        """Return where every element went, from the ranges of calls alone."""
        elements = committed = quarantined = 0
        for dataset in dict.fromkeys(said["dataset"] for said in self.header.passes.values()):
            passes = [
                self.passes.get(key, PassHistory())
                for key, said in self.header.passes.items()
                if said["dataset"] == dataset
            ]
            most = max(p.elements for p in passes)
            elements += most
            aside = {element: step for p in passes for element, step in p.quarantined.items()}
            reached = min((p.steps for p in passes if not p.complete), default=None)
            whole = [step for step in aside.values() if reached is None or step < reached]
            committed += min(most if p.complete else p.elements for p in passes) - len(whole)
            quarantined += len(aside)
        return {
            "elements": elements,
            "committed": committed,
            "quarantined": quarantined,
            "lost": elements - committed - quarantined,
        }

    # -- record by record --------------------------------------------------------------------

    def _apply(self, said: Mapping[str, Any], offset: int) -> None:
        place = f"record {self.count} at offset {offset}"
        self.count += 1
        kind = said["kind"]
        if self.ended is not None and kind != "resumed":
            self.problems.append(f"{place}: a record of kind {kind} follows the end of the run")
        self.ended = None
        if kind in ("steps", "phase"):
            for entry in said["passes"]:
                self._apply_pass(entry, place)
            self.unwritten.update(said.get("unwritten", {}))
        elif kind == "resumed":
            if said["epoch"] != self.epoch + 1:
                self.problems.append(
                    f"{place}: the run was taken up for the {said['epoch']}th time, expected {self.epoch + 1}"
                )
            self.epoch = said["epoch"]
        elif kind == "end":
            self._end(said["ledger"], place)
        else:
            self.problems.append(f"{place}: there are no records of kind {kind!r} here")

    def _apply_pass(self, entry: Mapping[str, Any], place: str) -> None:
        key = entry["pass"]
        if key not in self.header.passes:
            self.problems.append(f"{place}: the plan has no pass {key!r}")
            return
        pass_ = self.passes.setdefault(key, PassHistory())
        replicas = self.header.replicas
        lo, hi = entry["calls"]
        begin = pass_.steps * replicas
        if pass_.complete:
            self.problems.append(f"{place}: pass {key} goes on after it was complete")
        if lo != begin:
            what = "overlap" if lo < begin else "leave a gap"
            self.problems.append(
                f"{place}: calls [{lo}, {hi}) of pass {key} {what}: those before end at {begin}"
            )
        if hi < lo or hi % replicas:
            self.problems.append(
                f"{place}: calls [{lo}, {hi}) of pass {key} are no whole steps of {replicas}"
            )
        if entry["elements"] < 0 or (entry["elements"] > 0) != (hi > lo):
            self.problems.append(f"{place}: {entry['elements']} elements in calls [{lo}, {hi}) of pass {key}")
        for element, step in entry["quarantined"]:
            if not lo <= step * replicas < hi:
                self.problems.append(
                    f"{place}: element {element} is set aside in step {step} of pass {key}, and the calls "
                    f"are [{lo}, {hi})"
                )
            pass_.quarantined[element] = step
        pass_.steps = hi // replicas
        pass_.elements += entry["elements"]
        pass_.complete = entry["complete"]
        pass_.parts.update((name, Part.of(plain)) for name, plain in entry["parts"].items())
        for name, (size, crc) in entry["logs"].items():
            if name in pass_.logs and size < pass_.logs[name].bytes:
                self.problems.append(f"{place}: {name} has shrunk to {size} bytes")
            pass_.logs[name] = End(size, crc)
        for name in entry["dropped"]:
            pass_.logs.pop(name, None)

    def _end(self, ledger: Mapping[str, int], place: str) -> None:
        self.ended = dict(ledger)
        if ledger["elements"] != ledger["committed"] + ledger["quarantined"] + ledger["lost"]:
            self.problems.append(f"{place}: the ledger does not add up: {_shown(ledger)}")
        found = self.ledger()
        if found != self.ended:
            self.problems.append(
                f"{place}: the ledger says {_shown(ledger)}, and the journal's calls give {_shown(found)}"
            )


def _shown(ledger: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in ledger.items())


def read_history(folder: Path) -> History | None:
    """Read a journal.

    Args:
        folder: that it is in.

    Returns:
        What it says; `problems` lists what does not add up. None: it has no whole record.

    Raises:
        JournalError: it is damaged, or can't be read.
        UsageError: it was written by another version of pipedist, or there is none.
    """
    path = folder / NAME
    history: History | None = None
    try:
        for placed in _placed(path):
            # names of files need not be UTF-8
            said = msgpack.unpackb(placed.payload, strict_map_key=False, unicode_errors="surrogatepass")
            if history is None:
                history = History(_header(said, path))
            else:
                history._apply(said, placed.offset)
            history.size, history.digest = placed.end, placed.digest
        size = path.stat().st_size
    except FileNotFoundError:
        raise UsageError(f"there is no journal in {folder}") from None
    except OSError as error:
        raise JournalError(f"{path} can't be read: {error.strerror or error}") from error
    except JournalError as error:
        raise JournalError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise JournalError(f"{path}: a record can't be understood: {error!r}") from error
    if history is None:
        return None
    history.torn = size - history.size
    return history


def _placed(path: Path) -> Iterator[Placed]:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return
        # not closed here: an error's traceback may hold views of it; it goes with the last one
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        yield from records(memoryview(data))


def _header(said: Mapping[str, Any], path: Path) -> Header:
    from pipedist.version import __version__

    if said["kind"] != "header":
        raise JournalError(f"the first record is of kind {said['kind']}, not the header")
    if (said["format"], said["pipedist"]) != (FORMAT, __version__):
        raise UsageError(
            f"{path} was written by pipedist {said['pipedist']} (journal format {said['format']}), and this "
            f"is {__version__} (format {FORMAT}): the same bits are not certain. --restart discards the run"
        )
    return Header(**{name: value for name, value in said.items() if name != "kind"})
