"""`pipedist`, for slow machines: a run that is resumed waits for its workers as long as it takes.

    python -m tests.reattach.patient run SPEC ...

It also prints events that tests wait for: "WORKER has joined", and "WORKER sent a heartbeat", after which its
supervisor knows how long to wait for another scheduler.
"""

from __future__ import annotations

import sys
from typing import Any

from pipedist.cluster import remote as connect_cluster
from pipedist.coordinator.worker_pool import WorkerPool
from pipedist.protocol import messages
from tests.reattach.jobs import PATIENCE_S


def main() -> None:
    connect_cluster.GATHER_S = PATIENCE_S
    on_hello, on_heartbeat, known = WorkerPool.on_hello, WorkerPool.on_heartbeat, set[bytes]()

    def print_joined(self: WorkerPool, identity: bytes, hello: messages.Hello, **options: Any) -> None:
        on_hello(self, identity, hello, **options)
        if self.of_identity(identity) is not None:
            sys.stderr.write(f"{hello.worker} has joined\n")

    def print_heartbeat(self: WorkerPool, identity: bytes, worker: str, incarnation: int) -> None:
        on_heartbeat(self, identity, worker, incarnation)
        if identity not in known:
            known.add(identity)
            sys.stderr.write(f"{worker} sent a heartbeat\n")

    WorkerPool.on_hello, WorkerPool.on_heartbeat = print_joined, print_heartbeat  # type: ignore[method-assign]
    from pipedist.cli.app import main as pipedist

    pipedist()


if __name__ == "__main__":
    main()
