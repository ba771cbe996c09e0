"""A channel among threads of one process: what any way that carries messages does, and nothing more."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipedist.collectives.channel import ENDED, Exchanged, GangAborted, MemberEnded, StallPolicy, agree
from pipedist.protocol.codec import Frame


@dataclass
class Board:
    """What the members have brought, by exchange and member."""

    members: int
    parts: dict[tuple[int, int], tuple[bytes, list[bytes]]] = field(default_factory=dict)
    ended: dict[int, bool] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)


class QueueChannel:
    """One member's end."""

    def __init__(self, board: Board, member: int) -> None:
        self._board = board
        self.member = member
        self.members = board.members
        self.group = ""
        self.numbers: list[int] = []

    def exchange(self, number: int, word: bytes, frames: Sequence[Frame], policy: StallPolicy) -> Exchanged:
        board = self._board
        self.numbers.append(number)
        with board.changed:
            board.parts[number, self.member] = (word, [bytes(frame) for frame in frames])
            board.changed.notify_all()
            while True:
                missing = [m for m in range(self.members) if (number, m) not in board.parts]
                if any(board.ended.get(m) is False for m in missing):
                    raise GangAborted("a member failed")
                missing = [m for m in missing if m not in board.ended]
                if not missing:
                    break
                if not board.changed.wait(policy.timeout_s):
                    board.changed.release()  # the stall handler may wait for the missing members
                    try:
                        policy.on_stalled(tuple(missing))
                    finally:
                        board.changed.acquire()
            words: list[bytes | MemberEnded] = []
            brought: list[Sequence[Frame]] = []
            for m in range(self.members):
                word_of, frames_of = board.parts.get((number, m), (ENDED, []))
                words.append(word_of)
                brought.append(frames_of)
            brought[self.member] = frames
        return Exchanged(words, brought if agree(words) else None)

    def ended(self, *, returned: bool) -> None:
        with self._board.changed:
            self._board.ended[self.member] = returned
            self._board.changed.notify_all()

    def close(self) -> None:
        pass
