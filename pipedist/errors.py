"""Every error that pipedist raises on purpose.

One tree, so that a caller can catch all of it, and each branch answers a different
question: is the document wrong (`SpecError`), does it not fit what is there (`PlanError`),
did a replica function fail (`CallError`), did a peer break the protocol
(`RemoteProtocolError`) or did we (`LocalProtocolError`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class PipedistError(Exception):
    """The root of every error that pipedist raises on purpose."""

    exit_code = 1


class UsageError(PipedistError):
    """The command line or an API call asks for something that makes no sense; exit code 2."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a spec, with its place.

    Args:
        message: what is wrong, one line, no final full stop.
        where: `file:line:column` (1-based, the path as typed), or the document's path
            (`stages.late.reduce`) where the spec came as a dict.
        excerpt: the source line, or "" where there is none.
        column: 1-based column of the caret under the excerpt, 0 for none.
        expected: what would have been right, or "".
        nearest: the nearest allowed name, or "".
    """

    message: str
    where: str
    excerpt: str = ""
    column: int = 0
    expected: str = ""
    nearest: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.message}"]
        if self.excerpt:
            lines.append(f"    {self.excerpt}")
            if self.column:
                lines.append("    " + " " * (self.column - 1) + "^")
        if self.expected:
            lines.append(f"    expected {self.expected}")
        if self.nearest:
            lines.append(f"    did you mean {self.nearest!r}?")
        return "\n".join(lines)


class SpecError(UsageError):
    """A spec has mistakes; it lists every one of them.

    Args:
        problems: all mistakes found, in the order of their places.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class PlanError(SpecError):
    """A spec is well formed but can't be carried out here: a file, function or package is missing."""


class OutputError(PipedistError):
    """A result could not be written to its file, or does not fit the file's format.

    Args:
        message: which output, and why.
        result: the `pipedist.Result` of a run that is complete but for some of its files: it has
            every other value and file. None where the run did not come to its end.
    """

    def __init__(self, message: str, *, result: object = None) -> None:
        self.result = result
        super().__init__(message)


class JournalError(PipedistError):
    """The journal of a run can't be written, or what it says can't be trusted or carried out."""


class FoldError(PipedistError):
    """The components of a reduce or gather stage do not fit together, or the result does not fit its dtype.

    Args:
        stage: the reduce or gather stage.
        reason: what does not fit.
    """

    def __init__(self, stage: str, reason: str) -> None:
        self.stage = stage
        super().__init__(f"stage {stage}: {reason}")


class WorkerDied(PipedistError):
    """A worker process ended while it was executing a call.

    Args:
        worker: the worker's name.
        cause: how it ended, for people: "signal 9 (SIGKILL)", "exit code 3".
    """

    def __init__(self, worker: str, cause: str) -> None:
        self.worker = worker
        self.cause = cause
        super().__init__(f"worker {worker} died: {cause}")


class RemoteError(PipedistError):
    """Stands for an exception class that this process does not know; its text names the class."""


class CallError(PipedistError):
    """A replica call failed for good: after its last retry, or because it can't be retried.

    `__cause__` is the replica function's own exception, with its class and text, where the
    class is known in this process (tf.distribute: the lowest replica's exception surfaces).

    Args:
        stage, step, replica, worker: which call, and where it ran last.
        attempts: how many times it was tried.
        cause: the exception as `ClassName: text`.
        remote_traceback: the traceback in the worker, "" where there is none.

    Attributes:
        replay: the command that executes the call again, alone; "" where there is none.
    """

    replay = ""

    def __init__(
        self,
        *,
        stage: str,
        step: int,
        replica: int,
        worker: str,
        attempts: int,
        cause: str,
        remote_traceback: str = "",
    ) -> None:
        self.stage = stage
        self.step = step
        self.replica = replica
        self.worker = worker
        self.attempts = attempts
        self.cause = cause
        self.remote_traceback = remote_traceback
        times = "once" if attempts == 1 else f"{attempts} times"
        text = f"stage {stage}, step {step}, replica {replica}, worker {worker}: {cause} (tried {times})"
        if remote_traceback:
            text += "\n" + remote_traceback.rstrip()
        super().__init__(text)

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\nexecute this call again, alone: {self.replay}" if self.replay else text


class NonDeterministicError(PipedistError):
    """Two executions of one call gave different results (`pipedist run --verify`); it is not tried again."""


class CollectiveMismatchError(PipedistError, ValueError):
    """The replicas of a step did not call the same collective, or one ended while others waited.

    The text says which replica called what, at which file and line. tf.distribute hangs, or lets
    replica 0's operation win; of shapes and dtypes that differ it makes a ValueError, as this is.
    """


class CollectiveTimeoutError(PipedistError):
    """A collective waited for `timeout_s`, and not every replica came."""


class WorkersLost(PipedistError):
    """Workers die, or never come up, faster than any call is finished."""


class ProtocolError(PipedistError):
    """A message breaks the protocol."""


class LocalProtocolError(ProtocolError):
    """This process was about to break the protocol: a defect in pipedist or its caller."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something that the protocol does not allow; the peer loses its connection."""


class OutOfRangeError(PipedistError):
    """A dataset's iterator was asked for a step beyond the last one (tf.errors.OutOfRangeError)."""


class RunCancelled(PipedistError):
    """The run was stopped before it was complete: by a signal, or by leaving `open()` early."""


class RunDrained(RunCancelled):
    """The run was asked to stop, finished the calls that were running, and can be started again."""
