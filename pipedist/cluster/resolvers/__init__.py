"""Cluster resolvers: which tasks a cluster has, and which one this process is (tf.distribute's).

Pure descriptions: nothing here connects to anything but KubernetesClusterResolver, which asks the API
server. What they read from the environment is checked when they are made.
"""

from pipedist.cluster.resolvers.kubernetes import KubernetesClusterResolver, Pod
from pipedist.cluster.resolvers.resolvers import (
    ClusterResolver,
    ClusterSpec,
    ResolverError,
    ResolverStateError,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from pipedist.cluster.resolvers.slurm import SlurmClusterResolver, expand_hostlist, expand_tasks_per_node

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
