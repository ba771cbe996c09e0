"""Measure the jobs: items per second on 2 workers, and the lines of user code."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import multiprocessing
import random
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adapter import Adapter, Unsupported
from benchmarks.apps import plain
from benchmarks.sizes import Sizes
from benchmarks.workload import Measured, Workload, check, timed

MODULES = {
    "Pipedist": "with_pipedist",
    "Joblib": "with_joblib",
    "Dask": "with_dask",
    "RayData": "with_ray_data",
    "SingleProcess": "plain",
}
ANSWER_AFTER_S = 0.02
"""How long the HTTP server takes for an answer."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job on files.

    Args:
        make: writes file `number` of the data to a folder.
        files: number of files at full size, and items in each.
    """

    make: Callable[[Path, int], None]
    files: int
    items: int


def _batch(folder: Path, number: int) -> None:
    numbers = np.random.default_rng(number).integers(0, 256, (64, 2048), dtype=np.int32)
    np.save(folder / f"{number:05}.npy", numbers)


def _image(folder: Path, number: int) -> None:
    from PIL import Image

    coarse = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((640, 480)).save(folder / f"{number:05}.jpg", quality=90)


def _text(folder: Path, number: int) -> None:
    draw = random.Random(number)
    vocabulary = random.Random(0)
    known = ["".join(vocabulary.choices(string.ascii_lowercase, k=2 + k % 9)) for k in range(50_000)]
    with (folder / f"{number:05}.txt").open("w") as file:
        for _ in range(20_000):  # Zipf's law, more or less
            file.write(" ".join(known[int(50_000 ** draw.random()) - 1] for _ in range(12)) + "\n")


JOBS = {"onnx": Job(_batch, 48, 64), "images": Job(_image, 1_500, 1), "words": Job(_text, 24, 20_000)}


def make(name: str, data: Path, *, smoke: bool) -> Path:
    """Return the folder with the data of a job, and the expected result; made if it is not there."""
    job = JOBS[name]
    files = 4 if smoke else job.files
    folder = data / f"app-{name}-{files}"
    if not (folder / "expected.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(files):
            job.make(folder, number)
        (folder / "expected.json").write_text(
            json.dumps(_plain(getattr(plain, name)(folder)), sort_keys=True)
        )
    return folder


def _plain(result: Any) -> Any:
    return dict(result) if isinstance(result, Mapping) else np.asarray(result).tolist()


def lines_of(function: Callable[..., Any]) -> int:
    """Count the lines of code of a function, without blank ones, comments and its docstring."""
    lines = [line.strip() for line in inspect.getsource(function).splitlines()]
    return sum(1 for line in lines if line and not line.startswith(("#", '"""')))


def _answers(system: Adapter, name: str) -> tuple[Callable[..., Any], int]:
    """Return how a system does a job, and its lines of user code."""
    module = MODULES.get(type(system).__name__)
    if module is None:
        raise Unsupported
    function = getattr(importlib.import_module(f"benchmarks.apps.{module}"), name)
    lines = lines_of(function)
    if module == "with_ray_data" and name == "onnx":
        lines += lines_of(importlib.import_module("benchmarks.apps.with_ray_data").Classify)
    run_spec = getattr(system, "run_spec", None)
    if run_spec is None:
        return function, lines
    return lambda *args: run_spec(function(*args))["result"], lines


def _on_files(name: str) -> Callable[[Adapter, Sizes, Path], Measured]:
    def measure(system: Adapter, sizes: Sizes, data: Path) -> Measured:
        answer, lines = _answers(system, name)
        answer(make(name, data, smoke=True))  # imports, connections, models
        folder = make(name, data, smoke=sizes != Sizes())
        seconds, found = timed(lambda: answer(folder))
        check(_plain(found) == json.loads((folder / "expected.json").read_text()), "the result is wrong")
        items = JOBS[name].items * len([path for path in folder.iterdir() if path.suffix != ".json"])
        return Measured(items / seconds, {"seconds": seconds, "lines of user code": lines})

    return measure


# -- requests --------------------------------------------------------------------------------------


async def _reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = head.split(b" ", 2)[1].rpartition(b"/")[2]
            await asyncio.sleep(ANSWER_AFTER_S)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
    writer.close()


def _serve(ready: Connection) -> None:
    async def main() -> None:
        server = await asyncio.start_server(_reply, "127.0.0.1", 0, backlog=256)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Serve in a process of its own; the URL plus "/N" answers N."""
    mine, its = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(its,), daemon=True)
    process.start()
    its.close()  # so that `recv` fails if the server does
    try:
        yield f"http://127.0.0.1:{mine.recv()}"
    finally:
        process.terminate()
        process.join()


def _http(system: Adapter, sizes: Sizes, _data: Path) -> Measured:
    answer, lines = _answers(system, "http")
    count, first = (3_000, 1_000) if sizes == Sizes() else (64, 64)
    with server() as url:
        answer(url, first)  # imports on both workers: pipedist has one call for 250 requests
        seconds, found = timed(lambda: answer(url, count))
    check(_plain(found) == list(range(count)), "the answers are wrong")
    return Measured(count / seconds, {"seconds": seconds, "lines of user code": lines})


APPS = {
    "A-onnx": Workload("ONNX inference, 3,072 vectors of 2,048 integers", "items/s", True, _on_files("onnx")),
    "A-images": Workload("1,500 JPEG images decoded, histograms", "images/s", True, _on_files("images")),
    "A-words": Workload("words of 480,000 lines counted", "lines/s", True, _on_files("words")),
    "A-http": Workload("3,000 requests of 20 ms, 64 at a time", "requests/s", True, _http),
}
