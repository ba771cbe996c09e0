"""The command `pipedist replay`: execute one call of a run again, in this process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pipedist.cli import terminal
from pipedist.cli.terminal import stdout_to_stderr, write_error, write_error_at_once, write_json, write_out
from pipedist.core.names import plural
from pipedist.core.types import Tree

if TYPE_CHECKING:
    from pipedist.runs.call_replay import Replayed
    from pipedist.runs.replay import Replay

FORMAT = 1  # version of the JSON document


class _CtrlC(KeyboardInterrupt):
    """Ctrl-C on the terminal, as distinct from a KeyboardInterrupt that the function raised."""


def execute(run: str, call: str, elements: tuple[int, ...], *, debug: bool, as_json: bool) -> int:
    """Execute a call again, and print its outcome; return 1 if it failed.

    `elements` are the ids of the only elements to execute; empty: those that were committed.
    """
    import faulthandler

    from pipedist.errors import JournalError, UsageError

    faulthandler.enable()  # a call that kills the process shows where
    try:
        return _execute(Path(run), call, elements, debug, as_json)
    except JournalError as error:  # exit code 1 means that the call failed
        raise UsageError(str(error)) from error


def _execute(folder: Path, call: str, elements: tuple[int, ...], debug: bool, as_json: bool) -> int:
    from pipedist.runs.call_keys import CallKey
    from pipedist.runs.replay import open_replay, threads_of

    key = CallKey.of(call)
    _use_threads(threads_of(folder))
    # The user's modules may print, and so may the call.
    with stdout_to_stderr(), open_replay(folder, key, elements) as replay:
        if not as_json:
            write_error("".join(f"pipedist: {line}\n" for line in _introduction(replay)))
        with _recognizing_ctrl_c(replay.call.program.gang):
            outcome = replay.execute()
    if isinstance(outcome.error, _CtrlC):
        write_error(f"pipedist: Ctrl-C ended the call here:\n{_traceback(outcome)}")
        if debug:
            _debug(outcome.error)
        raise outcome.error
    if as_json:
        _print_document(replay, outcome)
    elif outcome.failure is None:
        write_out(_text(outcome) + "\n")
    else:
        write_error(_failure_text(replay, outcome))
    if outcome.failure is None:
        return terminal.OK
    if debug and outcome.error is not None:
        _debug(outcome.error)
    return terminal.FAILED


@contextmanager
def _recognizing_ctrl_c(is_gang: bool) -> Iterator[None]:
    def interrupt(number: int, _frame: FrameType | None) -> None:
        if not is_gang:
            raise _CtrlC
        # Only the end of the process ends the threads of the replicas.
        write_error_at_once(f"pipedist: Ctrl-C ended the call; its replicas were here:\n{_stacks()}")
        os._exit(terminal.interrupted(number))

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stacks() -> str:
    """Return the stacks of the threads that execute a replica function."""
    from traceback import format_list

    from pipedist.worker.failures import user_stack

    stacks = [user_stack(frame) for frame in sys._current_frames().values()]
    return "\n".join("".join(format_list(stack)) for stack in stacks if stack)


def _use_threads(threads: int) -> None:
    """Re-execute this process if numeric libraries use another number of threads: bits depend on it."""
    from pipedist.worker.boot import THREAD_VARIABLES, environment

    if any(os.environ.get(name) != str(threads) for name in THREAD_VARIABLES):
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment(threads))


def _introduction(replay: Replay) -> list[str]:
    key = replay.key
    ids = replay.elements
    which = plural(len(ids), "element") if ids else "the whole value"
    if len(ids) > 1 and ids[-1] - ids[0] == len(ids) - 1:
        which = f"elements {ids[0]} to {ids[-1]}"
    states = "".join(f", {name} of version {version}" for name, version in replay.states.items())
    line = f"stage {key.stage}, step {key.step}, replica {key.replica} of run {replay.run}: {which}{states}"
    return [line, *replay.notes]


def _text(outcome: Replayed) -> str:
    from pipedist.errors import OutputError
    from pipedist.outputs.summary import summarize

    if not outcome.has_value:
        return "the stage is not called: its shard is empty"
    try:
        return summarize(outcome.value)
    except (OutputError, TypeError):  # a value that exists only in a worker
        return repr(outcome.value)


def _failure_text(replay: Replay, outcome: Replayed) -> str:
    failure = outcome.failure
    assert failure is not None
    text = f"{failure.name}: {failure.text}" if failure.text else failure.name
    where = f"stage {failure.stage}, step {replay.key.step}, replica {outcome.culprit}"
    return f"pipedist: {where}: {text}\n{_traceback(outcome)}"


def _traceback(outcome: Replayed) -> str:
    text = outcome.failure.traceback.rstrip() if outcome.failure is not None else ""
    return f"{text}\n" if text else ""


def _print_document(replay: Replay, outcome: Replayed) -> None:
    from pipedist.errors import OutputError
    from pipedist.outputs import to_json

    key, failure = replay.key, outcome.failure
    document: dict[str, Any] = {
        "format": FORMAT,
        "run": replay.run,
        "call": str(key),
        "stage": key.stage,
        "step": key.step,
        "replica": key.replica,
        "epoch": replay.epoch,
        "elements": list(replay.elements),
        "left_out": list(replay.skipped),
        "states": dict(replay.states),
        "notes": list(replay.notes),
    }
    if failure is not None:
        document["error"] = {
            "class": failure.name,
            "message": failure.text,
            "stage": failure.stage,
            "step": key.step,
            "replica": outcome.culprit,
            "traceback": failure.traceback,
        }
    elif outcome.has_value:
        value: Tree = outcome.value
        try:
            document["result"] = to_json(value)
        except OutputError:  # a value that exists only in a worker
            document["result"] = repr(value)
    write_json(document)


def _debug(error: BaseException) -> None:
    """Stop in the debugger, in the frame that raised."""
    import pdb

    from pipedist.worker.failures import user_frames

    frames = user_frames(error.__traceback__) or error.__traceback__
    if frames is not None:
        pdb.post_mortem(frames)
