"""How large the workloads are: as published, or so small that all of them take seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all workloads.

    Args:
        calls: W1, calls of a trivial function.
        batches: W2, W3, number of batches.
        batch_elements: W2, W3, MEM, float32 elements a batch.
        growth: W6, numbers of calls, ascending.
        growth_budget_s: W6, a size that would take longer is left out.
        burns: W7, calls.
        steps: W8, synchronous steps.
        step_elements: W8, float32 elements a step, over all workers.
        naps: W9, calls.
        file_bytes: FN, FP, size of the data set.
        file_parts: FN, FP, number of files.
        streamed_batches: MEM, number of batches.
    """

    calls: int = 20_000
    batches: int = 256
    batch_elements: int = 1 << 20
    growth: tuple[int, ...] = (2_000, 20_000, 200_000, 2_000_000)
    growth_budget_s: float = 120.0
    burns: int = 64
    steps: int = 1_000
    step_elements: int = 1 << 14
    naps: int = 200
    file_bytes: int = 2 << 30
    file_parts: int = 8
    streamed_batches: int = 2_560


FULL = Sizes()
SMOKE = Sizes(
    calls=200,
    batches=6,
    batch_elements=1 << 15,
    growth=(100, 400),
    burns=2,
    steps=10,
    step_elements=256,
    naps=20,
    file_bytes=1 << 20,
    file_parts=2,
    streamed_batches=20,
)

FILE_COLUMNS = 16
"""FN, FP: float64 columns of the data set."""

FILE_BLOCK_ROWS = 1 << 16
"""FN, FP: rows read at one time (8 MiB), by every system that lets one say so."""
