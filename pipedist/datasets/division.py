"""The division of elements among steps and replicas, the contract of a spec's results.

Three rules of pure arithmetic, independent of worker processes:

1. Step s of an epoch is the positions [s*B, (s+1)*B) of the epoch's order; a step never crosses
   an epoch, so an epoch's last step may be shorter (or is dropped, with `drop_remainder`).
2. A step of m elements is cut into chunks of ceil(m / R), in replica order; the last ones are
   shorter or empty (tf.distribute's rule for a global batch: 4 rows on 3 replicas are 2, 2, 0).
   So the non-empty shards are always those of replicas 0..parts-1.
3. The element at row `index` of the dataset has, in epoch e, the id `e * N + index`.

The epoch's order is the dataset's own, or `permutation` of it.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import force_setattr


def chunks(rows: int, replicas: int) -> int:
    """Return the number of non-empty shards of a step of `rows` (>= 1) elements."""
    return -(-rows // -(-rows // replicas))


class Division(Struct, frozen=True):
    """The arithmetic of one dataset: steps, shards and element ids.

    Steps are numbered through all epochs: step `e * steps_per_epoch + s` is the s-th step of epoch e. Methods
    raise IndexError if there is no such step or replica.
    """

    length: int  # N, elements of one epoch, >= 0
    batch: int  # B, the GLOBAL batch size in elements, >= 1
    replicas: int  # R, shards per step, >= 1
    drop_remainder: bool = False  # drop an epoch's last step if it has fewer than B elements
    steps_per_epoch: int = 0  # follows from the others

    def __post_init__(self) -> None:
        steps = self.length // self.batch if self.drop_remainder else -(-self.length // self.batch)
        force_setattr(self, "steps_per_epoch", steps)

    def rows(self, step: int) -> int:
        """Return m, the number of elements of `step`."""
        _, first = self._place(step)
        return min(self.batch, self.length - first)

    def parts(self, step: int) -> int:
        """Return the number of non-empty shards of `step`: those of replicas 0..parts-1."""
        return chunks(self.rows(step), self.replicas)

    def calls(self, steps: int) -> int:
        """Return the number of non-empty shards of steps [0, steps)."""
        if not steps:
            return 0
        epochs, rest = divmod(steps, self.steps_per_epoch)
        whole = self.parts(0)
        return (
            epochs * (whole * (self.steps_per_epoch - 1) + self.parts(self.steps_per_epoch - 1))
            + rest * whole
        )

    def bounds(self, step: int, replica: int) -> tuple[int, int, int]:
        """Return (epoch, start, stop), the positions of a shard within its epoch's order; empty: start == stop."""
        if not 0 <= replica < self.replicas:
            raise IndexError(f"replica {replica} of {self.replicas}")
        epoch, first = self._place(step)
        rows = min(self.batch, self.length - first)
        size = -(-rows // self.replicas)
        return epoch, first + min(replica * size, rows), first + min((replica + 1) * size, rows)

    def bounds_from(self, step: int, replica: int, count: int) -> list[tuple[int, int]]:
        """Return (start, stop) of `count` consecutive shards from this one on.

        The same as `bounds` of each up to the epoch's end, many times faster.
        """
        _, first = self._place(step)
        found: list[tuple[int, int]] = []
        while len(found) < count and first < self.length:
            rows = min(self.batch, self.length - first)
            if self.drop_remainder and rows < self.batch:
                break
            if self.replicas == 1:
                found.append((first, first + rows))
            else:
                size = -(-rows // self.replicas)
                ends = [min(part * size, rows) for part in range(self.replicas + 1)]
                found += [(first + a, first + b) for a, b in pairwise(ends)][replica:]
                replica = 0
            first += self.batch
        return found[:count]

    def ids(self, step: int, replica: int) -> range:
        """Return the element ids of a shard of an unshuffled dataset."""
        epoch, start, stop = self.bounds(step, replica)
        base = epoch * self.length
        return range(base + start, base + stop)

    def _place(self, step: int) -> tuple[int, int]:
        steps = self.steps_per_epoch
        if step < 0 or steps == 0:
            raise IndexError(f"step {step} of a dataset with {steps} steps an epoch")
        epoch, within = divmod(step, steps)
        return epoch, within * self.batch


def permutation(seed: int, dataset_name: str, epoch: int, n: int) -> npt.NDArray[np.int64]:
    """Return the order of a shuffled dataset of `n` rows in one epoch: int64[n], read-only.

    The algorithm is part of the spec language, so a spec gives the same bytes in all versions:

    1. h = SHA-256 of the UTF-8 text "pipedist permutation 1", seed, dataset name and epoch,
       the four joined with a NUL character, numbers in decimal.
    2. the stream of `numpy.random.PCG64(numpy.random.SeedSequence(int(h, big-endian)))`:
       its first n raw 64-bit outputs are the keys of rows 0..n-1.
    3. the rows in ascending order of their keys; equal keys in row order.

    NumPy promises that the streams of SeedSequence and of a bit generator's raw output do not
    change between versions (NEP 19). It does not promise that of `Generator.permutation`, so
    that is not used.
    """
    text = "\0".join(("pipedist permutation 1", str(seed), dataset_name, str(epoch)))
    entropy = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(n)
    order: npt.NDArray[np.int64] = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order
