"""Check one replica's collective call, and reduce what all replicas must agree on to one short word.

A replica's request is checked as far as that replica alone allows (an axis out of range, a dtype that
cannot be folded), and becomes a `CheckedCall`: its arrays, and the digest of its SIGNATURE, a text of
everything that all replicas must agree on. Signatures are cached by dtype and shape, so a repeated call
costs one lookup; texts for people are built only on a mismatch or timeout, equal in every replica.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pipedist.collectives.channel import WORD_BYTES
from pipedist.collectives.folding import LeafLayout
from pipedist.collectives.options import CommunicationOptions
from pipedist.collectives.requests import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    MERGE_CALL,
    CollectiveRequest,
)
from pipedist.collectives.torch_group import IMPLEMENTATIONS, TORCH_COLLECTIVES, tensors_of
from pipedist.core import dlpack, trees
from pipedist.core.types import Tree
from pipedist.reduction import partials
from pipedist.reduction.partials import ReduceOp, axis_of, resolve_axes

_SIGNATURES_MAX: Final = 1024
_INT64: Final = np.dtype(np.int64)
_GATHERED_KINDS: Final = "biufcSUmM"


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """The properties of a call that all replicas must agree on."""

    word: bytes  # digest of the text
    layout: LeafLayout | None = None  # for all_reduce
    treedef: trees.Treedef | None = None  # for all_reduce and all_gather; None for a bare array


@dataclass(slots=True)
class CheckedCall:
    request: CollectiveRequest
    signature: Signature
    options: CommunicationOptions  # the effective ones
    leaves: Sequence[np.ndarray[Any, Any]] = ()  # of all_reduce and all_gather: contiguous, native order


_known: dict[Hashable, Signature] = {}
_OPS: Final[dict[str, ReduceOp]] = {op.value: op for op in ReduceOp}  # faster than the enum's lookup


def check(request: CollectiveRequest, options: CommunicationOptions, replicas: int) -> CheckedCall:
    """Check one replica's request; raise ValueError, TypeError or OverflowError if it is invalid."""
    if request.options is not None:
        options = options.merged(request.options)
    if options.implementation in IMPLEMENTATIONS and request.kind in TORCH_COLLECTIVES:
        return _check_tensors(request, options, replicas)
    if type(request.tree) is not np.ndarray:
        request.tree = dlpack.to_host(request.tree)
    return _CHECKS[request.kind](request, options, replicas)


def detach(call: CheckedCall, replica: int) -> None:
    """Copy a call's values: other replicas run before they are read, and may share their memory."""
    request = call.request
    if call.leaves:
        call.leaves = copy_arrays(call.leaves)
    elif request.kind == MERGE_CALL or (request.kind == BROADCAST and request.source == replica):
        request.tree = copy_arrays(request.tree)


def copy_arrays(tree: Tree) -> Tree:
    return trees.tree_map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def _describe(call: CheckedCall) -> str:
    """Return a call as text: `all_reduce(sum) of {'a': float32[3]}`."""
    request = call.request
    if request.kind == ALL_REDUCE:
        text = f"all_reduce({ReduceOp.of(request.op).value}) of {_format_tree(request.tree)}"
    elif request.kind == ALL_GATHER:
        text = f"all_gather(axis={request.axis}) of {_format_tree(request.tree)}"
    elif request.kind == BROADCAST:
        text = f"broadcast(source={request.source})"
    elif request.kind == BARRIER:
        text = "barrier()"
    else:
        args, kwargs = request.tree
        text = f"merge_call({request.label}) with {trees.describe(trees.structure((args, kwargs)))}"
    if request.label and request.kind != MERGE_CALL:
        text = f"{request.label} ({text})"
    return text + _format_options(call.options)


def _check_reduce(request: CollectiveRequest, options: CommunicationOptions, replicas: int) -> CheckedCall:
    tree = request.tree
    op = _OPS.get(request.op) if isinstance(request.op, str) else None
    if op is None:
        op = ReduceOp.of(request.op)
    key: Hashable
    if type(tree) is np.ndarray and tree.dtype.isnative:  # the common case, cheaper
        key = (op._value_, tree.dtype, tree.shape, options.key, request.label, request.target)
        leaves = [tree if tree.flags.c_contiguous else np.ascontiguousarray(tree)]
        treedef = None
    else:
        found, treedef = trees.flatten(tree)
        if not found:
            problem = f"all_reduce of a tree without leaves, {tree!r}: there is nothing to reduce"
            raise ValueError(f"{problem}; give it arrays or numbers")
        leaves = [_number(leaf, op, treedef, index) for index, leaf in enumerate(found)]
        spec = tuple((leaf.dtype, leaf.shape) for leaf in leaves)
        key = (op._value_, treedef, spec, options.key, request.label, request.target)
    signature = _known.get(key)
    if signature is None:
        if treedef is None:
            _number(tree, op, None, 0)
        dtypes, shapes = [leaf.dtype for leaf in leaves], [leaf.shape for leaf in leaves]
        spelled = [(leaf.dtype.name, leaf.shape) for leaf in leaves]
        text = f"all_reduce {op.value} {_structure(treedef)} {spelled} {request.label} {request.target}"
        signature = _intern(key, text, options, LeafLayout.of(op, dtypes, shapes), treedef)
    return CheckedCall(request, signature, options, leaves)


