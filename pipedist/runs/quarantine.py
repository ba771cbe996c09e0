"""The quarantine of a run: elements that a stage can't process.

An element is quarantined once for each pass in which a stage can't process it. A snapshot of a pass lists the
elements of its steps only, so the quarantine always matches the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace
from numpy.typing import NDArray

from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed
from pipedist.errors import LocalProtocolError
from pipedist.scheduler.commands import CallsQuarantined, Cause

FILE = "quarantine.jsonl"  # name of the file in the output folder

INPUTS_MAX = 1000
"""Number of quarantined elements of a pass recorded with their input; later ones are recorded without it."""

INPUT_CHARS_MAX = 65_536  # longest recorded input of an element, as JSON


class QuarantinedElement(Struct, frozen=True):
    """One element that a stage can't process.

    Args:
        stage: the stage that fails, or the first stage of the pass if that is unknown.
        cause: the exception, or how the worker died, as text.
        input: the element as JSON; "" if it is not available.
        note: why the input is not available, or how it is shortened.
        alone: whether the element fails by itself; False: its whole shard was quarantined.
    """

    element: int
    stage: str
    cause: str
    step: int
    replica: int
    input: str = ""
    note: str = ""
    alone: bool = True

    def entry(self) -> dict[str, Any]:
        """Return its entry in the results document."""
        return {"element": self.element, "stage": self.stage, "cause": self.cause}

    def line(self, dataset: str) -> str:
        """Return its line of the file, wherever that is, without a line end."""
        import json  # rarely needed

        from pipedist.runs.call_keys import CallKey

        head = {
            "dataset": dataset,
            **self.entry(),
            "step": self.step,
            "replica": self.replica,
            "call": str(CallKey(self.stage, self.step, self.replica)),
            "alone": self.alone,
        }
        if self.input and self.note:
            head["note"] = self.note
        if not self.input:
            return json.dumps({**head, "input": None, "note": self.note}, ensure_ascii=False)
        return f'{json.dumps(head, ensure_ascii=False)[:-1]}, "input": {self.input}}}'


_NO_INPUT = f"only the first {INPUTS_MAX} are listed with their input"


class PassQuarantine:
    """The quarantined elements of one pass.

    Args:
        stage: the stage that is named if the failing stage is unknown.
        feed: the feed of the pass; None: an earlier process completed the pass.
    """

    def __init__(self, stage: str, feed: Feed | None, replicas: int) -> None:
        self._stage = stage
        self._feed = feed
        self._replicas = replicas
        self._by_step: dict[int, list[QuarantinedElement]] = {}
        self._removed: dict[int, NDArray[np.int64] | None] = {}
        """Positions removed from the shards of steps that are not taken, by call; None: all."""
        self._unread: dict[int, dict[int, int]] = {}
        """Elements whose input was not read yet, by call: their ids by place."""
        self._inputs_read = 0
        self.on_quarantined: Callable[[QuarantinedElement], None] = lambda _element: None

    def __iter__(self) -> Iterator[QuarantinedElement]:
        """Yield the elements by step, replica and id."""
        for step in sorted(self._by_step):
            yield from sorted(self._by_step[step], key=lambda each: (each.replica, each.element))

    def add(self, command: CallsQuarantined) -> int:
        """Quarantine elements of calls, whose step is pulled and not released; return their number."""
        elements = 0
        feed = self._feed
        if feed is None:
            raise LocalProtocolError("elements were quarantined in a pass that was already complete")
        for call in range(command.lo, command.hi):
            step, replica = divmod(call, self._replicas)
            shards = feed.ids(step)
            ids = shards[replica] if replica < len(shards) else range(0)
            whole = command.whole
            causes = dict(command.culprits) if whole is None else dict.fromkeys(range(len(ids)), whole)
            self._removed[call] = np.array(sorted(causes), np.int64) if command.remains else None
            self._list(call, ids, causes, alone=whole is None)
            elements += len(causes)
        return elements

    def _list(self, call: int, ids: Sequence[int], causes: dict[int, Cause], *, alone: bool) -> None:
        step, replica = divmod(call, self._replicas)
        found = self._by_step.setdefault(step, [])
        for place in sorted(causes, key=lambda place: int(ids[place])):
            cause = causes[place]
            stage, element = cause.stage or self._stage, int(ids[place])
            found.append(QuarantinedElement(element, stage, cause.text, step, replica, "", _NO_INPUT, alone))
            self.on_quarantined(found[-1])
            self._unread.setdefault(call, {})[place] = element

    @property
    def has_unread_inputs(self) -> bool:
        return bool(self._unread)

    async def read_inputs(self, before: int) -> None:
        """Record the inputs of elements in steps before `before`, which are not released yet.

        Steps are read in order, so the first INPUTS_MAX elements are the same in every run.
        """
        for call in sorted(call for call in self._unread if call < before * self._replicas):
            assert self._feed is not None  # `add` has used it
            step, replica = divmod(call, self._replicas)
            unread = self._unread.pop(call)
            places = sorted(unread, key=lambda place: unread[place])[: INPUTS_MAX - self._inputs_read]
            self._inputs_read += len(places)
            inputs = await _inputs(self._feed, call, sorted(places))
            found = {unread[place]: text_and_note for place, text_and_note in inputs.items()}
            self._by_step[step] = [
                replace(each, input=found[each.element][0], note=found[each.element][1])
                if each.replica == replica and each.element in found
                else each
                for each in self._by_step[step]
            ]

    def ids(self, step: int) -> tuple[list[Tree], list[tuple[int, NDArray[np.int64]]]]:
        """Return the ids of shards, and the removed positions of those of which some remain, by replica.

        Quarantined ids are removed, those of earlier passes too. Call this once for each step, which is pulled and not
        released.
        """
        if self._feed is None:
            raise LocalProtocolError("a pass that was already complete has its ids in its spools")
        ids = self._feed.ids(step)
        positions = dict(enumerate(self._feed.removed(step)))
        for replica in range(len(ids)):
            call = step * self._replicas + replica
            if call in self._removed:
                removed = self._removed.pop(call)
                if removed is None:
                    ids[replica] = range(0)
                    continue
                before = positions.get(replica, removed[:0])
                places = np.delete(np.arange(len(ids[replica]) + len(before)), before)
                ids[replica] = np.delete(np.asarray(ids[replica], np.int64), removed)
                positions[replica] = np.sort(np.concatenate([before, places[removed]]))
        return ids, [(at, gone) for at, gone in positions.items() if len(gone) and len(ids[at])]

    def steps(self) -> dict[int, int]:
        return {each.element: step for step, found in self._by_step.items() for each in found}

    def state(self, steps: int) -> list[list[Any]]:
        """Return the elements before `steps`; a resume finds later ones again."""
        return [list(astuple(each)) for each in self if each.step < steps]

    def restore(self, state: Iterable[Sequence[Any]]) -> None:
        for fields in state:
            each = QuarantinedElement(*fields)
            self._by_step.setdefault(each.step, []).append(each)
        self._inputs_read = min(INPUTS_MAX, sum(map(len, self._by_step.values())))


async def _inputs(feed: Feed, call: int, places: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Return (JSON, note) for elements of a call; with a note if the JSON is empty or shortened."""
    if not places:
        return {}
    if not feed.separable(call):
        note = "it is the value of an earlier stage, which can't be split into elements"
        return dict.fromkeys(places, ("", note))
    from pipedist.outputs.encoding import dumps  # rarely needed

    found: dict[int, tuple[str, str]] = {}
    try:
        ranges = [(place, place + 1) for place in places]
        shards = feed.request(call, call + 1, local=False, elements=ranges)
        if callable(shards):
            shards = await anyio.to_thread.run_sync(shards, abandon_on_cancel=True)
        (value,) = shards.values or []
        rows = [_row(value, at) for at in range(len(places))]
    except Exception as error:  # reading user data may raise anything, which may be why the element failed
        if len(places) == 1:
            return {places[0]: ("", f"it can't be read: {error}")}
        for place in places:
            found |= await _inputs(feed, call, [place])
        return found
    for place, row in zip(places, rows, strict=True):
        try:
            text = dumps(row)
        except Exception as error:  # not every value has a JSON form
            found[place] = ("", f"it has no JSON form: {error}")
            continue
        found[place] = (text, "") if len(text) <= INPUT_CHARS_MAX else _shortened(row, len(text))
    return found


