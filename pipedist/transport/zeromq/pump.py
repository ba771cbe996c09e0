"""Reads a ZeroMQ socket from an asyncio loop: every frame, none late, and never for too long.

ZMQ_FD is edge-triggered: it wakes up when the socket's state may have changed, not while there
is something to read, and whatever is done with the socket may use up that edge. So the pump
reads until ZMQ_EVENTS, which processes the socket's mailbox, shows that nothing is left, and checks
again after each send. `zmq.asyncio`, in contrast, can lose a message when a recv is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

# Plain ints: the enumerations of pyzmq cost more than the calls that get them. For the same reason,
# `zmq_poll` is asked for a socket's events, and not `getsockopt`.
_POLLIN: Final = int(zmq.POLLIN)
_DONTWAIT: Final = int(zmq.DONTWAIT)


class Pump:
    """Hands each frame that arrives on a socket to a function."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[zmq.Frame, bool], None],  # frame, whether more of its message follow; in the loop
        *,
        wake: Callable[[], None] | None = None,  # first at each wake-up: the socket may be writable
        frames_per_wake_up: int,  # number of frames after which other callbacks run
    ) -> None:
        self._socket = socket
        self._receive = socket.recv
        self._take = take
        self._wake = wake
        self._readable = [(socket, _POLLIN)]
        self._frames_per_wake_up = frames_per_wake_up
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._is_due = False
        self._is_running = False
        self._is_within = False  # whether the last frame was not the last one of its message

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._run)
        self._run_soon()

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None

    def look_again(self) -> None:
        """Look for what has come: needed after each send, which may have used up the edge."""
        if self._loop is None or self._is_due or self._is_running:
            return  # it will look anyway
        if zmq.zmq_poll(self._readable, 0):
            self._run_soon()

    def _run_soon(self) -> None:
        if self._loop is not None and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_due = False
        self._is_running = True
        try:
            if self._loop is not None and self._wake is not None:
                self._wake()
            for number in range(self._frames_per_wake_up):
                if self._loop is None:
                    return
                # The frames of a message arrive together, so that only its first one can be missing. That it is there
                # is most probable at a wake-up, and unlikely after a message; looking for it is cheaper than an error.
                if number and not self._is_within and not zmq.zmq_poll(self._readable, 0):
                    return
                try:
                    frame = self._receive(_DONTWAIT, copy=False)
                except zmq.Again:
                    return
                self._is_within = more = frame.more
                self._take(frame, more)
        except BaseException:
            # A failing function is reported by the loop; the frames after it must not wait for it.
            self._run_soon()
            raise
        finally:
            self._is_running = False
        self._run_soon()
