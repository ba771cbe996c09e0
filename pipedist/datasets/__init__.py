"""Datasets: their sources, and the division of their elements among steps and replicas.

Entry points: `open_source` for the source of a spec's dataset, `division.Division` for the contract of its division,
`feeds` for the steps of a pass, and `logical.Dataset` for the Strategy API. Sources are opened and divided in the
driver process; a worker process opens a reader (`open_reader`) if it can read its own shards.
"""

from __future__ import annotations

from pipedist.datasets.sources import open_reader, open_source

__all__ = ["open_reader", "open_source"]
