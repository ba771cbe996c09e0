"""The quarantine of a run: elements that a stage can't process.

An element is quarantined once for each pass in which a stage can't process it. A snapshot of a pass lists the
elements of its steps only, so the quarantine always matches the results.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace
from numpy.typing import NDArray

from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed
from pipedist.errors import LocalProtocolError
from pipedist.runs.programs import CallKey
from pipedist.scheduler.commands import CallsQuarantined, Cause

FILE = "quarantine.jsonl"
"""Name of the file in the output folder."""

INPUTS_MAX = 1000
"""Number of quarantined elements of a pass recorded with their input; later ones are recorded without it."""

INPUT_CHARS_MAX = 65_536
"""Longest recorded input of an element, as JSON."""


class QuarantinedElement(Struct, frozen=True):
    """One element that a stage can't process.

    Args:
        stage: the stage that fails, or the first stage of the pass if that is unknown.
        cause: the exception, or how the worker died, as text.
        input: the element as JSON; "" if it is not available.
        note: why the input is not available.
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

        head = {
            "dataset": dataset,
            **self.entry(),
            "step": self.step,
            "replica": self.replica,
            "call": str(CallKey(self.stage, self.step, self.replica)),
            "alone": self.alone,
        }
        if not self.input:
            return json.dumps({**head, "input": None, "note": self.note}, ensure_ascii=False)
        return f'{json.dumps(head, ensure_ascii=False)[:-1]}, "input": {self.input}}}'


_NO_INPUT = f"only the first {INPUTS_MAX} are listed with their input"

_Place = tuple[int, ...]
"""Step, replica and element id: the order in which quarantined elements are listed."""


def _place(each: QuarantinedElement) -> _Place:
    return each.step, each.replica, each.element


class PassQuarantine:
    """The quarantined elements of one pass.

    Args:
        stage: the stage that is named if the failing stage is unknown.
        feed: the feed of the pass; None: an earlier process completed the pass.
    """

    def __init__(self, dataset: str, stage: str, feed: Feed | None, replicas: int) -> None:
        self.dataset = dataset
        self._stage = stage
        self._feed = feed
        self._replicas = replicas
        self._by_step: dict[int, list[QuarantinedElement]] = {}
        self._removed: dict[int, NDArray[np.int64] | None] = {}
        """Positions removed from the shards of steps that are not taken, by call; None: all."""
        self._with_input: list[_Place] = []

    def __iter__(self) -> Iterator[QuarantinedElement]:
        """Yield the elements by step, replica and id."""
        for step in sorted(self._by_step):
            yield from sorted(self._by_step[step], key=_place)

    def add(self, command: CallsQuarantined) -> None:
        """Quarantine elements of calls, whose step is pulled and not released."""
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
            self._list(feed, call, ids, causes, alone=whole is None)

    def affects(self, call: int) -> bool:
        """Return whether elements of a call, of a step that is not taken, are quarantined."""
        return call in self._removed

    def _list(
        self, feed: Feed, call: int, ids: Sequence[int], causes: dict[int, Cause], *, alone: bool
    ) -> None:
        step, replica = divmod(call, self._replicas)
        places = sorted(causes, key=lambda place: int(ids[place]))
        room = INPUTS_MAX - bisect_left(self._with_input, (step, replica))
        inputs = _inputs(feed, call, sorted(places[:room]))
        found = self._by_step.setdefault(step, [])
        for place in places:
            cause = causes[place]
            text, note = inputs.get(place, ("", _NO_INPUT))
            stage = cause.stage or self._stage
            element = int(ids[place])
            found.append(QuarantinedElement(element, stage, cause.text, step, replica, text, note, alone))
        if inputs:
            added = [(step, replica, int(ids[place])) for place in inputs]
            self._with_input = sorted([*self._with_input, *added])
            # drop the inputs of all but the first elements, whatever arrived first
            gone, self._with_input = set(self._with_input[INPUTS_MAX:]), self._with_input[:INPUTS_MAX]
            for step in {step for step, *_ in gone}:
                self._by_step[step] = [
                    replace(each, input="", note=_NO_INPUT) if _place(each) in gone else each
                    for each in self._by_step[step]
                ]

    def ids(self, step: int) -> tuple[list[Tree], tuple[int, ...]]:
        """Return the ids of shards, and the replicas without a value.

        Quarantined ids are removed. Call this once for each step, which is pulled and not released.
        """
        if self._feed is None:
            raise LocalProtocolError("a pass that was already complete has its ids in its spools")
        ids = self._feed.ids(step)
        skipped: list[int] = []
        for replica in range(len(ids)):
            call = step * self._replicas + replica
            if call in self._removed:
                removed = self._removed.pop(call)
                if removed is None:
                    skipped.append(replica)
                    ids[replica] = range(0)
                else:
                    ids[replica] = np.delete(np.asarray(ids[replica], np.int64), removed)
        return ids, tuple(skipped)

    def steps(self) -> dict[int, int]:
        return {each.element: step for step, found in self._by_step.items() for each in found}

    def state(self, steps: int) -> list[list[Any]]:
        """Return the elements before `steps`; a resume finds later ones again."""
        return [list(astuple(each)) for each in self if each.step < steps]

    def restore(self, state: Iterable[Sequence[Any]]) -> None:
        for fields in state:
            each = QuarantinedElement(*fields)
            self._by_step.setdefault(each.step, []).append(each)
        self._with_input = [_place(each) for each in islice(self, INPUTS_MAX)]


def _inputs(feed: Feed, call: int, places: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Return (JSON, note) for elements of a call; one of the two is empty."""
    if not places:
        return {}
    if not feed.separable(call):
        note = "it is the value of an earlier stage, which can't be split into elements"
        return dict.fromkeys(places, ("", note))
    from pipedist.outputs.encoding import dumps  # rarely needed

    found: dict[int, tuple[str, str]] = {}
    try:
        (value,) = feed.some(call, [(place, place + 1) for place in places], local=False).values or []
        rows = [_row(value, at) for at in range(len(places))]
    except Exception as error:  # reading user data may raise anything, which may be why the element failed
        if len(places) == 1:
            return {places[0]: ("", f"it can't be read: {error}")}
        for place in places:
            found |= _inputs(feed, call, [place])
        return found
    for place, row in zip(places, rows, strict=True):
        try:
            text = dumps(row)
        except Exception as error:  # not every value has a JSON form
            found[place] = ("", f"it has no JSON form: {error}")
            continue
        long = len(text) > INPUT_CHARS_MAX
        found[place] = ("", f"it has {len(text)} characters") if long else (text, "")
    return found


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
