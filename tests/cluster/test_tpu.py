"""TPU slices: what the resolver reads and refuses, topologies, and assignments of replicas to cores."""

from __future__ import annotations

from typing import Any

import pytest

import pipedist
from pipedist.cluster.resolvers import ResolverError, ResolverStateError

V4_16 = {
    "TPU_NAME": "slice",
    "TPU_WORKER_HOSTNAMES": "h0,h1",
    "TPU_WORKER_ID": "1",
    "TPU_ACCELERATOR_TYPE": "v4-16",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_TOPOLOGY": "2x2x2",
}


def resolver(tpu: str | None = None, **environ: str) -> pipedist.TPUClusterResolver:
    return pipedist.TPUClusterResolver(tpu, environ=environ)


def test_resolver_reads_a_slice() -> None:
    found = resolver(**V4_16)
    assert found.cluster_spec().as_dict() == {"worker": ["h0:8470", "h1:8470"]}
    assert found.master() == "grpc://h0:8470"
    assert found.master("worker", 1, "") == "h1:8470"
    assert (found.task_type, found.task_id, found.environment, found.tpu) == ("worker", 1, "", "slice")
    assert found.num_accelerators() == {"TPU": 4}
    metadata = found.get_tpu_system_metadata()
    assert (metadata.num_cores, metadata.num_hosts, metadata.num_of_cores_per_host) == (8, 2, 4)
    assert metadata.topology is not None
    assert metadata.topology.mesh_shape == (2, 2, 2, 1)
    assert metadata.devices[4] == "/job:worker/task:1/device:TPU:0"


@pytest.mark.parametrize(
    "missing", ["TPU_NAME", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_TOPOLOGY", "TPU_ACCELERATOR_TYPE"]
)
def test_sizes_follow_from_the_other_variables(missing: str) -> None:
    environ = {name: value for name, value in V4_16.items() if name != missing}
    assert resolver(**environ).get_tpu_system_metadata().num_cores == 8


@pytest.mark.parametrize(
    ("kind", "cores"),
    [("v2-8", 8), ("v3-32", 32), ("v4-8", 4), ("v5p-8", 4), ("v5litepod-8", 8), ("v6e-4", 4)],
)
def test_number_of_cores_follows_from_the_accelerator_type(kind: str, cores: int) -> None:
    metadata = resolver(TPU_WORKER_HOSTNAMES="h", TPU_ACCELERATOR_TYPE=kind).get_tpu_system_metadata()
    assert metadata.num_cores == cores


def test_local_is_this_host_alone() -> None:
    found = resolver("local", **V4_16)
    assert found.cluster_spec().as_dict() == {"worker": ["localhost:8470"]}
    assert (found.task_id, found.num_accelerators()) == (0, {"TPU": 4})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"TPU_WORKER_ID": "two"}, "TPU_WORKER_ID is 'two'"),
        ({"TPU_WORKER_ID": "2"}, "TPU_WORKER_ID is 2, but TPU_WORKER_HOSTNAMES has 2 hosts"),
        ({"TPU_WORKER_HOSTNAMES": "a,a"}, "TPU_WORKER_HOSTNAMES is 'a,a'"),
        ({"TPU_ACCELERATOR_TYPE": "tpu4"}, "TPU_ACCELERATOR_TYPE is 'tpu4'"),
        ({"TPU_ACCELERATOR_TYPE": "v4-32"}, "'v4-32' has 16 chips"),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "2,0"}, "TPU_CHIPS_PER_HOST_BOUNDS is '2,0'"),
        ({"TPU_TOPOLOGY": "2 by 2"}, "TPU_TOPOLOGY is '2 by 2'"),
        ({"TPU_TOPOLOGY": "2x4x1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,1,1"}, "cannot be divided among 2 hosts"),
    ],
)
def test_malformed_and_contradictory_variables_are_named(change: dict[str, str], text: str) -> None:
    with pytest.raises(ResolverError, match=text):
        resolver(**{**V4_16, **change})


def test_unknown_hosts_and_another_tpu_are_errors() -> None:
    with pytest.raises(ResolverStateError, match="TPU_WORKER_HOSTNAMES is not set"):
        resolver("slice")
    with pytest.raises(ResolverError, match="TPU_NAME is 'slice', but tpu is 'other'"):
        resolver("other", **V4_16)


def test_assignment_has_the_cores_of_its_replicas() -> None:
    topology = pipedist.TPUTopology((2, 2, 2, 1), hosts=2)
    assignment = pipedist.DeviceAssignment.build(topology, num_replicas=6, computation_shape=[1, 1, 1, 1])
    assert assignment.core_assignment.shape == (6, 1, 4)
    assert [assignment.coordinates(r) for r in (0, 1, 2, 4)] == [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
    ]
    assert [assignment.tpu_ordinal(r, 0) for r in range(6)] == [0, 1, 2, 3, 0, 1]
    assert assignment.host_device(5) == "/job:worker/task:1/device:CPU:0"
    assert assignment.tpu_device(5) == "/job:worker/task:1/device:TPU:1"
    assert assignment.lookup_replicas(1) == [4, 5]
    with pytest.raises(ValueError, match="no logical core 1 of replica 0"):
        assignment.coordinates(0, 1)


def test_cores_of_a_chip_are_consecutive() -> None:
    topology = pipedist.TPUTopology((2, 1, 1, 2))
    assert topology.device_coordinates.tolist() == [[[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]]]


@pytest.mark.parametrize(
    ("cores", "text"),
    [
        ([[[0, 0, 0, 0]], [[0, 0, 0, 0]]], r"core \(0, 0, 0, 0\) is assigned twice: to replicas 0 and 1"),
        (
            [[[0, 0, 0, 0]], [[2, 0, 0, 0]]],
            r"replica 1 is assigned to core \(2, 0, 0, 0\), which does not exist",
        ),
        ([[[0, 0, 0, 0], [1, 0, 0, 0]]], "one core per replica"),
        ([], "one core per replica"),
    ],
)
def test_wrong_assignments_are_named(cores: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pipedist.DeviceAssignment(pipedist.TPUTopology((2, 1, 1, 1)), cores)


def test_several_cores_of_a_replica_and_too_few_cores_are_errors() -> None:
    topology = pipedist.TPUTopology((2, 1, 1, 1))
    with pytest.raises(ValueError, match=r"computation_shape is \[2, 1, 1, 1\]"):
        pipedist.DeviceAssignment.build(topology, computation_shape=[2, 1, 1, 1])
    with pytest.raises(ValueError, match="3 replicas on 2 cores"):
        pipedist.DeviceAssignment.build(topology, num_replicas=3)
    with pytest.raises(ValueError, match="cannot be divided among 3 hosts"):
        pipedist.TPUTopology((2, 1, 1, 1), hosts=3)
