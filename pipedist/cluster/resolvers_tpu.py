"""TPU slices: the resolver of a TPU VM's variables, the topology, and assignments of replicas to cores.

A core is what JAX calls a device: a chip of v4 and newer, one of the two cores of a chip of v2 and v3. Nothing here
opens a device or imports jax. The coordinates of a core are (x, y, z, core): its chip in the slice, and its number
in the chip. The chips of a host are a block of the slice; hosts, and the chips in a block, are in the order of x, then
y, then z. Cores of one chip are consecutive.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipedist.cluster.resolvers import (
    ClusterResolver,
    ClusterSpec,
    ResolverError,
    ResolverStateError,
    number,
    text_or_none,
)

PORT: Final = 8470  # a TPU service listens there, as in tf.distribute
CORES_MAX: Final = 2**16  # more than any slice has
_DEVICES: Final = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
_TYPE = re.compile(r"(?P<generation>v[0-9]+[a-z]*)-(?P<size>[0-9]+)")
_SIZE_IN_CHIPS: Final = ("v5litepod", "v5e", "v6e")  # the others' types have the number of TensorCores
_TWO_CORES: Final = ("v2", "v3")  # generations whose chips are two devices

Coordinates = tuple[int, int, int, int]


@dataclass(frozen=True)
class TPUTopology:
    """The cores of a TPU slice (tf.tpu.experimental.Topology).

    Args:
        mesh_shape: chips along x, y and z, and cores of a chip.
        hosts: number of hosts, at least 1.
        host_bounds: chips of a host along x, y and z; None: the slice is divided along z, then y, then x.

    Raises:
        ValueError: a size is less than 1, or the chips cannot be divided among the hosts.

    Example:
        topology = pipedist.TPUTopology(mesh_shape=(2, 2, 1, 2))
    """

    mesh_shape: Coordinates
    hosts: int = 1
    host_bounds: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.mesh_shape)
        if len(shape) != 4 or min(shape) < 1 or self.hosts < 1 or prod(shape) > CORES_MAX:
            raise ValueError(
                f"mesh_shape is {shape} on {self.hosts} hosts; expected (x, y, z, cores of a chip) of at least 1, "
                f"and at most {CORES_MAX} cores"
            )
        bounds = self.host_bounds or _host_bounds(shape[:3], self.hosts)
        blocks = [
            size // each if each and size % each == 0 else 0
            for size, each in zip(shape, bounds, strict=False)
        ]
        if len(bounds) != 3 or prod(blocks) != self.hosts:
            raise ValueError(
                f"a slice of {'x'.join(map(str, shape[:3]))} chips cannot be divided among {self.hosts} hosts of "
                f"{'x'.join(map(str, bounds))} chips"
            )
        object.__setattr__(self, "host_bounds", tuple(bounds))

    @property
    def num_tasks(self) -> int:
        """The number of hosts."""
        return self.hosts

    @property
    def num_cores(self) -> int:
        """The number of cores of all hosts."""
        return prod(self.mesh_shape)

    @property
    def num_tpus_per_task(self) -> int:
        """The number of cores of a host."""
        return self.num_cores // self.hosts

    @property
    def device_coordinates(self) -> NDArray[np.int32]:
        """The coordinates of each core, int32[hosts, cores of a host, 4]."""
        assert self.host_bounds is not None  # set at construction
        steps = [range(0, size, each) for size, each in zip(self.mesh_shape, self.host_bounds, strict=False)]
        blocks = [_product(*steps), _product(*map(range, self.host_bounds))]
        rows = [
            [(*np.add(origin, chip), core) for chip in blocks[1] for core in range(self.mesh_shape[3])]
            for origin in blocks[0]
        ]
        return np.array(rows, np.int32)

    def place_of(self, coordinates: Sequence[int]) -> tuple[int, int] | None:
        """Return the host of a core, and its number there; None: there is no such core.

        Args:
            coordinates: (x, y, z, core).
        """
        if len(coordinates) != 4 or any(
            not 0 <= at < size for at, size in zip(coordinates, self.mesh_shape, strict=True)
        ):
            return None
        found = np.argwhere((self.device_coordinates == np.asarray(coordinates)).all(-1))
        return int(found[0][0]), int(found[0][1])


def _product(*axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all combinations; the first axis changes fastest."""
    return [each[::-1] for each in itertools.product(*axes[::-1])]


