"""The implementations gloo and nccl: collectives of torch tensors through torch.distributed.

They are opt-in, and results are not bit-identical: torch folds in its own order. They need one process
per replica. Members first exchange words in their channel, as in every collective, so that mismatches are
found; then the process group transfers the tensors. It is created at the first such collective: member 0
opens a store, and sends its address to the others through the channel. If the members have a name as a
set (`Channel.group`), the process group is cached for their next gangs.

torch is imported only here, when one of these implementations is used.
"""

from __future__ import annotations

import importlib
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from pipedist.collectives.options import Implementation
from pipedist.collectives.requests import ALL_GATHER, ALL_REDUCE, BROADCAST, CollectiveRequest
from pipedist.core import trees
from pipedist.core.platform_id import kernel_boot
from pipedist.errors import UsageError
from pipedist.reduction.partials import ReduceOp

IMPLEMENTATIONS: Final = (Implementation.GLOO, Implementation.NCCL)
TORCH_COLLECTIVES: Final = (ALL_REDUCE, ALL_GATHER, BROADCAST)  # the others have no tensors
_GROUPS_MAX: Final = 4
_TIMEOUT_S_MAX: Final = 7 * 86400.0

Tensor = Any
Share = Callable[[dict[str, Any]], list[dict[str, Any]]]  # sends plain values to all members; returns all


def tensors_of(
    request: CollectiveRequest, implementation: Implementation
) -> tuple[list[Tensor], trees.Treedef]:
    """Return the tensors of a replica's tree; raise TypeError or ValueError if it has others or none."""
    torch = _torch(implementation)
    leaves, treedef = trees.flatten(request.tree)
    if not leaves:
        raise ValueError(f"{request.kind} of a tree without leaves, {request.tree!r}")
    for path, leaf in zip(trees.treedef_paths(treedef), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            place = f"leaf {path!r}" if path else "the value"
            raise TypeError(
                f"{request.kind} of {place}: implementation {implementation} needs torch tensors, got "
                f"{type(leaf).__name__}; use torch.from_numpy, or implementation auto"
            )
    return leaves, treedef


@dataclass(eq=False)
class TorchGroup:
    identity: str  # equal in all members
    _group: Any  # torch's process group; None for one member
    _members: int

    @classmethod
    def join(
        cls,
        implementation: Implementation,
        group: str,
        member: int,
        members: int,
        timeout_s: float,
        share: Share,
    ) -> TorchGroup:
        """Return the process group of these members: the one that all have cached, or a new one.

        `member` is this one's rank; `share` exchanges values among members, and is called once or twice, equally
        in all of them. Raises UsageError if torch is not installed, or was built without this implementation.
        """
        dist = _distributed(implementation)
        if members == 1:
            return cls("", None, 1)
        key = (implementation, group)
        cached = _cached.get(key) if group else None
        boot, known = kernel_boot(), "" if cached is None else cached.identity
        shared = share({"cached": known, "boot": boot, "host": socket.gethostname()})
        if cached is not None and all(one["cached"] == cached.identity for one in shared):
            return cached
        _cached.pop(key, None)
        is_local = bool(boot) and all(one["boot"] == boot for one in shared)
        timeout = timedelta(seconds=min(timeout_s, _TIMEOUT_S_MAX))
        if member == 0:
            host = "127.0.0.1" if is_local else socket.gethostbyname(shared[0]["host"])
            store = dist.TCPStore(host, 0, members, True, timeout, wait_for_workers=False)
            identity = secrets.token_hex(8)
            address: dict[str, Any] = {"host": host, "port": int(store.port), "identity": identity}
            share(address)
        else:
            address = share({})[0]
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
        opened = cls(address["identity"], made, members)
        if group:
            while len(_cached) >= _GROUPS_MAX:
                _cached.pop(next(iter(_cached)))
            _cached[key] = opened
        return opened

    def all_reduce(self, op: ReduceOp, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return the fold of all members' tensors, in torch's order; MEAN divides the sum."""
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
        """Return all members' tensors, concatenated; `sizes` has for each member those along the axis."""
        torch = _torch(Implementation.GLOO)
        results = []
        for place, leaf in enumerate(leaves):
            mine = leaf.detach().movedim(axis, 0).contiguous()
            counts = [of[place] for of in sizes]
            parts = [mine]
            if self._group is not None:
                # torch needs equal sizes: pad rows, and remove them after the transfer.
                padded = torch.zeros((max(counts), *mine.shape[1:]), dtype=mine.dtype, device=mine.device)
                padded[: mine.shape[0]] = mine
                parts = [torch.empty_like(padded) for _ in counts]
                self._group.allgather([parts], [padded]).wait()
            rows = [part[:count] for part, count in zip(parts, counts, strict=True)]
            results.append(torch.cat(rows).movedim(0, axis).contiguous())
        return results

    def broadcast(self, source: int, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of member `source`; all members have the same shapes."""
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


_cached: Final[dict[tuple[Implementation, str], TorchGroup]] = {}


def forget(group: str) -> None:
    """Drop the cached process groups of these members after a failed or interrupted operation."""
    for implementation in IMPLEMENTATIONS:
        _cached.pop((implementation, group), None)


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
