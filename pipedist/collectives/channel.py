"""What a gang needs of the way to its other members; whoever implements it decides nothing.

A MEMBER is one process of a gang's attempt, with one or more neighbouring replicas. The members
meet in numbered EXCHANGES: each brings a WORD of 16 bytes and frames, and gets what all brought.
A word stands for what all its replicas call (`pipedist.collectives.signatures`); `NO_WORD` says that
they do not all call the same. Frames travel only where all words are alike and are not NO_WORD, so
that members that disagree learn it before anything large is sent.

The rules of `Channel.exchange`
- Exchanges are numbered 1, 2, 3, ... by every member alike; there is at most one at a time.
- It returns when every member has brought its part or has ended. A member that ended after it had
  brought its part counts as having brought it.
- It raises GangAborted as soon as a member has FAILED, is lost, or the attempt is cancelled: then
  nobody's answer matters any more. After that, every call of it raises GangAborted.
- A member that RETURNED (all its replicas came to their end) is an answer like any other: `Ended`.
- While it waits, and no member that is missing has moved for `Patience.timeout_s`, it calls
  `Patience.on_stalled` with the missing members; if that returns, it waits on, and calls it again
  after another `timeout_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from pipedist.transport.codec import Frame

if TYPE_CHECKING:
    from pipedist.collectives.packing import Pack

WORD_BYTES: Final = 16
NO_WORD: Final = bytes(WORD_BYTES)
"""The word of a member whose replicas do not all call one collective."""

RETURNED: Final = "returned"
"""The text of a `Relay` about a member whose replicas all returned; any other text: it failed."""


class GangAborted(BaseException):
    """Ends a replica whose gang can't go on; no Exception, so that user code does not swallow it."""


class Ended(Struct, frozen=True):
    """A member whose replicas have all returned, without this exchange."""


ENDED: Final = Ended()


class Patience(Struct, frozen=True):
    """How long a member waits for others.

    Args:
        timeout_s: seconds without any sign of the missing ones.
        on_stalled: told the missing members, in order; raises, or returns to wait on.
    """

    timeout_s: float
    on_stalled: Callable[[tuple[int, ...]], None]


class Exchanged(Struct, frozen=True):
    """What the members brought to one exchange.

    Args:
        words: by member: its word, or `ENDED`.
        frames: by member, this one too, of one that has ended none; None unless `agree(words)`. This
            member's own are those that it gave; nobody writes to those of the others any more.
    """

    words: Sequence[bytes | Ended]
    frames: Sequence[Sequence[Frame]] | None


def agree(words: Sequence[bytes | Ended]) -> bool:
    """Whether the members that have not ended all brought one word, which is not NO_WORD."""
    there = {word for word in words if not isinstance(word, Ended)}
    return len(there) == 1 and NO_WORD not in there


class Channel(Protocol):
    """The way to the other members of ONE attempt of a gang."""

    @property
    def members(self) -> int:
        """How many there are, at least 2."""
        ...

    @property
    def member(self) -> int:
        """Which one this is."""
        ...

    @property
    def group(self) -> str:
        """A name of these member processes as a set; "" where there is none.

        It is the same text in each of them, for every attempt of any gang on them: what is costly to
        set up among processes is kept under it.
        """
        ...

    def exchange(self, number: int, word: bytes, frames: Sequence[Frame], patience: Patience) -> Exchanged:
        """Bring a part, and wait for those of the others.

        Called by whichever thread of the gang holds the baton; never by two at once.

        Args:
            number: of the exchange.
            word: WORD_BYTES bytes.
            frames: contiguous; they do not change until this returns.

        Raises:
            GangAborted: the attempt can't go on.
        """
        ...

    def ended(self, *, returned: bool) -> None:
        """Tell the others that all replicas of this member are done, once; never blocks.

        Args:
            returned: False where one of them failed or was aborted.
        """
        ...

    def close(self) -> None:
        """Let go of what this attempt held; the last call."""
        ...


class FoldingChannel(Channel, Protocol):
    """A channel that folds arrays on the way, so that no member has to read all of all."""

    def fold(
        self, number: int, word: bytes, pack: Pack, patience: Patience
    ) -> Sequence[bytes | Ended] | None:
        """Exchange number `number`, of members that call all_reduce: fold `pack`'s inputs into its outputs.

        It meets the `exchange` of members that call something else: words are compared first.

        Returns:
            None: the outputs are complete. Else the words, by member, which do not agree, or not of all.

        Raises:
            GangAborted: the attempt can't go on.
            OverflowError: in all members: an integer result does not fit.
        """
        ...
