"""Whether the kernel has killed a process because memory was exhausted.

SIGKILL does not say who sent it. The kernel counts, for each control group, the processes that it has
killed for want of memory: a worker that was killed while the count grew was one of them.
"""

from __future__ import annotations

from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


class OutOfMemoryKills:
    """The count of this process's control group, which its children share.

    Args:
        groups: what names the group.
        mount: where the groups' files are.
    """

    def __init__(self, groups: Path = _GROUPS, mount: Path = _MOUNT) -> None:
        self._file = _file_of(groups, mount)
        self._count = self._read()

    def grew(self) -> bool:
        """Return whether there were any since the last time."""
        before, self._count = self._count, self._read()
        return self._count > before

    def _read(self) -> int:
        if self._file is None:
            return 0
        try:
            lines = self._file.read_text().splitlines()
        except OSError:
            return 0
        counts = [line.split() for line in lines]
        return next((int(words[1]) for words in counts if len(words) == 2 and words[0] == "oom_kill"), 0)


def _file_of(groups: Path, mount: Path) -> Path | None:
    """Return the file that counts, None where there is none (no Linux, no control groups)."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    for line in lines:  # "0::/path" of version 2; "4:memory:/path" of version 1
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            file = mount / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = mount / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        if file.is_file():
            return file
    return None
