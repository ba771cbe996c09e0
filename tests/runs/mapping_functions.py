"""Functions of tests that map them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Adder:
    made = 0

    def __init__(self, n: int) -> None:
        Adder.made += 1
        self.n = n

    def __call__(self, x: int, ctx: Any) -> tuple[int, int]:
        assert ctx.replica_id_in_sync_group == 0
        return x + self.n, Adder.made


async def echoed(x: Any) -> dict[str, Any]:
    return {"x": x, "none": None}


def noted(x: int, folder: str) -> float:
    """Note each call, and fail for 3 until there is a file `fixed`."""
    with (Path(folder) / "calls").open("a") as file:
        file.write(f"{x} ")
    if x == 3 and not (Path(folder) / "fixed").exists():
        raise ValueError("three")
    return x * 1.5
