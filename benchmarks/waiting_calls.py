"""Calls that wait for a server: pipedist beside a plain asyncio client with a semaphore and the same retries.

The server is a process of its own. It answers after 50 to 500 ms; 2 % of the requests get an error, 1 % a "429" with
a time to wait, and 0.5 % hang. The faults depend on the prompt and the attempt, so they are the same for both.

    python -m benchmarks.waiting_calls --prompts 2000 --concurrency 64 --workers 4
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.connection
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pipedist
from pipedist.protocol.program import StageProgram

TIMEOUT_S = 2.0
ATTEMPTS = 5
BACKOFF_S = 0.2
RETRY_AFTER_S = 0.5
LATENCY_S = (0.05, 0.5)


# -- the server --------------------------------------------------------------------------


def serve(pipe: multiprocessing.connection.Connection, speedup: float) -> None:
    """Send the port through the pipe, and answer until the process is killed."""
    attempts: Counter[tuple[str, str]] = Counter()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client, prompt = (await reader.readline()).decode().split()
        attempts[client, prompt] += 1
        random = Random(f"{prompt} {attempts[client, prompt]}")
        fate = random.random()
        await asyncio.sleep(random.uniform(*LATENCY_S) / speedup)
        if fate < 0.005:
            await asyncio.sleep(3600)
        status = "429" if fate < 0.015 else "500" if fate < 0.035 else "200"
        writer.write(f"{status} {prompt[::-1]}\n".encode())
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


# -- the function, the same for both -----------------------------------------------------


async def ask(prompt: Any, client: str, port: int) -> str:
    """Ask the server about one prompt."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{client} {prompt}\n".encode())
        status, answer = (await reader.readline()).decode().split()
    finally:
        writer.close()
    if status == "429":
        raise pipedist.RetryAfter(RETRY_AFTER_S)
    if status != "200":
        raise ConnectionError(f"status {status}")
    return answer


async def plain(prompts: list[str], concurrency: int, port: int, timeout_s: float) -> list[str]:
    """Ask with one process and a semaphore."""
    from pipedist.worker.waiting_calls import pause_s

    stage = StageProgram("y", None, -1, {}, attempts=ATTEMPTS, backoff_s=BACKOFF_S)  # type: ignore[arg-type]
    places = asyncio.Semaphore(concurrency)

    async def one(prompt: str) -> str:
        async with places:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    async with asyncio.timeout(timeout_s):
                        return await ask(prompt, "plain", port)
                except Exception as error:
                    rest_s = pause_s(stage, error, attempt, (prompt,))
                    if rest_s is None:
                        raise
                await asyncio.sleep(rest_s)
        raise AssertionError("unreachable")

    return list(await asyncio.gather(*map(one, prompts)))


async def with_pipedist(
    prompts: Path, count: int, concurrency: int, port: int, timeout_s: float, workers: int, batch: int
) -> tuple[list[str], float]:
    spec = {
        "pipedist": 1,
        "dataset": {"text": {"path": str(prompts)}, "batch": batch},
        "stages": {
            "y": {
                "run": "benchmarks.waiting_calls:ask",
                "with": {"client": "pipedist", "port": port},
                "per": "element",
                "concurrency": concurrency,
                "timeout_s": timeout_s,
                "retry": {"attempts": ATTEMPTS, "backoff_s": BACKOFF_S},
            },
            "answers": {"gather": 0, "of": "y"},
        },
        "outputs": {"answers": "answers.jsonl"},
    }
    async with pipedist.LocalCluster(workers=workers) as cluster:
        warm_up = {**spec, "dataset": {"range": 4 * workers, "batch": 1}, "outputs": {}}
        async with pipedist.open(warm_up, cluster=cluster) as run:  # the workers have started
            await run.results()
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            async with pipedist.open(spec, cluster=cluster, output=Path(folder) / "out") as run:
                result = await run.results()
                took_s = time.monotonic() - began
                lines = Path(result.files["answers"]).read_text().splitlines()  # noqa: ASYNC240 - after the time
    return lines, took_s


def measure(
    count: int, concurrency: int, workers: int, *, batch: int, speedup: float = 1.0
) -> dict[str, float]:
    """Return the answers per second of both, and their ratio."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve, args=(there, speedup), daemon=True)
    server.start()
    try:
        port = here.recv()
        prompts = [f"prompt-{number}" for number in range(count)]
        began = time.monotonic()
        expected = asyncio.run(plain(prompts, concurrency, port, TIMEOUT_S))
        plain_s = time.monotonic() - began
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prompts.txt"
            path.write_text("\n".join(prompts) + "\n")
            lines, pipedist_s = asyncio.run(
                with_pipedist(path, count, concurrency, port, TIMEOUT_S, workers, batch)
            )
    finally:
        server.kill()
        server.join()
    if [answer in line for answer, line in zip(expected, lines, strict=True)] != [True] * count:
        raise AssertionError("the answers differ")
    rates = {"plain asyncio": count / plain_s, "pipedist": count / pipedist_s}
    return {**rates, "ratio": rates["pipedist"] / rates["plain asyncio"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=50)
    given = parser.parse_args()
    rates = measure(given.prompts, given.concurrency, given.workers, batch=given.batch)
    print(
        f"{given.prompts:,} prompts, {given.concurrency} at once, {given.workers} workers: "
        f"plain asyncio {rates['plain asyncio']:.1f}/s, pipedist {rates['pipedist']:.1f}/s, "
        f"ratio {rates['ratio']:.3f}"
    )


if __name__ == "__main__":
    main()
