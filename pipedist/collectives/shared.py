"""Exchange and fold through shared memory.

How members synchronise, and which member may write what and when, is defined in
`pipedist.collectives.steps`. This module defines the work of each step.

Exchange. Each member writes its word and the size of its stream to its note, and as much of the stream
(lengths of the frames, then the frames) as fits into its replicas' packs. When all members have arrived,
the words are compared, and each member copies the other streams; more steps follow until the longest
stream is transferred.

Fold of small vectors: one step. Each member writes its replicas' vectors; when all have arrived, each
member folds all of them itself. This is more work in total, but needs only one barrier.

Fold of large vectors: a pipeline over pieces that fit into the caches. Every member owns a SLICE of each
piece. In one step it

- copies the other slices of piece p - 2 into its result (all-gather);
- writes its replicas' part of piece p, except its own slice, which no other member reads;
- folds its slice of piece p - 1, of all replicas in order (reduce-scatter), directly into its result, and
  copies it to shared memory.

So there is one barrier per piece, and every byte is transferred once in each direction. A member whose
fold overflows raises its flag, which all members check at the end.

Of two members, each copies its slice to where it has read it: into the pack of the other one, which is the
only reader, and takes it before it writes that pack again. Fewer cache lines then go to and fro between cores.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipedist.collectives.channel import ENDED, Exchanged, GangAborted, MemberEnded, StallPolicy, agree
from pipedist.collectives.folding import DtypeGroup, FusedUpdate, LeafLayout, Pack, Vector, quietly
from pipedist.collectives.segment import GangSegment
from pipedist.collectives.steps import Steps
from pipedist.protocol.codec import Frame

SMALL_BYTES: Final = 512 << 10  # maximum size of small vectors, of all replicas together

SERIAL_MAX: Final = (1 << 32) - 1

_ALIGNMENT: Final = 64
_VIEWS_MAX: Final = 256
_WORD: Final = struct.Struct("<QQ")


class SharedChannel:
    """Channel among the members of one attempt that share a segment.

    Its first exchange announces that earlier attempts are over in this process. `serial` is larger than those
    of all earlier attempts; `spans` are the replicas of each member. Raises GangAborted if it is over already.
    `begin` begins a later attempt of the same members.
    """

    def __init__(self, segment: GangSegment, *, serial: int, member: int, spans: Sequence[range]) -> None:
        if segment.replicas != spans[-1].stop or not 0 < serial <= SERIAL_MAX:
            raise ValueError(f"attempt {serial} of {spans} in a segment for {segment.replicas} replicas")
        self.members, self.member, self.group = len(spans), member, segment.group
        self._segment = segment
        self._words = segment.words
        self._spans = spans
        self._start = spans[member].start
        self._small_bytes = min(SMALL_BYTES // segment.replicas, segment.pack_bytes // 2)
        self._steps = Steps(segment, serial=serial, member=member, members=len(spans))

    def begin(self, serial: int) -> None:
        if serial > SERIAL_MAX:
            raise ValueError(f"attempt {serial}, the limit is {SERIAL_MAX}")
        if serial != self._steps.serial:  # else another part of this process has begun it
            self._steps.begin(serial)

    def ended(self, *, returned: bool) -> None:
        self._steps.end(returned=returned)

    def close(self) -> None:
        """Do nothing: the segment stays mapped."""

    # exchange

    def exchange(self, number: int, word: bytes, frames: Sequence[Frame], policy: StallPolicy) -> Exchanged:
        steps = self._steps
        steps.enter(policy)
        stream = _Outgoing(frames)
        note = self._note(word)
        self._words[note + 2], self._words[note + 3] = stream.size_bytes, len(frames)
        stream.write(self._own_packs())
        steps.arrive()
        words = self._await_words(policy)
        if not agree(words):
            return Exchanged(words, None)
        incoming = {
            member: _Incoming(self._words[note + 2], self._words[note + 3])
            for member, note in enumerate(steps.notes())
            if member != self.member and words[member] is not ENDED
        }
        while True:
            for member, stream_in in incoming.items():
                stream_in.read(self._packs(member, steps.step & 1))
            if not stream.rest_bytes and not any(s.rest_bytes for s in incoming.values()):
                break
            stream.write(self._own_packs())
            steps.arrive()
            for member in steps.await_others(policy, may_end=True):
                # One that returned before this exchange reaches none of its steps.
                if words[member] is not ENDED:
                    raise GangAborted(f"member {member} left during a collective")
        brought: list[Sequence[Frame]] = [()] * self.members
        brought[self.member] = frames
        for member, stream_in in incoming.items():
            brought[member] = stream_in.frames()
        return Exchanged(words, brought)

    def _note(self, word: bytes) -> int:
        note = self._steps.next_note()
        words = self._words
        words[note], words[note + 1] = _WORD.unpack(word)
        return note

    def _await_words(self, policy: StallPolicy) -> list[bytes | MemberEnded]:
        """Wait for all members in the first step of an exchange; return their words."""
        steps, words = self._steps, self._words
        returned = steps.await_others(policy, may_end=True)
        found: list[bytes | MemberEnded] = [_WORD.pack(words[at], words[at + 1]) for at in steps.notes()]
        for member in returned:
            found[member] = ENDED
        return found

    def _await_same(self, word: bytes, policy: StallPolicy) -> Sequence[bytes | MemberEnded] | None:
        """Wait for all members; return None if all sent this word, else their words."""
        steps, words = self._steps, self._words
        low, high = _WORD.unpack(word)
        if not steps.await_others(policy, may_end=True):
            for note in steps.notes():
                if words[note] != low or words[note + 1] != high:
                    break
            else:
                return None
        return self._await_words(policy)

    def _packs(self, member: int, parity: int) -> NDArray[np.uint8]:
        span = self._spans[member]
        return self._segment.input(parity, span.start)[: len(span) * self._segment.pack_bytes]

    def _own_packs(self) -> NDArray[np.uint8]:
        return self._packs(self.member, self._steps.step + 1 & 1)

    # fold

    def fold(
        self, number: int, word: bytes, pack: Pack, policy: StallPolicy
    ) -> Sequence[bytes | MemberEnded] | None:
        self._steps.enter(policy)
        self._note(word)
        if pack.layout.size_bytes <= self._small_bytes:
            return self._fold_small(word, pack, policy)
        return quietly(self._fold_large, word, pack, policy)

    def _fold_small(
        self, word: bytes, pack: Pack, policy: StallPolicy
    ) -> Sequence[bytes | MemberEnded] | None:
        steps, layout = self._steps, pack.layout
        parity = steps.step + 1 & 1
        views = self._segment.views[parity].get(layout) or self._small_views(layout, parity)
        replica = self._start
        for vectors in pack.inputs:
            for parts, vector in zip(views, vectors, strict=True):
                np.copyto(parts[replica], vector)
            replica += 1
        steps.arrive()
        words = self._await_same(word, policy)
        if words is None:
            for place, group in enumerate(layout.groups):
                quietly(group.kernel.fold, views[place], pack.outputs[place])
        return words

    def _small_views(self, layout: LeafLayout, parity: int) -> list[list[Vector]]:
        """Return the vectors in shared memory, by group and replica; cached."""
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

    def _fold_large(
        self, word: bytes, pack: Pack, policy: StallPolicy
    ) -> Sequence[bytes | MemberEnded] | None:
        steps = self._steps
        pieces = list(self._pieces(pack))
        first = steps.step + 1
        for at in range(len(pieces) + 2):
            if at > 1:
                pieces[at - 2].take(steps.step + 1 & 1, steps.step & 1)
            if at < len(pieces):
                pieces[at].write(steps.step + 1 & 1)
            if 0 < at <= len(pieces):
                try:
                    pieces[at - 1].fold(steps.step & 1, steps.step + 1 & 1)
                except OverflowError:
                    steps.raise_flag()
            if at <= len(pieces):
                steps.arrive()
                if at:
                    steps.await_others(policy)
                    continue
                words = self._await_same(word, policy)
                if words is not None:
                    return words
        if steps.is_flagged(first):
            raise OverflowError("a result does not fit its dtype")
        return None

    def _pieces(self, pack: Pack) -> Iterator[_Piece]:
        wanted = pack.pack_bytes or self._segment.pack_bytes
        for place, group in enumerate(pack.layout.groups):
            elements = max(1, min(wanted, self._segment.pack_bytes) // group.itemsize)
            inputs = [vectors[place] for vectors in pack.inputs]
            for start in range(0, group.elements, elements):
                piece = slice(start, min(start + elements, group.elements))
                parts = [vector[piece] for vector in inputs]
                output = pack.outputs[place][piece]
                yield _Piece(
                    self._segment, self._spans, self.member, group, parts, output, start, pack.update
                )


@dataclass(eq=False)
class _Piece:
    """A piece of a large vector; see the module docstring."""

    segment: GangSegment
    spans: Sequence[range]
    member: int
    group: DtypeGroup
    inputs: Sequence[Vector]
    output: Vector
    start: int  # its place in the vector
    update: FusedUpdate | None

    def __post_init__(self) -> None:
        # Slices start at cache lines, so that no two members write to the same one.
        step = max(1, _ALIGNMENT // self.group.kernel.dtype.itemsize)
        elements, members, member = self.output.size, len(self.spans), self.member
        self._lo = elements * member // members // step * step
        self._hi = elements if member == members - 1 else elements * (member + 1) // members // step * step
        self._span = self.spans[member]

    def write(self, parity: int) -> None:
        lo, hi = self._lo, self._hi
        for replica, vector in zip(self._span, self.inputs, strict=True):
            target = self._view(self.segment.input(parity, replica), vector.dtype)
            if lo:
                np.copyto(target[:lo], vector[:lo])
            if hi < vector.size:
                np.copyto(target[hi:], vector[hi:])

    def fold(self, parity: int, to_parity: int) -> None:
        lo, hi = self._lo, self._hi
        kernel = self.group.kernel
        parts = []
        for replica in range(self.segment.replicas):
            if replica in self._span:
                vector = self.inputs[replica - self._span.start]
            else:
                vector = self._view(self.segment.input(parity, replica), kernel.dtype)
            parts.append(vector[lo:hi])
        out = self.output[lo:hi]
        kernel.fold(parts, out)
        if self.update is not None:
            self.update.apply(slice(self.start + lo, self.start + hi), out)
        np.copyto(self._folded(parity, to_parity, 1 - self.member)[lo:hi], out)

    def take(self, parity: int, from_parity: int) -> None:
        """Copy the slices that other members folded, before its packs are written again."""
        lo, hi = self._lo, self._hi
        source = self._folded(parity, from_parity, self.member)
        if lo:
            np.copyto(self.output[:lo], source[:lo])
        if hi < source.size:
            np.copyto(self.output[hi:], source[hi:])

    def _folded(self, parity: int, result_parity: int, reader: int) -> Vector:
        """Return the memory with the slices that others than a reader have folded."""
        if len(self.spans) == 2:
            return self._view(self.segment.input(parity, self.spans[reader].start), self.output.dtype)
        return self._view(self.segment.result(result_parity), self.output.dtype)

    def _view(self, memory: NDArray[np.uint8], dtype: np.dtype[Any]) -> Vector:
        return memory[: self.output.size * dtype.itemsize].view(dtype)


class _Outgoing:
    """A stream of frames, written pack by pack."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        parts = [np.frombuffer(frame, np.uint8) for frame in frames if memoryview(frame).nbytes]
        lengths = np.array([memoryview(frame).nbytes for frame in frames], np.uint64)
        self._parts = [lengths.view(np.uint8), *parts]
        self.size_bytes = self.rest_bytes = sum(part.size for part in self._parts)

    def write(self, packs: NDArray[np.uint8]) -> None:
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
    def __init__(self, size_bytes: int, frames: int) -> None:
        self._stream = np.empty(size_bytes, np.uint8)
        self._at = 0
        self._frames = frames

    @property
    def rest_bytes(self) -> int:
        return self._stream.size - self._at

    def read(self, packs: NDArray[np.uint8]) -> None:
        stop = min(self._at + packs.size, self._stream.size)
        self._stream[self._at : stop] = packs[: stop - self._at]
        self._at = stop

    def frames(self) -> list[Frame]:
        """Return the frames, read-only, once the stream is complete."""
        self._stream.flags.writeable = False
        lengths = self._stream[: 8 * self._frames].view(np.uint64)
        ends = accumulate(map(int, lengths), initial=8 * self._frames)
        return [self._stream[start:stop].data for start, stop in pairwise(ends)]
