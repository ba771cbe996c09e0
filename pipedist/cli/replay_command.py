"""The command `pipedist replay`: one call of a run again, alone, in this process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pipedist.cli import exits
from pipedist.cli.streams import stdout_to_stderr, write_error, write_out
from pipedist.program import Tree

if TYPE_CHECKING:
    from pipedist.pipeline.lone_call import Replayed
    from pipedist.pipeline.replaying import Replay

FORMAT = 1
"""Of the JSON document."""


class _CtrlC(KeyboardInterrupt):
    """The terminal's, and not one that the function raised."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the command line says.

    Args:
        run: the run's output folder.
        call: STAGE/STEP/REPLICA.
        elements: ids, to be executed without the call's others; none: as it was committed.
        debug: stop in the debugger where the call fails.
        as_json: one JSON document instead of text.
    """

    run: str
    call: str
    elements: tuple[int, ...] = ()
    debug: bool = False
    as_json: bool = False


def execute(options: ReplayOptions) -> int:
    """Execute a call again, and print what came of it.

    Returns:
        0; 1 if it failed.

    Raises:
        UsageError: the call can't be had.
    """
    import faulthandler

    from pipedist.errors import JournalError, UsageError

    faulthandler.enable()  # a call that kills its process kills this one: it shows where
    try:
        return _execute(options)
    except JournalError as error:  # 1 would say that the call failed
        raise UsageError(str(error)) from error


def _execute(options: ReplayOptions) -> int:
    from pipedist.pipeline.call_keys import CallKey
    from pipedist.pipeline.replaying import open_replay, threads_of

    key, folder = CallKey.of(options.call), Path(options.run)
    _use_threads(threads_of(folder))
    # modules of the user may print, and so may the call
    with stdout_to_stderr(), open_replay(folder, key, options.elements) as replay:
        if not options.as_json:
            write_error("".join(f"pipedist: {line}\n" for line in _introduced(replay)))
        with _recognizing_ctrl_c(replay.call.program.gang):
            made = replay.execute()
    if isinstance(made.error, _CtrlC):
        write_error(f"pipedist: Ctrl-C ended the call, which was here:\n{_told(made)}")
        if options.debug:
            _debug(made.error)
        raise made.error
    if options.as_json:
        _print_document(replay, made)
    elif made.failure is None:
        write_out(_text(made) + "\n")
    if made.failure is not None:
        if not options.as_json:
            write_error(_failure_text(replay, made))
        if options.debug and made.error is not None:
            _debug(made.error)
        return exits.FAILED
    return exits.OK


@contextmanager
def _recognizing_ctrl_c(is_gang: bool) -> Iterator[None]:
    def interrupt(number: int, _frame: FrameType | None) -> None:
        if not is_gang:
            raise _CtrlC
        # Nothing can end the threads of its replicas but the end of the process.
        write_error(f"pipedist: Ctrl-C ended the call, whose replicas were here:\n{_places()}")
        os._exit(exits.interrupted(number))

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _places() -> str:
    """Return where this process's threads are, those that are in a replica function."""
    from traceback import format_list

    from pipedist.worker.failures import user_stack

    stacks = [user_stack(frame) for frame in sys._current_frames().values()]
    return "\n".join("".join(format_list(stack)) for stack in stacks if stack)


def _use_threads(threads: int) -> None:
    """Begin anew, as the same process, unless numeric libraries use so many threads: bits depend on it."""
    from pipedist.worker.boot import THREAD_VARIABLES, environment

    if any(os.environ.get(name) != str(threads) for name in THREAD_VARIABLES):
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment(threads))


def _introduced(replay: Replay) -> list[str]:
    key = replay.key
    ids = replay.elements
    if len(ids) > 1 and ids[-1] - ids[0] == len(ids) - 1:
        which = f"elements {ids[0]} to {ids[-1]}"
    else:
        which = f"{len(ids)} element{'s' * (len(ids) != 1)}"
    states = "".join(f", {name} of version {version}" for name, version in replay.states.items())
    line = f"stage {key.stage}, step {key.step}, replica {key.replica} of run {replay.run}: {which}{states}"
    return [line, *replay.notes]


def _text(made: Replayed) -> str:
    from pipedist.cli.summary import summarize
    from pipedist.errors import OutputError

    if not made.has_value:
        return "the stage is not called with an empty shard"
    try:
        return summarize(made.value)
    except (OutputError, TypeError):  # a value that only lives in a worker
        return repr(made.value)


def _failure_text(replay: Replay, made: Replayed) -> str:
    failure = made.failure
    assert failure is not None
    text = f"{failure.name}: {failure.text}" if failure.text else failure.name
    where = f"stage {failure.stage}, step {replay.key.step}, replica {made.culprit}"
    return f"pipedist: {where}: {text}\n{_told(made)}"


def _told(made: Replayed) -> str:
    told = made.failure.traceback.rstrip() if made.failure is not None else ""
    return f"{told}\n" if told else ""


def _print_document(replay: Replay, made: Replayed) -> None:
    import json

    from pipedist.errors import OutputError
    from pipedist.outputs import to_json

    key, failure = replay.key, made.failure
    document: dict[str, Any] = {
        "format": FORMAT,
        "run": replay.run,
        "call": str(key),
        "stage": key.stage,
        "step": key.step,
        "replica": key.replica,
        "epoch": replay.epoch,
        "elements": list(replay.elements),
        "left_out": list(replay.left_out),
        "states": dict(replay.states),
        "notes": list(replay.notes),
    }
    if failure is not None:
        document["error"] = {
            "class": failure.name,
            "message": failure.text,
            "stage": failure.stage,
            "step": key.step,
            "replica": made.culprit,
            "traceback": failure.traceback,
        }
    elif made.has_value:
        value: Tree = made.value
        try:
            document["result"] = to_json(value)
        except OutputError:  # a value that only lives in a worker
            document["result"] = repr(value)
    write_out(json.dumps(document, allow_nan=False) + "\n")


def _debug(error: BaseException) -> None:
    """Stop in the debugger, in the frame that raised."""
    import pdb

    from pipedist.worker.failures import user_frames

    frames = user_frames(error.__traceback__) or error.__traceback__
    if frames is not None:
        pdb.post_mortem(frames)
