"""Ask a model, and score its answers."""

import re

import httpx
import numpy as np

import pipedist
from pipedist.combiners import by_key_moments


class Ask:
    """Asks one question at a time; made once per worker, so that connections are reused."""

    def __init__(self, url):
        self.url = url
        self.client = httpx.AsyncClient(timeout=10)

    async def __call__(self, question):
        reply = await self.client.post(self.url, json={"prompt": question["prompt"]})
        if reply.status_code in (429, 503):  # busy: worth another attempt, unlike a refusal
            raise pipedist.RetryAfter(float(reply.headers.get("Retry-After", 0.2)))
        reply.raise_for_status()
        answer = reply.json()["answer"]
        number = re.search(r"-?\d+", answer)
        correct = number is not None and number[0] == question["expected"]
        return {**question, "answer": answer, "correct": correct}


def by_category(rows):
    """Return the moments of right answers (1) and wrong ones (0), by category."""
    return by_key_moments.of(rows["category"], rows["correct"].astype(np.float64))
