"""Hosts that are only pretended: each has a network, a host name and a boot id of its own.

A host is a network namespace. What is started on it also has its own host name and boot id, so that
nothing believes it could read another host's files. All hosts hang on a router, a namespace too: it
forwards between them, and there single directions can be cut. Nothing of it touches the machine's own
network: no address, route or rule is made outside of these namespaces, and nothing leads out of them.

Everything is removed at the end, also after failures. Names hold the pid of who made them: what a process
left behind that was killed is removed by the next one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

PREFIX = "pipedist-test"
NAMESPACES = Path("/run/netns")
IP_S = 60.0
"""How long an `ip` command may take: it bounds a hang."""

# 198.18.0.0/15 is set aside for tests of networks (RFC 2544): no real host has such an address.
ADDRESS = "198.18.{place}.2"
ROUTER = "198.18.{place}.1"

# A boot id is read-only, but another file can be laid over it, in the process's own mount namespace.
START = 'hostname "$1" && mount --bind "$2" /proc/sys/kernel/random/boot_id && shift 2 && exec "$@"'


def why_not() -> str:
    """Return why hosts can't be made here, "" if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    missing = [tool for tool in ("ip", "nsenter", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "needs root"
    name = f"{PREFIX}-{os.getpid()}-probe-{secrets.token_hex(2)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=IP_S)
    if made.returncode:
        return f"network namespaces can't be made here: {made.stderr.strip()}"
    _ip("netns", "delete", name)
    return ""


def _ip(*args: str) -> str:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=IP_S)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """One host.

    Args:
        namespace: its network namespace.
        place: its number among the hosts.
        folder: where its boot id is written.
    """

    def __init__(self, name: str, namespace: str, place: int, folder: Path) -> None:
        self.name = name
        self.namespace = namespace
        self.place = place
        self.address = ADDRESS.format(place=place)
        self._boot_id = folder / f"{name}.boot_id"
        self._boot_id.write_text(f"{secrets.token_hex(4)}-0000-4000-8000-{place:012x}\n")

    def command(self, args: Sequence[str | Path]) -> list[str]:
        """Return the command that executes another one on this host; it keeps its pid."""
        inside = ["sh", "-c", START, "sh", self.name, str(self._boot_id), *map(str, args)]
        return [
            "nsenter", f"--net={NAMESPACES / self.namespace}",
            "unshare", "--uts", "--mount", "--propagation", "private", *inside,
        ]  # fmt: skip

    def start(
        self, args: Sequence[str | Path], *, cwd: Path, stderr: IO[bytes], env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process on this host, in a session of its own."""
        return subprocess.Popen(
            self.command(args), cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=stderr, start_new_session=True,
        )  # fmt: skip


class Network:
    """Hosts around a router.

    Made by `network`, or by `relay.relayed`, where the router is a process that delays and loses packets.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stem = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"
        self._stack = ExitStack()
        self._cuts: dict[tuple[str, str], int] = {}
        self.hosts: dict[str, Host] = {}
        self.router = f"{self._stem}-router"

    def __enter__(self) -> Network:
        _remove_leftovers()
        self.add_namespace(self.router)
        self.set("net.ipv4.ip_forward", "1")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def add_namespace(self, name: str) -> None:
        """Make a namespace; it goes at the end, with every process in it."""
        _ip("netns", "add", name)
        self._stack.callback(_remove, name)
        _ip("-n", name, "link", "set", "lo", "up")

    def set(self, key: str, value: str) -> None:
        """Set a sysctl of the router."""
        path = f"/proc/sys/{key.replace('.', '/')}"
        inside = f"echo {value} > {path}"
        net = f"--net={NAMESPACES / self.router}"
        subprocess.run(["nsenter", net, "sh", "-c", inside], check=True, timeout=IP_S)

    def add_host(self, name: str) -> Host:
        """Add a host without any link."""
        host = Host(name, f"{self._stem}-{name}", len(self.hosts) + 1, self._folder)
        self.add_namespace(host.namespace)
        self.hosts[name] = host
        return host

    def link(self, host: Host) -> None:
        """Lay a cable from a host to the router."""
        port, own, router = f"to-{host.name}"[:15], host.address, ROUTER.format(place=host.place)
        space = host.namespace
        _ip("-n", space, "link", "add", "uplink", "type", "veth", "peer", "name", port, "netns", self.router)
        _ip("-n", self.router, "address", "add", f"{router}/24", "dev", port)
        _ip("-n", self.router, "link", "set", port, "up")
        _ip("-n", space, "address", "add", f"{own}/24", "dev", "uplink")
        _ip("-n", space, "link", "set", "uplink", "up")
        _ip("-n", space, "route", "add", "default", "via", router)

    def cut(self, source: str, to: str) -> None:
        """Have the router silently drop packets from one host to another."""
        number = 100 + len(self.hosts) * self.hosts[source].place + self.hosts[to].place
        a, b = self.hosts[source].address, self.hosts[to].address
        _ip("-n", self.router, "rule", "add", "from", a, "to", b, "blackhole", "priority", str(number))
        self._cuts[source, to] = number

    def heal(self, source: str, to: str) -> None:
        """Forward again what `cut` stopped."""
        number = self._cuts.pop((source, to))
        _ip("-n", self.router, "rule", "delete", "priority", str(number))

    def part(self, one: str, other: str) -> None:
        """Cut both directions between two hosts."""
        self.cut(one, other)
        self.cut(other, one)

    def join(self, one: str, other: str) -> None:
        """Heal both directions between two hosts."""
        self.heal(one, other)
        self.heal(other, one)


@contextmanager
def network(folder: Path, names: Sequence[str]) -> Iterator[Network]:
    """Make hosts of these names, each with a cable to the router.

    Args:
        folder: for files that hosts need.
    """
    with Network(folder) as made:
        for name in names:
            made.link(made.add_host(name))
        yield made


def _remove(namespace: str) -> None:
    """Remove a namespace, and kill its processes, all of which this test has started."""
    pids = _ip("netns", "pids", namespace).split()
    if pids:
        subprocess.run(["kill", "-KILL", *pids], capture_output=True, timeout=IP_S)
    _ip("netns", "delete", namespace)


def _remove_leftovers() -> None:
    """Remove the namespaces of test processes that were killed before they could."""
    for path in NAMESPACES.glob(f"{PREFIX}-*"):
        owner = path.name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, timeout=IP_S)
