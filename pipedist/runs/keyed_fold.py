"""The fold of tables by key, which may have millions of rows.

A large fold is divided into ranges of keys, which workers merge at the same time. The value of a key depends on its
own rows alone, so the ranges never show in the result. Tables that wait in this process for their fold are written to
temporary files beyond MEMORY_BYTES_MAX, and read from there range by range; so is a value of that size.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Unpack
from weakref import WeakSet

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.outputs.sink import Sink
from pipedist.reduction.keyed.table import KeyedTable, join, ranges
from pipedist.reduction.keyed.texts import in_memory
from pipedist.runs.folds import CombineFold, FoldCall, FoldOptions, Per

MEMORY_BYTES_MAX = 32 * 2**20  # of tables that wait for their fold, in memory
RANGE_BYTES_MAX = 8 * 2**20  # of the tables of a fold call; a larger fold is divided into ranges
RANGE_CALLS_MAX = 4  # fold calls of large folds at a time
_ALIGNMENT_BYTES = 64


class KeyedFold(CombineFold):
    """The fold of a combine function by key."""

    def __init__(
        self,
        name: str,
        per: Per,
        call: FoldCall,
        sink: Sink | None,
        *,
        calls_max: int,
        **options: Unpack[FoldOptions],
    ) -> None:
        super().__init__(name, per, call, sink, calls_max=calls_max, **options)
        self._range_room = anyio.CapacityLimiter(RANGE_CALLS_MAX)
        self._held: dict[int, tuple[list[Tree], int]] = {}  # groups in memory, and their bytes, by identity
        self._maps: WeakSet[mmap.mmap] = WeakSet()  # of temporary files
        self._spilling = anyio.Lock()

    async def _put(self, level: int, group: list[Tree]) -> None:
        await self._hold(group)
        await super()._put(level, group)

    async def _hold(self, group: list[Tree]) -> None:
        """Count a group of tables that wait in memory; write all such to a file if they are too large."""
        self._held[id(group)] = group, sum(map(_size, group))
        if sum(size for _, size in self._held.values()) > MEMORY_BYTES_MAX:
            async with self._spilling:
                groups = [held for held, _ in self._held.values()]
                self._held.clear()
                await anyio.to_thread.run_sync(self._spill, groups)

    async def _fold(self, groups: list[list[Tree]]) -> list[Tree]:
        try:
            return await self._folded(groups)
        finally:
            for group in groups:
                self._held.pop(id(group), None)

    async def _folded(self, groups: list[list[Tree]]) -> list[Tree]:
        # Tables in the given groups may be replaced by views of files.
        groups = [list(group) for group in groups]
        tables = [part for group in groups for part in group if isinstance(part, KeyedTable) and part.rows]
        size = sum(table.nbytes for table in tables)
        if (
            size <= RANGE_BYTES_MAX
            or len(tables) < 2
            or any(part is None for group in groups for part in group)
        ):
            return await super()._fold(groups)
        count = -(-size // RANGE_BYTES_MAX)
        bounds = await anyio.to_thread.run_sync(ranges, tables, count)
        cuts = {id(table): rows for table, rows in zip(tables, bounds, strict=True)}
        pieces: list[list[Tree]] = [[] for _ in range(count)]

        def part(place: int) -> list[list[Tree]]:
            return [
                [each.cut(*cuts[id(each)][place : place + 2]) if each.rows else each for each in group]
                for group in groups
            ]

        errors: dict[int, Exception] = {}

        async def merge(place: int) -> None:
            try:
                async with self._range_room:
                    found = await anyio.to_thread.run_sync(part, place)
                    self._leave_pages()
                    pieces[place].append(await self._call(found))
                    del found
                    self._leave_pages()
                await self._hold(pieces[place])
            except Exception as error:  # raised below, by itself
                errors[place] = error
                tasks.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as tasks:
                for place in range(count):
                    tasks.start_soon(merge, place, name=f"range {place} of a fold of {self.name}")
            if errors:
                raise errors[min(errors)]
            together = self._in_file if size > MEMORY_BYTES_MAX else in_memory
            return [await anyio.to_thread.run_sync(lambda: join([piece for (piece,) in pieces], together))]
        finally:
            for piece in pieces:
                self._held.pop(id(piece), None)
            self._leave_pages()

    async def _scope_value(self) -> Tree:
        value = await super()._scope_value()
        self._held.clear()
        if _size(value) > MEMORY_BYTES_MAX:
            group: list[Tree] = [value]
            del value
            await anyio.to_thread.run_sync(self._spill, [group])
            return group[0]
        return value

    def _spill(self, groups: Sequence[list[Tree]]) -> None:
        """Write the tables in groups to a temporary file without a name, and replace them by views of it."""
        places = [
            (group, at) for group in groups for at, part in enumerate(group) if isinstance(part, KeyedTable)
        ]
        flat = [trees.flatten(group[at]) for group, at in places]
        arrays = [
            leaf for leaves, _ in flat for leaf in leaves if isinstance(leaf, np.ndarray) and leaf.nbytes
        ]
        if not arrays:
            return
        with self._file() as file:
            offsets = []
            for array in arrays:
                offsets.append(file.seek(-(-file.tell() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES))
                file.write(np.ascontiguousarray(array).view(np.uint8).data)
            pages = self._mapped(file)
        views = iter(
            np.ndarray(array.shape, array.dtype, pages, offset)
            for array, offset in zip(arrays, offsets, strict=True)
        )
        for (group, at), (leaves, treedef) in zip(places, flat, strict=True):
            found = [next(views) if isinstance(leaf, np.ndarray) and leaf.nbytes else leaf for leaf in leaves]
            group[at] = trees.unflatten(treedef, found)

    def _in_file(self, arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
        """Concatenate arrays of one dtype in a temporary file without a name."""
        rows, last = 0, np.empty(0)
        with self._file() as file:
            for last in arrays:
                rows += len(last)
                file.write(np.ascontiguousarray(last).reshape(-1).view(np.uint8).data)
                self._leave_pages()
            shape = (rows, *last.shape[1:])
            return (
                np.ndarray(shape, last.dtype, self._mapped(file))
                if file.tell()
                else np.empty(shape, last.dtype)
            )

    @contextmanager
    def _file(self) -> Iterator[IO[bytes]]:
        try:
            with tempfile.TemporaryFile(prefix="pipedist-") as file:
                yield file
        except OSError as error:
            raise OutputError(
                f"can't store tables of stage {self.name} in {tempfile.gettempdir()} (TMPDIR): "
                f"{error.strerror or error}"
            ) from error

    def _mapped(self, file: IO[bytes]) -> mmap.mmap:
        file.flush()
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps.add(pages)
        return pages

    def _leave_pages(self) -> None:
        """Give back the memory of pages that were read; they are read from the files again when they are needed."""
        for pages in self._maps:
            pages.madvise(mmap.MADV_DONTNEED)


def _size(part: Any) -> int:
    """Return the bytes of a table in memory; 0 if it is in a file."""
    if not isinstance(part, KeyedTable):
        return 0
    return sum(array.nbytes for array in part.arrays() if not isinstance(array.base, mmap.mmap))
