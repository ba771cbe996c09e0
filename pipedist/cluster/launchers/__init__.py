"""Launchers of worker processes: a fork server on this host, Ray, Dask."""
