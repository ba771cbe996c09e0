"""The elements that a run sets aside: which, why, and what they are.

An element is set aside once for each pass in which a stage can't process it. What is listed of a
pass is taken up to a step: what a snapshot has, and what the results are made of, go together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed
from pipedist.errors import LocalProtocolError
from pipedist.runs.programs import CallKey
from pipedist.scheduler.commands import CallsQuarantined, Cause

FILE = "quarantine.jsonl"
"""Of the output folder."""

INPUTS_MAX = 1000
"""Elements of one pass that are listed with what they are, the first ones; of others it is told why not."""

INPUT_CHARS_MAX = 65_536
"""Of what one element is, as JSON."""


class QuarantinedElement(Struct, frozen=True):
    """One element that a stage can't process.

    Args:
        element: its id.
        stage: that fails, as far as that is known.
        cause: an exception, or how the worker died, for people.
        step, replica: of its call.
        input: what the element is, as JSON text; "" where that can't be told.
        note: why it can't.
        alone: it fails by itself; False: its shard was set aside as a whole.
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
        """Return what the results document says of it."""
        return {"element": self.element, "stage": self.stage, "cause": self.cause}

    def line(self, dataset: str) -> str:
        """Return its line of the file, without a line end: the same wherever the file is.

        Args:
            dataset: whose element it is.
        """
        import json  # only where something is set aside

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


_NOT_TOLD = f"only the first {INPUTS_MAX} are listed with their input"

_Place = tuple[int, ...]
"""Step, replica and element of one that is set aside: the order in which they are listed."""


def _place(each: QuarantinedElement) -> _Place:
    return each.step, each.replica, each.element


class PassQuarantine:
    """What one pass sets aside.

    Args:
        dataset: that it reads.
        stage: whose fault it is where nobody knows.
        feed: of the pass; None: it was complete before.
        replicas: R.
    """

    def __init__(self, dataset: str, stage: str, feed: Feed | None, replicas: int) -> None:
        self.dataset = dataset
        self._stage = stage
        self._feed = feed
        self._replicas = replicas
        self._by_step: dict[int, list[QuarantinedElement]] = {}
        self._left_out: dict[int, NDArray[np.int64] | None] = {}
        """By call of a step that is not taken: the positions that are left out; None: all of them."""
        self._told: list[_Place] = []
        """Of the elements that are listed with what they are, in order."""

    def __bool__(self) -> bool:
        return bool(self._by_step)

    def __iter__(self) -> Iterator[QuarantinedElement]:
        """Yield what was set aside, by step, replica and element."""
        for step in sorted(self._by_step):
            yield from sorted(self._by_step[step], key=_place)

    def add(self, command: CallsQuarantined) -> None:
        """Set elements of calls aside; their step is pulled, and not released."""
        feed = self._feed
        if feed is None:
            raise LocalProtocolError("elements were set aside of a pass that was complete")
        for call in range(command.lo, command.hi):
            step, replica = divmod(call, self._replicas)
            shards = feed.ids(step)
            ids = shards[replica] if replica < len(shards) else range(0)
            whole = command.whole
            causes = dict(command.culprits) if whole is None else dict.fromkeys(range(len(ids)), whole)
            self._left_out[call] = np.array(sorted(causes), np.int64) if command.remains else None
            self._list(feed, call, ids, causes, alone=whole is None)

    def _list(
        self, feed: Feed, call: int, ids: Sequence[int], causes: dict[int, Cause], *, alone: bool
    ) -> None:
        step, replica = divmod(call, self._replicas)
        places = sorted(causes, key=lambda place: int(ids[place]))
        room = INPUTS_MAX - bisect_left(self._told, (step, replica))
        inputs = _inputs(feed, call, sorted(places[:room]))
        found = self._by_step.setdefault(step, [])
        for place in places:
            cause = causes[place]
            text, note = inputs.get(place, ("", _NOT_TOLD))
            stage = cause.stage or self._stage
            found.append(
                QuarantinedElement(int(ids[place]), stage, cause.text, step, replica, text, note, alone)
            )
        if inputs:
            self._told = sorted([*self._told, *((step, replica, int(ids[place])) for place in inputs)])
            self._forget_last()

    def _forget_last(self) -> None:
        """Whatever came first: only the first elements in order are listed with what they are."""
        gone, self._told = set(self._told[INPUTS_MAX:]), self._told[:INPUTS_MAX]
        for step in {step for step, *_ in gone}:
            self._by_step[step] = [
                replace(each, input="", note=_NOT_TOLD) if _place(each) in gone else each
                for each in self._by_step[step]
            ]

    def ids(self, step: int) -> tuple[list[Tree], tuple[int, ...]]:
        """Return the ids of each shard that is not empty, without those set aside; and which have no value.

        Args:
            step: pulled and not released; asked for once.
        """
        if self._feed is None:
            raise LocalProtocolError("the ids of a pass that was complete are with its values")
        ids = self._feed.ids(step)
        holes: list[int] = []
        for replica in range(len(ids)):
            call = step * self._replicas + replica
            if call in self._left_out:
                out = self._left_out.pop(call)
                if out is None:
                    holes.append(replica)
                    ids[replica] = range(0)
                else:
                    ids[replica] = np.delete(np.asarray(ids[replica], np.int64), out)
        return ids, tuple(holes)

    def steps(self) -> dict[int, int]:
        """Return the step of each element that is set aside."""
        return {each.element: step for step, found in self._by_step.items() for each in found}

    def state(self, steps: int) -> list[list[Any]]:
        """Return what was set aside of steps before `steps`; of later ones it is found again."""
        return [
            [x.element, x.stage, x.cause, x.step, x.replica, x.input, x.note, x.alone]
            for x in self
            if x.step < steps
        ]

    def restore(self, state: Iterable[Sequence[Any]]) -> None:
        """Take up what `state` returned."""
        for fields in state:
            each = QuarantinedElement(*fields)
            self._by_step.setdefault(each.step, []).append(each)
        self._told = [_place(each) for each in islice(self, INPUTS_MAX)]


