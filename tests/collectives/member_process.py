"""A member of a gang in a process of its own: python -m tests.collectives.member_process WHERE ...

    WHERE SERIAL MEMBER SIZES SCENARIO [TIMEOUT_S]

It prints one JSON line when it is about to do what it is there for, and one with the outcomes.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

import numpy as np

from pipedist.collectives.gang import LocalGang
from pipedist.collectives.options import CommunicationOptions
from pipedist.collectives.segment import GangSegments
from pipedist.collectives.shared import SharedChannel
from tests.collectives.gangs import Replica, run_member, spans_of

ELEMENTS = 1_200_000


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def vector(replica: int, elements: int = ELEMENTS) -> np.ndarray[Any, Any]:
    """Values whose float32 sum depends on the order of the replicas."""
    return np.random.default_rng(replica).normal(size=elements).astype(np.float32) * 10.0 ** (3 * replica)


def digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def reduce_once(replica: Replica) -> str:
    say(ready=replica.number)
    return digest(replica.all_reduce("sum", vector(replica.number)))


def reduce_for_ever(replica: Replica) -> None:
    x = vector(replica.number)
    replica.all_reduce("sum", x, CommunicationOptions(timeout_s=60))  # the others may begin late
    say(ready=replica.number)
    while True:
        replica.all_reduce("sum", x)
        replica.all_reduce("max", x[:100])


def wait_for_ever(replica: Replica) -> None:
    """The last replica never comes."""
    replica.barrier()
    say(ready=replica.number)
    if replica.number == replica.gang._replicas - 1:
        signal.pause()
    replica.all_reduce("sum", x := vector(replica.number, 10))
    del x


def die(replica: Replica) -> None:
    """The last replica is killed while the others wait for it."""
    replica.barrier()
    say(ready=replica.number)
    if replica.number == replica.gang._replicas - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    replica.barrier()


def mismatch(replica: Replica) -> None:
    x = vector(replica.number, 10)
    if replica.number:
        replica.all_reduce("sum", x)
    else:
        replica.all_gather(x)


def return_early(replica: Replica) -> str:
    replica.barrier()
    if replica.number:
        return "early"
    replica.barrier()
    return "met"


def everything(replica: Replica) -> Any:
    big = vector(replica.number, 1_000_000)
    return [
        digest(replica.all_reduce("mean", {"a": big, "b": big[:7]})["a"]),
        digest(replica.all_gather(big[: 300_000 + replica.number])),
        digest(replica.broadcast(big if replica.number == 1 else None, source=1)),
        replica.merge_call(lambda v: v, replica.number),
        int(replica.all_reduce("prod", replica.number + 2)),
    ]


def torch_everything(replica: Replica) -> Any:
    import torch

    gloo = CommunicationOptions(implementation="gloo")  # type: ignore[arg-type]
    n = replica.number
    x = torch.arange(4, dtype=torch.float32) + n
    mean = replica.all_reduce("mean", {"x": x, "y": x.to(torch.float64)}, gloo)
    rows = replica.all_gather(torch.full((n + 1, 2), n), 0, gloo)
    columns = replica.all_gather(torch.full((2, n), n), -1, gloo)
    source = replica.broadcast([x], 1, gloo)
    refused = []
    for tree in (np.zeros(3), torch.zeros(n + 1)):
        try:
            replica.all_reduce("sum", tree, gloo)
        except (TypeError, ValueError) as error:
            refused.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return [
        [mean["x"].tolist(), mean["y"].tolist(), str(mean["y"].dtype)],
        [replica.all_reduce(op, x, gloo).tolist() for op in ("sum", "min", "max", "prod")],
        rows.tolist(),
        columns.tolist(),
        source[0].tolist(),
        refused,
        replica.all_reduce("sum", np.float32(1.5)).item(),
    ]


def torch_needs_a_process_each(replica: Replica) -> Any:
    import torch

    replica.all_reduce("sum", torch.zeros(3), CommunicationOptions(implementation="gloo"))  # type: ignore[arg-type]


def main() -> None:
    where, serial, member, sizes, scenario, timeout_s = sys.argv[1:7]
    spans = spans_of(json.loads(sizes))
    span = spans[int(member)]
    segments = GangSegments()
    channel = SharedChannel(segments.get(where), serial=int(serial), member=int(member), spans=spans)
    options = CommunicationOptions(timeout_s=float(timeout_s))
    gang = LocalGang(replicas=spans[-1].stop, local=span, channel=channel, options=options)
    outcomes = run_member(gang, span, globals()[scenario])
    channel.close()
    segments.close()
    say(
        outcomes=[
            {"error": type(outcome).__name__, "text": str(outcome)}
            if isinstance(outcome, BaseException)
            else {"value": outcome}
            for outcome in outcomes
        ]
    )


if __name__ == "__main__":
    main()
