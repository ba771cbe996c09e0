"""Cluster resolvers: which tasks a cluster has, and which one this process is (tf.distribute's).

Pure descriptions: nothing here connects to anything but KubernetesClusterResolver, which asks the API
server. What they read from the environment is checked when they are made.
"""

from pipedist.cluster_resolvers.base import ClusterResolver, ResolverError, ResolverStateError
from pipedist.cluster_resolvers.cluster_spec import ClusterSpec
from pipedist.cluster_resolvers.kubernetes import KubernetesClusterResolver, Pod
from pipedist.cluster_resolvers.simple import SimpleClusterResolver, UnionResolver
from pipedist.cluster_resolvers.slurm import SlurmClusterResolver
from pipedist.cluster_resolvers.slurm_lists import expand_hostlist, expand_tasks_per_node
from pipedist.cluster_resolvers.tf_config import TFConfigClusterResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesClusterResolver",
    "Pod",
    "ResolverError",
    "ResolverStateError",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
    "expand_hostlist",
    "expand_tasks_per_node",
]