def _check_gather(request: CollectiveRequest, options: CommunicationOptions, replicas: int) -> CheckedCall:
    axis = request.axis = axis_of(request.axis)
    found, treedef = trees.flatten(request.tree)
    if not found:
        problem = f"all_gather of a tree without leaves, {request.tree!r}: there is nothing to gather"
        raise ValueError(f"{problem}; give it arrays")
    leaves, spec = [], []
    for index, leaf in enumerate(found):
        try:
            array = np.asarray(leaf, order="C")
            if array.ndim == 0:
                raise ValueError(
                    "a scalar has no axis to gather along; give it an array of shape (1,), or all_reduce it"
                )
            if array.dtype.kind not in _GATHERED_KINDS and array.dtype.name != "bfloat16":
                raise TypeError(f"arrays of dtype {array.dtype} can't be gathered")
            (along,) = resolve_axes((axis,), array.shape)
        except (TypeError, ValueError) as error:
            raise _at("all_gather", treedef, index, error) from None
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        leaves.append(array)
        name = {"U": "str", "S": "bytes"}.get(array.dtype.kind, array.dtype.name)
        spec.append((name, array.shape[:along], array.shape[along + 1 :]))
    key = (treedef, tuple(spec), options.key)
    signature = _known.get(key)
    if signature is None:
        text = f"all_gather {_structure(treedef)} {spec}"
        signature = _intern(key, text, options, treedef=treedef)
    return CheckedCall(request, signature, options, leaves)


def _check_broadcast(request: CollectiveRequest, options: CommunicationOptions, replicas: int) -> CheckedCall:
    source = _source(request, replicas)
    text = f"broadcast {source} {request.label} {request.target}"
    return CheckedCall(request, _plain(text, options), options)


def _check_barrier(request: CollectiveRequest, options: CommunicationOptions, replicas: int) -> CheckedCall:
    return CheckedCall(request, _plain("barrier", options), options)


def _check_merge(request: CollectiveRequest, options: CommunicationOptions, replicas: int) -> CheckedCall:
    if not callable(request.function):
        raise TypeError(f"merge_call expects a function, got {request.function!r}")
    structure = trees.structure(request.tree)
    return CheckedCall(request, _plain(f"merge_call {request.label} {structure}", options), options)


def _check_tensors(request: CollectiveRequest, options: CommunicationOptions, replicas: int) -> CheckedCall:
    """Check a request for torch; torch itself checks dtypes and devices."""
    leaves, treedef = tensors_of(request, options.implementation)
    spec: list[Hashable] = [(str(leaf.dtype), tuple(leaf.shape)) for leaf in leaves]
    if request.kind == ALL_REDUCE:
        detail = ReduceOp.of(request.op).value
    elif request.kind == BROADCAST:
        detail = str(_source(request, replicas))
    else:
        axis = request.axis = axis_of(request.axis)
        detail = ""
        for index, leaf in enumerate(leaves):
            try:
                (along,) = resolve_axes((axis,), tuple(leaf.shape))
            except ValueError as error:
                raise _at(request.kind, treedef, index, error) from None
            shape = tuple(leaf.shape)
            spec[index] = (str(leaf.dtype), shape[:along], shape[along + 1 :])
    key = (request.kind, detail, treedef, tuple(spec), options.key, request.target)
    text = f"{request.kind} {detail} {_structure(treedef)} {spec} {request.target}"
    signature = _known.get(key) or _intern(key, text, options, treedef=treedef)
    return CheckedCall(request, signature, options, leaves)


_CHECKS: Final = {
    ALL_REDUCE: _check_reduce,
    ALL_GATHER: _check_gather,
    BROADCAST: _check_broadcast,
    BARRIER: _check_barrier,
    MERGE_CALL: _check_merge,
}


def _source(request: CollectiveRequest, replicas: int) -> int:
    source = request.source
    if isinstance(source, (bool, np.bool_)) or not hasattr(type(source), "__index__"):
        raise TypeError(f"`source` must be the id of a replica, an int, got {source!r}")
    source = request.source = operator.index(source)
    if not 0 <= source < replicas:
        raise ValueError(f"`source` must be the id of a replica, 0..{replicas - 1}, got {source}")
    return source


