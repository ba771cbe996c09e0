"""Collectives among the replicas of a step: all_reduce, all_gather, broadcast, barrier, merge_call.

Entry points: `gang.LocalGang` runs the replicas of one process and carries out their collectives;
`requests` builds what it is called with; `shared.SharedChannel` connects the processes of one host.
The code runs in worker processes, and for a strategy without workers in the driver process;
`segment.SegmentOwner` runs in the driver process.
"""
