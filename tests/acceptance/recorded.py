"""Real messages, recorded from real runs in both directions: the input of the fuzzers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pipedist
from pipedist.errors import PipedistError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import encode
from pipedist.protocol.wire import Reference, pack, seal
from pipedist.transport.router import Router

F = "tests.acceptance.functions"
FRAME_BYTES_MAX = 200_000
"""Larger frames are not kept: their mutations cost more and find the same."""

Frames = tuple[bytes, ...]

SPECS: tuple[dict[str, Any], ...] = (
    {  # columns, partials, texts, logs, phases, arrays small and large
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 60, "batch": 6, "shuffle": True},
        "stages": {
            "kinds": {"run": f"{F}:kinds"},
            "wide": {"run": f"{F}:wide"},
            "all": {"gather": 0, "of": "wide"},
            "mean": {"reduce": "mean", "of": "wide", "axis": 0},
            "again": {"run": f"{F}:minus", "of": "wide", "with": {"mean": "${stages.mean}"}},
            "total": {"reduce": "sum", "of": "again", "axis": 0, "per": "step"},
        },
    },
    {  # gangs and states
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 12, "batch": 4, "epochs": 2},
        "stages": {
            "summed": {"run": f"{F}:meets", "collectives": True, "with": {"w": "${state.w}"}},
            "out": {"reduce": "sum", "of": "summed", "axis": 0, "per": "step"},
            "w": {"update": f"{F}:step", "of": "out", "init": 0},
        },
    },
    {  # a call that raises
        "pipedist": 1,
        "dataset": {"range": 4, "batch": 2},
        "stages": {"y": {"run": f"{F}:raises"}, "out": {"gather": 0, "of": "y"}},
    },
)

UNSEEN: tuple[msg.Message, ...] = (
    msg.Heartbeat("w0", 3),
    msg.LogLine("y", 3, 0, "it failed\nTraceback", 40, "app.model"),
    msg.Retried(1, 5, "answers", 2, True, "element 7: TimeoutError: timed out after 1 s"),
    msg.Goodbye("w0", 3, "it crashed", crashed=True, lease=2, call=5),
    msg.Refuse("this incarnation is not a member"),
    msg.Stalled(3, ("w1",), "all_reduce at x.py:3"),
    msg.Relay(3, 1, 0, "returned"),
    msg.Exchange(3, 1),
    msg.Cancel(7),
    msg.DropState(2),
    msg.Cancelled(7),
    msg.Quota(1, 1, (4, 0), 2),
    msg.QuotaMet(1, (4, 0)),
    msg.Recall(8, 1, 4, 9),
    msg.Committed(1, 4),
    msg.DataVisible(1),
)
"""Messages of workers on other hosts, and of rare events."""


@contextmanager
def recording(into: list[Frames]) -> Iterator[None]:
    """Record the messages that the routers of this process receive and send."""
    opens, send = Router._open_message, Router.send

    def hears(self: Router, identity: bytes, parts: list[memoryview]) -> tuple[msg.Message, list[memoryview]]:
        into.append(tuple(map(bytes, parts)))
        return opens(self, identity, parts)

    def says(self: Router, identity: bytes, message: msg.Message, payload: Sequence[Any] = ()) -> bool:
        into.append((seal(pack(message), bytes(payload[0]) if payload else b""), *map(bytes, payload[1:])))
        return send(self, identity, message, payload)

    with mock.patch.object(Router, "_open_message", hears), mock.patch.object(Router, "send", says):
        yield


def record() -> list[Frames]:
    """Return messages of runs with every kind of value, deduplicated by class and shape."""
    seen: list[Frames] = []
    with recording(seen):
        for spec in SPECS:
            try:
                pipedist.run(spec, workers=2)
            except PipedistError:
                assert spec is SPECS[-1], "only the last one is to fail"
    seen += [(seal(pack(message)),) for message in UNSEEN]
    files = encode([["mine.py", False, b"x = 1"]])
    seen.append(
        (seal(pack(msg.Code(b"/spec", "ab" * 16, "1 file")), bytes(files[0])), *map(bytes, files[1:]))
    )
    elements = encode([[0, 7, "an answer"], [0, 9, {"score": 0.5}]])
    seen.append((seal(pack(msg.Elements(3, 5)), bytes(elements[0])), *map(bytes, elements[1:])))
    seen.append((seal(pack(msg.Share(1)), bytes(encode({"total": 45})[0])),))
    head = pack(msg.Results(1, 0, 1, 5))
    seen.append((seal(head, b"\x91\xc0", [Reference(1, 1, 0, 1, 65536), Reference(2, 1, 1, 2, 70000)]),))
    small = {frames for frames in seen if sum(map(len, frames)) <= FRAME_BYTES_MAX}
    by_kind: dict[tuple[int, int, int], Frames] = {}
    for frames in sorted(small):
        # the class, the number of frames, and roughly the size: hundreds of similar messages add nothing
        by_kind[frames[0][9], len(frames), sum(map(len, frames)).bit_length()] = frames
    return sorted(by_kind.values())