def _number(leaf: Any, op: ReduceOp, treedef: trees.Treedef | None, index: int) -> np.ndarray[Any, Any]:
    """Return a leaf as a contiguous array of native byte order; raise if it cannot be folded."""
    try:
        if type(leaf) is int:
            array = np.asarray(leaf, _INT64)
        else:
            if not isinstance(leaf, np.ndarray):  # `partials` raises the error of other types
                partials.leaf_partial(op, None, leaf)
            array = np.asarray(leaf, order="C")
            LeafLayout.of(op, [array.dtype.newbyteorder("=")], [array.shape])
    except (TypeError, ValueError) as error:
        raise _at(f"all_reduce({op.value})", treedef, index, error) from None
    except OverflowError:
        too_big = OverflowError(f"{leaf} does not fit int64, the dtype of Python integers")
        raise _at(f"all_reduce({op.value})", treedef, index, too_big) from None
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _at(operation: str, treedef: trees.Treedef | None, index: int, error: Exception) -> Exception:
    """Return the error, prefixed with the path of its leaf."""
    path = "" if treedef is None else trees.treedef_paths(treedef)[index]
    return type(error)(f"{operation} of " + (f"leaf {path!r}: " if path else "the value: ") + str(error))


def _plain(text: str, options: CommunicationOptions) -> Signature:
    key = (text, options.key)
    return _known.get(key) or _intern(key, text, options)


def _intern(
    key: Hashable,
    text: str,
    options: CommunicationOptions,
    layout: LeafLayout | None = None,
    treedef: trees.Treedef | None = None,
) -> Signature:
    digest = hashlib.blake2b(f"{text} {options.key}".encode(), digest_size=WORD_BYTES)
    if len(_known) >= _SIGNATURES_MAX:  # bounds memory if every call has a new shape
        _known.clear()
    signature = _known[key] = Signature(digest.digest(), layout, treedef)
    return signature


def _structure(treedef: trees.Treedef | None) -> str:
    return "*" if treedef is None else trees.describe(treedef)


class _LeafText(str):
    """Placeholder of a leaf in a printed tree."""

    __slots__ = ()
    __repr__ = str.__str__


def _format_tree(tree: Tree) -> str:
    leaves, treedef = trees.flatten(tree)
    return repr(trees.unflatten(treedef, [_LeafText(_format_leaf(leaf)) for leaf in leaves]))


def _format_leaf(leaf: Any) -> str:
    if type(leaf) in (int, float, complex):
        return type(leaf).__name__
    if isinstance(leaf, (np.ndarray, np.generic)):
        return f"{leaf.dtype.newbyteorder('=').name}{list(leaf.shape)}"
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', []))}"


def _format_options(options: CommunicationOptions) -> str:
    fields = []
    if options.bytes_per_pack:
        fields.append(f"bytes_per_pack={options.bytes_per_pack}")
    if options.implementation != "auto":
        fields.append(f"implementation={options.implementation}")
    return f" ({', '.join(fields)})" if fields else ""


_RETURNED = "returned, and calls nothing more"

_ADVICE = (
    "Every replica must call the same collectives, in the same order, with trees of the same structure, "
    "dtypes and shapes (all_gather: sizes may differ along its axis), and must not return before the "
    "others have called theirs."
)


def account(call: CheckedCall | None) -> str:
    """Return a replica's call as text for the others; None: the replica has returned."""
    return _RETURNED if call is None else f"{_describe(call)}, at {call.request.where}"


def mismatch_text(number: int, accounts: Mapping[int, str]) -> str:
    """Return the text of a mismatch in the collective `number` (from 1) of the step."""
    together: dict[str, list[int]] = {}
    for replica in sorted(accounts):
        together.setdefault(accounts[replica], []).append(replica)
    detail = "differs between replicas" if _RETURNED not in together else "was not called by every replica"
    lines = [f"collective {number} of this step {detail}:"]
    lines += [f"  {format_replicas(replicas)}: {text}" for text, replicas in together.items()]
    if len(together) == 1:  # only the number of the variable differs
        lines.append("The calls assign different variables of the same name: give them different names.")
    return "\n".join([*lines, _ADVICE])


def stall_text(number: int, text: str, missing: str, waited_s: float) -> str:
    """Return the text of a waiting replica's collective: its account, and the missing replicas."""
    return (
        f"collective {number} of this step has waited {waited_s:g} s for {missing}: {text}. Raise "
        "CommunicationOptions(timeout_s=...) if steps may take that long; else find where they hang"
    )


def format_replicas(replicas: Sequence[int]) -> str:
    """Return "replica 3", or "replicas 0-2, 5"."""
    runs: list[list[int]] = []
    for replica in replicas:
        if runs and replica == runs[-1][1] + 1:
            runs[-1][1] = replica
        else:
            runs.append([replica, replica])
    spelled = ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in runs)
    return f"replica{'s' if len(replicas) > 1 else ''} {spelled}"
