"""Where a spec came from, so that a later process can load it again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from pipedist.core.types import Tree
from pipedist.errors import PipedistError, UsageError
from pipedist.journal.log_format import packed, unpacked
from pipedist.protocol.codec import encode
from pipedist.spec import Spec, load


class SpecSource(Struct, frozen=True):
    """Where a spec came from, so that a later process can load it again.

    Args:
        source: absolute path of its file; "" if the spec can't be loaded again.
        sets: texts NAME=VALUE of the command line.
        params: parameters given as values: a dict, encoded as a record of a log.
    """

    source: str = ""
    sets: tuple[str, ...] = ()
    params: bytes = b""

    @classmethod
    def of(cls, spec: object, params: Mapping[str, Tree] | None, sets: Sequence[str]) -> SpecSource:
        if not isinstance(spec, str | os.PathLike):
            return cls()
        try:
            kept = b"".join(packed(None, encode(dict(params)))) if params else b""
        except PipedistError:  # a value that can't be encoded
            return cls()
        return cls(os.path.abspath(os.fspath(spec)), tuple(sets), kept)

    def command(self, output: str = "", workers: int | None = None) -> str:
        """Return the command line that runs the spec, with these options; "" if there is none."""
        if not self.source or self.params:
            return ""
        words = ["pipedist", "run", os.path.relpath(self.source)]
        words += [] if workers is None else ["--workers", str(workers)]
        for each in self.sets:
            words += ["--set", each]
        return shlex.join([*words, "--output", output] if output else words)

    def load(self) -> Spec:
        if not self.source:
            raise UsageError(
                "the run's spec did not come from a file: it was passed in Python, as a dict or with values "
                "that can't be stored. Write the spec to a YAML file, and run that file"
            )
        if not Path(self.source).is_file():
            raise UsageError(f"the run's spec file {self.source} does not exist any more: put it back")
        return load(self.source, sets=self.sets, params=unpacked(self.params) if self.params else None)
