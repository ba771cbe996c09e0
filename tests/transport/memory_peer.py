"""A process with a Dealer, for the tests of shared memory: `python -m tests.transport.memory_peer`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np

from pipedist.protocol.codec import decode, encode
from pipedist.protocol.messages import Assign, Bind, Cancel, LogLine, Results, Stop
from pipedist.transport.dealer import Dealer
from pipedist.transport.shared_memory import pool


def stop_in_the_middle_of_the_next_copy() -> None:
    whole = pool._fill

    def halves(slot: np.ndarray[Any, Any], frame: np.ndarray[Any, Any]) -> None:
        pool._fill = whole
        middle = frame.size // 2
        whole(slot[:middle], frame[:middle])
        os.kill(os.getpid(), signal.SIGSTOP)
        whole(slot[middle:], frame[middle:])

    pool._fill = halves


def fork_and_let_go(kept: list[Any]) -> None:
    """End, in another process, the views that this process keeps."""
    pid = os.fork()
    if pid == 0:
        kept.clear()
        os._exit(0)
    os.waitpid(pid, 0)


def serve(dealer: Dealer) -> None:
    kept: list[Any] = []
    dealer.send(LogLine("", 0, 0, "here"))
    while True:
        dealer.poll(60.0)
        message, frames = dealer.recv()
        match message:
            case Assign(lease):
                # Sends back what it got, times two, so that both directions carry the frames.
                value = decode(frames)
                kept += [value] * (lease == 1)
                dealer.send(Results(lease, 0, 1, 0), encode(value * 2), copy=False)
                del value
            case Cancel(1):
                kept.clear()
            case Cancel(2):
                dealer.send(Results(0, 0, 1, 0), encode([float(array.sum()) for array in kept]))
            case Cancel(3):
                stop_in_the_middle_of_the_next_copy()
            case Cancel(4):
                fork_and_let_go(kept)
            case Cancel(5):  # a child that lives longer, and holds every descriptor
                if os.fork() == 0:
                    signal.pause()
            case Cancel(6):
                descriptors = len(os.listdir("/proc/self/fd"))
                with open("/proc/self/statm") as file:
                    pages = int(file.read().split()[1])
                dealer.send(Results(0, 0, 1, 0), encode([descriptors, pages * os.sysconf("SC_PAGE_SIZE")]))
            case Bind():
                faults = []
                for array in kept:
                    try:
                        array.flags.writeable = True
                    except ValueError:
                        faults.append("read-only")
                dealer.send(Results(0, 0, 1, 0), encode(faults))
            case Stop():
                return
        del frames


def main(endpoint: str, name: str) -> None:
    with Dealer(endpoint, identity=name.encode(), keys=None) as dealer:
        serve(dealer)


if __name__ == "__main__":
    main(*sys.argv[1:])
