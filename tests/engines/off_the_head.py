"""`python -m tests.engines.off_the_head run ...`: as pipedist; its keeper is on a node that can be lost."""

from __future__ import annotations

from pipedist.cli import main
from pipedist.launchers import ray_keepers

BESIDE = "beside_the_head"
"""A resource of the nodes that can."""

if __name__ == "__main__":
    ray_keepers.where = lambda: {BESIDE: 0.001}
    main()
