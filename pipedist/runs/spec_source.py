"""Where a run's spec came from, so that the run can be looked into later, from its folder alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from pipedist.core.types import Tree
from pipedist.errors import PipedistError, UsageError
from pipedist.journal.log_format import packed, unpacked
from pipedist.protocol.codec import encode
from pipedist.spec import Spec, load


class Origin(Struct, frozen=True):
    """How a spec is loaded again.

    Args:
        source: absolute path of its file; "" where there is none to be had.
        sets: texts NAME=VALUE of the command line.
        params: what was given for its parameters otherwise: a dict, as a record of a log.
    """

    source: str = ""
    sets: tuple[str, ...] = ()
    params: bytes = b""

    @classmethod
    def of(cls, spec: object, params: Mapping[str, Tree] | None, sets: Sequence[str]) -> Origin:
        """Return the origin of a spec that is given to a run as a path, or as anything else."""
        if not isinstance(spec, str | os.PathLike):
            return NOWHERE
        try:
            kept = b"".join(packed(None, encode(dict(params)))) if params else b""
        except PipedistError:  # of a kind that only lives in the process
            return NOWHERE
        return cls(os.path.abspath(os.fspath(spec)), tuple(sets), kept)

    def load(self) -> Spec:
        """Load the spec.

        Raises:
            UsageError: there is no file.
            SpecError: it has mistakes now.
        """
        if not self.source:
            raise UsageError(
                "the run's spec was no file: it was given in Python, as a dict or with values that only "
                "lived there; write it to a YAML file, and run that"
            )
        if not Path(self.source).is_file():
            raise UsageError(f"the run's spec is not at {self.source} any more: put it back there")
        return load(self.source, sets=self.sets, params=unpacked(self.params) if self.params else None)


NOWHERE = Origin()
"""Of a spec that can't be loaded again."""