def _shortened(row: Tree, chars: int) -> tuple[str, str]:
    """Return (JSON, note) of an element whose JSON is too long: the beginning of its texts and arrays."""
    from pipedist.outputs.encoding import dumps

    for items in (4096, 256, 16):
        text = dumps(_beginning(row, items))
        if len(text) <= INPUT_CHARS_MAX:
            return (
                text,
                f"shortened: as JSON it has {chars} characters; texts and arrays are cut after {items}",
            )
    return "", f"it has {chars} characters"


def _beginning(value: Tree, items: int) -> Tree:
    if isinstance(value, dict):
        return {key: _beginning(child, items) for key, child in islice(value.items(), items)}
    if isinstance(value, list | tuple):
        return [_beginning(child, items) for child in value[:items]]
    if isinstance(value, np.ndarray):
        return value.ravel()[:items]
    return value[:items] if isinstance(value, str | bytes) else value


def _row(value: Tree, at: int) -> Tree:
    """Return one element of a shard; for columns, one cell of each."""
    if isinstance(value, dict):
        return {name: _row(column, at) for name, column in value.items()}
    return value[at]


def write_file(path: Path, quarantined: Iterable[tuple[str, QuarantinedElement]]) -> None:
    """Write a line for each (dataset, element)."""
    from pipedist.core.files import replace_file
    from pipedist.outputs.run_record import writing  # rarely needed

    lines = "".join(f"{each.line(dataset)}\n" for dataset, each in quarantined)
    with writing(FILE):
        replace_file(path, lines.encode("utf-8", "backslashreplace"))
