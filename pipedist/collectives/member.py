"""One member's part of a collective: exchange the values of its replicas with the other members.

The gang calls it when each replica of this process has either called a collective or returned. All
members run the same code on the same words, so all reach the same verdict after the same number of
exchanges: one, or two if replicas mismatch (members then send what they called), if a merged function
has to return its result, or if a fold has overflowed (all members then read all values, so that the
error equals that of `values.reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pipedist import values
from pipedist.collectives.channel import (
    ENDED,
    NO_WORD,
    WORD_BYTES,
    Channel,
    Exchanged,
    FoldingChannel,
    MemberEnded,
    StallPolicy,
    agree,
)
from pipedist.collectives.folding import LeafLayout, Pack, Vector, fold_blocks, quietly
from pipedist.collectives.requests import ALL_GATHER, ALL_REDUCE, BARRIER, BROADCAST
from pipedist.collectives.signatures import CheckedCall, account, copy_arrays, mismatch_text
from pipedist.collectives.torch_group import IMPLEMENTATIONS, TORCH_COLLECTIVES, TorchGroup, forget
from pipedist.core import trees
from pipedist.core.remote_errors import class_names, exception_text, rebuild_exception
from pipedist.core.types import Tree
from pipedist.errors import CollectiveMismatchError, RemoteProtocolError
from pipedist.protocol.codec import Frame, decode, encode
from pipedist.reduction.partials import ReduceOp

_ACCOUNTS: Final = b"accounts".ljust(WORD_BYTES, b".")
_VALUES: Final = b"values".ljust(WORD_BYTES, b".")
_ANSWER: Final = b"answer".ljust(WORD_BYTES, b".")


@dataclass(slots=True, eq=False)
class PendingMerge:
    """A merge_call whose function this process must call, in the thread of replica 0; then `Member.answer`."""

    call: Callable[[], Tree]


@dataclass(slots=True, eq=False)
class _Collective:
    """One collective: the calls of the local replicas, None for those that returned."""

    number: int
    calls: Sequence[CheckedCall | None]
    called: Sequence[CheckedCall]
    word: bytes
    policy: StallPolicy


class Member:
    """This process among the members of a gang; without a channel all replicas are local."""

    def __init__(self, replicas: int, local: range, channel: Channel | None) -> None:
        self._replicas = replicas
        self._local = local
        self._channel = channel
        folding: Any = channel
        self._folding: FoldingChannel | None = folding if hasattr(channel, "fold") else None
        self._exchanges = 0
        self._torch: tuple[str, TorchGroup] | None = None

    def begin_another(self) -> None:
        """Take part in another attempt, through the same channel."""
        self._exchanges = 0
        self._torch = None

    def execute(
        self, number: int, calls: Sequence[CheckedCall | None], policy: StallPolicy
    ) -> list[Tree] | PendingMerge:
        """Execute the collective `number` of the step, from 1; a call is None if that replica returned.

        Return the result of each local replica, not shared; or the function that replica 0 must call first.
        """
        word = _common_word(calls)
        called = [call for call in calls if call is not None]
        if self._channel is None and word == NO_WORD:
            raise CollectiveMismatchError(mismatch_text(number, self._accounts(calls)))
        first = called[0]
        kind = first.request.kind
        this = _Collective(number, calls, called, word, policy)
        if kind == ALL_REDUCE and word != NO_WORD and first.signature.layout is not None:
            return self._all_reduce(this, first.signature.layout)
        if word != NO_WORD and first.options.implementation in IMPLEMENTATIONS and kind in TORCH_COLLECTIVES:
            return self._through_torch(this, first)
        received = self._exchange_checked(this, self._contribution(called) if word != NO_WORD else ())
        if kind == ALL_GATHER:
            return self._gather(called, [decode(list(part)) for part in received])
        if kind == BROADCAST:
            decoded = decode(next(list(part) for part in received if part))
            return [copy_arrays(decoded) for _ in called]
        if kind == BARRIER:
            return [None for _ in called]
        return self._merge(first, received, policy)

    def answer(self, result: Tree, error: BaseException | None, policy: StallPolicy) -> list[Tree]:
        """Send the result or error of the merged function to every replica; return the part of each local one.

        Raises the error of the function, or of a result that cannot be sent.
        """
        frames: list[Frame] = []
        if error is None:
            try:
                frames = encode([True, *_split_parts(result, self._replicas)])
            except Exception as unsendable:
                error = unsendable
        if error is not None:
            frames = encode([False, *class_names(error), exception_text(error)])
        received = self._exchange(_ANSWER, frames, policy)
        if error is not None:
            raise error
        return self._parts(received)

    def _parts(self, exchanged: Exchanged) -> list[Tree]:
        answer = decode(next(list(part) for part in _frames_of(exchanged) if part))
        if not answer[0]:
            raise rebuild_exception(*answer[1:])
        return [copy_arrays(_join_parts(answer[1:], replica)) for replica in self._local]

    def _exchange(self, word: bytes, frames: Sequence[Frame], policy: StallPolicy) -> Exchanged:
        self._exchanges += 1
        if self._channel is None:
            return Exchanged((word,), (frames,))
        return self._channel.exchange(self._exchanges, word, frames, policy)

    def _exchange_checked(
        self, this: _Collective, frames: Sequence[Frame], word: bytes | None = None
    ) -> Sequence[Sequence[Frame]]:
        """Exchange frames, and return those of all members; raise if their words differ."""
        exchanged = self._exchange(word or this.word, frames, this.policy)
        self._check(this, exchanged.words)
        return _frames_of(exchanged)

    def _check(self, this: _Collective, words: Sequence[bytes | MemberEnded]) -> None:
        """Raise a mismatch with the calls of all members, if words differ."""
        if ENDED not in words and agree(words):
            return
        exchanged = self._exchange(_ACCOUNTS, encode(self._accounts(this.calls)), this.policy)
        accounts = dict.fromkeys(range(self._replicas), account(None))
        for part in exchanged.frames or ():
            if part:
                accounts |= decode(list(part))
        raise CollectiveMismatchError(mismatch_text(this.number, accounts))

    def _accounts(self, calls: Sequence[CheckedCall | None]) -> dict[int, str]:
        return {replica: account(call) for replica, call in zip(self._local, calls, strict=True)}

    def _contribution(self, called: Sequence[CheckedCall]) -> list[Frame]:
        request = called[0].request
        if request.kind == ALL_GATHER:
            return encode([list(call.leaves) for call in called])
        if request.kind == BARRIER:
            return []
        if request.kind == BROADCAST:
            if request.source not in self._local:
                return []
            return encode(called[request.source - self._local.start].request.tree)
        return encode([trees.flatten(call.request.tree)[0] for call in called])

    # all_reduce

    def _all_reduce(self, this: _Collective, layout: LeafLayout) -> list[Tree]:
        first = this.called[0]
        update = first.request.update
        inputs = [layout.vectors(call.leaves) for call in this.called]
        outputs = layout.outputs()
        try:
            if self._folding is not None:
                self._exchanges += 1
                pack = Pack(layout, inputs, outputs, first.options.bytes_per_pack, update)
                words = self._folding.fold(self._exchanges, this.word, pack, this.policy)
                if words is not None:
                    self._check(this, words)
            else:
                all_replicas = self._all_vectors(this, layout, inputs, this.word)
                for place, group in enumerate(layout.groups):
                    parts = [vectors[place] for vectors in all_replicas]
                    quietly(fold_blocks, group.kernel, parts, outputs[place], update)
        except OverflowError:
            # Raise the error that `values.reduce` raises for these trees.
            all_replicas = self._all_vectors(this, layout, inputs, _VALUES)
            components = [_assemble(first, layout.leaves(vectors)) for vectors in all_replicas]
            values.reduce(first.request.op, values.per_replica(components), None, self._replicas)
            raise
        results = [_assemble(first, layout.leaves(outputs))]
        for call in this.called:
            if call.request.update is not None:
                call.request.update.is_done = True
        if update is not None:  # all replicas get the one new value, which they only read
            return results * len(this.called)
        for call in this.called[1:]:
            results.append(_assemble(call, layout.leaves([vector.copy() for vector in outputs])))
        return results

    def _all_vectors(
        self, this: _Collective, layout: LeafLayout, inputs: list[list[Vector]], word: bytes
    ) -> list[list[Vector]]:
        if self._channel is None:
            return inputs
        frames = [vector.view(np.uint8).data for vectors in inputs for vector in vectors]
        groups = len(layout.groups)
        all_replicas: list[list[Vector]] = []
        for part in self._exchange_checked(this, frames, word):
            vectors = [
                np.frombuffer(frame, layout.groups[place % groups].kernel.dtype)
                for place, frame in enumerate(part)
            ]
            all_replicas += [vectors[at : at + groups] for at in range(0, len(vectors), groups)]
        return all_replicas

    # other collectives

    def _gather(self, called: Sequence[CheckedCall], received: Sequence[Tree]) -> list[Tree]:
        all_replicas = [leaves for part in received for leaves in part]
        axis = called[0].request.axis
        gathered = [np.concatenate(column, axis=axis) for column in zip(*all_replicas, strict=True)]
        results = [gathered, *([array.copy() for array in gathered] for _ in called[1:])]
        return [_assemble(call, leaves) for call, leaves in zip(called, results, strict=True)]

    def _merge(
        self, first: CheckedCall, received: Sequence[Sequence[Frame]], policy: StallPolicy
    ) -> list[Tree] | PendingMerge:
        if self._local.start > 0:
            return self._parts(self._exchange(_ANSWER, (), policy))
        columns = [leaves for part in received for leaves in decode(list(part))]
        function, structure = first.request.function, trees.structure(first.request.tree)
        assert function is not None  # set in every merge_call
        merged = [values.PerReplica(column) for column in zip(*columns, strict=True)]
        args, kwargs = trees.unflatten(structure, merged)
        return PendingMerge(lambda: function(*args, **kwargs))

    def _through_torch(self, this: _Collective, first: CheckedCall) -> list[Tree]:
        """Exchange words to find mismatches; transfer the values with torch.distributed."""
        channel, request, treedef = self._channel, first.request, first.signature.treedef
        members = 1 if channel is None else channel.members
        if members != self._replicas:
            raise ValueError(
                f"implementation {first.options.implementation} needs one process per replica, but "
                f"{self._replicas} replicas are spread over {members}: start as many workers, or use "
                "implementation auto"
            )
        assert treedef is not None  # set in every collective that torch executes
        axis = request.axis
        sizes = [int(leaf.shape[axis]) for leaf in first.leaves] if request.kind == ALL_GATHER else []
        frames = self._exchange_checked(this, encode(sizes))

        def share(fields: dict[str, Any]) -> list[dict[str, Any]]:
            received = self._exchange(_VALUES, encode(fields), this.policy).frames
            return [decode(list(part)) for part in received or ()]

        group = "" if channel is None else channel.group
        if self._torch is None or self._torch[0] != first.options.implementation:
            member = 0 if channel is None else channel.member
            implementation, timeout_s = first.options.implementation, this.policy.timeout_s
            opened = TorchGroup.join(implementation, group, member, members, timeout_s, share)
            self._torch = (implementation, opened)
        torch = self._torch[1]
        try:
            if request.kind == ALL_REDUCE:
                results = torch.all_reduce(ReduceOp.of(request.op), first.leaves)
            elif request.kind == ALL_GATHER:
                results = torch.all_gather(axis, first.leaves, [decode(list(part)) for part in frames])
            else:
                results = torch.broadcast(request.source, first.leaves)
        except BaseException:
            forget(group)
            raise
        return [trees.unflatten(treedef, results)]


def _common_word(calls: Sequence[CheckedCall | None]) -> bytes:
    first = calls[0]
    if first is None:
        return NO_WORD
    word = first.signature.word
    for call in calls:
        if call is not first and (call is None or call.signature.word != word):
            return NO_WORD
    return word


def _frames_of(exchanged: Exchanged) -> Sequence[Sequence[Frame]]:
    if exchanged.frames is None:
        raise RemoteProtocolError(
            f"the members of a gang have sent different words in one exchange: {list(exchanged.words)}"
        )
    return exchanged.frames


def _assemble(call: CheckedCall, leaves: list[Any]) -> Tree:
    treedef = call.signature.treedef
    return leaves[0] if treedef is None else trees.unflatten(treedef, leaves)


def _split_parts(result: Tree, replicas: int) -> list[Tree]:
    """Return the result of a merged function as a tree that the codec can encode."""
    leaves, treedef = trees.flatten(result)
    parts: list[Tree] = []
    for leaf in leaves:
        if isinstance(leaf, values.PerReplica):
            if len(leaf) != replicas:
                raise ValueError(
                    f"merge_call's function returned a {type(leaf).__name__} of {len(leaf)} components, "
                    f"but there are {replicas} replicas"
                )
            parts.append([True, list(leaf.components)])
        else:
            parts.append([False, leaf])
    return [trees.unflatten(treedef, range(len(leaves))), parts]


def _join_parts(answer: list[Tree], replica: int) -> Tree:
    skeleton, parts = answer
    leaves = [part[replica] if is_per_replica else part for is_per_replica, part in parts]
    return trees.unflatten(trees.structure(skeleton), leaves)
