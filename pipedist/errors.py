"""Every error that pipedist raises on purpose.

They form one tree, so that a caller can catch all of them. Each branch has one cause: the spec is invalid
(`SpecError`) or does not fit its environment (`PlanError`), a replica function failed (`CallError`), a
peer broke the protocol (`RemoteProtocolError`), or this process did (`LocalProtocolError`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class PipedistError(Exception):
    """The root of every error that pipedist raises on purpose."""

    exit_code = 1
    has_advice = False  # whether its text has the next command, which continues the run


class RetryAfter(PipedistError):
    """Raised by a replica function: call it again after some seconds, such as a server's `Retry-After`.

    It counts as an attempt of the stage's `retry`; without `retry`, or after the last attempt, the call fails.

    Args:
        seconds: the wait, 0 or more; more than 3600 is a failure, whose text names the limit.

    Example:
        if response.status == 429:
            raise pipedist.RetryAfter(float(response.headers["Retry-After"]))
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = float(str(seconds).removeprefix("retry after ").removesuffix(" s"))
        if not 0 <= self.seconds < float("inf"):
            raise ValueError(f"`seconds` must be 0 or more, got {seconds!r}")
        super().__init__(f"retry after {self.seconds:g} s")


class UsageError(PipedistError):
    """The command line or an API call has invalid arguments; exit code 2."""

    exit_code = 2


class Problem(Struct, frozen=True):
    """One mistake in a spec, with its place.

    Args:
        message: the fact, one line without a final full stop.
        where: `file:line:column` (1-based, the path as typed), or the document's path
            (`stages.late.reduce`) if the spec was given as a dict.
        excerpt: the source line, or "".
        column: 1-based column of the caret under the excerpt, 0 for none.
        expected: the expected value, or ""; printed unless the message contains it.
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
        if self.expected and f"must be {self.expected}" not in self.message:
            lines.append(f"    expected {self.expected}")
        if self.nearest:
            lines.append(f"    did you mean {self.nearest!r}?")
        return "\n".join(lines)


class SpecError(UsageError):
    """A spec has mistakes; it lists every one of them.

    Args:
        problems: all mistakes, in the order of their places.

    Example:
        try:
            pipedist.run("spec.yaml")
        except pipedist.SpecError as error:
            for problem in error.problems:
                print(problem)
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class PlanError(SpecError):
    """A valid spec needs a file, function or package that is missing."""


class OutputError(PipedistError):
    """A result does not fit its file's format, or the write failed.

    Args:
        message: the output, and the cause.
        result: the `pipedist.Result` of a run that is complete except for some of its files; None if
            the run did not complete.

    Example:
        try:
            pipedist.run("spec.yaml")
        except pipedist.OutputError as error:
            total = error.result["total"]  # the other results are there
    """

    def __init__(self, message: str, *, result: object = None) -> None:
        self.result = result
        super().__init__(message)


class JournalError(PipedistError):
    """The journal is not writable, is damaged, or does not fit the spec."""


class FoldError(PipedistError):
    """The components of a reduce or gather stage do not fit together.

    Or the result does not fit its dtype.

    Args:
        stage: the reduce or gather stage.
        reason: the components that do not fit.
        origin: a sentence that names the function of the components and the stage's place in the spec, or "".
        call: the stage, step and replica of the call that returned the first misfit, or None.

    Attributes:
        replay: the command that executes this call again, alone; or "".
    """

    replay = ""

    def __init__(
        self, stage: str, reason: str, *, origin: str = "", call: tuple[str, int, int] | None = None
    ) -> None:
        self.stage = stage
        self.call = call
        super().__init__(f"stage {stage}: {reason}" + (f"\n{origin}" if origin else ""))

    def __str__(self) -> str:
        return _with_replay(super().__str__(), self.replay)


