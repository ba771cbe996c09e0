"""The way through the scheduler keeps the rules of `pipedist.collectives.channel`; the hub is a record."""

from __future__ import annotations

from collections.abc import Sequence

from pipedist.collectives.channel import ENDED, RETURNED, WORD_BYTES, Patience
from pipedist.messages import Relay
from pipedist.worker.hub_channel import HubChannel, Inbox

WORD = b"w" * WORD_BYTES
PATIENCE = Patience(60.0, lambda missing: None)


class Hub:
    """Knows nobody."""

    def bring(self, lease: int, number: int, payload: Sequence[object]) -> None:
        return

    def listen(self, lease: int, timeout_s: float) -> None:
        raise AssertionError(f"lease {lease} waits for something")


def test_who_has_returned_brings_no_frames() -> None:
    inbox = Inbox()
    inbox.put(Relay(7, 1, 0, RETURNED), ())
    inbox.put(Relay(7, 2, 1, ""), [memoryview(WORD), memoryview(b"two")])
    met = HubChannel(Hub(), 7, inbox, 0, 3).exchange(1, WORD, [b"zero"], PATIENCE)
    assert met.words == [WORD, ENDED, WORD]
    assert met.frames is not None
    assert [[bytes(frame) for frame in part] for part in met.frames] == [[b"zero"], [], [b"two"]]
