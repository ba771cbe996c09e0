"""Collectives through memory that the members share.

How members move in step, and who may write what when, is `pipedist.collectives.steps`'s. Here is what
they do in a step.

An exchange. Each member notes its word and how much it brings, and writes as much of that as fits into
its replicas' packs, as one stream: lengths of the frames, then the frames. When all have arrived, the
words are compared, and each member copies what the others brought; more steps follow until the longest
stream has passed.

A fold of small vectors is one step: each member writes its replicas' vectors, and when all have arrived
each folds all of them for itself. That is more work in all, but only one barrier.

A fold of large ones is a pipeline over pieces that fit into the caches. Every member owns a SLICE of each
piece. In one step it

- writes its replicas' part of piece p, but for its own slice, which nobody else reads;
- folds its slice of piece p - 1, of all replicas in their order (reduce-scatter), right into its own
  result, and copies it to the others' eyes;
- copies the others' slices of piece p - 2 into its result (all-gather).

So there is one barrier a piece, and every byte crosses once each way. A member that overflows raises its
flag, which all look at in the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipedist.collectives.channel import ENDED, Ended, Exchanged, Patience, agree
from pipedist.collectives.folding import Vector, quietly
from pipedist.collectives.packing import Group, Layout, Pack
from pipedist.collectives.segment import Segment
from pipedist.collectives.steps import Steps
from pipedist.transport.codec import Frame

SMALL_BYTES: Final = 512 << 10
"""Vectors of so many bytes, of all replicas together, are folded by every member for itself."""

_ALIGNMENT: Final = 64
_VIEWS_MAX: Final = 256
_WORD: Final = struct.Struct("<QQ")


class SharedChannel:
    """The way to the members of one attempt, which share a segment.

    Its first exchange says that the attempts before this one are over in this process.

    Args:
        segment: of the group.
        serial: of the attempt; larger than those before.
        member: which one this is.
        spans: the replicas of each member.

    Raises:
        GangAborted: the attempt is over already.
    """

    def __init__(self, segment: Segment, *, serial: int, member: int, spans: Sequence[range]) -> None:
        if segment.replicas != spans[-1].stop or not 0 < serial < 1 << 32:
            raise ValueError(f"attempt {serial} of {spans} in a segment for {segment.replicas} replicas")
        self._segment = segment
        self._words = segment.words
        self._spans = spans
        self._start = spans[member].start
        self._small_bytes = min(SMALL_BYTES // segment.replicas, segment.pack_bytes // 2)
        self._steps = Steps(segment, serial=serial, member=member, members=len(spans))

    @property
    def members(self) -> int:
        """How many there are."""
        return len(self._spans)

    @property
    def member(self) -> int:
        """Which one this is."""
        return self._steps.member

    @property
    def group(self) -> str:
        """The segment's name."""
        return self._segment.group

    def ended(self, *, returned: bool) -> None:
        """See `Channel.ended`."""
        self._steps.end(returned=returned)

    def close(self) -> None:
        """See `Channel.close`; the segment is its owner's."""

    # exchange

    def exchange(self, number: int, word: bytes, frames: Sequence[Frame], patience: Patience) -> Exchanged:
        """See `Channel.exchange`."""
        steps = self._steps
        steps.enter(patience)
        stream = _Outgoing(frames)
        note = self._note(word)
        self._words[note + 2], self._words[note + 3] = stream.size_bytes, len(frames)
        stream.write(self._own_packs())
        steps.arrive()
        words = self._await_words(patience)
        if not agree(words):
            return Exchanged(words, None)
        incoming: list[_Incoming | None] = []
        for member in range(self.members):
            if member == self.member or words[member] is ENDED:
                incoming.append(None)
            else:
                note = steps.note(member)
                incoming.append(_Incoming(self._words[note + 2], self._words[note + 3]))
        while True:
            for member, stream_in in enumerate(incoming):
                if stream_in is not None:
                    stream_in.read(self._packs(member, steps.step & 1))
            if not stream.rest_bytes and not any(s is not None and s.rest_bytes for s in incoming):
                break
            stream.write(self._own_packs())
            steps.arrive()
            steps.await_others(patience)
        brought: list[Sequence[Frame]] = [() if s is None else s.frames() for s in incoming]
        brought[self.member] = frames
        return Exchanged(words, brought)

    def _note(self, word: bytes) -> int:
        note = self._steps.next_note()
        words = self._words
        words[note], words[note + 1] = _WORD.unpack(word)
        return note

    def _await_words(self, patience: Patience) -> list[bytes | Ended]:
        """Wait for everybody, at the first step of an exchange, and return what words they brought."""
        steps, words = self._steps, self._words
        returned = steps.await_others(patience, may_end=True)
        found: list[bytes | Ended] = []
        for note in steps.notes():
            found.append(_WORD.pack(words[note], words[note + 1]))
        for member in returned:
            found[member] = ENDED
        return found

    def _await_same(self, word: bytes, patience: Patience) -> Sequence[bytes | Ended] | None:
        """Do the same where all are expected to bring this word; None: they did."""
        steps, words = self._steps, self._words
        low, high = _WORD.unpack(word)
        if not steps.await_others(patience, may_end=True):
            for note in steps.notes():
                if words[note] != low or words[note + 1] != high:
                    break
            else:
                return None
        return self._await_words(patience)

    def _packs(self, member: int, parity: int) -> NDArray[np.uint8]:
        span = self._spans[member]
        return self._segment.input(parity, span.start)[: len(span) * self._segment.pack_bytes]

    def _own_packs(self) -> NDArray[np.uint8]:
        return self._packs(self.member, self._steps.step + 1 & 1)

    # fold

    def fold(
        self, number: int, word: bytes, pack: Pack, patience: Patience
    ) -> Sequence[bytes | Ended] | None:
        """See `FoldingChannel.fold`."""
        self._steps.enter(patience)
        self._note(word)
        if pack.layout.size_bytes <= self._small_bytes:
            return self._fold_small(word, pack, patience)
        return quietly(self._fold_large, word, pack, patience)

    def _fold_small(self, word: bytes, pack: Pack, patience: Patience) -> Sequence[bytes | Ended] | None:
        steps, layout = self._steps, pack.layout
        parity = steps.step + 1 & 1
        views = self._segment.views[parity].get(layout) or self._small_views(layout, parity)
        replica = self._start
        for vectors in pack.inputs:
            for parts, vector in zip(views, vectors, strict=True):
                np.copyto(parts[replica], vector)
            replica += 1
        steps.arrive()
        words = self._await_same(word, patience)
        if words is None:
            for place, group in enumerate(layout.groups):
                quietly(group.kernel.fold, views[place], pack.outputs[place])
        return words

    def _small_views(self, layout: Layout, parity: int) -> list[list[Vector]]:
        """Return where the vectors of each group lie, by group and replica; remembered for the next time."""
        known = self._segment.views[parity]
        if len(known) >= _VIEWS_MAX:
            known.clear()
        views: list[list[Vector]] = []
        at = 0
        for group in layout.groups:
            bytes_ = group.elements * group.kernel.dtype.itemsize
            packs = [self._segment.input(parity, replica) for replica in range(self._segment.replicas)]
            views.append([pack[at : at + bytes_].view(group.kernel.dtype) for pack in packs])
            at += -(-bytes_ // _ALIGNMENT) * _ALIGNMENT
        known[layout] = views
        return views

    def _fold_large(self, word: bytes, pack: Pack, patience: Patience) -> Sequence[bytes | Ended] | None:
        steps = self._steps
        pieces = list(self._pieces(pack))
        first = steps.step + 1
        for at in range(len(pieces) + 2):
            if at < len(pieces):
                pieces[at].write(steps.step + 1 & 1)
            if 0 < at <= len(pieces):
                try:
                    pieces[at - 1].fold(steps.step & 1, steps.step + 1 & 1)
                except OverflowError:
                    steps.raise_flag()
            if at > 1:
                pieces[at - 2].take(steps.step & 1)
            if at <= len(pieces):
                steps.arrive()
                if at:
                    steps.await_others(patience)
                    continue
                words = self._await_same(word, patience)
                if words is not None:
                    return words
        if steps.is_flagged(first):
            raise OverflowError("a result does not fit its dtype")
        return None

    def _pieces(self, pack: Pack) -> Iterator[_Piece]:
        wanted = pack.pack_bytes or self._segment.pack_bytes
        for place, group in enumerate(pack.layout.groups):
            itemsize = max(group.kernel.dtype.itemsize, group.kernel.result.itemsize)
            elements = max(1, min(wanted, self._segment.pack_bytes) // itemsize)
            inputs = [vectors[place] for vectors in pack.inputs]
            for start in range(0, group.elements, elements):
                piece = slice(start, min(start + elements, group.elements))
                yield _Piece(
                    self._segment,
                    self._spans,
                    self.member,
                    group,
                    [vector[piece] for vector in inputs],
                    pack.outputs[place][piece],
                )


class _Piece:
    """A piece of a large vector on its way; see the module's text."""

    def __init__(
        self,
        segment: Segment,
        spans: Sequence[range],
        member: int,
        group: Group,
        inputs: Sequence[Vector],
        output: Vector,
    ) -> None:
        self._segment = segment
        self._span = spans[member]
        self._group = group
        self._inputs = inputs
        self._output = output
        # Slices begin at cache lines, so that no two members write one.
        step = max(1, _ALIGNMENT // group.kernel.dtype.itemsize)
        elements, members = output.size, len(spans)
        self._lo = elements * member // members // step * step
        self._hi = elements if member == members - 1 else elements * (member + 1) // members // step * step

    def write(self, parity: int) -> None:
        """Let the others see this member's inputs."""
        lo, hi = self._lo, self._hi
        for replica, vector in zip(self._span, self._inputs, strict=True):
            target = self._view(self._segment.input(parity, replica), vector.dtype)
            if lo:
                np.copyto(target[:lo], vector[:lo])
            if hi < vector.size:
                np.copyto(target[hi:], vector[hi:])

    def fold(self, parity: int, to_parity: int) -> None:
        """Fold this member's slice."""
        lo, hi = self._lo, self._hi
        kernel = self._group.kernel
        parts = []
        for replica in range(self._segment.replicas):
            if replica in self._span:
                vector = self._inputs[replica - self._span.start]
            else:
                vector = self._view(self._segment.input(parity, replica), kernel.dtype)
            parts.append(vector[lo:hi])
        out = self._output[lo:hi]
        kernel.fold(parts, out)
        np.copyto(self._view(self._segment.result(to_parity), kernel.result)[lo:hi], out)

    def take(self, parity: int) -> None:
        """Copy what the others have folded."""
        lo, hi = self._lo, self._hi
        source = self._view(self._segment.result(parity), self._output.dtype)
        if lo:
            np.copyto(self._output[:lo], source[:lo])
        if hi < source.size:
            np.copyto(self._output[hi:], source[hi:])

    def _view(self, memory: NDArray[np.uint8], dtype: np.dtype[Any]) -> Vector:
        return memory[: self._output.size * dtype.itemsize].view(dtype)


class _Outgoing:
    """Frames as one stream that is written a pack at a time."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        parts = [np.frombuffer(frame, np.uint8) for frame in frames if memoryview(frame).nbytes]
        lengths = np.array([memoryview(frame).nbytes for frame in frames], np.uint64)
        self._parts = [lengths.view(np.uint8), *parts]
        self.size_bytes = self.rest_bytes = sum(part.size for part in self._parts)

    def write(self, packs: NDArray[np.uint8]) -> None:
        """Write what fits."""
        at = 0
        while self._parts and at < packs.size:
            part = self._parts[0]
            taken = part[: packs.size - at]
            packs[at : at + taken.size] = taken
            at += taken.size
            if taken.size == part.size:
                self._parts.pop(0)
            else:
                self._parts[0] = part[taken.size :]
        self.rest_bytes -= at


class _Incoming:
    """The stream of another member.

    Args:
        size_bytes: of all of it.
        frames: how many it holds.
    """

    def __init__(self, size_bytes: int, frames: int) -> None:
        self._stream = np.empty(size_bytes, np.uint8)
        self._at = 0
        self._frames = frames

    @property
    def rest_bytes(self) -> int:
        """What has not come yet."""
        return self._stream.size - self._at

    def read(self, packs: NDArray[np.uint8]) -> None:
        """Read what one step has brought."""
        stop = min(self._at + packs.size, self._stream.size)
        self._stream[self._at : stop] = packs[: stop - self._at]
        self._at = stop

    def frames(self) -> list[Frame]:
        """Return the frames, once all has come; nobody writes to them any more."""
        self._stream.flags.writeable = False
        lengths = self._stream[: 8 * self._frames].view(np.uint64)
        at = 8 * self._frames
        found: list[Frame] = []
        for length in map(int, lengths):
            found.append(self._stream[at : at + length].data)
            at += length
        return found
