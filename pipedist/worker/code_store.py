"""Copies of the scheduler's code folders, in a worker on another host.

Where the scheduler's folder is here too, with the same digest (a shared file system), it is used itself.
Otherwise its files are unpacked in a private folder, which is called by their digest: the next
incarnation of the worker finds them there. The folder belongs to the supervisor, who removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from pipedist.core import functions
from pipedist.core.temp_dirs import ScratchFolder
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.code_archive import CodeTooLarge, is_digest, take, unpack
from pipedist.protocol.codec import decode
from pipedist.protocol.messages import Code


class CodeStore:
    """What stands for each of the scheduler's code folders.

    Args:
        root: where copies are kept, a folder of this user alone; "": one is made when it is needed, and
            removed by `close`.
        worker: the worker's name, for errors.
    """

    def __init__(self, root: str, worker: str) -> None:
        self._root = root
        self._made: ScratchFolder | None = None
        self._worker = worker
        self._places: dict[str, str] = {}
        self._told: dict[str, str] = {}

    def keep(self, code: Code, frames: Sequence[memoryview]) -> None:
        """Take in what the scheduler says of a folder of its own, and the files, if they were sent.

        Raises:
            RemoteProtocolError: they are malformed, or are not here though they should be.
        """
        folder = os.fsdecode(code.folder)
        if not code.digest:
            self._places[folder], self._told[folder] = folder, code.text
            return
        if not is_digest(code.digest) or not os.path.isabs(folder):
            raise RemoteProtocolError(f"code of {folder!r} with the digest {code.digest!r}")
        if _has(folder, code.digest):
            self._places[folder] = folder
            self._told[folder] = f"{folder}, which is the same here"
            return
        try:
            place = os.path.join(self._folder(), code.digest)
            if not os.path.isdir(place):
                if not frames:
                    raise RemoteProtocolError(f"code {code.digest} was to be here, and is not")
                unpack(decode(frames), code.digest, place)
        except OSError as error:
            self._places[folder] = folder
            self._told[folder] = f"{folder}, but it can't be unpacked here: {error}"
            return
        self._places[folder] = place
        self._told[folder] = f"{folder} ({code.text})"

    def place(self, folder: str) -> str:
        """Return the folder here that stands for one of the scheduler's."""
        return self._places.get(folder, folder)

    def announce(self) -> None:
        """Have errors about functions say which worker this is, and what it was sent."""
        sent = "; ".join(self._told.values()) or "no code folder"
        functions.set_process_note(f"this is worker {self._worker}, on another host, which was sent: {sent}")

    def close(self) -> None:
        """Remove what was made here."""
        if self._made is not None:
            self._made.close()

    def _folder(self) -> str:
        if not self._root:
            self._made = ScratchFolder("code")
            self._root = self._made.path
        return self._root


def held(root: str) -> tuple[str, ...]:
    """Return the digests of the copies in a folder."""
    return tuple(_digests(root)) if root else ()


def _digests(root: str) -> Iterator[str]:
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return
    yield from (name for name in names if is_digest(name))


def _has(folder: str, digest: str) -> bool:
    """Whether the scheduler's folder is here, with the same files."""
    if not os.path.isdir(folder):
        return False
    try:
        return take(folder).digest == digest
    except (OSError, CodeTooLarge):
        return False
