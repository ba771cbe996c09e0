"""Collectives among the replicas of a step: all_reduce, all_gather, broadcast, barrier, merge_call."""
