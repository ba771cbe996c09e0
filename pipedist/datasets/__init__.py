"""Datasets: where elements come from (`sources`), and which of them goes where (`division`)."""

from __future__ import annotations

from pipedist.datasets.sources import open_reader, open_source

__all__ = ["open_reader", "open_source"]
