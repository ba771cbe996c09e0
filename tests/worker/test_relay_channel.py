"""The relay channel follows the rules of `pipedist.collectives.channel`; its client is a fake."""

from __future__ import annotations

from collections.abc import Sequence

from pipedist.collectives.channel import ENDED, RETURNED, WORD_BYTES, StallPolicy
from pipedist.protocol.messages import Relay
from pipedist.worker.relay_channel import RelayBuffer, RelayChannel

WORD = b"w" * WORD_BYTES
PATIENCE = StallPolicy(60.0, lambda missing: None)


class Client:
    """Sends nothing, and receives nothing."""

    def contribute(self, lease: int, number: int, payload: Sequence[object]) -> None:
        return

    def listen(self, lease: int, timeout_s: float) -> None:
        raise AssertionError(f"lease {lease} should not wait")


def test_a_member_that_has_returned_contributes_no_frames() -> None:
    buffer = RelayBuffer()
    buffer.put(Relay(7, 1, 0, RETURNED), ())
    buffer.put(Relay(7, 2, 1, ""), [memoryview(WORD), memoryview(b"two")])
    met = RelayChannel(Client(), 7, buffer, 0, 3).exchange(1, WORD, [b"zero"], PATIENCE)
    assert met.words == [WORD, ENDED, WORD]
    assert met.frames is not None
    assert [[bytes(frame) for frame in part] for part in met.frames] == [[b"zero"], [], [b"two"]]


def test_received_parts_are_handled_before_a_member_is_reported_as_missing() -> None:
    """A part that waits in the socket while this process is not scheduled is not late."""

    class Late(Client):
        def listen(self, lease: int, timeout_s: float) -> None:
            waits.append(timeout_s)
            buffer.put(Relay(7, 1, 1, ""), [memoryview(WORD), memoryview(b"one")])

    buffer, waits, missed = RelayBuffer(), list[float](), list[tuple[int, ...]]()
    met = RelayChannel(Late(), 7, buffer, 0, 2).exchange(1, WORD, [b"zero"], StallPolicy(0.0, missed.append))
    assert met.words == [WORD, WORD]
    assert (waits, missed) == ([0.0], [])


def test_a_missing_member_may_still_contribute() -> None:
    class Slow(Client):
        def listen(self, lease: int, timeout_s: float) -> None:
            if missed:
                buffer.put(Relay(7, 1, 1, ""), [memoryview(WORD)])

    buffer, missed = RelayBuffer(), list[tuple[int, ...]]()
    met = RelayChannel(Slow(), 7, buffer, 0, 2).exchange(1, WORD, [], StallPolicy(0.0, missed.append))
    assert met.words == [WORD, WORD]
    assert missed == [(1,)]
