"""The roads between a scheduler and its workers, ZeroMQ and the lane: Router here, Dealers there."""

from __future__ import annotations

from pipedist.transport.dealer import ConnectionLost, Dealer
from pipedist.transport.router import Router

__all__ = ["ConnectionLost", "Dealer", "Router"]
