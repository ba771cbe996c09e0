"""Replica functions that make their worker break the protocol, on its real socket."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from pipedist import get_replica_context
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import encode
from pipedist.transport.dealer import Dealer
from pipedist.worker import result_cache
from pipedist.worker.driver import Driver


def once(folder: str, name: str) -> bool:
    """Return True the first time, in whichever worker."""
    try:
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def dealer() -> Dealer:
    return next(x for x in gc.get_objects() if isinstance(x, Dealer))


def prints_while_the_socket_is_busy(x: Any, fails: bool) -> Any:
    """Print while the socket is busy, so that the line can't be sent at once."""
    (driver,) = (x for x in gc.get_objects() if isinstance(x, Driver))
    with driver._lock:
        print("last words")
    if fails:
        raise ValueError("no")
    return x


RUBBISH: dict[str, Callable[[Any], Any]] = {
    "not msgpack": lambda results: [b"\xc1"],
    "no frames": lambda results: [],
    "no list": lambda results: encode({"a": 1}),
    "too few": lambda results: encode(results[:-1]),
    "no dict": lambda results: encode([1] * len(results)),
    "another slot": lambda results: encode([{"odd": 1}] * len(results)),
}


def rubbish(x: np.ndarray, folder: str, kind: str) -> np.ndarray:
    """Make the next results of its worker malformed, once."""
    if once(folder, kind):
        result_cache.encode = RUBBISH[kind]
    return x * 2


def forbidden(x: np.ndarray, folder: str) -> np.ndarray:
    """Make its worker send a message that only a scheduler may send, once."""
    if once(folder, "bind"):
        dealer().send(msg.Bind(1))
    return x * 2


def hello_again(x: np.ndarray, folder: str) -> np.ndarray:
    """Make its worker send Hello under another name over its connection."""
    if once(folder, "hello"):
        dealer().send(msg.Hello("w1", 0, os.getpid(), "h", "b", msg.WIRE_VERSION, "3", "1", "1", "c"))
    return x * 2


def dies_at(x: np.ndarray, folder: str, at: int) -> np.ndarray:
    if at in x and once(folder, "death"):
        os._exit(9)
    return x * 2


def summed(x: Any, folder: str = "") -> Any:
    """Return the sum over all replicas; the second one dies before it once, if there is a folder."""
    context = get_replica_context()
    assert context is not None
    if folder and context.replica_id_in_sync_group == 1 and once(folder, "death"):
        os._exit(9)
    return context.all_reduce("sum", x)


def scaled(x: Any) -> Any:
    return x * 3


def fails_for_negative(x: Any) -> Any:
    if x < 0:
        raise ValueError(f"negative: {x}")
    return x


def exits(x: Any) -> Any:
    os._exit(3)
