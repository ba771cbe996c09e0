"""Reads a ZeroMQ socket from an asyncio loop: every frame, none late, and never for too long.

ZMQ_FD is edge-triggered: it wakes up when the socket's state may have changed, not while there
is something to read, and sending may use up that edge. So whoever reads goes on until nothing
is left (a receive that finds nothing has looked at the socket's mailbox itself), and looks again
after each send. `zmq.asyncio`, in contrast, can lose a message when a recv is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq


class Pump:
    """Hands each frame that arrives on a socket to a function.

    Args:
        socket: the socket; the pump does not close it.
        take: called with each frame, in the loop.
        wake: called first at each wake-up: the socket may be writable again.
        frames_per_wake_up: after so many frames, other callbacks have their turn.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[zmq.Frame], None],
        *,
        wake: Callable[[], None] | None = None,
        frames_per_wake_up: int,
    ) -> None:
        self._socket = socket
        self._take = take
        self._wake = wake
        self._frames_per_wake_up = frames_per_wake_up
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._is_due = False

    def start(self) -> None:
        """Begin, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._run)
        self.look_again()

    def stop(self) -> None:
        """End; frames that were not read stay in the socket."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None

    def look_again(self) -> None:
        """Ask for a wake-up: needed after each send, which may have used up the edge."""
        if self._loop is not None and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_due = False
        try:
            if self._loop is not None and self._wake is not None:
                self._wake()
            for _ in range(self._frames_per_wake_up):
                if self._loop is None or not self._read():
                    return
        except BaseException:
            # A failing function is reported by the loop; the frames after it must not wait for it.
            self.look_again()
            raise
        self.look_again()

    def _read(self) -> bool:
        try:
            frame = self._socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        self._take(frame)
        return True
