"""Slurm's short forms: `n[01-03,7]` for hosts, `2(x3),1` for numbers of tasks."""

from __future__ import annotations

import re
from typing import Final

from pipedist.cluster_resolvers.base import ResolverError

HOSTS_MAX: Final = 2**20
"""More hosts than any cluster has: an expression that makes more is a mistake."""

_HOST = re.compile(r"(?P<prefix>[^,\[\]]*)(?:\[(?P<ranges>[^\[\]]+)\])?")
_SEPARATOR = re.compile(r",(?![^\[]*\])")
_RANGE = re.compile(r"(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?")
_TASKS = re.compile(r"(?P<tasks>[0-9]+)(?:\(x(?P<times>[0-9]+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of a Slurm host list, in order: "n[1-2],m" gives n1, n2, m.

    Leading zeros are kept: "n[08-10]" gives n08, n09, n10. A host has one pair of brackets at most, and
    it is at its end.

    Raises:
        ResolverError: it is malformed, a range runs backwards, or there are more than HOSTS_MAX hosts.
    """
    hosts: list[str] = []
    parts = _SEPARATOR.split(hostlist)
    if parts[-1] == "":
        parts.pop()  # a trailing comma, or nothing at all
    for part in parts:
        match = _HOST.fullmatch(part)
        if match is None or not part:
            raise ResolverError(f"the host list {hostlist!r} has a malformed part: {part!r}")
        if match["ranges"] is None:
            hosts.append(part)
            continue
        for each in match["ranges"].split(","):
            numbers = _RANGE.fullmatch(each)
            first, last = (numbers["first"], numbers["last"] or numbers["first"]) if numbers else ("1", "0")
            if int(first) > int(last):
                raise ResolverError(f"the host list {hostlist!r} has a malformed range: {each!r}")
            if len(hosts) + int(last) - int(first) >= HOSTS_MAX:
                raise ResolverError(f"the host list {hostlist!r} has more than {HOSTS_MAX} hosts")
            hosts += [f"{match['prefix']}{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return how many tasks each node has: "2(x3),1" gives 2, 2, 2, 1.

    Raises:
        ResolverError: it is malformed, or there are more than HOSTS_MAX nodes.
    """
    tasks: list[int] = []
    for part in tasks_per_node.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ResolverError(
                f"the tasks per node {tasks_per_node!r} have a malformed part, {part!r}: expected such as "
                "2(x3)"
            )
        times = int(match["times"] or 1)
        if len(tasks) + times > HOSTS_MAX:
            raise ResolverError(f"the tasks per node {tasks_per_node!r} are of more than {HOSTS_MAX} nodes")
        tasks += [int(match["tasks"])] * times
    return tasks
