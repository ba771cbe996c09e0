"""Datasets: their sources, and the division of their elements among steps and replicas."""

from __future__ import annotations

from pipedist.datasets.sources import open_reader, open_source

__all__ = ["open_reader", "open_source"]
