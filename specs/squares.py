"""The functions of squares.yaml."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def powers(numbers: NDArray[np.int64], power: int) -> NDArray[np.int64]:
    """Return each number to the power."""
    return numbers**power