class QuarantineError(PipedistError):
    """More elements failed than may be quarantined, or all of them.

    Args:
        message: how many elements failed, the first failures, and what to do.
        stage, step, replica: the call of the first failure.

    Attributes:
        replay: the command that executes this call again, alone; or "".
    """

    has_advice = True
    replay = ""

    def __init__(self, message: str, *, stage: str, step: int, replica: int) -> None:
        self.stage = stage
        self.step = step
        self.replica = replica
        super().__init__(message)

    def __str__(self) -> str:
        return _with_replay(super().__str__(), self.replay)


class WorkerDied(PipedistError):
    """A worker process ended while it was executing a call.

    Args:
        worker: the worker's name.
        cause: how it ended: "signal 9 (SIGKILL)", "exit code 3".
    """

    def __init__(self, worker: str, cause: str) -> None:
        self.worker = worker
        self.cause = cause
        super().__init__(f"worker {worker} died: {cause}")


class RemoteError(PipedistError):
    """Replaces an exception whose class is unknown in this process; the text names the class."""


class CallError(PipedistError):
    """A replica call failed, after its last retry or without one.

    `__cause__` is the replica function's own exception, with its class and text, if the class is known in
    this process (tf.distribute: the lowest replica's exception is raised).

    Args:
        stage, step, replica, worker: the call, and the worker of its last attempt.
        attempts: number of attempts.
        cause: the exception as `ClassName: text`.
        remote_traceback: the traceback in the worker, or "".
        element: the number of the element for which the function was called, if it gets single elements.

    Attributes:
        origin: a sentence that names the function that returned the value, if the call failed to reduce one; or "".
        replay: the command that executes the call again, alone; or "".

    Example:
        try:
            pipedist.run("spec.yaml")
        except pipedist.CallError as error:
            print(error.stage, error.step, error.replica, error.__cause__)
    """

    origin = ""
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
        element: int | None = None,
    ) -> None:
        self.stage = stage
        self.step = step
        self.replica = replica
        self.worker = worker
        self.attempts = attempts
        self.cause = cause
        self.remote_traceback = remote_traceback
        self.element = element
        times = "once" if attempts == 1 else f"{attempts} times"
        place = f"stage {stage}, step {step}, replica {replica}"
        if element is not None:
            place += f", element {element}"
        text = f"{place}, worker {worker}: {cause} (tried {times})"
        if remote_traceback:
            text += "\n" + remote_traceback.rstrip()
        super().__init__(text)

    def of_step(self, step: int) -> CallError:
        """Return the error of the same call with another number of its step."""
        return CallError(
            stage=self.stage,
            step=step,
            replica=self.replica,
            worker=self.worker,
            attempts=self.attempts,
            cause=self.cause,
            remote_traceback=self.remote_traceback,
            element=self.element,
        )

    def __str__(self) -> str:
        text = super().__str__()
        return _with_replay(f"{text}\n{self.origin}" if self.origin else text, self.replay)


def _with_replay(text: str, command: str) -> str:
    return f"{text}\nTo execute only this call again: {command}" if command else text


class NonDeterministicError(PipedistError):
    """Two executions of one call gave different results (`pipedist run --verify`); never retried."""


class CollectiveMismatchError(PipedistError, ValueError):
    """The replicas of a step did not call the same collective.

    Or one replica ended while others waited.

    The text lists each replica's call, with file and line. tf.distribute hangs, or uses replica 0's
    operation; if shapes or dtypes differ it raises ValueError, a base of this class.
    """


class CollectiveTimeoutError(PipedistError):
    """A collective waited for `timeout_s`, and not every replica called it."""


class WorkersLost(PipedistError):
    """Workers die or fail to start, and no call completes in between."""


class ProtocolError(PipedistError):
    """A message breaks the protocol."""


class LocalProtocolError(ProtocolError):
    """This process was about to break the protocol: a defect in pipedist or its caller."""


class RemoteProtocolError(ProtocolError):
    """A peer sent a message that the protocol does not allow; its connection is closed."""


class OutOfRangeError(PipedistError):
    """A dataset's iterator has no more steps (tf.errors.OutOfRangeError)."""


class RunCancelled(PipedistError):
    """The run was stopped by a signal, or by leaving `open()` early."""


class RunDrained(RunCancelled):
    """The run was drained: it finished its running calls, and can be resumed."""
