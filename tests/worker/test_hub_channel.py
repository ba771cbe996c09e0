"""The way through the scheduler keeps the rules of `pipedist.collectives.channel`; the hub is a record."""

from __future__ import annotations

from collections.abc import Sequence

from pipedist.collectives.channel import ENDED, RETURNED, WORD_BYTES, StallPolicy
from pipedist.protocol.messages import Relay
from pipedist.worker.relay_channel import HubChannel, Inbox

WORD = b"w" * WORD_BYTES
PATIENCE = StallPolicy(60.0, lambda missing: None)


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


def test_what_has_come_by_the_end_of_the_time_is_heard_before_anybody_is_missed() -> None:
    """As where this process had no core while it came: what waits in the socket is not late."""

    class Late(Hub):
        def listen(self, lease: int, timeout_s: float) -> None:
            heard.append(timeout_s)
            inbox.put(Relay(7, 1, 1, ""), [memoryview(WORD), memoryview(b"one")])

    inbox, heard, missed = Inbox(), list[float](), list[tuple[int, ...]]()
    met = HubChannel(Late(), 7, inbox, 0, 2).exchange(1, WORD, [b"zero"], StallPolicy(0.0, missed.append))
    assert met.words == [WORD, WORD]
    assert (heard, missed) == ([0.0], [])


def test_who_is_missed_may_still_come() -> None:
    class Slow(Hub):
        def listen(self, lease: int, timeout_s: float) -> None:
            if missed:
                inbox.put(Relay(7, 1, 1, ""), [memoryview(WORD)])

    inbox, missed = Inbox(), list[tuple[int, ...]]()
    met = HubChannel(Slow(), 7, inbox, 0, 2).exchange(1, WORD, [], StallPolicy(0.0, missed.append))
    assert met.words == [WORD, WORD]
    assert missed == [(1,)]
