"""Divides the committed values of a run stage into the steps and shards of the stages that read them.

The rule is part of the contract, and looks at the order of elements alone. With a batch size B, step s of an epoch
is the positions [s*B, (s+1)*B) of the epoch, quarantined elements included, and is cut into shards as a step of a
dataset is (`pipedist.datasets.division`). The value of a shard is made of the rows of its elements, in order: an
array of a value has one row for each element of its shard that is not quarantined. Without a batch size, steps and
shards stay as they are, and values may be any tree.

No I/O happens here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.values import concatenate


class KeptShard(Struct, frozen=True):
    """The committed value of one shard.

    Args:
        ids: of its elements, without quarantined ones.
        size: number of its elements, quarantined ones included.
        removed: positions of quarantined elements, ascending.
    """

    value: Tree
    ids: Tree
    size: int
    removed: NDArray[np.int64] | None = None

    def rows(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the rows of the elements at positions [lo, hi)."""
        if self.removed is None:
            return lo, hi
        before, until = np.searchsorted(self.removed, (lo, hi))
        return lo - int(before), hi - int(until)


Part = tuple[KeptShard, int, int]  # the elements at positions [lo, hi) of a shard


def kept_shards(
    ids: Sequence[Tree],
    values: Sequence[Tree],
    elements: int,
    replicas: int,
    removed: Iterable[tuple[int, NDArray[np.int64]]] = (),
) -> list[KeptShard]:
    """Return the shards of a step of `elements` elements.

    Values of empty shards, which a gang makes, follow those of the others. `removed` has the positions of
    quarantined elements of shards that have others.
    """
    part, gone = -(-elements // replicas), dict(removed)
    shards = []
    for replica, value in enumerate(values):
        own = ids[replica] if replica < len(ids) else range(0)
        size = max(0, min(part, elements - replica * part))
        missing = gone.get(replica) if len(own) else np.arange(size)
        shards.append(KeptShard(value, own, size, missing))
    return shards


class KeptStep(Struct, frozen=True):
    """One step of kept values: the parts that each shard consists of."""

    epoch: int
    elements: int
    bytes: int
    shards: list[list[Part]]

    @property
    def parts(self) -> int:
        """The number of shards that have elements."""
        return sum(any(lo < hi for _, lo, hi in shard) for shard in self.shards)

    @property
    def skipped(self) -> tuple[int, ...]:
        """The replicas all of whose elements are quarantined."""
        rows = [
            sum(b - a for a, b in (shard.rows(lo, hi) for shard, lo, hi in shards)) for shards in self.shards
        ]
        return tuple(replica for replica in range(self.parts) if not rows[replica])

    def ids(self, replica: int) -> Tree:
        found = [shard.ids[slice(*shard.rows(lo, hi))] for shard, lo, hi in self.shards[replica]]
        return found[0] if len(found) == 1 else np.concatenate([np.asarray(ids, np.int64) for ids in found])

    def removed(self, replica: int) -> NDArray[np.int64]:
        """Return the positions of quarantined elements in a shard, ascending."""
        found, at = [np.empty(0, np.int64)], 0
        for shard, lo, hi in self.shards[replica]:
            if shard.removed is not None:
                gone = shard.removed[slice(*np.searchsorted(shard.removed, (lo, hi)))]
                found.append(gone - lo + at)
            at += hi - lo
        return np.concatenate(found)

    def is_whole(self, replica: int) -> bool:
        """Return whether a shard is one of the input, so that its value is used as it is."""
        if replica >= len(self.shards):
            return False
        (shard, lo, hi), *others = self.shards[replica]
        return not others and (lo, hi) == (0, shard.size)

    def value(self, replica: int) -> Tree:
        """Return the value of a shard; raise ValueError or TypeError if values can't be cut or joined.

        That of a shard without rows, which a gang reads too, is made of the first rows of the step.
        """
        if self.is_whole(replica) and replica not in self.skipped:
            return self.shards[replica][0][0].value
        if replica >= len(self.shards) or replica in self.skipped:
            full = next((s for part in self.shards for s, *_ in part if len(s.ids)), None)
            if full is None or not has_rows(full.value, len(full.ids)):
                raise ValueError(
                    f"replica {replica} has no elements, but joins collectives. It gets arrays without rows if all "
                    "values are arrays with one row for each element"
                )
            return trees.tree_map(lambda leaf: leaf[:0], full.value)
        found, names = [], []
        for shard, lo, hi in self.shards[replica]:
            first, last = shard.rows(lo, hi)
            if first < last:
                if not has_rows(shard.value, len(shard.ids)):
                    raise ValueError(
                        f"they must be arrays with one row for each of the {len(shard.ids)} elements of a shard"
                    )
                names.append(f"the call with elements {shard.ids[0]} to {shard.ids[-1]}")
                found.append(trees.tree_map(lambda leaf, a=first, b=last: leaf[a:b], shard.value))
        return found[0] if len(found) == 1 else concatenate(found, 0, names)


def has_rows(value: Tree, rows: int) -> bool:
    """Return whether a value is a tree of arrays with this number of rows."""
    leaves = trees.flatten(value)[0]
    return bool(leaves) and all(
        isinstance(leaf, np.ndarray) and leaf.ndim > 0 and len(leaf) == rows for leaf in leaves
    )


class StepCutter:
    """Cuts a sequence of steps into others.

    Args:
        batch: number of elements of a step; 0: the steps stay as they are.
    """

    def __init__(self, batch: int, replicas: int) -> None:
        self._batch = batch
        self._replicas = replicas
        self._first = 0
        self._number = 0  # the step that is cut next
        self._epoch = 0
        self._room = batch  # number of elements that the step lacks
        self._open: list[Part] = []
        self._bytes = 0.0

    def seek(self, first: int, inputs: Iterable[tuple[int, int]]) -> int:
        """Skip steps before `first`, and return the number of inputs, as (epoch, elements), that only they need."""
        self._first = first
        skipped = 0
        for epoch, elements in inputs:
            number, room = self._begun(epoch)
            if (
                number + (max(0, elements - room + self._batch - 1) // self._batch if self._batch else 0)
                >= first
            ):
                break
            self._number, self._room, self._epoch = number, room, epoch
            self._advance(elements)
            skipped += 1
        return skipped

    def add(self, epoch: int, elements: int, size: int, shards: Sequence[KeptShard]) -> list[KeptStep]:
        """Take an input step of `size` bytes, and return the steps that it completes."""
        if not self._batch:
            self._open = [(shard, 0, shard.size) for shard in shards]
            return self._kept([KeptStep(epoch, elements, size, [[part] for part in self._open])])
        done = self.end() if epoch != self._epoch else []
        self._epoch = epoch
        for shard in shards:
            at = 0
            while at < shard.size:
                end = min(shard.size, at + self._room)
                self._open.append((shard, at, end))
                self._bytes += size * (end - at) / elements
                self._room -= end - at
                at = end
                if not self._room:
                    done += self._cut()
        return done

    def end(self) -> list[KeptStep]:
        """Return the last step of an epoch or of the input, if that is not complete yet."""
        return self._cut() if self._room < self._batch else []

    def _begun(self, epoch: int) -> tuple[int, int]:
        """Return the number of the step that an input of an epoch continues, and the elements that it lacks."""
        if epoch != self._epoch and self._room < self._batch:
            return self._number + 1, self._batch
        return self._number, self._room

    def _advance(self, elements: int) -> None:
        if not self._batch:
            self._number += 1
            return
        steps, rest = divmod(self._batch - self._room + elements, self._batch)
        self._number += steps
        self._room = self._batch - rest

    def _cut(self) -> list[KeptStep]:
        elements = sum(hi - lo for _, lo, hi in self._open)
        step = KeptStep(
            self._epoch, elements, round(self._bytes), _divided(self._open, elements, self._replicas)
        )
        self._room, self._bytes = self._batch, 0.0
        return self._kept([step])

    def _kept(self, steps: list[KeptStep]) -> list[KeptStep]:
        """Count a step; drop it if it is before the first one, whose elements may have been skipped."""
        self._open = []
        self._number += 1
        return steps if self._number > self._first else []


def _divided(parts: Iterable[Part], elements: int, replicas: int) -> list[list[Part]]:
    """Divide the elements of a step among replicas, as a dataset's; there are no empty shards."""
    size = -(-elements // replicas)
    shards: list[list[Part]] = []
    room = 0
    for shard, lo, hi in parts:
        while lo < hi:
            if not room:
                shards.append([])
                room = size
            end = min(hi, lo + room)
            shards[-1].append((shard, lo, end))
            room -= end - lo
            lo = end
    return shards