def _host_bounds(chips: Sequence[int], hosts: int) -> tuple[int, ...]:
    """Divide a slice among hosts along z, then y, then x; the product may differ if there is no such division."""
    bounds, rest = list(chips), hosts
    for axis in (2, 1, 0):
        part = max(n for n in range(1, bounds[axis] + 1) if bounds[axis] % n == 0 and rest % n == 0)
        bounds[axis] //= part
        rest //= part
    return tuple(bounds)


class DeviceAssignment:
    """The core of each replica (tf.tpu.experimental.DeviceAssignment).

        assignment = pipedist.DeviceAssignment.build(topology, num_replicas=4)

    A replica has one core.

    Args:
        topology: the slice.
        core_assignment: int[replicas, 1, 4]: the coordinates (x, y, z, core) of each replica's core.

    Raises:
        ValueError: the shape differs, or a core is assigned twice or does not exist; the text names it.
    """

    def __init__(self, topology: TPUTopology, core_assignment: Any) -> None:
        cores = np.asarray(core_assignment, np.int32)
        if cores.ndim != 3 or cores.shape[1:] != (1, 4) or not len(cores):
            raise ValueError(
                f"core_assignment has the shape {list(cores.shape)}; expected [replicas, 1, 4]: one core per replica, "
                "as (x, y, z, core)"
            )
        self._topology = topology
        self._cores = cores
        self._places: list[tuple[int, int]] = []
        for replica, [own] in enumerate(cores.tolist()):
            place = topology.place_of(own)
            if place is None:
                raise ValueError(
                    f"replica {replica} is assigned to core {tuple(own)}, which does not exist: the mesh has the shape "
                    f"{tuple(topology.mesh_shape)}"
                )
            if place in self._places:
                raise ValueError(
                    f"core {tuple(own)} is assigned twice: to replicas {self._places.index(place)} and {replica}"
                )
            self._places.append(place)

    @classmethod
    def build(
        cls,
        topology: TPUTopology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
    ) -> DeviceAssignment:
        """Assign replicas to cores, host by host.

        Args:
            topology: the slice.
            computation_shape, computation_stride: (1, 1, 1, 1), or None: a replica has one core.
            num_replicas: R, at least 1.

        Returns:
            The assignment, in which replica r has core r, counted in the order of hosts.

        Raises:
            ValueError: a replica would have several cores, or there are fewer cores than replicas.
        """
        for name, given in (
            ("computation_shape", computation_shape),
            ("computation_stride", computation_stride),
        ):
            if given is not None and any(size != 1 for size in given):
                raise ValueError(f"{name} is {list(given)}; expected ones: a replica has one core")
        count = number("num_replicas", num_replicas, at_least=1)
        cores = topology.device_coordinates.reshape(-1, 1, 4)
        if count > len(cores):
            raise ValueError(f"{count} replicas on {len(cores)} cores: each needs one of its own")
        return cls(topology, cores[:count])

    @property
    def topology(self) -> TPUTopology:
        """The slice."""
        return self._topology

    @property
    def core_assignment(self) -> NDArray[np.int32]:
        """The coordinates of each replica's core, int32[replicas, 1, 4]."""
        return self._cores.copy()

    @property
    def num_replicas(self) -> int:
        """R, the number of replicas."""
        return len(self._cores)

    @property
    def num_cores_per_replica(self) -> int:
        """1: a replica has one core."""
        return 1

    def coordinates(self, replica: int, logical_core: int = 0) -> Coordinates:
        """Return the coordinates (x, y, z, core) of a replica's core.

        Raises:
            ValueError: there is no such replica or logical core.
        """
        self._place(replica, logical_core)
        x, y, z, core = self._cores[replica, 0].tolist()
        return x, y, z, core

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Return the number of a replica's core on its host.

        Raises:
            ValueError: there is no such replica or logical core.
        """
        return self._place(replica, logical_core)[1]

    def host_task(self, replica: int = 0, logical_core: int = 0) -> int:
        """Return the number of the host of a replica's core.

        Raises:
            ValueError: there is no such replica or logical core.
        """
        return self._place(replica, logical_core)[0]

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str = "worker") -> str:
        """Return the name of the CPU of the host that owns a replica's core, in the form of tf.distribute.

        Raises:
            ValueError: there is no such replica or logical core.
        """
        return f"/job:{job}/task:{self.host_task(replica, logical_core)}/device:CPU:0"

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str = "worker") -> str:
        """Return the name of a replica's core, in the form of tf.distribute.

        Raises:
            ValueError: there is no such replica or logical core.
        """
        task, ordinal = self._place(replica, logical_core)
        return f"/job:{job}/task:{task}/device:TPU:{ordinal}"

    def lookup_replicas(self, task_id: int, logical_core: int = 0) -> list[int]:
        """Return the replicas whose cores a host owns.

        Raises:
            ValueError: there are none.
        """
        found = [replica for replica, (task, _) in enumerate(self._places) if task == task_id]
        if not found or logical_core:
            raise ValueError(f"no replica has logical core {logical_core} on host {task_id}")
        return found

    def _place(self, replica: int, logical_core: int) -> tuple[int, int]:
        if not 0 <= replica < self.num_replicas or logical_core:
            raise ValueError(
                f"there is no logical core {logical_core} of replica {replica}: there are {self.num_replicas} "
                "replicas, with logical core 0 each"
            )
        return self._places[replica]

    def __repr__(self) -> str:
        return f"<DeviceAssignment, {self.num_replicas} replicas on {self._topology.num_cores} cores>"


@dataclass(frozen=True)
class TPUSystemMetadata:
    """The size of a TPU slice (tf.tpu.experimental.TPUSystemMetadata).

    Args:
        num_cores, num_hosts, num_of_cores_per_host: the sizes; 0 cores: there is no TPU.
        topology: the cores; None: there is no TPU.
        devices: names of the cores, in the form of tf.distribute.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: TPUTopology | None
    devices: tuple[str, ...]


