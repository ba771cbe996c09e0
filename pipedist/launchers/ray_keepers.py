"""How the process of a run makes, finds and ends what places its workers with Ray, and outlives it.

All of it is called in Ray's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from pipedist.launchers.engines import GRACE_S
from pipedist.launchers.hosted import Terms
from pipedist.launchers.ray_keeper import NAMESPACE, RayKeeper
from pipedist.launchers.ray_placing import RESTARTS_MAX, Room
from pipedist.launchers.whereabouts import Succession

_ANSWER_S = 10.0
"""How long a keeper may take to say whether it can be taken over."""

_HEAD = "node:__internal_head__"
"""The resource that Ray's head has, and no other node."""


def make_keeper(room: Room, terms: Terms, brings_code: bool, succession: Succession) -> Any:
    """Make a keeper, see `RayKeeper`; return its handle."""
    import ray

    keeper = ray.remote(RayKeeper).options(
        name=succession.name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=RESTARTS_MAX,
        max_task_retries=0,
        max_concurrency=4,  # a call of the next process, while one of this process's waits
        resources=where(),
    )
    return keeper.remote(room, terms, brings_code, succession.rejoin_s)


def where() -> dict[str, float]:
    """Return what only the head's node has, if that is known: a keeper there is lost with all of Ray only.

    It takes no room there, and no autoscaler ends that node, as it does one that has no more than a keeper.
    """
    import ray

    return {_HEAD: 0.001} if _HEAD in ray.cluster_resources() else {}


def find_keeper(succession: Succession) -> Any:
    """Return the keeper that an earlier process has left, if it goes on; None if there is none."""
    import ray
    from ray.exceptions import RayError

    for keeper in _keepers(succession.earlier):
        with contextlib.suppress(RayError):  # it has just ended, or its node is lost
            if ray.get(keeper.take_over.remote(succession.rejoin_s), timeout=_ANSWER_S):
                return keeper
        end_keeper(keeper)
    return None


def end_keepers(left: Succession) -> None:
    """End the keepers of a process that is gone, and of those before it."""
    for keeper in _keepers([left.name, *left.earlier]):
        end_keeper(keeper)


def end_keeper(keeper: Any) -> None:
    """End a keeper, and the workers that it has placed."""
    import ray

    ray.wait([keeper.close.remote()], timeout=3 * GRACE_S)  # that of a lost node does not answer
    ray.kill(keeper)


def _keepers(names: Iterable[str]) -> Iterable[Any]:
    import ray

    for name in names:
        try:
            keeper = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # there is none of that name
            continue
        yield keeper
