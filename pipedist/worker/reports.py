"""What is told of calls that are over: results, failures, and what was finished for a scheduler that is gone.

The machine sees which calls are over, and decides what is said; what is in their results stays here until
the message goes out. Of passes that have a key, results are kept until the scheduler says that they are
durable, and told again when a recall asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipedist.protocol.codec import Frame, UnsendableError, encode
from pipedist.protocol.messages import Results
from pipedist.worker.commands import Execute
from pipedist.worker.events import CallRaised, CallsFinished, Event
from pipedist.worker.execution import Outcome, PassExecutor
from pipedist.worker.failures import CallFailure
from pipedist.worker.ranges import RefusedRange
from pipedist.worker.result_cache import KeptCalls, KeptResults

if TYPE_CHECKING:
    from pipedist.worker.leases import Run


class Reports:
    """Reports calls to the machine. Whoever calls holds the machine.

    Args:
        handle: lets the machine handle an event, and carries out what it wants.
        kept: where results are kept until they are durable.
    """

    def __init__(self, handle: Callable[[Event], None], kept: KeptResults) -> None:
        self._handle = handle
        self._kept = kept
        self._keys: dict[int, str] = {}
        """Of bound passes whose results are kept."""
        self.payload: Sequence[Frame] = ()
        """The results that are being reported."""
        self.recalls: set[int] = set()
        """Leases whose results were kept."""

    # -- calls that were executed --------------------------------------------------------

    def finished(self, lease: int, run: Run) -> None:
        """Report the calls of a run that have finished, and were not reported."""
        lo, outcomes, busy_ns = run.take()
        if not outcomes or isinstance(run, RefusedRange):
            return
        hi = lo + len(outcomes)
        try:
            self.payload = encode(outcomes)
        except UnsendableError:
            for call, outcome in enumerate(outcomes, lo):
                self._finished_one(lease, run.executor, call, outcome, busy_ns if call == lo else 0)
        else:
            self._handle(CallsFinished(lease, lo, hi, busy_ns))
        self.payload = ()

    def _finished_one(
        self, lease: int, executor: PassExecutor, call: int, outcome: Outcome, busy_ns: int
    ) -> None:
        failure = executor.unsendable(call, outcome)
        if failure is not None:
            self.failed(lease, failure)
            return
        self.payload = encode([outcome])
        self._handle(CallsFinished(lease, call, call + 1, busy_ns))

    def failed(self, lease: int, failure: CallFailure) -> None:
        """Report a call that raised, or whose result can't be sent."""
        self._handle(
            CallRaised(
                lease,
                failure.call,
                failure.stage,
                failure.module,
                failure.name,
                failure.text,
                failure.traceback,
                failure.retryable,
                failure.aborted,
            )
        )

    # -- calls whose results are kept ----------------------------------------------------

    def open_pass(self, pass_id: int, key: str) -> None:
        """Keep the results of a pass from now on, under a key; "": do not."""
        if key:
            self._keys[pass_id] = key

    def drop_pass(self, pass_id: int) -> None:
        """Let go of what is kept of a pass."""
        key = self._keys.pop(pass_id, "")
        if key:
            self._kept.drop(key)

    def keep(self, pass_id: int, told: Results) -> None:
        """Keep the results that are being reported."""
        calls = KeptCalls(told.lo, told.hi, told.busy_ns, self.payload)
        self._kept.add(self._keys[pass_id], calls)

    def settle(self, pass_id: int, before: int) -> None:
        """Let go of calls of a pass below `before`; they are durable."""
        self._kept.settle(self._keys[pass_id], before)

    def recalled(self, slice_: Execute) -> None:
        """Report the calls of a lease that were finished for a scheduler that is gone.

        Raises:
            RemoteProtocolError: they were not all offered.
        """
        for calls in self._kept.recalled(self._keys[slice_.pass_id], slice_.lo, slice_.hi):
            self.payload = calls.frames
            self._handle(CallsFinished(slice_.lease, calls.lo, calls.hi, calls.busy_ns))
        self.payload = ()
