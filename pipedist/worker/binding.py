"""A pass's program on the wire: the payload of Bind.

Its first frame is the list of the spec's code folders alone. The worker puts them on its import
path before it decodes the rest: a value among a stage's `with` may be of a class in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from pipedist.core import functions
from pipedist.core.types import Tree
from pipedist.errors import PipedistError, RemoteProtocolError
from pipedist.protocol.codec import Frame, UnsendableError, decode, encode
from pipedist.protocol.layout import ClassNotFound
from pipedist.protocol.program import Program, from_tree, to_tree


class Unloadable(PipedistError):
    """A value that was sent to this worker is of a class that is not here, or not the same."""


def to_frames(program: Program) -> list[Frame]:
    """Return the payload that introduces a program.

    Raises:
        UnsendableError: a value of a stage's `with` can't be sent; the text names its place.
    """
    try:
        return [*encode(list(program.code)), *encode(to_tree(program))]
    except UnsendableError:
        for stage in program.stages:
            try:
                encode(stage.kwargs)
            except UnsendableError as error:
                raise UnsendableError(f"stage {stage.name}: `with`: {error}") from None
        raise


def from_frames(frames: Sequence[memoryview], place: Callable[[str], str] = str) -> Program:
    """Return the program that `to_frames` wrote, with its code folders on the import path.

    Args:
        place: returns the folder here that stands for one of the scheduler's.

    Raises:
        Unloadable: a value's class can't be had here; the text names class and module.
        RemoteProtocolError: the payload is malformed.
    """
    code = tuple(map(place, decode(frames[:1])))
    functions.append_code(code)
    return replace(from_tree(load_tree(frames[1:], "the arguments of this pass")), code=code)


def load_tree(frames: Sequence[memoryview], what: str) -> Tree:
    """Decode what this worker's own scheduler sent; modules of its classes are imported.

    Args:
        what: names it in an error.

    Raises:
        Unloadable: a value's class can't be had here; the text names class and module.
        RemoteProtocolError: the payload is malformed.
    """
    try:
        return decode(frames, may_import=True)
    except RemoteProtocolError as error:
        if not isinstance(error.__cause__, ClassNotFound):
            raise
        raise Unloadable(
            f"{what} can't be rebuilt in the worker: {error.__cause__}; define the class in a module "
            "that workers can import"
        ) from error
