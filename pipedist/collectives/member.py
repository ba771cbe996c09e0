"""One member's side of a collective: what its replicas bring together, carried to the others and back.

The gang calls it when each replica of this process has either called a collective or returned. All
members run the same code on the same words, so all come to the same verdict, and to the same number
of exchanges: one, or two where replicas do not match (then they tell each other what they called),
where a merged function has to answer, or where a fold has overflowed (then all look at all values, so
that the error is the one that `values.reduce` gives).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import numpy as np

from pipedist import trees, values
from pipedist.collectives import matching
from pipedist.collectives.channel import (
    ENDED,
    NO_WORD,
    WORD_BYTES,
    Channel,
    Ended,
    Exchanged,
    FoldingChannel,
    Patience,
    agree,
)
from pipedist.collectives.folding import Vector, fold_blocks, quietly
from pipedist.collectives.packing import Layout, Pack
from pipedist.collectives.requests import ALL_GATHER, ALL_REDUCE, BARRIER, BROADCAST
from pipedist.collectives.signatures import Call
from pipedist.collectives.torch_group import CARRIED, IMPLEMENTATIONS, TorchGroup, forget
from pipedist.errors import CollectiveMismatchError
from pipedist.partials import ReduceOp
from pipedist.program import Tree
from pipedist.revival import revive
from pipedist.transport.codec import Frame, decode, encode

_ACCOUNTS: Final = b"accounts".ljust(WORD_BYTES, b".")
_VALUES: Final = b"values".ljust(WORD_BYTES, b".")
_ANSWER: Final = b"answer".ljust(WORD_BYTES, b".")


class Merge:
    """A merge_call of which replica 0 is here: its function is to be called, then `answer`ed.

    Args:
        call: `call()` runs the function, in the thread of replica 0.
    """

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], Tree]) -> None:
        self.call = call


class Member:
    """This process among the members of a gang.

    Args:
        replicas: R.
        local: the replicas of this process.
        channel: to the other members; None where all replicas are here.
    """

    def __init__(self, replicas: int, local: range, channel: Channel | None) -> None:
        self._replicas = replicas
        self._local = local
        self._channel = channel
        self._folding = cast(FoldingChannel, channel) if hasattr(channel, "fold") else None
        self._exchanges = 0
        self._torch: tuple[str, TorchGroup] | None = None

    def meet(self, number: int, calls: Sequence[Call | None], patience: Patience) -> list[Tree] | Merge:
        """Carry out a collective.

        Args:
            number: of the collective in the step, from 1.
            calls: of each local replica; None: it has returned. One of them at least is a Call.

        Returns:
            The result of each local replica, its own; or what replica 0 has to do first.

        Raises:
            CollectiveMismatchError: in every replica alike.
            GangAborted: the gang can't go on.
            OverflowError: an integer result does not fit its dtype.
            Exception: what a merged function raised.
        """
        word = _common_word(calls)
        called = [call for call in calls if call is not None]
        if self._channel is None and word == NO_WORD:
            raise CollectiveMismatchError(matching.mismatch(number, self._accounts(calls)))
        first = called[0]
        kind = first.request.kind
        if kind == ALL_REDUCE and word != NO_WORD and first.signature.layout is not None:
            return self._all_reduce(number, calls, called, first.signature.layout, word, patience)
        if word != NO_WORD and first.options.implementation in IMPLEMENTATIONS and kind in CARRIED:
            return self._through_torch(number, calls, word, first, patience)
        frames: Sequence[Frame] = ()
        if word != NO_WORD:
            frames = self._bring(called)
        exchanged = self._exchange(word, frames, patience)
        self._check(number, calls, exchanged.words, patience)
        brought = exchanged.frames
        assert brought is not None  # the words agree
        if kind == ALL_GATHER:
            return self._gather(called, [decode(list(part)) for part in brought])
        if kind == BROADCAST:
            tree = next(list(part) for part in brought if part)
            decoded = decode(tree)
            return [_own(decoded) for _ in called]
        if kind == BARRIER:
            return [None for _ in called]
        return self._merge(first, brought, patience)

    def answer(self, result: Tree, error: BaseException | None, patience: Patience) -> list[Tree]:
        """Tell every replica what the merged function returned or raised.

        Returns:
            The part of each local replica.

        Raises:
            BaseException: what the function raised, or what makes its result unfit to travel.
        """
        frames: list[Frame] = []
        if error is None:
            try:
                frames = encode([True, *_take_apart(result, self._replicas)])
            except Exception as unfit:
                error = unfit
        if error is not None:
            frames = encode([False, type(error).__module__, type(error).__qualname__, str(error)])
        brought = self._exchange(_ANSWER, frames, patience)
        if error is not None:
            raise error
        return self._parts(brought)

    def _await_answer(self, patience: Patience) -> list[Tree]:
        return self._parts(self._exchange(_ANSWER, (), patience))

    def _parts(self, exchanged: Exchanged) -> list[Tree]:
        frames = exchanged.frames
        assert frames is not None  # nobody ends in the middle of a collective
        told = decode(next(list(part) for part in frames if part))
        if not told[0]:
            raise revive(*told[1:])
        return [_own(_put_together(told[1:], replica)) for replica in self._local]

    def _exchange(self, word: bytes, frames: Sequence[Frame], patience: Patience) -> Exchanged:
        self._exchanges += 1
        if self._channel is None:
            return Exchanged((word,), (frames,))
        return self._channel.exchange(self._exchanges, word, frames, patience)

    def _check(
        self, number: int, calls: Sequence[Call | None], words: Sequence[bytes | Ended], patience: Patience
    ) -> None:
        """Raise a mismatch, after having heard from every member what it called, if words differ."""
        if ENDED not in words and agree(words):
            return
        told = self._exchange(_ACCOUNTS, encode(self._accounts(calls)), patience)
        accounts = dict.fromkeys(range(self._replicas), matching.RETURNED)
        for part in told.frames or ():
            if part:
                accounts |= decode(list(part))
        raise CollectiveMismatchError(matching.mismatch(number, accounts))

    def _accounts(self, calls: Sequence[Call | None]) -> dict[int, str]:
        return {replica: matching.account(call) for replica, call in zip(self._local, calls, strict=True)}

    def _bring(self, called: Sequence[Call]) -> list[Frame]:
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

    def _all_reduce(
        self,
        number: int,
        calls: Sequence[Call | None],
        called: Sequence[Call],
        layout: Layout,
        word: bytes,
        patience: Patience,
    ) -> list[Tree]:
        first = called[0]
        inputs = [layout.vectors(call.leaves) for call in called]
        outputs = layout.outputs()
        try:
            if self._channel is None:
                _fold_groups(layout, inputs, outputs)
            elif self._folding is not None:
                self._exchanges += 1
                pack = Pack(layout, inputs, outputs, first.options.bytes_per_pack)
                words = self._folding.fold(self._exchanges, word, pack, patience)
                if words is not None:
                    self._check(number, calls, words, patience)
            else:
                everybody = self._all_vectors(number, calls, layout, inputs, word, patience)
                _fold_groups(layout, everybody, outputs)
        except OverflowError:
            self._overflow(first, layout, inputs, patience)
            raise
        results = [_assemble(first, layout.leaves(outputs))]
        for call in called[1:]:
            results.append(_assemble(call, layout.leaves([vector.copy() for vector in outputs])))
        return results

    def _all_vectors(
        self,
        number: int,
        calls: Sequence[Call | None],
        layout: Layout,
        inputs: list[list[Vector]],
        word: bytes,
        patience: Patience,
    ) -> list[list[Vector]]:
        """Return the vectors of all replicas."""
        frames = [_bytes_of(vector) for vectors in inputs for vector in vectors]
        if self._channel is None:
            return inputs
        exchanged = self._exchange(word, frames, patience)
        self._check(number, calls, exchanged.words, patience)
        groups = len(layout.groups)
        everybody: list[list[Vector]] = []
        for part in exchanged.frames or ():
            vectors = [
                np.frombuffer(frame, layout.groups[place % groups].kernel.dtype)
                for place, frame in enumerate(part)
            ]
            everybody += [vectors[at : at + groups] for at in range(0, len(vectors), groups)]
        return everybody

    def _overflow(self, first: Call, layout: Layout, inputs: list[list[Vector]], patience: Patience) -> None:
        """Raise the OverflowError that `values.reduce` raises of these trees."""
        everybody = self._all_vectors(0, [first], layout, inputs, _VALUES, patience)
        components = [_assemble(first, layout.leaves(vectors)) for vectors in everybody]
        per_replica = values.per_replica(components)
        values.reduce(first.request.op, per_replica, None, self._replicas)

    # the others

    def _gather(self, called: Sequence[Call], brought: Sequence[Tree]) -> list[Tree]:
        everybody = [leaves for part in brought for leaves in part]
        axis = called[0].request.axis
        gathered = [np.concatenate(column, axis=axis) for column in zip(*everybody, strict=True)]
        results = [gathered]
        for _ in called[1:]:
            results.append([array.copy() for array in gathered])
        return [_assemble(call, leaves) for call, leaves in zip(called, results, strict=True)]

    def _merge(
        self, first: Call, brought: Sequence[Sequence[Frame]], patience: Patience
    ) -> list[Tree] | Merge:
        if self._local.start > 0:
            return self._await_answer(patience)
        columns = [leaves for part in brought for leaves in decode(list(part))]
        function, structure = first.request.function, trees.structure(first.request.tree)
        assert function is not None  # of every merge_call
        merged = [values.PerReplica(column) for column in zip(*columns, strict=True)]
        args, kwargs = trees.unflatten(structure, merged)
        return Merge(lambda: function(*args, **kwargs))

    def _through_torch(
        self, number: int, calls: Sequence[Call | None], word: bytes, first: Call, patience: Patience
    ) -> list[Tree]:
        """Meet as always, so that mismatches are found, and let torch.distributed carry the values."""
        channel, request, treedef = self._channel, first.request, first.signature.treedef
        members = 1 if channel is None else channel.members
        if members != self._replicas:
            raise ValueError(
                f"implementation {first.options.implementation} needs one process per replica, but "
                f"{self._replicas} replicas are spread over {members}: start as many workers, or use "
                "implementation auto"
            )
        assert treedef is not None  # of every collective that torch carries
        axis = request.axis
        sizes = [int(leaf.shape[axis]) for leaf in first.leaves] if request.kind == ALL_GATHER else []
        exchanged = self._exchange(word, encode(sizes), patience)
        self._check(number, calls, exchanged.words, patience)

        def tell(told: dict[str, Any]) -> list[dict[str, Any]]:
            brought = self._exchange(_VALUES, encode(told), patience).frames
            return [decode(list(part)) for part in brought or ()]

        group = "" if channel is None else channel.group
        if self._torch is None or self._torch[0] != first.options.implementation:
            member = 0 if channel is None else channel.member
            opened = TorchGroup.meet(
                first.options.implementation, group, member, members, patience.timeout_s, tell
            )
            self._torch = (first.options.implementation, opened)
        torch = self._torch[1]
        try:
            if request.kind == ALL_REDUCE:
                results = torch.all_reduce(ReduceOp.of(request.op), first.leaves)
            elif request.kind == ALL_GATHER:
                brought = [decode(list(part)) for part in exchanged.frames or ()]
                results = torch.all_gather(axis, first.leaves, brought)
            else:
                results = torch.broadcast(request.source, first.leaves)
        except BaseException:
            forget(group)
            raise
        return [trees.unflatten(treedef, results)]


def _common_word(calls: Sequence[Call | None]) -> bytes:
    first = calls[0]
    if first is None:
        return NO_WORD
    word = first.signature.word
    for call in calls:
        if call is not first and (call is None or call.signature.word != word):
            return NO_WORD
    return word


def _bytes_of(vector: Vector) -> memoryview:
    return vector.view(np.uint8).data


def _fold_groups(layout: Layout, everybody: Sequence[Sequence[Vector]], outputs: Sequence[Vector]) -> None:
    for place, group in enumerate(layout.groups):
        parts = [vectors[place] for vectors in everybody]
        quietly(fold_blocks, group.kernel, parts, outputs[place])


def _assemble(call: Call, leaves: list[Any]) -> Tree:
    treedef = call.signature.treedef
    return leaves[0] if treedef is None else trees.unflatten(treedef, leaves)


def _own(tree: Tree) -> Tree:
    """Return a decoded tree whose arrays are the replica's own, to be written to."""
    return trees.tree_map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def _take_apart(result: Tree, replicas: int) -> list[Tree]:
    """Return what a merged function returned as a tree that the codec can send."""
    leaves, treedef = trees.flatten(result)
    parts: list[Tree] = []
    for leaf in leaves:
        if isinstance(leaf, values.PerReplica):
            if len(leaf) != replicas:
                raise ValueError(
                    f"merge_call's function returned a {type(leaf).__name__} of {len(leaf)} components "
                    f"where there are {replicas} replicas"
                )
            parts.append([True, list(leaf.components)])
        else:
            parts.append([False, leaf])
    return [trees.unflatten(treedef, range(len(leaves))), parts]


def _put_together(told: list[Tree], replica: int) -> Tree:
    skeleton, parts = told
    leaves = [part[replica] if is_per_replica else part for is_per_replica, part in parts]
    return trees.unflatten(trees.structure(skeleton), leaves)
