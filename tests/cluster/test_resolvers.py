"""Cluster resolvers: what they tell, and what they refuse, by name, when they are made."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipedist
from pipedist.cluster.resolvers import ResolverError, ResolverStateError
from pipedist.cluster.resolvers_environment import (
    SlurmClusterResolver,
    TFConfigClusterResolver,
    expand_hostlist,
    expand_tasks_per_node,
)
from pipedist.cluster.resolvers_kubernetes import Pod

WORKERS = {"worker": ["a:1", "b:1"]}


def tf_config(config: Any, **kwargs: Any) -> TFConfigClusterResolver:
    return TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps(config)}, **kwargs)


def slurm_environ(
    tasks: str = "2(x2),1", nodes: str = "n[1-3]", count: str = "5", rank: str = "3"
) -> dict[str, str]:
    return {
        "SLURM_PROCID": rank,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": count,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }


# -- ClusterSpec -----------------------------------------------------------------------------------


def test_cluster_spec() -> None:
    spec = pipedist.ClusterSpec({"worker": ["a:1", "b:1"], "ps": {3: "d:1", 1: "c:1"}, "none": []})
    assert spec.as_dict() == {"worker": ["a:1", "b:1"], "ps": {1: "c:1", 3: "d:1"}, "none": {}}
    assert spec.jobs == ["worker", "ps", "none"]
    assert spec.task_indices("ps") == [1, 3]
    assert spec.job_tasks("ps") == [None, "c:1", None, "d:1"]
    assert spec.job_tasks("none") == []
    assert (spec.num_tasks("ps"), spec.task_address("ps", 3)) == (2, "d:1")
    assert pipedist.ClusterSpec(spec) == spec
    assert hash(pipedist.ClusterSpec(spec)) == hash(spec)
    assert spec != WORKERS
    assert bool(spec)
    assert not pipedist.ClusterSpec({})
    with pytest.raises(ValueError, match="no job 'x': its jobs are worker, ps, none"):
        spec.num_tasks("x")
    with pytest.raises(ValueError, match="'ps' has no task 0: its tasks are 1, 3"):
        spec.task_address("ps", 0)


@pytest.mark.parametrize(
    ("cluster", "error"),
    [
        (3, TypeError),
        ([["a:1"]], TypeError),
        ({"worker": "a:1"}, TypeError),
        ({"worker": [1]}, TypeError),
        ({1: ["a:1"]}, TypeError),
        ({"worker": {"x": "a:1"}}, ValueError),
        ({"worker": {-1: "a:1"}}, ValueError),
        ({"worker": {True: "a:1"}}, ValueError),
    ],
)
def test_clusters_that_make_no_sense(cluster: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"worker|cluster|name is 1"):
        pipedist.ClusterSpec(cluster)


# -- TF_CONFIG -------------------------------------------------------------------------------------


def test_tf_config_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": WORKERS, "task": {"type": "worker", "index": "1"}})
    )
    resolver = pipedist.TFConfigClusterResolver()
    monkeypatch.delenv("TF_CONFIG")
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.cluster_spec().as_dict() == WORKERS
    assert resolver.master() == "b:1"
    assert resolver.master("worker", 0, "grpc") == "grpc://a:1"
    assert not pipedist.TFConfigClusterResolver().cluster_spec()


def test_optional_keys_of_tf_config() -> None:
    assert tf_config({"cluster": WORKERS, "task": {"type": "evaluator", "index": 0}}).task_type == "evaluator"
    nobody = tf_config({"cluster": WORKERS})
    assert (nobody.task_type, nobody.task_id) == (None, None)
    with pytest.raises(ValueError, match="pass task_type and task_id"):
        nobody.master()
    alone = tf_config({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    assert alone.master() == ""
    given = tf_config({"cluster": WORKERS}, task_type="worker", task_id=1, rpc_layer="x")
    assert given.master() == "x://b:1"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([], r"TF_CONFIG is \[\]; expected a JSON object"),
        (None, "TF_CONFIG is None"),
        ({"cluster": ["a:1"]}, "TF_CONFIG: cluster is"),
        ({"cluster": {"worker": "a:1"}}, "TF_CONFIG: the tasks of job 'worker'"),
        ({"cluster": {"worker": []}}, "TF_CONFIG: job 'worker' has no tasks"),
        ({"cluster": WORKERS, "task": None}, "TF_CONFIG: task is None"),
        ({"cluster": WORKERS, "task": {"type": 3}}, "TF_CONFIG: task.type is 3"),
        ({"cluster": WORKERS, "task": {"type": "worker"}}, "TF_CONFIG: the task has no index"),
        ({"cluster": WORKERS, "task": {"index": 1}}, "TF_CONFIG: the task has no type"),
        (
            {"cluster": WORKERS, "task": {"type": "worker", "index": 2}},
            "index is 2, but job 'worker' has 2 tasks",
        ),
        ({"cluster": WORKERS, "task": {"type": "worker", "index": -1}}, "task.index is -1"),
        ({"cluster": WORKERS, "task": {"type": "worker", "index": 1.5}}, "task.index is 1.5"),
        ({"cluster": WORKERS, "task": {"type": "worker", "index": True}}, "task.index is True"),
        (
            {"cluster": WORKERS, "task": {"type": "gpu", "index": 0}},
            "type is 'gpu', but the cluster's jobs are worker",
        ),
        ({"rpc_layer": 3}, "TF_CONFIG: rpc_layer is 3"),
    ],
)
def test_malformed_tf_config_is_rejected_at_once(config: Any, text: str) -> None:
    with pytest.raises(ResolverError, match=text):
        tf_config(config)


@pytest.mark.parametrize("text", ["", "{cluster: worker}", '{"cluster": {},}'])
def test_tf_config_that_is_no_json(text: str) -> None:
    with pytest.raises(ResolverError, match="TF_CONFIG is not JSON"):
        TFConfigClusterResolver(environ={"TF_CONFIG": text})


# -- simple and union ------------------------------------------------------------------------------


def test_every_resolver_puts_the_layer_in_front_that_it_is_asked_for() -> None:
    simple = pipedist.SimpleClusterResolver(pipedist.ClusterSpec(WORKERS), master="m:1", rpc_layer="grpc")
    for resolver in (
        simple,
        pipedist.UnionResolver(simple, rpc_layer="grpc"),
        tf_config({"cluster": WORKERS}, rpc_layer="grpc"),
        pipedist.SlurmClusterResolver(environ=slurm_environ("1(x2)", "a,b", "2", "0"), port_base=1),
        pipedist.KubernetesClusterResolver(
            {"worker": ["x"]}, 1, list_pods=lambda _label: [Pod("0", "a"), Pod("1", "b")]
        ),
    ):
        told = [resolver.master("worker", 1, layer) for layer in (None, "x", "")]
        assert told == ["grpc://b:1", "x://b:1", "b:1"], resolver
    assert (simple.master(), simple.master(rpc_layer="")) == ("grpc://m:1", "m:1")
    unknown = pipedist.SimpleClusterResolver(pipedist.ClusterSpec(WORKERS), rpc_layer="grpc")
    assert (unknown.master(), unknown.master(rpc_layer="")) == ("grpc://", "")


def test_simple_and_union() -> None:
    first = pipedist.SimpleClusterResolver(
        pipedist.ClusterSpec(WORKERS), master="m:1", num_accelerators={"GPU": 2}, environment="here"
    )
    second = pipedist.SimpleClusterResolver(pipedist.ClusterSpec({"worker": ["b:1", "c:1"], "ps": ["d:1"]}))
    union = pipedist.UnionResolver(first, second, task_type="ps", task_id=0, rpc_layer="x")
    assert union.cluster_spec().as_dict() == {"worker": ["a:1", "b:1", "c:1"], "ps": ["d:1"]}
    assert (union.task_type, union.task_id, union.environment) == ("ps", 0, "here")
    assert union.num_accelerators() == {"GPU": 2}
    assert (union.master(), union.master("ps", 0)) == ("m:1", "x://d:1")
    assert pipedist.UnionResolver(second, first).task_type is None
    me = pipedist.SimpleClusterResolver(
        pipedist.ClusterSpec(WORKERS), task_type="worker", task_id=1, rpc_layer="y"
    )
    same = pipedist.UnionResolver(me, second)
    assert (same.task_type, same.task_id, same.rpc_layer) == ("worker", 1, "y")
    assert pipedist.UnionResolver(me, second, task_id=0).task_id == 0
    sparse = [
        pipedist.SimpleClusterResolver(pipedist.ClusterSpec({"worker": {i: address}}))
        for i, address in ((2, "a:1"), (2, "a:1"), (0, "b:1"))
    ]
    assert pipedist.UnionResolver(*sparse).cluster_spec().as_dict() == {"worker": {0: "b:1", 2: "a:1"}}
    clash = pipedist.SimpleClusterResolver(pipedist.ClusterSpec({"worker": {2: "z:1"}}))
    with pytest.raises(KeyError, match="two addresses"):
        pipedist.UnionResolver(*sparse, clash).cluster_spec()
    with pytest.raises(ValueError, match="at least one"):
        pipedist.UnionResolver()
    with pytest.raises(TypeError, match="not None"):
        pipedist.UnionResolver(first, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"cluster_spec": WORKERS}, TypeError),
        ({"master": 3}, TypeError),
        ({"task_type": 3}, TypeError),
        ({"task_id": "0"}, TypeError),
        ({"task_id": -1}, ValueError),
        ({"num_accelerators": 4}, TypeError),
        ({"num_accelerators": {"GPU": -1}}, ValueError),
        ({"rpc_layer": 1}, TypeError),
        ({"environment": 1}, TypeError),
    ],
)
def test_simple_refuses_by_name(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        pipedist.SimpleClusterResolver(**{"cluster_spec": pipedist.ClusterSpec(WORKERS)} | options)


# -- Slurm -----------------------------------------------------------------------------------------


def test_slurm_without_gpus() -> None:
    environ = slurm_environ()
    resolver = pipedist.SlurmClusterResolver({"ps": 1, "worker": 4}, environ=environ)
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["n1:8888"],
        "worker": ["n1:8889", "n2:8888", "n2:8889", "n3:8888"],
    }
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.master() == "grpc://n2:8889"
    assert resolver.num_accelerators() == {"GPU": 0}
    assert "CUDA_VISIBLE_DEVICES" not in environ


def test_slurm_gives_each_task_its_gpus() -> None:
    environ = slurm_environ()
    resolver = SlurmClusterResolver(gpus_per_node=4, environ=environ)
    assert (resolver.num_accelerators(), resolver.visible_devices) == ({"GPU": 2}, "2,3")
    assert environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    untouched = slurm_environ()
    SlurmClusterResolver(gpus_per_node=4, gpus_per_task=1, auto_set_gpu=False, environ=untouched)
    assert untouched == slurm_environ()
    same = SlurmClusterResolver(tasks_per_node={"n1": 2, "n2": 3}, gpus_per_node=0, environ=environ)
    assert same.cluster_spec().job_tasks("worker")[2:] == ["n2:8888", "n2:8889", "n2:8890"]
    each = SlurmClusterResolver(tasks_per_node=2, gpus_per_node=0, environ=slurm_environ(count="6"))
    assert each.cluster_spec().num_tasks("worker") == 6


def test_slurm_counts_the_gpus_that_the_tool_lists(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: one'\necho '  MIG'\necho 'GPU 1: two'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}{os.pathsep}{os.defpath}"
    assert SlurmClusterResolver(environ=slurm_environ() | {"PATH": path}).num_accelerators() == {"GPU": 1}
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert SlurmClusterResolver(environ=slurm_environ() | {"PATH": path}).num_accelerators() == {"GPU": 0}


def test_slurm_tasks_are_on_the_hosts_that_slurm_put_them_on() -> None:
    """Slurm counts n9 before n10; by their names they are the other way round."""
    resolver = SlurmClusterResolver(environ=slurm_environ("1,2", "n[9-10]", "3", "0"))
    assert resolver.cluster_spec().as_dict() == {"worker": ["n9:8888", "n10:8888", "n10:8889"]}
    assert resolver.master() == "grpc://n9:8888"


@pytest.mark.parametrize(
    ("environ", "options", "error", "text"),
    [
        ({}, {}, ResolverStateError, "SLURM_PROCID is not set"),
        (slurm_environ(rank="x"), {}, ResolverError, "SLURM_PROCID is 'x'"),
        (slurm_environ(rank="5"), {}, ResolverError, "SLURM_PROCID is 5, but the step has 5 tasks"),
        (slurm_environ(count="4"), {}, ResolverStateError, "SLURM_STEP_NUM_TASKS is 4"),
        (slurm_environ(tasks="2(y3)"), {}, ResolverError, "SLURM_STEP_TASKS_PER_NODE: .*'2\\(y3\\)'"),
        (slurm_environ(tasks="5"), {}, ResolverError, "is for 1 nodes, but SLURM_STEP_NODELIST has 3"),
        (slurm_environ(nodes="n[1"), {}, ResolverError, "SLURM_STEP_NODELIST: "),
        (slurm_environ(nodes="n1,n1,n2"), {}, ResolverError, "twice"),
        (slurm_environ(), {"jobs": {"worker": 3}}, ResolverStateError, "3 tasks, but the Slurm step has 5"),
        (slurm_environ(), {"jobs": ["worker"]}, TypeError, "jobs is"),
        (slurm_environ(), {"jobs": {"worker": -1}}, ResolverError, "jobs\\['worker'\\] is -1"),
        (
            slurm_environ(),
            {"gpus_per_node": 2, "gpus_per_task": 2},
            ResolverStateError,
            "has 2 \\(gpus_per_node",
        ),
        (slurm_environ(), {"gpus_per_task": 2}, ResolverStateError, "has 0 \\(there is no nvidia-smi"),
        (slurm_environ(), {"port_base": 0}, ResolverError, "port_base"),
        (slurm_environ(), {"tasks_per_node": "2"}, TypeError, "tasks_per_node"),
    ],
)
def test_malformed_slurm_variables_are_rejected_by_name(
    environ: dict[str, str], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        SlurmClusterResolver(environ=environ, **options)


@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "ab-", ""]), st.integers(0, 120), st.integers(0, 30)), max_size=4
    )
)
def test_host_ranges_are_expanded_in_order(parts: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{prefix}[{first:03d}-{first + more}]" for prefix, first, more in parts)
    expected = [f"{prefix}{n:03d}" for prefix, first, more in parts for n in range(first, first + more + 1)]
    assert expand_hostlist(text) == expected


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("a", ["a"]),
        ("a,b,", ["a", "b"]),
        ("a[1,3-4],b", ["a1", "a3", "a4", "b"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text", [",a", "a,,b", "n[3-1]", "n[1-2]x", "n[1-2][3]", "n[]", "n[a]", "n[1", "n1]", "n[0-9999999]"]
)
def test_malformed_host_lists(text: str) -> None:
    with pytest.raises(ResolverError, match="host list"):
        expand_hostlist(text)


@pytest.mark.parametrize("text", ["", "a", "2,(x2)", "2(x)", "2(x2", "-1", "1 ", "1(x9999999)"])
def test_malformed_tasks_per_node(text: str) -> None:
    assert expand_tasks_per_node("4(x1),2(x2)") == [4, 2, 2]
    with pytest.raises(ResolverError, match="tasks per node"):
        expand_tasks_per_node(text)


# -- Kubernetes ------------------------------------------------------------------------------------


def test_kubernetes_asks_each_time() -> None:
    pods = {"l=1": [Pod("b", "10.0.0.2"), Pod("a", "10.0.0.9")], "l=2": [Pod("c", "10.0.0.1")]}
    resolver = pipedist.KubernetesClusterResolver(
        {"worker": ["l=1", "l=2"]}, 99, list_pods=lambda selector: pods[selector]
    )
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.9:99", "10.0.0.2:99", "10.0.0.1:99"]}
    assert (resolver.master(), resolver.master("worker", 1)) == ("", "grpc://10.0.0.2:99")
    pods["l=2"] = [Pod("c", "10.0.0.1", "Pending")]
    with pytest.raises(ResolverStateError, match=r"pod 'c' \(l=2\) is not running, but Pending"):
        resolver.cluster_spec()
    with pytest.raises(TypeError, match="list of label selectors"):
        pipedist.KubernetesClusterResolver({"worker": "l=1"}, list_pods=lambda selector: [])


@pytest.mark.parametrize("in_pod", [True, False])
def test_kubernetes_asks_as_the_pod_if_it_is_in_one(in_pod: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class ConfigException(Exception):
        pass

    def load_incluster_config() -> None:
        if not in_pod:
            raise ConfigException("Service host/port is not set.")
        loaded.append("pod")

    def load_kube_config() -> None:
        if in_pod:
            raise ConfigException("Invalid kube-config file. No configuration found.")
        loaded.append("user")

    class CoreV1Api:
        def list_pod_for_all_namespaces(self, label_selector: str, watch: bool) -> SimpleNamespace:
            status = SimpleNamespace(host_ip="10.0.0.1", phase="Running")
            return SimpleNamespace(items=[SimpleNamespace(metadata=SimpleNamespace(name="a"), status=status)])

    loaded: list[str] = []
    config = SimpleNamespace(
        load_incluster_config=load_incluster_config,
        load_kube_config=load_kube_config,
        ConfigException=ConfigException,
    )
    package = SimpleNamespace(config=config, client=SimpleNamespace(CoreV1Api=CoreV1Api))
    monkeypatch.setitem(sys.modules, "kubernetes", package)
    resolver = pipedist.KubernetesClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470"]}
    assert loaded == ["pod" if in_pod else "user"]


def test_kubernetes_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match="or pass `list_pods`"):
        pipedist.KubernetesClusterResolver()