class TPUClusterResolver(ClusterResolver):
    """A resolver of a TPU VM's variables (tf.distribute's TPUClusterResolver).

        strategy = pipedist.TPUStrategy(cluster, pipedist.TPUClusterResolver("local"))

    TPU_NAME, TPU_WORKER_HOSTNAMES, TPU_WORKER_ID, TPU_ACCELERATOR_TYPE, TPU_CHIPS_PER_HOST_BOUNDS and TPU_TOPOLOGY
    are read and checked once; no service is asked, and no device is opened. In a variable that is missing, the sizes
    follow from the others, or from the device files of this host.

    Args:
        tpu: the name of the TPU, which must be TPU_NAME if that is set; "local": the TPU of this host alone; None:
            the one of the variables.
        zone, project: kept, and not used: tf.distribute asks a service for the TPU.
        job_name: the job of the hosts.
        rpc_layer: prefix of addresses.
        environment: the environment in which the cluster runs.
        environ: the environment; None: that of the process.

    Raises:
        ResolverError: a variable is malformed, or contradicts another one; the text names it.
        ResolverStateError: `tpu` is not "local", and no variable names hosts.
        TypeError: an argument has the wrong type.

    Example:
        resolver = pipedist.TPUClusterResolver()  # on a TPU VM
        resolver.num_accelerators()
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        *,
        rpc_layer: str | None = "grpc",
        environment: str | None = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._rpc_layer = text_or_none("rpc_layer", rpc_layer)
        self._environment = text_or_none("environment", environment)
        named = text_or_none("tpu", tpu) or self._environ.get("TPU_NAME") or ""
        self._alone = named == "local" or not (named or self._environ.get("TPU_WORKER_HOSTNAMES"))
        self.tpu = "local" if self._alone else named
        self.zone, self.project = text_or_none("zone", zone), text_or_none("project", project)
        job = text_or_none("job_name", job_name)
        own_name = self._environ.get("TPU_NAME")
        if tpu not in (None, "", "local") and own_name and own_name != tpu:
            raise ResolverError(
                f"TPU_NAME is {own_name!r}, but tpu is {tpu!r}: this host belongs to another TPU"
            )
        hosts, self._task_id = self._hosts()
        self._task_type = job
        self._cluster = ClusterSpec({job or "worker": [f"{host}:{PORT}" for host in hosts]})
        self._topology = self._slice(len(hosts))
        cores = 0 if self._topology is None else self._topology.num_tpus_per_task
        self._num_accelerators = {"TPU": cores}

    def cluster_spec(self) -> ClusterSpec:
        """Return the hosts."""
        return self._cluster

    def _default_master(self, rpc_layer: str | None) -> str:
        return self._url(self._cluster.task_address(self._cluster.jobs[0], 0), rpc_layer)

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Return the number of hosts and cores, and the topology."""
        [job] = self._cluster.jobs
        hosts, topology = self._cluster.num_tasks(job), self._topology
        each = 0 if topology is None else topology.num_tpus_per_task
        devices = tuple(
            f"/job:{job}/task:{h}/device:TPU:{core}" for h in range(hosts) for core in range(each)
        )
        return TPUSystemMetadata(hosts * each, hosts, each, topology, devices)

    # -- variables -----------------------------------------------------------------------

    def _hosts(self) -> tuple[list[str], int]:
        """Return the hosts, and the number of this one."""
        if self._alone:
            return ["localhost"], 0
        text = self._environ.get("TPU_WORKER_HOSTNAMES", "").strip()
        if not text:
            raise ResolverStateError(
                f"TPU_WORKER_HOSTNAMES is not set, so the hosts of TPU {self.tpu!r} are unknown: run on a TPU VM, or "
                "use TPUClusterResolver('local')"
            )
        hosts = [host.strip() for host in text.split(",")]
        if not all(hosts) or len(set(hosts)) != len(hosts):
            raise ResolverError(
                f"TPU_WORKER_HOSTNAMES is {text!r}; expected different names, divided by commas"
            )
        own = self._environ.get("TPU_WORKER_ID", "0").strip()
        if not own.isdecimal():
            raise ResolverError(f"TPU_WORKER_ID is {own!r}; expected an int >= 0")
        if int(own) >= len(hosts):
            raise ResolverError(
                f"TPU_WORKER_ID is {own}, but TPU_WORKER_HOSTNAMES has {len(hosts)} hosts, from 0"
            )
        return hosts, int(own)

    def _slice(self, hosts: int) -> TPUTopology | None:
        """Return the topology; None: there is no TPU."""
        bounds = self._sizes("TPU_CHIPS_PER_HOST_BOUNDS", ",")
        chips = self._sizes("TPU_TOPOLOGY", "x") if not self._alone else None
        kind = self._environ.get("TPU_ACCELERATOR_TYPE", "")
        match = _TYPE.fullmatch(kind)
        if kind and match is None:
            raise ResolverError(
                f"TPU_ACCELERATOR_TYPE is {kind!r}; expected a form such as v4-16 or v5litepod-8"
            )
        generation = match["generation"] if match else ""
        size = int(match["size"]) if match and not self._alone else 0
        typed = size if generation in _SIZE_IN_CHIPS else size // 2
        if chips is None and bounds is None:
            files = next(filter(None, map(glob.glob, _DEVICES)), [])
            total = typed or hosts * len(files)
            if total % hosts:
                raise ResolverError(f"TPU_ACCELERATOR_TYPE is {kind!r}: {total} chips on {hosts} hosts")
            chips, bounds = (total, 1, 1), (total // hosts, 1, 1)
        if chips is None:
            assert bounds is not None
            chips = (bounds[0], bounds[1], bounds[2] * hosts)
        total = prod(chips)
        if total == 0:
            return None
        if typed and typed != total:
            raise ResolverError(
                f"TPU_ACCELERATOR_TYPE {kind!r} has {typed} chips, but TPU_TOPOLOGY and TPU_CHIPS_PER_HOST_BOUNDS give "
                f"{total}, with {hosts} hosts"
            )
        try:
            return TPUTopology((*chips, 2 if generation in _TWO_CORES else 1), hosts, bounds)
        except ValueError as error:
            raise ResolverError(
                f"TPU_TOPOLOGY, TPU_CHIPS_PER_HOST_BOUNDS and hosts differ: {error}"
            ) from None

    def _sizes(self, name: str, separator: str) -> tuple[int, int, int] | None:
        text = self._environ.get(name, "").strip()
        if not text:
            return None
        parts = [part.strip() for part in text.split(separator)]
        if not 1 <= len(parts) <= 3 or any(not part.isdecimal() or int(part) < 1 for part in parts):
            raise ResolverError(f"{name} is {text!r}; expected sizes such as 2{separator}2{separator}1")
        x, y, z = [*map(int, parts), 1, 1][:3]
        return x, y, z
