"""What is known about the connection on which a frame came, and how to cut it."""

from __future__ import annotations

import os
import socket

import zmq

from pipedist.transport.rendezvous import Endpoint


def user_of(frame: zmq.Frame) -> str:
    """Return the key under which a frame's sender was let in, Z85."""
    return str(frame.get("User-Id"))


def address_of(frame: zmq.Frame) -> str:
    """Return the address of a frame's sender, for people."""
    try:
        return plain_address(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return "an unknown address"


def plain_address(text: str) -> str:
    """Return an address as people know it: an IPv4 one that came over an IPv6 socket, as IPv4."""
    return text.removeprefix("::ffff:") if "." in text else text


def hang_up(frame: zmq.Frame, endpoint: Endpoint) -> None:
    """Cut the connection on which a frame came; ZeroMQ has no call for it.

    A descriptor may have been closed, and reused, since the frame arrived. So it is duplicated
    first, and shut down only if it is a connection to our own endpoint; the worst case is that
    another peer from the same address has to connect anew.
    """
    try:
        descriptor = os.dup(int(frame.get(zmq.SRCFD)))
    except (OSError, zmq.ZMQError, ValueError):
        return  # it is gone already
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return
    with connection:
        try:
            ours = connection.getsockname()
            if ours == endpoint.path or (endpoint.is_tcp and ours[1] == endpoint.port):
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone already
