"""The work itself, the same for every system."""

from __future__ import annotations

import asyncio
import functools
import io
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

WORD = re.compile(r"[a-z]+")
AT_ONCE = 64
"""Requests in flight, over all workers."""


class Network:
    """A neural network of 2,048 integers in, and a label out, with one thread (the model of the package magika)."""

    def __init__(self) -> None:
        import magika
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        folder = Path(magika.__file__).parent / "models"
        self.session = onnxruntime.InferenceSession(str(next(folder.glob("*/model.onnx"))), options)
        self.input = self.session.get_inputs()[0].name

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        """Return int64[n], the labels of int32[n, 2048]."""
        scores: np.ndarray = self.session.run(None, {self.input: batch})[0]
        return np.argmax(scores, axis=1)


network = functools.cache(Network)
"""Returns the network of this process."""


def labels_of_file(path: Path) -> np.ndarray:
    """Return the labels of one `.npy` file."""
    return network()(np.load(path))


def histogram(data: bytes) -> np.ndarray:
    """Return int64[3, 16], the histograms of the three colours of a JPEG image at half its size."""
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    pixels = np.asarray(image.resize((image.width // 2, image.height // 2)))
    return np.stack([np.bincount(pixels[..., k].ravel() >> 4, minlength=16) for k in range(3)])


def histogram_of_file(path: Path) -> np.ndarray:
    """Return the histograms of one image."""
    return histogram(path.read_bytes())


def count_words(lines: Iterable[str]) -> Counter[str]:
    """Count the words of lines."""
    return Counter(word for line in lines for word in WORD.findall(line))


def count_words_of_file(path: Path) -> Counter[str]:
    """Count the words of a file."""
    with path.open() as lines:
        return count_words(lines)


@functools.cache
def client(_loop: asyncio.AbstractEventLoop | None) -> Any:
    """Return the HTTP client of an event loop."""
    import httpx

    return httpx.AsyncClient(limits=httpx.Limits(max_connections=AT_ONCE), timeout=30)


async def ask(url: str, number: int) -> int:
    """Send one request, and return the number of its answer."""
    reply = await client(asyncio.get_running_loop()).get(f"{url}/{number}")
    return int(reply.text)


async def ask_all(url: str, numbers: Iterable[int], at_once: int) -> list[int]:
    """Send requests, `at_once` at a time, in one process."""
    limit = asyncio.Semaphore(at_once)

    async def one(number: int) -> int:
        async with limit:
            return await ask(url, int(number))

    return await asyncio.gather(*map(one, numbers))


def ask_batch(url: str, numbers: Iterable[int]) -> list[int]:
    """Send the requests of a batch, half of `AT_ONCE` at a time: there are two workers."""
    return asyncio.run(ask_all(url, numbers, AT_ONCE // 2))
