"""The way to the scheduler, as the threads of a worker share it.

One thread at a time uses the socket: the one that holds the driver's lock. A thread that prints can't wait
for that: what it printed is sent at once if the socket is free, else by whoever uses it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from pipedist.protocol.codec import Frame
from pipedist.protocol.messages import LogLine, Message
from pipedist.transport.zeromq.client_socket import ConnectionLost

LOG_LINES_WAITING_MAX = 1000
"""Lines printed by threads while the socket was busy; older ones are lost first."""


class Socket(Protocol):
    """What a worker needs of `pipedist.transport.zeromq.Dealer`."""

    def send(
        self,
        message: Message,
        payload: Sequence[Frame] = (),
        *,
        copy: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        """Send a message; `copy` False: the payload's memory does not change any more."""

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message; return whether there is one."""

    def recv(self) -> tuple[Message, list[memoryview]]:
        """Return the next message and its payload."""


class Uplink:
    """Printed lines on their way, and what became of the connection meanwhile.

    Args:
        socket: to the scheduler.
        lock: held by whoever uses it.
    """

    def __init__(self, socket: Socket, lock: threading.Lock) -> None:
        self._socket = socket
        self._lock = lock
        self._lines: deque[LogLine] = deque(maxlen=LOG_LINES_WAITING_MAX)
        self._closed = False
        self.fault: BaseException | None = None
        """What went wrong with the scheduler while user code ran; told when it is over."""

    def put(self, line: LogLine) -> None:
        """Send a line at once if the socket is free, else leave it to whoever uses it."""
        self._lines.append(line)
        if self.fault is None and self._lock.acquire(blocking=False):
            try:
                self.send_lines()
            except ConnectionLost as error:  # no fault of whoever prints
                self.fault = error
            finally:
                self._lock.release()

    def send_lines(self) -> None:
        """Send the lines that wait; the lock is held.

        Raises:
            ConnectionLost: they can't be sent.
        """
        while self._lines and not self._closed:
            self._socket.send(self._lines.popleft(), timeout_s=math.inf)

    def close(self) -> None:
        """Send nothing more; the lock is held."""
        self._closed = True
