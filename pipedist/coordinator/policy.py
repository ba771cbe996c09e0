"""What becomes of calls that fail: which stage failed, how often it is tried again, and what then."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from pipedist.coordinator.worker_pool import Fate
from pipedist.errors import NonDeterministicError
from pipedist.protocol import messages as msg
from pipedist.protocol.program import Program, StageProgram
from pipedist.scheduler import events as ev
from pipedist.worker.progress import Running


class Policy:
    """The policy of one pass.

    Args:
        program: of the pass.
        retries: by stage, how often a call that raised there is tried again.
        quarantine: stages; of calls that failed there for good, the guilty elements are set aside.
    """

    def __init__(self, program: Program, retries: Mapping[str, int], quarantine: frozenset[str]) -> None:
        self._stages = program.stages
        self._retries = retries
        self._quarantine = quarantine

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of a call, in the order in which they are executed."""
        return tuple(stage.name for stage in self._stages)

    def stage_of(self, running: Running) -> str:
        """Return the stage that runs, "" where nobody knows."""
        stage = self._stage(running)
        return "" if stage is None else stage.name

    @property
    def is_timed(self) -> bool:
        """Whether a call may take too long."""
        return any(stage.timeout_s is not None for stage in self._stages)

    def judged(self, failed: ev.CallFailed, told: msg.Failed) -> ev.CallFailed:
        """Return what the scheduler is told of a call that raised."""
        return replace(
            failed,
            retries=self._retries.get(told.stage, 0) if told.retryable else 0,
            quarantine=told.stage in self._quarantine and not _says_otherwise(told),
            stage=told.stage,
            text=f"{told.name}: {told.text}" if told.text else told.name,
        )

    def timed_out(self, running: Running) -> msg.Failed | None:
        """Return what is told of a call that took too long, as if its function had raised that."""
        stage = self._stage(running)
        if stage is None or stage.timeout_s is None:
            return None
        text = f"timed out after {stage.timeout_s:g} s"
        cls = TimeoutError
        return msg.Failed(
            running.lease, running.call, stage.name, cls.__module__, cls.__name__, text, "", True
        )

    def fate(self, running: Running, told: msg.Failed | None) -> Fate:
        """Return what it means for a call that its worker died.

        Args:
            told: as `timed_out` says, where it took too long.
        """
        stage = self._stage(running)
        if stage is None:
            return Fate("", 0, False)
        text = "" if told is None else f"{told.name}: {told.text}"
        return Fate(stage.name, self._retries.get(stage.name, 0), stage.name in self._quarantine, text)

    def _stage(self, running: Running) -> StageProgram | None:
        """Return the stage that ran, None where nobody knows: what its process says may be anything."""
        place = running.stage - 1
        return self._stages[place] if 0 <= place < len(self._stages) else None


def _says_otherwise(told: msg.Failed) -> bool:
    """Whether a call failed through no fault of its elements: its two executions differ."""
    cls = NonDeterministicError
    return (told.module, told.name) == (cls.__module__, cls.__name__)
