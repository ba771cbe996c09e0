"""The run's side of a test: executes a spec with workers that dial in, and prints its observations.

    python -m tests.networks.scheduler SPEC LISTEN KEY_FILE OUTPUT HEARTBEAT_TIMEOUT_S REJOIN_S

On stdout, a JSON object a line, each with `at`, seconds of this machine's one monotonic clock:
{"event": "listening", "endpoint"}, {"event": "workers", "ready"} for each change of how many have joined,
{"event": "done", "ledger"}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import anyio

import pipedist
from pipedist.scheduler import SchedulerLimits

LOOK_S = 0.005


def tell(event: str, **what: object) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **what}), flush=True)


async def watch(cluster: pipedist.ConnectCluster) -> None:
    ready = 0
    while True:
        if cluster.coordinator.workers_ready != ready:
            ready = cluster.coordinator.workers_ready
            tell("workers", ready=ready)
        await anyio.sleep(LOOK_S)


async def main(
    spec: str, listen: str, key_file: str, output: str, heartbeat_timeout_s: float, rejoin_s: float
) -> None:
    limits = SchedulerLimits(heartbeat_timeout_s=heartbeat_timeout_s)
    connected = pipedist.ConnectCluster(
        listen=listen, key_file=key_file, workers=2, limits=limits, rejoin_s=rejoin_s
    )
    async with connected as cluster:
        tell("listening", endpoint=cluster.coordinator.endpoint)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, cluster)
            async with pipedist.open(spec, cluster=cluster, output=output) as run:
                result = await run.results()
            tell("done", ledger=dict(result.ledger.to_json()))
            tasks.cancel_scope.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5], *map(float, sys.argv[5:7])))
