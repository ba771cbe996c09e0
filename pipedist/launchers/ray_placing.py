"""How workers are placed with Ray, by whoever does it: a placement group, and an actor in each bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from pipedist.launchers.engines import GRACE_S
from pipedist.launchers.hosted import Terms
from pipedist.launchers.ray_host import RayHost

RESTARTS_MAX = 1000
"""How often Ray starts an actor again."""


class Room(Struct, frozen=True):
    """What Ray sets aside.

    Args:
        workers: how many bundles.
        bundle: resources of each, by name.
        placement: `pack`: on as few nodes as there is room on; `spread`: on as many.
    """

    workers: int
    bundle: Mapping[str, float]
    placement: str


def make_group(room: Room) -> Any:
    """Ask Ray for room; return the placement group."""
    from ray.util.placement_group import placement_group

    return placement_group([dict(room.bundle)] * room.workers, strategy=room.placement.upper())


def make_host(room: Room, group: Any, number: int, terms: Terms, brings_code: bool) -> Any:
    """Make the actor of a bundle; return its handle.

    Args:
        group: the placement group.
        number: the bundle's.
        terms: how its worker joins.
        brings_code: see `RayHost`.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    host = ray.remote(RayHost).options(
        num_cpus=room.bundle["CPU"],
        num_gpus=room.bundle.get("GPU", 0),
        max_restarts=RESTARTS_MAX,
        max_task_retries=0,
        max_concurrency=2,  # `close` while `left` waits
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
    )
    return host.remote(terms, brings_code)


def end_hosts(hosts: Sequence[Any], group: Any) -> None:
    """End workers and actors, and give back their room.

    Args:
        hosts: the actors.
        group: the placement group; None: there is none.
    """
    import ray
    from ray.util.placement_group import remove_placement_group

    closing = [host.close.remote(GRACE_S) for host in hosts]
    if closing:  # those of lost nodes do not answer
        ray.wait(closing, num_returns=len(closing), timeout=2 * GRACE_S)
    for host in hosts:
        ray.kill(host)
    if group is not None:
        remove_placement_group(group)
