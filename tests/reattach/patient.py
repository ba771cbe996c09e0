"""`pipedist`, for machines that may be slow: a run that is resumed waits for its workers as long as it takes.

    python -m tests.reattach.patient run SPEC ...

It also says who is there, so that a test need not guess it: "WORKER has joined", and "WORKER is heard of",
when its supervisor is told how long to wait for another scheduler.
"""

from __future__ import annotations

import sys

from pipedist.cluster import remote as connect_cluster
from pipedist.coordinator.worker_pool import Fleet
from pipedist.protocol import messages
from tests.reattach.jobs import PATIENCE_S


def main() -> None:
    connect_cluster.GATHER_S = PATIENCE_S
    greet, heard, known = Fleet.greet, Fleet.heard, set[bytes]()

    def greet_and_say(self: Fleet, identity: bytes, hello: messages.Hello) -> None:
        greet(self, identity, hello)
        if self.behind(identity) is not None:
            sys.stderr.write(f"{hello.worker} has joined\n")

    def heard_and_said(self: Fleet, identity: bytes, worker: str, incarnation: int) -> None:
        heard(self, identity, worker, incarnation)
        if identity not in known:
            known.add(identity)
            sys.stderr.write(f"{worker} is heard of\n")

    Fleet.greet, Fleet.heard = greet_and_say, heard_and_said  # type: ignore[method-assign]
    from pipedist.cli.app import main as pipedist

    pipedist()


if __name__ == "__main__":
    main()
