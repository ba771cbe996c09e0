"""A run with a short heartbeat timeout: python -m tests.reattach.impatient LISTEN REJOIN_S."""

from __future__ import annotations

import asyncio
import sys

import pipedist
from pipedist.scheduler import SchedulerLimits

HEARTBEAT_TIMEOUT_S = 2.0


async def main(listen: str, rejoin_s: float) -> None:
    """Execute ./spec.yaml."""
    cluster = pipedist.ConnectCluster(
        listen=listen,
        key_file="cluster.key",
        workers=2,
        limits=SchedulerLimits(heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S),
        rejoin_s=rejoin_s,
    )
    async with cluster, pipedist.open("spec.yaml", cluster=cluster, output="out") as run:
        result = await run.results()
        sys.stderr.write(f"{result.ledger.lost} elements lost\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
