"""Introduces passes to workers: their programs, and to workers on other hosts the code before it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pipedist.coordinator.pass_handle import PassHandle
from pipedist.coordinator.worker_pool import Fleet
from pipedist.coordinator.worker_registry import Peer
from pipedist.protocol import messages as msg
from pipedist.protocol.code_archive import CodeSnapshot, CodeTooLarge, take
from pipedist.protocol.codec import Frame, encode


class Introductions:
    """Sends programs, and each code folder at most once to a worker's host.

    A folder is taken when the first worker elsewhere needs it, once in the cluster's life: what is
    written to it later (outputs, say) does not make it another one.

    Args:
        fleet: speaks with workers.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._taken: dict[str, tuple[CodeSnapshot | None, str, Sequence[Frame]]] = {}
        """By folder: what was taken of it, what people are told, and the payload."""

    def bind(self, worker: str, handle: PassHandle) -> None:
        """Introduce a pass to a worker."""
        peer = self._fleet.of(worker)
        if peer is None:
            return
        if not peer.local:
            for folder in handle.code:
                if folder not in peer.told:
                    peer.told.add(folder)
                    self._send(peer, folder)
        self._fleet.send(worker, msg.Bind(handle.id, handle.key, not peer.local), handle.program_frames)

    def saw(self, peer: Peer, pass_id: int) -> None:
        """Take note that a worker sees the data of a pass."""
        peer.sees.add(pass_id)

    def forget(self, pass_id: int) -> None:
        """Forget who sees the data of a pass that is over."""
        for peer in self._fleet.peers:
            peer.sees.discard(pass_id)

    def _send(self, peer: Peer, folder: str) -> None:
        if folder not in self._taken:
            self._taken[folder] = _take(folder)
        snapshot, text, payload = self._taken[folder]
        if snapshot is None:
            self._fleet.send(peer.worker, msg.Code(os.fsencode(folder), "", text))
            return
        held = snapshot.digest in peer.codes
        peer.codes.add(snapshot.digest)
        self._fleet.send(
            peer.worker, msg.Code(os.fsencode(folder), snapshot.digest, text), () if held else payload
        )


def _take(folder: str) -> tuple[CodeSnapshot | None, str, Sequence[Frame]]:
    try:
        snapshot = take(folder)
    except CodeTooLarge as error:
        return None, str(error), ()
    except OSError as error:
        return None, f"{folder}, which can't be read: {error}", ()
    return snapshot, snapshot.text, encode(snapshot.to_tree())
