"""Authentication of a CURVE server: accepts or rejects client keys (RFC 27, ZAP).

A server with ZAP_ENFORCE_DOMAIN and a domain rejects every client if the handler does not reply, or is
gone: it fails closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from pipedist.transport.zeromq.connections import plain_address
from pipedist.transport.zeromq.pump import Pump

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
ZAP_DOMAIN: Final = b"pipedist"
_FRAMES_MAX: Final = 16


class ZapHandler:
    """Lets in the keys (Z85) of a fixed set, each under its own name (`User-Id`: the key)."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        allowed: frozenset[bytes],
        on_refuse: Callable[[str], None],
    ) -> None:
        self._allowed = allowed
        self._on_refuse = on_refuse
        self._request: list[bytes] = []
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ENDPOINT)
        self._pump = Pump(self._socket, self._take, frames_per_wake_up=256)

    def start(self) -> None:
        self._pump.start()

    def close(self) -> None:
        """Stop; from now on every client is rejected."""
        self._pump.stop()
        self._socket.close()

    def _take(self, frame: zmq.Frame, more: bool) -> None:
        if len(self._request) < _FRAMES_MAX:
            self._request.append(frame.bytes)
        if not more:
            request, self._request = self._request, []
            user, reason = self._decide(request)
            if reason:
                self._on_refuse(reason)
            reply = (b"400", b"refused", b"", b"") if reason else (b"200", b"OK", user, b"")
            request_id = request[1] if len(request) > 1 else b""
            self._socket.send_multipart([b"1.0", request_id, *reply], zmq.DONTWAIT)
            self._pump.look_again()

    def _decide(self, request: list[bytes]) -> tuple[bytes, str]:
        if len(request) != 7 or request[0] != b"1.0":
            return b"", "a malformed request for authentication"
        _, _, domain, address, _, mechanism, credential = request
        where = plain_address(address.decode("ascii", "replace"))
        if domain != ZAP_DOMAIN or mechanism != b"CURVE" or len(credential) != 32:
            return b"", f"a peer at {where} without a CURVE key"
        key = z85.encode(credential)
        if key not in self._allowed:
            return b"", f"a peer at {where} with the unknown key {key.decode('ascii')}"
        return key, ""
