"""A cluster resolver of the pods of a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pipedist.cluster.resolvers import ClusterResolver, ClusterSpec, ResolverStateError, number, text_or_none

PORT: Final = 8470
LABELS: Final[Mapping[str, Sequence[str]]] = {"worker": ("job-name=tensorflow",)}


@dataclass(frozen=True, slots=True)
class Pod:
    """The properties of a pod that the resolver uses."""

    name: str
    ip: str  # address of its host
    phase: str = "Running"  # or "Pending", ...


ListPods = Callable[[str], Sequence[Pod]]  # returns the pods of all namespaces that match a label selector


class KubernetesClusterResolver(ClusterResolver):
    """A resolver of pods (tf.distribute's KubernetesClusterResolver).

    Every call queries the pods with certain labels.

    Args:
        job_to_label_mapping: job name -> label selectors; empty or None: workers are the pods with
            `job-name=tensorflow`. The pods of a selector are sorted by name.
        tf_server_port: port of every task.
        rpc_layer: prefix of addresses.
        list_pods: queries the API server; None: with the package `kubernetes`, as the pod that this process is in, or
            with the user's configuration.

    Raises:
        ImportError: `list_pods` is None, and the package `kubernetes` is not installed.
        TypeError: an argument has the wrong type.

    Example:
        resolver = pipedist.KubernetesClusterResolver({"worker": ["job-name=train"]})
        resolver.cluster_spec()
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = PORT,
        rpc_layer: str | None = "grpc",
        *,
        list_pods: ListPods | None = None,
    ) -> None:
        labels = job_to_label_mapping or LABELS
        if not isinstance(labels, Mapping) or any(isinstance(each, str) for each in labels.values()):
            raise TypeError(
                f"job_to_label_mapping is {labels!r}; expected job names, each with a list of label selectors"
            )
        self._labels = {job: tuple(selectors) for job, selectors in labels.items()}
        self._port = number("tf_server_port", tf_server_port, at_least=1)
        self._rpc_layer = text_or_none("rpc_layer", rpc_layer)
        self._list_pods = _api_server() if list_pods is None else list_pods

    def cluster_spec(self) -> ClusterSpec:
        """Return the present tasks.

        Raises:
            ResolverStateError: a pod is not running.
        """
        cluster: dict[str, list[str]] = {}
        for job, selectors in self._labels.items():
            addresses = cluster.setdefault(job, [])
            for selector in selectors:
                for pod in sorted(self._list_pods(selector), key=lambda pod: pod.name):
                    if pod.phase != "Running":
                        raise ResolverStateError(
                            f"pod {pod.name!r} ({selector}) is not running, but {pod.phase}. Wait until it runs."
                        )
                    addresses.append(f"{pod.ip}:{self._port}")
        return ClusterSpec(cluster)


def _api_server() -> ListPods:
    """Return a function that queries the API server with `kubernetes`."""
    try:
        from kubernetes import client, config  # type: ignore[import-not-found]  # optional, and slow
    except ImportError as error:
        raise ImportError(
            "KubernetesClusterResolver needs the package `kubernetes`. Run `pip install kubernetes`, or pass "
            "`list_pods`."
        ) from error

    def list_pods(selector: str) -> list[Pod]:
        try:
            config.load_incluster_config()
        except config.ConfigException:  # not in a pod
            config.load_kube_config()
        found: Any = client.CoreV1Api().list_pod_for_all_namespaces(label_selector=selector, watch=False)
        return [Pod(each.metadata.name, each.status.host_ip, each.status.phase) for each in found.items]

    return list_pods
