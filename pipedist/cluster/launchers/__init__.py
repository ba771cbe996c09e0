"""Launchers start and end worker processes: with a fork server on this host, or with Ray or Dask."""
