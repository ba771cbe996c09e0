"""Clusters: a coordinator with its workers, and their launchers.

Entry points: `LocalCluster` (`base.py`) starts workers on this host; `ConnectCluster` (`remote.py`) accepts workers
that dial in; `RayCluster` and `DaskCluster` (`engine_clusters.py`) have an engine place them; `open_cluster`
(`tf_config.py`) forms a cluster of one program per host. All run in the driver process. Other processes run only
parts of `launchers`: the fork server, and the actors and plugins of engines. `resolvers*.py` describe clusters, and
`templates.py` writes scripts for batch systems.
"""
