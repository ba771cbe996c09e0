"""A copy of a spec's modules, for nodes that do not share its folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipedist.errors import UsageError

MODULES_MAX = 10_000
MODULES_MIB_MAX = 64


def copy_modules(code: Path, to: Path) -> None:
    """Copy the `.py` files of a folder and of those below it; hidden folders and links stay behind.

    Args:
        code: the folder of the user's modules.
        to: an empty folder.

    Raises:
        UsageError: there are more than MODULES_MAX, or more than MODULES_MIB_MAX MiB.
    """
    copied, room = 0, MODULES_MIB_MAX * 2**20
    for folder, folders, files in os.walk(code):
        folders[:] = sorted(name for name in folders if name[0] != "." and name != "__pycache__")
        below = to / os.path.relpath(folder, code)
        for name in sorted(files):
            source = Path(folder, name)
            if not name.endswith(".py") or source.is_symlink():
                continue
            copied += 1
            room -= source.stat().st_size
            if copied > MODULES_MAX or room < 0:
                raise UsageError(
                    f"the modules in {code} are more than {MODULES_MAX} files or {MODULES_MIB_MAX} MiB, too "
                    "many to send to nodes: keep those of the spec in a folder of their own (`code: FOLDER`)"
                )
            below.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, below / name)
