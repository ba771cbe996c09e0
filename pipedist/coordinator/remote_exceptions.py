"""The error of a call that failed for good, whose cause was raised in another process."""

from __future__ import annotations

from collections.abc import Mapping

from pipedist.core.remote_errors import rebuild_exception
from pipedist.errors import CallError, WorkerDied
from pipedist.protocol import messages as msg
from pipedist.scheduler.commands import Failure


def call_error(failure: Failure, raised: Mapping[int, msg.Failed], *, name: str, replicas: int) -> CallError:
    """Return the error of a call that failed for good.

    Args:
        failure: what the scheduler says of it.
        raised: the latest exception of each call that raised.
        name: of the pass, where no stage is known: its worker died.
        replicas: R.
    """
    step, replica = divmod(failure.call, replicas)
    cause: BaseException
    if failure.cause is None:
        told = raised[failure.call]
        cause = rebuild_exception(told.module, told.name, told.text)
        name, text, trace = told.stage or name, f"{told.name}: {told.text}", told.traceback
    else:
        cause = WorkerDied(failure.worker, failure.cause)
        text, trace = f"WorkerDied: {failure.cause}", ""
    error = CallError(
        stage=name,
        step=step,
        replica=replica,
        worker=failure.worker,
        attempts=failure.attempts,
        cause=text,
        remote_traceback=trace,
    )
    error.__cause__ = cause
    return error
