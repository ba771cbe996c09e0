"""The interface between a gang member and its peers; an implementation makes no decisions.

A MEMBER is one process of a gang's attempt, with one or more neighbouring replicas. Members communicate
in numbered EXCHANGES: each sends a WORD of 16 bytes and frames, and receives those of all members. A
word identifies the collective that all replicas of a member call (`pipedist.collectives.signatures`);
`NO_WORD` means that they do not all call the same one. Frames are transferred only if all words are
equal and are not NO_WORD, so a mismatch is detected before anything large is sent.

Rules of `Channel.exchange`
- Every member numbers exchanges 1, 2, 3, ...; at most one is active at a time.
- It returns when every member has contributed or ended. A member that ended after contributing counts as
  having contributed.
- It raises GangAborted as soon as a member FAILED or is lost, or the attempt is cancelled. After that,
  every call raises GangAborted.
- A member that RETURNED (all its replicas finished) is a normal outcome: `MemberEnded`.
- If no missing member makes progress for `StallPolicy.timeout_s`, it calls `StallPolicy.on_stalled` with
  the missing members. If that returns, it waits on, and calls it again after another `timeout_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from pipedist.protocol.codec import Frame

if TYPE_CHECKING:
    from pipedist.collectives.folding import Pack

WORD_BYTES: Final = 16
NO_WORD: Final = bytes(WORD_BYTES)  # the word of a member whose replicas do not all call one collective

RETURNED: Final = "returned"  # status in `Relay` if all replicas returned; any other text is a failure


class GangAborted(BaseException):
    """Ends a replica whose gang is aborted; not an Exception, so that user code does not swallow it."""


class MemberEnded(Struct, frozen=True):
    """Outcome of a member whose replicas all returned before this exchange."""


ENDED: Final = MemberEnded()


class StallPolicy(Struct, frozen=True):
    """How long a member waits for others, and what happens then."""

    timeout_s: float  # without progress of any missing member
    on_stalled: Callable[[tuple[int, ...]], None]  # gets the missing members, in order; raises, or returns


class Exchanged(Struct, frozen=True):
    words: Sequence[bytes | MemberEnded]
    frames: Sequence[Sequence[Frame]] | None  # by member (none if it ended); None unless `agree(words)`


def agree(words: Sequence[bytes | MemberEnded]) -> bool:
    """Return whether all members that have not ended sent one word other than NO_WORD."""
    there = {word for word in words if not isinstance(word, MemberEnded)}
    return len(there) == 1 and NO_WORD not in there


class Channel(Protocol):
    """Connection to the other members of ONE attempt of a gang."""

    @property
    def members(self) -> int: ...  # at least 2

    @property
    def member(self) -> int: ...  # index of this one

    @property
    def group(self) -> str:
        """Name of this set of processes, equal in each of them for every attempt; "" if it has none.

        Resources that are costly to set up among processes are cached under it.
        """
        ...

    def exchange(self, number: int, word: bytes, frames: Sequence[Frame], policy: StallPolicy) -> Exchanged:
        """Contribute contiguous frames to an exchange, and wait for the other members, or raise GangAborted.

        Called by the thread of the gang that holds the turn, never by two threads at once.
        """
        ...

    def ended(self, *, returned: bool) -> None:
        """Announce to the others, once and without blocking, that all local replicas returned or one failed."""
        ...

    def close(self) -> None:
        """Release the resources of this attempt; the last call."""
        ...


class FoldingChannel(Channel, Protocol):
    """A channel that folds arrays during the transfer, so that no member reads all inputs."""

    def fold(
        self, number: int, word: bytes, pack: Pack, policy: StallPolicy
    ) -> Sequence[bytes | MemberEnded] | None:
        """Perform exchange `number` for an all_reduce: fold `pack`'s inputs into its outputs.

        It is compatible with `exchange` in members that call another collective: words are compared first. Returns
        None if the outputs are complete; else the words of all members, which do not agree. Raises GangAborted, or
        OverflowError in all members if an integer result does not fit.
        """
        ...
