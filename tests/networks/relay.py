"""A router that delays, loses and repeats packets: TUN devices, and this process between them.

    python relay.py --seed 0 --delay-ms 50 --loss 0.01 --repeat 0.01 DEVICE=ADDRESS...

It makes the devices in its own network namespace and prints "ready"; who started it moves each to its host.
What is read from one device is written to that of its destination, later, twice or never, as a generator
with the seed says. On SIGTERM it prints how many packets it has seen, lost and repeated.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.networks.hosts import IP_S, NAMESPACES, Network, _ip

TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
PACKET_BYTES_MAX = 65536
PACKETS_MAX = 20_000
"""Maximum packets in flight; more are lost, as in any router."""


class Relay:
    """Passes packets on between devices.

    Args:
        devices: their names, by the address of the host behind them.
        delay_s: how long each packet takes; a tenth more or less, so that they overtake each other.
        loss, repeat: probabilities.
    """

    def __init__(
        self, devices: dict[str, str], *, seed: int, delay_s: float, loss: float, repeat: float
    ) -> None:
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._loss = loss
        self._repeat = repeat
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._files = {socket.inet_aton(address): _open_tun(name) for address, name in devices.items()}
        self.seen = self.lost = self.repeated = 0

    def turn(self) -> None:
        """Read packets that have arrived, and write those that are due."""
        wait_s = None
        if self._on_the_way:
            wait_s = max(0.0, self._on_the_way[0][0] - time.monotonic())
        ready, _, _ = select.select(list(self._files.values()), [], [], wait_s)
        for file in ready:
            self._take(os.read(file, PACKET_BYTES_MAX))
        now = time.monotonic()
        while self._on_the_way and self._on_the_way[0][0] <= now:
            _, _, file, packet = heapq.heappop(self._on_the_way)
            os.write(file, packet)

    def _take(self, packet: bytes) -> None:
        file = self._files.get(packet[16:20])  # the destination of an IPv4 packet
        if file is None or packet[0] >> 4 != 4:
            return  # IPv6 looking for neighbours
        self.seen += 1
        if self._random.random() < self._loss or len(self._on_the_way) >= PACKETS_MAX:
            self.lost += 1
            return
        self._send(file, packet)
        if self._random.random() < self._repeat:
            self.repeated += 1
            self._send(file, packet)

    def _send(self, file: int, packet: bytes) -> None:
        due = time.monotonic() + self._delay_s * self._random.uniform(0.9, 1.1)
        heapq.heappush(self._on_the_way, (due, self.seen * 2 + self.repeated, file, packet))


def _open_tun(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return file


@contextmanager
def relayed(
    folder: Path, names: Sequence[str], *, seed: int, delay_ms: float, loss: float, repeat: float
) -> Iterator[tuple[Network, subprocess.Popen[str]]]:
    """Make hosts of these names, with a relay as their router; see the module's text."""
    with Network(folder) as made:
        hosts = [made.add_host(name) for name in names]
        devices = [f"tun-{host.place}={host.address}" for host in hosts]
        options = (f"--seed={seed}", f"--delay-ms={delay_ms}", f"--loss={loss}", f"--repeat={repeat}")
        inside = [sys.executable, "-m", __name__, *options, *devices]
        process = subprocess.Popen(
            ["nsenter", f"--net={NAMESPACES / made.router}", *inside],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the relay did not start: exit code {process.wait(IP_S)}")
            for host in hosts:
                device, space = f"tun-{host.place}", host.namespace
                _ip("-n", made.router, "link", "set", device, "netns", space)
                _ip("-n", space, "address", "add", f"{host.address}/32", "dev", device)
                _ip("-n", space, "link", "set", device, "up")
                _ip("-n", space, "route", "add", "default", "dev", device)
            yield made, process
        finally:
            process.kill()
            process.communicate()


def main() -> None:
    """Relay until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("--loss", type=float, required=True)
    parser.add_argument("--repeat", type=float, required=True)
    parser.add_argument("devices", nargs="+", metavar="DEVICE=ADDRESS")
    options = parser.parse_args()
    named = dict(reversed(text.split("=")) for text in options.devices)
    relay = Relay(
        named,
        seed=options.seed,
        delay_s=options.delay_ms / 1000,
        loss=options.loss,
        repeat=options.repeat,
    )

    def leave(_number: int, _frame: FrameType | None) -> None:
        print(json.dumps({"seen": relay.seen, "lost": relay.lost, "repeated": relay.repeated}), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    print("ready", flush=True)
    while True:
        relay.turn()


if __name__ == "__main__":
    main()
