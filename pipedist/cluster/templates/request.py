"""What a run asks of a batch system, whichever it is."""

from __future__ import annotations

import re

from msgspec import Struct

from pipedist.cluster.base import WORKERS_MAX
from pipedist.errors import UsageError
from pipedist.spec import Spec

_NO_NAME = re.compile(r"[^a-z0-9-]+")
_NAME_CHARACTERS_MAX = 40


class Request(Struct, frozen=True):
    """What is asked for.

    Args:
        name: lower-case letters, digits and "-", at most 40: a name everywhere.
        nodes: hosts with workers.
        workers_per_node: worker processes of each.
        threads: BLAS and OpenMP threads of a worker, and so its processors.
        gpus: of each node.
    """

    name: str
    nodes: int
    workers_per_node: int
    threads: int
    gpus: int = 0

    @classmethod
    def of(cls, spec: Spec, *, nodes: int, workers_per_node: int | None, gpus: int) -> Request:
        """Return what a spec's run asks for.

        Args:
            workers_per_node: None: the spec's workers divided among the nodes; 1 where it says `auto`.

        Raises:
            UsageError: there are too many workers, or the GPUs of a node can't be divided among them.
        """
        if workers_per_node is None:
            wanted = spec.cluster.workers
            workers_per_node = 1 if wanted == "auto" else -(-wanted // nodes)
        if nodes * workers_per_node > WORKERS_MAX:
            raise UsageError(f"{nodes * workers_per_node} workers: at most {WORKERS_MAX} can take part")
        if gpus % workers_per_node:
            raise UsageError(
                f"{gpus} GPUs of a node can't be divided evenly among {workers_per_node} workers: "
                "choose --workers-per-node"
            )
        name = _NO_NAME.sub("-", spec.name.lower()).strip("-")[:_NAME_CHARACTERS_MAX].strip("-") or "run"
        return cls(
            name if name[0].isalpha() else f"run-{name}",
            nodes,
            workers_per_node,
            spec.threads_per_replica,
            gpus,
        )

    @property
    def workers(self) -> int:
        """All worker processes."""
        return self.nodes * self.workers_per_node

    @property
    def gpus_per_worker(self) -> int:
        """Of each worker process."""
        return self.gpus // self.workers_per_node
