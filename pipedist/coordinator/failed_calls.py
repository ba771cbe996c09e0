"""The failed calls of one pass: their latest exceptions, their retries, and a line about each for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec.structs import replace

from pipedist.coordinator.failures import DeathOutcome, FailurePolicy, call_error
from pipedist.coordinator.measurements import PassRecord
from pipedist.errors import CallError, RemoteProtocolError, RunCancelled
from pipedist.protocol import messages as msg
from pipedist.scheduler.commands import Failure
from pipedist.worker.progress import Running

RetryReason = Literal["error", "timeout", "death", "slow"]  # slow: far longer than other calls


class FailedCalls:
    """The failures of a pass, each until its step is visible.

    Args:
        name: of the pass.
        replicas: the calls of a step.
        numbers: of steps that functions see as another one.
        record: counts the retries, too.
    """

    def __init__(
        self,
        name: str,
        replicas: int,
        policy: FailurePolicy,
        numbers: Mapping[int, int],
        record: PassRecord | None,
    ) -> None:
        self._name = name
        self._replicas = replicas
        self._policy = policy
        self._numbers = numbers
        self._record = record
        self.raised: dict[int, msg.Failed] = {}  # latest exception by call
        # Stage and exception of attempts without a line, by call
        self._attempts: dict[int, tuple[str, str]] = {}
        self.retries: Counter[tuple[str, RetryReason]] = Counter()
        """Attempts that had a line for the user, by stage and reason."""

    def on_raised(self, failed: msg.Failed) -> None:
        """Record the exception of a call, before the scheduler handles it."""
        self.raised[failed.call] = failed
        text = f"{failed.name}: {failed.text}" if failed.text else failed.name
        self._attempts[failed.call] = (failed.stage, text)

    def on_death(self, running: Running, *, timed_out: bool, is_left: bool) -> DeathOutcome:
        """Record the death of the worker that executed a call; `is_left`: its caller was cancelled."""
        failed = self._policy.timed_out(running) if timed_out else None
        if is_left:  # the call may have hung: a retry would cost time without use
            failed = self._failed(running.lease, running.call, RunCancelled("its caller was cancelled"))
        if failed is not None:
            self.raised[running.call] = failed
        outcome = self._policy.on_death(running, failed)
        self._attempts.pop(running.call, None)  # the death has a line of its own, and counts with it
        self._count(outcome.stage, "timeout" if failed is not None else "death")
        return replace(outcome, place=self._place(outcome.stage, running.call))

    def on_repeated(self, lo: int, hi: int, worker: str, attempt: int, *, slow: bool) -> Iterator[str]:
        """Count calls [lo, hi) that are assigned again, and yield a line for each; deaths are counted in `on_death`.

        If `slow`, another worker executes them, too.
        """
        if slow:
            self._count("", "slow", hi - lo)
            yield f"{self._place('', lo)} takes long, so it is executed on worker {worker}, too"
        for call in [] if slow else range(lo, hi):
            if call in self._attempts:
                stage, text = self._attempts.pop(call)
                self._count(stage, "error")
                yield f"{self._place(stage, call)}: {text}; attempt {attempt + 1} begins on worker {worker}"

    def on_retried(self, message: msg.Retried, worker: str) -> str:
        """Count a call that its worker repeats, and return a line for the user."""
        if message.stage not in self._policy.stages:
            raise RemoteProtocolError(f"a retry of stage {message.stage!r}, which is not in the pass")
        self._count(message.stage, "timeout" if message.timed_out else "error")
        place = self._place(message.stage, message.call)
        return f"{place}: {message.text}; attempt {message.attempt} begins on worker {worker}"

    def not_sent(self, lo: int, hi: int, lease: int, error: Exception) -> None:
        """Record that calls [lo, hi) could not be sent."""
        for call in range(lo, hi):
            self.raised[call] = self._failed(lease, call, error)

    def error_of(self, step: int, failure: Failure) -> CallError:
        """Return the error of a step that failed for good."""
        number = self._numbers.get(step, step)
        return call_error(failure, self.raised, name=self._name, replicas=self._replicas, number=number)

    def forget(self, first: int, last: int) -> None:
        """Forget the failures of steps [first, last), which are over."""
        if not self.raised and not self._attempts:
            return
        for call in [c for c in self.raised if first <= c // self._replicas < last]:
            del self.raised[call]
        for call in [c for c in self._attempts if first <= c // self._replicas < last]:
            del self._attempts[call]

    def clear(self) -> None:
        self.raised.clear()
        self._attempts.clear()

    def _count(self, stage: str, reason: RetryReason, count: int = 1) -> None:
        self.retries[stage or self._name, reason] += count
        if self._record is not None:
            self._record.retries += count

    def _place(self, stage: str, call: int) -> str:
        step, replica = divmod(call, self._replicas)
        return f"stage {stage or self._name}, step {self._numbers.get(step, step)}, replica {replica}"

    def _failed(self, lease: int, call: int, error: Exception) -> msg.Failed:
        cls = type(error)
        return msg.Failed(lease, call, self._name, cls.__module__, cls.__qualname__, str(error), "", False)
