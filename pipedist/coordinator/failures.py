"""Failed calls: their stage, retries, quarantine, and error."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from pipedist.core.remote_errors import rebuild_exception
from pipedist.errors import CallError, NonDeterministicError, WorkerDied
from pipedist.protocol import messages as msg
from pipedist.protocol.program import Program, StageProgram
from pipedist.scheduler import events as ev
from pipedist.scheduler.commands import Failure
from pipedist.worker.progress import Running


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
