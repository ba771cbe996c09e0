"""The measurement of the overlap checks its results, in a tiny size; no time is looked at."""

from __future__ import annotations

import pytest

from benchmarks.overlap import measure, table


@pytest.mark.asyncio
async def test_it_measures_both_ways() -> None:
    rows = await measure(3, decode_s=0.003, infer_s=0.002)
    assert [row.name for row in rows] == ["streamed", "one call on the GPU's worker"]
    assert all(row.took_s > 0 and row.bound_s > 0 for row in rows)
    assert table(rows).count("\n") == 3
