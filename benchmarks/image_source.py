"""Decode images with the source `images` on 1 and 2 workers, beside a loop of Pillow in one process.

    python -m benchmarks.image_source [--images 600] [--rounds 3]

The three take turns, so that other load on the machine affects all of them. Each time is that of the whole run, with
its start and its results; CPU time is that of all processes. The decoded bytes are compared by their sums.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import pipedist

SIDE = 768  # of each image, pixels
SIZE = (224, 224)  # to which they are resized


def write_images(folder: Path, count: int) -> None:
    """Write JPEG files with smooth noise, as photos have it."""
    rng = np.random.default_rng(0)
    for number in range(count):
        small = Image.fromarray(rng.integers(0, 256, (SIDE // 8, SIDE // 8, 3), np.uint8))
        small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / f"{number:05}.jpg", quality=90)


def sums(shard: dict[str, Any]) -> Any:
    return shard["image"].sum(axis=(1, 2, 3), dtype=np.int64)


def in_one_process(folder: Path) -> int:
    total = 0
    for path in sorted(folder.glob("*.jpg")):
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR)
        total += int(np.asarray(resized).sum(dtype=np.int64))
    return total


def with_pipedist(folder: Path, workers: int) -> int:
    spec = {
        "pipedist": 1,
        "name": "images",
        "dataset": {"images": {"path": str(folder / "*.jpg"), "size": list(SIZE)}, "batch": 16},
        "stages": {
            "sums": {"run": "benchmarks.image_source:sums"},
            "total": {"reduce": "sum", "of": "sums", "axis": 0},
        },
    }
    return int(pipedist.run(spec, workers=workers)["total"])


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, given.images)
        ways: dict[str, Callable[[], int]] = {
            "Pillow in one process": lambda: in_one_process(folder),
            "pipedist, 1 worker": lambda: with_pipedist(folder, 1),
            "pipedist, 2 workers": lambda: with_pipedist(folder, 2),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        results = set()
        for _ in range(given.rounds):
            for way, run in ways.items():
                began, used = time.perf_counter(), cpu_seconds()
                results.add(run())
                seconds[way].append(time.perf_counter() - began)
                cpu[way].append(cpu_seconds() - used)
    assert len(results) == 1, f"the ways differ: {results}"
    base = statistics.median(seconds["Pillow in one process"])
    print(
        f"{given.images} JPEG files of {SIDE} x {SIDE}, resized to {SIZE[0]} x {SIZE[1]}; median of {given.rounds}"
    )
    for way, each in seconds.items():
        median, used = statistics.median(each), statistics.median(cpu[way])
        rate = given.images / median
        print(f"{way:24} {median:6.2f} s {used:6.2f} s CPU {rate:8.1f} images/s {base / median:5.2f}x")


if __name__ == "__main__":
    main()
