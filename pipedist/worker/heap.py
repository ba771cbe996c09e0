"""What a worker's allocator does with memory that arrays leave behind."""

from __future__ import annotations

import numpy as np

_BYTES = 31 << 20
"""Just below the size to which glibc lets its thresholds grow."""


def keep_freed_pages() -> None:
    """Have arrays of up to 31 MiB reuse the pages of those freed before them.

    glibc maps a block above its threshold (128 KiB at first) afresh, and gives the top of its heap back
    beyond twice that much: an array of some hundred KiB then costs a page fault for every 4 KiB, each
    time it is made. The thresholds rise to the size of the largest mapped block that was ever freed, so one
    that nobody touches raises them. At most 62 MiB of freed memory stay with the process.
    """
    np.empty(_BYTES, np.uint8)