def _inputs(feed: Feed, call: int, places: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Return what some elements of a call are, as JSON, or why that can't be told, by position."""
    if not places:
        return {}
    if not feed.separable(call):
        note = "it is the value of an earlier stage, whose elements can't be told apart"
        return dict.fromkeys(places, ("", note))
    from pipedist.outputs.encoding import dumps  # only where something is set aside

    found: dict[int, tuple[str, str]] = {}
    try:
        (value,) = _values(feed, call, places)
        rows = [_row(value, at) for at in range(len(places))]
    except Exception as error:  # reading the user's data may raise anything: that may be why it is here
        if len(places) == 1:
            return {places[0]: ("", f"it can't be read: {error}")}
        for place in places:
            found |= _inputs(feed, call, [place])
        return found
    for place, row in zip(places, rows, strict=True):
        try:
            text = dumps(row)
        except Exception as error:  # a value without a JSON form is none of the user's faults
            found[place] = ("", f"it has no JSON form: {error}")
            continue
        long = len(text) > INPUT_CHARS_MAX
        found[place] = ("", f"it has {len(text)} characters") if long else (text, "")
    return found


def _values(feed: Feed, call: int, places: Sequence[int]) -> Sequence[Tree]:
    shards = feed.some(call, [(place, place + 1) for place in places], local=False)
    return shards.values or ()


def _row(value: Tree, at: int) -> Tree:
    """Return one element of a shard: of columns, a cell each."""
    if isinstance(value, dict):
        return {name: _row(column, at) for name, column in value.items()}
    return value[at]


class RunQuarantine:
    """What a run sets aside.

    Args:
        of: one for each pass, in the plan's order.
    """

    def __init__(self, of: Sequence[PassQuarantine]) -> None:
        self._of = of

    def __iter__(self) -> Iterator[tuple[str, QuarantinedElement]]:
        """Yield what was set aside, with its dataset."""
        return ((of.dataset, each) for of in self._of for each in of)

    def __bool__(self) -> bool:
        return any(self._of)

    def write(self, path: Path) -> None:
        """Write the list, a line each.

        Raises:
            OutputError: the disk is full, or fails.
        """
        from pipedist.core.files import replace_file
        from pipedist.outputs.run_record import writing  # only runs that quarantine elements need it

        lines = "".join(f"{each.line(dataset)}\n" for dataset, each in self)
        with writing(FILE):
            replace_file(path, lines.encode("utf-8", "backslashreplace"))
