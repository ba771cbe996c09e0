"""The mesh of JAX devices of a gang's replicas, in this process or in several that have joined each other.

A process opens its devices once, so only a new process can have other devices, or other peers. jax is imported only
here, when a program needs it.
"""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pipedist.errors import UsageError
from pipedist.protocol.program import JaxDevices
from pipedist.worker.devices import DevicesUnseen

AXIS: Final = "replica"  # name of the mesh's only axis
JOIN_S: Final = 60  # maximum time that processes wait for each other when they make a mesh, seconds
SHUTDOWN_S: Final = 3
_FORCED: Final = re.compile(r"--xla_force_host_platform_device_count=([0-9]+)")

Array = Any  # an array of jax, or its tracer
Host = np.ndarray[Any, Any]


def jax() -> Any:
    """Return the module jax; UsageError if it is not installed."""
    try:
        return importlib.import_module("jax")
    except ImportError as error:
        raise UsageError(
            f"functions on JAX devices need jax, which is not installed here ({error}): pip install 'pipedist[jax]'"
        ) from None


@dataclass(frozen=True, eq=False)
class Mesh:
    """The devices of a gang's replicas, in order of replica ids."""

    devices: tuple[Any, ...]  # of all members
    mesh: Any  # a jax.sharding.Mesh of them
    local: range  # the replicas of this process

    def put(self, each: Host) -> Array:
        """Return the replicas' arrays, stacked along the first axis, as one array that is sharded along it."""
        return self._make(each, jax().sharding.PartitionSpec(AXIS))

    def put_copies(self, value: Host) -> Array:
        """Return an array of which each device has a copy."""
        return self._make(value, jax().sharding.PartitionSpec())

    def parts(self, value: Array) -> list[Host]:
        """Return the parts of this process's replicas of an array that is sharded along its first axis."""
        shards = sorted(value.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return [np.asarray(shard.data)[0] for shard in shards]

    def connect(self) -> None:
        """Open the connections of collectives while all processes are known to be alive: gloo waits 30 s for them."""
        spec = jax().sharding.PartitionSpec(AXIS)
        total = jax().shard_map(
            lambda x: jax().lax.psum(x, AXIS), mesh=self.mesh, in_specs=spec, out_specs=spec
        )
        jax().jit(total)(self.put(np.zeros(len(self.local)))).block_until_ready()

    def _make(self, value: Host, spec: Any) -> Array:
        sharding = jax().sharding.NamedSharding(self.mesh, spec)
        return jax().make_array_from_process_local_data(sharding, value)


@dataclass(frozen=True)
class Peers:
    """The processes whose devices are one mesh."""

    identity: str  # equal in all of them, and only in them
    address: str  # of the first one's coordination service
    member: int
    members: int


_started: tuple[str, Peers | None] | None = None
"""The platform and processes for which jax was configured: it opens its devices once in a process."""


def joined() -> str | None:
    """Return the identity of the processes that this one has joined; "": none; None: jax is not started."""
    if _started is None:
        return None
    return "" if _started[1] is None else _started[1].identity


def peers() -> Peers | None:
    """Return the processes that this one has joined, itself included."""
    return None if _started is None else _started[1]


def start(devices: JaxDevices, local: range, others: Peers | None = None) -> Mesh:
    """Return the mesh of all replicas, of which this process has `local`; without others it has all of them.

    Raise DevicesUnseen if only a new process can have these devices, UsageError if there are none.
    """
    global _started
    ordinals = devices.ordinals[local.start : local.stop] or tuple(range(len(local)))
    count = max(ordinals) + 1
    if _started is not None and _started != (devices.platform, others):
        raise DevicesUnseen("jax has other devices, or other peers, in this process")
    if _started is None:
        _started = (devices.platform, others)
        _configure(devices.platform, count, others)
    library = jax()
    try:
        found = sorted(library.local_devices(backend=devices.platform), key=lambda device: device.id)
    except RuntimeError as error:
        raise UsageError(
            f"jax has no {devices.platform} devices here ({error}): choose platform='cpu', or install jax for it"
        ) from None
    if len(found) < count:
        text = f"{len(local)} replicas need {devices.platform}:{count - 1}, but jax has {len(found)} of these devices"
        if devices.platform == "cpu":
            raise DevicesUnseen(text)
        raise UsageError(f"{text}: use fewer replicas, or more workers on other hosts")
    chosen = tuple(found[ordinal] for ordinal in ordinals)
    if others is not None:
        each = [
            [d for d in library.devices() if d.process_index == member] for member in range(others.members)
        ]
        at = devices.ordinals or tuple(range(len(local))) * others.members
        chosen = tuple(
            sorted(each[replica // len(local)], key=lambda device: device.id)[ordinal]
            for replica, ordinal in enumerate(at)
        )
    return Mesh(chosen, library.sharding.Mesh(np.array(chosen), (AXIS,)), local)


def _configure(platform: str, count: int, peers: Peers | None) -> None:
    if platform == "cpu":  # the number of XLA_FLAGS is the least: jax refuses two numbers
        flags = os.environ.get("XLA_FLAGS", "")
        count = max([count, *map(int, _FORCED.findall(flags))])
        os.environ["XLA_FLAGS"] = _FORCED.sub("", flags)
    config = jax().config
    try:
        config.update("jax_enable_x64", True)  # dtypes are those of NumPy, as elsewhere
        if platform == "cpu":
            config.update("jax_platforms", "cpu")
            config.update("jax_num_cpu_devices", count)
            config.update("jax_cpu_collectives_implementation", None if peers is None else "gloo")
    except RuntimeError as error:  # the devices are open; `start` checks their number
        if peers is not None:
            raise UsageError(
                f"a module has used jax before its process could join others ({error})"
            ) from None
        return
    if peers is not None:
        jax().distributed.initialize(
            peers.address,
            peers.members,
            peers.member,
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=JOIN_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
