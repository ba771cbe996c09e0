"""Failed calls of a pass: their stage, retries, quarantine and error, and a line about each for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from pipedist.coordinator.measurements import PassRecord
from pipedist.core.remote_errors import rebuild_exception
from pipedist.errors import (
    CallError,
    NonDeterministicError,
    RemoteProtocolError,
    RunCancelled,
    WorkerDied,
)
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import UnsendableError
from pipedist.protocol.program import Program, StageProgram
from pipedist.scheduler import events as ev
from pipedist.scheduler.commands import Failure
from pipedist.worker.progress import Running

RetryReason = Literal["error", "timeout", "death", "slow"]  # slow: far longer than other calls


class DeathOutcome(Struct, frozen=True):
    """The consequence of a worker's death for a call; see `events.WorkerLost`."""

    stage: str  # the stage that ran; "" if unknown
    retries: int
    quarantine: bool
    timed_out: str = ""  # the reason for users, if the stage's function exceeded its timeout; "": it did not
    place: str = ""  # the stage, step and replica of the call, for users


class FailurePolicy:
    """Retries and quarantine of a pass's calls; see `Coordinator.open_pass`."""

    def __init__(self, program: Program, retries: Mapping[str, int], quarantine: frozenset[str]) -> None:
        self._stages = program.stages
        self._retries = retries
        self._quarantine = quarantine

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self._stages)

    def stage_of(self, running: Running) -> str:
        stage = self._stage(running)
        return "" if stage is None else stage.name

    @property
    def is_timed(self) -> bool:
        return any(stage.timeout_s is not None for stage in self._stages)

    def apply(self, event: ev.CallFailed, failed: msg.Failed) -> ev.CallFailed:
        cls = NonDeterministicError  # two executions of the call differ: its elements are not the cause
        is_non_deterministic = (failed.module, failed.name) == (cls.__module__, cls.__name__)
        return replace(
            event,
            retries=self._retries.get(failed.stage, 0) if failed.retryable else 0,
            quarantine=failed.stage in self._quarantine and not is_non_deterministic,
            stage=failed.stage,
            text=f"{failed.name}: {failed.text}" if failed.text else failed.name,
            culprits=failed.culprits,
        )

    def timed_out(self, running: Running) -> msg.Failed | None:
        """Return a call's timeout as if its function had raised it, if it has one."""
        stage = self._stage(running)
        if stage is None or stage.timeout_s is None:
            return None
        text = f"timed out after {stage.timeout_s:g} s"
        cls = TimeoutError
        return msg.Failed(
            running.lease, running.call, stage.name, cls.__module__, cls.__name__, text, "", True
        )

    def is_final(self, stage: int) -> bool:
        """Return whether an element that raised in a stage, by index, is not tried again."""
        if not 0 <= stage < len(self._stages):
            return False
        name = self._stages[stage].name
        return name in self._quarantine and not self._retries.get(name)

    def on_death(self, running: Running, failed: msg.Failed | None) -> DeathOutcome:
        """Return the consequence of a worker's death for the call that it ran; `failed`: from `timed_out`."""
        stage = self._stage(running)
        if stage is None:
            return DeathOutcome("", 0, False)
        text = "" if failed is None else f"{failed.name}: {failed.text}"
        return DeathOutcome(
            stage.name, self._retries.get(stage.name, 0), stage.name in self._quarantine, text
        )

    def _stage(self, running: Running) -> StageProgram | None:
        """Return the stage that ran; None: a peer has sent a wrong index."""
        place = running.stage - 1
        return self._stages[place] if 0 <= place < len(self._stages) else None


def call_error(
    failure: Failure, raised: Mapping[int, msg.Failed], *, name: str, replicas: int, number: int
) -> CallError:
    """Return the error of a call that failed for good; `raised`: the latest exception of each call.

    `name` is the pass's name, used if the stage is unknown because the worker died; `number` that of the step, as its
    functions see it.
    """
    replica = failure.call % replicas
    cause: BaseException
    element = None
    if failure.cause is None:
        failed = raised[failure.call]
        cause = rebuild_exception(failed.module, failed.name, failed.text)
        name, text, trace = failed.stage or name, f"{failed.name}: {failed.text}", failed.traceback
        element = failed.element
    else:
        cause = WorkerDied(failure.worker, failure.cause)
        text, trace = f"WorkerDied: {failure.cause}", ""
    error = CallError(
        stage=name,
        step=number,
        replica=replica,
        worker=failure.worker,
        attempts=failure.attempts,
        cause=text,
        remote_traceback=trace,
        element=element,
    )
    error.__cause__ = cause
    return error


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

    def unreadable(self, call: int, lease: int, error: Exception) -> msg.Failed:
        """Return the failure of a call whose result can't be decoded, because a class is not found here."""
        text = (
            f"the result cannot be rebuilt in the driver: {error}. Define the class at the top level of a module, "
            "and import it there"
        )
        return self._failed(lease, call, UnsendableError(text))

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
