"""The implementations gloo and nccl: collectives of torch tensors through torch.distributed.

They are opt-in, and outside pipedist's law of bits: torch folds in an order of its own. They need one
process per replica. The members meet in their channel first, as for every collective, so that
mismatches are found; then the process group carries the tensors. It is made at the first such
collective: member 0 opens a store, and its address goes to the others through the channel. Where the
members have a name as a set (`Channel.group`), the process group is kept for their next gangs.

torch is imported only here, and only when somebody asks for it.
"""

from __future__ import annotations

import importlib
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from pipedist import trees
from pipedist.collectives.options import Implementation
from pipedist.collectives.requests import ALL_GATHER, ALL_REDUCE, BROADCAST, CollectiveRequest
from pipedist.errors import UsageError
from pipedist.partials import ReduceOp

IMPLEMENTATIONS: Final = (Implementation.GLOO, Implementation.NCCL)
CARRIED: Final = (ALL_REDUCE, ALL_GATHER, BROADCAST)
"""The collectives that torch carries out; the others have no tensors to carry."""

_GROUPS_MAX: Final = 4
_TIMEOUT_S_MAX: Final = 7 * 86400.0

Tensor = Any
Tell = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Brings a dict of plain values to all members, and returns what all brought, by member."""


def tensors_of(
    request: CollectiveRequest, implementation: Implementation
) -> tuple[list[Tensor], trees.Treedef]:
    """Return the tensors of a replica's tree.

    Raises:
        UsageError: torch is not installed.
        TypeError: a leaf is no torch tensor.
        ValueError: there are no leaves.
    """
    torch = _torch(implementation)
    leaves, treedef = trees.flatten(request.tree)
    if not leaves:
        raise ValueError(f"{request.kind} of a tree without leaves, {request.tree!r}")
    for path, leaf in zip(trees.treedef_paths(treedef), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            place = f"leaf {path!r}" if path else "the value"
            raise TypeError(
                f"{request.kind} of {place}: implementation {implementation} carries torch tensors, not "
                f"{type(leaf).__name__}; use torch.from_numpy, or implementation auto"
            )
    return leaves, treedef


class TorchGroup:
    """A process group of torch.distributed among the members of a gang.

    Args:
        identity: the same text in all members.
        group: torch's; None where there is one member.
        member: this member's rank.
        members: how many there are.
    """

    def __init__(self, identity: str, group: Any, member: int, members: int) -> None:
        self.identity = identity
        self._group = group
        self._member = member
        self._members = members

    @classmethod
    def meet(
        cls,
        implementation: Implementation,
        group: str,
        member: int,
        members: int,
        timeout_s: float,
        tell: Tell,
    ) -> TorchGroup:
        """Return the process group of these members: the one that all have kept, or a new one.

        Args:
            implementation: gloo or nccl.
            group: `Channel.group`.
            member: this one.
            members: how many there are.
            timeout_s: how long its operations may take.
            tell: how members tell each other something; used once or twice, by all alike.

        Raises:
            UsageError: torch is not installed, or lacks this implementation.
        """
        dist = _distributed(implementation)
        if members == 1:
            return cls("", None, 0, 1)
        key = (implementation, group)
        kept = _kept.get(key) if group else None
        boot = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        told = tell(
            {"kept": "" if kept is None else kept.identity, "boot": boot, "host": socket.gethostname()}
        )
        if kept is not None and all(one["kept"] == kept.identity for one in told):
            return kept
        _kept.pop(key, None)
        is_local = bool(boot) and all(one["boot"] == boot for one in told)
        timeout = timedelta(seconds=min(timeout_s, _TIMEOUT_S_MAX))
        if member == 0:
            host = "127.0.0.1" if is_local else socket.gethostbyname(told[0]["host"])
            store = dist.TCPStore(host, 0, members, True, timeout, wait_for_workers=False)
            address: dict[str, Any] = {
                "host": host,
                "port": int(store.port),
                "identity": secrets.token_hex(8),
            }
            tell(address)
        else:
            address = tell({})[0]
            store = dist.TCPStore(address["host"], address["port"], members, False, timeout)
        store = dist.PrefixStore(address["identity"], store)
        if implementation is Implementation.GLOO:
            options = dist.ProcessGroupGloo._Options()
            make = dist.ProcessGroupGloo.create_device
            options._devices = [make(hostname="127.0.0.1") if is_local else make()]
            options._timeout = timeout
            made = dist.ProcessGroupGloo(store, member, members, options)
        else:
            made = dist.ProcessGroupNCCL(store, member, members, timeout)
        opened = cls(address["identity"], made, member, members)
        if group:
            while len(_kept) >= _GROUPS_MAX:
                _kept.pop(next(iter(_kept)))
            _kept[key] = opened
        return opened

    def all_reduce(self, op: ReduceOp, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return the fold of all members' tensors, in torch's order; MEAN divides their sum.

        Raises:
            TypeError: MEAN of integers.
        """
        dist = _distributed(Implementation.GLOO)
        results = []
        for leaf in leaves:
            if op is ReduceOp.MEAN and not (leaf.is_floating_point() or leaf.is_complex()):
                raise TypeError(f"mean of a tensor of {leaf.dtype}: cast it to a float first")
            result = leaf.detach().clone().contiguous()
            if self._group is not None:
                options = dist.AllreduceOptions()
                options.reduceOp = {
                    ReduceOp.SUM: dist.ReduceOp.SUM,
                    ReduceOp.MEAN: dist.ReduceOp.SUM,
                    ReduceOp.MIN: dist.ReduceOp.MIN,
                    ReduceOp.MAX: dist.ReduceOp.MAX,
                    ReduceOp.PROD: dist.ReduceOp.PRODUCT,
                }[op]
                self._group.allreduce([result], options).wait()
            if op is ReduceOp.MEAN:
                result /= self._members
            results.append(result)
        return results

    def all_gather(self, axis: int, leaves: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return all members' tensors end to end.

        Args:
            axis: along which.
            leaves: this member's.
            sizes: by member, the sizes of its leaves along the axis.
        """
        torch = _torch(Implementation.GLOO)
        results = []
        for place, leaf in enumerate(leaves):
            mine = leaf.detach().movedim(axis, 0).contiguous()
            counts = [of[place] for of in sizes]
            parts = [mine]
            if self._group is not None:
                # torch wants equal sizes: rows are added, and cut off again.
                padded = torch.zeros((max(counts), *mine.shape[1:]), dtype=mine.dtype, device=mine.device)
                padded[: mine.shape[0]] = mine
                parts = [torch.empty_like(padded) for _ in counts]
                self._group.allgather([parts], [padded]).wait()
            rows = [part[:count] for part, count in zip(parts, counts, strict=True)]
            results.append(torch.cat(rows).movedim(0, axis).contiguous())
        return results

    def broadcast(self, source: int, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of member `source`; those of the others are of the same shapes."""
        dist = _distributed(Implementation.GLOO)
        results = []
        for leaf in leaves:
            result = leaf.detach().clone().contiguous()
            if self._group is not None:
                options = dist.BroadcastOptions()
                options.rootRank = source
                options.rootTensor = 0
                self._group.broadcast([result], options).wait()
            results.append(result)
        return results


_kept: Final[dict[tuple[Implementation, str], TorchGroup]] = {}


def forget(group: str) -> None:
    """Drop the process groups of these members: an operation on them has failed, or was left."""
    for implementation in IMPLEMENTATIONS:
        _kept.pop((implementation, group), None)


def _torch(implementation: Implementation) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UsageError(
            f"implementation {implementation} needs torch, which is not installed here ({error}): "
            "pip install torch, or use implementation auto"
        ) from None


def _distributed(implementation: Implementation) -> Any:
    _torch(implementation)
    dist = importlib.import_module("torch.distributed")
    name = f"ProcessGroup{'Gloo' if implementation is Implementation.GLOO else 'NCCL'}"
    if not dist.is_available() or not hasattr(dist, name):
        raise UsageError(f"this torch was built without {implementation}: use implementation auto")
    return dist
