"""The fold of tables by key, which may have millions of rows.

A large fold is divided into ranges of keys, which workers merge at the same time. The value of a key depends on its
own rows alone, so the ranges never show in the result. Tables that wait in this process for their fold are written to
temporary files beyond MEMORY_BYTES_MAX, and read from there range by range; so is a value of that size.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from pipedist.reduction.keyed.ranges import Ranges
from pipedist.reduction.keyed.table import KeyedTable
from pipedist.reduction.keyed.texts import in_memory
from pipedist.runs.combine_fold import CombineFold, FoldCall
from pipedist.runs.folds import FoldOptions
from pipedist.spec import Per

MEMORY_BYTES_MAX = 16 * 2**20  # of tables that wait for their fold, in memory
RANGE_BYTES_MAX = 8 * 2**20  # of the tables of a fold call; a larger fold is divided into ranges
RANGE_CALLS_MAX = 4  # fold calls of large folds at a time
_ALIGNMENT_BYTES = 64
_DESCRIPTORS_FREE = 128  # open files that the limit leaves to the rest of the process
_DESCRIPTORS_FREE_MIN = 16  # where it can't be raised


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
        self._mapping = threading.Lock()  # of `_maps`, which several threads use
        self._spilling = anyio.Lock()
        self._cutting = anyio.Lock()  # one range at a time: its pages are left before the next one is read

    async def _put(self, level: int, group: list[Tree]) -> None:
        await self._hold(group)
        await super()._put(level, group)

    async def _hold(self, group: list[Tree]) -> None:
        """Count a group of tables that wait in memory; write all such to a file if they are too large."""
        self._held[id(group)] = group, sum(map(_size, group))
        if sum(size for _, size in self._held.values()) > MEMORY_BYTES_MAX:
            await self._to_file([held for held, _ in self._held.values()])

    async def _to_file(self, groups: Sequence[list[Tree]]) -> None:
        for group in groups:
            self._held.pop(id(group), None)
        async with self._spilling:
            await anyio.to_thread.run_sync(self._spill, groups)

    async def _fold(self, groups: list[list[Tree]]) -> list[Tree]:
        try:
            return await self._folded(groups)
        finally:
            for group in groups:
                self._held.pop(id(group), None)

    async def _folded(self, groups: list[list[Tree]]) -> list[Tree]:
        parts = [part for group in groups for part in group if part is None or part.rows]
        size = sum(part.nbytes for part in parts if part is not None)
        if size <= RANGE_BYTES_MAX or len(parts) < 2 or any(part is None for part in parts):
            return await super()._fold(groups)
        if size > MEMORY_BYTES_MAX:
            await self._to_file(groups)
        # Tables in the given groups may be replaced by views of files.
        groups = [list(group) for group in groups]
        tables = [part for group in groups for part in group if part.rows]
        count = -(-size // RANGE_BYTES_MAX)
        ranges = await anyio.to_thread.run_sync(Ranges, tables, count, _read, self._leave_pages)
        pieces: list[list[Tree]] = [[] for _ in range(count)]
        errors: dict[int, Exception] = {}

        async def merge(place: int) -> None:
            try:
                async with self._range_room:
                    async with self._cutting:
                        cut = iter(await anyio.to_thread.run_sync(ranges.cut, place))
                        self._leave_pages()
                    # A table without rows keeps its place in the fixed tree.
                    found = [[next(cut) if part.rows else part for part in group] for group in groups]
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
            merged = [piece for (piece,) in pieces]
            return [await anyio.to_thread.run_sync(ranges.join, merged, together)]
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
        places = [(group, at) for group in groups for at, part in enumerate(group) if _size(part)]
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
        if not _allow_file():
            raise OutputError(
                f"the tables of stage {self.name} need more open files than the limit of this process. Raise the hard "
                "limit (`ulimit -Hn`)"
            )
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
        pages = _Pages(file.fileno(), 0, access=mmap.ACCESS_READ)
        pages.address = np.frombuffer(pages, np.uint8).__array_interface__["data"][0]
        pages.descriptor = os.dup(file.fileno())
        weakref.finalize(pages, os.close, pages.descriptor)
        with self._mapping:
            self._maps.add(pages)
        return pages

    def _leave_pages(self) -> None:
        """Give back the memory of pages that were read, which the files have, and of the heap that is not used."""
        with self._mapping:
            for pages in self._maps:
                pages.madvise(mmap.MADV_DONTNEED)
        if _trim is not None:
            _trim(0)


class _Pages(mmap.mmap):
    """A temporary file that is mapped to memory."""

    address: int
    descriptor: int


def _read(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of rows in a file, read without their pages: a kernel maps up to 2 MiB around each byte."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, _Pages) or not array.nbytes:
        return array
    found = np.empty(array.shape, array.dtype)
    into, offset = found.reshape(-1).view(np.uint8).data, array.__array_interface__["data"][0] - base.address
    while into.nbytes:
        count = os.preadv(base.descriptor, [into], offset)
        if not count:
            raise OutputError(f"a temporary file in {tempfile.gettempdir()} (TMPDIR) was cut off")
        into, offset = into[count:], offset + count
    return found


def _allow_file() -> bool:
    """Raise the soft limit of open files if few are left; return False if the hard limit is reached.

    ZeroMQ aborts the process that has none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = soft - len(os.listdir("/dev/fd"))
    if soft == resource.RLIM_INFINITY or left >= _DESCRIPTORS_FREE:
        return True
    wanted = 2 * soft if hard == resource.RLIM_INFINITY else min(hard, 2 * soft)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return left + wanted - soft >= _DESCRIPTORS_FREE_MIN


def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`, None elsewhere."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


_trim = _malloc_trim()


def _size(part: Any) -> int:
    """Return the bytes of a table in memory; 0 if it is in a file."""
    if not isinstance(part, KeyedTable):
        return 0
    return sum(array.nbytes for array in part.arrays() if not isinstance(array.base, mmap.mmap))
